"""The model of sums, doubts and fences, checked whole; and each mistake in it is found."""

from __future__ import annotations

import pytest

from tests.support.failover_model import Contradiction, Model, check

MISTAKES = (
    "sums before the fence",
    "asked while rows are out",
    "doubts forgotten",
    "judged rows not counted",
    "what is out comes in",
    "partial doubt is guessed",
)


def test_the_protocol_keeps_its_promises() -> None:
    """A count that is short or reached twice in a model of ten lines is one in the engine."""
    assert 15_000 < check(Model(transfers=2, rows=1, cuts=2))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    """A model in which nothing can go wrong proves nothing."""
    with pytest.raises(Contradiction, match="; "):
        check(Model(transfers=2, rows=1, cuts=2, mistakes=frozenset({mistake})))


def test_late_questions_shut_a_path_and_break_no_count() -> None:
    """A copy of an old question that is not dropped costs a failover, and nothing else: the engine
    drops it (`Fencing.is_outdated`) for the time that this takes.
    """
    check(Model(transfers=2, rows=1, cuts=2, mistakes=frozenset({"late questions count"})))


@pytest.mark.long
@pytest.mark.parametrize(
    "model",
    [
        Model(transfers=2, rows=1, cuts=2, losses=2, copies=2, cancels=2),
        Model(transfers=2, rows=2, cuts=2),
        Model(transfers=3, rows=1, cuts=2),
        Model(transfers=2, rows=3, cuts=2, cancels=2),
    ],
    ids=str,
)
def test_the_protocol_keeps_its_promises_with_more(model: Model) -> None:
    """More rows, more transfers and more that gets lost: a hundred thousand states and more."""
    assert 100_000 < check(model)

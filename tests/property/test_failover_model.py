"""The model of sums, fences and burnt immediates, checked whole; each mistake in it is found."""

from __future__ import annotations

import pytest

from tests.support.failover_model import Contradiction, Model, check

MISTAKES = (
    "sums before the fence",
    "asked while rows are out",
    "failed rows forgotten",
    "judged rows not counted",
    "what is out comes in",
    "partial sums are guessed",
    "cancels burn nothing",
    "notices are sent once",
    "late expectations wait",
)


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [1, 2])
def test_the_protocol_keeps_its_promises(cuts: int) -> None:
    """A count that is short or reached twice in a model of ten lines is one in the engine."""
    assert 35_000 < check(Model(transfers=2, rows=1, cuts=cuts))


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    """A model in which nothing can go wrong proves nothing."""
    calm = {"losses": 0, "copies": 0, "cancels": 0} if mistake == "judged rows not counted" else {}
    with pytest.raises(Contradiction, match="; "):
        check(Model(rows=1, cuts=2 if calm else 1, mistakes=frozenset({mistake}), **calm))


@pytest.mark.slow
def test_late_questions_shut_a_path_and_break_no_count() -> None:
    """A copy of an old question that is not dropped costs a failover, and nothing else: the engine
    drops it (`Fencing.is_outdated`) for the time that this takes.
    """
    check(Model(transfers=2, rows=1, cuts=1, mistakes=frozenset({"late questions count"})))


@pytest.mark.long
@pytest.mark.parametrize(
    "model",
    [
        Model(transfers=2, rows=1, cuts=2, losses=2, copies=2, cancels=2),
        Model(transfers=2, rows=2, cuts=2),
        Model(transfers=3, rows=1, cuts=1),
        Model(transfers=2, rows=3, cuts=1, cancels=2),
    ],
    ids=str,
)
def test_the_protocol_keeps_its_promises_with_more(model: Model) -> None:
    """More rows, more transfers and more that gets lost: up to 1.5 million states."""
    assert 200_000 < check(model)

"""Tiny scenarios in every order: what seeds may miss, an enumeration cannot."""

from __future__ import annotations

import pytest

from tep.sim.faults import Chaos, KillNic
from tep.testing.case import Violation
from tests.gate.planted import planted
from tests.world.explore import Choices, explore, replay_path
from tests.world.scenario import Scenario
from tests.world.specs import TransferSpec


def tiny(pages: int, nics: int, *faults: KillNic) -> Scenario:
    """One paged write on a tame fabric; faults may come at any moment."""
    return Scenario(
        nics=(nics, nics, 1),
        transfers=(TransferSpec(kind="paged", size=8, pages=pages),),
        chaos=Chaos.calm(),
        faults=tuple((1, fault) for fault in faults),
    )


def test_choices_go_through_the_whole_tree() -> None:
    """A path that is left out is an order that nobody has looked at."""
    choices, found = Choices(), []
    while True:
        first = choices.pick(3)
        found.append((first, *((choices.pick(2),) if first != 1 else ())))
        if not choices.next():
            break

    assert [(0, 0), (0, 1), (1,), (2, 0), (2, 1)] == found


@pytest.mark.parametrize(
    ("pages", "nics", "orders"), [(1, 1, 4), (2, 1, 36), (2, 2, 36), (3, 2, 720)]
)
def test_every_order_of_a_few_rows(pages: int, nics: int, orders: int) -> None:
    """Landings and acknowledgements in every order: the count fires once, with all bytes there."""
    found = explore(tiny(pages, nics))

    assert found.whole
    assert orders == found.runs
    assert {(("done",),): orders} == found.ends


@pytest.mark.parametrize("node", ["a", "b"])
def test_orders_around_a_death(node: str) -> None:
    """A NIC dies between any two events, and the other makes it good: always done."""
    found = explore(tiny(1, 2, KillNic(node, 0)), runs_max=600)

    assert {(("done",),): found.runs} == found.ends


@pytest.mark.long
@pytest.mark.parametrize(("pages", "node"), [(1, "a"), (1, "b"), (2, "a"), (2, "b")])
def test_every_order_around_a_death(pages: int, node: str) -> None:
    """The same to its end for one row. For two the first 20,000 orders: nobody knows how many more
    there are; `tests.property.test_failover_orders` goes through all of two and three rows, on a
    fabric where less can happen.
    """
    found = explore(tiny(pages, 2, KillNic(node, 0)), runs_max=20_000)

    assert {(("done",),): found.runs} == found.ends
    assert found.whole or pages > 1


def test_a_planted_bug_is_found_and_its_order_replays() -> None:
    """An exploration that finds nothing in a wrong engine is no proof of a right one."""
    with planted("imm_on_last_only"):
        with pytest.raises(Violation, match=r"replay: tests\.world\.explore\.replay_path") as found:
            explore(tiny(2, 1))
        path = eval(str(found.value).rpartition("), ")[2].rstrip(")") + ")")  # noqa: S307  # ours
        with pytest.raises(Violation) as again:
            replay_path(tiny(2, 1), path)

    assert str(again.value).splitlines()[0] == str(found.value).splitlines()[0]

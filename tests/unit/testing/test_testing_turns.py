"""Turns by hand: each way to keep somebody waiting is seen, and none that is right."""

from __future__ import annotations

import pytest

from tests.world.turns import Turns


class Who:
    """Somebody whose rows wait."""

    def __init__(self, failed: int = 0, why: str = "") -> None:
        self.failed = failed
        self.why = why

    def is_failing(self) -> bool:
        return False

    def may_post(self) -> str:
        return self.why


def played(*steps: tuple[object, ...], nics: int = 1, who: Who | None = None) -> str:
    """Return the fault in these steps, on NICs of 4 rows, in turns of 2; "" if there is none.

    "submit" submits batch 1; batches 2 and 3 belong to others.
    """
    wrong: list[str] = []
    turns = Turns(nics, 2, 4, wrong.append)
    somebody, others = who or Who(), Who()
    for what, *args in steps:
        if what == "submit":
            turns.submitted(somebody)
        elif what == "offer":
            nic, ctx, taken, left = args
            turns.offered(nic, somebody if ctx == 1 else others, ctx, taken, left)
        else:
            getattr(turns, what)(*args)
    return wrong[0].partition(" <")[0] if wrong else ""


WAITS = ("offer", 0, 1, 1, 3)
OTHER = ("offer", 0, 2, 1, 9)
FULL = ("stepped", 0, 4)
ROOM = ("stepped", 0, 3)


@pytest.mark.parametrize(
    ("steps", "finding"),
    [
        ([WAITS, OTHER, WAITS, OTHER, FULL], ""),
        ([WAITS, OTHER, FULL, OTHER, FULL], "NIC 0 served batch 2 twice while"),
        ([WAITS, OTHER, ("offer", 0, 3, 1, 9), ROOM], ""),
        ([WAITS, OTHER, ("forget",), OTHER, FULL], ""),
        ([WAITS, ("offer", 0, 2, 0, 9), OTHER, FULL], ""),
        ([WAITS, ("offer", 0, 2, 3, 9)], "NIC 0 took 3 rows of one batch while others waited"),
        ([("offer", 0, 2, 3, 9)], ""),
        ([WAITS, OTHER, ROOM, OTHER, ROOM], "NIC 0 served batch 2 twice while"),
        ([WAITS, ROOM, ROOM], "NIC 0 has room, and was not offered"),
        ([WAITS, ROOM, FULL], ""),
        ([("submit",), OTHER, FULL], ""),
        ([("submit",), OTHER, FULL, OTHER], "every NIC served others twice before any was offered"),
        ([("submit",), ROOM], "every NIC has room, and none was offered"),
        ([("submit",), WAITS, ROOM], ""),
        ([("submit",), ("lost", 0), ROOM], ""),
    ],
)
def test_who_waits_for_whom(steps: list[tuple[object, ...]], finding: str) -> None:
    """A rule that is never broken by hand would never be broken by an engine either."""
    assert finding == played(*steps)


def test_who_was_never_offered_waits_at_one_of_many_nics() -> None:
    """The engine chooses the NIC: a batch is overlooked only if all NICs have passed it over."""
    passed = [("submit",), OTHER, OTHER]
    assert "" == played(*passed, nics=2)
    assert played(*passed, ("offer", 1, 3, 1, 9), ("offer", 1, 3, 1, 8), nics=2)
    assert "" == played(("submit",), ROOM, ("stepped", 1, 4), nics=2)
    assert played(("submit",), ROOM, ("stepped", 1, 0), nics=2)
    assert played(("submit",), ("lost", 1), ("submit",), *passed[1:], nics=2)


@pytest.mark.parametrize("who", [Who(failed=1), Who(why="it was cancelled")])
def test_who_gave_up_waits_for_nothing(who: Who) -> None:
    """Its rows were taken out of the queues, and nobody can see that from outside."""
    last = ("offer", 0, 2, 1, 0)
    assert "" == played(WAITS, OTHER, FULL, last, ROOM, ROOM, who=who)
    assert played(WAITS, OTHER, FULL, last, ROOM, ROOM)
    assert "" == played(("submit",), OTHER, OTHER, ROOM, who=who)

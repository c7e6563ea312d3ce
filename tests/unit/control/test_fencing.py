"""The receiver's half of a failover alone: what it remembers of paths, and for how long."""

from __future__ import annotations

from unittest import mock

import pytest

from tep.base.errors import FabricError
from tep.control import failover as fences
from tep.control.channel import Channel
from tep.control.failover import Fencing
from tep.control.messages import FenceOff, Prune, Reopen
from tests.support.inside import link_of, worker_of
from tests.support.orders import Fabric, Nic
from tests.world.explore import Choices


def receiver() -> Fencing:
    """Make the fencing state of an engine with one NIC, without any fence."""
    return worker_of(Fabric(Choices(), (1, 1), ()).engines[1]).fencing


def admitted(fencing: Fencing, source: bytes) -> bool:
    return fencing.admit(0, source, FenceOff(5, source, 0, ()))


def test_paths_of_a_removed_nic_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer whose NICs come and go would be refused one day, and lose its failover."""
    monkeypatch.setattr(fences, "NICS_MAX", 2)
    fencing = receiver()
    assert [True, True, False] == [admitted(fencing, at) for at in (b"a/0", b"a/1", b"a/2")]
    fencing.forget([b"a/0"])
    assert [True, False] == [admitted(fencing, at) for at in (b"a/2", b"a/3")]


def test_beyond_the_bound_the_first_engine_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its late copies count as new; were nobody forgotten, peers would fill the memory."""
    monkeypatch.setattr(fences, "_PATHS_MAX", 2)
    fencing = receiver()

    def late(source: bytes) -> bool:
        return fencing.is_outdated(Reopen(3, source, 0))

    for source in (b"a/0", b"c/0"):
        assert admitted(fencing, source)
        assert not fencing.is_outdated(FenceOff(5, source, 0, ()))
    assert (True, True) == (late(b"a/0"), late(b"c/0"))
    assert admitted(fencing, b"d/0")
    assert (False, True) == (late(b"a/0"), late(b"c/0"))


def test_who_asks_about_a_nic_that_is_not_there_learns_which_are() -> None:
    """The operator would look for a fault at a NIC that is as it should be."""
    fencing = worker_of(Fabric(Choices(), (1, 2), ()).engines[1]).fencing
    with mock.patch.object(Channel, "tell") as tell:
        assert [True, True, False] == [
            fencing.admit(0, b"a/0", FenceOff(5, b"a/0", nic, ())) for nic in (0, 1, 2)
        ]
    tell.assert_called_once_with(0, b"a/0", 5, "it has NICs 0 to 1, and was asked about NIC 2")


def test_a_path_that_its_nic_does_not_open_stays_shut() -> None:
    """Its sender is told why; else it hears nothing, and asks for ever."""
    fencing = receiver()
    refusal = FabricError("not today", code="PROVIDER")
    with mock.patch.object(Nic, "unfence", side_effect=refusal):
        assert "not today" in str(fencing.lift(b"a/0", 0))
    assert fencing.lift(b"a/0", 0) is None


@pytest.mark.parametrize(
    ("nic", "fenced", "why"),
    [
        (0, False, "generation 0 was pruned last, 9 cannot follow"),
        (0, True, "this path is fenced off"),
        (1, False, "it counts no immediates at a NIC 1"),
    ],
)
def test_why_sums_are_not_pruned_is_answered(nic: int, fenced: bool, why: str) -> None:
    """Sums of a fenced path are being compared; and who hears nothing asks again and again."""
    fabric = Fabric(Choices(), (1, 1), ())
    a, b = fabric.engines
    if fenced:
        worker_of(b).fencing.fence(b"a/0", 0, lambda _: None)
    link, answers = link_of(a, b), []
    worker_of(a).channel.ask(
        link, lambda n: Prune(n, b"a/0", nic, 9, ((7, 1, 1),)), answers.append, pytest.fail
    )
    fabric.run()
    assert [why] == [answer.why for answer in answers]

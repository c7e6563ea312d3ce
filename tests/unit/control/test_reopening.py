"""When a path that was fenced off is asked for, and when a receiver agrees to open it."""

from __future__ import annotations

from unittest import mock

import pytest

from tep.base.wire import NetAddr
from tep.control.failover import Reopening
from tep.control.messages import Answer, Reopen
from tep.core.path import Link, Path, PathEvent, PathState

UP, SUSPECT, FENCED = PathState.UP, PathState.SUSPECT, PathState.FENCED

HOW = {
    UP: (),
    SUSPECT: (PathEvent.LOST,),
    FENCED: (PathEvent.LOST, PathEvent.ASKED, PathEvent.FENCED),
}
"""The events that bring a path into each state."""


class End:
    """One end of a path: its state, and what it asks and answers.

    Args:
        clear: whether the path has no row in flight and none to settle.
    """

    def __init__(self, *, state: PathState = UP, clear: bool = True) -> None:
        self.group = mock.Mock(alive=[True, False], domains=[mock.Mock(address=b"a")])
        self.group.reopen = lambda path: path.to(PathEvent.OPENED)
        self.failover = mock.Mock(**{"is_clear.return_value": clear})
        self.fencing = mock.Mock(**{"is_outdated.return_value": False, "lift.return_value": None})
        self.channel = mock.Mock()
        self.opened: list[Path] = []
        self.busy: list[Path] = []
        addr = NetAddr("sim", "b", 1, (b"b",), (0,))
        self.link = Link(addr, (mock.Mock(), mock.Mock()))
        self.path = self.link.path(0, 0)
        for event in HOW[state]:
            self.path.to(event)
        find = {b"b": self.link}.get
        parts = self.group, self.channel, self.failover, self.fencing
        self.reopening = Reopening(*parts, find, self.opened.append, self.busy.append)

    def asked(self) -> str:
        """Return the request of begin() to the peer: to fence, to open, or nothing."""
        self.reopening.begin(self.path)
        what = ["fence"] * self.failover.fence.called + ["open"] * self.channel.ask.called
        return " and ".join(what)

    def answer(self, why: str | None) -> None:
        """The peer agrees (""), says why not, or is silent (None)."""
        _link, _make, told, lost = self.channel.ask.call_args.args
        if why is None:
            lost("no answer")
        else:
            told(Answer(1, why, (), 0))

    def heard(self, source: bytes, nic: int) -> str | None:
        """Return its answer to a peer that wants to use a path again."""
        self.reopening._asked(0, source, Reopen(1, source, nic))
        return self.channel.tell.call_args.args[3]


@pytest.mark.parametrize(
    ("state", "clear", "asked"),
    [
        (UP, True, ""),
        (SUSPECT, True, "fence"),
        (SUSPECT, False, ""),
        (FENCED, True, "open"),
        (FENCED, False, ""),
    ],
)
def test_what_a_sender_asks(state: PathState, *, clear: bool, asked: str) -> None:
    """A row in flight may land after the fence is lifted, and be counted for a later one."""
    end = End(state=state, clear=clear)
    assert asked == end.asked()
    assert [end.path] * (not clear) == end.busy, "the path is asked about again soon"


def test_a_sender_asks_one_thing_at_a_time_and_for_what_it_can_use() -> None:
    """Two questions about a path may be answered in any order."""
    end = End(state=FENCED)
    end.path.asking = True
    assert "" == end.asked()
    end.path.asking = False
    end.group.alive[0] = False
    assert "" == end.asked()
    end.group.alive[0], end.link.current = True, False
    assert "" == end.asked()
    end.link.current = True
    assert "open" == end.asked()
    assert (True, PathState.REOPENING) == (end.path.asking, end.path.state)


@pytest.mark.parametrize(("clear", "asked"), [(True, "fence and open"), (False, "fence")])
def test_a_path_that_was_fenced_late_is_asked_for(*, clear: bool, asked: str) -> None:
    """Rows may have been lost on it meanwhile: they are settled first."""
    end = End(state=SUSPECT)
    assert "fence" == end.asked()
    path, then = end.failover.fence.call_args.args
    assert path is end.path
    for event in (PathEvent.ASKED, PathEvent.FENCED):
        path.to(event)
    end.failover.is_clear.return_value = clear
    then()
    assert asked == " and ".join(["fence"] + ["open"] * end.channel.ask.called)


@pytest.mark.parametrize(
    ("why", "clear", "lost", "state"),
    [
        ("", True, False, UP),
        ("", False, False, FENCED),
        ("", True, True, FENCED),
        ("not now", True, False, FENCED),
        (None, True, False, FENCED),
    ],
)
def test_what_an_answer_means(
    why: str | None, *, clear: bool, lost: bool, state: PathState
) -> None:
    """A path in use that its receiver keeps shut loses every row."""
    end = End(state=FENCED)
    end.asked()
    if lost:
        end.path.to(PathEvent.LOST)
    end.failover.is_clear.return_value = clear
    end.answer(why)
    assert (state, False) == (end.path.state, end.path.asking)
    assert [end.path] * (state is UP) == end.opened
    assert [end.path] * (not clear) == end.busy
    assert (state is UP) == end.fencing.lift.called, "our fence against the other direction"


@pytest.mark.parametrize(
    ("source", "nic", "state", "clear", "why"),
    [
        (b"b", 0, UP, True, None),
        (b"b", 0, UP, False, None),
        (b"b", 0, FENCED, True, None),
        (b"b", 0, FENCED, False, "rows that it lost in the other direction are not settled yet"),
        (b"b", 1, UP, True, "its NIC 1 is down"),
        (b"c", 0, UP, True, None),
    ],
)
def test_what_a_receiver_answers(
    source: bytes, nic: int, state: PathState, *, clear: bool, why: str | None
) -> None:
    """NICs may use one connection for both directions: a fence that is lifted opens both."""
    end = End(state=state, clear=clear)
    assert why == end.heard(source, nic)
    assert (why is None) == end.fencing.lift.called

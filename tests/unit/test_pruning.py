"""Pruning asks a peer that does not answer less and less often."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

from tep.control.pruning import Pruning
from tep.core.sums import PathSums


def test_a_peer_that_does_not_answer_is_asked_less_and_less_often() -> None:
    """It was asked a hundred times a second for ever, over all paths to it.

    Found by a search of drawn runs, which had no end.
    """
    lost: list[Callable[[str], None]] = []
    clock_s = 0.0
    sums = PathSums()
    sums.sent.add(7, 3)
    path = mock.Mock(sums=sums, domain=0, nic=0)
    channel = mock.Mock(control_bytes=340)
    channel.ask = lambda _link, _make, _told, gone: lost.append(gone)
    group = mock.Mock(acks=mock.Mock(large={path: None}), domains=[mock.Mock()])
    pruning = Pruning(group, channel, lambda: clock_s)
    asked_s = []
    while clock_s < 600:
        if pruning.step():
            asked_s.append(clock_s)
            lost.pop()("nobody is there")
        clock_s += 0.01
    assert len(asked_s) < 30

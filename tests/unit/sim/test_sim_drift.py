"""Clocks of two engines that run apart: what is measured by one of them must not need the other."""

from __future__ import annotations

import pytest

from tep.base.units import PS_PER_US
from tep.control.channel import Channel
from tep.control.membership import PeerChange
from tep.control.messages import Pong
from tep.sim import Cluster, Drift
from tep.sim.faults import DRIFTS, Chaos

EVERY_S, LOST_S = 2e-6, 20e-6


def told(node: str, ppm: int, ahead_us: float) -> list[PeerChange]:
    """Return the events of an engine that watches another one, which dies at 200 us."""
    found: list[PeerChange] = []
    with Cluster(2, 1, chaos=Chaos.calm(dead_after_ps=300_000)) as cluster:
        watcher, peer = cluster.engines
        watcher.on_peer(lambda event: found.append(event.kind))
        watch = watcher.watch_peer(peer.main_address, every_s=EVERY_S, lost_after_s=LOST_S)
        cluster.at(50, Drift(node, ppm, round(ahead_us * PS_PER_US)))
        cluster.env.run_until(lambda: cluster.now_us > 200)
        assert [] == found
        assert (watch.round_trip_s or 0) > 0
        cluster.kill_nic(peer.name, 0)
        cluster.env.run_until(lambda: cluster.now_us > 400 or bool(found))
        watch.close()
    return found


@pytest.mark.parametrize("ppm", DRIFTS)
@pytest.mark.parametrize("ahead_us", [0, 1000])
@pytest.mark.parametrize("node", ["a", "b"])
def test_f30_a_heartbeat_needs_no_clock_of_the_peer(node: str, ahead_us: float, ppm: int) -> None:
    """A peer is lost when it does not answer, and not when its clock differs."""
    assert told(node, ppm, ahead_us)[-1:] == [PeerChange.LOST]


def test_f30_a_clock_that_differs_shows_who_compares_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that names its sender's time is refused, and the living peer taken for lost."""
    answer = Channel.answer

    def own_time(self: Channel, nic: int, address: bytes, message: object) -> None:
        told = Pong(int(self._now_s() * 1e9)) if isinstance(message, Pong) else message
        answer(self, nic, address, told)

    monkeypatch.setattr(Channel, "answer", own_time)
    assert told("b", 0, 0)[-1:] == [PeerChange.LOST]
    with pytest.raises(AssertionError, match="LOST"):
        told("b", 0, 1000)

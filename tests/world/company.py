"""Node b as node a knows it: watched, lost and back, removed and met again.

Judges the events about it, and its removal. Rule 1: only what cannot be explained by anything that
happened is a finding; a peer may be called lost late, never twice, and never without a cause.
"""

from __future__ import annotations

from typing import Final

from tep.base.errors import ClosedError, FabricError
from tep.base.units import PS_PER_NS, PS_PER_S
from tep.control.membership import PeerChange, PeerEvent, PeerState, PeerWatch
from tep.core.handles import Handle
from tep.sim.faults import Clog, Drift, Fault, Mute, Pause
from tests.support.inside import peers_of
from tests.world.lab import Host
from tests.world.specs import RECEIVERS, SENDER
from tests.world.stage import Stage

_EVERY_PS: Final = 20_000 * PS_PER_NS
_LOST_PS: Final = 5 * _EVERY_PS
_END_PS: Final = 500_000 * PS_PER_NS
_GONE_PS: Final = _END_PS - 2 * _LOST_PS
"""A peer that is gone at this time is known to be lost when the watch ends."""

_ENDS: Final = {
    PeerChange.LOST: PeerState.LOST,
    PeerChange.BACK: PeerState.ALIVE,
    PeerChange.RESTARTED: PeerState.RESTARTED,
}


class Company:
    """The events of node b that node a gets."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._events: list[PeerEvent] = []
        self._watch: PeerWatch | None = None
        self.host = stage.lab.hosts[RECEIVERS[0]]
        scenario, env = stage.scenario, stage.lab.env
        if scenario.watched or scenario.remove_ps is not None:
            stage.sender.engine.on_peer(self._heard)
        if scenario.watched:
            env.call_at(1, self._begin)
            env.call_at(_END_PS, self._end)
        if scenario.remove_ps is not None:
            env.call_at(scenario.remove_ps, self._remove)

    # ------------------------------------------------------------------ watching

    def _begin(self, _: object) -> None:
        sender = self._stage.sender
        times = {"every_s": _EVERY_PS / PS_PER_S, "lost_after_s": _LOST_PS / PS_PER_S}
        while self._watch is None and sender.live:
            before = sender.unconnected
            try:
                self._watch = sender.engine.watch_peer(self.host.desc.addr, **times)
            except FabricError:
                if sender.unconnected == before:
                    raise

    def _end(self, _: object) -> None:
        """The watch is over: by now whoever is gone is known to be."""
        watch, stage = self._watch, self._stage
        if watch is None or not stage.sender.live:
            return
        stage.seen[f"watched: {watch.state.value}"] += 1
        # A question to an incarnation that has ended says so by its error, if that comes in time.
        soon = stage.scenario.chaos.dead_after_ps < _LOST_PS
        soon &= any(tap.is_useful for tap in stage.sender.taps)
        restarted = stage.lab.hosts[self.host.name] is not self.host
        wrong = {PeerState.ALIVE, PeerState.LOST} if restarted and soon else {PeerState.ALIVE}
        if self._is_gone() and watch.state in wrong and not stage.removals:
            stage.blame(f"{self.host.name} is gone, and node {SENDER} takes it for alive")
        watch.close()
        stage.sender.engine.driver.kick()

    def _is_gone(self) -> bool:
        """Return True if the watched incarnation has ended, and nothing delayed its watcher."""
        at_ps = self._stage.gone.get(self.host.name)
        held_up = self._stage.scenario.chaos.pause_ps > 0
        held_up |= any(isinstance(f, Pause | Drift) for _, f in self._stage.scenario.faults)
        return at_ps is not None and at_ps < _GONE_PS and not held_up

    def _heard(self, event: PeerEvent) -> None:
        """One event a change: what is lost comes back before it is lost again."""
        stage = self._stage
        if (event.peer, event.epoch) != (self.host.name, self.host.desc.addr.epoch):
            return
        stage.seen[f"peer {event.kind.value}"] += 1
        mine = [old.kind for old in self._events if old.nic == event.nic]
        self._events.append(event)
        if event.nic is not None:
            due = PeerChange.NIC_BACK if mine[-1:] == [PeerChange.NIC_LOST] else PeerChange.NIC_LOST
            right = event.kind is due
        elif event.kind is PeerChange.RESTARTED:
            right = PeerChange.RESTARTED not in mine
        else:
            due = PeerChange.BACK if mine[-1:] == [PeerChange.LOST] else PeerChange.LOST
            right = event.kind is due
        if not right:
            stage.blame(f"node {SENDER} was told {event.kind.value} of {event.peer} after {mine}")
        if event.kind is PeerChange.LOST and not self._may_be_lost():
            stage.blame(f"{event.peer} was called lost without a cause: {event.reason}")

    def _may_be_lost(self) -> bool:
        """Return True if anything may have delayed the answers of all its NICs."""
        stage = self._stage
        chaos = stage.scenario.chaos
        calm = not (chaos.message_loss or chaos.pause_ps or chaos.odd_errors or chaos.connect_fails)
        if stage.closed or stage.barred or not calm or chaos.rnr_retries >= 0:
            return True
        others = {_where(fault) for fault in stage.broken if not _is_own_pause(fault)}
        one_nic = all(node == self.host.name and nic >= 0 for node, nic in others)
        return not (one_nic and len(others) < min(2, len(self.host.taps)))

    # ------------------------------------------------------------------ removing

    def _remove(self, _: object) -> None:
        stage = self._stage
        sender, host = stage.sender, stage.lab.hosts[RECEIVERS[0]]
        addr = host.desc.addr
        before: list[Handle] = [
            run.handle
            for run in stage.runs.values()
            if run.handle is not None and host in run.hosts and not run.handle.finished
        ]
        try:
            removal = sender.engine.remove_peer(addr)
        except ClosedError:
            if sender.live:
                stage.fail("an open engine does not remove a peer")
            return
        stage.removals[host.name] = removal
        if any(run.handle is not None and host in run.hosts for run in stage.runs.values()):
            stage.known.add(host)

        def removed(_: object) -> None:
            """All that referred to it has ended, and nothing of it is remembered."""
            if not sender.live:
                return
            stage.seen["removed"] += 1
            early = [handle.describe() for handle in before if not handle.finished]
            if early:
                stage.blame(f"{host.name} was removed before the end of {early[0]}")
            links = [remote.link.addr for remote in peers_of(sender.engine).remotes.values()]
            if not removal.ok or (host in stage.known and addr in links):
                stage.blame(f"{host.name} was removed, and is still known")
            self._events.clear()

        stage.forget(host)
        removal.add_done_callback(removed)

    # ------------------------------------------------------------------ judging

    def judge(self) -> None:
        """The last event says what the state is; who met a later incarnation was told so."""
        stage, watch = self._stage, self._watch
        if watch is None or stage.removals or not stage.sender.live:
            return
        kinds = [event.kind for event in self._events if event.nic is None]
        state = _ENDS[kinds[-1]] if kinds else PeerState.ALIVE
        if watch.state is not state:
            stage.blame(f"{self.host.name} is {watch.state.value}, and node {SENDER} heard {kinds}")
        taken = [run for run in stage.runs.values() if run.handle is not None]
        met_later = any(self._is_later(host) for run in taken for host in run.hosts)
        if met_later and state is not PeerState.RESTARTED:
            stage.blame(f"{self.host.name} has restarted, and is {watch.state.value}")

    def _is_later(self, host: Host) -> bool:
        return host.name == self.host.name and host is not self.host


def _is_own_pause(fault: Fault) -> bool:
    return isinstance(fault, Pause) and fault.node == SENDER


def _where(fault: Fault) -> tuple[str, int]:
    """The one NIC that a fault keeps from answering; number -1: it may be more."""
    return (fault.node, fault.nic) if isinstance(fault, Clog | Mute) else ("", -1)

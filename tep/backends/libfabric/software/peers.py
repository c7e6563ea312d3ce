"""Peers on tcp and shared memory: endpoints of their own, and processes that can be asked.

Rule: this file and ../peers.py decide a peer's state, and nobody else.
"""

from __future__ import annotations

from tep.backends.base import Status
from tep.backends.libfabric import frames
from tep.backends.libfabric.objects import Endpoint
from tep.backends.libfabric.peer import State
from tep.backends.libfabric.peers import SILENCE_S, Peers
from tep.backends.libfabric.rules import SoftwareRules
from tep.backends.libfabric.software.peer import Probe, SoftwarePeer

__all__ = ["SoftwarePeers"]


class SoftwarePeers(Peers[SoftwarePeer]):
    """All peers of one NIC."""

    _record = SoftwarePeer
    _rules: SoftwareRules

    @property
    def by_pid(self) -> bool:
        """Whether peers' processes say if they live."""
        return self._rules.by_pid

    def endpoint(self, peer: SoftwarePeer) -> Endpoint:
        if peer.endpoint is None:
            own = self._rules.endpoint_per_peer
            peer.endpoint = self._nic.open_endpoint() if own else self._main
            self.refusal = ""
        return peer.endpoint

    def cut(self, peer: SoftwarePeer) -> None:
        """Close a peer's own endpoint, which makes libfabric let go of all that goes to it."""
        peer.leases.clear()
        endpoint, peer.endpoint = peer.endpoint, None
        if endpoint is not None and endpoint is not self._main:
            endpoint.close()

    # --- what a peer told us is void once something to or from it has failed

    def doubt(self, peer: SoftwarePeer, now_s: float) -> None:
        peer.leases.clear()
        super().doubt(peer, now_s)

    def frame_failed(self, peer: SoftwarePeer, now_s: float) -> None:
        peer.leases.clear()
        super().frame_failed(peer, now_s)

    # --- looking after

    def let_go(self, peer: SoftwarePeer, now_s: float) -> None:
        """Close the endpoint of a peer that is to be forgotten, once nothing goes through it."""
        if peer.held:
            peer.forget_s = 0.0  # the engine has met it anew
        elif not (peer.open or peer.outbox or peer.sends or peer.lost) or now_s > peer.forget_s:
            peer.forget_s = 0.0
            self._end(peer, State.SILENT, Status.UNREACHABLE, now_s - SILENCE_S)

    def bury_the_dead(self) -> None:
        """End the peers whose processes have ended, also those to whom nothing was outstanding.

        Else a descriptor and a mapping of 13 MiB would stay for each until this NIC is closed.
        """
        for peer in self.all:
            if peer.state is not State.GONE and peer.process is not None and peer.process.ended():
                self._end(peer, State.GONE, Status.UNREACHABLE)

    def take_welcome(self, frame: frames.Welcome, now_s: float) -> SoftwarePeer | None:
        peer = super().take_welcome(frame, now_s)
        if peer is not None and peer.probe is Probe.ASKED:
            peer.probe = Probe.ANSWERED
        return peer

    def look(self, peer: SoftwarePeer, oldest_due_s: float | None, now_s: float) -> None:
        if peer.heard:
            peer.probe = Probe.NONE
        super().look(peer, oldest_due_s, now_s)

    def _look_at_overdue(self, peer: SoftwarePeer, now_s: float) -> None:
        """A peer that is READY has returned no row for too long.

        Where its process can be asked, one that lives and does not poll is back-pressure: its rows
        cannot be recalled, and would land once it polls again. One that polls, and answers a frame
        that was sent after the rows, should have returned them: they are lost.
        """
        if not self._rules.by_pid:
            super()._look_at_overdue(peer, now_s)
        elif peer.probe is Probe.ANSWERED:
            peer.probe = Probe.NONE
            self._end(peer, State.SILENT, Status.PROVIDER, now_s)
        elif peer.probe is Probe.NONE:
            peer.probe = Probe.ASKED
            self.say(peer, frames.Hello(self.me, peer.address.epoch))
            self.flush(peer, now_s)

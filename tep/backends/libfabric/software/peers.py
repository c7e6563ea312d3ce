"""Peers on tcp: endpoints of their own, and what they told us of their keys.

Rule: this file and ../peers.py decide a peer's state, and nobody else.
"""

from __future__ import annotations

from tep.backends.base import Status
from tep.backends.libfabric.objects import Endpoint
from tep.backends.libfabric.peer import State
from tep.backends.libfabric.peers import SILENCE_S, Peers
from tep.backends.libfabric.rules import SoftwareRules
from tep.backends.libfabric.software.peer import SoftwarePeer

__all__ = ["SoftwarePeers"]


class SoftwarePeers(Peers[SoftwarePeer]):
    """All peers of one NIC."""

    _record = SoftwarePeer
    _rules: SoftwareRules

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

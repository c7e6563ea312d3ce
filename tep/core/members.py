"""The verbs about peers that come and go; what they start is `tep.control.lifecycle`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tep.api import EngineOptions
from tep.backends.base import Domain
from tep.checks import check_seconds
from tep.control.known import PeerEvent, PeerWatch
from tep.core.machine import EngineMachine
from tep.core.peers import PeerBook
from tep.core.region import Link
from tep.core.transfer import Removal
from tep.errors import BadRequest, BusyError
from tep.wire import NetAddr

if TYPE_CHECKING:
    from tep.drivers import Driver

__all__ = ["EngineMembers"]


class EngineMembers(EngineMachine):
    """A machine that knows its peers. For its arguments and attributes see `TransferEngine`."""

    def __init__(
        self,
        domains: Sequence[Domain],
        *,
        driver: Driver,
        name: str,
        epoch: int,
        options: EngineOptions = EngineOptions(),
    ) -> None:
        super().__init__(domains, driver=driver, name=name, epoch=epoch, options=options)
        self._peers = PeerBook(self._address, self._domains, driver.lock)
        self._peers.replaced = self._replaced
        self._life.drop = self._peers.drop

    def watch_peer(
        self, peer: NetAddr, *, every_s: float = 1.0, lost_after_s: float = 5.0
    ) -> PeerWatch:
        """Ask a peer's engine again and again whether it is there, over each of its NICs.

        No application is involved over there. A peer that dies is known to be lost after
        `lost_after_s` and at most one `every_s`; time in which this engine was held up itself does
        not count. What is found is in the watch, is told to `on_peer`, and ends the expectations
        that name it as their `sender`. That it has restarted shows where another incarnation
        answers at its address (verbs, tcp on the same port), or when its new address is met here.

        Args:
            peer: its address.
            every_s: between two questions.
            lost_after_s: without an answer for so long it is lost; twice `every_s` or more;
                infinite: it never is, which leaves `round_trip_s`.

        Raises:
            UsageError: this backend has no notes between engines.
            BadRequest: times that contradict each other.
            BusyError: this peer is watched already.
        """
        self._check_open("watch_peer")
        self._check_notes(
            "watch_peer",
            "ask the peer by messages of your own (submit_send), rely on what transfers reveal "
            "(on_peer)",
        )
        every_s = check_seconds("watch_peer: every_s", every_s, 1e-9)
        lost_after_s = check_seconds("watch_peer: lost_after_s", lost_after_s, never=True)
        if lost_after_s < 2 * every_s:
            raise BadRequest(
                f"watch_peer: every_s={every_s} lost_after_s={lost_after_s}; a peer must be asked "
                "twice, at the least, before it is lost"
            )
        link = self._peers.link(peer, "watch_peer")
        found = self.driver.call(lambda: self._life.watch(link, every_s, lost_after_s))
        if found is None:
            raise BusyError(f"watch_peer: {peer.name} is watched already; close that watch first")
        self.driver.kick()
        return found

    def on_peer(self, callback: Callable[[PeerEvent], object]) -> None:
        """Have callback(event) called for each change of a peer, once a change, from now on.

        A peer is lost or back, or has restarted; one of its NICs is lost or back. Without a watch
        this is what transfers reveal. Callbacks run like those of handles: outside the step, on
        the thread that turns the engine.
        """
        self._check_open("on_peer")
        self._life.callbacks = (*self._life.callbacks, callback)

    def remove_peer(self, peer: NetAddr) -> Removal:
        """Let go of a peer, and of all that is remembered of it.

        Requests to it are refused at once. Those that were submitted before end as they would
        have; when the last has ended, the removal settles, and the peer can be met anew. It is for
        peers that have left: of one that goes on writing to this engine, no failover can be judged
        any more. An unknown peer is removed already. A request that another thread is submitting
        at this very moment may still go out; it ends as it would have.
        """
        self._check_open("remove_peer")
        if not isinstance(peer, NetAddr):
            raise BadRequest(f"remove_peer: {type(peer).__name__} is not a NetAddr")
        link = self._peers.leave(peer) or Link(peer, self._domains)
        removal = Removal(self, link, self.driver.now_s())
        self._enqueue(self._life.leave, removal, None)
        return removal

    def _replaced(self, link: Link) -> None:
        """A later incarnation of a peer is known: the former is let go of.

        It kicks itself, since the call that met the peer may raise before it has work to do.
        """
        why = "a later incarnation of it is known"
        removal = Removal(self, link, self.driver.now_s(), why)
        self._enqueue(self._life.leave, removal, None)

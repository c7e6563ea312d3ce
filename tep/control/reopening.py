"""Use paths again that were fenced off: the sender asks, and the receiver agrees.

Rows that were sent before a fence never land (C26); after `unfence` a NIC accepts later ones (C27).
Rule 1: a sender asks only when it has no row in flight on the path, and no lost row to settle.
Rule 2: a receiver agrees only when the same is true of its own rows in the other direction, since
NICs may use one connection for both. Rule 3: a path that a lease keeps shut stays shut.
"""

from __future__ import annotations

from collections.abc import Callable

from tep.control.channel import Channel
from tep.control.failover import Failover
from tep.control.fencing import Fencing
from tep.control.messages import Reopen
from tep.core.group import DomainGroup
from tep.core.path import Link, Path, PathEvent, PathState

__all__ = ["Reopening"]


class Reopening:
    """Both ends of reopening paths, for one engine.

    Args:
        group: its NICs.
        channel: control messages to the peers' engines.
        failover, fencing: both halves of a failover.
        find: returns the peer that a NIC's address belongs to, and the NIC's number; None if the
            address is unknown.
        opened: is called with each path that is in use again.
    """

    def __init__(
        self,
        group: DomainGroup,
        channel: Channel,
        failover: Failover,
        fencing: Fencing,
        find: Callable[[bytes], tuple[Link, int] | None],
        opened: Callable[[Path], object],
    ) -> None:
        self._group, self._channel = group, channel
        self._failover, self._fencing = failover, fencing
        self._find, self._opened = find, opened
        channel.hear(Reopen, self._asked)

    # ------------------------------------------------------------------ the sender's half

    def wanted(self, link: Link, nic: int) -> list[tuple[int, int]]:
        """The paths from working NICs of ours to a NIC of a peer that are not UP."""
        alive = enumerate(self._group.alive)
        return [(domain, nic) for domain, up in alive if up and not link.is_up(domain, nic)]

    def begin(self, path: Path) -> None:
        """A peer answers over a path: if the path is not UP, ask the peer to open it.

        A path that could not be fenced while the peer did not answer is fenced first.
        """
        if path.is_up or path.asking or not self._is_clear(path):
            return
        if path.state is PathState.SUSPECT or self._failover.can_clear(path):
            self._failover.clear(path, lambda why: self._is_fenced(path, why), lambda _: None)
        else:  # FENCED: in the other two states it is being asked, or has lost rows to settle
            self._ask(path)

    def _is_clear(self, path: Path) -> bool:
        live = path.link.current and self._group.alive[path.domain]
        return live and self._failover.is_clear(path)

    def _is_fenced(self, path: Path, why: str) -> None:
        if not why and self._is_clear(path):
            self._ask(path)

    def _ask(self, path: Path) -> None:
        path.asking = True
        path.to(PathEvent.ASKED_BACK)
        own = self._group.domains[path.domain].address
        self._channel.ask(
            path.link,
            lambda number: Reopen(number, own, path.nic),
            lambda answer: self._answered(path, agreed=not answer.why),
            lambda _: self._answered(path, agreed=False),
        )

    def _answered(self, path: Path, *, agreed: bool) -> None:
        """A path that stays shut is asked for again when the peer answers the next time."""
        path.asking = False
        if path.state is not PathState.REOPENING:
            return  # rows were lost on it meanwhile
        if not (agreed and self._is_clear(path)):
            path.to(PathEvent.REFUSED)
            return
        # Lift our own fence against the other direction, if there is one.
        self._fencing.lift(path.link.addr.domains[path.nic], path.domain)
        self._group.reopen(path)
        self._opened(path)

    # ------------------------------------------------------------------ the receiver's half

    def _asked(self, nic: int, address: bytes, message: Reopen) -> None:
        if not self._fencing.admit(nic, address, message) or self._fencing.is_outdated(message):
            return
        why = self._why_not(message) or self._fencing.lift(message.source, message.nic)
        self._channel.tell(nic, address, message.number, why)

    def _why_not(self, message: Reopen) -> str | None:
        if not self._group.alive[message.nic]:
            return f"its NIC {message.nic} is down"
        found = self._find(message.source)
        if found is not None:
            link, number = found
            shut = not link.is_up(message.nic, number)
            if shut and not self._failover.is_clear(link.path(message.nic, number)):
                return "rows that it lost in the other direction are not settled yet"
        return None

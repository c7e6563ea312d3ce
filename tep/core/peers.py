"""Who the peers are: links to their newest incarnations, their regions resolved, groups of them.

Lookups and refusals only; nothing here posts or queues. Several users' threads may call it at once.
Rule: what is read without the lock is one dict entry or one attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple

from tep.backends.base import Domain
from tep.base.checks import unpicklable
from tep.base.errors import BadDescriptor, BadRequest, ClosedError, StaleEpoch
from tep.base.wire import MrDesc, NetAddr
from tep.core.path import Link, PathEvent, Routes
from tep.core.region import MrHandle, Remote, Targets

__all__ = ["PeerBook", "PeerGroup"]

_RESOLVED_MAX: Final = 1 << 16
_LIVES_MAX: Final = 8
"""Incarnations of one name that were removed, and are remembered."""


class _Steady(NamedTuple):
    """The targets of a group's last request: a steady application names the same in every step."""

    descs: tuple[MrDesc, ...]
    targets: Targets
    generation: int


class PeerGroup:
    """Peers resolved and connected in advance, so that scatters and barriers need less work."""

    __slots__ = ("_links", "_steady", "book", "links")

    def __init__(self, book: PeerBook, links: tuple[Link, ...]) -> None:
        self.book = book
        self.links = links
        self._links = frozenset(links)
        # One record, replaced as a whole: another thread never sees one request's descriptors with
        # another's targets.
        self._steady: _Steady | None = None

    __reduce__ = unpicklable("its peers are connected in this process; send their addresses")

    def __repr__(self) -> str:
        gone = [link.addr.name for link in self.links if not link.current]
        names = ", ".join(link.addr.name for link in self.links[:8])
        more = f" and {len(self.links) - 8} more" if len(self.links) > 8 else ""
        old = f"; replaced or removed: {', '.join(gone)}" if gone else ""
        return f"PeerGroup({len(self.links)} peers: {names}{more}{old})"

    def targets(self, descs: Sequence[MrDesc], what: str) -> Targets:
        """Resolve descriptors of the group's peers, or find them resolved.

        Raises:
            BadRequest: a descriptor's peer is not in the group.
            StaleEpoch: it restarted after the group was made, or after the descriptor was.
        """
        steady, book, descs = self._steady, self.book, tuple(descs)
        if steady is not None and steady.generation == book.generation and steady.descs == descs:
            return steady.targets
        generation = book.generation
        remotes = [book.resolve(desc, what) for desc in descs]
        self.check(remotes, book, what)
        targets = Targets(remotes)
        self._steady = _Steady(descs, targets, generation)
        return targets

    def check(self, remotes: Sequence[Remote], book: PeerBook, what: str) -> None:
        """Raise unless the group is of this engine, and all regions are of its peers."""
        if self.book is not book:
            raise BadRequest(f"{what}: the peer group belongs to engine {self.book.own.name!r}")
        for remote in remotes:
            if remote.link not in self._links:
                raise self._stranger(remote.link.addr, what)

    def _stranger(self, addr: NetAddr, what: str) -> BadRequest | StaleEpoch:
        for link in self.links:
            if link.addr == addr:
                return BadRequest(f"{what}: {addr.name!r} was removed meanwhile; make a new group")
            if link.addr.name == addr.name:
                return StaleEpoch(
                    f"{what}: the peer group holds {addr.name!r} of epoch {link.addr.epoch}, it is "
                    f"in epoch {addr.epoch} now; make a new group"
                )
        return BadRequest(f"{what}: {addr.name!r} is not in the peer group")


class PeerBook:
    """All peers of one engine.

    Args:
        own: the engine's own address.
        domains: its NICs.
        lock: guards the book against two threads that meet a peer at the same time.
        replaced: called with each link that a later incarnation replaced, without the lock.
        routes: the engine's.

    Attributes:
        links: the newest incarnation of each peer, by (backend, name).
        generation: grows whenever a peer is replaced by a later incarnation, or removed.
    """

    def __init__(
        self,
        own: NetAddr,
        domains: tuple[Domain, ...],
        lock: AbstractContextManager[object],
        replaced: Callable[[Link], object],
        routes: Routes,
    ) -> None:
        self.own = own
        self._routes = routes
        self.links: dict[tuple[str, str], Link] = {}
        self.generation = 0
        # Of the incarnations of each peer that were removed, by epoch: (our NIC, its NIC) of paths
        # that were not UP, and whether the removal has fenced it off.
        self._left: dict[tuple[str, str], dict[int, tuple[list[tuple[int, int]], bool]]] = {}
        self._replaced = replaced
        self._domains = domains
        self._lock = lock
        self._remotes: dict[int, Remote] = {}
        self._readable: dict[int, Remote] = {}  # as found by reads

    def find(self, address: bytes) -> Link | None:
        """The peer that has a NIC at an address; None: it was not met."""
        links = list(self.links.values())
        return next((link for link in links if address in link.addr.domains), None)

    def link(self, addr: NetAddr, what: str) -> Link:
        """The link to a peer's newest incarnation.

        Raises:
            BadDescriptor: not an address, of another backend, or in conflict with a known one.
            StaleEpoch: a later incarnation is known.
            ClosedError: it is being removed.
        """
        if not isinstance(addr, NetAddr):
            raise BadDescriptor(
                f"{what}: {type(addr).__name__} is not a NetAddr; "
                "decode bytes with NetAddr.from_bytes"
            )
        known = self.links.get((addr.backend, addr.name))
        if known is not None and known.addr == addr and known.current:
            return known
        with self._lock:
            former, link = self._meet(addr, what)
        if former is not None:
            self._replaced(former)
        return link

    def _meet(self, addr: NetAddr, what: str) -> tuple[Link | None, Link]:
        """The link that this one replaces, or None, and this one."""
        if addr.backend != self.own.backend:
            raise BadDescriptor(
                f"{what}: {addr} is on {addr.backend!r}, this engine on {self.own.backend!r}"
            )
        who = addr.backend, addr.name
        known = self.links.get(who)
        if known is not None:
            old = known.addr.epoch
            if old > addr.epoch:
                raise StaleEpoch(
                    f"{what}: {addr.name} is known in epoch {old}, this is of epoch {addr.epoch}; "
                    "it has restarted: ask it for fresh descriptors. If these are, it restarted "
                    "where the clock is behind: remove_peer() of the former one lets it in"
                )
            if known.addr == addr:
                if known.current:
                    return None, known
                raise ClosedError(
                    f"{what}: {addr.name} is being removed (remove_peer); wait for that to settle, "
                    "then it can be met anew"
                )
            if old == addr.epoch:
                raise BadDescriptor(
                    f"{what}: two engines share the name {addr.name!r} and epoch {addr.epoch}: "
                    "rename one"
                )
            known.current = False
            self.generation += 1
        link = Link(addr, self._domains, self._routes)
        left = self._left.get(who, {}).pop(addr.epoch, None)
        if left is not None:
            link.again, (shut, link.barred) = True, left
            for domain, nic in shut:
                link.path(domain, nic).to(PathEvent.LOST)
        self.links[who] = link
        return known, link

    def leave(self, addr: NetAddr) -> Link | None:
        """Refuse a peer from now on, until drop(); None: a later incarnation of it is known.

        A stranger is met first, so that drop() remembers that it stays fenced off.
        """
        who, former = (addr.backend, addr.name), None
        with self._lock:
            link = self.links.get(who)
            old = max(self._left.get(who, ()), default=-1) if link is None else link.addr.epoch
            is_new = old < addr.epoch or (old == addr.epoch and link is None)
            if is_new and addr.backend == self.own.backend:
                former, link = self._meet(addr, "remove_peer")
            if link is None or link.addr != addr:
                return None
            link.current = False
            self.generation += 1
        if former is not None:
            self._replaced(former)
        return link

    def drop(self, link: Link, *, fenced: bool) -> None:
        """Forget a peer that no transfer refers to any more, and its regions.

        Args:
            link: the peer.
            fenced: all paths from it are fenced off, and stay so until it is named for rows.
        """
        with self._lock:
            for known in (self._remotes, self._readable):
                for key, remote in list(known.items()):
                    if remote.link is link:
                        del known[key]
            who = link.addr.backend, link.addr.name
            if self.links.get(who) is link:
                del self.links[who]
                left = self._left.setdefault(who, {})
                left[link.addr.epoch] = link.shut(), fenced
                if len(left) > _LIVES_MAX:
                    del left[next(iter(left))]

    def resolve(self, desc: MrDesc, what: str, *, reads: bool = False) -> Remote:
        """A descriptor, ready for posting.

        Raises:
            BadDescriptor, StaleEpoch: as for its address, or a region that cannot be.
            BadRequest: peers may not write there; or not read, if that is what is asked.
        """
        # The cache keeps the descriptor alive, so that no other object gets its id.
        known = self._readable if reads else self._remotes
        found = known.get(id(desc))
        if found is not None and found.link.current:
            return found
        if not isinstance(desc, MrDesc):
            raise BadDescriptor(
                f"{what}: {type(desc).__name__} is not an MrDesc; "
                "decode bytes with MrDesc.from_bytes"
            )
        link = self.link(desc.addr, what)
        if not (desc.readable if reads else desc.writable):
            right, use = ("READABLE", "read") if reads else ("TARGET", "write")
            raise BadRequest(
                f"{what}: {desc} was registered without Access.{right}; peers may not {use} there"
            )
        if max(desc.bases) + desc.nbytes > 2**64:
            raise BadDescriptor(f"{what}: {desc} at base {max(desc.bases):#x} ends beyond 64 bits")
        link.barred = False
        if len(known) >= _RESOLVED_MAX:
            known.clear()
        found = known[id(desc)] = Remote(desc, link)
        return found

    def forget_source(self, mr: MrHandle) -> None:
        """A region was deregistered: forget remembered requests, which would keep its memory."""
        for remote in list(self._remotes.values()):
            if remote.steady is not None and remote.steady[1].mr is mr:
                remote.steady = None

    def targets(self, descs: Sequence[MrDesc], group: PeerGroup | None, what: str) -> Targets:
        """The targets of one scatter or barrier.

        Raises:
            BadRequest: none at all, or a group of another engine.
        """
        if not descs:
            raise BadRequest(f"{what}: no targets")
        if group is None:
            return Targets([self.resolve(desc, what) for desc in descs])
        group.check((), self, what)
        return group.targets(descs, what)

"""Who the peers are: links to their newest incarnations, their regions resolved, groups of them.

Lookups and refusals only; nothing here posts or queues. Several users' threads may call it at once.
Rule: what is read without the lock is one dict entry or one attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple, Protocol

from tep.backends.base import Domain
from tep.checks import unpicklable
from tep.core.path import Link, PathEvent, Routes
from tep.core.region import MrHandle, Remote, Targets
from tep.errors import BadDescriptor, BadRequest, ClosedError, StaleEpoch
from tep.wire import Lease, MrDesc, NetAddr, Target

__all__ = ["PeerBook", "PeerGroup"]

_RESOLVED_MAX: Final = 1 << 16


class _Steady(NamedTuple):
    """The targets of a group's last request: a steady application names the same in every step."""

    descs: tuple[Target, ...]
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

    def targets(self, descs: Sequence[Target], what: str) -> Targets:
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
        if all(remote.held_lease is None for remote in remotes):  # a lease is looked at every time
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


class LeaseResolver(Protocol):
    """The leases that this engine holds; see `tep.control.held_leases`."""

    def resolve(self, lease: Lease, link: Link, what: str, /) -> Remote:
        """The bytes of a lease, ready for posting."""

    def orphan(self, link: Link, /) -> None:
        """A peer has restarted: what its earlier incarnation had leased is over."""

    def forget(self, link: Link, /) -> None:
        """A peer was removed: keep nothing that refers to its link."""


class PeerBook:
    """All peers of one engine.

    Args:
        own: the engine's own address.
        domains: its NICs.
        lock: guards the book against two threads that meet a peer at the same time.
        held_leases: the leases that peers granted to this engine.
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
        held_leases: LeaseResolver,
        replaced: Callable[[Link], object],
        routes: Routes,
    ) -> None:
        self.own = own
        self._routes = routes
        self.links: dict[tuple[str, str], Link] = {}
        self.generation = 0
        # Of peers that were removed: epoch, and (our NIC, its NIC) of paths that were not UP.
        self._left: dict[tuple[str, str], tuple[int, list[tuple[int, int]]]] = {}
        self._held_leases, self._replaced = held_leases, replaced
        self._domains = domains
        self._lock = lock
        self._remotes: dict[int, Remote] = {}
        self._readable: dict[int, Remote] = {}  # as found by reads

    def at(self, address: bytes) -> NetAddr | None:
        """The peer that has a NIC at an address; None: it was not met."""
        addrs = (link.addr for link in list(self.links.values()))
        return next((addr for addr in addrs if address in addr.domains), None)

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
        left, shut = self._left.get(who, (-1, []))
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
            self._held_leases.orphan(known)
        link = Link(addr, self._domains, self._routes)
        if left == addr.epoch:
            link.again = True
            for domain, nic in shut:
                link.path(domain, nic).to(PathEvent.LOST)
        self._left.pop(who, None)
        self.links[who] = link
        return known, link

    def leave(self, addr: NetAddr) -> Link | None:
        """Refuse a peer from now on, until drop(); None: it is not known."""
        with self._lock:
            link = self.links.get((addr.backend, addr.name))
            if link is None or link.addr != addr:
                return None
            link.current = False
            self.generation += 1
        return link

    def drop(self, link: Link) -> None:
        """Forget a peer that no transfer refers to any more, and its regions."""
        with self._lock:
            for known in (self._remotes, self._readable):
                for key, remote in list(known.items()):
                    if remote.link is link:
                        del known[key]
            self._held_leases.forget(link)
            who = link.addr.backend, link.addr.name
            if self.links.get(who) is link:
                del self.links[who]
                self._left[who] = link.addr.epoch, link.shut()

    def resolve(self, desc: Target, what: str) -> Remote:
        """A descriptor, or lease, ready for posting.

        Raises:
            BadDescriptor, StaleEpoch: as for its address, or a region that cannot be.
            BadRequest: peers may not write there.
            LeaseError: the lease is over, or somebody else's.
        """
        # The cache keeps the descriptor alive, so that no other object gets its id.
        found = self._remotes.get(id(desc))
        if found is not None and found.link.current:
            return found
        return self._meet_region(self._remotes, desc, what, reads=False)

    def resolve_readable(self, desc: Target, what: str) -> Remote:
        """A descriptor, or lease, ready for reading from. Raises as resolve() does."""
        found = self._readable.get(id(desc))
        if found is not None and found.link.current:
            return found
        return self._meet_region(self._readable, desc, what, reads=True)

    def _meet_region(
        self, known: dict[int, Remote], target: Target, what: str, *, reads: bool
    ) -> Remote:
        """Resolve a target; an MrDesc is entered into `known`."""
        desc = target.desc if isinstance(target, Lease) else target
        if not isinstance(desc, MrDesc):
            raise BadDescriptor(
                f"{what}: {type(desc).__name__} is not an MrDesc; "
                "decode bytes with MrDesc.from_bytes"
            )
        link = self.link(desc.addr, what)
        if not (desc.readable if reads else desc.writable):
            raise BadRequest(_not_allowed(target, what, reads=reads))
        _check_end(desc, what)
        if isinstance(target, Lease):
            return self._held_leases.resolve(target, link, what)
        if len(known) >= _RESOLVED_MAX:
            known.clear()
        found = known[id(target)] = Remote(desc, link)
        return found

    def forget_source(self, mr: MrHandle) -> None:
        """A region was deregistered: forget remembered requests, which would keep its memory."""
        for remote in list(self._remotes.values()):
            if remote.steady is not None and remote.steady[1].mr is mr:
                remote.steady = None

    def targets(self, descs: Sequence[Target], group: PeerGroup | None, what: str) -> Targets:
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


def _not_allowed(target: Target, what: str, *, reads: bool) -> str:
    if isinstance(target, Lease):
        return f"{what}: {target} is not for {'reading' if reads else 'writing'}"
    if reads:
        return f"{what}: {target} was registered without Access.READABLE; peers may not read there"
    return f"{what}: {target} was registered without Access.TARGET; peers may not write there"


def _check_end(desc: MrDesc, what: str) -> None:
    if max(desc.bases) + desc.nbytes > 2**64:
        raise BadDescriptor(f"{what}: {desc} at base {max(desc.bases):#x} ends beyond 64 bits")

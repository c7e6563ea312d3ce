"""Registered memory here and at peers, and who the peers are: links, resolved regions, groups.

Records with checks, lookups and refusals; nothing here posts or queues. Several users' threads may
call it at once. Rule: what is read without the lock is one dict entry or one attribute.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tep.backends.base import Access, Column, Domain, DomainKey
from tep.base.api import Routing
from tep.base.checks import unpicklable
from tep.base.errors import BadDescriptor, BadRequest, ClosedError, StaleEpoch
from tep.base.wire import MrDesc, NetAddr
from tep.core.path import Link, PathEvent, Routes
from tep.memory.source import Memory

__all__ = [
    "Job", "MrHandle", "PeerBook", "PeerGroup", "Places", "Quarantine", "Remote",
    "Targets", "Template", "Way", "check_source", "deregistered", "register", "shifted",
    "summand",
]  # fmt: skip

U64 = npt.NDArray[np.uint64]


class Quarantine(NamedTuple):
    """Bytes start .. stop of a region here that a NIC may still touch, and why."""

    start: int
    stop: int
    why: str


class RegionOwner(Protocol):
    """The engine, as far as its regions are concerned; see `tep.engine.machine.Machine`."""

    def quarantines(self, mr: MrHandle, /) -> tuple[Quarantine, ...]: ...


class MrHandle:
    """A registered region of this engine, for use as a source; its descriptor is for the peers.

    The engine holds it, and with it the memory, until `deregister`; dropping the handle frees
    nothing.

    Attributes:
        memory: pointer, length, device and owner of the bytes.
        ptr: address of the first as an array of no dimension, which adds to a column in half the
            time that a scalar needs.
        access: the rights of peers.
        keys: one a NIC.
        desc: what peers need to write here.
        inflight: transfers that use it now.
        readers: NICs with a row from here, or a read to here, that came back unsent or unknown: one
            that is down by now may still be at it.
        given_up: whether a NIC that lives may still carry out a read to here (Status.GIVEN_UP).
    """

    __slots__ = (
        "access", "closed", "desc", "given_up", "inflight", "keys", "memory", "owner", "ptr",
        "readers",
    )  # fmt: skip

    def __init__(
        self,
        owner: RegionOwner,
        memory: Memory,
        access: Access,
        keys: tuple[DomainKey, ...],
        desc: MrDesc,
    ) -> None:
        self.owner = owner
        self.memory = memory
        self.ptr: U64 = np.array(memory.ptr, np.uint64)
        self.access = access
        self.keys = keys
        self.desc = desc
        self.inflight = 0
        self.readers: frozenset[int] = frozenset()
        self.given_up = False
        self.closed = False

    __reduce__ = unpicklable("it is memory of this process; send `mr.desc.to_bytes()` to peers")

    @property
    def quarantined(self) -> tuple[Quarantine, ...]:
        """The bytes that a NIC may touch although nothing is open here, and why; () = none."""
        return self.owner.quarantines(self)

    def __repr__(self) -> str:
        state = "deregistered" if self.closed else f"{self.inflight} transfers in flight"
        what = f"region {self.desc.region}, {self.memory.nbytes} bytes, {self.memory.device}"
        return f"MrHandle({what}, {state})"


def check_source(mr: object, owner: RegionOwner, what: str) -> None:
    """Raise unless this is a live region of the engine `owner`."""
    if isinstance(mr, MrHandle) and mr.owner is owner and not mr.closed:
        return
    if not isinstance(mr, MrHandle):
        raise BadRequest(
            f"{what}: the source is a {type(mr).__name__}, not the MrHandle that reg_mr gave; "
            "are source and target swapped?"
        )
    if mr.owner is not owner:
        raise BadRequest(f"{what}: the source {mr!r} is registered with another engine")
    raise deregistered(mr, what)


def deregistered(mr: MrHandle, what: str) -> ClosedError:
    """Make the error of a request whose source region was given back."""
    return ClosedError(f"{what}: the source region {mr.desc.region} was deregistered")


def register(domains: Sequence[Domain], memory: Memory, access: Access) -> tuple[DomainKey, ...]:
    """Register memory with every NIC, or with none.

    Raises:
        BadRequest: a device that a NIC cannot reach.
        FabricError: a NIC refused.
    """
    for domain in domains:
        if memory.kind not in domain.caps.memory_kinds:
            kinds = ", ".join(domain.caps.memory_kinds)
            raise BadRequest(
                f"reg_mr: {memory.device} memory, but NIC {domain.caps.nic} reaches only: {kinds}"
            )
    with contextlib.ExitStack() as undo:
        keys = []
        for domain in domains:
            key = domain.register(memory, access)
            keys.append(key)
            undo.callback(domain.deregister, key)
        undo.pop_all()  # all took it
    return tuple(keys)


class Way(NamedTuple):
    """The path of rows to one region on one lane: our NIC `domain`, the peer's NIC `nic`.

    `shift` leads from an address for the peer's NIC 0 to one for this NIC, bytes.
    """

    domain: int
    nic: int
    peer: int
    rkey: int
    shift: int


class Remote:
    """A peer's region, resolved: what a row needs, without looking at the descriptor again.

    `steady` is the last single write to it, as requested and as a job. `ways` has what the group
    found out for each lane at `ways_version` of its routes.
    """

    __slots__ = (
        "bases", "desc", "link", "nbytes", "nics", "rkeys", "steady", "ways", "ways_version",
    )  # fmt: skip

    def __init__(self, desc: MrDesc, link: Link) -> None:
        self.desc = desc
        self.link = link
        self.nbytes = desc.nbytes
        self.rkeys = desc.rkeys
        self.bases = desc.bases
        self.nics = len(desc.rkeys)
        self.steady: tuple[object, Job] | None = None
        self.ways: dict[tuple[int, int], Way] = {}
        self.ways_version = -1

    def memory(self) -> object:
        """Names its memory: a descriptor may have been decoded twice."""
        return self.link, self.rkeys[0]


class Job:
    """One request as columns, not yet dealt out to NICs.

    Attributes:
        kind: the verb, for reports.
        remotes: the target, or one target a row (or, byte-sharded, one a slice).
        src: address of each row's first byte; a column.
        dst: of each row; a column. One target: address of its first byte, for the target's NIC 0.
            Several targets: byte offset in the row's own region.
        nbytes: of each row; a column.
        lengths: the same as plain ints where the rows differ, else empty: summing few is cheaper.
        imm: u32 for all rows, one a row, or None.
        n: rows that NICs will carry; `total` bytes in all, none longer than `longest`, which is
            an upper bound.
        split: the columns are whole writes that NICs share; `plan_single` makes their rows.
        is_plain: it is neither a read nor a prepared write.
    """

    is_read = False
    is_plain = True
    __slots__ = (
        "dst", "imm", "kind", "lengths", "longest", "mr", "n", "nbytes", "remotes", "routing",
        "split", "src", "total",
    )  # fmt: skip

    def __init__(
        self,
        kind: str,
        mr: MrHandle | None,
        remotes: Remote | Targets,
        columns: tuple[Column, Column, Column],
        imm: Column | None,
        n: int,
        total: int,
        longest: int,
        routing: Routing,
        lengths: tuple[int, ...] = (),
    ) -> None:
        self.kind = kind
        self.mr = mr
        self.remotes = remotes
        self.src, self.dst, self.nbytes = columns
        self.imm = imm
        self.n = n
        self.total = total
        self.longest = longest
        self.routing = routing
        self.split = kind == "single" or (kind == "scatter" and routing.scatter_by == "bytes")
        self.lengths = lengths

    def moved(self, here: int, there: int, imm: Column | None) -> Job:
        """The same request so many bytes further here and there, with this immediate."""
        columns = shifted(self.src, here), shifted(self.dst, there), self.nbytes
        rest = self.n, self.total, self.longest, self.routing, self.lengths
        return Job(self.kind, self.mr, self.remotes, columns, imm, *rest)

    def imms_by_peer(self) -> list[tuple[Link, Iterable[int]]]:
        """The immediates of the request, by the peer that is to count them."""
        imm, remotes = self.counted_imm, self.remotes
        if imm is None:
            return []
        imms = (imm,) if isinstance(imm, int) else imm.tolist()
        if isinstance(remotes, Remote):
            return [(remotes.link, imms)]
        return [(link, imms) for link in dict.fromkeys(remote.link for remote in remotes.remotes)]

    @property
    def counted_imm(self) -> Column | None:
        """The immediates that its targets count."""
        return self.imm

    def forget(self) -> None:
        """Let no later request find this one, whose memory was given back."""
        if isinstance(self.remotes, Remote):
            self.remotes.steady = None


def shifted(column: Column | None, shift: int) -> Column:
    """A column of addresses, all moved by the same distance, which may be negative."""
    assert column is not None
    if isinstance(column, int):
        return column + shift
    return np.add(column, summand(shift)) if shift else column


@lru_cache(maxsize=1024)
def summand(shift: int) -> U64:
    """Return the number to add to a column of addresses.

    Unsigned arithmetic wraps, so a negative shift is the addition of its complement. An array of no
    dimension adds in half of the time that a scalar needs.
    """
    found = np.array(shift % 2**64, np.uint64)
    found.flags.writeable = False
    return found


class Template:
    """The columns of one local NIC that every request to the same targets shares.

    Its rows go to the targets `rows` (None: to all), each to its region of `remotes` at the NIC of
    `nics`.
    """

    __slots__ = (
        "_lengths", "_offsets", "_places", "_sizes", "base", "domain", "n", "nics", "peer",
        "remotes", "rkey", "rows",
    )  # fmt: skip

    def __init__(
        self,
        domain: int,
        remotes: Sequence[Remote],
        nics: Sequence[int],
        columns: tuple[U64, U64, U64],
        rows: slice | npt.NDArray[np.int64] | None,
    ) -> None:
        self.domain = domain
        self.remotes = remotes
        self.nics = nics
        self.n = len(nics)
        self.peer, self.rkey, self.base = columns
        self.rows = rows
        self._offsets: U64 | None = None
        self._places: U64 = self.base
        self._lengths: Column = 0
        self._sizes: tuple[Column, int] = 0, 0

    def places(self, offsets: Column) -> U64:
        """Return the address that each row goes to, for offsets in the targets' regions, or 0.

        The same offsets give the same column: what a request's checks made is not written to.
        """
        if isinstance(offsets, int):
            assert offsets == 0, "a barrier's rows go to the start of each region"
            return self.base
        if offsets is not self._offsets:
            mine = offsets if self.rows is None else offsets[self.rows]
            self._places = np.add(self.base, mine)
            self._offsets = offsets
        return self._places

    def sizes(self, job: Job) -> tuple[Column, int]:
        """Return the length of each row, and their sum; -1: it is not known."""
        lengths, rows = job.nbytes, self.rows
        if isinstance(lengths, int):
            return lengths, lengths * self.n
        if rows is None:
            return lengths, job.total
        if lengths is not self._lengths:
            total = sum(job.lengths[rows]) if isinstance(rows, slice) else -1
            self._sizes = lengths[rows], total
            self._lengths = lengths
        return self._sizes


class Places(NamedTuple):
    """Offsets in the regions of a scatter's targets, as its last request named them."""

    raw: bytes
    column: U64
    offset_max: int


class Targets:
    """The targets of a scatter or barrier, in order, with what is the same for all requests.

    Attributes:
        remotes: one region a target.
        nics: NIC count of each target; `cycle` is their least common multiple.
        limit_min: length of the shortest region, bytes.
        templates: the group's, by (cursor, pinned NIC), as of `routes_version`.
        places: of the last request; replaced as a whole, since users' threads meet here.
    """

    __slots__ = (
        "_shared", "cycle", "limit_min", "nics", "places", "remotes", "routes_version", "templates",
    )  # fmt: skip

    def __init__(self, remotes: Sequence[Remote]) -> None:
        self.remotes = remotes
        self.nics = tuple(remote.nics for remote in remotes)
        self.cycle = math.lcm(*self.nics)
        self.limit_min = min(remote.nbytes for remote in remotes)
        self.routes_version = 0
        self.places = Places(b"", np.zeros(0, np.uint64), 0)
        self.templates: dict[tuple[int, int | None], list[Template]] = {}
        self._shared: bool | None = None

    def are_shared(self) -> bool:
        """Whether two of them are in the same memory, so that slices may overlap."""
        if self._shared is None:
            n = len(self.remotes)
            some = len({remote.link for remote in self.remotes}) < n  # the cheaper question first
            self._shared = some and len({remote.memory() for remote in self.remotes}) < n
        return self._shared


_RESOLVED_MAX: Final = 1 << 16
_LIVES_MAX: Final = 8
"""Incarnations of one name that were removed, and are remembered."""


class _Steady(NamedTuple):
    """The targets of a group's last request."""

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
        # Replaced as a whole, so that no thread sees descriptors with another request's targets.
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

    `lock` guards it against two threads that meet a peer at the same time; `replaced` is called,
    without the lock, with each link that a later incarnation replaced.

    Attributes:
        links: the newest incarnation of each peer, by (backend, name).
        remotes: the regions that writes named lately, by the id of the descriptor.
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
        self.remotes: dict[int, Remote] = {}
        self._readable: dict[int, Remote] = {}  # as found by reads

    def find(self, address: bytes) -> Link | None:
        """Find the peer that has a NIC at an address; None: it was not met."""
        links = list(self.links.values())
        return next((link for link in links if address in link.addr.domains), None)

    def link(self, addr: NetAddr, what: str) -> Link:
        """Find or make the link to a peer's newest incarnation.

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

        `fenced`: all paths from it are fenced off, and stay so until it is named for rows.
        """
        with self._lock:
            for known in (self.remotes, self._readable):
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
        """Resolve a descriptor for posting.

        Raises:
            BadDescriptor, StaleEpoch: as for its address, or a region that cannot be.
            BadRequest: peers may not write there; or not read, if that is what is asked.
        """
        # The cache keeps the descriptor alive, so that no other object gets its id.
        known = self._readable if reads else self.remotes
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
        for remote in list(self.remotes.values()):
            if remote.steady is not None and remote.steady[1].mr is mr:
                remote.steady = None

    def targets(self, descs: Sequence[MrDesc], group: PeerGroup | None, what: str) -> Targets:
        """Resolve the targets of one scatter or barrier.

        Raises:
            BadRequest: none at all, or a group of another engine.
        """
        if not descs:
            raise BadRequest(f"{what}: no targets")
        if group is None:
            return Targets([self.resolve(desc, what) for desc in descs])
        group.check((), self, what)
        return group.targets(descs, what)

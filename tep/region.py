"""Both ends of a write as the engine sees them: local regions, and peers' regions resolved.

Records with checks; who may touch them when is the group's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tep.backends.base import Access, Domain, DomainKey
from tep.errors import BadRequest, ClosedError
from tep.memory import Memory
from tep.wire import MrDesc, NetAddr

__all__ = ["Link", "MrHandle", "Remote", "Targets", "Template"]

U64 = npt.NDArray[np.uint64]

_UNKNOWN: Final = -1


class MrHandle:
    """A registered region of this engine, for use as a source; its descriptor is for the peers.

    The engine holds it, and with it the memory, until `deregister`; dropping the handle frees
    nothing.

    Attributes:
        memory: pointer, length, device and owner of the bytes.
        access: whether peers may write here.
        keys: the region's keys, one a NIC.
        desc: what peers need to write here.
        inflight: transfers that read from here now.
    """

    __slots__ = ("access", "closed", "desc", "engine", "inflight", "keys", "memory")

    def __init__(
        self,
        engine: object,
        memory: Memory,
        access: Access,
        keys: tuple[DomainKey, ...],
        desc: MrDesc,
    ) -> None:
        self.engine = engine
        self.memory = memory
        self.access = access
        self.keys = keys
        self.desc = desc
        self.inflight = 0
        self.closed = False

    def __repr__(self) -> str:
        state = "deregistered" if self.closed else f"{self.inflight} transfers in flight"
        what = f"region {self.desc.region}, {self.memory.nbytes} bytes, {self.memory.device}"
        return f"MrHandle({what}, {state})"

    def check(self, engine: object, what: str) -> None:
        """Raise unless this is a live region of `engine`."""
        if self.engine is not engine:
            raise BadRequest(f"{what}: the source {self!r} is registered with another engine")
        if self.closed:
            raise ClosedError(f"{what}: the source region {self.desc.region} was deregistered")


class Link:
    """One incarnation of a peer: its NICs' addresses, and the PeerIds that our NICs gave them.

    Attributes:
        addr: the peer.
        alive: for each of its NICs, whether rows still get there.
        current: False once a later incarnation of the peer is known.
    """

    __slots__ = ("_domains", "_ids", "addr", "alive", "current")

    def __init__(self, addr: NetAddr, domains: tuple[Domain, ...]) -> None:
        self.addr = addr
        self.alive = [True] * len(addr.domains)
        self.current = True
        self._domains = domains
        self._ids = [[_UNKNOWN] * len(addr.domains) for _ in domains]

    def peer(self, domain: int, remote: int) -> int:
        """The PeerId of its NIC `remote` on our NIC `domain`; connects on first use."""
        found = self._ids[domain][remote]
        if found == _UNKNOWN:
            found = self._ids[domain][remote] = self._domains[domain].connect(
                self.addr.domains[remote]
            )
        return found


class Remote:
    """A peer's region, resolved: what a row needs, without looking at the descriptor again."""

    __slots__ = ("bases", "desc", "link", "nbytes", "nics", "rkeys")

    def __init__(self, desc: MrDesc, link: Link) -> None:
        self.desc = desc
        self.link = link
        self.nbytes = desc.nbytes
        self.rkeys = desc.rkeys
        self.bases = desc.bases
        self.nics = len(desc.rkeys)


class Template(NamedTuple):
    """What the rows of one local NIC have in common in every request to the same targets.

    Attributes:
        domain: the local NIC.
        remotes, nics: target region and remote NIC of each row.
        peer, rkey, base: columns.
        rows: which targets.
    """

    domain: int
    remotes: Sequence[Remote]
    nics: Sequence[int]
    peer: U64
    rkey: U64
    base: U64
    rows: slice | npt.NDArray[np.int64]


class Targets:
    """The targets of a scatter or barrier, in order, with what is the same for all requests.

    Attributes:
        remotes: one region a target.
        nics: NIC count of each target.
        cycle: least common multiple of them.
        limit_min: length of the shortest region, bytes.
        templates: by (cursor, pinned NIC); kept by the group.
        routes_version: of the group's routes that the templates follow.
    """

    __slots__ = ("cycle", "limit_min", "nics", "remotes", "routes_version", "templates")

    def __init__(self, remotes: Sequence[Remote]) -> None:
        self.remotes = remotes
        self.nics = tuple(remote.nics for remote in remotes)
        self.cycle = math.lcm(*self.nics)
        self.limit_min = min(remote.nbytes for remote in remotes)
        self.routes_version = 0
        self.templates: dict[tuple[int, int | None], list[Template]] = {}

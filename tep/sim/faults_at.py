"""Faults that happen at a time, as frozen records, and short ways to write them. Data only.

What a record does is `chaos`' matter; which of them a swarm draws is `faults`'. The numbers are
those of the catalogue in `faults`. Times in records are ps; the functions take microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from tep.base.hashing import draw, stream_key
from tep.base.units import PS_PER_US
from tep.sim.streams import Stream

__all__ = [
    "Clog",
    "Cut",
    "Drift",
    "Fault",
    "KillNic",
    "Mute",
    "Pause",
    "Restart",
    "Revoke",
    "Slow",
    "Swizzle",
    "clog",
    "cut",
    "drift",
    "kill_nic",
    "mute",
    "pause",
    "restart",
    "revoke",
    "slow",
    "swizzle",
]


@dataclass(frozen=True, slots=True)
class KillNic:
    """A NIC dies for good: its rows end NIC_DOWN, rows towards it UNREACHABLE (F11)."""

    node: str
    nic: int


@dataclass(frozen=True, slots=True)
class Revoke:
    """One NIC, or with None each NIC, of a node loses its registrations of this moment (F14)."""

    node: str
    nic: int | None = None


@dataclass(frozen=True, slots=True)
class Restart:
    """A node crashes and comes back with its name, a later epoch, and nothing else (F15)."""

    node: str


@dataclass(frozen=True, slots=True)
class Slow:
    """A link is slow: what leaves or reaches the NIC takes `factor` times as long (F12)."""

    node: str
    nic: int
    factor: int = 10
    for_ps: int | None = None


@dataclass(frozen=True, slots=True)
class Clog:
    """A link carries nothing, and then all that was held; a flap, if short (F12, F22).

    A row that waits longer than `Chaos.dead_after_ps` ends UNREACHABLE.

    Attributes:
        inward: nothing reaches the NIC, and what it sends gets through; False: nothing either way.
    """

    node: str
    nic: int
    for_ps: int | None = None
    inward: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """Nothing passes from one NIC to another, while both reach all others (F28).

    A row that waits longer than `Chaos.dead_after_ps` ends UNREACHABLE; what is held lands later.

    Attributes:
        node, nic: where it comes from.
        peer, peer_nic: where it would go to.
        one_way: what the peer sends arrives, and is not acknowledged; False: nothing passes either
            way.
    """

    node: str
    nic: int
    peer: str
    peer_nic: int
    for_ps: int | None = None
    one_way: bool = False


@dataclass(frozen=True, slots=True)
class Mute:
    """A NIC hears no acknowledgement: its rows land, and it does not know (F21).

    A row that waits longer than `Chaos.dead_after_ps` ends UNREACHABLE, though it has landed.
    """

    node: str
    nic: int
    for_ps: int | None = None


@dataclass(frozen=True, slots=True)
class Drift:
    """An engine's clock jumps ahead, and runs faster or slower from then on (F30).

    Only the engine reads it: for time-outs and heartbeats. It never goes back.

    Attributes:
        ppm: so many millionths faster than the simulation's clock; above -1,000,000.
        ahead_ps: of the jump.
    """

    node: str
    ppm: int = 0
    ahead_ps: int = 0


@dataclass(frozen=True, slots=True)
class Pause:
    """A worker does not step for a while, as under a long callback or a stopped process (F19)."""

    node: str
    for_ps: int


@dataclass(frozen=True, slots=True)
class Swizzle:
    """The NICs 0 .. nics - 1 of a node are clogged one by one, and let go in another order (F22).

    Attributes:
        seed: of both orders.
        for_ps: from the first clog to the last release.
    """

    node: str
    nics: int
    for_ps: int
    seed: int = 0

    def clogs(self) -> tuple[tuple[int, Clog], ...]:
        """The clogs it stands for, with their delays."""
        key = stream_key(self.seed, Stream.FAULTS)
        nics = range(self.nics)
        stops = sorted(nics, key=lambda nic: draw(key, nic, 7))
        goes = sorted(nics, key=lambda nic: draw(key, nic, 8))
        if stops == goes and self.nics > 1:
            goes.append(goes.pop(0))
        step = max(1, self.for_ps // (2 * self.nics))
        starts = {nic: place * step for place, nic in enumerate(stops)}
        ends = {nic: self.for_ps - (self.nics - 1 - place) * step for place, nic in enumerate(goes)}
        return tuple(
            (starts[nic], Clog(self.node, nic, max(1, ends[nic] - starts[nic]))) for nic in stops
        )


Fault = KillNic | Revoke | Restart | Slow | Clog | Cut | Drift | Mute | Pause | Swizzle


def _ps(us: float | None) -> int | None:
    return None if us is None else max(1, round(us * PS_PER_US))


def kill_nic(node: str, nic: int) -> KillNic:
    """Say that a NIC dies for good."""
    return KillNic(node, nic)


def revoke(node: str, nic: int | None = None) -> Revoke:
    """Say that one NIC, or all NICs, of a node lose their registrations."""
    return Revoke(node, nic)


def restart(node: str) -> Restart:
    """Say that a node crashes and comes back."""
    return Restart(node)


def slow(node: str, nic: int, factor: int = 10, us: float | None = None) -> Slow:
    """Say that a link is slow for some microseconds; None: until the fabric is healed."""
    return Slow(node, nic, factor, _ps(us))


def clog(node: str, nic: int, us: float | None = None, *, inward: bool = False) -> Clog:
    """Say that a link carries nothing for some microseconds; None: until the fabric is healed.

    `inward`: nothing reaches the NIC, and what it sends gets through.
    """
    return Clog(node, nic, _ps(us), inward)


def cut(
    node: str,
    nic: int,
    peer: str,
    peer_nic: int,
    us: float | None = None,
    *,
    one_way: bool = False,
) -> Cut:
    """Say that nothing passes between two NICs for a while; None: until the fabric is healed.

    `one_way`: what the peer's NIC sends arrives.
    """
    return Cut(node, nic, peer, peer_nic, _ps(us), one_way)


def drift(node: str, ppm: int = 0, ahead_us: float = 0) -> Drift:
    """Say that an engine's clock jumps ahead, and is `ppm` millionths too fast from then on."""
    return Drift(node, ppm, round(ahead_us * PS_PER_US))


def mute(node: str, nic: int, us: float | None = None) -> Mute:
    """Say that a NIC hears no acknowledgement for a while; None: until the fabric is healed."""
    return Mute(node, nic, _ps(us))


def pause(node: str, us: float) -> Pause:
    """Say that a worker does not step for some microseconds."""
    return Pause(node, max(1, round(us * PS_PER_US)))


def swizzle(node: str, nics: int, us: float, seed: int = 0) -> Swizzle:
    """Say that NICs are clogged one by one and let go in another order, all within `us`."""
    return Swizzle(node, nics, max(1, round(us * PS_PER_US)), seed)

"""The faults of a drawn scenario, and the knobs of its fabric."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, TypeVar

from tep.base.hashing import draw
from tep.base.units import PS_PER_NS
from tep.sim.faults import (
    DRIFTS,
    Chaos,
    Clog,
    Cut,
    Drift,
    Fault,
    KillNic,
    Mute,
    Pause,
    Restart,
    Revoke,
    Slow,
    Swizzle,
)
from tests.world.specs import RECEIVERS, SENDER, TransferSpec, names_of

T = TypeVar("T")

_NS: Final = PS_PER_NS
SPREAD_PS: Final = 4000 * _NS
FAULT_PS: Final = 1000 * _NS
_LASTS_NS: Final = (200, 1000, 4000, 20_000, None)

ENDS: Final = ("plain", "fences fail", "NIC dies", "restart")
"""Causes of bytes that land after their transfer's end, in a run where node b removes node a."""


class Dice:
    """Draws by (entity, number); the same question has always the same answer."""

    __slots__ = ("key",)

    def __init__(self, key: int) -> None:
        self.key = key

    def below(self, entity: int, number: int, n: int) -> int:
        return (draw(self.key, entity, number) >> 32) * n >> 32  # below(), without the call

    def pick(self, entity: int, number: int, choices: tuple[T, ...]) -> T:
        return choices[(draw(self.key, entity, number) >> 32) * len(choices) >> 32]


def draw_faults(
    dice: Dice, theme: str, nics: tuple[int, ...], transfers: tuple[TransferSpec, ...]
) -> tuple[tuple[int, Fault], ...]:
    """Draw the faults of a run of this theme, mostly at times within one of the transfers."""
    nodes = names_of(nics, transfers)
    t_ps = transfers[dice.below(0, 20, len(transfers))].start_ps + dice.below(0, 21, FAULT_PS)
    node = dice.below(0, 22, len(nodes))
    nic = dice.below(0, 23, nics[node])
    match theme:
        case "kill":
            first: tuple[int, Fault] = (t_ps, KillNic(nodes[node], nic))
            if dice.below(0, 24, 3):
                return (first,)
            other = dice.below(0, 25, len(nodes))
            again = KillNic(nodes[other], dice.below(0, 26, nics[other]))
            return (first, (1 + dice.below(0, 27, SPREAD_PS), again))
        case "revoke":
            return ((t_ps, Revoke(nodes[node], nic if dice.below(0, 28, 4) else None)),)
        case "restart":
            # Soon: most of the transfers should meet the new incarnation.
            t_ps = min(spec.start_ps for spec in transfers) + dice.below(0, 29, FAULT_PS)
            return ((t_ps, Restart(nodes[max(node, 1)])),)
        case _:
            return ()


def draw_trouble(
    dice: Dice, nics: tuple[int, ...], transfers: tuple[TransferSpec, ...]
) -> tuple[tuple[int, Fault], ...]:
    """In one run of four links or workers are in trouble for a while, whatever else happens."""
    if dice.below(0, 41, 4):
        return ()
    names = names_of(nics, transfers)
    found: list[tuple[int, Fault]] = []
    for place in range(1 + dice.below(0, 42, 2)):
        entity = 1000 + place
        number = dice.below(entity, 1, len(names))
        node, nic = names[number], dice.below(entity, 2, nics[number])
        last_ns = dice.pick(entity, 3, _LASTS_NS)
        for_ps = None if last_ns is None else last_ns * _NS
        kind = dice.pick(entity, 4, (Clog, Clog, Mute, Mute, Slow, Swizzle, Pause))
        fault: Fault
        if kind is Slow:
            fault = Slow(node, nic, 2 + dice.below(entity, 5, 20), for_ps)
        elif kind is Swizzle:
            fault = Swizzle(node, nics[number], for_ps or SPREAD_PS, place)
        elif kind is Pause:
            fault = Pause(node, for_ps or SPREAD_PS)
        else:
            fault = Clog(node, nic, for_ps) if kind is Clog else Mute(node, nic, for_ps)
            if kind is Clog and dice.below(entity, 8, 3) == 0:
                # Not for ever: a NIC whose questions arrive, and no answer, goes on asking.
                fault = Clog(node, nic, for_ps or 5 * SPREAD_PS, inward=True)
        start_ps = transfers[dice.below(entity, 6, len(transfers))].start_ps
        found.append((start_ps + dice.below(entity, 7, FAULT_PS), fault))
    return tuple(found)


def draw_cuts(
    dice: Dice, nics: tuple[int, ...], transfers: tuple[TransferSpec, ...]
) -> tuple[tuple[int, Fault], ...]:
    """In one run of six a NIC of node a and one of a receiver do not reach each other any more."""
    if dice.below(0, 70, 6):
        return ()
    found: list[tuple[int, Fault]] = []
    for entity in range(1100, 1101 + dice.below(0, 71, 3)):
        number = 1 + dice.below(entity, 1, len(names_of(nics, transfers)) - 1)
        pair = [
            (SENDER, dice.below(entity, 2, nics[0])),
            (RECEIVERS[number - 1], dice.below(entity, 3, nics[number])),
        ]
        (node, nic), (peer, peer_nic) = pair if dice.below(entity, 4, 2) else reversed(pair)
        one_way = dice.below(entity, 5, 2) == 1
        last_ns = dice.pick(entity, 6, _LASTS_NS)
        for_ps = None if last_ns is None else last_ns * _NS
        if one_way:  # not for ever: who is heard, and hears no answer, goes on asking
            for_ps = for_ps or 5 * SPREAD_PS
        start_ps = transfers[dice.below(entity, 7, len(transfers))].start_ps
        start_ps += dice.below(entity, 8, FAULT_PS)
        found.append((start_ps, Cut(node, nic, peer, peer_nic, for_ps, one_way)))
    return tuple(found)


def draw_stuck(
    dice: Dice,
    first: int,
    nics: tuple[int, ...],
    starts_ps: list[int],
    kinds: tuple[type[Fault], ...] = (Mute, Clog),
    lasts_ns: tuple[int, ...] = (1000, 2000, 4000),
) -> tuple[tuple[int, Fault], ...]:
    """Cut links off under a request for so long that it is given up, and may come all the same."""
    found: list[tuple[int, Fault]] = []
    for entity in range(first, first + 1 + dice.below(0, 54, 3)):
        number = dice.below(entity, 1, 2)
        node, nic = (SENDER, RECEIVERS[0])[number], dice.below(entity, 2, nics[number])
        for_ps = dice.pick(entity, 3, lasts_ns) * _NS
        kind = dice.pick(entity, 4, kinds)
        fault: Fault
        if kind is KillNic:
            fault = KillNic(node, nic)
        elif kind is Pause:
            fault = Pause(node, for_ps)
        elif kind is Swizzle:
            fault = Swizzle(node, nics[number], for_ps, entity)
        else:
            fault = Clog(node, nic, for_ps) if kind is Clog else Mute(node, nic, for_ps)
        start_ps = starts_ps[dice.below(entity, 5, len(starts_ps))]
        found.append((start_ps + dice.below(entity, 6, 300 * _NS), fault))
    return tuple(found)


def draw_flaps(
    dice: Dice, nics: tuple[int, ...], spec: TransferSpec
) -> tuple[tuple[int, Fault], ...]:
    """Draw links that are cut for a while; in half of the runs always the links of one NIC."""
    found: list[tuple[int, Fault]] = []
    span_ps = spec.rounds * (spec.pace_ps + 3000 * _NS)
    one = dice.below(0, 112, 2)
    for k in range(1 + dice.below(0, 107, 6)):
        entity, which = 1200 + k, 1200 if one else 1200 + k
        number = dice.below(which, 1, 2)
        node, nic = (SENDER, RECEIVERS[0])[number], dice.below(which, 2, nics[number])
        peer, peer_nic = (RECEIVERS[0], SENDER)[number], dice.below(which, 3, nics[1 - number])
        for_ps = dice.pick(entity, 4, (2000, 10_000, 40_000, 100_000)) * _NS
        at_ps = spec.start_ps + dice.below(entity, 5, span_ps)
        if dice.below(entity, 6, 2):
            found.append((at_ps, Clog(node, nic, for_ps)))
        else:
            found.append((at_ps, Cut(node, nic, peer, peer_nic, for_ps)))
    return tuple(found)


def draw_silence(dice: Dice, nics: tuple[int, ...]) -> tuple[tuple[int, Fault], ...]:
    """In most runs in which node b is watched: something that may be taken for its end."""
    kind = dice.pick(0, 95, ("nothing", "pause", "one NIC", "one NIC", "all NICs", "all NICs"))
    t_ps = 1 + dice.below(0, 96, 150_000 * _NS)
    for_ps = dice.pick(0, 97, (30_000, 150_000, 250_000)) * _NS
    if kind == "pause":
        return ((t_ps, Pause(SENDER, for_ps)),)
    first, last = 0, nics[1]
    if kind != "all NICs":
        first = dice.below(0, 98, nics[1])
        last = first + (kind == "one NIC")
    return tuple((t_ps, Clog(RECEIVERS[0], nic, for_ps)) for nic in range(first, last))


def draw_drift(
    dice: Dice, nics: tuple[int, ...], transfers: tuple[TransferSpec, ...]
) -> tuple[tuple[int, Fault], ...]:
    """In one run of two the clock of one engine jumps, and runs at a speed of its own."""
    if dice.below(0, 73, 2):
        return ()
    names = names_of(nics, transfers)
    ahead_ns = dice.pick(0, 76, (0, 1000, 1_000_000))
    fault = Drift(dice.pick(0, 74, names), dice.pick(0, 75, DRIFTS), ahead_ns * _NS)
    return ((1 + dice.below(0, 77, FAULT_PS), fault),)


def draw_end(
    dice: Dice,
    nics: tuple[int, ...],
    transfers: tuple[TransferSpec, ...],
    *,
    stays: bool,
) -> tuple[tuple[int, Fault], ...]:
    """A NIC of node a dies, or the node restarts unless it stays, while b lets go of it."""
    how = dice.pick(0, 84, ENDS)
    t_ps = transfers[dice.below(0, 87, len(transfers))].start_ps + dice.below(0, 88, FAULT_PS)
    if how == "restart":
        return () if stays else ((t_ps, Restart(SENDER)),)
    return () if how == "plain" else ((t_ps, KillNic(SENDER, dice.below(0, 90, nics[0]))),)


def draw_close(
    dice: Dice, nics: tuple[int, ...], transfers: tuple[TransferSpec, ...]
) -> tuple[int, str]:
    """Draw the engine that is closed in the middle of the run, and the time."""
    return 1 + dice.below(0, 7, FAULT_PS), dice.pick(0, 34, names_of(nics, transfers))


def draw_chaos(dice: Dice, seed: int, theme: str) -> Chaos:
    """The knobs; in some runs those too that make rows and messages fail without an event."""
    peer_depth = dice.pick(0, 43, (0, 0, 0, 1, 2))
    fixed: dict[str, Any] = {
        "peer_depth": peer_depth,
        "register_fails": 0 if dice.below(0, 72, 8) else 64,
    }
    if dice.below(0, 40, 3):
        return Chaos.draw(seed, **fixed)
    drawn = Chaos.draw(seed, harm=True, datagram_loss=0, datagram_dup=0, **fixed)
    return drawn if theme in ("kill", "plain") else replace(drawn, cq_depth=0)

"""The draws of a scenario: what its applications do, what breaks, and the knobs of its fabric.

Each part draws from numbers of its own.
"""

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
from tests.world.specs import (
    RECEIVERS,
    SENDER,
    ReadKind,
    ReadSpec,
    TransferKind,
    TransferSpec,
    names_of,
)

T = TypeVar("T")

_NS: Final = PS_PER_NS
SPREAD_PS: Final = 4000 * _NS
FAULT_PS: Final = 1000 * _NS
_LASTS_NS: Final = (200, 1000, 4000, 20_000, None)

ENDS: Final = ("plain", "fences fail", "NIC dies", "restart")
"""Causes of bytes that land after their transfer's end, in a run where node b removes node a."""

_SPAN_PS: Final = 600 * _NS

_KINDS: Final[tuple[TransferKind, ...]] = (
    *("single", "single", "single", "paged", "paged", "paged"),
    *("per_page", "scatter", "scatter", "barrier"),
)
_SIZES: Final = (0, 1, 65, 200, 257, 515, 20_000)
PAGE_SIZES: Final = (8, 24, 32)
PAGES: Final = (2, 5, 12)

APART: Final[dict[str, Any]] = {
    "ordered": False,
    "fragments": 1,
    "last_late_ps": 0,
    "reorder_ps": 3000 * _NS,
    "skew_ps": (0,),
    "sq_depth": 6,
    "peer_depth": 0,
    "message_loss": 0,
}
"""Knobs by which rows that are posted together land far apart."""


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


def draw_nics(dice: Dice) -> tuple[int, ...]:
    """NICs of each node; in one run of three there are more than three, if they take part."""
    nics = tuple(1 + dice.below(0, number, 4) for number in (3, 4, 5))
    if dice.below(0, 6, 2):
        nics = (nics[0], nics[0], nics[2])  # equal counts: then lane k joins NIC k with NIC k
    if dice.below(0, 114, 3) == 0:
        nics += tuple(1 + dice.below(0, 116 + k, 3) for k in range(1 + dice.below(0, 115, 3)))
    return nics


def draw_transfer(dice: Dice, place: int, theme: str, *, wide: bool) -> TransferSpec:
    """Draw one of them; `wide`: a scatter or barrier that names a peer group."""
    kind = dice.pick(place, 1, _KINDS[-3:] if wide else _KINDS)
    span_ps = SPREAD_PS if theme in ("kill", "restart") else _SPAN_PS
    knobs: dict[str, Any] = {
        "kind": kind,
        "start_ps": 1 + dice.below(place, 2, span_ps),
        "expect_ps": dice.pick(place, 3, (1, 300 * _NS, 2500 * _NS)),
    }
    if kind in ("paged", "per_page"):
        knobs["size"] = dice.pick(place, 4, PAGE_SIZES)
        knobs["pages"] = dice.pick(place, 5, PAGES)
        knobs["gap"] = dice.pick(place, 6, (0, 8))
    elif kind != "barrier":
        knobs["size"] = dice.pick(place, 4, _SIZES)
        knobs["shards"] = dice.pick(place, 7, (0, 2, 3, 4))
    if kind == "scatter":
        knobs["by_bytes"] = dice.below(place, 8, 2) == 1
    if kind in ("scatter", "barrier"):
        knobs["grouped"] = wide or dice.below(place, 9, 2) == 1
    if kind != "barrier":
        knobs["silent"] = dice.below(place, 10, 16) == 0
    if dice.below(place, 11, 8) == 0:
        knobs["pinned"] = True
    how = dice.below(place, 12, 8)
    knobs["claimed"] = how == 0
    knobs["split"] = how == 1
    if theme == "recall" and dice.below(place, 13, 2):
        open_ps = max(knobs["start_ps"], knobs["expect_ps"])
        knobs["recall_ps"] = open_ps + dice.below(place, 14, FAULT_PS)
    if theme in ("rounds", "recall") or wide:
        knobs["rounds"] = 1 + dice.below(place, 15, 3)
        knobs["lined_up"] = dice.below(place, 16, 2) == 1
    if theme == "cancel" and dice.below(place, 17, 2):
        knobs["cancel_ps"] = dice.below(place, 18, 900 * _NS)
    if theme == "kill" and dice.below(place, 21, 10) == 0:
        knobs["cancel_ps"] = dice.below(place, 22, 1500 * _NS)
    if theme == "restart":
        knobs["stale"] = dice.below(place, 19, 3) == 0
    knobs["probe"] = dice.below(place, 20, 8) == 0
    knobs["prepared"] = dice.below(place, 25, 4) == 0
    return TransferSpec(**knobs)


def draw_shared(dice: Dice, transfers: tuple[TransferSpec, ...]) -> tuple[TransferSpec, ...]:
    """Have most transfers of a run share one immediate, and be in flight together."""
    near_ps, found = transfers[0].start_ps, []
    for place, spec in enumerate(transfers, 1):
        if spec.may_share and dice.below(place, 23, 4):
            start_ps = near_ps + dice.below(place, 24, 200 * _NS)
            found.append(replace(spec, shared=True, start_ps=start_ps))
        else:
            found.append(spec)
    return tuple(found)


def draw_together(
    dice: Dice, nlocal: int, count: int
) -> tuple[tuple[TransferSpec, ...], tuple[tuple[int, Fault], ...]]:
    """Transfers that share an immediate are on their way over one NIC when it dies.

    Some have landed then and others not, and none is acknowledged: the NIC heard no answer.
    """
    nic = dice.below(0, 81, nlocal)
    start_ps = 1 + dice.below(0, 82, _SPAN_PS)
    found = []
    for place in range(1, count + 1):
        nbytes = dice.pick(place, 40, (8, 200, 515, 20_000))
        expect_ps = 1 + dice.below(place, 42, _SPAN_PS)
        found.append(
            TransferSpec(
                size=nbytes - nbytes % nlocal + nic,  # which says where it is pinned to
                pinned=True,
                shared=True,
                start_ps=start_ps + dice.below(place, 41, 100 * _NS),
                expect_ps=expect_ps,
            )
        )
    died_ps = start_ps + 500 * _NS + dice.below(0, 83, 2500 * _NS)
    mute = Mute(SENDER, nic, 4000 * _NS)
    return tuple(found), ((start_ps, mute), (died_ps, KillNic(SENDER, nic)))


def draw_retries(
    dice: Dice,
    nics: tuple[int, ...],
    transfers: tuple[TransferSpec, ...],
    faults: tuple[tuple[int, Fault], ...],
    chaos: Chaos,
    *,
    failover: bool,
) -> tuple[tuple[TransferSpec, ...], tuple[tuple[int, Fault], ...], Chaos]:
    """Have transfers that fail tried again, in some runs while nearly all messages are lost."""
    unheard = failover and dice.below(0, 66, 3) == 0
    if unheard:
        transfers, faults = draw_shared(dice, transfers), ()
        chaos = replace(chaos, message_loss=15)
    transfers = tuple(
        _draw_again(dice, place, spec, cancels=3 - unheard)
        for place, spec in enumerate(transfers, 1)
    )
    if failover and not unheard and dice.below(0, 63, 3):
        loss = dice.pick(0, 65, (chaos.message_loss, 2, 6))  # answers too
        chaos = replace(chaos, late_land=dice.below(0, 64, 3), message_loss=loss)
        starts_ps = [spec.start_ps for spec in transfers]
        faults += draw_stuck(dice, 650, nics, starts_ps, (Mute, Clog, Pause, Swizzle))
    return transfers, faults, chaos


def _draw_again(dice: Dice, place: int, spec: TransferSpec, *, cancels: int) -> TransferSpec:
    """Have most transfers tried again, one of `cancels` after a cancel."""
    if dice.below(place, 26, cancels) == 0:
        spec = replace(spec, cancel_ps=dice.below(place, 27, 900 * _NS))
    if dice.below(place, 31, 6) == 0:
        return spec
    spec = replace(spec, claimed=False, split=False, recall_ps=None)
    if not spec.may_retry:
        return spec
    return replace(
        spec,
        again=dice.pick(place, 28, (0, 1, 2, 4)),
        again_ps=dice.pick(place, 29, (1, 1, 3000 * _NS, 30_000 * _NS)),
        restate_ps=dice.pick(place, 30, (1, 20_000 * _NS)),
    )


def draw_barring(
    dice: Dice, nics: tuple[int, ...], transfers: tuple[TransferSpec, ...]
) -> tuple[int, tuple[tuple[int, Fault], ...]]:
    """When node b lets go of node a, and trouble beneath the rows that are on their way then."""
    kinds, lasts_ns = (Mute, Clog, Pause, KillNic), (1000, 4000, 30_000, 400_000)
    starts_ps = [spec.start_ps for spec in transfers]
    bar_ps = dice.pick(0, 33, tuple(starts_ps)) + dice.below(0, 36, 4 * FAULT_PS)
    return bar_ps, draw_stuck(dice, 680, nics, starts_ps, kinds, lasts_ns)


def draw_late(dice: Dice, chaos: Chaos) -> Chaos:
    """Knobs by which bytes land long after the end of their transfer."""
    how = dice.pick(0, 84, ENDS)
    if how == "plain":
        return replace(chaos, late_land=dice.below(0, 68, 3))
    late_ps = dice.pick(0, 86, (5000, 100_000, 1_000_000)) * _NS
    fails = dice.pick(0, 89, (64, 255)) if how == "fences fail" else 0
    return replace(chaos, late_land=1 + dice.below(0, 85, 2), late_ps=late_ps, fence_fails=fails)


def draw_reads(dice: Dice, theme: str) -> tuple[ReadSpec, ...]:
    """In one run of three node a reads as well."""
    if dice.below(0, 50, 3):
        return ()
    return tuple(_draw_read(dice, 500 + k, theme) for k in range(1 + dice.below(0, 51, 3)))


def _draw_read(dice: Dice, entity: int, theme: str) -> ReadSpec:
    kind: ReadKind = dice.pick(entity, 1, ("single", "paged", "paged", "paged"))
    span_ps = SPREAD_PS if theme in ("kill", "restart") else _SPAN_PS
    start_ps = 1 + dice.below(entity, 2, span_ps)
    changes, cancels = (
        dice.below(entity, 7, 2),
        dice.below(entity, 9, 3 if theme == "cancel" else 10),
    )
    return ReadSpec(
        kind=kind,
        size=dice.pick(entity, 3, _SIZES if kind == "single" else (0, 8, 24, 32)),
        pages=1 if kind == "single" else dice.pick(entity, 4, PAGES),
        told=dice.below(entity, 6, 3) > 0,
        start_ps=start_ps,
        change_ps=start_ps + dice.below(entity, 8, FAULT_PS) if changes else None,
        cancel_ps=dice.below(entity, 10, 900 * _NS) if cancels == 0 else None,
    )

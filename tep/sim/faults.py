"""All that can go wrong on the chaos fabric: the knobs of one run, and its faults at times.

F1, F2, ... number the faults; the attributes of `Chaos` and the records say which is which. F17
(immediates that are alike in 16 bits) and F18 (receivers that expect early or late) are made by
whoever draws a scenario. Data only; `chaos` carries them out. Times are in ps.

Rule 1: a knob draws from its own number, so a new knob leaves the draws of all others, and every
recorded seed, alone. Rule 2: a knob may only do what some real fabric may do to a correct engine.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple, TypeVar

from tep.base.checks import U64_MAX, check_flag, check_int, shown
from tep.base.errors import BadRequest, UsageError
from tep.base.hashing import below, draw, stream_key
from tep.base.units import PS_PER_MS, PS_PER_NS
from tep.sim.draws import Label, Recorder, Stream

__all__ = [
    "FRAGMENTS_MAX", "GROUPS", "KNOBS", "Chaos", "Clog", "Cut", "Drift", "Fault", "Faults",
    "KillNic", "Knob", "Mute", "Pause", "Restart", "Revoke", "Slow", "Swizzle", "groups_of",
    "node_names",
]  # fmt: skip

T = TypeVar("T")

FRAGMENTS_MAX: Final = 5
"""Most pieces one row is cut into: four cuts of 16 bits are what one draw gives."""

_NS: Final = PS_PER_NS

_PS_MAX: Final = 2**62 - 1

_SKEWS: Final = tuple(
    tuple(delay * _NS for delay in skew)
    for skew in (
        *((0,), (0, 500, 0, 4000), (500, 0), (4000, 0, 500, 0)),
        *((0, 4000), (0, 0, 4000, 500), (0, 500, 500, 0), (0, 0, 0, 4000)),
    )
)


class Knob(NamedTuple):
    """The rules of one knob.

    Attributes:
        group: the group of faults that it belongs to; "": it is only set by hand.
        number: the number that it draws from: rule 1. 40 and up make a correct engine's rows,
            messages and NICs fail; no engine repairs 50 and up.
        choices: the values that are drawn, equally likely; one may stand twice.
        least, most: the bounds of a number.
        calm: the mildest value; None: the default.
    """

    group: str
    number: int
    choices: tuple[Any, ...]
    least: int
    most: int
    calm: Any


def _knob(
    default: T,
    group: str = "",
    number: int = 0,
    choices: tuple[Any, ...] = (),
    *,
    least: int = 0,
    most: int = _PS_MAX,
    calm: T | None = None,
) -> T:
    rules = Knob(group, number, choices, least, most, calm)
    found: T = field(default=default, metadata={"knob": rules})
    return found


_NO_YES: Final = (False, True)


# Quoted: 0.5 s for a dead peer is the shortest that RC with retry_cnt 7 and timeout 14 takes; 3 ms
# is the published tail of a callback under Python. All other sizes are choices.
@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """The knobs of one run; the defaults are an unordered, moderately hostile fabric.

    Times are ps. None of them stands for a real machine: they are sized so that the disorders meet
    each other within a few microseconds.

    Attributes:
        seed: of every draw the fabric makes; 0 or more.
        ordered: rows to one peer land in posting order, as on RC; False: any order, as on SRD (F1).
        reorder_ps: spread of each fragment's delay, at most 2**32 - 2; 0 = first in, first out.
        fragments: most pieces a row is cut into, 1 to 5, at any byte, each visible at once (F2).
        last_late_ps: extra delay of one fragment of each row (F3).
        skew_ps: extra latency of each NIC, by its number, repeated if there are more NICs (F4).
        dup_place: a fragment may be placed again before its row completes (F5).
        late_read: most source bytes are read when they land; False: when posted (F6).
        short_post: post() may take fewer rows than there is room for (F7).
        refuse_post: post() may take none although there is room (F7).
        sq_depth: rows that one NIC may hold (F8).
        peer_depth: rows that it may hold towards one peer's NIC, as a queue pair; 0 = any (F8).
        imm_credits: receives that an ordered NIC holds ready for immediates (F10).
        rnr_retries: number of retries of a row without a receive; -1 = for ever (F10).
        dead_after_ps: longest time until a row towards something dead fails (F11, F13).
        poll_delay_ps: longest time from a kick to the engine's step (F19).
        pause_ps: longest pause of a worker, once in about 64 steps; 0 = none (F19).
        cqe_limit: most entries that one poll() returns (F23).
        burst_ps: completions come out together, at most this late; 0 = each at once (F23).
        merge_cqes: neighbouring equal completions come out as one with a count (F23).
        flush_on_error: on an ordered fabric an error flushes the other rows to that peer (F24).
        key_reuse: a new incarnation gives its regions the key values of the old one (F16).
        key_again: a region gets the key values of one that was given back (F31).
        offsets: keys have base 0, as where a provider wants offsets; False: a made-up address.
        tie_shuffle: events of one instant come in an order drawn from the seed.
        cq_depth: completions that an unordered NIC holds; an immediate that finds no room kills the
            NIC; 0 = any number (F9).
        message_loss: so many of 16 messages end UNREACHABLE, half of them after they arrived (F20).
        datagram_loss, datagram_dup: so many of 16 datagrams are lost, or arrive twice (F20).
        late_land: rows that failed because their path died, or that were flushed, may land after
            their error, and rows of a host after its crash: 0 = no, 1 = bytes only, 2 = the
            immediate too (F25).
        late_ps: the longest delay of such a late landing.
        late_fence: a fence shuts out rows from its FENCED entry on; False: from the call on (F26).
        control_dup: so many of 16 control messages arrive twice (F20).
        odd_errors: so many of 256 landed rows end PROVIDER (F27).
        post_fails, connect_fails, register_fails: so many of 256 posts, new connections and
            registrations raise for lack of resources; a signal may also interrupt a post (F29).
        fence_fails: so many of 256 fences end PROVIDER, and keep nothing out (F32).
        corrupt: so many of 256 rows have one bit turned on their way, which no engine notices: only
            a comparison of bytes, or a checksum of the application, does (F33).
        kept: labels of the draws that are made, where all others come out tame, as `tep.sim.draws`
            has them; None: all are made. Shrinking a run sets it.
    """

    seed: int = _knob(0, most=U64_MAX)
    ordered: bool = _knob(False, "order", 1, _NO_YES)
    reorder_ps: int = _knob(
        400 * _NS, "order", 2, (0, 50 * _NS, 400 * _NS, 3000 * _NS), most=2**32 - 2, calm=0
    )
    fragments: int = _knob(4, "order", 3, (1, 2, 3, 4, 5), least=1, most=FRAGMENTS_MAX, calm=1)
    last_late_ps: int = _knob(0, "order", 4, (0, 0, 1500 * _NS))
    skew_ps: tuple[int, ...] = _knob((0,), "order", 5, _SKEWS)
    dup_place: bool = _knob(False, "order", 6, _NO_YES)
    late_read: bool = _knob(True, "order", 7, (True, True, True, True, False), calm=False)
    short_post: bool = _knob(True, "posting", 8, _NO_YES, calm=False)
    refuse_post: bool = _knob(False, "posting", 9, (False, False, False, True))
    sq_depth: int = _knob(4, "posting", 10, (1, 2, 3, 4, 5, 6), least=1, calm=64)
    peer_depth: int = _knob(0)
    imm_credits: int = _knob(8, "receives", 11, (1, 4, 8, 128), least=1, calm=1000)
    rnr_retries: int = _knob(-1, least=-1)
    dead_after_ps: int = _knob(
        300 * _NS, "nics", 12, (300 * _NS, 300 * _NS, 300 * _NS, 500 * PS_PER_MS), least=1
    )
    poll_delay_ps: int = _knob(
        50 * _NS, "workers", 13, (10 * _NS, 50 * _NS, 400 * _NS), least=1, calm=10 * _NS
    )
    pause_ps: int = _knob(0, "workers", 14, (0, 0, 0, 3 * PS_PER_MS))
    cqe_limit: int = _knob(4, "order", 15, (4, 4, 1, 64), least=1, calm=64)
    burst_ps: int = _knob(0, "order", 16, (0, 0, 800 * _NS))
    merge_cqes: bool = _knob(False, "order", 17, _NO_YES)
    flush_on_error: bool = _knob(False, "errors", 18, _NO_YES)
    key_reuse: bool = _knob(False, "restarts", 19, _NO_YES)
    key_again: bool = _knob(False)
    offsets: bool = _knob(False, "keys", 20, _NO_YES)
    tie_shuffle: bool = _knob(False, "order", 21, _NO_YES)
    cq_depth: int = _knob(0, "nics", 40, (0, 0, 2, 3))
    message_loss: int = _knob(0, "control", 41, (0, 0, 2, 6), most=16)
    datagram_loss: int = _knob(0, "control", 42, (0, 1, 4), most=16)
    datagram_dup: int = _knob(0, "control", 43, (0, 1, 4), most=16)
    late_land: int = _knob(0, "errors", 44, (0, 1, 1, 2), most=2)
    late_ps: int = _knob(0, "errors", 45, (0, 0, 5000 * _NS, 100_000 * _NS))
    late_fence: bool = _knob(False, "errors", 22, _NO_YES)
    control_dup: int = _knob(0, "control", 46, (0, 0, 4), most=16)
    odd_errors: int = _knob(0, "errors", 47, (0, 0, 0, 6), most=256)
    post_fails: int = _knob(0, "resources", 48, (0, 0, 0, 2), most=255)
    connect_fails: int = _knob(0, "resources", 49, (0, 0, 0, 24), most=255)
    register_fails: int = _knob(0, most=255)
    fence_fails: int = _knob(0, most=255)
    corrupt: int = _knob(0, "bytes", 50, (0, 4, 32), most=256)
    kept: Container[Label] | None = None

    def __post_init__(self) -> None:
        """Check every knob: UsageError with its name and value."""
        for name, kind, low, high in _RANGES:
            value: Any = getattr(self, name)
            plain = type(value) is kind
            if not plain or value < low or value > high:
                what = f"Chaos: {name}"
                flag = kind is bool
                sound = check_flag(what, value) if flag else check_int(what, value, low, high)
                object.__setattr__(self, name, sound)
        skews = self.skew_ps
        if not (isinstance(skews, tuple | list) and skews):
            raise BadRequest(f"Chaos: skew_ps={shown(skews)} is no tuple of times, one a NIC")
        delays = tuple([check_int("Chaos: skew_ps", ps, 0, _PS_MAX) for ps in skews])
        object.__setattr__(self, "skew_ps", delays)
        if self.kept is not None:
            object.__setattr__(self, "kept", _check_kept("Chaos: kept", self.kept))

    @classmethod
    def draw(cls, seed: int, *, harm: bool = False, **fixed: Any) -> Chaos:
        """Draw every knob for one run of a swarm.

        Args:
            seed: 0 or more; also becomes the fabric's own seed.
            harm: draw those too that make rows, messages or NICs fail.
            fixed: knobs that are not to be drawn.
        """
        knobs = [name for name, knob in KNOBS.items() if 0 < knob.number < (50 if harm else 40)]
        return cls(**({"seed": seed} | _draw_knobs(seed, knobs) | fixed))

    @classmethod
    def calm(cls, seed: int = 0, **knobs: Any) -> Chaos:
        """Make the mildest record: it has only the faults that `knobs` add."""
        return cls(**({"seed": seed} | _CALM | knobs))

    def __str__(self) -> str:
        """The knobs that differ from the defaults, as a line that makes the record again."""
        set_here = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"Chaos({', '.join(set_here)})"


KNOBS: Final[Mapping[str, Knob]] = {
    knob.name: knob.metadata["knob"] for knob in fields(Chaos) if knob.name != "kept"
}
_CALM: Final = {name: knob.calm for name, knob in KNOBS.items() if knob.calm is not None}
_RANGES: Final[tuple[tuple[str, type, int, int], ...]] = tuple(
    (knob.name, type(knob.default), KNOBS[knob.name].least, KNOBS[knob.name].most)
    for knob in fields(Chaos)
    if knob.name not in ("kept", "skew_ps")
)


def _draw_knobs(seed: int, names: Iterable[str]) -> dict[str, Any]:
    key, found = stream_key(seed, Stream.KNOBS), dict[str, Any]()
    for name in names:
        choices = KNOBS[name].choices
        found[name] = choices[below(draw(key, KNOBS[name].number), len(choices))]
    return found


def _check_kept(what: str, value: object) -> Container[Label]:
    """Return a recorder of draws, or a tuple of labels."""
    if isinstance(value, Recorder):
        return value
    if isinstance(value, tuple) and all(isinstance(one, tuple) and len(one) == 3 for one in value):
        stream, entity, index = zip(*value) if value else ((), (), ())
        for k in (*stream, *entity, *index):
            check_int(what, k, 0, U64_MAX)
        return value
    raise BadRequest(f"{what}={shown(value)} is no tuple of labels (stream, entity, index)")


GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("order", "posting", "receives"), ()),
    "workers": ("Pause", "Drift"),
    "nics": ("KillNic",),
    "links": ("Slow", "Clog", "Cut", "Mute", "Swizzle"),
    "keys": ("Revoke",),
    "restarts": ("Restart",),
    **dict.fromkeys(("control", "errors", "resources", "bytes"), ()),
}
"""The groups that a swarm can be restricted to, with the records of each; its knobs name it."""

_UNASKED: Final = frozenset(GROUPS) - {"bytes"}
"""The groups of "all": under these an engine keeps its promises; it repairs no corrupted byte."""


def groups_of(kinds: str | Iterable[str]) -> frozenset[str]:
    """Read a choice of groups: "all", "none", or names, in one string or several.

    "all" is without "bytes", whose fault only a checksum of the application finds: name it beside
    "all" to have it too.

    Raises:
        UsageError: a name that is no group's.
    """
    names = kinds.replace(",", " ").split() if isinstance(kinds, str) else list(kinds)
    if "all" in names and not set(names) - {"all", "bytes"}:
        return _UNASKED | frozenset(names) - {"all"}
    if names == ["none"]:
        return frozenset()
    unknown = sorted(set(names) - set(GROUPS))
    if unknown or not names:
        raise UsageError(
            f"faults={kinds!r}: {', '.join(unknown) or 'nothing'} is no group; "
            f"there are: all, none, {', '.join(GROUPS)}"
        )
    return frozenset(names)


def node_names(nodes: int) -> tuple[str, ...]:
    """The names of so many nodes where nobody gives them others: a, b, ..., z, n26, ..."""
    return tuple(chr(ord("a") + k) if k < 26 else f"n{k}" for k in range(nodes))


@dataclass(frozen=True, slots=True)
class Faults:
    """All that goes wrong in one run: faults at times, and the knobs of the fabric.

    Attributes:
        events: (time in ps, fault) pairs.
        chaos: the knobs.
    """

    events: tuple[tuple[int, Fault], ...] = ()
    chaos: Chaos = Chaos()

    @classmethod
    def draw(
        cls,
        seed: int,
        nics: dict[str, int],
        *,
        kinds: str | Iterable[str] = "all",
        from_ps: int = 1,
        to_ps: int = 1500 * _NS,
    ) -> Faults:
        """Draw the knobs, and no event (3 runs of 7) or a few.

        Args:
            seed: 0 or more.
            nics: number of NICs of each node that may be hit.
            kinds: the groups of faults to draw from, as `groups_of` reads them.
            from_ps: earliest time of an event.
            to_ps: latest time, at most 2**32 later.
        """
        groups = groups_of(kinds)
        knobs = [name for name, knob in KNOBS.items() if knob.group in groups]
        chaos = Chaos.calm(seed, **_draw_knobs(seed, knobs))
        free = {kind for group in groups for kind in GROUPS[group]}
        dice = stream_key(seed, Stream.FAULTS)
        possible = [kind for kind in _EVENTS if kind in free]
        events: list[tuple[int, Fault]] = []
        if possible and below(draw(dice, 1), 7) > 2:
            for place in range(1 + below(draw(dice, 2), 3)):
                t_ps = from_ps + below(draw(dice, 3, place), to_ps - from_ps + 1)
                events.append((t_ps, _draw_event(dice, place, possible, nics)))
        return cls(tuple(sorted(events, key=lambda event: event[0])), chaos)

    def __str__(self) -> str:
        """A line that makes the record again."""
        return f"Faults({self.events!r}, {self.chaos})"


_EVENTS: Final = (
    *("KillNic", "KillNic", "KillNic"),
    *("Restart", "Revoke", "Slow", "Clog", "Clog", "Mute", "Swizzle", "Pause"),
)
DRIFTS: Final = (-500_000, -100, 100, 1_000_000)
"""Millionths: half as fast, twice as fast, and quartz at its worst."""
_AHEAD_PS: Final = PS_PER_MS
_LASTS: Final = (300 * _NS, 2000 * _NS, 8000 * _NS, None)


def _draw_event(dice: int, place: int, possible: Sequence[str], nics: Mapping[str, int]) -> Fault:
    """One fault, anywhere."""
    names = sorted(nics)
    node = names[below(draw(dice, 4, place), len(names))]
    nic = below(draw(dice, 5, place), nics[node])
    for_ps = _LASTS[below(draw(dice, 6, place), len(_LASTS))]
    match possible[below(draw(dice, 7, place), len(possible))]:
        case "KillNic":
            return KillNic(node, nic)
        case "Restart":
            return Restart(node)
        case "Revoke":
            return Revoke(node, nic if below(draw(dice, 8, place), 4) else None)
        case "Slow":
            return Slow(node, nic, 3 + below(draw(dice, 8, place), 20), for_ps)
        case "Clog":
            others = [name for name in names if name != node]
            if others and below(draw(dice, 10, place), 3) == 0:
                peer = others[below(draw(dice, 11, place), len(others))]
                theirs = below(draw(dice, 12, place), nics[peer])
                one_way = below(draw(dice, 13, place), 2) == 1
                return Cut(node, nic, peer, theirs, for_ps, one_way)
            return Clog(node, nic, for_ps, inward=below(draw(dice, 9, place), 3) == 0)
        case "Mute":
            return Mute(node, nic, for_ps)
        case "Swizzle":
            return Swizzle(node, nics[node], for_ps or _LASTS[1] or 1, place)
        case _:
            if below(draw(dice, 10, place), 3) == 0:
                ppm = DRIFTS[below(draw(dice, 11, place), len(DRIFTS))]
                return Drift(node, ppm, below(draw(dice, 12, place), _AHEAD_PS))
            return Pause(node, for_ps or _LASTS[2] or 1)


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
        inward: nothing reaches the NIC, and its own rows get through; False: nothing passes.
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
        node, nic: the sending end.
        peer, peer_nic: the receiving end.
        one_way: rows of the peer arrive, but are not acknowledged; False: nothing passes in either
            direction.
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

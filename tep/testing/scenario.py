"""Scenarios: what applications and a hostile fabric do in one small run, as frozen records.

Data and its drawing only; `tep.testing.oracle` plays and judges them. Every record prints as a
literal that can be pasted into a test.

Rule 1: a drawn scenario is a function of one integer; each field draws from its own number, so that
a new field leaves all others, and every recorded seed, as they were.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final, Literal, TypeVar, get_args

from tep.checks import check_int, shown
from tep.errors import BadRequest
from tep.hashing import draw, stream_key
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
from tep.sim.streams import Stream
from tep.testing.sizes import Sizes, check_sizes, draw_sizes
from tep.units import IMM_MAX, PS_PER_NS

__all__ = [
    "IMMS",
    "MESSAGES_MAX",
    "PAGES_MAX",
    "READS_MAX",
    "RECEIVERS",
    "SENDER",
    "TRANSFERS_MAX",
    "ReadKind",
    "ReadSpec",
    "Scenario",
    "TransferKind",
    "TransferSpec",
]

T = TypeVar("T")

TransferKind = Literal["single", "paged", "per_page", "scatter", "barrier"]
ReadKind = Literal["single", "paged", "gather"]

IMMS: Final = (1, 0x10001, 7, IMM_MAX, 0x20007, 3)
"""The immediate of each transfer, by its place: some alike in their lower 16 bits, the largest."""

TRANSFERS_MAX: Final = len(IMMS)
PAGES_MAX: Final = 12
MESSAGES_MAX: Final = 8
READS_MAX: Final = 4
SENDER: Final = "a"
RECEIVERS: Final = ("b", "c", "d", "e", "f")

_NS: Final = PS_PER_NS
_SPAN_PS: Final = 600 * _NS
_SPREAD_PS: Final = 4000 * _NS
_STEADY_ROUNDS: Final = 10
_FAULT_PS: Final = 1000 * _NS

_BOUNDS: Final[dict[str, tuple[int, int | None]]] = {
    "size": (0, None),
    "pages": (1, PAGES_MAX),
    "gap": (0, None),
    "shards": (0, None),
    "start_ps": (1, None),
    "expect_ps": (1, None),
    "rounds": (1, None),
    "pace_ps": (1, None),
    "again": (0, None),
    "again_ps": (1, None),
    "restate_ps": (1, None),
    "lead_ps": (0, None),
}
"""The least and the most of each number of a TransferSpec."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TransferSpec:
    """One transfer, and what its receivers do. Times are ps.

    Attributes:
        kind: the verb; per_page is a paged write with an immediate of its own on every page.
        size: bytes of the write, of each page, or of the first receiver's slice.
        pages: of a paged write.
        gap: bytes between a page and the next, on both sides.
        shards: cut a single write, or each slice of a scatter by bytes, in so many shards, but no
            more than there are lanes; 0 = as the engine decides.
        pinned: whether only one NIC of the sender may carry it.
        by_bytes: a scatter's slices go over all NICs.
        grouped: a scatter or barrier names a peer group.
        silent: without an immediate, so that no receiver can know.
        start_ps: when it is submitted.
        expect_ps: when the receivers say what they expect; may be before the start or long after.
        claimed: the receivers claim the immediate with on_imm in place of expecting it.
        split: the receivers expect it in two parts, one behind the other.
        recall_ps: when the receivers take their expectations back and state them again, or None.
        rounds: how often it is done, each time after the one before; the immediate is the same.
        pace_ps: time from the end of a round to the next.
        lined_up: the expectations of all rounds are stated at once, not each after the one before.
        cancel_ps: when it is cancelled, counted from its start, or None.
        stale: it names the receivers by the descriptors they had before a restart.
        probe: right after its submit somebody tries to give the source region back.
        prepared: it is prepared in its first round, and submitted at an offset in the others.
        shared: all that are shared have one immediate, and receivers expect the sum of them.
        again: how often it is tried again, from other bytes, after it failed or was cancelled.
        again_ps: time from its end to the next try.
        restate_ps: time after which receivers state an expectation again that failed.
        lease_ps: the receivers lease the bytes of each round for so long; None: no leases.
        lead_ps: how long before its start the first leases are granted.
        revoke_ps: when the receivers ask a lease back, counted from its grant, or None.
        renew_ps: when they renew it, likewise.
        unfenced: no path that is up is fenced off to end a lease.
    """

    kind: TransferKind = "single"
    size: int = 8
    pages: int = 1
    gap: int = 0
    shards: int = 0
    pinned: bool = False
    by_bytes: bool = False
    grouped: bool = False
    silent: bool = False
    start_ps: int = 1
    expect_ps: int = 1
    claimed: bool = False
    split: bool = False
    recall_ps: int | None = None
    rounds: int = 1
    pace_ps: int = 1
    lined_up: bool = False
    cancel_ps: int | None = None
    stale: bool = False
    probe: bool = False
    prepared: bool = False
    shared: bool = False
    again: int = 0
    again_ps: int = 1
    restate_ps: int = 1
    lease_ps: int | None = None
    lead_ps: int = 0
    revoke_ps: int | None = None
    renew_ps: int | None = None
    unfenced: bool = False

    def __post_init__(self) -> None:
        assert self.kind in get_args(TransferKind), self.kind
        for name, (low, high) in _BOUNDS.items():
            _settle(self, name, low, high)
        for name in ("recall_ps", "cancel_ps", "lease_ps", "revoke_ps", "renew_ps"):
            if getattr(self, name) is not None:
                _settle(self, name, 0)
        assert not (self.silent and self.kind == "barrier"), "a barrier is just its immediate"
        assert not self.shared or self.may_share, "alone with its immediate"
        assert not self.leased or self.may_lease, "no bytes, or those of earlier tries"
        assert not self.again or self.may_retry, "a retry would be counted on top of what came"

    def __repr__(self) -> str:
        return _literal(self)

    @property
    def wide(self) -> bool:
        """Whether it goes to all receivers, and not to the first alone."""
        return self.kind in ("scatter", "barrier")

    @property
    def may_share(self) -> bool:
        """Whether others may have its immediate: rows without bytes are known by it, rounds too."""
        return self.kind in ("single", "paged", "scatter") and not self.silent and self.rounds == 1

    @property
    def may_retry(self) -> bool:
        """Whether it may be tried again as a whole: its receiver waits for one count of it."""
        kept = self.silent or self.claimed or self.split or self.lined_up
        one = self.kind in ("single", "paged") and self.size > 0  # bytes tell the tries apart
        return one and not (kept or self.leased) and self.recall_ps is None

    @property
    def leased(self) -> bool:
        """Whether it goes to leased bytes."""
        return self.lease_ps is not None

    @property
    def may_lease(self) -> bool:
        """Whether it can be written under leases of each try's own: it has bytes, and no past."""
        has_bytes = self.size > 0 or self.kind == "scatter"
        return has_bytes and self.kind != "barrier" and not (self.stale or self.prepared)

    def page_imm(self, imm: int, page: int) -> int:
        """The immediate of one page; no two pages, and no two transfers, share one."""
        return imm ^ page << 20 if self.kind == "per_page" else imm


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ReadSpec:
    """One read of node a, and what the owners do. Times are ps.

    Attributes:
        kind: the verb; a gather reads from b and, where c takes part, from c by turns.
        size: bytes of the read, of each page, or of each slice.
        pages: of a paged read; slices of a gather.
        by_bytes: a gather's slices go over all NICs.
        told: the owners get an immediate when all is read, and free what was read.
        prepared: it is prepared once, and submitted at an offset.
        start_ps: when it is submitted.
        change_ps: when the owners write new bytes there, or None.
        cancel_ps: when it is cancelled, counted from its start, or None.
    """

    kind: ReadKind = "single"
    size: int = 8
    pages: int = 1
    by_bytes: bool = False
    told: bool = False
    prepared: bool = False
    start_ps: int = 1
    change_ps: int | None = None
    cancel_ps: int | None = None

    def __post_init__(self) -> None:
        assert self.kind in get_args(ReadKind), self.kind
        for name in ("size", "pages", "start_ps"):
            _settle(self, name, *_BOUNDS[name])
        for name in ("change_ps", "cancel_ps"):
            if getattr(self, name) is not None:
                _settle(self, name, 0)

    def __repr__(self) -> str:
        return _literal(self)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Scenario:
    """One run: node "a" sends to "b", and where a transfer is wide also to "c" and the others, if
    there are more; and reads there.

    Attributes:
        nics: NICs of a, b, c and, up to f, of as many more nodes as there are.
        transfers: 1 to TRANSFERS_MAX.
        reads: 0 to READS_MAX.
        chaos: the fabric's knobs.
        faults: (time in ps, fault); node a restarts only where it writes, and nothing else: no
            reads, messages and answers, no end of an engine, and nobody is told of failures.
        close: (time in ps, node) at which one engine is closed, or None.
        messages: how many messages a sends to b, one after the other from the start.
        buffers: receive buffers that b has for them.
        echo: each count that fires is answered by an empty write back to a.
        failover: whether engines make rows good whose NIC died.
        tell_failures: whether receivers are told which immediates do not come.
        sizes: constants of the engine that are small in this run, as `tep.testing.sizes` has them.
        watched: node a asks node b again and again whether it is there.
        remove_ps: when node a is told to let go of node b, or None; not where receivers are told
            of failures, since who removes a peer forgets what it has to tell it.
    """

    nics: tuple[int, ...] = (1, 1, 1)
    transfers: tuple[TransferSpec, ...]
    reads: tuple[ReadSpec, ...] = ()
    chaos: Chaos
    faults: tuple[tuple[int, Fault], ...] = ()
    close: tuple[int, str] | None = None
    messages: int = 0
    buffers: int = 2
    echo: bool = False
    failover: bool = True
    tell_failures: bool = False
    sizes: Sizes = ()
    watched: bool = False
    remove_ps: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", check_sizes(self.sizes))
        _settle(self, "messages", 0, MESSAGES_MAX)
        _settle(self, "buffers", 1)
        if self.remove_ps is not None:
            _settle(self, "remove_ps", 1)
            assert not self.tell_failures, "who removes a peer forgets what it has to tell it"
        assert 1 <= len(self.transfers) <= TRANSFERS_MAX, len(self.transfers)
        assert len(self.reads) <= READS_MAX, len(self.reads)
        if not isinstance(self.nics, tuple) or not 3 <= len(self.nics) <= 1 + len(RECEIVERS):
            what = f"Scenario: nics={shown(self.nics)} are not three numbers: of a, b, c"
            raise BadRequest(f"{what}, or up to six where there are more nodes")
        counts = tuple(check_int("Scenario: nics", n, 1, 4) for n in self.nics)
        object.__setattr__(self, "nics", counts)
        if any(isinstance(fault, Restart) and fault.node == SENDER for _, fault in self.faults):
            more = self.reads or self.messages or self.echo or self.tell_failures or self.close
            more = more or self.watched or self.remove_ps is not None
            assert not more, "node a restarts, and does more than to write"
        for spec in self.transfers if self.tell_failures else ():
            assert spec.recall_ps is None, "what fails is not taken back"
            assert not spec.lined_up, "what fails is stated again before the next one"
        again = {spec.shared for spec in self.transfers if spec.again}
        if not (self.tell_failures and self.failover):
            assert not again, "rows in doubt would count"
        if True in again:
            claims = any(spec.shared and spec.claimed for spec in self.transfers)
            assert not claims, "a claimed arrival was handed out: nobody takes it back"

    def __repr__(self) -> str:
        return _literal(self)

    @property
    def wide(self) -> bool:
        """Whether node c takes part, and those after it."""
        return any(spec.wide for spec in self.transfers)

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes that take part, the sender first."""
        return _names(self.nics, self.transfers)

    @property
    def steady(self) -> bool:
        """Whether one transfer comes again and again, long enough for links to flap meanwhile."""
        return self.transfers[0].rounds >= _STEADY_ROUNDS

    def mates(self, place: int) -> tuple[int, ...]:
        """The places of the transfers under the immediate of one of them, itself included."""
        if not self.transfers[place].shared:
            return (place,)
        return tuple(k for k, spec in enumerate(self.transfers) if spec.shared)

    def imm(self, place: int) -> int:
        """The immediate of a transfer."""
        return IMMS[self.mates(place)[0]]

    @classmethod
    def draw(cls, seed: int) -> Scenario:
        """Draw one run of a swarm: first what happens at all, then how much of it.

        Args:
            seed: 0 or more; also the seed of the fabric's own draws.
        """
        seed = check_int("Scenario: seed", seed, 0, 2**63 - 1)
        dice = _Dice(stream_key(seed, Stream.SCENARIO))
        theme = dice.pick(0, 1, _THEMES)
        # What a restart or a dead NIC changes shows in the transfers after it.
        fewest = 2 if theme in ("kill", "restart") else 1
        count = fewest + dice.below(0, 2, 5 - fewest)
        nics = _draw_nics(dice)
        wide = theme in ("kill", "restart") and dice.below(0, 8, 3) == 0
        transfers = tuple(
            _draw_transfer(dice, place, theme, wide=wide) for place in range(1, count + 1)
        )
        if dice.below(0, 61, 3) == 0:
            transfers = _draw_shared(dice, transfers)
        reads = _draw_reads(dice, theme)
        chaos = _draw_chaos(dice, seed, theme)
        faults = _draw_faults(dice, theme, nics, transfers) + _draw_trouble(dice, nics, transfers)
        if reads and dice.below(0, 52, 2):
            chaos = replace(chaos, late_land=1 + dice.below(0, 53, 2))
            faults += _draw_stuck(dice, 600, nics, [spec.start_ps for spec in reads])
        failover = dice.below(0, 35, 4) > 0
        if failover and theme == "kill" and dice.below(0, 80, 3) == 0:
            nics = (max(2, nics[0]), *nics[1:])
            transfers, faults = _draw_together(dice, nics[0], count)
            chaos = replace(chaos, **_APART)
        cuts = _draw_cuts(dice, nics, transfers) if failover else ()
        faults += _draw_drift(dice, nics, transfers) + cuts
        tells = dice.below(0, 62, 4) == 0
        if tells:
            transfers, faults, chaos = _draw_telling(
                dice, nics, transfers, faults, chaos, failover=failover
            )
        if dice.below(0, 67, 6) == 0:
            transfers, more = _draw_leasing(dice, nics, transfers, failover=failover)
            faults += more + _draw_end(dice, nics, transfers, stays=tells or theme == "close")
            chaos = _draw_late(dice, chaos)
        reborn = any(fault == Restart(SENDER) for _, fault in faults)
        drawn = cls(
            nics=nics,
            transfers=transfers,
            reads=() if reborn else reads,
            # Where rows land late, what failed would land in the memory that has its key then.
            chaos=replace(chaos, key_again=dice.below(0, 78, 2) > 0 and not chaos.late_land),
            faults=faults,
            close=_draw_close(dice, nics, transfers) if theme == "close" else None,
            messages=0 if reborn or dice.below(0, 30, 4) else 1 + dice.below(0, 31, 6),
            buffers=1 + dice.below(0, 32, 2),
            echo=dice.below(0, 33, 4) == 0 and not reborn,
            failover=failover,
            tell_failures=tells,
            sizes=draw_sizes(partial(dice.below, 700)) if dice.below(0, 60, 2) else (),
        )
        return drawn if reborn else _in_company(dice, drawn)


_THEMES: Final = (
    "plain",
    "rounds",
    "rounds",
    "cancel",
    "kill",
    "kill",
    "kill",
    "restart",
    "restart",
    "revoke",
    "recall",
    "close",
)


class _Dice:
    """Draws by (entity, number); the same question has always the same answer."""

    __slots__ = ("key",)

    def __init__(self, key: int) -> None:
        self.key = key

    def below(self, entity: int, number: int, n: int) -> int:
        return (draw(self.key, entity, number) >> 32) * n >> 32  # below(), without the call

    def pick(self, entity: int, number: int, choices: tuple[T, ...]) -> T:
        return choices[(draw(self.key, entity, number) >> 32) * len(choices) >> 32]


def _draw_nics(dice: _Dice) -> tuple[int, ...]:
    """NICs of each node; in one run of three there are more than three, if they take part."""
    nics = tuple(1 + dice.below(0, number, 4) for number in (3, 4, 5))
    if dice.below(0, 6, 2):
        nics = (nics[0], nics[0], nics[2])  # equal counts: then lane k joins NIC k with NIC k
    if dice.below(0, 114, 3) == 0:
        nics += tuple(1 + dice.below(0, 116 + k, 3) for k in range(1 + dice.below(0, 115, 3)))
    return nics


_KINDS: Final[tuple[TransferKind, ...]] = (
    "single",
    "single",
    "single",
    "paged",
    "paged",
    "paged",
    "per_page",
    "scatter",
    "scatter",
    "barrier",
)
_SIZES: Final = (0, 1, 65, 200, 257, 515, 20_000)
_PAGE_SIZES: Final = (8, 24, 32)
_PAGES: Final = (2, 5, 12)


def _draw_transfer(dice: _Dice, place: int, theme: str, *, wide: bool) -> TransferSpec:
    """Draw one of them; `wide`: a scatter or barrier that names a peer group."""
    kind = dice.pick(place, 1, _KINDS[-3:] if wide else _KINDS)
    span_ps = _SPREAD_PS if theme in ("kill", "restart") else _SPAN_PS
    knobs: dict[str, Any] = {
        "kind": kind,
        "start_ps": 1 + dice.below(place, 2, span_ps),
        "expect_ps": dice.pick(place, 3, (1, 300 * _NS, 2500 * _NS)),
    }
    if kind in ("paged", "per_page"):
        knobs["size"] = dice.pick(place, 4, _PAGE_SIZES)
        knobs["pages"] = dice.pick(place, 5, _PAGES)
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
        knobs["recall_ps"] = open_ps + dice.below(place, 14, _FAULT_PS)
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


def _draw_shared(dice: _Dice, transfers: tuple[TransferSpec, ...]) -> tuple[TransferSpec, ...]:
    """Have most transfers of a run share one immediate, and be in flight together."""
    near_ps, found = transfers[0].start_ps, []
    for place, spec in enumerate(transfers, 1):
        if spec.may_share and dice.below(place, 23, 4):
            start_ps = near_ps + dice.below(place, 24, 200 * _NS)
            found.append(replace(spec, shared=True, start_ps=start_ps))
        else:
            found.append(spec)
    return tuple(found)


def _draw_together(
    dice: _Dice, nlocal: int, count: int
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


_APART: Final[dict[str, Any]] = {
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


def _draw_telling(
    dice: _Dice,
    nics: tuple[int, ...],
    transfers: tuple[TransferSpec, ...],
    faults: tuple[tuple[int, Fault], ...],
    chaos: Chaos,
    *,
    failover: bool,
) -> tuple[tuple[TransferSpec, ...], tuple[tuple[int, Fault], ...], Chaos]:
    """What changes in a run whose receivers are told of failures."""
    unheard = failover and dice.below(0, 66, 3) == 0
    if unheard:  # a list that was taken is sent again, when the retry has arrived
        transfers, faults = _draw_shared(dice, transfers), ()
        chaos = replace(chaos, message_loss=15)
    transfers = tuple(
        _draw_again(dice, place, spec, failover=failover, cancels=3 - unheard)
        for place, spec in enumerate(transfers, 1)
    )
    if failover and not unheard and dice.below(0, 63, 3):
        loss = dice.pick(0, 65, (chaos.message_loss, 2, 6))  # answers too
        chaos = replace(chaos, late_land=dice.below(0, 64, 3), message_loss=loss)
        starts_ps = [spec.start_ps for spec in transfers]
        faults += _draw_stuck(dice, 650, nics, starts_ps, (Mute, Clog, Pause, Swizzle))
    return transfers, faults, chaos


def _draw_again(
    dice: _Dice, place: int, spec: TransferSpec, *, failover: bool, cancels: int
) -> TransferSpec:
    """Have most transfers tried again under their immediate, one of `cancels` after a cancel."""
    # What fails is stated again on its own: nobody takes it back, or has stated the next one.
    spec = replace(spec, recall_ps=None, lined_up=False)
    if not failover or dice.below(place, 31, 6) == 0:
        return replace(spec, claimed=spec.claimed and not spec.shared)  # others are tried again
    spec = replace(spec, claimed=False, split=False)
    if not spec.may_retry:
        return spec
    if dice.below(place, 26, cancels) == 0:
        spec = replace(spec, cancel_ps=dice.below(place, 27, 900 * _NS))
    return replace(
        spec,
        again=dice.pick(place, 28, (0, 1, 2, 4)),
        again_ps=dice.pick(place, 29, (1, 1, 3000 * _NS, 30_000 * _NS)),
        restate_ps=dice.pick(place, 30, (1, 20_000 * _NS)),
    )


def _draw_leasing(
    dice: _Dice,
    nics: tuple[int, ...],
    transfers: tuple[TransferSpec, ...],
    *,
    failover: bool,
) -> tuple[tuple[TransferSpec, ...], tuple[tuple[int, Fault], ...]]:
    """Write most transfers under leases; where rows are made good, with trouble beneath them."""
    leased = tuple(_draw_leased(dice, place, spec) for place, spec in enumerate(transfers, 1))
    if not failover:
        return leased, ()
    kinds, lasts_ns = (Mute, Clog, Pause, KillNic), (1000, 4000, 30_000, 400_000)
    starts_ps = [spec.start_ps for spec in leased]
    return leased, _draw_stuck(dice, 680, nics, starts_ps, kinds, lasts_ns)


_ENDS: Final = ("plain", "fences fail", "NIC dies", "restart")
"""What makes bytes land after the end of their transfer in a run with leases."""


def _draw_late(dice: _Dice, chaos: Chaos) -> Chaos:
    """Knobs by which bytes land long after the end of their transfer."""
    how = dice.pick(0, 84, _ENDS)
    if how == "plain":
        return replace(chaos, late_land=dice.below(0, 68, 3))
    late_ps = dice.pick(0, 86, (5000, 100_000, 1_000_000)) * _NS
    fails = dice.pick(0, 89, (64, 255)) if how == "fences fail" else 0
    return replace(chaos, late_land=1 + dice.below(0, 85, 2), late_ps=late_ps, fence_fails=fails)


def _draw_end(
    dice: _Dice,
    nics: tuple[int, ...],
    transfers: tuple[TransferSpec, ...],
    *,
    stays: bool,
) -> tuple[tuple[int, Fault], ...]:
    """A NIC of node a dies, or the node restarts unless it stays, while it writes under leases."""
    how = dice.pick(0, 84, _ENDS)
    t_ps = transfers[dice.below(0, 87, len(transfers))].start_ps + dice.below(0, 88, _FAULT_PS)
    if how == "restart":
        return () if stays else ((t_ps, Restart(SENDER)),)
    return () if how == "plain" else ((t_ps, KillNic(SENDER, dice.below(0, 90, nics[0]))),)


def _draw_leased(dice: _Dice, place: int, spec: TransferSpec) -> TransferSpec:
    """Have most transfers written under leases that run out, or are asked back."""
    spec = replace(spec, prepared=False, stale=False, again=0)
    if not spec.may_lease or dice.below(place, 33, 5) == 0:
        return spec
    return replace(
        spec,
        lease_ps=dice.pick(place, 34, (300, 1000, 5000, 40_000, 2_000_000)) * _NS,
        lead_ps=dice.pick(place, 35, (0, 500, 2500)) * _NS,
        revoke_ps=dice.below(place, 37, _FAULT_PS) if dice.below(place, 36, 2) else None,
        renew_ps=dice.below(place, 44, 2 * _FAULT_PS) if dice.below(place, 43, 4) == 0 else None,
        unfenced=dice.below(place, 45, 6) == 0,
    )


def _draw_reads(dice: _Dice, theme: str) -> tuple[ReadSpec, ...]:
    """In one run of three node a reads as well."""
    if dice.below(0, 50, 3):
        return ()
    return tuple(_draw_read(dice, 500 + k, theme) for k in range(1 + dice.below(0, 51, 3)))


def _draw_stuck(
    dice: _Dice,
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


def _draw_read(dice: _Dice, entity: int, theme: str) -> ReadSpec:
    kind: ReadKind = dice.pick(entity, 1, ("single", "paged", "paged", "gather"))
    span_ps = _SPREAD_PS if theme in ("kill", "restart") else _SPAN_PS
    start_ps = 1 + dice.below(entity, 2, span_ps)
    changes, cancels = (
        dice.below(entity, 7, 2),
        dice.below(entity, 9, 3 if theme == "cancel" else 10),
    )
    return ReadSpec(
        kind=kind,
        size=dice.pick(entity, 3, _SIZES if kind == "single" else (0, 8, 24, 32)),
        pages=1 if kind == "single" else dice.pick(entity, 4, _PAGES),
        by_bytes=dice.below(entity, 5, 2) == 1,
        told=dice.below(entity, 6, 3) > 0,
        prepared=dice.below(entity, 11, 3) == 0,
        start_ps=start_ps,
        change_ps=start_ps + dice.below(entity, 8, _FAULT_PS) if changes else None,
        cancel_ps=dice.below(entity, 10, 900 * _NS) if cancels == 0 else None,
    )


def _draw_faults(
    dice: _Dice, theme: str, nics: tuple[int, ...], transfers: tuple[TransferSpec, ...]
) -> tuple[tuple[int, Fault], ...]:
    """What breaks in a run of this theme, and when: mostly while one of the transfers is going."""
    nodes = _names(nics, transfers)
    t_ps = transfers[dice.below(0, 20, len(transfers))].start_ps + dice.below(0, 21, _FAULT_PS)
    node = dice.below(0, 22, len(nodes))
    nic = dice.below(0, 23, nics[node])
    match theme:
        case "kill":
            first: tuple[int, Fault] = (t_ps, KillNic(nodes[node], nic))
            if dice.below(0, 24, 3):
                return (first,)
            other = dice.below(0, 25, len(nodes))
            again = KillNic(nodes[other], dice.below(0, 26, nics[other]))
            return (first, (1 + dice.below(0, 27, _SPREAD_PS), again))
        case "revoke":
            return ((t_ps, Revoke(nodes[node], nic if dice.below(0, 28, 4) else None)),)
        case "restart":
            # Soon: most of the transfers should meet the new incarnation.
            t_ps = min(spec.start_ps for spec in transfers) + dice.below(0, 29, _FAULT_PS)
            return ((t_ps, Restart(nodes[max(node, 1)])),)
        case _:
            return ()


def _draw_chaos(dice: _Dice, seed: int, theme: str) -> Chaos:
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


_SOON_DEAD_PS: Final = 300 * _NS
_LASTS_NS: Final = (200, 1000, 4000, 20_000, None)


def _draw_trouble(
    dice: _Dice, nics: tuple[int, ...], transfers: tuple[TransferSpec, ...]
) -> tuple[tuple[int, Fault], ...]:
    """In one run of four links or workers are in trouble for a while, whatever else happens."""
    if dice.below(0, 41, 4):
        return ()
    names = _names(nics, transfers)
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
            fault = Swizzle(node, nics[number], for_ps or _SPREAD_PS, place)
        elif kind is Pause:
            fault = Pause(node, for_ps or _SPREAD_PS)
        else:
            fault = Clog(node, nic, for_ps) if kind is Clog else Mute(node, nic, for_ps)
            if kind is Clog and dice.below(entity, 8, 3) == 0:
                # Not for ever: a NIC whose questions arrive, and no answer, goes on asking.
                fault = Clog(node, nic, for_ps or 5 * _SPREAD_PS, inward=True)
        start_ps = transfers[dice.below(entity, 6, len(transfers))].start_ps
        found.append((start_ps + dice.below(entity, 7, _FAULT_PS), fault))
    return tuple(found)


def _draw_cuts(
    dice: _Dice, nics: tuple[int, ...], transfers: tuple[TransferSpec, ...]
) -> tuple[tuple[int, Fault], ...]:
    """In one run of six a NIC of node a and one of a receiver do not reach each other any more."""
    if dice.below(0, 70, 6):
        return ()
    found: list[tuple[int, Fault]] = []
    for entity in range(1100, 1101 + dice.below(0, 71, 3)):
        number = 1 + dice.below(entity, 1, len(_names(nics, transfers)) - 1)
        pair = [
            (SENDER, dice.below(entity, 2, nics[0])),
            (RECEIVERS[number - 1], dice.below(entity, 3, nics[number])),
        ]
        (node, nic), (peer, peer_nic) = pair if dice.below(entity, 4, 2) else reversed(pair)
        one_way = dice.below(entity, 5, 2) == 1
        last_ns = dice.pick(entity, 6, _LASTS_NS)
        for_ps = None if last_ns is None else last_ns * _NS
        if one_way:  # not for ever: who is heard, and hears no answer, goes on asking
            for_ps = for_ps or 5 * _SPREAD_PS
        start_ps = transfers[dice.below(entity, 7, len(transfers))].start_ps
        start_ps += dice.below(entity, 8, _FAULT_PS)
        found.append((start_ps, Cut(node, nic, peer, peer_nic, for_ps, one_way)))
    return tuple(found)


def _draw_drift(
    dice: _Dice, nics: tuple[int, ...], transfers: tuple[TransferSpec, ...]
) -> tuple[tuple[int, Fault], ...]:
    """In one run of two the clock of one engine jumps, and runs at a speed of its own."""
    if dice.below(0, 73, 2):
        return ()
    names = _names(nics, transfers)
    ahead_ns = dice.pick(0, 76, (0, 1000, 1_000_000))
    fault = Drift(dice.pick(0, 74, names), dice.pick(0, 75, DRIFTS), ahead_ns * _NS)
    return ((1 + dice.below(0, 77, _FAULT_PS), fault),)


def _in_company(dice: _Dice, drawn: Scenario) -> Scenario:
    """In some runs node a watches node b, or is told to let go of it."""
    if dice.below(0, 91, 24) == 0:
        faults = drawn.faults + _draw_silence(dice, drawn.nics)
        drawn = replace(drawn, watched=True, faults=faults)
    if not drawn.tell_failures and dice.below(0, 93, 12) == 0:
        drawn = replace(drawn, remove_ps=1 + dice.below(0, 94, _SPREAD_PS))
    if dice.below(0, 100, 16) == 0 and drawn.close is None:
        drawn = _draw_steady(dice, drawn)
    return drawn


def _draw_steady(dice: _Dice, drawn: Scenario) -> Scenario:
    """One transfer comes again and again for a while, in which links flap."""
    nics = (*dice.pick(0, 101, ((1, 1), (1, 2), (1, 2), (2, 2), (2, 2), (2, 3))), *drawn.nics[2:])
    spec = TransferSpec(
        kind=dice.pick(0, 102, ("paged", "per_page", "per_page", "single")),
        size=dice.pick(0, 103, _PAGE_SIZES),
        start_ps=drawn.transfers[0].start_ps,
        rounds=_STEADY_ROUNDS + dice.below(0, 105, 30),
        pace_ps=1 + dice.pick(0, 106, (0, 2000, 10_000)) * _NS,
    )
    if spec.kind != "single":
        spec = replace(spec, pages=dice.pick(0, 104, _PAGES))
    lost, doubled = dice.pick(0, 108, (0, 0, 0, 2)), dice.pick(0, 109, (0, 8))
    pruned = (("core.sums.PRUNE_AT", 1),) if dice.below(0, 110, 2) else drawn.sizes
    return replace(
        drawn,
        nics=nics,
        transfers=(spec,),
        faults=_draw_flaps(dice, nics, spec),
        chaos=replace(
            drawn.chaos, message_loss=lost, control_dup=doubled, dead_after_ps=_SOON_DEAD_PS
        ),
        sizes=pruned,
        failover=drawn.failover or dice.below(0, 113, 2) == 1,
        watched=dice.below(0, 111, 2) == 1,
    )


def _draw_flaps(
    dice: _Dice, nics: tuple[int, ...], spec: TransferSpec
) -> tuple[tuple[int, Fault], ...]:
    """Links that are cut for a while; in half of the runs it is those of one NIC, each time."""
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


def _draw_silence(dice: _Dice, nics: tuple[int, ...]) -> tuple[tuple[int, Fault], ...]:
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


def _draw_close(
    dice: _Dice, nics: tuple[int, ...], transfers: tuple[TransferSpec, ...]
) -> tuple[int, str]:
    """Which engine is closed under everybody's hands, and when."""
    return 1 + dice.below(0, 7, _FAULT_PS), dice.pick(0, 34, _names(nics, transfers))


def _names(nics: tuple[int, ...], transfers: tuple[TransferSpec, ...]) -> tuple[str, ...]:
    """The nodes that take part in these transfers, the sender first."""
    wide = any(spec.wide for spec in transfers)
    return (SENDER, *RECEIVERS[: len(nics) - 1 if wide else 1])


def _settle(record: Any, name: str, low: int, high: int | None = None) -> None:
    """Check an integer, and keep it as a plain one: numpy's do not print as literals."""
    value = getattr(record, name)
    if type(value) is int and low <= value and (high is None or value <= high):
        return
    value = check_int(f"{type(record).__name__}: {name}", value, low, high)
    object.__setattr__(record, name, value)


def _literal(record: Any) -> str:
    """The fields that differ from their defaults, as a line that makes the record again."""
    parts = (
        f"{field.name}={_part(getattr(record, field.name))}"
        for field in fields(record)
        if getattr(record, field.name) != field.default
    )
    return f"{type(record).__name__}({', '.join(parts)})"


def _part(value: object) -> str:
    return str(value) if isinstance(value, Chaos) else repr(value)

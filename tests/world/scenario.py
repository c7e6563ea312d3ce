"""Scenarios: what applications and a hostile fabric do in one small run, as frozen records.

Data and its drawing only; `tests.world.oracle` plays and judges them. Every record prints as a
literal that can be pasted into a test.

Rule 1: a drawn scenario is a function of one integer; each field draws from its own number, so that
a new field leaves all others, and every recorded seed, as they were.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from tep.base.checks import check_int, shown
from tep.base.errors import BadRequest
from tep.base.hashing import stream_key
from tep.base.units import PS_PER_NS
from tep.sim.draws import Stream
from tep.sim.faults import Chaos, Fault, Restart
from tests.world.drawing import (
    APART,
    PAGE_SIZES,
    PAGES,
    SPREAD_PS,
    Dice,
    draw_barring,
    draw_chaos,
    draw_close,
    draw_cuts,
    draw_drift,
    draw_end,
    draw_faults,
    draw_flaps,
    draw_late,
    draw_nics,
    draw_reads,
    draw_retries,
    draw_shared,
    draw_silence,
    draw_stuck,
    draw_together,
    draw_transfer,
    draw_trouble,
)
from tests.world.sizes import Sizes, check_sizes, draw_sizes
from tests.world.specs import (
    IMMS,
    MESSAGES_MAX,
    READS_MAX,
    RECEIVERS,
    SENDER,
    STEADY_ROUNDS,
    TRANSFERS_MAX,
    ReadSpec,
    TransferSpec,
    literal,
    names_of,
    settle,
)

_SOON_DEAD_PS: Final = 300 * PS_PER_NS
_THEMES: Final = (
    *("plain", "rounds", "rounds", "cancel", "kill", "kill", "kill"),
    *("restart", "restart", "revoke", "recall", "close"),
)


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
            reads, messages and answers, and no end of an engine.
        close: (time in ps, node) at which one engine is closed, or None.
        messages: how many messages a sends to b, one after the other from the start.
        buffers: receive buffers that b has for them.
        echo: each count that fires is answered by an empty write back to a.
        failover: whether engines make rows good whose NIC died.
        sizes: constants of the engine that are small in this run, as `tests.world.sizes` has them.
        watched: node a asks node b again and again whether it is there.
        remove_ps: when node a is told to let go of node b, or None.
        bar_ps: when node b is told to let go of node a, and uses its memory for something else once
            nothing of a lands there any more; or None.
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
    sizes: Sizes = ()
    watched: bool = False
    remove_ps: int | None = None
    bar_ps: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", check_sizes(self.sizes))
        settle(self, "messages", 0, MESSAGES_MAX)
        settle(self, "buffers", 1)
        for name in ("remove_ps", "bar_ps"):
            if getattr(self, name) is not None:
                settle(self, name, 1)
        if self.bar_ps is not None:
            assert not self.echo, "node b needs node a"
            assert not self.reads, "node b needs node a"
            reborn_ps = [t_ps for t_ps, fault in self.faults if fault == Restart(SENDER)]
            assert max(reborn_ps, default=0) < self.bar_ps, "node b removes who has been there"
        assert 1 <= len(self.transfers) <= TRANSFERS_MAX, len(self.transfers)
        assert len(self.reads) <= READS_MAX, len(self.reads)
        if not isinstance(self.nics, tuple) or not 3 <= len(self.nics) <= 1 + len(RECEIVERS):
            what = f"Scenario: nics={shown(self.nics)} are not three numbers: of a, b, c"
            raise BadRequest(f"{what}, or up to six where there are more nodes")
        counts = tuple(check_int("Scenario: nics", n, 1, 4) for n in self.nics)
        object.__setattr__(self, "nics", counts)
        if any(isinstance(fault, Restart) and fault.node == SENDER for _, fault in self.faults):
            more = self.reads or self.messages or self.echo or self.close
            more = more or self.watched or self.remove_ps is not None
            assert not more, "node a restarts, and does more than to write"

    def __repr__(self) -> str:
        return literal(self)

    @property
    def events(self) -> tuple[tuple[int, Fault], ...]:
        """The faults, each with its time in ps."""
        return self.faults

    def with_chaos(self, chaos: Chaos) -> Scenario:
        """Return the same scenario with other knobs."""
        return replace(self, chaos=chaos)

    @property
    def wide(self) -> bool:
        """True if node c takes part, and the nodes after it."""
        return any(spec.wide for spec in self.transfers)

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes that take part, the sender first."""
        return names_of(self.nics, self.transfers)

    @property
    def steady(self) -> bool:
        """True if one transfer is repeated, long enough for links to flap meanwhile."""
        return self.transfers[0].rounds >= STEADY_ROUNDS

    def mates(self, place: int) -> tuple[int, ...]:
        """The places of the transfers under the immediate of one of them, itself included."""
        if not self.transfers[place].shared:
            return (place,)
        return tuple(k for k, spec in enumerate(self.transfers) if spec.shared)

    def imm(self, place: int, number: int = 0) -> int:
        """The immediate of a transfer, or of its retry of this number: each has one of its own."""
        retry = number if self.transfers[place].rounds == 1 else 0
        return IMMS[self.mates(place)[0]] ^ retry << 27

    @classmethod
    def draw(cls, seed: int) -> Scenario:
        """Draw one run of a swarm: first what happens at all, then how much of it.

        The seed, 0 or more, is also the seed of the fabric's own draws.
        """
        seed = check_int("Scenario: seed", seed, 0, 2**63 - 1)
        dice = Dice(stream_key(seed, Stream.SCENARIO))
        theme = dice.pick(0, 1, _THEMES)
        # What a restart or a dead NIC changes shows in the transfers after it.
        fewest = 2 if theme in ("kill", "restart") else 1
        count = fewest + dice.below(0, 2, 5 - fewest)
        nics = draw_nics(dice)
        wide = theme in ("kill", "restart") and dice.below(0, 8, 3) == 0
        transfers = tuple(
            draw_transfer(dice, place, theme, wide=wide) for place in range(1, count + 1)
        )
        if dice.below(0, 61, 3) == 0:
            transfers = draw_shared(dice, transfers)
        reads = draw_reads(dice, theme)
        chaos = draw_chaos(dice, seed, theme)
        faults = draw_faults(dice, theme, nics, transfers) + draw_trouble(dice, nics, transfers)
        if reads and dice.below(0, 52, 2):
            chaos = replace(chaos, late_land=1 + dice.below(0, 53, 2))
            faults += draw_stuck(dice, 600, nics, [spec.start_ps for spec in reads])
        failover = dice.below(0, 35, 4) > 0
        if failover and theme == "kill" and dice.below(0, 80, 3) == 0:
            nics = (max(2, nics[0]), *nics[1:])
            transfers, faults = draw_together(dice, nics[0], count)
            chaos = replace(chaos, **APART)
        cuts = draw_cuts(dice, nics, transfers) if failover else ()
        faults += draw_drift(dice, nics, transfers) + cuts
        retries = dice.below(0, 62, 4) == 0
        if retries:
            transfers, faults, chaos = draw_retries(
                dice, nics, transfers, faults, chaos, failover=failover
            )
        bar_ps = None
        if dice.below(0, 67, 6) == 0:
            bar_ps, more = draw_barring(dice, nics, transfers)
            end = draw_end(dice, nics, transfers, stays=retries or theme == "close")
            bar_ps = max(bar_ps, *(t_ps + 1 for t_ps, _ in end), 1)
            faults += more + end
            chaos = draw_late(dice, chaos)
        reborn = any(fault == Restart(SENDER) for _, fault in faults)
        drawn = cls(
            nics=nics,
            transfers=transfers,
            reads=() if reborn or bar_ps is not None else reads,
            # Where rows land late, what failed would land in the memory that has its key then.
            chaos=replace(chaos, key_again=dice.below(0, 78, 2) > 0 and not chaos.late_land),
            faults=faults,
            close=draw_close(dice, nics, transfers) if theme == "close" else None,
            messages=0 if reborn or dice.below(0, 30, 4) else 1 + dice.below(0, 31, 6),
            buffers=1 + dice.below(0, 32, 2),
            echo=dice.below(0, 33, 4) == 0 and not reborn and bar_ps is None,
            failover=failover,
            bar_ps=bar_ps,
            sizes=draw_sizes(partial(dice.below, 700)) if dice.below(0, 60, 2) else (),
        )
        return drawn if reborn else _in_company(dice, drawn)


def _in_company(dice: Dice, drawn: Scenario) -> Scenario:
    """In some runs node a watches node b, or is told to let go of it."""
    if dice.below(0, 91, 24) == 0:
        faults = drawn.faults + draw_silence(dice, drawn.nics)
        drawn = replace(drawn, watched=True, faults=faults)
    if dice.below(0, 93, 12) == 0:
        drawn = replace(drawn, remove_ps=1 + dice.below(0, 94, SPREAD_PS))
    if dice.below(0, 100, 16) == 0 and drawn.close is None:
        drawn = _draw_steady(dice, drawn)
    return drawn


def _draw_steady(dice: Dice, drawn: Scenario) -> Scenario:
    """One transfer comes again and again for a while, in which links flap."""
    nics = (*dice.pick(0, 101, ((1, 1), (1, 2), (1, 2), (2, 2), (2, 2), (2, 3))), *drawn.nics[2:])
    spec = TransferSpec(
        kind=dice.pick(0, 102, ("paged", "per_page", "per_page", "single")),
        size=dice.pick(0, 103, PAGE_SIZES),
        start_ps=drawn.transfers[0].start_ps,
        rounds=STEADY_ROUNDS + dice.below(0, 105, 30),
        pace_ps=1 + dice.pick(0, 106, (0, 2000, 10_000)) * PS_PER_NS,
    )
    if spec.kind != "single":
        spec = replace(spec, pages=dice.pick(0, 104, PAGES))
    lost, doubled = dice.pick(0, 108, (0, 0, 0, 2)), dice.pick(0, 109, (0, 8))
    pruned = (("core.path.PRUNE_AT", 1),) if dice.below(0, 110, 2) else drawn.sizes
    return replace(
        drawn,
        nics=nics,
        transfers=(spec,),
        faults=draw_flaps(dice, nics, spec),
        chaos=replace(
            drawn.chaos, message_loss=lost, control_dup=doubled, dead_after_ps=_SOON_DEAD_PS
        ),
        sizes=pruned,
        failover=drawn.failover or dice.below(0, 113, 2) == 1,
        watched=dice.below(0, 111, 2) == 1,
    )

"""What can go wrong on the chaos fabric: the knobs of one run, and faults at a time. Data only.

F1, F2, ... number the catalogue of faults; each stands beside what causes it here. F17 (values of
immediates) and F18 (expectations early and late) are the scenario's part. Not built: F9 completion
queues that overflow, F12 links that slow down and flap, F20 messages lost or doubled, F21 one-way
partitions, F22 links clogged in turn, F25 bytes that land after their error.

Rule 1: a knob draws from its own number, so a new knob leaves the draws of all others, and every
recorded seed, alone. Rule 2: a knob may only do what some real fabric may do to a correct engine.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

from tep.sim.hashing import Stream, below, draw, stream_key
from tep.units import PS_PER_MS, PS_PER_NS

__all__ = ["FRAGMENTS_MAX", "SWARM", "Chaos", "Fault", "Faults", "KillNic", "Restart", "Revoke"]

FRAGMENTS_MAX: Final = 5
"""Most pieces one row is cut into: four cuts of 16 bits are what one draw gives."""

_NS: Final = PS_PER_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """The knobs of one run; the defaults are an unordered fabric of moderate ill will.

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
        imm_credits: receives that an ordered NIC holds ready for immediates (F10).
        rnr_retries: how often a row without a receive is tried again; -1 = for ever (F10).
        rnr_timer_ps: the wait between two tries.
        dead_after_ps: how long until a row towards something dead fails, at the most (F11, F13).
        poll_delay_ps: longest time from a kick to the engine's step (F19).
        pause_ps: longest pause of a worker, once in about 64 steps; 0 = none (F19).
        cqe_limit: most entries that one poll() returns (F23).
        burst_ps: completions come out together, at most this late; 0 = each at once (F23).
        merge_cqes: neighbouring equal completions come out as one with a count (F23).
        flush_on_error: on an ordered fabric an error flushes the other rows to that peer (F24).
        key_reuse: a new incarnation gives its regions the key values of the old one (F16).
        offsets: keys have base 0, as where a provider wants offsets; False: a made-up address.
        tie_shuffle: events of one instant come in an order drawn from the seed.
    """

    seed: int = 0
    ordered: bool = False
    reorder_ps: int = 400 * _NS
    fragments: int = 4
    last_late_ps: int = 0
    skew_ps: tuple[int, ...] = (0,)
    dup_place: bool = False
    late_read: bool = True
    short_post: bool = True
    refuse_post: bool = False
    sq_depth: int = 4
    imm_credits: int = 8
    rnr_retries: int = -1
    rnr_timer_ps: int = 300 * _NS
    dead_after_ps: int = 300 * _NS
    poll_delay_ps: int = 50 * _NS
    pause_ps: int = 0
    cqe_limit: int = 4
    burst_ps: int = 0
    merge_cqes: bool = False
    flush_on_error: bool = False
    key_reuse: bool = False
    offsets: bool = False
    tie_shuffle: bool = False

    def __post_init__(self) -> None:
        assert 1 <= self.fragments <= FRAGMENTS_MAX, self.fragments
        assert 0 <= self.reorder_ps < 2**32 - 1, self.reorder_ps
        for name in ("sq_depth", "imm_credits", "cqe_limit", "poll_delay_ps", "dead_after_ps"):
            assert getattr(self, name) >= 1, f"{name}={getattr(self, name)}"
        assert self.skew_ps, "skew_ps: one NIC at the least"

    @classmethod
    def draw(cls, seed: int, **fixed: Any) -> Chaos:
        """Draw every knob for one run of a swarm.

        Args:
            seed: 0 or more; also becomes the fabric's own seed.
            fixed: knobs that are not to be drawn.
        """
        key = stream_key(seed, Stream.KNOBS)
        knobs: dict[str, Any] = {"seed": seed}
        for number, name, choices in SWARM:
            knobs[name] = choices[below(draw(key, number), len(choices))]
        return cls(**(knobs | fixed))

    def __str__(self) -> str:
        """The knobs that differ from the defaults, as a line that makes the record again."""
        set_here = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"Chaos({', '.join(set_here)})"


_SKEWS: Final = tuple(
    tuple(delay * _NS for delay in skew)
    for skew in (
        (0,),
        (0, 500, 0, 4000),
        (500, 0),
        (4000, 0, 500, 0),
        (0, 4000),
        (0, 0, 4000, 500),
        (0, 500, 500, 0),
        (0, 0, 0, 4000),
    )
)

SWARM: Final[tuple[tuple[int, str, tuple[Any, ...]], ...]] = (
    # Rule 1 is about the first column. Choices are equally likely; one may stand twice.
    (1, "ordered", (False, True)),
    (2, "reorder_ps", (0, 50 * _NS, 400 * _NS, 3000 * _NS)),
    (3, "fragments", (1, 2, 3, 4, 5)),
    (4, "last_late_ps", (0, 0, 1500 * _NS)),
    (5, "skew_ps", _SKEWS),
    (6, "dup_place", (False, True)),
    (7, "late_read", (True, True, True, True, False)),
    (8, "short_post", (False, True)),
    (9, "refuse_post", (False, False, False, True)),
    (10, "sq_depth", (1, 2, 3, 4, 5, 6)),
    (11, "imm_credits", (1, 4, 8, 128)),
    (12, "dead_after_ps", (300 * _NS, 300 * _NS, 300 * _NS, 500 * PS_PER_MS)),
    (13, "poll_delay_ps", (10 * _NS, 50 * _NS, 400 * _NS)),
    (14, "pause_ps", (0, 0, 0, 3 * PS_PER_MS)),
    (15, "cqe_limit", (4, 4, 1, 64)),
    (16, "burst_ps", (0, 0, 800 * _NS)),
    (17, "merge_cqes", (False, True)),
    (18, "flush_on_error", (False, True)),
    (19, "key_reuse", (False, True)),
    (20, "offsets", (False, True)),
    (21, "tie_shuffle", (False, True)),
)
"""Number, name and choices of each knob that Chaos.draw() draws."""
# Quoted: 0.5 s for a dead peer is the shortest that RC with retry_cnt 7 and timeout 14 takes; 3 ms
# is the published tail of a callback under Python. All other sizes are choices.


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


Fault = KillNic | Revoke | Restart


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults at times.

    Attributes:
        events: (time in ps, fault) pairs.
    """

    events: tuple[tuple[int, Fault], ...] = ()

    @classmethod
    def draw(
        cls, seed: int, nics: dict[str, int], *, from_ps: int = 1, to_ps: int = 1500 * _NS
    ) -> Faults:
        """Draw none (3 runs of 7), a dead NIC (2), a lost registration (1) or a restart (1).

        Args:
            seed: 0 or more.
            nics: number of NICs of each node that may be hit.
            from_ps: earliest time.
            to_ps: latest time, at most 2**32 later.
        """
        key = stream_key(seed, Stream.FAULTS)
        kind = below(draw(key, 1), 7)
        names = sorted(nics)
        node = names[below(draw(key, 2), len(names))]
        nic = below(draw(key, 3), nics[node])
        t_ps = from_ps + below(draw(key, 4), to_ps - from_ps + 1)
        if kind <= 2:
            return cls()
        fault: Fault = Restart(node)
        if kind <= 4:
            fault = KillNic(node, nic)
        elif kind == 5:
            fault = Revoke(node, nic)
        return cls(((t_ps, fault),))

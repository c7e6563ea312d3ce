"""Hypothesis strategies: what the seeds draw, mixed freely, and shrinkable.

`scenarios` makes cases for protocols of users, `engine_scenarios` what the engine itself is tested
with. A failing example shrinks to few transfers and faults, few knobs off their tame values and
small numbers, and prints as a literal. Seeds find faster; these explain better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from tep.base.units import PS_PER_MS, PS_PER_NS
from tep.sim.faults import (
    DRIFTS,
    FRAGMENTS_MAX,
    GROUPS,
    HARM,
    SPOILT,
    SWARM,
    Chaos,
    Clog,
    Cut,
    Drift,
    Fault,
    Faults,
    KillNic,
    Mute,
    Pause,
    Restart,
    Revoke,
    Slow,
    Swizzle,
    groups_of,
)
from tep.testing.case import Case, Nics, names_of, nics_range
from tep.testing.scenario import Scenario
from tep.testing.sizes import SIZES, Sizes
from tep.testing.specs import (
    MESSAGES_MAX,
    PAGES_MAX,
    RECEIVERS,
    SENDER,
    ReadKind,
    ReadSpec,
    TransferKind,
    TransferSpec,
)

__all__ = ["chaos", "engine_scenarios", "reads", "scenarios", "transfers"]

_NS = PS_PER_NS


def _times(most_ns: int) -> SearchStrategy[int]:
    return st.integers(1, most_ns * _NS)


@st.composite
def chaos(draw: DrawFn) -> Chaos:
    """Any knobs that a correct engine must survive; shrinks to a tame fabric."""
    return Chaos(
        seed=draw(st.integers(0, 2**32 - 1)),
        ordered=draw(st.booleans()),
        reorder_ps=draw(st.sampled_from([0, 50 * _NS, 400 * _NS, 3000 * _NS])),
        fragments=draw(st.integers(1, FRAGMENTS_MAX)),
        last_late_ps=draw(st.sampled_from([0, 1500 * _NS])),
        skew_ps=tuple(
            draw(st.lists(st.sampled_from([0, 500 * _NS, 4000 * _NS]), min_size=1, max_size=4))
        ),
        dup_place=draw(st.booleans()),
        late_read=draw(st.sampled_from([True, False])),
        short_post=draw(st.booleans()),
        refuse_post=draw(st.booleans()),
        sq_depth=draw(st.integers(1, 6)),
        imm_credits=draw(st.sampled_from([8, 1, 4, 128])),
        rnr_retries=draw(st.sampled_from([-1, -1, 0, 2])),
        dead_after_ps=draw(st.sampled_from([300 * _NS, 500 * PS_PER_MS])),
        poll_delay_ps=draw(st.sampled_from([10 * _NS, 50 * _NS, 400 * _NS])),
        pause_ps=draw(st.sampled_from([0, 3 * PS_PER_MS])),
        cqe_limit=draw(st.sampled_from([4, 1, 64])),
        burst_ps=draw(st.sampled_from([0, 800 * _NS])),
        merge_cqes=draw(st.booleans()),
        flush_on_error=draw(st.booleans()),
        key_reuse=draw(st.booleans()),
        offsets=draw(st.booleans()),
        tie_shuffle=draw(st.booleans()),
    )


@st.composite
def transfers(draw: DrawFn) -> TransferSpec:
    """One transfer of any kind; shrinks to a short single write that is expected early."""
    kind: TransferKind = draw(st.sampled_from(get_args(TransferKind)))
    paged = kind in ("paged", "per_page")
    knobs: dict[str, Any] = {"kind": kind}
    if paged:
        knobs["size"] = draw(st.sampled_from([8, 0, 1, 24, 32]))
        knobs["pages"] = draw(st.integers(1, PAGES_MAX))
        knobs["gap"] = draw(st.sampled_from([0, 8]))
    elif kind != "barrier":
        knobs["size"] = draw(st.sampled_from([8, 0, 1, 65, 200, 257, 515, 20_000, 40_001]))
        knobs["shards"] = draw(st.integers(0, 4))
        knobs["silent"] = draw(st.sampled_from([False, False, False, True]))
    if kind == "scatter":
        knobs["by_bytes"] = draw(st.booleans())
    if kind in ("scatter", "barrier"):
        knobs["grouped"] = draw(st.booleans())
    spec = TransferSpec(
        pinned=draw(st.booleans()),
        start_ps=draw(_times(4000)),
        expect_ps=draw(st.sampled_from([1, 300 * _NS, 2500 * _NS])),
        claimed=draw(st.booleans()),
        split=draw(st.booleans()),
        recall_ps=draw(st.none() | _times(3000)),
        rounds=draw(st.integers(1, 3)),
        lined_up=draw(st.booleans()),
        cancel_ps=draw(st.none() | st.integers(0, 900 * _NS)),
        stale=draw(st.booleans()),
        probe=draw(st.booleans()),
        prepared=draw(st.booleans()),
        **knobs,
    )
    return replace(spec, shared=spec.may_share and draw(st.booleans()))


@st.composite
def reads(draw: DrawFn) -> ReadSpec:
    """One read of any kind; shrinks to a short one of bytes that do not change."""
    return ReadSpec(
        kind=draw(st.sampled_from(get_args(ReadKind))),
        size=draw(st.sampled_from([8, 0, 1, 65, 257, 20_000])),
        pages=draw(st.integers(1, PAGES_MAX)),
        told=draw(st.booleans()),
        start_ps=draw(_times(4000)),
        change_ps=draw(st.none() | _times(4000)),
        cancel_ps=draw(st.none() | st.integers(0, 900 * _NS)),
    )


@st.composite
def _faults(draw: DrawFn, nics: tuple[int, int, int], nodes: int) -> tuple[int, Fault]:
    names = (SENDER, *RECEIVERS)[:nodes]
    t_ps, fault = draw(_events(dict(zip(names, nics)), list(_EVENTS)))
    return t_ps, Restart(RECEIVERS[0]) if fault == Restart(SENDER) else fault


@st.composite
def engine_scenarios(draw: DrawFn) -> Scenario:
    """Any scenario, with up to four transfers, two reads and three faults at once."""
    specs = tuple(draw(st.lists(transfers(), min_size=1, max_size=4)))
    nics = draw(st.tuples(*[st.integers(1, 4)] * 3))
    nodes = 3 if any(spec.wide for spec in specs) else 2
    closes = st.tuples(_times(3000), st.sampled_from((SENDER, *RECEIVERS)[:nodes]))
    faults = draw(st.lists(_faults(nics, nodes), max_size=3))
    failover = draw(st.sampled_from([True, True, False]))
    if draw(st.booleans()):
        specs = tuple(draw(_tried(spec)) for spec in specs)
    read = tuple(draw(st.lists(reads(), max_size=2)))
    bar_ps = None if read else draw(st.none() | _times(4000))
    return Scenario(
        nics=nics,
        transfers=specs,
        reads=read,
        chaos=replace(
            draw(chaos()),
            late_land=draw(st.integers(0, 2)),
            message_loss=draw(st.sampled_from([0, 2, 6])),
            peer_depth=draw(st.integers(0, 2)),
        ),
        faults=tuple(sorted(faults, key=lambda fault: fault[0])),
        close=draw(st.none() | st.none() | closes),
        messages=draw(st.integers(0, MESSAGES_MAX)),
        buffers=draw(st.integers(1, 2)),
        echo=bar_ps is None and draw(st.booleans()),
        failover=failover,
        sizes=draw(_sizes()),
        remove_ps=draw(st.none() | st.none() | _times(4000)),
        bar_ps=bar_ps,
    )


@st.composite
def _tried(draw: DrawFn, spec: TransferSpec) -> TransferSpec:
    """The same, tried again where it fails."""
    if not spec.may_retry:
        return spec
    waits = st.sampled_from([1, 3000 * _NS, 30_000 * _NS])
    again = draw(st.integers(0, 2))
    return replace(spec, again=again, again_ps=draw(waits), restate_ps=draw(waits))


@st.composite
def _sizes(draw: DrawFn) -> Sizes:
    """Which constants are small; shrinks to none."""
    found = [(name, draw(st.none() | st.sampled_from(values))) for name, values in SIZES.items()]
    return tuple((name, value) for name, value in found if value is not None)


# ---------------------------------------------------------------------- for protocols of users


_LASTS = st.sampled_from([300 * _NS, 2000 * _NS, 8000 * _NS, None])


def scenarios(
    nodes: int = 2, nics: Nics = (1, 4), faults: str | Sequence[str] = "all"
) -> SearchStrategy[Case]:
    """Cases for `run()`: who is there, and all that the catalogue of faults can do to them.

    A failing case shrinks to few NICs, few faults, early times, and a tame fabric but for the knobs
    that matter.

    Args:
        nodes: how many nodes.
        nics: of each node, or the least and the most.
        faults: groups of faults: "all", "none", or names like "order nics links".

    Raises:
        UsageError: no such group, or no such number of NICs.
    """
    least, most = nics_range(nics)
    free = {name for group in groups_of(faults) for name in GROUPS[group]}
    counts = st.tuples(*[st.integers(least, most)] * nodes)
    return counts.flatmap(lambda drawn: _cases(drawn, free))


def _cases(nics: tuple[int, ...], free: set[str]) -> SearchStrategy[Case]:
    names = dict(zip(names_of(len(nics)), nics, strict=True))
    kinds = [kind for kind in _EVENTS if kind.__name__ in free]
    events = st.lists(_events(names, kinds), max_size=3) if kinds else st.just([])
    made = st.builds(_faults_of, events, _knobs(free))
    return st.builds(lambda faults: Case(nics=nics, faults=faults), made)


def _faults_of(events: list[tuple[int, Fault]], chaos: Chaos) -> Faults:
    return Faults(tuple(sorted(events, key=lambda event: event[0])), chaos)


@st.composite
def _knobs(draw: DrawFn, free: set[str]) -> Chaos:
    """Every knob of the chosen groups; the tame value comes first, so that it is shrunk to."""
    calm = Chaos.calm()
    knobs: dict[str, Any] = {"seed": draw(st.integers(0, 2**32 - 1))}
    for _, name, choices in SWARM + HARM + SPOILT:
        if name in free:
            tame = getattr(calm, name)
            rest = sorted({choice for choice in choices if choice != tame})
            knobs[name] = draw(st.sampled_from([tame, *rest]))
    return Chaos.calm(**knobs)


_EVENTS = (KillNic, Clog, Cut, Mute, Slow, Pause, Drift, Swizzle, Revoke, Restart)


@st.composite
def _events(draw: DrawFn, nics: dict[str, int], kinds: list[Any]) -> tuple[int, Fault]:
    t_ps = draw(_times(12_000))
    node = draw(st.sampled_from(sorted(nics)))
    nic = draw(st.integers(0, nics[node] - 1))
    kind = draw(st.sampled_from(kinds))
    if kind is Restart:
        return t_ps, Restart(node)
    if kind is Revoke:
        return t_ps, Revoke(node, draw(st.sampled_from([nic, None])))
    if kind is KillNic:
        return t_ps, KillNic(node, nic)
    if kind is Slow:
        return t_ps, Slow(node, nic, draw(st.integers(2, 20)), draw(_LASTS))
    if kind is Swizzle:
        return t_ps, Swizzle(node, nics[node], draw(_times(4000)), draw(st.integers(0, 99)))
    if kind is Cut:
        peer = draw(st.sampled_from(sorted(nics)))
        theirs = draw(st.integers(0, nics[peer] - 1))
        one_way = draw(st.booleans())
        return t_ps, Cut(
            node, nic, peer, theirs, draw(_times(4000) if one_way else _LASTS), one_way
        )
    if kind is Drift:
        return t_ps, Drift(node, draw(st.sampled_from(DRIFTS)), draw(st.integers(0, PS_PER_MS)))
    if kind is Pause:
        return t_ps, Pause(node, draw(_times(20_000)))
    return t_ps, kind(node, nic, draw(_LASTS))

"""Hypothesis strategies: cases for protocols of users, as the seeds draw them, and shrinkable.

A failing example shrinks to few faults, few knobs off their tame values and small numbers, and
prints as a literal. Seeds find faster; these explain better.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from tep.base.units import PS_PER_MS, PS_PER_NS
from tep.sim.faults import (
    DRIFTS,
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

__all__ = ["scenarios"]

_NS = PS_PER_NS


def _times(most_ns: int) -> SearchStrategy[int]:
    return st.integers(1, most_ns * _NS)


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

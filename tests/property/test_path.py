"""The states of a path: one table, obeyed by every run, and no state without a way out."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tep.base.wire import NetAddr
from tep.core.path import TRANSITIONS, FarEnds, Fence, Link, PathEvent, PathState


def link(nics: int = 2, ours: int = 2) -> Link:
    """A peer that nobody talks to."""
    addresses = tuple(bytes([nic]) for nic in range(nics))
    return Link(NetAddr("loopback", "peer", 1, addresses, (1,) * nics), (None,) * ours)


def test_what_is_not_in_the_table_is_a_bug() -> None:
    """A transition that nobody thought of must stop a test, not open a path that is fenced."""
    for state, event in product(PathState, PathEvent):
        path = link().path(0, 1)
        path.state = state
        if (state, event) in TRANSITIONS:
            path.to(event)
            assert TRANSITIONS[state, event] is path.state
        else:
            with pytest.raises(AssertionError, match=f"{event.name} cannot happen there"):
                path.to(event)
            assert state is path.state


def test_every_state_is_reached_and_left() -> None:
    """A state without a way back to UP is a path that is lost for good."""
    reach = {state: {state} for state in PathState}
    for _ in PathState:
        for (was, _event), now in TRANSITIONS.items():
            reach[was] |= reach[now]

    assert set(PathState) == reach[PathState.UP]
    assert all(PathState.UP in found for found in reach.values())


def test_a_path_opens_only_after_its_peer_has_fenced_it() -> None:
    """Rows of the old connection could land among the new one's."""
    into_up = [was for (was, _), now in TRANSITIONS.items() if now is PathState.UP]
    into_reopening = [was for (was, _), now in TRANSITIONS.items() if now is PathState.REOPENING]

    assert [PathState.REOPENING] == into_up
    assert [PathState.FENCED] == into_reopening
    assert PathState.REOPENING is not TRANSITIONS[PathState.REOPENING, PathEvent.LOST]


Step = tuple[int, int, PathEvent]


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.sampled_from(PathEvent))),
    st.lists(st.booleans(), min_size=2, max_size=2).filter(any),
    st.lists(st.booleans(), min_size=3, max_size=3).filter(any),
)
@example(
    [*((0, nic, PathEvent.LOST) for nic in range(3)), (0, 0, PathEvent.FENCED)],
    [True, False],
    [True, True, False],
)
@example([(0, 0, PathEvent.LOST), (0, 1, PathEvent.LOST)], [True, False], [True, False, False])
@settings(derandomize=True)
def test_rows_go_where_the_states_say(
    steps: list[Step], ours: list[bool], theirs: list[bool]
) -> None:
    """The count of closed paths is a short cut for the states; a wrong one posts on a dead path."""
    peer = link(3, 2)
    peer.alive[:] = theirs
    for domain, nic, event in steps:
        path = peer.path(domain, nic)
        if (path.state, event) in TRANSITIONS:
            path.to(event)
    states = {(i, j): peer.path(i, j).state for i in range(2) for j in range(3)}
    assert sum(state is not PathState.UP for state in states.values()) == peer.closed
    assert sorted(peer.shut()) == sorted(at for at, s in states.items() if s is not PathState.UP)

    usable = {at: s for at, s in states.items() if ours[at[0]] and theirs[at[1]]}
    worth = {PathState.UP: 2, PathState.SUSPECT: 1}
    others = [at for at, s in states.items() if ours[at[0]] and s is PathState.UP]
    for domain, nic in states:
        found = peer.route(ours, domain, nic)
        if PathState.UP not in usable.values() and others:
            assert found in others, "a NIC that is marked down may be heard by another of ours"
            continue
        best = max(worth.get(state, 0) for state in usable.values())
        assert best == worth.get(usable[found], 0), (found, states)
        if worth.get(usable.get((domain, nic), PathState.FENCED), 0) == best and best:
            assert (domain, nic) == found, "a row left its own path for no reason"


def test_far_ends_that_matter_are_not_forgotten() -> None:
    """A fence in progress, or the fences of a removed peer, would be opened by a late copy."""
    ends = FarEnds()
    ends.at(0, b"a").fence = Fence()
    ends.at(0, b"b").barred = True
    ends.at(0, b"c").asked = 7
    ends.control_heard(0, b"d", heard=False)
    for address in (b"a", b"b", b"c", b"d", b"e"):
        ends.drop(0, address)
    assert 3 == len(ends.known)
    ends.control_heard(0, b"e", heard=True)
    assert ends.get(0, b"e") is None, "what goes well needs no record"
    ends.at(0, b"g").asked = 7
    ends.drop(0, b"g")
    assert ends.get(0, b"g") is None, "of a stranger nothing is kept but the number of a question"
    ends.control_heard(0, b"f", heard=False)
    ends.control_heard(0, b"f", heard=True)
    ends.drop(0, b"f")
    assert ends.get(0, b"f") is None, "it was heard again"
    ends.forget((b"a", b"b", b"d"))
    assert ends.get(0, b"d") is None
    ends.at(0, b"b").barred = False
    ends.drop(0, b"b")
    assert 1 == len(ends.known)

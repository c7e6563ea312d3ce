"""Invariants of every plan, for any request, NIC counts and cursor."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tep.base.api import Paged, Routing, Scatter, Single
from tep.core.plan import (
    ROW_BYTES_MAX,
    SHARD_BYTES_MIN,
    Plan,
    count_imms,
    lanes,
    plan_paged,
    plan_single,
    plan_targets,
)

NICS = st.integers(1, 8)
CURSORS = st.integers(0, 1 << 20)
LENGTHS = st.one_of(
    st.sampled_from([0, 1, 4095, 4096, 4097, SHARD_BYTES_MIN, 2 * SHARD_BYTES_MIN - 1]),
    st.integers(0, 1 << 20),
    st.integers((1 << 32) - 5, (1 << 32) + 5),
    st.integers(0, 1 << 36),
)


@st.composite
def routings(draw: st.DrawFn, nlocal: int, nremote: int) -> Routing:
    """Draw a routing that this pair of NIC counts allows."""
    domain = draw(st.none() | st.integers(0, nlocal - 1))
    nlanes = lanes(nlocal, nremote) if domain is None else lanes(nlocal, nremote) // nlocal
    return Routing(num_shards=draw(st.none() | st.integers(1, nlanes)), domain=domain)


def assert_tiles(plan: Plan, total: int) -> None:
    """Shares must follow each other without gap or overlap, from 0 to total."""
    position = 0
    for share in plan.shares:
        assert position == share.start
        assert share.start <= share.stop
        position = share.stop
    assert total == position


def assert_pairs(plan: Plan, nlocal: int, nremote: int, cursor: int) -> None:
    """Every share must name NICs that exist, and a pair that is one of the lanes."""
    count = lanes(nlocal, nremote)
    pairs = {(lane % nlocal, lane % nremote) for lane in range(count)}
    assert pairs >= {(share.domain, share.remote) for share in plan.shares}
    assert 0 <= plan.cursor < count
    assert cursor >= 0


@given(data=st.data(), nbytes=LENGTHS, nlocal=NICS, nremote=NICS, cursor=CURSORS)
def test_single_rows_tile_the_request(data, nbytes: int, nlocal: int, nremote: int, cursor: int):
    """A gap leaves old bytes at the target, an overlap races with itself."""
    routing = data.draw(routings(nlocal, nremote))
    plan = plan_single(nbytes, nlocal, nremote, cursor, routing)

    assert_tiles(plan, nbytes)
    assert_pairs(plan, nlocal, nremote, cursor)
    assert plan.imms == len(plan.shares)
    assert ROW_BYTES_MAX >= max(share.stop - share.start for share in plan.shares)
    if routing.domain is not None:
        assert {routing.domain} == {share.domain for share in plan.shares}


@given(
    data=st.data(), nbytes=LENGTHS, nlocal=NICS, nremote=NICS, cursors=st.tuples(CURSORS, CURSORS)
)
def test_imms_depend_on_shape_and_counts_alone(data, nbytes, nlocal, nremote, cursors) -> None:
    """The receiver computes the same number without knowing the sender's cursor."""
    routing = data.draw(routings(nlocal, nremote))
    expected = count_imms(Single(nbytes, routing), nlocal, nremote)

    for cursor in cursors:
        assert expected == plan_single(nbytes, nlocal, nremote, cursor, routing).imms


@given(data=st.data(), nbytes=LENGTHS, nlocal=NICS, nremote=NICS)
def test_scatter_counts_like_its_routing(data, nbytes: int, nlocal: int, nremote: int) -> None:
    """By peers each target sees one immediate; by bytes as many as a single write makes."""
    pinned = data.draw(routings(nlocal, nremote))
    by_bytes = Routing(num_shards=pinned.num_shards, domain=pinned.domain, scatter_by="bytes")

    expected = plan_single(nbytes, nlocal, nremote, 0, by_bytes).imms
    assert expected == count_imms(Scatter(nbytes, by_bytes), nlocal, nremote)
    if nbytes <= ROW_BYTES_MAX:
        assert 1 == count_imms(Scatter(nbytes, pinned), nlocal, nremote)


@given(nlocal=NICS, nremote=NICS, cursor=CURSORS, extra=st.integers(0, 1 << 24))
def test_single_long_enough_uses_every_nic_of_both_sides_alike(nlocal, nremote, cursor, extra):
    """A NIC without a partner halves the bandwidth and nobody notices."""
    count = lanes(nlocal, nremote)
    plan = plan_single(count * SHARD_BYTES_MIN + extra, nlocal, nremote, cursor)

    assert count == plan.imms
    assert {count // nlocal} == set(Counter(share.domain for share in plan.shares).values())
    assert {count // nremote} == set(Counter(share.remote for share in plan.shares).values())
    sizes = [share.stop - share.start for share in plan.shares]
    assert 2 * 4096 >= max(sizes) - min(sizes)


@given(npages=st.integers(1, 1 << 20), nlocal=NICS, nremote=NICS, cursor=CURSORS, data=st.data())
def test_paged_runs_tile_the_page_list(npages, nlocal, nremote, cursor, data) -> None:
    """Each page goes once, whole, and no NIC gets a run more than one page longer than another."""
    domain = data.draw(st.none() | st.integers(0, nlocal - 1))
    plan = plan_paged(npages, nlocal, nremote, cursor, domain)

    assert_tiles(plan, npages)
    assert_pairs(plan, nlocal, nremote, cursor)
    assert npages == plan.imms == count_imms(Paged(npages), nlocal, nremote)
    sizes = [share.stop - share.start for share in plan.shares]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


@given(npages=st.integers(1, 1 << 20), nlocal=NICS, nremote=NICS, cursor=CURSORS, data=st.data())
def test_weighed_runs_tile_the_page_list(npages, nlocal, nremote, cursor, data) -> None:
    """Weights move pages between lanes; they change no count, and give each lane what it is due."""
    count = lanes(nlocal, nremote)
    weights = data.draw(st.lists(st.integers(0, 8), min_size=count, max_size=count).map(tuple))
    domain = data.draw(st.none() | st.integers(0, nlocal - 1))
    plan = plan_paged(npages, nlocal, nremote, cursor, domain, weights)
    plain = plan_paged(npages, nlocal, nremote, cursor, domain)

    assert_tiles(plan, npages)
    assert (plain.imms, plain.cursor) == (plan.imms, plan.cursor)
    numbers = {(k % nlocal, k % nremote): k for k in range(count)}
    mine = [k for k in range(count) if domain in {None, k % nlocal}]
    used = [numbers[share[:2]] for share in plan.shares]
    assert len(set(used)) == len(used)
    assert set(used) <= set(mine)
    if not any(weights[k] for k in mine):
        assert plain.shares == plan.shares
    elif npages >= len(mine):
        total = sum(weights[k] for k in mine)
        for k, share in zip(used, plan.shares, strict=True):
            assert abs((share.stop - share.start) - npages * weights[k] / total) < 1
        rest = [weights[k] for k in mine if k not in used]
        assert all(npages * weight / total < 1 for weight in rest)
    if len({weights[k] for k in mine}) == 1:
        assert plain.shares == plan.shares


@given(nlocal=NICS, nremote=NICS, requests=st.lists(st.integers(1, 16), min_size=1, max_size=20))
def test_paged_cursor_deals_every_lane_its_turn(nlocal, nremote, requests) -> None:
    """Lanes used by many small requests differ by at most one turn: nothing is starved."""
    cursor, used = 0, Counter(dict.fromkeys(range(lanes(nlocal, nremote)), 0))
    for npages in requests:
        plan = plan_paged(npages, nlocal, nremote, cursor)
        for k in range(len(plan.shares)):
            used[(cursor + k) % lanes(nlocal, nremote)] += 1
        cursor = plan.cursor

    assert max(used.values()) - min(used.values()) <= 1


@given(
    nremotes=st.lists(NICS, min_size=1, max_size=70).map(tuple),
    nlocal=NICS,
    cursor=CURSORS,
    data=st.data(),
)
def test_targets_get_one_lane_each_in_order(nremotes, nlocal, cursor, data) -> None:
    """A target without a row never hears the barrier; with two it hears it twice."""
    domain = data.draw(st.none() | st.integers(0, nlocal - 1))
    shares = plan_targets(nremotes, nlocal, cursor, domain)

    assert [(k, k + 1) for k in range(len(nremotes))] == [(s.start, s.stop) for s in shares]
    for share, nremote in zip(shares, nremotes, strict=True):
        assert 0 <= share.domain < nlocal
        assert 0 <= share.remote < nremote
        assert domain in {None, share.domain}


@given(nlocal=NICS, nremote=NICS, cursor=CURSORS)
def test_targets_use_only_pairs_that_are_lanes(nlocal: int, nremote: int, cursor: int) -> None:
    """A backend may hold queue pairs for lanes only; another pair would connect a new one."""
    count = lanes(nlocal, nremote)
    pairs = {(lane % nlocal, lane % nremote) for lane in range(count)}

    for domain in (None, *range(nlocal)):
        shares = plan_targets((nremote,) * count, nlocal, cursor, domain)
        assert pairs >= {(share.domain, share.remote) for share in shares}

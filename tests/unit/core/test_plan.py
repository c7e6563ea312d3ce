"""The planner's answers that a person can check by hand: shares, counts, refusals by message."""

from __future__ import annotations

import pytest

from tep.base.api import Barrier, Paged, Routing, Scatter, Single
from tep.base.errors import BadRequest
from tep.core.plan import (
    ROW_BYTES_MAX,
    SHARD_BYTES_MIN,
    Share,
    count_imms,
    is_one_row,
    lanes,
    plan_paged,
    plan_row,
    plan_single,
    plan_targets,
)

KIB = 1024


@pytest.mark.parametrize(
    ("nlocal", "nremote", "expected"),
    [(1, 1, 1), (2, 2, 2), (2, 4, 4), (4, 2, 4), (2, 3, 6), (4, 6, 12)],
)
def test_lanes_are_the_least_common_multiple(nlocal: int, nremote: int, expected: int) -> None:
    """Fewer lanes would leave a NIC idle; more would load some NICs twice."""
    assert expected == lanes(nlocal, nremote)


@pytest.mark.parametrize(("nlocal", "nremote"), [(0, 1), (1, 0), (65, 1), (1, 65), (-1, 2)])
def test_lanes_refuse_impossible_nic_counts(nlocal: int, nremote: int) -> None:
    """A peer's address with no NIC must be refused here, not divide by zero later."""
    with pytest.raises(BadRequest, match=f"nlocal={nlocal} nremote={nremote}; NIC counts are 1 to"):
        lanes(nlocal, nremote)


def test_single_two_nics_against_four_uses_all_six() -> None:
    """With equal counts assumed, as the reference does, two of the four remote NICs stay idle."""
    plan = plan_single(64 * KIB, 2, 4, 0)

    expected = (
        Share(0, 0, 0, 16 * KIB),
        Share(1, 1, 16 * KIB, 32 * KIB),
        Share(0, 2, 32 * KIB, 48 * KIB),
        Share(1, 3, 48 * KIB, 64 * KIB),
    )
    assert expected == plan.shares
    assert 4 == plan.imms
    assert 0 == plan.cursor


def test_single_cursor_starts_where_the_last_request_stopped() -> None:
    """Small writes would otherwise all leave by NIC 0."""
    first = plan_single(100, 4, 4, 0)
    second = plan_single(100, 4, 4, first.cursor)

    assert [0] == [share.domain for share in first.shares]
    assert [1] == [share.domain for share in second.shares]


def test_single_short_requests_are_not_cut_below_the_smallest_shard() -> None:
    """Shards of a few bytes cost a row each and save nothing."""
    assert 1 == plan_single(2 * SHARD_BYTES_MIN - 1, 4, 4, 0).imms
    assert 2 == plan_single(2 * SHARD_BYTES_MIN, 4, 4, 0).imms


def test_single_is_cut_at_pages() -> None:
    """A shard that begins in the middle of a page makes two NICs write one page."""
    plan = plan_single(100_001, 2, 4, 0)

    assert 4 == len(plan.shares)
    assert all(share.start % 4096 == 0 for share in plan.shares)


def test_single_zero_bytes_still_carries_its_immediate() -> None:
    """A zero-length write is how a bare immediate travels."""
    assert (Share(0, 0, 0, 0),) == plan_single(0, 1, 1, 0).shares
    assert 4 == plan_single(0, 4, 4, 0, Routing(num_shards=4)).imms


def test_single_pinned_pairs_its_nic_with_remote_nics_it_shares_lanes_with() -> None:
    """The reference takes the remote key by another index than the NIC: wrong keys on the wire."""
    for cursor, remotes in ((0, [1, 3]), (3, [3, 1])):
        plan = plan_single(64 * KIB, 2, 4, cursor, Routing(domain=1))

        assert [(1, nic) for nic in remotes] == [share[:2] for share in plan.shares]


def test_single_pinned_takes_the_remote_nics_in_turn() -> None:
    """A pinned stream of small writes would load one NIC of the target and idle the others."""
    routing, cursor, remotes = Routing(domain=1), 0, []
    for _ in range(4):
        plan = plan_single(100, 2, 4, cursor, routing)
        remotes += [share.remote for share in plan.shares]
        cursor = plan.cursor

    assert [1, 3, 1, 3] == remotes


def test_single_beyond_the_longest_row_becomes_several_rows() -> None:
    """A NIC refuses a row above its limit, and both sides must count the same rows."""
    plan = plan_single(ROW_BYTES_MAX + 1, 1, 1, 0)

    assert [ROW_BYTES_MAX, 1] == [share.stop - share.start for share in plan.shares]
    assert 2 == plan.imms


def test_paged_shares_are_runs_of_neighbours() -> None:
    """Runs keep a page list's locality; interleaving would defeat a NIC's address cache."""
    plan = plan_paged(10, 2, 4, 0)

    expected = (Share(0, 0, 0, 2), Share(1, 1, 2, 5), Share(0, 2, 5, 7), Share(1, 3, 7, 10))
    assert expected == plan.shares
    assert 10 == plan.imms


def test_paged_fewer_pages_than_lanes_moves_the_cursor_past_those_used_only() -> None:
    """A cursor that skips idle lanes would starve them for good."""
    plan = plan_paged(3, 4, 4, 2)

    assert [2, 3, 0] == [share.domain for share in plan.shares]
    assert 1 == plan.cursor


def test_targets_take_lanes_in_turn_whatever_their_nic_counts() -> None:
    """A scatter to peers of mixed machines must still name NICs that exist on each."""
    shares = plan_targets((4, 2, 4), 2, 1)

    assert [Share(1, 1, 0, 1), Share(0, 0, 1, 2), Share(1, 3, 2, 3)] == shares


def test_targets_pinned_still_spread_over_remote_nics() -> None:
    """Pinning binds the local NIC; loading one remote NIC with everything is nobody's wish."""
    shares = plan_targets((4, 4, 4, 4), 2, 0, domain=1)

    assert {1} == {share.domain for share in shares}
    assert [1, 1, 3, 3] == [share.remote for share in shares]


def test_an_all_to_all_loads_the_nics_of_a_receiver_alike() -> None:
    """All GPUs of a node walk the same list: if a target's place in it chose the NIC in turn, half
    of all NICs would stay idle.
    """
    world, node, nics = 64, 8, 2
    arrivals = dict.fromkeys(((rank, nic) for rank in range(world) for nic in range(nics)), 0)
    for sender in range(world):
        first = (sender // node + 1) * node
        peers = [rank % world for rank in range(first, first + world - node)]
        for share in plan_targets((nics,) * len(peers), nics, 0):
            arrivals[peers[share.start], share.remote] += 1

    # Runs end in the middle of a node: one node's GPUs more or less is as even as it gets.
    assert max(arrivals.values()) - min(arrivals.values()) <= node


@pytest.mark.parametrize(
    ("shape", "nlocal", "nremote", "expected"),
    [
        (Paged(16_384), 2, 4, 16_384),
        (Single(0), 4, 4, 1),
        (Single(100), 2, 2, 1),
        (Single(1 << 20), 2, 4, 4),
        (Single(1 << 20, Routing(num_shards=3)), 2, 4, 3),
        (Single(1 << 20, Routing(domain=1)), 2, 4, 2),
        (Single(5 << 30), 1, 1, 5),
        (Scatter(1 << 20), 4, 4, 1),
        (Scatter(1 << 20, Routing(scatter_by="bytes")), 4, 4, 4),
        (Barrier(), 4, 4, 1),
    ],
)
def test_count_imms(shape: object, nlocal: int, nremote: int, expected: int) -> None:
    """A receiver that expects another number than arrives hangs, or reads too early."""
    assert expected == count_imms(shape, nlocal, nremote)
    assert 1 == count_imms(Single(1 << 20)), "one NIC here and there"


@pytest.mark.parametrize("shape", [Paged(8), Single(8), Barrier()])
@pytest.mark.parametrize("nics", [(0, 1), (65, 1), (1, 0), (1, 65)])
def test_count_imms_refuses_nic_counts_that_cannot_be(shape: object, nics: tuple[int, int]) -> None:
    """A mistake in a script would show only with another kind of request."""
    name = "nlocal" if nics[1] == 1 else "nremote"
    with pytest.raises(BadRequest, match=f"count_imms: {name}="):
        count_imms(shape, *nics)


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (Routing(num_shards=3), "routing.num_shards=3, but the NICs of both sides make 2 lanes"),
        (Routing(num_shards=0), "routing.num_shards=0"),
        (Routing(domain=2), r"routing.domain=2, but this engine has NICs 0 to 1"),
        (Routing(domain=3), r"routing.domain=3, but this engine has NICs 0 to 1"),
        (Routing(domain=-1), "routing.domain=-1"),
    ],
)
def test_single_refuses_impossible_routing(routing: Routing, message: str) -> None:
    """More shards than lanes, or a NIC that is not there, is the caller's mistake and says so."""
    with pytest.raises(BadRequest, match=message):
        plan_single(1 << 20, 2, 2, 0, routing)
    with pytest.raises(BadRequest, match=message):
        count_imms(Single(1 << 20, routing), 2, 2)


def test_paged_and_targets_refuse_a_nic_that_is_not_there() -> None:
    """A pinned NIC beyond the last would be taken modulo, in silence."""
    with pytest.raises(BadRequest, match=r"routing.domain=4, but this engine has NICs 0 to 3"):
        plan_paged(8, 4, 4, 0, 4)
    with pytest.raises(BadRequest, match=r"routing.domain=4, but this engine has NICs 0 to 3"):
        plan_targets((1,), 4, 0, 4)


@pytest.mark.parametrize("nlocal", [1, 2, 3, 4])
@pytest.mark.parametrize("nremote", [1, 2, 3, 4])
def test_one_row_goes_where_the_planner_sends_it(nlocal: int, nremote: int) -> None:
    """The short way of short writes has to deal lanes as the long one does, or NICs go unused."""
    for cursor in range(2 * nlocal * nremote):
        at = cursor % lanes(nlocal, nremote)
        shares, rows, after = plan_single(2 * SHARD_BYTES_MIN - 1, nlocal, nremote, at)
        assert is_one_row(2 * SHARD_BYTES_MIN - 1)
        assert 1 == rows
        assert (tuple(shares[0][:2]), after) == plan_row(nlocal, nremote, cursor)
    assert not is_one_row(2 * SHARD_BYTES_MIN)

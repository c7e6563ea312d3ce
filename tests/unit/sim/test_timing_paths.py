"""Networks that are no perfect switch: held against an event for each arrival, and closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tep.sim import load_profile
from tep.sim.cluster import Cluster
from tests.unit.sim.test_timing import POSTS, scatter
from tests.unit.sim.timing_seam import PLAIN, US, Seam, slow_model, watch_landings

MiB = 1 << 20
SPINES = st.fixed_dictionaries(
    {
        "leaf_nodes": st.integers(1, 3),
        "uplink_bps": st.sampled_from([0, 50 * 10**9, 377_400_000_000, 10**12]),
        "spine_ps": st.sampled_from([0, 1, 700_000]),
    }
)


def landings(posts, profile=PLAIN) -> dict[int, int]:
    seam = Seam(profile, 4)
    landed = watch_landings(seam.owners)
    for post in sorted(posts):
        seam.env.call_at(post[0], lambda post: scatter(seam, post), post)
    seam.run()
    return landed


@given(POSTS, SPINES)
def test_lands_when_the_slow_model_says(posts, network) -> None:
    """Pools, passes made again and closed forms must be exact: each row, to the picosecond."""
    profile = replace(PLAIN, **network)
    columns = [(t, who, [r[0] for r in rows], [r[1] for r in rows]) for t, who, rows in posts]
    expected = slow_model(profile, sorted(columns))

    assert dict(enumerate(expected)) == landings(posts, profile)


@given(POSTS)
def test_a_network_without_limits_is_the_perfect_switch(posts) -> None:
    """Two ways to compute the same thing: what they disagree about one of them has wrong."""
    assert landings(posts) == landings(posts, replace(PLAIN, leaf_nodes=2))


def test_an_uplink_shared_by_four_flows_takes_four_times_as_long() -> None:
    """Oversubscription: what a leaf sends passes its uplink, whoever sends it."""
    profile = replace(PLAIN, leaf_nodes=2, uplink_bps=PLAIN.wire_bps // 2)
    posts = [(0, 0, [(2, 8 * MiB)]), (1, 1, [(3, 8 * MiB)])]
    both = max(landings(posts, profile).values())
    lone = max(landings(posts).values())
    wire_ps = 8 * MiB * 8e12 / PLAIN.wire_bps

    assert 4 * wire_ps == pytest.approx(both - lone + wire_ps, rel=0.02)


def test_a_cluster_has_the_network_of_its_profile() -> None:
    """Engines two leaves apart wait for the spine."""
    times = []
    plain = load_profile("cx7_400")
    for profile in (plain, replace(plain, leaf_nodes=1, spine_ps=7 * US)):
        with Cluster(profile=profile) as cluster:
            a, b = cluster.engines
            mr, _ = a.reg_mr(bytearray(64))
            _, desc = b.reg_mr(bytearray(64))
            a.submit_single_write(64, (mr, 0), (desc, 0)).wait()
            times.append(cluster.now_us)

    assert 7 == pytest.approx(times[1] - times[0], abs=0.01)

"""Networks that are no perfect switch: held against an event for each arrival, and closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tep.base.errors import UsageError
from tep.sim.cluster import Cluster
from tep.sim.profile import load_profile
from tests.unit.sim.test_timing import POSTS, scatter
from tests.unit.sim.timing_seam import (
    PLAIN,
    US,
    Network,
    Seam,
    slow_model,
    watch_landings,
    within,
)

MiB = 1 << 20
SPINES = st.fixed_dictionaries(
    {
        "leaf_nodes": st.integers(1, 3),
        "uplink_bps": st.sampled_from([0, 50 * 10**9, 377_400_000_000, 10**12]),
        "spine_ps": st.sampled_from([0, 1, 700_000]),
    }
)


def landings(network: Network, posts, profile=PLAIN, nodes=4) -> dict[int, int]:
    seam = Seam(within(network, profile), nodes)
    landed = watch_landings(seam.owners)
    for post in sorted(posts):
        seam.env.call_at(post[0], lambda post: scatter(seam, post), post)
    seam.run()
    return landed


@given(POSTS, SPINES)
def test_lands_when_the_slow_model_says(posts, network) -> None:
    """Pools, passes made again and closed forms must be exact: each row, to the picosecond."""
    columns = [(t, who, [r[0] for r in rows], [r[1] for r in rows]) for t, who, rows in posts]
    expected = slow_model(PLAIN, sorted(columns), network)

    assert dict(enumerate(expected)) == landings(network, posts)


@given(POSTS, st.one_of(st.none(), SPINES), st.sampled_from([40 * 10**9, 500 * 10**9]))
def test_nodes_with_a_bus_do_as_the_slow_model(posts, network, bus_bps) -> None:
    """At an uplink, a quantum that leaves its bus late must not be overtaken by a later one."""
    profile = replace(PLAIN, bus_bps=bus_bps)
    columns = [(t, who, [r[0] for r in rows], [r[1] for r in rows]) for t, who, rows in posts]
    expected = slow_model(profile, sorted(columns), network)

    assert dict(enumerate(expected)) == landings(network, posts, profile)


@pytest.mark.parametrize("share", [1, 2, 4])
def test_nics_that_share_a_bus_get_its_rate_together(share) -> None:
    """Closed form: 4 NICs with 1 / share of what their wires carry take `share` times as long."""
    profile = replace(PLAIN, nics=4, bus_bps=4 * PLAIN.wire_bps // share)
    seam = Seam(profile, 2)
    landed = watch_landings(seam.owners)
    for nic in range(4):
        seam.owners[0].post([seam.owners[1]], [16 * MiB], nic=nic)
    seam.run()

    wire_ps = 16 * MiB * 8e12 / PLAIN.wire_bps
    assert share * wire_ps == pytest.approx(max(landed.values()), rel=0.06)


@given(POSTS)
def test_a_network_without_limits_is_the_perfect_switch(posts) -> None:
    """Two ways to compute the same thing: what they disagree about one of them has wrong."""
    network = {"leaf_nodes": 2}

    assert landings(None, posts) == landings(network, posts)


def test_an_uplink_shared_by_four_flows_takes_four_times_as_long() -> None:
    """Oversubscription: what a leaf sends passes its uplink, whoever sends it."""
    network = {"leaf_nodes": 2, "uplink_bps": PLAIN.wire_bps // 2}
    posts = [(0, 0, [(2, 8 * MiB)]), (1, 1, [(3, 8 * MiB)])]
    both = max(landings(network, posts).values())
    lone = max(landings(None, posts).values())
    wire_ps = 8 * MiB * 8e12 / PLAIN.wire_bps

    assert 4 * wire_ps == pytest.approx(both - lone + wire_ps, rel=0.02)


def test_rails_keep_a_nics_traffic_apart() -> None:
    """NIC k talks to NIC k without the spine: rails that do not cross cost nothing."""
    profile = replace(PLAIN, nics=2)
    seams = [Seam(within(n, profile), 2) for n in (None, {"rails": 1, "uplink_bps": 10**9})]
    times = []
    for seam in seams:
        landed = watch_landings(seam.owners)
        seam.owners[0].post([seam.owners[1]], [MiB])
        seam.run()
        times.append(landed[0])

    assert times[0] == times[1]


@pytest.mark.parametrize(("target", "crosses"), [(5, False), (4, True), (2, True)])
def test_a_hosts_gpus_are_on_rails_of_their_own(target, crosses) -> None:
    """GPU 1 of a host reaches GPU 1 of another without the spine, and no other GPU: 2 x 4 GPUs."""
    rails = {"rails": 1, "host_gpus": 4, "uplink_bps": PLAIN.wire_bps // 4}
    posts = [(0, 1, [(target, 8 * MiB)])]
    near, far = (landings(network, posts, nodes=8)[0] for network in (None, rails))

    assert crosses == (far > 2 * near)


def test_gpus_of_one_pcie_switch_share_it() -> None:
    """Two GPUs below one switch get half of it each; those below the other keep all of theirs."""
    network = {"host_gpus": 4, "switch_gpus": 2}
    profile = replace(PLAIN, bus_bps=PLAIN.wire_bps, **network)
    ends = []
    for senders in ((0, 1), (0, 2)):
        seam = Seam(profile, 8)
        landed = watch_landings(seam.owners)
        for sender in senders:
            seam.owners[sender].post([seam.owners[4 + sender]], [8 * MiB])
        seam.run()
        ends.append(max(landed.values()))

    assert 2 == pytest.approx(ends[0] / ends[1], rel=0.02)
    with pytest.raises(UsageError, match="no node.bus, so a PCIe switch would limit nothing"):
        Seam(within(network, PLAIN), 8)


@pytest.mark.parametrize(
    "knobs",
    [
        {"rails": 1, "leaf_nodes": 2},
        {"rails": 2},
        {"host_gpus": 8, "switch_gpus": 3},
        {"paths": 2},
    ],
)
def test_networks_that_contradict_themselves_are_refused(knobs) -> None:
    """A typing mistake must not become a network."""
    with pytest.raises(UsageError, match=f"profile cx7_400: .*{next(iter(knobs))}="):
        replace(PLAIN, **knobs)


def test_a_cluster_has_the_network_of_its_profile() -> None:
    """Engines two leaves apart wait for the spine."""
    times = []
    for network in (None, {"leaf_nodes": 1, "spine_ps": 7 * US}):
        with Cluster(profile=within(network, load_profile("cx7_400"))) as cluster:
            a, b = cluster.engines
            mr, _ = a.reg_mr(bytearray(64))
            _, desc = b.reg_mr(bytearray(64))
            a.submit_single_write(64, (mr, 0), (desc, 0)).wait()
            times.append(cluster.now_us)

    assert 7 == pytest.approx(times[1] - times[0], abs=0.01)

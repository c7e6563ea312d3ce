"""Unlike machines on one fabric: against an event for each arrival, and closed forms."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tep import Pages, Single, count_imms
from tep.backends.base import Kind
from tep.base.errors import UsageError
from tep.sim import Cluster, TimingFabric, load_profile, run
from tep.sim.clock import FabricEnv
from tests.unit.sim.test_timing import POSTS
from tests.unit.sim.test_timing_pacing import MARKED, PAUSES, slow_pacing
from tests.unit.sim.test_timing_paths import SPINES, landings
from tests.unit.sim.timing_seam import PLAIN, US, Seam, held, latency_of, slow_model

MiB = 1 << 20
OTHERS = st.fixed_dictionaries(
    {
        "wire_bps": st.sampled_from([97 * 10**9, 377_400_000_000, 754_800_000_000]),
        "dma_bps": st.sampled_from([126_030_000_000, 504_123_000_000]),
        "op_ps": st.sampled_from([0, 74_200, 2 * US]),
        "latency_ps": st.sampled_from([3, 999_999, 3 * US, 15 * US]),
        "quantum_bytes": st.sampled_from([8192, 65_536]),
        "fill_bytes": st.sampled_from([0, 131_072]),
        "post_first_ps": st.sampled_from([90_001, 443_000]),
    }
)
MIXES = st.lists(OTHERS.map(lambda numbers: replace(PLAIN, **numbers)), min_size=4, max_size=4)


# A queue pair's last row, and one more behind it, wait beside a long plan that has begun.
BEHIND = [
    (0, 0, [(0, 0)]),
    (1, 1, [(0, 300_000), (1, 0)]),
    (90_003, 1, [(0, 300_000)]),
    (90_004, 1, [(1, 0)]),
]
SMALL_QUANTA = replace(
    PLAIN,
    wire_bps=97 * 10**9,
    dma_bps=126_030_000_000,
    op_ps=0,
    latency_ps=999_999,
    quantum_bytes=8192,
    fill_bytes=0,
    post_first_ps=90_001,
)


def columns(posts):
    return sorted((t, who, [r[0] for r in rows], [r[1] for r in rows]) for t, who, rows in posts)


@example(BEHIND, [SMALL_QUANTA] * 4, None, False)
@given(POSTS, MIXES, st.one_of(st.none(), SPINES), st.booleans())
def test_lands_when_the_slow_model_says(posts, machines, network, buses) -> None:
    """Four machines, each of its own rates and latency: each row, to the picosecond."""
    if buses:
        machines[1] = replace(machines[1], bus_bps=60 * 10**9)
        machines[3] = replace(machines[3], bus_bps=500 * 10**9)
    expected = slow_model(machines, columns(posts), network)

    assert dict(enumerate(expected)) == landings(network, posts, machines)


@pytest.mark.slow
@settings(max_examples=30 if settings().max_examples < 1000 else 1000)
@given(POSTS, MIXES, st.one_of(PAUSES, MARKED))
def test_pauses_and_marks_between_unlike_machines(posts, machines, knobs) -> None:
    """News travels the receiver's own route, and its thresholds in bytes are times there."""
    # A plan is made one shortest latency ahead: one of nanoseconds only makes the test slow.
    machines = [replace(m, **knobs, latency_ps=m.latency_ps + 700_000) for m in machines]

    assert dict(enumerate(slow_pacing(machines, columns(posts)))) == landings(None, posts, machines)


@settings(max_examples=10)
@given(POSTS)
def test_equal_machines_said_one_by_one_are_one_machine(posts) -> None:
    """Unlike numbers that never meet on a wire cost no time, and take the same way as before."""
    machines = [replace(PLAIN, nics=1 + k, sq_depth=PLAIN.sq_depth - k) for k in range(4)]
    seam = Seam(machines, 4)

    assert seam.fabric.pairs is None
    assert landings(None, posts, machines) == landings(None, posts)


# ---------------------------------------------------------------- closed forms


def test_one_row_between_unlike_machines_is_the_sum_of_its_parts() -> None:
    """Each side's own part, half of either's latencies, and news at the exact times of both."""
    fast, slow = PLAIN, replace(PLAIN, wire_bps=97 * 10**9, latency_ps=15 * US + 1, ack_ps=12 * US)
    slow = replace(slow, receive_ps=700_000, post_first_ps=443_000)
    for machines in ([fast, slow], [slow, fast]):
        seam = Seam(machines, 2)
        seam.owners[0].post([seam.owners[1]], [4096])
        seam.run()

        one, other = machines
        sent = one.post_first_ps + 4096 * 8e12 / one.dma_bps
        landed = sent + latency_of(machines, 0, 1) + held(slow, 4096, True)
        acked = landed + one.ack_ps // 2 + (other.ack_ps + 1) // 2
        assert [(pytest.approx(landed + other.receive_ps, abs=2), 1)] == seam.owners[1].of(Kind.IMM)
        assert [(pytest.approx(acked, abs=2), 1)] == seam.owners[0].of(Kind.WRITE)


def test_a_scatter_is_done_when_the_last_of_its_acknowledgements_is_there() -> None:
    """The row that lands last need not be the one that is acknowledged last."""
    near, far = PLAIN, replace(PLAIN, ack_ps=400 * US)
    seam = Seam([near, far, near], 3)
    sender, distant, late = seam.owners
    sender.post([distant, late], [64, MiB])
    seam.run()

    (first, _), (last, _) = distant.of(Kind.IMM) + late.of(Kind.IMM)
    ack_ps = near.ack_ps // 2 + far.ack_ps // 2
    assert first < last
    assert first - near.receive_ps + ack_ps == max(sender.of(Kind.WRITE))[0]


def test_the_sender_never_learns_of_a_row_before_its_bytes_can_be_seen() -> None:
    """Half of a short and half of a long acknowledgement can be shorter than a slow look."""
    quick = replace(PLAIN, ack_ps=PLAIN.receive_ps)
    blind = replace(PLAIN, receive_ps=50 * US, ack_ps=50 * US)
    seam = Seam([quick, blind], 2)
    seam.owners[0].post([seam.owners[1]], [64])
    seam.run()

    assert seam.owners[1].of(Kind.IMM)[0][0] == seam.owners[0].of(Kind.WRITE)[0][0]


CX7, CX8 = load_profile("cx7_400"), load_profile("cx8_800")
P5, P5EN = (replace(load_profile(name), poll_ps=0) for name in ("efa_4x100", "efa_2x200"))


@pytest.mark.parametrize(
    ("machines", "bps", "most"),  # pages in turns of `turn_rows` leave NICs idle now and then
    [
        ([CX7, CX8], CX7.wire_bps, 1.05),
        ([CX8, CX7], CX7.wire_bps, 1.05),
        ([P5, P5EN], 2 * P5EN.wire_bps, 1.06),  # 4 x 97.13 Gb/s into 2 x 179
        ([P5EN, P5], 2 * P5EN.wire_bps, 1.05),
        ([load_profile("efa_1x400"), P5], 2 * P5EN.wire_bps, 1.05),
        ([replace(CX7, nics=4), CX7], CX7.wire_bps, 1.05),
        ([CX7, replace(CX7, nics=4)], CX7.wire_bps, 1.05),
        ([replace(CX7, nics=3), replace(CX7, nics=2)], 2 * CX7.wire_bps, 1.05),
        ([replace(CX7, nics=3), replace(CX7, nics=4)], 3 * CX7.wire_bps, 1.09),
    ],
)
@pytest.mark.parametrize("paged", [True, False])
def test_a_long_write_goes_at_the_rate_of_the_slower_side(machines, bps, most, paged) -> None:
    """Engines deal a request out to all NICs of both sides: none of them may be left idle."""
    npages, page = 768, 65_536
    nbytes = npages * page
    with Cluster(2, profile=machines, move_bytes=False) as cluster:
        a, b = cluster.engines
        mr, _ = a.reg_mr((1 << 40, nbytes, "cpu"))
        _, desc = b.reg_mr((1 << 41, nbytes, "cpu"))
        counts = [len(engine.main_address.domains) for engine in (a, b)]
        assert [one.nics for one in machines] == counts
        if paged:
            pages, imms = Pages(np.arange(npages)), npages
            write = a.submit_paged_writes(page, (mr, pages), (desc, pages), imm=1)
        else:
            imms = count_imms(Single(nbytes), *counts)
            write = a.submit_single_write(nbytes, (mr, 0), (desc, 0), imm=1)
        b.expect_imm_count(1, imms).wait()
        write.wait()
        took_ps = cluster.env.now

    assert nbytes * 8e12 / bps < took_ps < (most if paged else 1.05) * nbytes * 8e12 / bps


@pytest.mark.parametrize("machines", [[CX7, CX8, CX7], [P5, P5EN, P5]])
def test_nics_of_unlike_machines_die_and_nothing_is_lost(machines) -> None:
    """Rows that a dead NIC loses end after the sender's own timeout, and come over another."""
    machines = [replace(one, nics=max(2, one.nics), peer_timeout_ps=10**9) for one in machines]
    machines[1] = replace(machines[1], peer_timeout_ps=2 * 10**9)
    for victim in (0, 1):
        sent = np.arange(1 << 16, dtype=np.uint32)
        came = np.zeros_like(sent)
        with Cluster(3, profile=machines, mortal=True) as cluster:
            a, b, _ = cluster.engines
            (mr, _), (_, desc) = a.reg_mr(sent), b.reg_mr(came)
            cluster.at(20.0, lambda c=cluster, v=victim: c.kill_nic(v, 0))
            pages = Pages(np.arange(64))
            a.submit_paged_writes(4096, (mr, pages), (desc, pages), imm=1).wait()
            b.expect_imm_count(1, 64).wait()
            assert (sent == came).all()
            assert cluster.now_us < (1500 if victim else 1000)


# ---------------------------------------------------------------- what is refused, and the gateway


@pytest.mark.parametrize(
    ("machines", "said"),
    [
        (["cx7_400", "efa_2x200"], "are of two transports .* inside one tep.sim.run"),
        ([CX7, replace(CX8, pause_bytes=1)], "wire.pause .* both ends of a pair"),
        ([CX7, replace(CX8, uplink_bps=1)], "network.uplink .* stand in one network"),
        (["cx7_400"], "1 profiles for 2 nodes"),
    ],
)
def test_machines_that_cannot_be_one_cluster_are_refused(machines, said) -> None:
    """SRD and RC never meet on a wire: a simulation in which they do answers for no machine."""
    with pytest.raises(UsageError, match=said):
        Cluster(2, profile=machines)


def test_machines_of_a_fabric_are_named_when_it_is_opened() -> None:
    """The lookahead is the shortest way of all: one that comes later could be shorter."""
    fabric = TimingFabric(FabricEnv(), [CX7, CX8])
    assert 3 == len(fabric.node("a", replace(CX7, nics=3)).domains)
    assert "TimingFabric(cx7_400, cx8_800, cx7_400; 1 nodes)" == repr(fabric)
    with pytest.raises(UsageError, match="none of this fabric's: cx7_400, cx8_800"):
        fabric.node("b", replace(CX7, wire_bps=1))
    with pytest.raises(UsageError, match="one profile at the least"):
        TimingFabric(FabricEnv(), [])


def test_a_gateway_between_transports_is_a_program_over_two_clusters() -> None:
    """Store and forward through host memory: bytes come whole, and the time is the sum of both."""
    nbytes = 2 * MiB
    sent, staged, came = (np.zeros(nbytes, np.uint8) for _ in range(3))
    sent[:] = np.arange(nbytes) % 251

    async def main() -> tuple[float, float]:
        now = asyncio.get_running_loop().time
        with Cluster(2, profile="efa_2x200") as srd, Cluster(2, profile="cx7_400") as rc:
            (a, inlet), (outlet, b) = srd.engines, rc.engines
            (mr, _), (_, desc) = a.reg_mr(sent), inlet.reg_mr(staged)
            (relay, _), (_, last) = outlet.reg_mr(staged), b.reg_mr(came)
            got = inlet.expect_imm_count(1, count_imms(Single(nbytes), 2, 2))
            a.submit_single_write(nbytes, (mr, 0), (desc, 0), imm=1)
            await got
            first = now()
            got = b.expect_imm_count(1, 1)
            outlet.submit_single_write(nbytes, (relay, 0), (last, 0), imm=1)
            await got
            return first, now() - first

    first, second = run(main())
    assert (sent == came).all()
    assert nbytes * 8 / (2 * P5EN.wire_bps) == pytest.approx(first, rel=0.5)
    assert nbytes * 8 / CX7.wire_bps == pytest.approx(second, rel=0.35)

"""NICs of the timing fabric that die: all comes once, and in how long."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tep
from tep.base.errors import UsageError
from tep.base.units import PS_PER_MS
from tep.sim.cluster import Cluster
from tep.sim.faults import KillNic
from tep.sim.profile import Profile, load_profile
from tests.support.effort import effort
from tests.unit.sim.timing_seam import US

TIMEOUT_US = 1000
CX7 = replace(load_profile("cx7_400"), nics=2, peer_timeout_ps=PS_PER_MS)
EFA = replace(load_profile("efa_2x200"), peer_timeout_ps=PS_PER_MS)
PAGE = 4096


def write(
    profile: Profile,
    pages: int,
    fault=None,
    at_us: float = 0,
    seed: int = 0,
    *,
    mortal: bool = True,
) -> float:
    """Write pages while something happens; check them and their count; when they were done."""
    with Cluster(profile=profile, mortal=mortal, seed=seed) as cluster:
        a, b = cluster.engines
        sent = np.random.default_rng(seed).integers(0, 255, pages * PAGE, np.uint8)
        came = np.zeros_like(sent)
        (mr, _), (_, desc) = a.reg_mr(sent), b.reg_mr(came)
        got = b.expect_imm_count(7, pages)
        src, dst = (tep.Pages(np.arange(pages)) for _ in range(2))
        done = a.submit_paged_writes(PAGE, (mr, src), (desc, dst), imm=7)
        if fault is not None:
            cluster.at(at_us, lambda: fault(cluster))
        done.wait()
        end_us = cluster.now_us
        got.wait()
        assert (sent == came).all()
        cluster.run(_idle())
        assert () == b.stats().imms_unexpected
        return end_us


async def _idle() -> None:
    import asyncio

    await asyncio.sleep(0.01)


@settings(max_examples=effort(25, 6))
@given(
    st.sampled_from([CX7, EFA]),
    st.integers(1, 300),
    st.integers(0, 1),
    st.integers(0, 1),
    st.floats(0, 1),
    st.integers(0, 9),
)
def test_a_transfer_outlives_a_nic_on_either_side(profile, pages, node, nic, when, seed) -> None:
    """Whenever it happens: each page is there, each immediate counts once, and in bounded time."""
    plain_us = write(profile, pages, seed=seed)

    end_us = write(profile, pages, lambda c: c.kill_nic(node, nic), when * plain_us, seed)
    waits_us = 0 if node == 0 else TIMEOUT_US
    # At most all is written once more, on one NIC of two, after some messages. A fault wakes the
    # engine, which may so see completions sooner: by a step's delay, and where the receiver's
    # worker takes time for immediates, by the way of an acknowledgement.
    sooner_ps = profile.step_delay_ps + (profile.ack_ps if profile.poll_ps else 0)
    assert plain_us <= end_us + sooner_ps / US + 0.001
    assert end_us <= waits_us + 4 * plain_us + 200


def test_no_fault_costs_no_time() -> None:
    """A cluster whose NICs can die must be as quick as one whose NICs cannot, until one does."""
    assert write(EFA, 200, mortal=False) == write(EFA, 200)


def test_a_silent_nic_is_missed_after_the_timeout_and_two_ways() -> None:
    """Closed form: the one row would have landed, the timeout, a question, its answer, the row."""
    lone_us = write(CX7, 1)
    ways_us = 2 * CX7.latency_ps / US
    end_us = write(CX7, 1, lambda cluster: [cluster.kill_nic(1, k) for k in (0,)], 1.5)

    failed_us = lone_us - CX7.ack_ps / US + TIMEOUT_US
    assert failed_us + ways_us + lone_us <= end_us <= failed_us + ways_us + 2 * lone_us + 20


def test_faults_that_the_fabric_does_not_model_are_refused() -> None:
    """A fault that happens in silence, or not at all, would be read as robustness."""
    with Cluster(profile=CX7) as cluster, pytest.raises(UsageError, match="never fail"):
        cluster.kill_nic(0, 0)
    with Cluster(profile=CX7, mortal=True) as cluster:
        cluster.kill_nic("a", 1)
        assert [KillNic("a", 1)] == cluster.happened
        with pytest.raises(UsageError, match="there is no NIC 1 of 'a'"):
            cluster.kill_nic("a", 1)
    with pytest.raises(UsageError, match="always are"):
        Cluster(mortal=True)

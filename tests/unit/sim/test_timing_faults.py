"""NICs of the timing fabric that die or lose their link: all comes once, and in how long."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tep
from tep.base.api import EngineOptions
from tep.base.errors import UsageError
from tep.base.units import PS_PER_MS
from tep.sim.cluster import Cluster
from tep.sim.faults import Clog, KillNic
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
    st.booleans(),
    st.floats(0, 1),
    st.integers(0, 9),
)
def test_a_transfer_outlives_a_nic_on_either_side(
    profile, pages, node, nic, dies, when, seed
) -> None:
    """Whenever it happens: each page is there, each immediate counts once, and in bounded time."""
    plain_us = write(profile, pages, seed=seed)

    def fault(cluster: Cluster) -> None:
        if dies:
            cluster.kill_nic(node, nic)
        else:
            cluster.cut_link(node, nic, 1.5 * TIMEOUT_US)

    end_us = write(profile, pages, fault, when * plain_us, seed)
    waits_us = 0 if dies and node == 0 else TIMEOUT_US
    # At most all is written once more, on one NIC of two, after some messages.
    # A fault wakes the engine, which may so see a completion a step's delay sooner.
    assert plain_us <= end_us + profile.step_delay_ps / US + 0.001
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


def test_a_link_that_comes_back_is_used_again() -> None:
    """A path that stays fenced after a flap would cost half the rate for ever."""
    times = []
    options = EngineOptions(probe_first_s=0.002, probe_max_s=0.002)
    with Cluster(profile=CX7, mortal=True, move_bytes=False, options=options) as cluster:
        a, b = cluster.engines
        mr, _ = a.reg_mr((1 << 40, 1 << 24, "cpu"))
        _, desc = b.reg_mr((1 << 41, 1 << 24, "cpu"))
        pages = tep.Pages(np.arange(256))
        for start_ms in (0, 1, 20, 40):
            if start_ms == 1:
                cluster.cut_link("b", 1, 1200)
            cluster.env.run(until=start_ms * PS_PER_MS)
            start_us = cluster.now_us
            a.submit_paged_writes(1 << 16, (mr, pages), (desc, pages), imm=7).wait()
            times.append(cluster.now_us - start_us)
        assert [Clog("b", 1, 1200 * US)] == cluster.happened

    sound, cut, _, again = times  # the third asks, as an engine without requests does nothing
    assert cut > TIMEOUT_US
    assert again == pytest.approx(sound, rel=0.05)


def test_faults_that_the_fabric_does_not_model_are_refused() -> None:
    """A fault that happens in silence, or not at all, would be read as robustness."""
    with Cluster(profile=CX7) as cluster, pytest.raises(UsageError, match="never fail"):
        cluster.kill_nic(0, 0)
    with Cluster(profile=CX7, mortal=True) as cluster:
        with pytest.raises(UsageError, match=r"wire\.peer_timeout of cx7_400, at the least"):
            cluster.cut_link(0, 0, 10)
        cluster.kill_nic("a", 1)
        assert [KillNic("a", 1)] == cluster.happened
        with pytest.raises(UsageError, match="there is no NIC 1 of 'a'"):
            cluster.kill_nic("a", 1)
    with pytest.raises(UsageError, match="always are"):
        Cluster(mortal=True)
    with Cluster() as cluster, pytest.raises(UsageError, match="open the Cluster with a profile"):
        cluster.cut_link(0, 0, 10)

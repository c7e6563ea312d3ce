"""An engine closes at any moment of a failover: every handle ends, and nothing is left at a NIC."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tep
from tep.base.units import KiB
from tep.sim import Cluster
from tests.support.effort import effort


@given(
    seed=st.integers(0, 2**16),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    nics=st.tuples(st.integers(2, 3), st.integers(1, 3)),
    kill_us=st.sampled_from([0.2, 0.5, 2, 10, 60]),
    close_us=st.sampled_from([0.1, 1, 5, 30, 200, 1000, 20_000]),
    reads=st.booleans(),
)
@example(seed=7, sizes=[1, 5], nics=(2, 1), kill_us=0.5, close_us=1000, reads=False)
@example(seed=7, sizes=[11], nics=(2, 1), kill_us=0.5, close_us=1000, reads=False)
@settings(max_examples=effort(100, 15))
def test_an_engine_closes_at_any_moment_of_a_failover(
    seed: int,
    sizes: list[int],
    nics: tuple[int, int],
    kill_us: float,
    close_us: float,
    reads: bool,
) -> None:
    """A row that is written again while the engine says its last words was queued, and never ended.

    The examples: rows of two transfers are written again together, and the last of them comes back
    during these words; the answer that says which rows landed comes during them.
    """
    with Cluster(nics=nics, seed=seed) as cluster:
        a, b = cluster.engines
        mine, _ = a.reg_mr(np.zeros(160 * KiB, np.uint8))
        _, theirs = b.reg_mr(np.zeros(160 * KiB, np.uint8), access=tep.Access(7))
        handles = []
        for npages in sizes:
            pages = tep.Pages(range(npages))
            if reads:
                moved = a.submit_paged_reads(64, (theirs, pages), (mine, pages), imm=7)
            else:
                moved = a.submit_paged_writes(64, (mine, pages), (theirs, pages), imm=7)
            handles.append(moved)
        cluster.at(cluster.now_us + kill_us, lambda: cluster.kill_nic(0, 0))
        cluster.env.run_until(lambda: False, cluster.env.now + round(close_us * 1e6))
        a.close()

    assert [] == [handle for handle in handles if not handle.finished]
    for handle in handles:
        if handle.failed:
            with pytest.raises(tep.TepError):
                handle.result()

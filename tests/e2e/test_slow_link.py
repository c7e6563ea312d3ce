"""One link at a part of its speed, on the calibrated fabric: its share goes to the others."""

from __future__ import annotations

import numpy as np
import pytest

from tep.base.api import Pages
from tep.base.units import GiB, KiB
from tep.sim.cluster import Cluster

PAGE = 64 * KiB
PAGES = GiB // PAGE


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "nics"), [("efa_2x200", 2), ("efa_4x100", 4)])
@pytest.mark.parametrize(("side", "times"), [("a", 4), ("b", 4), ("a", 2), ("a", 1.5)])
def test_a_slow_link_costs_what_it_lacks_and_no_more(
    profile: str, nics: int, side: str, times: float
) -> None:
    """With halves fixed beforehand one lame link makes the whole write as slow as it is."""
    with Cluster(2, profile=profile, move_bytes=False) as cluster:
        a, b = cluster.engines
        mr, _ = a.reg_mr((1 << 40, GiB, "cuda:0"))
        _, desc = b.reg_mr((1 << 41, GiB, "cuda:0"))
        pages = Pages(np.arange(PAGES))

        def write_us() -> float:
            begin = cluster.now_us
            got = b.expect_imm_count(5, PAGES)
            sent = a.submit_paged_writes(PAGE, (mr, pages), (desc, pages), 5)
            got.wait()
            sent.wait()
            return cluster.now_us - begin

        full = write_us()
        cluster.slow_down(side, 1, times)
        slow = write_us()
        cluster.slow_down(side, 1, 1)
        again = write_us()

        assert () == b.stats().imms_unexpected, "the number of immediates is the shape's"
    ideal = full * nics / (nics - 1 + 1 / times)
    assert slow <= 1.15 * ideal
    assert again <= 1.05 * full


def test_a_slow_nic_is_known_to_layers_just_below_the_limit() -> None:
    """Where unequal shares make pieces of the long ones, the short one has to be cut as well.

    Else nothing is learned and nothing is shared: layers of 120 MiB took 1.75 times as long, the
    twelfth as the fourth, where layers of 112 MiB took 1.15 times.
    """
    page, npages, layers = 512 * KiB, 240, 6
    with Cluster(2, profile="efa_4x100", move_bytes=False) as cluster:
        a, b = cluster.engines
        mr, _ = a.reg_mr((1 << 40, npages * page, "cuda:0"))
        _, desc = b.reg_mr((1 << 41, npages * page, "cuda:0"))
        pages = Pages(range(npages))

        def write_us() -> float:
            begin = cluster.now_us
            got = b.expect_imm_count(5, npages)
            a.submit_paged_writes(page, (mr, pages), (desc, pages), 5)
            got.wait()
            return cluster.now_us - begin

        full = write_us()
        cluster.slow_down("a", 1, 2)
        times = [write_us() / full for _ in range(layers)]

    assert times[-1] < 1.5, times

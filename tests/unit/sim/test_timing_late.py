"""Rows that land late on the timing fabric: shares and means in closed form, order to the ps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tep.base.errors import UsageError
from tep.base.units import PS_PER_US
from tep.sim.machines import Late
from tep.sim.profile import load_profile
from tests.unit.sim.test_timing import POSTS, scatter
from tests.unit.sim.timing_seam import PLAIN, US, Seam, slow_model, watch_landings

EFA = load_profile("efa_2x200")
MANY = np.arange(200_000)


def test_a_tail_has_its_share_and_its_mean() -> None:
    """The share of late rows must be right, and above t it must fall as exp(-t / mean)."""
    late = Late(replace(EFA, jitter_ps=0, tail_ppm=50_000, tail_ps=80 * PS_PER_US), seed=3)
    extra = late.extra_ps(MANY, MANY)
    hit = extra[extra > 0]

    assert 0.05 == pytest.approx(len(hit) / len(MANY), rel=0.05)
    assert 80e6 == pytest.approx(hit.mean(), rel=0.05)
    assert np.exp(-2) == pytest.approx((hit > 160e6).mean(), rel=0.1)


@pytest.mark.parametrize("packets", [1, 16, 256])
def test_a_row_is_hit_as_often_as_one_of_its_packets_is_lost(packets) -> None:
    """Long rows are hit more often: 1 - (1 - q) ** packets, and half of them is sent again."""
    q = 1e-3
    late = Late(replace(PLAIN, loss_ppm=1000, retry_ps=9 * PS_PER_US), seed=1)
    extra = late.extra_ps(MANY, np.full(len(MANY), packets * 4096))
    hit = extra[extra > 0]
    again = packets * 4096 * 8e12 / PLAIN.wire_bps / 2

    assert 1 - (1 - q) ** packets == pytest.approx(len(hit) / len(MANY), rel=0.15)
    assert 9e6 + again == pytest.approx(hit.mean(), rel=0.1)


@given(POSTS, st.integers(0, 3))
def test_a_lost_row_holds_up_those_behind_it_and_no_others(posts, seed) -> None:
    """On RC nothing overtakes. By a loop over the rows of each pair, with the same losses."""
    profile = replace(PLAIN, loss_ppm=20_000, retry_ps=70 * US)
    posts = sorted(posts)
    seam = Seam(profile, 4, seed=seed)
    landed = watch_landings(seam.owners)
    for post in posts:
        seam.env.call_at(post[0], lambda post: scatter(seam, post), post)
    seam.run()

    columns = [(t, who, [r[0] for r in rows], [r[1] for r in rows]) for t, who, rows in posts]
    plain = slow_model(PLAIN, columns)
    rows = [(who, to, nbytes) for _, who, row in posts for to, nbytes in row]
    extra = Late(profile, seed).extra_ps(np.arange(len(rows)), np.array([r[2] for r in rows]))
    last: dict[tuple[int, int], int] = {}
    expected = {}
    for number, (who, to, _) in enumerate(rows):
        own = plain[number] + int(extra[number])
        expected[number] = last[who, to] = max(own, last.get((who, to), 0))
    assert expected == landed


def test_tails_where_rows_are_ordered_and_losses_where_they_are_not_are_refused() -> None:
    """Each kind of fabric has its own way to be late; the other's would mean something else."""
    with pytest.raises(UsageError, match="would reorder rows"):
        replace(PLAIN, tail_ppm=5)
    with pytest.raises(UsageError, match="a loss is a tail"):
        replace(EFA, loss_ppm=5)

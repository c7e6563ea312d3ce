"""The time to the first token, simulated: its parts, and how it was fitted.

tests/e2e/test_reproduce.py holds it to the published rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tep import UsageError
from tep.apps.kvcache.layout import KvBuffer, KvLayout
from tep.apps.kvcache.simulate import Load, Plant, Report, first_token, simulate
from tep.apps.kvcache.traces import Arrival
from tep.apps.kvcache.ttft import (
    FITTED_ROWS,
    OVERHEAD,
    PUBLISHED,
    PUBLISHED_ROWS,
    QWEN3_235B,
    Measured,
    Overhead,
    TtftModel,
    fit,
)

PREDICTED = [row for row in PUBLISHED_ROWS if row not in FITTED_ROWS]
ALONE = Plant(prefillers=1, decoders=1, prefill_tp=1, decode_tp=1)


def test_at_most_two_rows_are_fitted_to() -> None:
    """A third row in the fit would be called predicted by whoever reads the table."""
    assert [4096, 131072] == [row.ntokens for row in PREDICTED]
    again = fit(QWEN3_235B, 16384, FITTED_ROWS, replace(OVERHEAD, start_s=0, hand_over_s=0))
    assert (PUBLISHED, OVERHEAD) == again


@pytest.mark.slow
def test_a_prompt_alone_and_one_of_a_cluster_take_as_long() -> None:
    """Two answers to one question: nobody would know which of them to trust."""
    load = Load(arrivals=(Arrival(0.1, 4096), Arrival(5.0, 4096)))
    found = simulate(replace(ALONE, prefillers=2), load)

    assert found.ttft_s() == pytest.approx(first_token(4096, ALONE).ttft_s(), rel=1e-3)


@pytest.mark.slow
def test_what_is_added_is_the_sum_of_its_parts_and_of_the_network() -> None:
    """A part that is written down and not simulated is a number for show."""
    added = {
        name: first_token(8192, replace(ALONE, overhead=replace(Overhead(), **{name: value})))
        for name, value in (("start_s", 1e-3), ("hand_over_s", 1e-4), ("pass_s", 0.02))
    }
    bare = first_token(8192, replace(ALONE, overhead=Overhead()))

    assert 0 < bare.added_s() < 1e-3, "the wire alone: all but the last layer hides"
    parts = {name: found.added_s() - bare.added_s() for name, found in added.items()}
    expected = {"start_s": 94 * 1e-3, "hand_over_s": 512 * 1e-4, "pass_s": 0.02}
    assert expected == pytest.approx(parts, rel=0.01)


@pytest.mark.slow
def test_a_prefiller_that_met_nobody_waits_for_its_first_contact_once() -> None:
    """26 ms a peer are published; hidden in an average they would look like noise."""
    load = Load(arrivals=(Arrival(0.0, 4096), Arrival(5.0, 4096)))
    times = [done.ttft_s for done in simulate(replace(ALONE, cold=True), load).completions]

    assert times[0] - times[1] == pytest.approx(OVERHEAD.first_contact_s, rel=0.01)


def test_a_fit_finds_the_constants_that_made_its_rows() -> None:
    """A calibration on one's own machine must keep nothing of the published machine."""
    layout = KvLayout("m", 16, (KvBuffer("kv", 8, 2, 64, planes=2),))
    model = TtftModel(layout=layout, chunk_tokens=256, layer_s=1e-4, token_s=2e-6, pair_s=3e-9)
    known = Overhead(pass_s=1e-3, pass_token_s=1e-8, hop_s=1e-4)
    true = replace(known, start_s=2e-5, hand_over_s=1e-5)
    rows = []
    for ntokens in (64, 250, 900):
        chunks, pages = model.chunks(ntokens), model.last_pages(ntokens)
        added_s = true.hop_s + true.before_token_s(model, ntokens)
        added_s += len(chunks) * layout.layers * true.start_s
        rows.append(
            Measured(
                ntokens=ntokens,
                ttft_same_node_s=model.compute_s(ntokens),
                ttft_s=model.compute_s(ntokens) + added_s,
                layer_compute_s=model.layer_compute_s(
                    chunks[-1].start, chunks[-1].stop - chunks[-1].start
                ),
                layer_transfer_s=true.start_s + 5e-7 * pages,
            )
        )
    found, overhead = fit(layout, 256, rows, known)

    for name in ("layer_s", "token_s", "pair_s"):
        assert getattr(model, name) == pytest.approx(getattr(found, name), rel=1e-6)
    for name in ("start_s", "hand_over_s", "pass_s"):
        assert getattr(true, name) == pytest.approx(getattr(overhead, name), rel=1e-6)


def test_rows_that_do_not_determine_the_constants_are_refused() -> None:
    """The smallest of many solutions would predict something, and nobody would know what."""
    with pytest.raises(UsageError, match="the rows determine 1 of them; measure other lengths"):
        fit(QWEN3_235B, 16384, PUBLISHED_ROWS[:1])
    with pytest.raises(UsageError, match="no positive times"):
        fit(QWEN3_235B, 16384, [])


def test_impossible_questions_are_refused() -> None:
    """An answer to them would be a number that means nothing."""
    with pytest.raises(UsageError, match="ntokens=0"):
        first_token(0)


def test_the_time_of_all_requests_is_that_of_the_slowest() -> None:
    """A share of 1 asks for the last of them, and none may be asked for where none is."""
    done = [
        SimpleNamespace(ok=ok, ttft_s=at) for ok, at in ((True, 3.0), (True, 1.0), (False, 9.0))
    ]
    for share, expected in ((0.0, 1.0), (0.5, 3.0), (1.0, 3.0)):
        assert expected == Report.ttft_s(SimpleNamespace(completions=done), share)
    assert math.isnan(Report.ttft_s(SimpleNamespace(completions=[])))


def test_each_rank_of_a_plant_is_an_engine() -> None:
    """Reports divide by it."""
    assert 10 == Plant(prefillers=2, prefill_tp=4, decoders=1, decode_tp=2).engines

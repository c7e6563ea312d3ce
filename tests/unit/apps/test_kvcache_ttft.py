"""The time to the first token, against the published rows, and as a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from tep import UsageError
from tep.apps.kvcache.layout import KvBuffer, KvLayout
from tep.apps.kvcache.ttft import (
    PUBLISHED,
    PUBLISHED_ROWS,
    QWEN3_235B,
    Measured,
    TtftModel,
    fit,
)

# Steps and pages of the rows. Source: arXiv 2510.27656 v2, Table 3, as all of them.
SHAPES = {4096: (1, 256), 8192: (1, 512), 32768: (2, 1024), 131072: (8, 1024)}


def close(expected: float) -> Any:
    return pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("given", [True, False], ids=["given layer times", "own layer times"])
@pytest.mark.parametrize("row", PUBLISHED_ROWS, ids=lambda row: row.ntokens)
def test_the_published_rows_come_out_within_five_percent(row: Measured, given: bool) -> None:
    """A model that misses what it was fitted to cannot be believed in between."""
    found = PUBLISHED.predict(row.ntokens, row.layer_compute_s if given else None)

    assert SHAPES[row.ntokens] == (len(found.chunks), found.pages[-1])
    assert close(row.layer_transfer_s) == found.layer_transfer_s[-1]
    assert close(row.layer_compute_s) == found.layer_compute_s[-1]
    assert close(row.ttft_same_node_s) == found.ttft_same_node_s
    assert close(row.ttft_s) == found.ttft_s


@pytest.mark.parametrize("row", PUBLISHED_ROWS, ids=lambda row: row.ntokens)
def test_a_row_left_out_of_the_fit_is_predicted_within_five_percent(row: Measured) -> None:
    """A model that only repeats its rows says nothing about other lengths."""
    others = [other for other in PUBLISHED_ROWS if other is not row]
    model = fit(QWEN3_235B, 16384, others)

    assert close(row.ttft_s) == model.predict(row.ntokens).ttft_s
    assert close(row.ttft_s) == model.predict(row.ntokens, row.layer_compute_s).ttft_s


def test_a_fit_finds_the_constants_that_made_its_rows() -> None:
    """A calibration on one's own machine must keep nothing of the published machine."""
    layout = KvLayout("m", 16, (KvBuffer("kv", 8, 2, 64, planes=2),))
    true = TtftModel(
        layout=layout,
        chunk_tokens=256,
        layer_s=1e-4,
        token_s=2e-6,
        pair_s=3e-9,
        start_s=2e-5,
        page_s=5e-7,
        step_s=4e-3,
        hand_over_s=1e-5,
    )
    rows = []
    for ntokens in (64, 128, 250, 512, 900):
        made = true.predict(ntokens)
        times = (made.layer_compute_s[-1], made.layer_transfer_s[0])
        rows.append(
            Measured(
                ntokens=ntokens,
                ttft_same_node_s=made.ttft_same_node_s,
                ttft_s=made.ttft_same_node_s + true.added_s(made.chunks) + times[1],
                layer_compute_s=times[0],
                layer_transfer_s=times[1],
            )
        )
    found = fit(layout, 256, rows)

    for name in ("layer_s", "token_s", "pair_s", "start_s", "page_s", "step_s", "hand_over_s"):
        assert getattr(true, name) == pytest.approx(getattr(found, name), rel=1e-6)


def test_rows_that_do_not_determine_the_constants_are_refused() -> None:
    """The smallest of many solutions would predict something, and nobody would know what."""
    with pytest.raises(UsageError, match="the rows determine 1 of them; measure other lengths"):
        fit(QWEN3_235B, 16384, PUBLISHED_ROWS[:1])
    with pytest.raises(UsageError, match="no positive times"):
        fit(QWEN3_235B, 16384, [])


def test_longer_prompts_never_come_sooner() -> None:
    """A dip at a chunk's edge would make a planner cut prompts for nothing."""
    times = [PUBLISHED.predict(n).ttft_s for n in range(128, 70_000, 997)]

    assert times == sorted(times)


def test_the_last_chunks_time_says_the_others() -> None:
    """A user who knows one layer's time must get what the model says for that time."""
    own = PUBLISHED.predict(40_000)
    last = PUBLISHED.predict(40_000, own.layer_compute_s[-1])

    assert own.ttft_s == pytest.approx(last.ttft_s, rel=1e-9)


def test_a_wire_slower_than_compute_is_what_counts() -> None:
    """When transfer is the bottleneck its layers queue: the first token waits for all of them."""
    found = PUBLISHED.predict(16384, 1e-6)
    wire_s = 94 * 1024 * PUBLISHED.page_s

    assert found.exposed_s > 0.4 * wire_s
    assert found.ttft_s > PUBLISHED.added_s(found.chunks) + wire_s


@pytest.mark.parametrize(
    ("tokens", "times", "why"),
    [(0, None, "ntokens=0"), (100, -1.0, "positive number each")],
)
def test_impossible_questions_are_refused(tokens: int, times: object, why: str) -> None:
    """An answer to them would be a number that means nothing."""
    with pytest.raises(UsageError, match=why):
        PUBLISHED.predict(tokens, times)  # type: ignore[arg-type]  # parametrised

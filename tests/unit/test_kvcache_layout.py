"""Layouts of KV caches: who holds which heads, what moves between two degrees, and the refusal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tep import UsageError
from tep.apps.kvcache.layout import (
    KvBuffer,
    KvLayout,
    RankShape,
    head_slices,
    match_ranks,
    rows_per_page,
)

GQA = KvLayout("m", 16, (KvBuffer("kv", 3, 4, 256, planes=2),))
MLA = KvLayout("m", 16, (KvBuffer("c", 3, 1, 1152),), kind="mla")


def test_one_buffer_without_parallelism_counts_pages_times_layers() -> None:
    """The paper's count is pages x layers + 1; another one hangs every decoder that expects it."""
    plain = KvLayout("m", 16, (KvBuffer("kv", 3, 4, 256),))

    assert 3 == rows_per_page(plain, 1, 1, 0)


def test_tp4_to_tp2_takes_one_slice_from_each_of_two_ranks() -> None:
    """A rank of TP2 holds two heads, which two ranks of TP4 have; one slice would miss a head."""
    found = [
        (piece.dst_rank, piece.src_ranks, piece.src_head, piece.dst_head, piece.heads)
        for piece in head_slices(GQA, 4, 2)
    ]

    assert [
        (0, (0,), 0, 0, 1),
        (0, (1,), 0, 1, 1),
        (1, (2,), 0, 0, 1),
        (1, (3,), 0, 1, 1),
    ] == found
    assert 3 * 2 * 2 == rows_per_page(GQA, 4, 2, 1)


def test_tp2_to_tp8_replicates_each_head_twice() -> None:
    """More ranks than heads hold copies; each copy comes from the right half of a page."""
    found = [(p.dst_rank, p.src_ranks, p.src_head, p.heads) for p in head_slices(GQA, 2, 8)]

    assert [(r, (r // 4,), r // 2 % 2, 1) for r in range(8)] == found


def test_heads_that_stay_together_are_one_write() -> None:
    """Heads stand before pages so that neighbours are one run of bytes: few, long writes."""
    (piece,) = head_slices(GQA, 1, 1)

    assert 4 == piece.heads


def test_replicas_are_matched_at_random_and_evenly() -> None:
    """With MLA every rank has everything; always taking the first would load one NIC with all."""
    slices = head_slices(MLA, 4, 4)
    seen = [tuple(rank for rank, _ in match_ranks(slices, seed)) for seed in range(50)]

    assert all({0, 1, 2, 3} == set(ranks) for ranks in seen)
    assert len(set(seen)) > 10
    assert seen[7] == tuple(rank for rank, _ in match_ranks(slices, 7))


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 4, 8]))
def test_every_head_of_every_rank_comes_from_who_holds_it(src: int, dst: int, heads: int) -> None:
    """A head left out is a hole in the cache, one taken from a stranger is somebody else's."""
    layout = KvLayout("m", 4, (KvBuffer("kv", 1, heads, 8),), kind="gqa")
    covered = {rank: [] for rank in range(dst)}

    for source, piece in match_ranks(head_slices(layout, src, dst), 3):
        there = RankShape(layout, dst, piece.dst_rank).heads(layout.buffers[0])
        here = RankShape(layout, src, source).heads(layout.buffers[0])
        for k in range(piece.heads):
            assert there[piece.dst_head + k] == here[piece.src_head + k]
            covered[piece.dst_rank].append(there[piece.dst_head + k])

    for rank, found in covered.items():
        assert list(RankShape(layout, dst, rank).heads(layout.buffers[0])) == sorted(found)


def test_layouts_that_differ_are_refused_with_both_shown() -> None:
    """Pages of another layout decode to noise that looks like text; the operator must see why."""
    other = KvLayout("m", 32, GQA.buffers)

    with pytest.raises(match="16 tokens a page.*\n.*32 tokens a page"):
        GQA.check_same(other, "prefiller p", "decoder d")
    GQA.check_same(KvLayout("m", 16, GQA.buffers), "p", "d")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: KvLayout("m", 0, GQA.buffers), "page_tokens=0"),
        (lambda: KvLayout("m", 4, ()), "0 buffers"),
        (lambda: KvLayout("m", 4, (KvBuffer("kv", 0, 4, 8),)), "size below 1"),
        (lambda: KvLayout("m", 4, GQA.buffers, kind="mla"), "has 4 heads"),
        (lambda: head_slices(GQA, 3, 1), "4 heads .* over 3 ranks"),
        (lambda: head_slices(GQA, 1, 6), "6 ranks cannot hold equal copies of 4 heads"),
    ],
)
def test_impossible_layouts_are_refused(make: object, why: str) -> None:
    """An impossible layout must be refused at the start, not found by a waiting decoder."""
    with pytest.raises(UsageError, match=why):
        make()  # type: ignore[operator]  # a parametrised callable

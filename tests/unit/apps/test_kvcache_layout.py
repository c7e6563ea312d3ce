"""Layouts of KV caches: which heads a rank holds and sends, and the refusal of impossible ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tep import UsageError
from tep.apps.kvcache.layout import KvBuffer, KvLayout, RankShape, held_heads, served_heads

GQA = KvLayout("m", 16, (KvBuffer("kv", 3, 4, 256, planes=2),))


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 4, 8]))
def test_every_head_of_every_rank_comes_from_one_that_holds_it(src, dst, heads):
    """A head left out is a hole in the cache, one taken from a stranger is somebody else's."""
    layout = KvLayout("m", 4, (KvBuffer("kv", 1, heads, 8),))
    here, there = (
        [RankShape(layout, tp, rank).heads(layout.buffers[0]) for rank in range(tp)]
        for tp in (src, dst)
    )
    for rank in range(dst):
        covered = []
        for source in range(src):
            first, at, count = served_heads(heads, (src, source), (dst, rank), "m")
            for k in range(count):
                assert there[rank][at + k] == here[source][first + k]
                covered.append(there[rank][at + k])
        assert list(there[rank]) == sorted(covered)


def test_copies_of_a_head_are_sent_by_different_ranks():
    """With MLA every rank has everything; one that sent all would carry the load of all NICs."""
    senders = [
        source
        for rank in range(4)
        for source in range(4)
        if served_heads(1, (4, source), (4, rank), "m")[2]
    ]

    assert [0, 1, 2, 3] == senders


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: KvLayout("m", 0, GQA.buffers), "page_tokens=0"),
        (lambda: KvLayout("m", 4, ()), "0 buffers"),
        (lambda: KvLayout("m", 4, (KvBuffer("kv", 0, 4, 8),)), "size below 1"),
        (lambda: held_heads(4, 3, 0, "m"), "4 heads .* over 3 ranks"),
        (lambda: held_heads(4, 6, 0, "m"), "6 ranks cannot hold equal copies of 4 heads"),
    ],
)
def test_impossible_layouts_are_refused(make: object, why: str) -> None:
    """An impossible layout must be refused at the start, not found by a waiting decoder."""
    with pytest.raises(UsageError, match=why):
        make()  # type: ignore[operator]  # a parametrised callable

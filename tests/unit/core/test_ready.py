"""Prepared writes: what was dealt out once is posted again, at its new places."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest

from tep.base.api import Pages, ScatterDst
from tep.base.units import KiB, MiB
from tep.core.posting import LONG_BYTES
from tests.support.ends import Ends, finish_all

ROWS = 24
OFFSETS = ((0, 0), (64, 64), (128, 8), (8, 128), (0, 256), (256, 256), (16, 24), (0, 0))


def prepared(e: Ends, kind: str):
    """A write of `kind`, and (source, target) of its rows at no offset."""
    match kind:
        case "page":
            page, place = Pages([0], offset=512), Pages([0], offset=1024)
            ready = e.engine.prepare_paged_writes(8, (e.mr, page), (e.descs[0], place))
            return ready, [(512, 1024)]
        case "pages":
            pages, places = Pages(range(ROWS)), Pages(range(ROWS)[::-1])
            ready = e.engine.prepare_paged_writes(KiB, (e.mr, pages), (e.descs[0], places))
            return ready, [(k * KiB, (ROWS - 1 - k) * KiB) for k in range(ROWS)]
    dsts = [ScatterDst(8, 5 * k, (desc, 7 * k)) for k, desc in enumerate(e.descs)]
    return e.engine.prepare_scatter(e.mr, dsts), [(5 * k, 7 * k) for k in range(len(dsts))]


@pytest.mark.parametrize("nics", [(1, (1,)), (2, (2,)), (2, (4, 4, 4)), (3, (2, 1))])
@pytest.mark.parametrize("kind", ["page", "pages", "scatter"])
def test_the_batches_of_a_submit_are_posted_again_at_new_places(
    kind: str, nics: tuple[int, tuple[int, ...]]
) -> None:
    """It would cost as much as its verb, or write to where it wrote before.

    Each cursor is learned by one submit, and the next one there makes the batches that all later
    ones post.
    """
    e = Ends(*nics)
    ready, rows = prepared(e, kind)
    known: dict[int, object] = {}
    with contextlib.ExitStack() as stack:
        posts = [
            stack.enter_context(mock.patch.object(nic, "post", wraps=nic.post)) for nic in e.nics
        ]
        for round_ in range(7):
            for here, there in OFFSETS:
                e.engine.submit_single_write(8, (e.mr, 0), (e.descs[0], 0))  # moves the cursor on
                finish_all(e.own)
                for nic, post in zip(e.nics, posts, strict=True):
                    nic.posted.clear()
                    post.reset_mock()
                sent = ready.submit(7, src_offset=here, dst_offset=there)
                finish_all(e.own)
                batches = {id(it.args[0]): it.args[0] for p in posts for it in p.call_args_list}

                assert sent.ok
                assert sorted((src + here, dst + there) for src, dst in rows) == e.places()
                assert round_ < 6 or batches.keys() <= known.keys()
                known |= batches


def test_a_long_prepared_write_is_posted_in_pieces() -> None:
    """Kept as one batch a NIC, it would leave half of its rows to a NIC that is slow."""
    e = Ends(2)
    pages = Pages(range(4 * LONG_BYTES // MiB))
    ready = e.engine.prepare_paged_writes(MiB, (e.mr, pages), (e.descs[0], pages))
    for _ in range(3):
        for nic in e.nics:
            nic.calls.clear()
        sent = ready.submit(7)
        finish_all(e.own)

        assert sent.ok
        assert max(e.nics[0].calls) * MiB < LONG_BYTES


@pytest.mark.parametrize("error", [OSError(5, "broken"), MemoryError()])
def test_a_prepared_write_leaves_a_nic_that_breaks(error: Exception) -> None:
    """The error would end the engine, which has another NIC."""
    e = Ends(2, (2,))
    ready, rows = prepared(e, "pages")
    for _ in range(2):
        ready.submit(7)
        finish_all(e.own)
    with mock.patch.object(e.nics[0], "post", side_effect=error):
        sent = ready.submit(7)
        finish_all(e.own)

    assert sent.ok
    assert sorted(rows * 3) == e.places()


def test_batches_behind_one_that_a_nic_took_in_part_have_their_own_numbers() -> None:
    """A completion would be counted for another transfer, and one of both never end."""
    e = Ends(2, (2,))
    ready, _ = prepared(e, "pages")
    for _ in range(2):  # each begins at another NIC than the one before
        e.engine.submit_single_write(8, (e.mr, 0), (e.descs[0], 0))
        ready.submit(7)
        finish_all(e.own)
    for _ in range(2):
        e.engine.submit_single_write(8, (e.mr, 0), (e.descs[0], 0))
        finish_all(e.own)
        e.nics[0].room = 1
        sent = [ready.submit(7)]
        e.own.turn()
        assert e.engine.stats().rows_backlog == sent[0].rows - sent[0].stats().rows_posted
        sent += [e.engine.submit_single_write(8, (e.mr, 0), (e.descs[0], 0)) for _ in range(4)]
        e.nics[0].room = 100
        finish_all(e.own)

        assert [True] * 5 == [transfer.ok for transfer in sent]

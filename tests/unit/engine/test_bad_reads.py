"""Each way to ask for a read that cannot be: its own error, and nothing posted."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tep.backends.base import Access
from tep.base.api import Pages, Routing
from tep.base.errors import BadRequest
from tep.base.units import GiB
from tests.support.inside import worker_of
from tests.support.script import memory, scripted

PAGE = 4096
NPAGES = 8
HERE = 1 << 30
P = Pages


@pytest.fixture
def s():
    """A reader with two NICs, and an owner with three; small regions, and ones of 4 GiB."""
    own, peer = scripted(2, reads=8), scripted(3, name="peer", reads=8)
    nbytes = NPAGES * PAGE
    mr, _ = own.engine.reg_mr(memory(nbytes, HERE), access=Access.SINK)
    large, _ = own.engine.reg_mr(memory(4 * GiB, 2 * HERE), access=Access.SINK)
    _, desc = peer.engine.reg_mr(memory(nbytes), access=Access.READABLE)
    _, wide = peer.engine.reg_mr(memory(4 * GiB), access=Access.READABLE)
    return SimpleNamespace(own=own, e=own.engine, mr=mr, desc=desc, large=large, wide=wide)


def single(s, nbytes=PAGE, src=0, dst=0, **kw):
    return s.e.submit_single_read(nbytes, (s.desc, src), (s.mr, dst), **kw)


def paged(s, src, dst, page=PAGE, **kw):
    return s.e.submit_paged_reads(page, (s.desc, src), (s.mr, dst), **kw)


REFUSED: dict[str, tuple[Callable[[SimpleNamespace], object], str]] = {
    "single beyond the source": (
        lambda s: single(s, src=7 * PAGE + 1),
        "submit_single_read: source bytes 28673 .. 32769 are outside the 32768 bytes of region 1",
    ),
    "single beyond the destination": (
        lambda s: single(s, dst=8 * PAGE),
        "submit_single_read: destination bytes 32768 .. 36864 are outside the 32768 bytes of MrH",
    ),
    "single of no integer": (lambda s: single(s, 8.0), "submit_single_read: nbytes=8.0 is not an"),
    "single from no integer": (lambda s: single(s, src=0.5), "source offset=0.5 is not an integer"),
    "single to no integer": (lambda s: single(s, dst=0.5), "destination offset=0.5 is not an"),
    "single of negative length": (lambda s: single(s, -1), "nbytes=-1; neither may be negative"),
    "single with a wrong immediate": (lambda s: single(s, imm=2**32), "imm=4294967296 is not"),
    "single on no NIC": (
        lambda s: single(s, routing=Routing(domain=3)),
        "submit_single_read: routing.domain=3, but this engine has NICs 0 to 1",
    ),
    "single of more shards than lanes": (
        lambda s: single(s, routing=Routing(num_shards=7)),
        "routing.num_shards=7, but the NICs of both sides make 6 lanes",
    ),
    "no pairs": (
        lambda s: s.e.submit_single_read(8, s.desc, (s.mr, 0)),
        "src is (MrDesc, ",
    ),
    "plain list of source pages": (
        lambda s: paged(s, [0, 1], P([0, 1])),
        "submit_paged_reads: a page list is a tep.Pages, not a list",
    ),
    "plain list of destination pages": (
        lambda s: paged(s, P([0, 1]), (0, 1)),
        "submit_paged_reads: a page list is a tep.Pages, not a tuple",
    ),
    "lists differ": (
        lambda s: paged(s, P([0, 1, 2]), P([0, 1])),
        "submit_paged_reads: 3 source pages but 2 destination pages; one each",
    ),
    "page too long": (
        lambda s: paged(s, P([0]), P([0]), page=GiB + 1),
        "page_bytes=1073741825 is outside 0 .. 1073741824; cut the pages",
    ),
    "page negative": (lambda s: paged(s, P([0]), P([0]), page=-1), "page_bytes=-1 is outside"),
    "pages sharded": (
        lambda s: paged(s, P([0]), P([0]), routing=Routing(num_shards=1)),
        "routing.num_shards=1; pages stay whole, only single reads shard",
    ),
    "pages on no NIC": (
        lambda s: paged(s, P([0]), P([0]), routing=Routing(domain=2)),
        "submit_paged_reads: routing.domain=2, but this engine has NICs 0 to 1",
    ),
    "source page outside": (
        lambda s: paged(s, P([8]), P([0])),
        "submit_paged_reads: source page 8 ends at byte 36864",
    ),
    "destination page outside": (
        lambda s: paged(s, P([0]), P([7], offset=1)),
        "submit_paged_reads: destination page 7 ends at byte 32769",
    ),
    "destination page twice": (
        lambda s: paged(s, P([0, 1, 2]), P([3, 4, 3])),
        "submit_paged_reads: destination page 3 is listed more than once",
    ),
    "destination pages overlap": (
        lambda s: paged(s, P([0, 1]), P([0, 1], stride=4095)),
        "destination pages overlap: two pages of 4096 bytes start within one page of byte 0",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_reads_are_refused_with_their_values(s, what) -> None:
    """A read that is refused late has already written over memory here."""
    ask, message = REFUSED[what]
    with pytest.raises(BadRequest, match=re.escape(message)):
        ask(s)
    s.own.turn(3)
    assert [] == s.own.posted
    assert not worker_of(s.e).busy()


GOOD: dict[str, tuple[Callable[[SimpleNamespace], object], int]] = {
    "source page twice": (lambda s: paged(s, P([3, 3]), P([0, 1])), 2),
    "one page of a short stride": (lambda s: paged(s, P([0]), P([1], stride=1)), 1),
    "empty pages in one place": (lambda s: paged(s, P([0, 0]), P([1, 1]), page=0), 2),
    "pages of a short stride that do not meet": (
        lambda s: paged(s, P([0, 1]), P([0, 2], stride=32), page=64),
        2,
    ),
}


@pytest.mark.parametrize("what", GOOD)
def test_good_reads_are_taken(s, what) -> None:
    """A check that refuses too much takes a use away, at the edge where nobody looks."""
    ask, rows = GOOD[what]
    sent = ask(s)
    s.own.turn(3)
    for nic in s.own.nics:
        nic.finish()
    s.own.turn()

    assert sent.ok
    assert rows == sent.stats().rows == len(s.own.posted)

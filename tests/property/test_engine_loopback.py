"""Whole engines: bytes, immediates and NICs of every request shape, mostly on the chaos fabric."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tep.backends.base import Kind
from tep.base.api import Paged, Pages, Routing, Scatter, ScatterDst, Single
from tep.base.wire import MrDesc
from tep.core.plan import SHARD_BYTES_MIN, count_imms, lanes, plan_single
from tep.engine import TransferEngine
from tests.support.inside import machine_of
from tests.support.pairs import BLANK, Buffer, Pair, hostile_pair, pair

COUNTS = list(product(range(1, 5), range(1, 5)))
NICS = st.integers(1, 4)
IMM = 0xFEDCBA98


def imms_of(p: Pair) -> Counter[int]:
    """Immediates that arrived at b and that nobody expected."""
    return Counter(dict(p.b.stats().imms_unexpected))


def arrivals_by_nic(p: Pair) -> Counter[int]:
    """Count, from now on, the immediates that each NIC of b hands out."""
    found: Counter[int] = Counter()
    for nic, domain in enumerate(machine_of(p.b).domains):

        def poll(out, nic=nic, real=domain.poll) -> int:
            n = real(out)
            arrived = out[:n][out["kind"][:n] == Kind.IMM]
            found[nic] += int(arrived["count"].sum())
            return n

        domain.poll = poll
    return found


@contextmanager
def crowd(p: Pair, nics: list[int]) -> Iterator[list[tuple[TransferEngine, Buffer, MrDesc]]]:
    """Open more receivers beside b, each with a blank target."""
    found = []
    for k, count in enumerate(nics):
        engine = p.more(f"t{k}", count)
        buffer = Buffer(np.full(1 << 16, BLANK, np.uint8))
        found.append((engine, buffer, engine.reg_mr(buffer.data)[1]))
    yield found
    for engine, _, _ in found:
        engine.close()


def check_single(p: Pair, nbytes: int, src: int, dst: int, routing: Routing) -> None:
    """Write, and compare every byte and count with what was promised."""
    nlocal, nremote = len(p.a.main_address.domains), len(p.b.main_address.domains)
    expected = count_imms(Single(nbytes, routing), nlocal, nremote)
    sent = p.a.submit_single_write(nbytes, (p.mr, src), (p.desc, dst), IMM, routing=routing)
    got = p.b.expect_imm_count(IMM, expected)
    p.settle(sent, got)

    assert sent.ok
    assert expected == sent.rows == plan_single(nbytes, nlocal, nremote, 0, routing).imms
    assert (p.src.data[src : src + nbytes] == p.dst.data[dst : dst + nbytes]).all()
    assert p.untouched_but([(dst, dst + nbytes)])
    assert sum(nic.nbytes for nic in sent.stats().nics) == nbytes
    p.quiet()
    assert {} == imms_of(p)


@pytest.mark.parametrize(("nlocal", "nremote"), COUNTS)
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 2 * SHARD_BYTES_MIN - 1, 100_001])
def test_single_tiles_exactly_between_any_nic_counts(nlocal, nremote, nbytes) -> None:
    """A shard cut short, doubled or with another NIC's key shows as a wrong byte somewhere."""
    with hostile_pair(nlocal, nremote, nbytes=1 << 17, seed=nbytes) as p:
        check_single(p, nbytes, 3, 5, Routing())
        everyone = Routing(num_shards=lanes(nlocal, nremote))
        p.dst.data[:] = BLANK
        check_single(p, nbytes, 0, 1, everyone)


@given(NICS, NICS, st.integers(0, 40_000), st.data())
def test_single_of_any_size_and_routing_is_exact(nlocal, nremote, nbytes, data) -> None:
    """Bytes arrive where they were sent, nothing else changes, immediates come as counted."""
    domain = data.draw(st.none() | st.integers(0, nlocal - 1))
    mine = lanes(nlocal, nremote) // (1 if domain is None else nlocal)
    routing = Routing(num_shards=data.draw(st.none() | st.integers(1, mine)), domain=domain)
    with hostile_pair(nlocal, nremote, nbytes=1 << 16, seed=data.draw(st.integers(0, 99))) as p:
        src, dst = data.draw(st.integers(0, 999)), data.draw(st.integers(0, 99))
        check_single(p, nbytes, src, dst, routing)


@pytest.mark.parametrize(("nlocal", "nremote"), COUNTS)
def test_every_nic_of_both_sides_carries_its_share(nlocal, nremote) -> None:
    """A NIC left out halves the bandwidth and nobody notices until it is measured."""
    nlanes = lanes(nlocal, nremote)
    with pair(nlocal, nremote, nbytes=nlanes * 12 * 256) as p:
        pages = Pages(np.arange(nlanes * 12))
        there = arrivals_by_nic(p)
        sent = p.a.submit_paged_writes(256, (p.mr, pages), (p.desc, pages), IMM)
        p.settle(sent)
        p.quiet()

        assert [nlanes * 12 // nlocal] * nlocal == [nic.rows for nic in sent.stats().nics]
        assert dict.fromkeys(range(nremote), nlanes * 12 // nremote) == there
        assert (p.src.data == p.dst.data).all()


def test_small_singles_go_round_all_nics() -> None:
    """Without a cursor every small write leaves by NIC 0."""
    with pair(3, 2) as p:
        for k in range(12):
            p.a.submit_single_write(8, (p.mr, 8 * k), (p.desc, 8 * k), IMM)
        got = p.b.expect_imm_count(IMM, 12)
        p.settle(got)

        assert [4, 4, 4] == [nic.rows for nic in p.a.stats().nics]
        assert (p.src.data[:96] == p.dst.data[:96]).all()


def check_paged(p: Pair, page: int, src: Pages, dst: Pages, imm, routing: Routing) -> None:
    """Write pages and compare with a loop."""
    expected = p.dst.data.copy()
    steps = [pages.stride if pages.stride is not None else page for pages in (src, dst)]
    for i, j in zip(src.indices.tolist(), dst.indices.tolist(), strict=True):
        at, to = src.offset + i * steps[0], dst.offset + j * steps[1]
        expected[to : to + page] = p.src.data[at : at + page]
    sent = p.a.submit_paged_writes(page, (p.mr, src), (p.desc, dst), imm, routing=routing)
    p.settle(sent)
    p.quiet()

    assert sent.ok
    assert len(src) == sent.rows == count_imms(Paged(len(src)))
    assert (expected == p.dst.data).all()
    assert p.dst.guards_hold()
    if imm is None:
        assert {} == imms_of(p)
    else:
        each = np.broadcast_to(np.asarray(imm), len(src)).tolist()
        assert Counter(each) == imms_of(p)


@given(NICS, NICS, st.integers(1, 40), st.integers(0, 300), st.data())
def test_pages_land_where_the_lists_say(nlocal, nremote, npages, page, data) -> None:
    """Every page is where it belongs with its own immediate, whatever strides and order."""
    src_stride = data.draw(st.none() | st.integers(0, 300))
    dst_stride = data.draw(st.none() | st.integers(page, 400))
    nic = data.draw(st.none() | st.integers(0, nlocal - 1))
    values = st.integers(0, 2**32 - 1)
    imm = data.draw(st.none() | values | st.lists(values, min_size=npages, max_size=npages))
    src = Pages(
        data.draw(st.lists(st.integers(0, 50), min_size=npages, max_size=npages)),
        stride=src_stride,
        offset=data.draw(st.integers(0, 50)),
    )
    order = st.lists(st.integers(0, 60), min_size=npages, max_size=npages, unique=True)
    dst = Pages(data.draw(order), stride=dst_stride, offset=data.draw(st.integers(0, 50)))
    with hostile_pair(nlocal, nremote, seed=data.draw(st.integers(0, 99))) as p:
        check_paged(p, page, src, dst, imm, Routing(domain=nic))


@pytest.mark.parametrize("npages", [1, 2, 3, 5, 6, 7])
def test_fewer_pages_than_lanes_and_odd_ones(npages) -> None:
    """A plan that deals out empty runs posts batches of no rows."""
    with hostile_pair(2, 3, seed=npages) as p:
        pages = Pages(list(range(npages))[::-1])
        check_paged(p, 100, pages, pages, 9, Routing())


def test_one_source_page_may_go_to_many_places() -> None:
    """A broadcast inside a region is legal; only targets must differ."""
    with pair(2, 2) as p:
        check_paged(p, 64, Pages([3] * 20), Pages(range(20)), None, Routing())


@given(
    NICS,
    st.lists(st.tuples(NICS, st.integers(0, 40_000), st.integers(0, 500)), min_size=1, max_size=5),
    st.sampled_from(["peers", "bytes"]),
    st.integers(0, 99),
    st.booleans(),
)
def test_scatter_gives_each_peer_its_slice(nlocal, targets, by, seed, grouped) -> None:
    """Every peer gets its own bytes and count, also with mixed NIC counts and empty slices."""
    with (
        hostile_pair(nlocal, 1, nbytes=1 << 16, seed=seed) as p,
        crowd(p, [nics for nics, _, _ in targets]) as peers,
    ):
        routing = Routing(scatter_by=by)
        dsts, at = [], 0
        for (_, nbytes, offset), (_, buffer, desc) in zip(targets, peers, strict=True):
            at = (at + 4_001) % 20_000
            dsts.append(ScatterDst(nbytes, at, (desc, offset)))
            assert len(buffer.data) == 1 << 16
        group = p.a.add_peer_group([e.main_address for e, _, _ in peers]) if grouped else None
        for _ in range(2):
            for _, buffer, _ in peers:
                buffer.data[:] = BLANK
            sent = p.a.submit_scatter(p.mr, dsts, IMM, group=group, routing=routing)
            waits = [
                engine.expect_imm_count(IMM, count_imms(Scatter(nbytes, routing), nlocal, nremote))
                for (engine, _, _), (nremote, nbytes, _) in zip(peers, targets, strict=True)
            ]
            p.settle(sent, *waits)
            p.quiet()
            assert sent.ok
            for dst, (engine, buffer, _) in zip(dsts, peers, strict=True):
                expected = np.full(1 << 16, BLANK, np.uint8)
                to = dst.dst[1]
                expected[to : to + dst.nbytes] = p.src.data[dst.src : dst.src + dst.nbytes]
                assert (expected == buffer.data).all()
                assert buffer.guards_hold()
                assert () == engine.stats().imms_unexpected


def test_barrier_reaches_each_peer_once_and_moves_nothing() -> None:
    """A barrier that comes twice lets a rank run a step ahead."""
    with hostile_pair(3, 1, seed=4) as p, crowd(p, [1, 2, 3, 4, 2]) as peers:
        descs = [desc for _, _, desc in peers]
        group = p.a.add_peer_group([engine.main_address for engine, _, _ in peers])
        for _ in range(4):
            sent = p.a.submit_barrier(descs, 5, group=group)
            p.settle(sent)
        p.quiet()

        assert sent.ok
        assert [((5, 4),)] * 5 == [engine.stats().imms_unexpected for engine, _, _ in peers]
        assert all((buffer.data == BLANK).all() for _, buffer, _ in peers)


@given(st.integers(1, 5), st.integers(1, 5), st.lists(st.integers(1, 400), max_size=6))
def test_deals_stay_even_over_many_requests(nlocal, nremote, sizes) -> None:
    """Over a run of requests no NIC gets ahead of another by more than what one request leaves."""
    with pair(nlocal, nremote, nbytes=1 << 12) as p:
        for npages in sizes:
            pages = Pages(np.arange(npages), stride=8)
            p.a.submit_paged_writes(8, (p.mr, pages), (p.desc, pages), IMM)
        got = p.b.expect_imm_count(IMM, sum(sizes))
        p.settle(got)
        rows = [nic.rows for nic in p.a.stats().nics]

        assert sum(sizes) == sum(rows)
        # A request that does not divide evenly leaves a row more on some lanes of a NIC.
        slack = len(sizes) * math.lcm(nlocal, nremote) // nlocal
        assert max(rows) - min(rows) <= slack

"""Each way to ask for the impossible: its own error, the values in it, and nothing posted."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

import tep
from tep.backends.base import Access
from tep.base.api import EngineOptions, Pages, Routing, ScatterDst
from tep.base.errors import (
    BackendUnavailable,
    BadDescriptor,
    BadRequest,
    BusyError,
    ClosedError,
    FabricError,
    StaleEpoch,
    UsageError,
)
from tep.base.units import GiB
from tep.base.wire import MrDesc, NetAddr
from tep.engine import TransferEngine
from tep.memory.source import Memory
from tests.support.inside import peers_of, worker_of
from tests.support.script import memory, scripted

PAGE = 4096
NPAGES = 8


@pytest.fixture
def s():
    """An engine with two NICs, a source, a target region of a peer with three, and a group."""
    own, peer = scripted(2), scripted(3, name="peer")
    mr, own_desc = own.engine.reg_mr(memory(NPAGES * PAGE))
    _, desc = peer.engine.reg_mr(memory(NPAGES * PAGE))
    yield SimpleNamespace(own=own, e=own.engine, peer=peer, mr=mr, own_desc=own_desc, desc=desc)
    own.turn(3)
    assert [] == own.posted, "something was posted"
    assert not worker_of(own.engine).busy()


def paged(s, src, dst, page=PAGE, **kw):
    return s.e.submit_paged_writes(page, (s.mr, src), (s.desc, dst), **kw)


def single(s, nbytes=PAGE, src=0, dst=0, **kw):
    return s.e.submit_single_write(nbytes, (s.mr, src), (s.desc, dst), **kw)


def scatter(s, *slices, **kw):
    return s.e.submit_scatter(
        s.mr, [ScatterDst(n, src, (s.desc, dst)) for n, src, dst in slices], **kw
    )


P = Pages
REFUSED: dict[str, tuple[Callable[[SimpleNamespace], object], str]] = {
    "target page twice": (
        lambda s: paged(s, P([0, 1, 2]), P([3, 4, 3])),
        "submit_paged_writes: target page 3 is listed more than once",
    ),
    "target page twice, far apart": (
        lambda s: paged(s, P([0, 1]), P([0, 0], stride=PAGE)),
        "target page 0 is listed more than once",
    ),
    "target pages overlap": (
        lambda s: paged(s, P([0, 1, 2]), P([0, 1, 2], stride=4095)),
        (
            "target pages overlap: two pages of 4096 bytes start within one page of byte 0 "
            "(stride 4095)"
        ),
    ),
    "source page outside": (
        lambda s: paged(s, P([8]), P([0])),
        (
            "source page 8 ends at byte 36864 (offset 0, stride 4096, page 4096), outside the "
            "32768 bytes of MrHandle(region 1, 32768 bytes, cpu, 0 transfers in flight)"
        ),
    ),
    "target page outside": (
        lambda s: paged(s, P([0]), P([7], offset=1)),
        (
            "target page 7 ends at byte 32769 (offset 1, stride 4096, page 4096), outside the "
            "32768 bytes of region 1 (32768 bytes, cpu) of peer@script/3 NICs, epoch 1"
        ),
    ),
    "page far outside, product beyond 64 bits": (
        lambda s: paged(s, P([0]), P([2**40], stride=2**40)),
        "target page 1099511627776 ends at byte 1208925819614629174710272",
    ),
    "lists differ": (
        lambda s: paged(s, P([0, 1, 2]), P([0, 1])),
        "3 source pages but 2 target pages; one each",
    ),
    "plain list as pages": (
        lambda s: paged(s, [0, 1], P([0, 1])),
        "a page list is a tep.Pages, not a list",
    ),
    "page too long": (
        lambda s: paged(s, P([0]), P([0]), page=GiB + 1),
        "page_bytes=1073741825 is outside 0 .. 1073741824; cut the pages",
    ),
    "page negative": (lambda s: paged(s, P([0]), P([0]), page=-1), "page_bytes=-1 is outside"),
    "page no integer": (
        lambda s: paged(s, P([0]), P([0]), page=4096.0),
        "page_bytes=4096.0 is not an integer",
    ),
    "pages' stride no integer": (
        lambda s: paged(s, P([0], stride=4096.5), P([0])),
        "Pages: stride=4096.5 is not an integer",
    ),
    "pages' offset no integer": (
        lambda s: paged(s, P([0]), P([0], offset=0.5)),
        "Pages: offset=0.5 is not an integer",
    ),
    "pages sharded": (
        lambda s: paged(s, P([0]), P([0]), routing=Routing(num_shards=2)),
        "routing.num_shards=2; pages stay whole, only single writes shard",
    ),
    "paged on no NIC": (
        lambda s: paged(s, P([0]), P([0]), routing=Routing(domain=2)),
        "submit_paged_writes: routing.domain=2, but this engine has NICs 0 to 1",
    ),
    "immediates of wrong shape": (
        lambda s: paged(s, P([0, 1]), P([0, 1]), imm=[1, 2, 3]),
        "imm of shape (3,) int64; one integer, or one for each of 2 pages",
    ),
    "immediates no integers": (
        lambda s: paged(s, P([0, 1]), P([0, 1]), imm=[1.0, 2.0]),
        "imm of shape (2,) float64",
    ),
    "immediates no list": (
        lambda s: paged(s, P([0, 1]), P([0, 1]), imm=[[1, 2], [3]]),
        "submit_paged_writes: imm=[[1, 2], [3]] is no integer, and no list of them",
    ),
    "immediates too large": (
        lambda s: paged(s, P([0, 1]), P([0, 1]), imm=[1, 2**32]),
        "imm=4294967296 is not an integer of 32 bits (0 .. 4294967295)",
    ),
    "immediates negative": (
        lambda s: paged(s, P([0, 1]), P([0, 1]), imm=[-1, 2]),
        "imm=-1 is not an integer of 32 bits",
    ),
    "single beyond source": (
        lambda s: single(s, PAGE, src=7 * PAGE + 1),
        "submit_single_write: source bytes 28673 .. 32769 are outside the 32768 bytes of MrHandle",
    ),
    "single beyond target": (
        lambda s: single(s, PAGE, dst=8 * PAGE),
        "target bytes 32768 .. 36864 are outside the 32768 bytes of region 1",
    ),
    "single negative offset": (
        lambda s: single(s, src=-1),
        "source offset=-1 nbytes=4096; neither may be negative",
    ),
    "single negative length": (
        lambda s: single(s, -1),
        "source offset=0 nbytes=-1; neither may be negative",
    ),
    "single length no integer": (lambda s: single(s, 8.0), "nbytes=8.0 is not an integer"),
    "single offset no integer": (
        lambda s: single(s, src=0.5),
        "source offset=0.5 is not an integer",
    ),
    "single imm": (lambda s: single(s, imm=2**32), "imm=4294967296 is not an integer of 32 bits"),
    "single imm no integer": (lambda s: single(s, imm="x"), "imm='x' is not an integer of 32 bits"),
    "more shards than lanes": (
        lambda s: single(s, routing=Routing(num_shards=7)),
        "routing.num_shards=7, but the NICs of both sides make 6 lanes",
    ),
    "no shard": (lambda s: single(s, routing=Routing(num_shards=0)), "routing.num_shards=0, but"),
    "shards no integer": (
        lambda s: single(s, routing=Routing(num_shards=1.5)),
        "routing.num_shards=1.5 is not an integer",
    ),
    "single on no NIC": (
        lambda s: single(s, routing=Routing(domain=-1)),
        "submit_single_write: routing.domain=-1, but this engine has NICs 0 to 1",
    ),
    "single routed by a number": (
        lambda s: single(s, routing=5),
        "submit_single_write: routing=5 is a int, not a Routing; leave it out for the usual one",
    ),
    "scatter routed nowhere": (
        lambda s: scatter(s, (1, 0, 0), routing=Routing(scatter_by="pages")),
        "routing.scatter_by='pages' is neither 'peers' nor 'bytes'",
    ),
    "scatter on no NIC": (
        lambda s: scatter(s, (1, 0, 0), routing=Routing(domain=5)),
        "submit_scatter: routing.domain=5, but this engine has NICs 0 to 1",
    ),
    "scatter by peers sharded": (
        lambda s: scatter(s, (1, 0, 0), routing=Routing(num_shards=2)),
        "routing.num_shards=2; it needs scatter_by='bytes'",
    ),
    "scatter beyond source": (
        lambda s: scatter(s, (8, 0, 0), (8, NPAGES * PAGE - 7, 0)),
        "submit_scatter: slice 1: source bytes 32761 .. 32769 are outside the 32768 bytes",
    ),
    "scatter beyond target": (
        lambda s: scatter(s, (8, 0, 0), (8, 0, NPAGES * PAGE)),
        "submit_scatter: slice 1: target bytes 32768 .. 32776 are outside",
    ),
    "scatter one byte beyond": (
        lambda s: scatter(s, (1, 0, NPAGES * PAGE)),
        "submit_scatter: slice 0: target bytes 32768 .. 32769 are outside",
    ),
    "scatter negative": (
        lambda s: scatter(s, (8, 0, -1)),
        "slice 0: target offset=-1 nbytes=8; neither may be negative",
    ),
    "scatter no integer": (
        lambda s: scatter(s, (8, 0, 0), (8.5, 0, 0)),
        "submit_scatter: slice 1: nbytes=8.5 is not an integer",
    ),
    "scatter slice of four": (
        lambda s: s.e.submit_scatter(s.mr, [(8, 0, (s.desc, 0)), (8, 8, (s.desc, 8), 5)]),
        "submit_scatter: slice 1 is (8, 8, ",
    ),
    "scatter place of three": (
        lambda s: s.e.submit_scatter(s.mr, [(8, 0, (s.desc, 0)), (8, 8, (s.desc, 8, 5))]),
        "submit_scatter: slice 1 is (8, 8, ",
    ),
    "scatter to nobody": (scatter, "submit_scatter: no targets"),
    "barrier of nobody": (lambda s: s.e.submit_barrier([], 1), "submit_barrier: no targets"),
    "barrier imm": (lambda s: s.e.submit_barrier([s.desc], -1), "imm=-1 is not an integer"),
    "barrier without imm": (lambda s: s.e.submit_barrier([s.desc], None), "imm=None is not an"),
    "barrier on no NIC": (
        lambda s: s.e.submit_barrier([s.desc], 1, routing=Routing(domain=2)),
        "submit_barrier: routing.domain=2, but",
    ),
    "barrier sharded": (
        lambda s: s.e.submit_barrier([s.desc], 1, routing=Routing(num_shards=1)),
        "submit_barrier: routing.num_shards=1; it has no bytes to shard",
    ),
    "source and target swapped": (
        lambda s: s.e.submit_single_write(8, (s.desc, 0), (s.mr, 0)),
        "the source is a MrDesc, not the MrHandle that reg_mr gave; are source and target swapped?",
    ),
    "source of another engine": (
        lambda s: s.peer.engine.submit_single_write(8, (s.mr, 0), (s.own_desc, 0)),
        (
            "the source MrHandle(region 1, 32768 bytes, cpu, 0 transfers in flight) is registered "
            "with another engine"
        ),
    ),
    "group of another engine": (
        lambda s: scatter(s, (1, 0, 0), group=s.peer.engine.add_peer_group([s.e.main_address])),
        "the peer group belongs to engine 'peer'",
    ),
    "target outside the group": (
        lambda s: scatter(s, (1, 0, 0), group=s.e.add_peer_group([])),
        "submit_scatter: 'peer' is not in the peer group",
    ),
    "message too long": (
        lambda s: s.e.submit_send(s.peer.engine.main_address, bytes(65)),
        "submit_send: 65 bytes, a message has 64 at the most; use a write",
    ),
    "message no bytes": (
        lambda s: s.e.submit_send(s.peer.engine.main_address, 5),
        "submit_send: the payload is no bytes",
    ),
    "pool of nothing": (
        lambda s: s.e.submit_recvs(0, 4, print),
        "submit_recvs: nbytes=0 is outside 1 .. 17179869184",
    ),
    "expecting less than nothing": (
        lambda s: s.e.expect_imm_count(1, -1),
        "expect_imm_count: count=-1 is outside 0 .. 2**63 - 1",
    ),
    "expecting a part": (
        lambda s: s.e.expect_imm_count(1, 1.5),
        "expect_imm_count: count=1.5 is not an integer",
    ),
    "expecting no immediate": (lambda s: s.e.expect_imm_count(2**32, 1), "imm=4294967296 is not"),
    "read-only target": (
        lambda s: s.e.reg_mr(b"abc"),
        (
            "reg_mr: 3 bytes of read-only memory cannot be a target; register with "
            "access=Access.SOURCE"
        ),
    ),
    "memory out of reach": (
        lambda s: s.e.reg_mr(Memory(1, 8, "cuda:1", False, None)),
        "reg_mr: cuda:1 memory, but NIC a/0 reaches only: cpu",
    ),
    "target that is a source only": (
        lambda s: s.e.submit_single_write(
            8, (s.mr, 0), (s.peer.engine.reg_mr(memory(64), access=Access.SOURCE)[1], 0)
        ),
        "(64 bytes, cpu) of peer@script/3 NICs, epoch 1 was registered without Access.TARGET",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_requests_are_refused_with_their_values(s, what) -> None:
    """A late refusal leaves half the rows posted; one without values costs hours of guessing."""
    ask, message = REFUSED[what]
    with pytest.raises(BadRequest, match=re.escape(message)):
        ask(s)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Pages([]), "indices of shape (0,); one dimension and one page at the least"),
        (lambda: Pages([[1, 2]]), "indices of shape (1, 2)"),
        (lambda: Pages([0.5]), "indices are float64, not integers"),
        (lambda: Pages([3, -2]), "index -2 is negative"),
        (lambda: Pages([1], stride=-1), "Pages: stride=-1 is outside 0 .. 2**63 - 1"),
    ],
)
def test_bad_page_lists_are_refused_when_made(build, message) -> None:
    """The list is wrong where it was written down, not where it is used."""
    with pytest.raises(BadRequest, match=re.escape(message)):
        build()


def test_bytes_and_strangers_are_no_descriptors(s) -> None:
    """Bytes straight from a socket have not been checked."""
    with pytest.raises(BadDescriptor, match="bytes is not an MrDesc; decode bytes with MrDesc.fro"):
        s.e.submit_single_write(8, (s.mr, 0), (s.desc.to_bytes(), 0))
    with pytest.raises(BadDescriptor, match="bytes is not a NetAddr; decode bytes with NetAddr"):
        s.e.submit_send(s.peer.engine.main_address.to_bytes(), b"x")
    with pytest.raises(BadDescriptor, match="these bytes are an MrDesc, not a NetAddr"):
        NetAddr.from_bytes(s.desc.to_bytes())


def test_descriptors_of_another_version_are_refused(s) -> None:
    """A field that moved would be read as another."""
    data = bytearray(s.desc.to_bytes())
    data[4:6] = (1).to_bytes(2, "little")
    with pytest.raises(BadDescriptor, match="wire version 1, this tep reads 5; run the same rel"):
        MrDesc.from_bytes(data)


def test_peers_of_another_backend_are_refused(s) -> None:
    """Their addresses mean nothing to our NICs."""
    addr = NetAddr("efa", "far", 1, (b"x",), (0,))
    with pytest.raises(BadDescriptor, match="far@efa/1 NICs, epoch 1 is on 'efa', this engine on"):
        s.e.add_peer_group([addr])


def test_two_peers_of_one_name_and_epoch_are_refused(s) -> None:
    """Rows for the one would end in the other."""
    where = s.peer.engine.main_address.backend
    addr, twin = (NetAddr(where, "far", int("9" * 18), (at,), (0,)) for at in (b"one", b"other"))
    s.e.add_peer_group([addr])
    with pytest.raises(BadDescriptor, match="two engines share the name 'far' and epoch 9{18}:"):
        s.e.add_peer_group([twin])


def test_descriptors_of_an_earlier_epoch_are_refused(s) -> None:
    """Keys of the dead incarnation may fit memory of the new one by chance."""
    later = scripted(1, name="peer", epoch=2)
    _, fresh = later.engine.reg_mr(memory(64))
    cached = peers_of(s.e).resolve(s.desc, "test")
    s.e.add_peer_group([later.engine.main_address])
    assert not cached.link.current
    message = "peer is known in epoch 2, this is of epoch 1; it has restarted: ask it for fresh"
    with pytest.raises(StaleEpoch, match=message):
        single(s)
    with pytest.raises(StaleEpoch, match=message):
        s.e.submit_send(s.peer.engine.main_address, b"x")
    assert fresh.addr.epoch == peers_of(s.e).resolve(fresh, "test").link.addr.epoch


def test_descriptor_whose_addresses_leave_64_bits_is_refused(s) -> None:
    """The sum would wrap round to memory that the peer never offered."""
    addr = s.peer.engine.main_address
    desc = MrDesc(addr, 9, 4096, "cpu", True, (1, 2, 3), (2**64 - 4095, 0, 0))
    with pytest.raises(BadDescriptor, match="ends beyond 64 bits"):
        s.e.submit_single_write(8, (s.mr, 0), (desc, 0))


def test_group_that_outlived_a_peer_says_so(s) -> None:
    """'Not in the group' would send people looking in the wrong place."""
    group = s.e.add_peer_group([s.peer.engine.main_address])
    later = scripted(1, name="peer", epoch=2)
    _, desc = later.engine.reg_mr(memory(64))
    with pytest.raises(StaleEpoch, match="holds 'peer' of epoch 1, it is in epoch 2 now; make a"):
        s.e.submit_barrier([desc], 1, group=group)


def test_deregistered_regions_are_refused(s) -> None:
    """Its memory may be somebody else's by now."""
    s.e.deregister(s.mr)
    for ask in (
        lambda: single(s),
        lambda: paged(s, P([0]), P([0])),
        lambda: scatter(s, (1, 0, 0)),
        lambda: s.e.deregister(s.mr),
    ):
        with pytest.raises(ClosedError, match="the source region 1 was deregistered"):
            ask()


def test_row_longer_than_a_nic_takes_is_refused_and_shards_that_fit_are_not() -> None:
    """The limit is on rows: a long write over several NICs has shorter ones."""
    own, peer = scripted(2, max_write_bytes=PAGE), scripted(2, name="peer")
    mr, _ = own.engine.reg_mr(memory(NPAGES * PAGE))
    _, desc = peer.engine.reg_mr(memory(NPAGES * PAGE))
    with pytest.raises(BadRequest, match="single: rows of 8192 bytes, but a NIC here takes 4096"):
        own.engine.submit_single_write(2 * PAGE, (mr, 0), (desc, 0), routing=Routing(num_shards=1))
    with pytest.raises(BadRequest, match="scatter: rows of 4097 bytes"):
        own.engine.submit_scatter(mr, [ScatterDst(4097, 0, (desc, 0))])
    own.turn()
    assert [] == own.posted
    own.engine.submit_single_write(2 * PAGE, (mr, 0), (desc, 0), routing=Routing(num_shards=2))
    own.engine.submit_scatter(
        mr, [ScatterDst(2 * PAGE, 0, (desc, 0))], routing=Routing(scatter_by="bytes", num_shards=2)
    )
    own.turn()
    assert [PAGE] * 4 == [row.row.nbytes for row in own.posted]


CLOSED: dict[str, Callable[[SimpleNamespace], object]] = {
    "submit (single)": single,
    "submit (paged)": lambda s: paged(s, P([0]), P([0])),
    "submit (scatter)": lambda s: scatter(s, (1, 0, 0)),
    "submit (barrier)": lambda s: s.e.submit_barrier([s.desc], 1),
    "submit_send": lambda s: s.e.submit_send(s.peer.engine.main_address, b"x"),
    "submit_recvs": lambda s: s.e.submit_recvs(8, 1, print),
    "expect_imm_count": lambda s: s.e.expect_imm_count(1, 1),
    "on_imm": lambda s: s.e.on_imm(range(5), print),
    "remove_imm": lambda s: s.e.remove_imm(1),
    "add_peer_group": lambda s: s.e.add_peer_group([]),
    "alloc_uvm_watcher": lambda s: s.e.alloc_uvm_watcher(print),
    "reg_mr": lambda s: s.e.reg_mr(bytearray(8)),
    "deregister": lambda s: s.e.deregister(s.mr),
}


@pytest.mark.parametrize("verb", CLOSED)
def test_nothing_can_be_asked_of_a_closed_engine(s, verb) -> None:
    """A submit after close that is merely queued never ends."""
    s.e.close()
    with pytest.raises(ClosedError, match=re.escape(f"{verb}: engine 'a' is closed")):
        CLOSED[verb](s)


def test_waiting_rows_beyond_the_limit_are_refused() -> None:
    """A queue without an end hides a stalled peer until the memory is gone; unturned ones count."""
    own = scripted(1, options=EngineOptions(backlog_rows_max=10))
    own.nics[0].room = 2
    own.nics[0].send_room = 0
    mr, desc = own.engine.reg_mr(memory(64 * PAGE))
    page = Pages(np.arange(6))
    own.engine.submit_paged_writes(PAGE, (mr, page), (desc, page))
    with pytest.raises(BusyError, match="paged: 6 rows wait for NICs already, 6 more pass the lim"):
        own.engine.submit_paged_writes(PAGE, (mr, page), (desc, page))
    own.turn()
    assert 2 == len(own.posted)
    for _ in range(6):
        own.engine.submit_send(own.engine.main_address, b"x")
    message = r"10 rows wait .* 1 more pass the limit of 10 \(EngineOptions.backlog_rows_max\)"
    with pytest.raises(BusyError, match=message):
        own.engine.submit_send(own.engine.main_address, b"x")
    own.nics[0].room = 100
    own.turn()
    own.engine.submit_paged_writes(PAGE, (mr, Pages([0])), (desc, Pages([0])))


def test_register_is_all_nics_or_none() -> None:
    """A key left on one NIC lets it write to memory that nobody holds any more."""
    own = scripted(3)
    own.nics[2].refuse_register = FabricError("scripted: no room for keys")
    with pytest.raises(FabricError, match="scripted: no room for keys"):
        own.engine.reg_mr(memory(64))
    assert [[], [], []] == [nic.keys for nic in own.nics]
    assert 0 == own.engine.stats().regions


def test_unknown_backend_or_option_is_refused_by_name() -> None:
    """A fallback in silence would measure the wrong thing."""
    with pytest.raises(UsageError, match="backend 'infiniband' is unknown; there are: .*loopback"):
        TransferEngine.open("infiniband")
    with pytest.raises(UsageError, match="loopback: nics=0; 1 to 64 are possible"):
        TransferEngine.open("loopback", nics=0)
    assert issubclass(BackendUnavailable, tep.TepError)


def test_engine_needs_a_nic() -> None:
    """Without one every plan would divide by zero."""
    with pytest.raises(UsageError, match="an engine needs one NIC at the least"):
        scripted(0)

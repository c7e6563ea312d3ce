"""Regions, links and targets: who may use what, and how long memory is held."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from tep.backends.base import Access
from tep.base.api import Pages
from tep.base.errors import BadRequest, BusyError, ClosedError, StaleEpoch
from tep.core.regions import check_source
from tests.support.inside import link_of, machine_of, peers_of
from tests.support.pairs import hostile_pair
from tests.support.script import memory, scripted


class Owned(np.ndarray):
    """An array that can be watched being freed."""


def owned(nbytes: int) -> Owned:
    return np.zeros(nbytes, np.uint8).view(Owned)


def test_descriptor_says_what_peers_need() -> None:
    """Keys in another order than the NICs' send rows to the wrong one."""
    own = scripted(3)
    mr, desc = own.engine.reg_mr(memory(4096, 1 << 20))

    assert own.engine.main_address == desc.addr
    assert (1, 4096, "cpu", True) == (desc.region, desc.nbytes, desc.device, desc.writable)
    assert desc.rkeys == tuple(key.rkey for key in mr.keys)
    assert desc.bases == tuple(key.base for key in mr.keys)
    _, second = own.engine.reg_mr(memory(8), access=Access.SOURCE)
    assert (2, False) == (second.region, second.writable)


def test_handle_knows_its_engine_and_its_end() -> None:
    """A key of another engine's NIC may exist here, for other memory."""
    own, other = scripted(), scripted(name="b")
    mr, _ = own.engine.reg_mr(memory(64))
    assert "MrHandle(region 1, 64 bytes, cpu, 0 transfers in flight)" == repr(mr)
    with pytest.raises(BadRequest, match="is registered with another engine"):
        check_source(mr, machine_of(other.engine), "test")
    own.engine.deregister(mr)
    assert "MrHandle(region 1, 64 bytes, cpu, deregistered)" == repr(mr)
    with pytest.raises(ClosedError, match="test: the source region 1 was deregistered"):
        check_source(mr, machine_of(own.engine), "test")
    assert [] == own.nics[0].keys


def test_deregistering_a_source_in_flight_is_refused_until_it_is_back() -> None:
    """The NIC would read freed memory, or fail rows that were fine."""
    own = scripted()
    mr, desc = own.engine.reg_mr(memory(1 << 20))
    pages = Pages(range(4))
    own.engine.submit_paged_writes(64, (mr, pages), (desc, pages))
    message = "deregister: region 1 is in use by 1 transfers in flight; wait for them, or canc"
    with pytest.raises(BusyError, match=message):  # not even taken by the worker
        own.engine.deregister(mr)
    own.turn()
    own.nics[0].finish(3)
    own.turn()
    with pytest.raises(BusyError, match=message):
        own.engine.deregister(mr)
    own.nics[0].finish()
    own.turn()
    own.engine.deregister(mr)
    assert 0 == own.engine.stats().regions


@pytest.mark.parametrize("end", ["cancel", "fail", "close"])
def test_every_end_of_a_transfer_gives_its_source_back(end) -> None:
    """A count that is not lowered keeps the memory registered for ever."""
    own = scripted()
    mr, desc = own.engine.reg_mr(memory(1 << 20))
    sent = own.engine.submit_single_write(8, (mr, 0), (desc, 0))
    if end == "cancel":
        sent.cancel()
    elif end == "fail":
        own.nics[0].go_down()
    own.turn(3)
    if end == "close":
        own.engine.close()
    assert sent.finished
    assert 0 == mr.inflight


@pytest.mark.slow
def test_memory_is_held_while_registered_and_let_go_afterwards() -> None:
    """The NIC writes there whether or not Python still knows the array."""
    own = scripted()
    array = owned(64)
    gone = weakref.ref(array)
    mr, _ = own.engine.reg_mr(array)
    del array
    gc.collect()
    assert gone() is not None
    own.engine.deregister(mr)
    del mr
    gc.collect()
    assert gone() is None


def test_close_lets_go_of_all_memory() -> None:
    """An engine per request would otherwise keep every buffer it ever saw."""
    own = scripted()
    array = owned(64)
    gone = weakref.ref(array)
    own.engine.reg_mr(array)
    del array
    own.engine.close()
    gc.collect()
    assert gone() is None


def test_dropping_every_reference_in_mid_flight_changes_no_byte() -> None:
    """Users do drop the handle of what they no longer wait for."""
    with hostile_pair(2, 3, nbytes=1 << 16, seed=3) as p:
        noise = np.random.default_rng(5).integers(0, 255, 1 << 16, np.uint8)
        mr, _ = p.a.reg_mr(noise.copy())
        pages = Pages(np.random.default_rng(1).permutation(64))
        sent = p.a.submit_paged_writes(1024, (mr, pages), (p.desc, pages), 9)
        p.env.run_until(lambda: any(p.a.stats().rows_outstanding))
        assert not sent.finished
        del sent, mr, pages
        gc.collect()
        junk = [np.full(1 << 16, 0xEE, np.uint8) for _ in range(8)]
        got = p.b.expect_imm_count(9, 64)
        p.settle(got)

        assert (noise == p.dst.data).all()
        assert 8 == len(junk)


def test_links_connect_each_pair_of_nics_once() -> None:
    """Connecting costs milliseconds on RC; the second row must not pay again."""
    own, peer = scripted(2), scripted(3, name="b")
    own.engine.add_peer_group([peer.engine.main_address])
    assert [3, 3] == [len(nic.peers) for nic in own.nics]
    link = link_of(own.engine, peer.engine)
    assert [10, 11, 12] == [link.peer(1, remote) for remote in range(3)]
    assert [3, 3] == [len(nic.peers) for nic in own.nics]


def test_descriptors_survive_bytes_and_equal_ones_share_a_link() -> None:
    """Descriptors arrive in every message anew: a link for each would leak connections."""
    own, peer = scripted(), scripted(name="b")
    _, desc = peer.engine.reg_mr(memory(64))
    copies = [type(desc).from_bytes(desc.to_bytes()) for _ in range(3)]
    links = {id(peers_of(own.engine).resolve(copy, "test").link) for copy in copies}

    assert 1 == len(links)
    assert 1 == own.engine.stats().peers


def test_resolved_descriptors_do_not_fill_the_memory(monkeypatch) -> None:
    """A decoder that gets a fresh descriptor with every request runs for months."""
    monkeypatch.setattr("tep.core.regions._RESOLVED_MAX", 10)
    own, peer = scripted(), scripted(name="b")
    _, desc = peer.engine.reg_mr(memory(64))
    for _ in range(35):
        peers_of(own.engine).resolve(type(desc).from_bytes(desc.to_bytes()), "test")
    assert len(peers_of(own.engine).remotes) <= 10


def test_group_remembers_the_last_targets_and_notices_changes() -> None:
    """Steady steps reuse columns; a changed list must not be sent to the former targets."""
    own = scripted()
    peers = [scripted(name=f"p{k}") for k in range(3)]
    descs = [peer.engine.reg_mr(memory(64))[1] for peer in peers]
    group = own.engine.add_peer_group([peer.engine.main_address for peer in peers])
    first = group.targets(descs, "test")
    assert first is group.targets(list(descs), "test")
    turned = group.targets(descs[::-1], "test")
    assert descs[::-1] == [remote.desc for remote in turned.remotes]
    later = scripted(name="p1", epoch=2)
    own.engine.add_peer_group([later.engine.main_address])
    assert turned is not group.targets([descs[2], descs[0]], "test")
    assert 2 == len(group.targets([descs[2], descs[0]], "test").remotes)


def test_group_notices_that_a_peer_restarted_behind_the_same_descriptors() -> None:
    """The cached columns hold the dead incarnation's keys."""
    own, peer = scripted(), scripted(name="b")
    _, desc = peer.engine.reg_mr(memory(64))
    group = own.engine.add_peer_group([peer.engine.main_address])
    group.targets([desc], "test")
    own.engine.add_peer_group([scripted(name="b", epoch=2).engine.main_address])
    with pytest.raises(StaleEpoch, match="test: b is known in epoch 2, this is of epoch 1"):
        group.targets([desc], "test")

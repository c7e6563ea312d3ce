"""Real libibverbs on a bad day: loss, disorder, no receives, wrong keys, both ends at once."""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest

from tep.backends.base import Kind, Status
from tep.backends.verbs import open_domains
from tep.base.api import ScatterDst
from tep.base.errors import FabricError
from tep.base.units import KiB, MiB
from tep.memory.source import Memory
from tests.support.inside import machine_of, nics_of
from tests.support.vm.shape import netem
from tests.verbs.rig import FAST, buffer, engine, noise, pages, pair

PAGE = 4 * KiB


def test_five_percent_loss_costs_time_and_nothing_else(soft_devices):
    """Handshake datagrams and writes get lost; both are sent again, nothing is counted twice."""
    with (
        netem([f"nic{k}" for k in range(8)], "loss 5%"),
        pair(soft_devices[:2], soft_devices[4:6]) as (a, b),
    ):
        source, target = noise(MiB), buffer(MiB)
        (mr, _), (_, desc) = a.reg_mr(source), b.reg_mr(target)
        got = b.expect_imm_count(1, 256)
        sent = a.submit_paged_writes(PAGE, (mr, pages(256)), (desc, pages(256)), imm=1)
        sent.wait(60)
        got.wait(60)
        extra = b.stats().imms_unexpected

    assert (source == target).all()
    assert () == extra


def test_one_slow_nic_delays_but_does_not_confuse(soft_devices):
    """Immediates of the fast NIC arrive long before the slow one's."""
    with netem(["nic1"], "delay 20ms"), pair(soft_devices[:2], soft_devices[4:6]) as (a, b):
        source, target = noise(MiB), buffer(MiB)
        (mr, _), (_, desc) = a.reg_mr(source), b.reg_mr(target)
        got = b.expect_imm_count(1, 256)
        a.submit_paged_writes(PAGE, (mr, pages(256)), (desc, pages(256)), imm=1)
        got.wait(60)

        assert (source == target).all()


def test_no_receives_hold_the_sender_until_there_are_some(devices):
    """More immediates than receives, and nobody polls: the sender waits in the NIC (RNR)."""
    with pair(devices[:1], devices[1:2], imm_recvs=8) as (a, b):
        (mr, _), (_, desc) = a.reg_mr(noise(MiB)), b.reg_mr(buffer(MiB))
        a.submit_single_write(8, (mr, 0), (desc, 0), imm=1).wait(20)
        sent = a.submit_paged_writes(PAGE, (mr, pages(64)), (desc, pages(64)), imm=2)
        alone_s = time.monotonic() + 0.3
        while time.monotonic() < alone_s:
            machine_of(a).step()
        held = not sent.finished
        got = b.expect_imm_count(2, 64)
        got.wait(20)
        sent.wait(20)

    assert held


def test_no_receives_for_too_long_is_an_error_that_says_so(devices):
    """With finite retries the sender learns that the peer's engine is not being turned."""
    with pair(devices[:1], devices[1:2], imm_recvs=8, rnr_retry=1) as (a, b):
        (mr, _), (_, desc) = a.reg_mr(noise(MiB)), b.reg_mr(buffer(MiB))
        a.submit_single_write(8, (mr, 0), (desc, 0), imm=1).wait(20)
        sent = a.submit_paged_writes(PAGE, (mr, pages(64)), (desc, pages(64)), imm=2)
        end_s = time.monotonic() + 20
        while not sent.finished and time.monotonic() < end_s:
            machine_of(a).step()
            machine_of(a).deliver()
        with pytest.raises(FabricError, match="not being turned") as caught:
            sent.result()

    assert "RNR" == caught.value.code


def test_a_wrong_key_is_named_and_the_peer_stays_usable(devices):
    """One stale descriptor must not end all traffic to a healthy peer."""
    with pair(devices[:1], devices[1:2]) as (a, b):
        source, target = noise(MiB), buffer(MiB)
        mr, _ = a.reg_mr(source)
        old, stale = b.reg_mr(buffer(MiB))
        b.deregister(old)
        _, desc = b.reg_mr(target)
        for imm in (10, 11, 12):
            with pytest.raises(
                FabricError, match=r"to right NIC 0 failed on NIC 0 \(\w+\)"
            ) as caught:
                a.submit_single_write(64, (mr, 0), (stale, 0), imm).wait(20)
            got = b.expect_imm_count(2, 16)
            a.submit_paged_writes(PAGE, (mr, pages(16)), (desc, pages(16)), imm=2).wait(20)
            got.wait(20)

    assert "REMOTE_KEY" == caught.value.code
    assert 0 == caught.value.row
    assert (source[: 16 * PAGE] == target[: 16 * PAGE]).all()


def test_both_ends_connect_at_the_same_time(devices):
    """Two ranks that start a collective together each ask first; one connection must come of it."""
    for _ in range(5):
        with pair(devices[:1], devices[1:2]) as (a, b):
            (here, desc_a), (there, desc_b) = a.reg_mr(buffer(PAGE)), b.reg_mr(buffer(PAGE))
            there_got, here_got = b.expect_imm_count(1, 1), a.expect_imm_count(2, 1)
            sent = a.submit_single_write(64, (here, 0), (desc_b, 0), imm=1)
            back = b.submit_single_write(64, (there, 0), (desc_a, 0), imm=2)
            for handle in (sent, back, there_got, here_got):
                handle.wait(20)

            assert [2] == [len(d.peers.conns) for d in nics_of(a)]


def test_a_scatter_meets_peers_that_still_connect(devices):
    """The reference posts on queue pairs that are not ready; here the rows wait for theirs."""
    ring = []
    with engine("hub", devices[:2], ring) as hub:
        source = noise(MiB)
        mr, _ = hub.reg_mr(source)
        peers = [engine(f"peer{k}", devices[2 + k : 3 + k], ring) for k in range(4)]
        try:
            targets = [buffer(PAGE) for _ in peers]
            descs = [peer.reg_mr(t)[1] for peer, t in zip(peers, targets, strict=True)]
            counts = [peer.expect_imm_count(4, 1) for peer in peers]
            group = hub.add_peer_group([peer.main_address for peer in peers])
            dsts = [ScatterDst(PAGE, k * PAGE, (desc, 0)) for k, desc in enumerate(descs)]
            hub.submit_scatter(mr, dsts, imm=4, group=group).wait(20)
            for count in counts:
                count.wait(20)
        finally:
            for peer in peers:
                peer.close()

    for k, target in enumerate(targets):
        assert (source[k * PAGE : (k + 1) * PAGE] == target).all()


def test_packets_out_of_order_are_the_nics_business(soft_devices):
    """Reordering under a reliable connection costs retransmissions and shows nowhere else."""
    with (
        netem(["nic0"], "delay 2ms reorder 50% 25%"),
        pair(soft_devices[:1], soft_devices[4:5]) as (a, b),
    ):
        source, target = noise(64 * PAGE), buffer(64 * PAGE)
        (mr, _), (_, desc) = a.reg_mr(source), b.reg_mr(target)
        got = b.expect_imm_count(1, 64)
        a.submit_paged_writes(PAGE, (mr, pages(64)), (desc, pages(64)), imm=1).wait(60)
        got.wait(60)

    assert (source == target).all()


def test_queue_pairs_are_made_with_the_operations_they_are_for(devices):
    """The extended call is found in the real library's context, and short rows go inline."""
    with pair(devices[:1], devices[1:2]) as (a, b):
        (mr, _), (_, desc) = a.reg_mr(noise(PAGE)), b.reg_mr(buffer(PAGE))
        a.submit_single_write(8, (mr, 0), (desc, 0), imm=1).wait(20)
        device = nics_of(a)[0].device

    assert device._create_ex is not None
    assert 28 == device.inline_max


def test_dma_buf_registration_says_what_is_missing(devices):
    """Soft-RoCE has none; the call must be there and its refusal readable."""
    opened = open_domains(devices[:1], name="d", **FAST)

    def export(memory):
        fd = os.memfd_create("no dma-buf")
        os.ftruncate(fd, memory.nbytes)
        return fd, 0

    memory = Memory(4096, 4096, "cuda:0", False, None)
    try:
        with pytest.raises(FabricError, match="ibv_reg_dmabuf_mr"):
            opened.domains[0].device.register(memory, 0, export)
    finally:
        opened.domains[0].close()


def test_statuses_and_kinds_are_told_apart_by_id(devices):
    """Soft-RoCE reports opcode 0 for failed writes: whoever goes by opcode miscounts here."""
    with pair(devices[:1], devices[1:2]) as (a, b):
        mr, _ = a.reg_mr(noise(MiB))
        old, stale = b.reg_mr(buffer(MiB))
        b.deregister(old)
        sent = a.submit_paged_writes(PAGE, (mr, pages(64)), (stale, pages(64)), imm=2)
        with pytest.raises(FabricError):
            sent.wait(20)
        stats = sent.stats()

    assert 64 == stats.rows_back + stats.rows_dropped
    assert Counter() == Counter(dict(b.stats().imms_unexpected))
    assert (Kind.WRITE, Status.REMOTE_KEY) == (1, 3)

"""The reports of an engine: statistics, paths, stalls."""

from __future__ import annotations

import pytest

from tep.backends.base import Status
from tep.base.api import Pages, ScatterDst
from tep.base.errors import UsageError
from tep.core.stats import NicBytes
from tests.support.script import memory, scripted


def test_stats_count_what_happened() -> None:
    """Figures that drift from the truth are worse than none."""
    own = scripted(2)
    mr, desc = own.engine.reg_mr(memory(1 << 20))
    pages = Pages(range(6))
    sent = [own.engine.submit_paged_writes(100, (mr, pages), (desc, pages)) for _ in range(3)]
    own.engine.expect_imm_count(1, 10)
    own.nics[0].arrive(1, 4)
    own.nics[1].arrive(2)
    own.nics[0].room = 7
    own.turn()
    own.nics[0].finish(5)
    own.nics[1].finish(3)
    own.turn()
    sent[2].cancel()
    own.turn()
    stats = own.engine.stats()

    assert (3, 1, 0, 0) == (
        stats.transfers_submitted,
        stats.transfers_done,
        stats.transfers_failed,
        stats.transfers_cancelled,
    )
    assert (NicBytes(7, 700), NicBytes(9, 900)) == stats.nics
    assert (2, 6) == stats.rows_outstanding
    assert 0 == stats.rows_backlog
    assert (5, ((1, 4), (2, 1)), 1) == (
        stats.imms_counted,
        stats.imms_unexpected,
        stats.expectations,
    )
    assert (1, 1, 0) == (stats.regions, stats.peers, stats.callback_errors)
    assert 3 == stats.steps


def test_transfer_stats_follow_it_from_submit_to_end() -> None:
    """Waiting and posted are told apart: the one is back-pressure, the other the wire."""
    own = scripted(2)
    mr, desc = own.engine.reg_mr(memory(1 << 20))
    pages = Pages(range(6))
    sent = own.engine.submit_paged_writes(100, (mr, pages), (desc, pages))
    assert (6, 600, 0, 0) == (
        sent.stats().rows,
        sent.stats().nbytes,
        sent.stats().rows_posted,
        sent.stats().rows_back,
    )
    own.nics[0].room = 1
    own.turn()
    own.nics[1].finish(2)
    own.nics[1].finish(1, Status.LENGTH)
    own.turn()
    now = sent.stats()
    assert ("paged", "pending", 4, 3, 1, 2) == (
        now.kind,
        now.state,
        now.rows_posted,
        now.rows_back,
        now.rows_failed,
        now.rows_dropped,
    )
    assert (NicBytes(1, 100), NicBytes(3, 300)) == now.nics
    assert now.elapsed_s > 0
    own.nics[0].finish()
    own.turn()
    end = sent.stats()
    assert "failed" == end.state
    assert end.elapsed_s == sent.stats().elapsed_s
    assert end.gbps == 600 * 8 / end.elapsed_s / 1e9


def test_explain_names_nics_lanes_and_shards() -> None:
    """Nothing may fall back in silence: which NIC talks to which must be readable."""
    own, peer = scripted(2), scripted(3, name="b")
    with pytest.raises(UsageError, match="explain: nothing was ever submitted to b@script/3 NICs"):
        own.engine.explain(peer.engine.main_address)
    own.engine.add_peer_group([peer.engine.main_address])
    own.nics[1].go_down()
    own.turn()
    text = own.engine.explain(peer.engine.main_address)

    assert "engine a@script/2 NICs, epoch 1" in text
    nic = "NIC 0: a/0 on script, 0 Gb/s, unordered, queue 1073741824, "
    assert f"{nic}no reads (this backend does not offer them), memory cpu, alive" in text
    assert "NIC 1: a/1 on script" in text
    assert "memory cpu, DOWN" in text
    assert "lanes (local NIC -> its NIC): 0->0, 1->1, 0->2, 1->0, 0->1, 1->2" in text
    assert "1 MiB single: 6 immediates, shards of [172032, 176128, " in text
    assert "256 pages: 256 immediates, runs of [85, 85, 86] pages" in text  # none to the dead NIC
    assert "peer: b@script/3 NICs, epoch 1" in own.engine.explain()
    _, desc = peer.engine.reg_mr(memory(8))
    assert text == own.engine.explain(desc)


def test_stall_report_names_peers_counts_and_ages() -> None:
    """Whoever is called at night needs who, what, how many of how many, and since when."""
    own = scripted()
    peers = [scripted(name=f"p{k}") for k in range(6)]
    mr, _ = own.engine.reg_mr(memory(1 << 20))
    descs = [peer.engine.reg_mr(memory(64))[1] for peer in peers]
    own.engine.submit_scatter(mr, [ScatterDst(8, 0, (desc, 0)) for desc in descs], 1)
    own.engine.submit_send(peers[5].engine.main_address, b"abc")
    own.nics[0].send_room = 0
    own.nics[0].room = 2
    own.turn()
    own.engine.expect_imm_count(5, 3)
    text = own.engine.stall_report()

    assert "engine a: 3 open, 1 commands not taken yet" in text
    assert "scatter of 6 rows, 48 bytes to p0, p1, p2, p3 and 2 more: pending; 2 posted" in text
    assert "message of 3 bytes to p5: pending, waiting for the NIC; for 0.0" in text
    assert "imm 0x5: 0 of 3 arrived; pending; for 0.0" in text
    assert "4 rows wait for a NIC; 0 immediates counted" in text


def test_stall_report_stays_readable_with_thousands_open() -> None:
    """A report of a megabyte hides its first line."""
    own = scripted()
    for k in range(1000):
        own.engine.expect_imm_count(k, 1)
        own.nics[0].arrive(5000 + k)
    own.turn()
    text = own.engine.stall_report()

    assert "... and 980 more" in text
    assert len(text.splitlines()) < 30
    assert 1000 == len(own.engine.stats().imms_unexpected)


def test_engine_and_driver_names_show_in_repr() -> None:
    """Logs of a fleet are read by name."""
    own = scripted(2)
    assert "TransferEngine(a@script/2 NICs, epoch 1; 0 regions, 0 peers)" == repr(own.engine)
    own.engine.close()
    assert "TransferEngine(a@script/2 NICs, epoch 1; closed)" == repr(own.engine)

"""The log of an engine: a line for each event that matters, none above INFO while all is well."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import tep
from tep.base.units import KiB
from tep.core.stats import Journal
from tep.sim import Chaos, Cluster


def test_a_healthy_engine_logs_nothing_above_info(caplog: pytest.LogCaptureFixture) -> None:
    """Warnings on every start teach people to overlook them; DEBUG says why things are so."""
    with (
        caplog.at_level(logging.DEBUG, "tep"),
        tep.TransferEngine.open("local", nics=2, name="ana") as ana,
        tep.TransferEngine.open("local", name="bob") as bob,
    ):
        src, _ = ana.reg_mr(np.zeros(KiB, np.uint8))
        _, dst = bob.reg_mr(np.zeros(KiB, np.uint8))
        ana.submit_single_write(KiB, (src, 0), (dst, 0)).wait(60)
    ours = [record for record in caplog.records if record.name.startswith("tep")]

    assert {logging.INFO, logging.DEBUG} == {record.levelno for record in ours}
    assert {"tep.local"} == {record.name for record in ours}
    told = [record.getMessage() for record in ours if record.levelno == logging.INFO]
    assert ["ana: open, 2 NICs on local", "bob: open, 1 NICs on local"] == told
    [why, _] = [record.getMessage() for record in ours if record.levelno == logging.DEBUG]
    assert "NIC 1: ana/1 on local" in why
    assert "failover: no, because the local backend cannot fence" in why


def test_each_fault_and_its_mending_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """The log of the night must name the NIC that died, and the fate of its rows."""
    with caplog.at_level(logging.INFO, "tep.sim"), Cluster(nics=2, chaos=Chaos(seed=2)) as cluster:
        a, b = cluster.engines
        src, _ = a.reg_mr(np.zeros(256 * KiB, np.uint8))
        _, dst = b.reg_mr(np.zeros(256 * KiB, np.uint8))
        pages = tep.Pages(range(64))
        sent = a.submit_paged_writes(4 * KiB, (src, pages), (dst, pages), imm=5)
        cluster.at(cluster.now_us + 0.3, lambda: cluster.kill_nic("a", 1))
        sent.wait()
        faults = dict(a.stats().faults)
        cluster.restart("b")
        with pytest.raises(tep.TepError):
            a.submit_single_write(KiB, (src, 0), (dst, 0)).wait()
    lines = [r.getMessage() for r in caplog.records if r.name == "tep.sim"]

    assert 1 == sum("NIC 1 (a/1) is down; 1 are left" in line for line in lines)
    levels = {r.levelno for r in caplog.records if "is down; 1 are left" in r.getMessage()}
    assert {logging.WARNING} == levels, "an ERROR is a NIC that raised"
    assert 1 <= faults["failover"] == sum("nobody knows whether it landed" in ln for ln in lines)
    assert 1 <= faults["fence"] == sum("the peer has fenced it off" in line for line in lines)
    assert any(line.startswith("a: peer b (epoch 1): restarted: ") for line in lines)
    assert all(line.startswith(("a: ", "b: ")) for line in lines)


def test_faults_of_simulations_are_not_printed_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    """A thousand runs with faults would print a thousand warnings that nobody needs."""
    assert logging.ERROR == logging.getLogger("tep.sim").level
    with Cluster(nics=2, seed=1) as cluster:
        cluster.kill_nic("a", 1)
    assert "" == capsys.readouterr().err


def test_a_flood_of_one_kind_is_logged_seldom(caplog: pytest.LogCaptureFixture) -> None:
    """A peer that comes and goes would fill the disk."""
    journal, heard = Journal("a", "local"), []
    journal.listeners.append(lambda kind, text: heard.append((kind, text)))
    with caplog.at_level(logging.INFO, "tep.local"):
        for k in range(1000):
            journal.say("reopen", f"path {k}", logging.INFO)
        journal.say("fence", "another")

    assert 8 + 6 + 1 == len(caplog.records)
    assert "a: path 511 (512 times reopen so far)" in caplog.text
    assert "a: path 7" == caplog.messages[7], "none was left out before it"
    assert {"reopen": 1000, "fence": 1} == journal.counts
    assert 1001 == len(heard)

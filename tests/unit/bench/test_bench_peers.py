"""tests/bench/bench_peers.py: who takes part, who is named as absent, and what ratios mean."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tep.base.errors import UsageError
from tests.bench import bench_peers as peers


def test_environments_are_found_by_name_and_by_folder(tmp_path) -> None:
    """A peer that is there and left out makes the table look better than it is."""
    python = tmp_path / "nixl" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    mine = tmp_path / "mine"
    mine.touch()

    assert {} == peers.find_peers()
    assert {"nixl": str(python)} == peers.find_peers([], tmp_path)
    assert {"nixl": str(mine), "mpi": str(mine)} == peers.find_peers(
        [f"nixl={mine}", f"mpi={mine}"], tmp_path
    )
    with pytest.raises(UsageError, match="nixel.*nixl, mooncake, ucxx, mpi"):
        peers.find_peers([f"nixel={mine}"])
    with pytest.raises(UsageError, match="there is no /nowhere/python"):
        peers.find_peers(["mpi=/nowhere/python"])


def test_a_ratio_is_of_one_round_and_above_one_where_the_other_is_better() -> None:
    """A mean of means hides that both were slow in the same round; latency is better when lower."""
    ours = peers.Entry("tep", "")
    ours.values = {"weights": [(4.0, 1.0), (1.0, 1.0), (2.0, 1.0)], peers.PING: [(20.0, 1.0)]}
    other = peers.Entry("other", "", about="other 1", error="it died")
    other.values = {"weights": [(2.0, 3.0), (2.0, 5.0), (2.0, 4.0)], peers.PING: [(10.0, 2.0)]}
    bulk, ping, why = peers.rows_of(other, ours)

    assert (1.0, 0.5, 2.0) == bulk.ratio
    assert (2.0, 2.0, 2.0) == (bulk.median, bulk.least, bulk.most)
    assert 4.0 == bulk.cpu_ms
    assert ("RL, 256 MiB", "GB/s") == (bulk.what, bulk.unit)
    assert (2.0, 2.0, 2.0) == ping.ratio
    assert "us" == ping.unit
    assert ("it died", None) == (why.absent, why.median)


def test_one_that_cannot_be_started_says_so_and_leaves_nothing() -> None:
    """mpi4py without an mpiexec beside its Python must not end the rounds of all others."""
    entry = peers.open_entry("mpi", "/nowhere/python", "mpi", ())
    (row,) = peers.rows_of(entry, entry)

    assert "it could not be started: " in row.absent
    assert "/nowhere/mpiexec" in row.absent
    assert entry.ask("bulk", "weights") is None
    assert not Path(entry.folder).exists()


@pytest.mark.slow
def test_a_round_is_played_and_absent_engines_are_named(monkeypatch) -> None:
    """Two contestants, one plan, one round, through the real players."""
    ours = [entry for entry in peers.OURS if entry[1] in {"tep", "writev"} and not entry[2]]
    monkeypatch.setattr(peers, "OURS", ours)
    monkeypatch.setattr(peers, "PLANS", {"tokens": peers.PLANS["tokens"]})
    monkeypatch.setattr(peers, "_PINGS_S", 0.01)
    rows = peers.peer_rows({"mooncake": sys.executable}, rounds=1)
    played = {(row.who, row.what): row for row in rows if not row.absent}
    absent = {row.who: row.absent for row in rows if row.absent}

    assert {"tep", "limit: process_vm_writev"} == {who for who, _ in played}
    assert {"MoE, 1,024 x 7 KiB", peers.PING} == {what for _, what in played}
    assert (1.0, 1.0, 1.0) == played["tep", peers.PING].ratio
    assert set(peers.PEERS) == absent.keys()
    assert "no environment: --peer nixl=PYTHON" in absent["nixl"]
    assert "No module named 'mooncake'" in absent["mooncake"]

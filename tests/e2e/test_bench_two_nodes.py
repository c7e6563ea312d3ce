"""scripts/bench_two_nodes, cx7_smoke and the doctor, everywhere that needs no NIC of one's own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tep
from tep import FabricError, sim
from tep.backends.loopback import Hub
from tep.bench import two_nodes
from tep.bench.reproduce.tables import load_table
from tep.bench.two_nodes import FORMAT, Plan, document, measure
from tep.cli import main
from tests.support.fake_efa import fabric
from tests.support.here import need_fake_efa, require
from tests.support.inside import nics_of

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/bench_two_nodes.py"
KINDS = {"single", "paged", "verified", "scatter", "barrier", "latency", "bidirectional"}


def bench(tmp_path, *args, env=None):
    """Run it; return its JSON and what it printed."""
    path = tmp_path / "results.json"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_", "SLURM_"))}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--short", "--json", path, *args],
        env=clean | (env or {}),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return json.loads(path.read_text()), done.stdout


def check(found):
    """Every kind is there, and every figure is one."""
    assert FORMAT == found["format"]
    assert KINDS == {one["kind"] for one in (*found["points"], *found["others"])}
    assert all(one["gbps"] > 0 for one in found["points"])
    assert all(one["value"] > 0 for one in found["others"])


@pytest.mark.parametrize("backend", ["local", "libfabric"])
def test_two_processes_of_this_host(tmp_path, backend):
    """Rendezvous, all kinds of transfers, bytes compared, one JSON; started as two processes."""
    args = ["--launch", "local", "--backend", backend]
    if backend == "libfabric":
        args += ["--option", "provider=tcp", "--nics", "1,2", "--plot", tmp_path / "plot.png"]
    found, printed = bench(tmp_path, *args)
    check(found)

    assert "single 65536" in printed
    assert backend == found["run"]["backend"]
    if backend == "libfabric":
        assert {2} == {one["nics"] for one in found["points"]}
        assert {1, 2} == {one["nics"] for one in found["others"]}
        assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_a_nic_that_takes_short_rows_only_is_measured_all_the_same():
    """Soft-RoCE takes 8 MiB: one NIC of it ended in an error before anything was measured."""
    with contextlib.ExitStack() as stack:
        hub = Hub()
        engines = [
            stack.enter_context(tep.TransferEngine.open("loopback", nics=1, name=name, hub=hub))
            for name in "ab"
        ]
        for engine in engines:
            (nic,) = nics_of(engine)
            nic.caps = dataclasses.replace(nic.caps, max_write_bytes=4 << 20)
        found = measure(engines, dataclasses.replace(Plan.short(), singles=(1 << 20, 8 << 20)))

    assert KINDS == {point.kind for point in found.points}
    assert [1 << 20] == [point.nbytes for point in found.points if point.kind == "single"]


def test_a_simulated_machine_gives_its_published_figures_and_its_profile_back(tmp_path, capsys):
    """The way from a user's machine to their simulator, end to end."""
    with sim.Cluster(nodes=2, profile="cx7_400") as cluster:
        plan = Plan(
            singles=(64 << 10, 256 << 10, 32 << 20), pages=(1 << 10, 8 << 10, 64 << 10),
            bytes_each=0, rounds=20, buffer_bytes=64 << 20,
        )  # fmt: skip
        result = measure(cluster.engines, plan)
    path = tmp_path / "cx7.json"
    path.write_text(json.dumps(document([result], "sim", {"profile": "cx7_400"}, "cpu")))
    published = {
        (point.keys["kind"], int(point.keys["bytes"])): point.published
        for point in load_table("p2p").points
        if point.keys["nic"] == "CX7"
    }
    measured = {
        (one.kind, one.nbytes): one.value
        for one in result.points
        if one.kind in {"single", "paged"}
    }

    assert published.keys() == measured.keys()
    for key, gbps in published.items():
        assert abs(measured[key] / gbps - 1) < 0.06, (key, measured[key], gbps)
    assert 0 == main(["sim", "fit", str(path), "--json"])
    fitted = json.loads(capsys.readouterr().out)
    assert all(abs(float(row["the fit is off by"].rstrip("%"))) < 5 for row in fitted["points"])


def test_wrong_bytes_are_an_error(monkeypatch):
    """A fast link that corrupts is worse than none."""
    pattern = two_nodes._pattern
    monkeypatch.setattr(two_nodes, "_pattern", lambda nbytes, seed: pattern(nbytes, seed) ^ 1)
    real = two_nodes.Arena.read
    monkeypatch.setattr(two_nodes.Arena, "read", lambda self: bytes(64) + real(self)[64:])
    with (
        sim.Cluster(nodes=2, profile="cx7_400") as cluster,
        pytest.raises(FabricError, match="byte 0 of"),
    ):
        measure(cluster.engines, Plan.short())


@pytest.mark.slow
@pytest.mark.parametrize("backend", [["libfabric", "--option", "provider=efa"], ["efa"]])
def test_on_the_fake_efa_device(tmp_path, backend):
    """The command for p5 and p5en, over libfabric's own provider and without it."""
    need_fake_efa()
    with fabric({"nics": 2, "seed": 5}) as run:
        args = ["--launch", "local", "--backend", *backend]
        found, _ = bench(tmp_path, *args, env=run.environment())
        landed = run.total()["imms_landed"]
    check(found)

    assert 2 == len(found["run"]["nics"])
    assert landed > 1_000


@pytest.mark.slow
def test_the_script_over_a_simulated_machine(tmp_path):
    """CI of somebody who has a profile of their machine runs this."""
    found, printed = bench(tmp_path, "--sim", "efa_2x200", "--plot", tmp_path / "plot.png")
    check(found)

    assert "single 65536" in printed
    assert {"profile": "efa_2x200"} == found["run"]["options"]
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["sim", "local", "tcp"])
def test_the_verification_script_runs_where_there_is_no_nic(provider):
    """A script that nobody can try before the instance is paid for is wrong on the instance."""
    if provider == "tcp":
        require(provider)
    script = ROOT / "scripts/verify_efa.py"
    ended = subprocess.run(
        [sys.executable, str(script), provider],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert 0 == ended.returncode, ended.stdout + ended.stderr
    assert f"{provider}: all checks held" == ended.stdout.splitlines()[-1]

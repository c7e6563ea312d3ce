"""scripts/bench_two_nodes between two hosts, which are network namespaces of this machine.

Nothing is shared but files: an address of one host leads nowhere on the other, as between machines.
ssh, srun and torchrun are shells that start what they are given on the right host, with the
environment that the real ones leave: ssh passes none on.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.here import require
from tests.support.networks import NoNamespaces, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
BENCH = ROOT / ".venv/bin/python", ROOT / "scripts/bench_two_nodes.py"

HOST = """#!/bin/sh
pid=$(cat "{folder}/$1"); shift
exec nsenter -t "$pid" -n env "$@"
"""
SSH = """#!/bin/sh
[ "$1 $2" = "-o BatchMode=yes" ] || exit 9
name=$3; shift 3
exec "{folder}/host" "$name" -i PATH=/usr/bin:/bin HOME=/nowhere "$@"
"""
SRUN = """#!/bin/sh
[ "$1 $2 $3 $4 $5 $6" = "--nodes 2 --ntasks 2 --ntasks-per-node 1" ] || exit 9
shift 6
export SLURM_STEP_NUM_TASKS=2 SLURM_JOB_ID=41 SLURM_STEP_NODELIST=both
SLURM_PROCID=0 "{folder}/host" 10.77.0.1 "$@" & first=$!
SLURM_PROCID=1 "{folder}/host" 10.77.0.2 "$@" & second=$!
wait $first || exit 1
wait $second
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames both" ] || exit 9
echo 10.77.0.1; echo 10.77.0.2
"""
TORCHRUN = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29571", "WORLD_SIZE": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none",
            "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # fmt: skip


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """Two hosts, and an ssh, an srun and a scontrol that know them."""
    require("tcp")
    try:
        with two_hosts() as made:
            for host in made:
                (tmp_path / host.address).write_text(f"{host.pid}\n")
            scripts = {"host": HOST, "ssh": SSH, "srun": SRUN, "scontrol": SCONTROL}
            for name, text in scripts.items():
                (tmp_path / name).write_text(text.replace("{folder}", str(tmp_path)))
                (tmp_path / name).chmod(0o755)
            monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
            for name in list(os.environ):
                if name in {"RANK", "TEP_TOKEN"} or name.startswith(("WORLD_", "MASTER_", "SLURM")):
                    monkeypatch.delenv(name)
            yield made
    except NoNamespaces as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")


def _end(*processes):
    """Wait until all have ended well; return their output."""
    printed = [process.communicate(timeout=200)[0] for process in processes]
    assert [0] * len(processes) == [process.returncode for process in processes], printed
    return printed


def _start(command, **more):
    return subprocess.Popen(
        command, env=os.environ | more, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.mark.parametrize("method", ["ssh", "srun", "torchrun"])
def test_the_bench_runs_between_two_hosts(hosts, tmp_path, method):
    """Two processes of one host meet at 127.0.0.1 whatever the code says; two hosts do not."""
    first, second = hosts
    out = tmp_path / "results.json"
    bench = [*map(str, BENCH), "--short", "--backend", "libfabric", "--option", "provider=tcp"]
    bench += ["--json", str(out)]
    before = second.sent_bytes()
    if method == "torchrun":
        ranks = [
            _start(host.inside(*bench), RANK=str(rank), **TORCHRUN)
            for rank, host in enumerate(hosts)
        ]
        printed, _ = _end(*ranks)
    else:
        where = ["--launch", method, "--hosts", "10.77.0.1,10.77.0.2"]
        (printed,) = _end(_start(first.inside(*bench, *where)))
    found = json.loads(out.read_text())

    assert "bidirectional 1048576" in printed
    assert {"10.77.0.1"} == set(found["run"]["nics"])
    assert all(one["gbps"] > 0 for one in found["points"])
    assert second.sent_bytes() - before > 16 << 20, "the bytes went another way"

"""The command line, as a user calls it: real processes, both forms of output."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def tep(*args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "import sys; from tep.cli import main; sys.exit(main())",
        *args,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=check)


def document(*args: str) -> Any:
    return json.loads(tep(*args, "--json").stdout)


def test_info_says_what_is_here_and_why_the_rest_is_not() -> None:
    """A user who cannot see why a backend is missing files an issue instead of installing it."""
    states = {state["backend"]: state for state in document("info")["backends"]}

    assert states["loopback"]["available"]
    assert states["sim"]["available"]
    for state in states.values():
        assert state["detail"]
        assert state["available"] or (state["cure"] and state["tried"])
    assert "loopback" in tep("info").stdout


def test_demo_moves_the_file_over_every_fabric(tmp_path: Path) -> None:
    """The demo is the first thing a newcomer sees: wrong bytes or counts there are the end."""
    file = tmp_path / "some.bin"
    file.write_bytes(bytes(range(256)) * 1025 + b"odd end")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()

    found = document("demo", "--file", str(file), "--seed", "3", "--trace", str(tmp_path / "t"))

    assert len(file.read_bytes()) == found["nbytes"]
    fabrics = [run["fabric"] for run in found["runs"]]
    assert ["loopback", "chaos, seed 3"] == fabrics[:2]
    assert {"timing, efa_2x200", "timing, efa_4x100", "timing, cx7_400"} == set(fabrics[2:])
    for run in found["runs"]:
        assert digest == run["sha256"]
        assert run["agrees"]
        assert run["pages"] == run["imms_expected"] == run["imms_counted"]
        assert run["pages"] * 65536 == sum(run["nic_bytes"])
    for path in found["traces"]:
        assert json.loads(Path(path).read_text())["traceEvents"]


def test_demo_refuses_what_is_no_file(tmp_path: Path) -> None:
    """A traceback is no answer to a misspelt path."""
    empty = tmp_path / "empty"
    empty.touch()

    for path, why in ((tmp_path / "none", "No such file"), (empty, "is empty")):
        done = tep("demo", "--file", str(path), check=False)
        assert 1 == done.returncode
        assert str(path) in done.stderr
        assert why in done.stderr
        assert "Traceback" not in done.stderr


def test_sim_replays_a_seed() -> None:
    """A seed that does not bring the same run back is no bug report."""
    first, second = document("sim", "--seed", "11"), document("sim", "--seed", "11")

    assert first == second
    assert first["violation"] is None
    assert 64 == len(first["digest"])
    assert first["digest"] != document("sim", "--seed", "12")["digest"]


def test_sim_writes_a_trace(tmp_path: Path) -> None:
    """A failure that cannot be looked at takes a day longer."""
    path = tmp_path / "run.json"

    tep("sim", "--seed", "11", "--trace", str(path))

    assert json.loads(path.read_text())["traceEvents"]


@pytest.mark.slow
@pytest.mark.parametrize("bench", ["engine", "sim"])
def test_bench_measures_every_figure(bench: str) -> None:
    """A benchmark that does not run any more is found when its number is needed."""
    figures = document("bench", bench, "--rounds", "3")["figures"]

    assert len(figures) >= 4
    for figure in figures:
        assert figure["value"] > 0
        assert figure["unit"]

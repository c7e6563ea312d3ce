"""tep/testing as outsiders use it: a project of their own, the plugin, the line that replays."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tep.cli import main

EXAMPLE = Path(__file__).parents[1] / "example"
INSTALLED = [e.name for e in importlib.metadata.entry_points(group="pytest11") if e.name == "tep"]
PLUGIN = [] if INSTALLED else ["-p", "tep.testing.plugin"]
"""An install from before the entry point has to be told of the plugin."""


def run_pytest(folder: Path, *args: str) -> tuple[int, str]:
    """Run pytest as a stranger would: in his folder, with nothing of ours on the path."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "PYTHON", "TEP_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PLUGIN, *args]
    done = subprocess.run(
        command, cwd=folder, env=env, check=False, capture_output=True, text=True, timeout=240
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_example_project_passes() -> None:
    """The documentation's example must work with the installed package alone."""
    status, told = run_pytest(EXAMPLE)

    assert 0 == status, told
    assert "14 passed" in told


def test_a_new_project_passes_its_own_tests(tmp_path: Path, capsys) -> None:
    """The first minute of a newcomer: what `tep new` makes has to work as it stands."""
    folder = tmp_path / "mine"
    assert 0 == main(["new", "protocol", str(folder)])
    assert f"run its tests: cd {folder} && python -m pytest" in capsys.readouterr().out
    status, told = run_pytest(folder)

    assert 0 == status, told
    assert "2 passed" in told
    assert "python -m pytest" in (folder / ".github/workflows/test.yml").read_text()
    (folder / "protocol.py").write_text("mine")
    assert 1 == main(["new", "protocol", str(folder)])
    assert "protocol.py is there already" in capsys.readouterr().err
    assert "mine" == (folder / "protocol.py").read_text(), "a user's file is left as it is"


FRAGILE = """
import pytest

@pytest.mark.tep(nodes=3, nics=2, faults="none", runs=4)
def test_fragile(tep_cluster, tep_case):
    assert [2, 2, 2] == list(tep_case.nics)
    assert tep_case.seed % 10 != 6, "unlucky"

def test_leaves_a_wait(tep_cluster):
    a, b = tep_cluster.engines
    a.expect_imm_count(1, 1).add_done_callback(print)
    b.submit_barrier([a.reg_mr(bytearray(8))[1]], 1, on_done=lambda _: 1 / 0)
"""


def test_the_plugins_options_and_its_replay_line(tmp_path: Path) -> None:
    """A failed run must be replayable alone."""
    (tmp_path / "test_it.py").write_text(FRAGILE)
    status, told = run_pytest(tmp_path, "-k", "fragile", "--tep-seed", "4")
    assert 1 == status
    assert "1 failed, 3 passed" in told
    [line] = re.findall(r"^pytest 'test_it.py::test_fragile' (--tep.*)$", told, re.MULTILINE)
    assert "--tep-seed 6 --tep-runs 1" == line
    assert "Case(nics=(2, 2, 2), faults=Faults((), Chaos.calm(seed=6)))" in told

    status, told = run_pytest(tmp_path, "-k", "fragile", *line.split())
    assert 1 == status
    assert "1 failed" in told
    assert "unlucky" in told
    status, told = run_pytest(tmp_path, "-k", "fragile", "--tep-runs", "2", "--tep-faults", "order")
    assert (0, True) == (status, "2 passed" in told), told


EXCUSED = """
import pytest, tep

async def write(cluster, nbytes):
    a, b = cluster.engines
    (mr, _), (_, desc) = a.reg_mr(bytearray(64)), b.reg_mr(bytearray(64))
    await a.submit_single_write(nbytes, (mr, 0), (desc, 0))

@pytest.mark.parametrize("nbytes", [64, 65])
@pytest.mark.tep(nics=1, heal_us=0, runs=1)
def test_killed(tep_cluster, nbytes):
    tep_cluster.kill_nic("b", 0)
    tep_cluster.run(write(tep_cluster, nbytes))

@pytest.mark.tep(nics=1, runs=1, may_fail=False)
def test_must_survive(tep_cluster):
    test_killed(tep_cluster, 64)
"""


def test_the_fixture_judges_as_run_does(tmp_path: Path) -> None:
    """An error that a dead NIC caused is no finding; a call that was wrong always is."""
    (tmp_path / "test_it.py").write_text(EXCUSED)
    status, told = run_pytest(tmp_path, "--tep-faults", "none", "--tb", "short")

    assert 1 == status
    assert "2 failed, 1 passed" in told
    assert "it ended in BadRequest, which no fault excuses" in told
    assert "it ended in FabricError: " in told
    assert "hunting.py" not in told.partition("short test summary")[0], "frames of the kit"


def test_the_fixture_judges_what_a_test_leaves_behind(tmp_path: Path) -> None:
    """A callback that raised, or a transfer that never ended, is a failure nobody asserted."""
    (tmp_path / "test_it.py").write_text(FRAGILE)
    status, told = run_pytest(tmp_path, "-k", "leaves", "--tep-runs", "1", "--tep-faults", "none")

    assert 1 == status
    assert re.search(r"b: callback .* raised ZeroDivisionError: division by zero", told)
    assert "--tep-seed 0 --tep-runs 1 --tep-faults 'none'" in told

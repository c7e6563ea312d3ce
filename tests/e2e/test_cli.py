"""The command line, as a user calls it: real processes, both forms of output."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.here import need_stub

ROOT = Path(__file__).resolve().parents[2]


def tep(
    *args: str, check: bool = True, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "import sys; from tep.cli import main; sys.exit(main())",
        *args,
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=check, env=env
    )


def document(*args: str) -> Any:
    return json.loads(tep(*args, "--json").stdout)


def test_info_says_what_is_here_and_why_the_rest_is_not() -> None:
    """A user who cannot see why a backend is missing files an issue instead of installing it."""
    states = {state["backend"]: state for state in document("info")["backends"]}

    assert states["loopback"]["available"]
    for state in states.values():
        assert state["detail"]
        assert state["available"] or (state["cure"] and state["tried"])
    assert "loopback" in tep("info").stdout


def test_info_says_which_libfabric_it_found_and_what_it_passed_over() -> None:
    """Three builds may lie on one machine: without the path nobody knows whose bug it is."""
    [state] = [s for s in document("info")["backends"] if s["backend"] == "libfabric"]
    if not state["available"]:
        pytest.skip(f"not here: {state['tried']}")
    facts, tried = state["facts"], dict(state["tried"])

    assert Path(facts["library"]).name.startswith("libfabric.so")
    assert (1, 17) <= tuple(map(int, facts["version"].split(".")))
    assert facts["found via"]
    assert any(name.startswith(("tcp", "net")) for name in facts["providers"])
    if "TEP_LIBFABRIC" not in os.environ:
        assert "not set" == tried["TEP_LIBFABRIC"]
    if "efa" not in facts["providers"]:
        assert "no device" in tried["provider efa"]
    assert facts["library"] in tep("info").stdout.replace("│", "").replace(" ", "").replace(
        "\n", ""
    )


@pytest.mark.parametrize(
    ("library", "why"),
    [("/nowhere/libfabric.so.1", "cannot open shared object file"), ("libc.so.6", "it has no fi_")],
)
def test_info_says_why_a_named_libfabric_will_not_do(library: str, why: str) -> None:
    """A user who names a library must not silently get another one, nor be left guessing."""
    done = tep("info", "--json", env=os.environ | {"TEP_LIBFABRIC": library})
    [state] = [s for s in json.loads(done.stdout)["backends"] if s["backend"] == "libfabric"]
    [[step, reason]] = state["tried"]

    assert not state["available"]
    assert f"TEP_LIBFABRIC: {library}" == step
    assert why in reason
    printed = tep("info", env=os.environ | {"TEP_LIBFABRIC": library}).stdout
    assert "tep-engine[libfabric]" in printed, "brackets are markup to the table, and would be gone"


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A file with an odd end, and what the demo said of it."""
    folder = tmp_path_factory.mktemp("demo")
    file = folder / "some.bin"
    file.write_bytes(bytes(range(256)) * 1025 + b"odd end")
    found = document("demo", "--file", str(file), "--page-bytes", "4096", "--seed", "3")
    return file, found


def test_demo_moves_the_file_over_every_fabric(moved: tuple[Path, dict[str, Any]]) -> None:
    """The demo is the first thing a newcomer sees: wrong bytes or counts there are the end."""
    file, found = moved
    digest = hashlib.sha256(file.read_bytes()).hexdigest()

    assert len(file.read_bytes()) == found["nbytes"]
    fabrics = [run["fabric"] for run in found["runs"] if run["processes"] == 1]
    assert ["loopback", "chaos, seed 3"] == fabrics[:2]
    assert {"timing, efa_2x200", "timing, efa_4x100", "timing, cx7_400"} == set(fabrics[2:])
    for run in found["runs"]:
        assert digest == run["sha256"]
        assert run["agrees"]
        assert run["pages"] == run["imms_expected"] == run["imms_counted"]
        assert run["pages"] * 4096 == sum(run["nic_bytes"])


def test_demo_begins_with_two_processes_over_libfabric(moved: tuple[Path, dict[str, Any]]) -> None:
    """A demo that shows simulations only leaves open whether anything real is behind it."""
    _, found = moved
    if any(one["fabric"] == "libfabric tcp" for one in found["left_out"]):
        pytest.skip(f"not here: {found['left_out']}")
    first = found["runs"][0]

    assert ("libfabric tcp", 2, "2 -> 2") == (first["fabric"], first["processes"], first["nics"])
    assert [32 * 4096, 33 * 4096] == sorted(first["nic_bytes"])
    assert first["us"] > 0
    assert first["gbps"] > 0
    assert {"loopback"} < {run["fabric"] for run in found["runs"]}


def test_demo_without_libfabric_says_so_and_goes_on(tmp_path: Path) -> None:
    """A run that is missing without a word looks like one that was never meant to be there."""
    file = tmp_path / "some.bin"
    file.write_bytes(b"a little")
    done = tep(
        "demo",
        "--file",
        str(file),
        env=os.environ | {"TEP_LIBFABRIC": str(tmp_path / "nothing.so")},
    )

    assert 0 == done.returncode
    assert "Left out: libfabric tcp: no usable libfabric on this machine" in done.stdout
    assert f"tried TEP_LIBFABRIC: {tmp_path}/nothing.so" in done.stdout
    assert "To get it: pip install 'tep-engine[libfabric]'" in done.stdout
    assert "loopback" in done.stdout


def test_demo_refuses_what_is_no_file(tmp_path: Path) -> None:
    """A traceback is no answer to a misspelt path."""
    empty = tmp_path / "empty"
    empty.touch()

    for path, why in ((tmp_path / "none", "No such file"), (empty, "empty file")):
        done = tep("demo", "--file", str(path), check=False)
        assert 1 == done.returncode
        assert str(path) in done.stderr
        assert why in done.stderr
        assert "Traceback" not in done.stderr


PULL = ("sim", "--protocol", f"{ROOT}/tests/example/puller.py:pull", "--faults", "order,restarts")


def test_sim_replays_a_seed() -> None:
    """A seed that does not bring the same run back is no bug report."""
    first, second = document(*PULL, "--seed", "11"), document(*PULL, "--seed", "11")

    assert first == second
    assert first["violation"] is None
    assert 64 == len(first["digest"])
    assert first["digest"] != document(*PULL, "--seed", "12")["digest"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "bench", [pytest.param("busy", marks=pytest.mark.long), "engine", "verbs_stub"]
)
def test_bench_measures_every_figure(bench: str) -> None:
    """A benchmark that does not run any more is found when its number is needed."""
    options = ("--rounds", "3", "--json")
    if bench == "verbs_stub":
        need_stub()
    if bench == "busy":
        options += ("--fabric", "local")
    command = [sys.executable, "-m", f"tests.bench.bench_{bench}", *options]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    figures = json.loads(found.stdout)["figures"]

    assert len(figures) >= 3
    for figure in figures:
        assert figure["value"] > 0
        assert figure["unit"]
        if bench == "engine":
            assert figure["calls"] > 0


@pytest.mark.parametrize("script", ["verify_efa", "cx7_smoke"])
def test_a_script_that_is_asked_for_help_does_nothing_else(script: str, tmp_path: Path) -> None:
    """`--help` was taken for a provider."""
    done = subprocess.run(
        [ROOT / "scripts" / script, "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (0, "") == (done.returncode, done.stderr)
    assert f"scripts/{script}" in done.stdout
    assert "set -euo" not in done.stdout


def test_what_is_not_here_is_said_with_its_remedy() -> None:
    """`nics=0; 1 to 64 are possible` was all that a machine without a NIC said."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/verify_efa.py", "srd"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TEP_LIBEFA": "/nowhere.so"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert 1 == done.returncode
    assert "what brings it: the EFA installer" in done.stdout
    assert "open: " not in done.stdout

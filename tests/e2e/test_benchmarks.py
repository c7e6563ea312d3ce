"""docs/benchmarks.md and its pages are made of docs/data, and the tables can be read."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "benchmarks.py"


@pytest.fixture(scope="module")
def benchmarks():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("benchmarks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmarks"] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["benchmarks"]


def test_the_pages_are_what_the_data_make():
    """A figure that was typed by hand is nobody's."""
    assert 0 == subprocess.run([sys.executable, SCRIPT, "--check"], check=False).returncode


def test_every_file_of_data_says_how_it_was_made(benchmarks):
    """A figure without its command, machine, date and version cannot be compared with another."""
    paths = sorted(benchmarks.DATA.glob("*.json"))

    assert paths
    for path in paths:
        found = json.loads(path.read_text())
        assert path.stem in benchmarks.BENCHES
        assert {"command", "date", "tep", "machine", "load", "data"} == found.keys()
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", found["date"])
        assert "CPUs" in found["machine"]


def test_a_measurement_is_run_and_shown(benchmarks, tmp_path, monkeypatch):
    """From a command to the page; one that fails is told with what it said, and leaves no file."""
    figure = {
        "what": "a write", "value": 1234.5, "best": 1.0, "unit": "ns", "aim": 60.0, "ratio": 2.0,
        "reference": 90.0, "reference_source": "paper", "more_is_better": False, "reached": False,
    }  # fmt: skip
    said = json.dumps({"figures": [figure]})
    bench = benchmarks.Bench(
        "Mine", ("python", "-c", f"print({said!r})"), benchmarks.figure_rows, "x"
    )
    failing = benchmarks.Bench(
        "Not", ("python", "-c", "exit('no NIC')"), benchmarks.table_rows, "y"
    )
    monkeypatch.setattr(benchmarks, "BENCHES", {"mine": bench, "not": failing})
    monkeypatch.setattr(benchmarks, "DATA", tmp_path)
    monkeypatch.setattr(benchmarks, "DOCS", tmp_path)

    assert 0 == benchmarks.main(["mine"])
    text = (tmp_path / "benchmarks" / "mine.md").read_text()
    assert "| a write | 1,234 ns | 1 | at most 60: **missed** | 2.00 x 90 (paper) |" in text
    first = (tmp_path / "benchmarks.md").read_text()
    assert "- [Mine](benchmarks/mine.md)" in first
    assert "Not measured yet: `not` (Not)" in first
    assert 1 == benchmarks.main(["not"])
    assert not (tmp_path / "not.json").exists()
    assert 2 == benchmarks.main(["other"])
    assert 0 == benchmarks.main(["--check"])

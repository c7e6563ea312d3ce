"""The promises of CONTRACT.md to authors of backends: the short file runs, and gaps are strict."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tep.testing.contract import DomainContract, tests_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRACT.md").read_text()
BACKEND = """
from tep.backends.loopback import Hub, open_domains as _open
_HUB = Hub()
def open_domains(nics):
    return _open(nics, hub=_HUB)
"""


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    (folder / "my_backend.py").write_text(BACKEND)
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = . {ROOT}\n")
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.slow
def test_the_ten_lines_of_the_page_test_a_backend(tmp_path) -> None:
    """An author copies these lines first; where they fail, nobody reads on."""
    lines = re.findall(r"```python\n(# test_my_backend\.py\n.*?)```", PAGE, re.DOTALL)[0]
    (tmp_path / "test_my_backend.py").write_text(lines)
    found = _run(tmp_path)

    assert 0 == found.returncode, found.stdout
    passed = int(re.search(r"(\d+) passed", found.stdout)[1])
    assert passed > 50
    assert len(lines.splitlines()) <= 12


@pytest.mark.slow
def test_a_gap_that_has_closed_is_noticed(tmp_path) -> None:
    """A list of known gaps that only grows is an excuse."""
    (tmp_path / "test_gap.py").write_text(
        "import pytest\n"
        "from my_backend import open_domains\n"
        "from tep.testing.contract import DomainContract, OpenWorld\n"
        "class TestMine(DomainContract):\n"
        "    gaps = {'test_c07_no_immediate_without_one_asked_for': 'so they said'}\n"
        "    @pytest.fixture\n"
        "    def world(self):\n"
        "        with OpenWorld(open_domains) as world:\n"
        "            yield world\n"
    )
    found = _run(tmp_path, "-k", "c07")

    assert 1 == found.returncode, found.stdout
    assert "XPASS(strict)" in found.stdout
    assert "so they said" in found.stdout
    assert "1 failed, 1 passed" in found.stdout


def test_a_gap_must_name_a_test() -> None:
    """A misspelt gap would stand in the table and do nothing."""
    with pytest.raises(TypeError, match="test_c99_no_such_thing, which is no test"):
        type("TestMine", (DomainContract,), {"gaps": {"test_c99_no_such_thing": "why"}})


def test_a_gap_of_one_backend_is_none_of_another() -> None:
    """Marks live on functions, and the suite's functions are shared by all backends."""
    name = tests_of(7)[0]
    marked = type("TestMine", (DomainContract,), {"gaps": {name: "why"}})

    assert ["xfail"] == [mark.name for mark in getattr(marked, name).pytestmark]
    assert not hasattr(getattr(DomainContract, name), "pytestmark")


def test_every_clause_says_what_breaks() -> None:
    """A rule without its reason is the first to be broken."""
    clauses = re.split(r"^### (?=C\d)", PAGE, flags=re.MULTILINE)[1:]

    assert 34 == len(clauses)
    assert [] == [clause[:40] for clause in clauses if "*Broken:*" not in clause]

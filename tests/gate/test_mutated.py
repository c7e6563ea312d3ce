"""A mistake that the mutation run plants is really there: else every test would seem to miss it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.gate.mutated import Finder, changed, compiled, header, live, put

TEXT = """
LIMIT = 3

class Queue:
    room = LIMIT

    @property
    def half(self):
        if self.room:
            return max(x // 2 for x in (self.room,))
        return 0

def grow(queue):
    queue.room += 1
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "queue_of_mutants", raising=False)
    path = tmp_path / "queue_of_mutants.py"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize(
    ("was", "becomes", "name", "half"),
    [
        ("x // 2", "x - 2", "Queue.half", 1),
        ("if self.room", "if not self.room", "Queue.half", 0),
        ("x // 2", "x * 3", "Queue.half", 9),
    ],
)
def test_a_function_gets_other_code(
    path: Path, was: str, becomes: str, name: str, half: int
) -> None:
    """A mistake that is not put in would be said to be noticed by nobody."""
    queue = importlib.import_module("queue_of_mutants").Queue()
    assert queue.half == 1
    pairs = changed(compiled(TEXT, path), compiled(TEXT.replace(was, becomes), path))
    assert pairs is not None
    assert pairs[0][0].co_qualname == name
    put(pairs, live())
    assert queue.half == half


@pytest.mark.parametrize("was", ["LIMIT = 3", "    @property\n"])
def test_what_runs_at_import_is_no_matter_of_functions(path: Path, was: str) -> None:
    """A constant that changed would be played without its change."""
    assert changed(compiled(TEXT, path), compiled(TEXT.replace(was, "", 1), path)) is None


def test_a_module_is_imported_with_the_mistake(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that imports the mistake would test the code as it was."""
    finder = Finder(path, TEXT.replace("LIMIT = 3", "LIMIT = 8"))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert importlib.import_module("queue_of_mutants").Queue().half == 4


@pytest.mark.parametrize(("row", "lines"), [(2, None), (5, None), (7, None), (10, [10]), (9, [9])])
def test_a_mistake_is_reached_by_its_statement(
    path: Path, row: int, lines: list[int] | None
) -> None:
    """Tests that reach the mistake would be left out."""
    found = header(path, row)
    assert (None if found is None else list(found)) == lines

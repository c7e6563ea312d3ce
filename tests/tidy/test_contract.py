"""CONTRACT.md against the suite: each clause has a test that carries its number, and vice versa."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.tidy.sources import nodes, python_files, text


def clauses() -> set[int]:
    """The numbers that CONTRACT.md defines: a heading, item or table row that starts with Cn."""
    found = re.findall(r"^[#\s|*-]*C(\d+)\b", text(Path("CONTRACT.md")), re.MULTILINE)
    return {int(number) for number in found}


def tested() -> dict[int, list[str]]:
    """Clause numbers of the suite's tests, with the tests' names."""
    found: dict[int, list[str]] = {}
    for path in python_files("tep"):
        if path.parts[1] != "testing":
            continue
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef) and (hit := re.match(r"test_c(\d\d)_", node.name)):
                found.setdefault(int(hit[1]), []).append(node.name)
    return found


def test_every_clause_has_a_test() -> None:
    """A clause without a test is a wish."""
    assert clauses(), "CONTRACT.md defines no clause"
    assert set() == clauses() - set(tested())


def test_every_contract_test_has_its_clause() -> None:
    """A backend's author must be able to read what a red test demands."""
    assert {} == {n: names for n, names in tested().items() if n not in clauses()}


def test_clauses_are_numbered_without_gaps() -> None:
    """A number that is missing was deleted or never written."""
    assert set(range(1, len(clauses()) + 1)) == clauses()

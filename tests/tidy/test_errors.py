"""The list of exceptions against the code that raises them and the tests that name them."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tep.base import errors
from tests.tidy.sources import dotted, nodes, python_files, text

NAMES = [name for name in errors.__all__ if name != "TepError"]


@functools.cache
def calls() -> set[str]:
    """The last names of all that tep calls outside the list itself."""
    return {
        dotted(node.func).removeprefix("errors.")
        for path in python_files("tep")
        if path != Path("tep/base/errors.py")
        for node in nodes(path)
        if isinstance(node, ast.Call)
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_error_is_raised_somewhere(name: str) -> None:
    """An exception that nothing raises is a promise in the documentation only."""
    assert name in calls(), f"{name} is never made"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_error_is_named_in_a_test(name: str) -> None:
    """An error path that no test walks is wrong when it is needed."""
    pattern = re.compile(rf"\b{name}\b")
    tests = [path for path in python_files("tests") if pattern.search(text(path))]
    tests += [p for p in python_files("tep") if p.parts[1] == "testing" and pattern.search(text(p))]

    assert tests, f"{name} appears in no test"


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "InDoubt"])
def test_every_error_is_a_tep_error(name: str) -> None:
    """`except tep.TepError` must catch all of them, and nothing else defines one."""
    assert issubclass(getattr(errors, name), errors.TepError)


def test_errors_live_in_one_room() -> None:
    """A subclass elsewhere escapes the list, and with it the tests above."""
    bases = set(errors.__all__)
    found = [
        f"{path}:{node.lineno} {node.name}"
        for path in python_files("tep")
        if path
        not in {Path("tep/base/errors.py"), Path("tep/compat/nixl/bindings.py")}  # NIXL's own
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
        and {dotted(base).rpartition(".")[2] for base in node.bases} & {*bases, "Exception"}
    ]

    assert [] == found

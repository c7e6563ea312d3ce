"""The names of `import tep`: each resolves, lazily, and is described."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import types
from pathlib import Path

import pytest

import tep
from tep.base import errors
from tep.drivers import threads
from tests.tidy.sources import tree


@pytest.mark.parametrize("name", tep.__all__)
def test_every_public_name_resolves(name: str) -> None:
    """A name that is listed and cannot be had is a broken promise in every tutorial."""
    assert getattr(tep, name) is getattr(tep, name)
    assert name in dir(tep)


def test_nothing_else_is_public() -> None:
    """A name that leaks into the package is one that somebody will depend on."""
    for name in tep.__all__:
        getattr(tep, name)
    stray = {
        name
        for name, value in vars(tep).items()
        if not name.startswith("_")
        and name not in tep.__all__
        and not isinstance(value, types.ModuleType)
        and name not in {"annotations", "TYPE_CHECKING"}
    }

    assert set() == stray


def test_all_errors_are_public() -> None:
    """A user must be able to name what he wants to catch."""
    assert set() == set(errors.__all__) - set(tep.__all__)


def test_checkers_see_the_same_names() -> None:
    """The imports under TYPE_CHECKING are a second list; a name in one only is a type error."""
    seen = {"__version__"}
    for node in tree(Path("tep/__init__.py")).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in node.body:
                assert isinstance(line, ast.ImportFrom)
                seen |= {alias.name for alias in line.names}
                if line.module != "tep":
                    room = importlib.import_module(line.module)
                    assert set() == {alias.name for alias in line.names} - set(room.__all__)

    assert set(tep.__all__) == seen


def test_an_unknown_name_is_an_attribute_error() -> None:
    """hasattr(tep, "x") must say no, and a misspelling must name itself."""
    with pytest.raises(AttributeError, match="module 'tep' has no attribute 'TransferEnigne'"):
        tep.TransferEnigne  # noqa: B018  # the access is the test


def test_names_are_loaded_at_first_use_only() -> None:
    """Asking for an exception must not load the engine, nor the engine the simulator."""
    code = (
        "import sys, tep; tep.WaitTimeout; assert 'tep.base.errors' in sys.modules;"
        "assert 'numpy' not in sys.modules and 'tep.engine' not in sys.modules;"
        "tep.TransferEngine; assert 'numpy' in sys.modules;"
        "assert not {'simpy', 'tep.sim', 'typer', 'matplotlib'} & set(sys.modules), 'too much';"
        "tep.sim; assert 'tep.sim' in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )

    assert (0, "") == (done.returncode, done.stderr)


@pytest.mark.parametrize("name", [name for name in tep.__all__ if name != "__version__"])
def test_every_public_name_has_its_own_docstring(name: str) -> None:
    """`help(tep.X)` must say what a caller cannot guess."""
    value = getattr(tep, name)

    assert value.__doc__
    if inspect.isclass(value):
        inherited = {base.__doc__ for base in value.__mro__[1:]}
        assert value.__doc__ not in inherited


@pytest.mark.parametrize(
    "name", [name for name in tep.__all__ if inspect.isclass(getattr(tep, name))]
)
def test_every_public_method_is_described(name: str) -> None:
    """In its class, or in the protocol that it fills."""
    value = getattr(tep, name)
    silent = [
        method
        for method, found in vars(value).items()
        if not method.startswith("_")
        and (inspect.isfunction(found) or isinstance(found, property))
        and not inspect.getdoc(found)
        and not inspect.getdoc(getattr(threads.Driver, method, None))
    ]

    assert [] == silent

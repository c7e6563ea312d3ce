"""A mistake in one module: its functions get other code, or the module is imported with it."""

from __future__ import annotations

import ast
import gc
import importlib.abc
import importlib.machinery
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Final, TypeAlias

Functions: TypeAlias = dict[tuple[str, str, int], list[FunctionType]]
"""The functions of a process by file, name and first line."""
_FUNCTION: Final = 0x01  # CO_OPTIMIZED: neither a module's code nor a class's


def live() -> Functions:
    """The functions of this process, but for those that the collector was told to pass over."""
    functions: Functions = {}
    for x in gc.get_objects():
        if isinstance(x, FunctionType):
            functions.setdefault(_key(x.__code__), []).append(x)
    return functions


def _key(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def compiled(text: str, path: Path) -> CodeType:
    """Compile a module's text like an import does. SyntaxError: it is no Python."""
    return compile(text, str(path), "exec", dont_inherit=True)


def changed(old: CodeType, new: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    """The functions that differ, with those inside of them; None: what runs at import differs."""
    inner, others = zip(*map(_constants, (old, new)), strict=True)
    if old.co_flags & _FUNCTION:
        if old == new:
            return []
        found = [(old, new)]
    elif (old.co_code, old.co_names) != (new.co_code, new.co_names) or others[0] != others[1]:
        return None
    else:
        found = []
    if len(inner[0]) == len(inner[1]):
        for pair in zip(*inner, strict=True):
            below = changed(*pair)
            if below is None:
                return None
            found += below
    return found


def _constants(code: CodeType) -> tuple[list[CodeType], list[str]]:
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return inner, [repr(c) for c in code.co_consts if not isinstance(c, CodeType)]


def put(pairs: list[tuple[CodeType, CodeType]], functions: Functions) -> None:
    """Give the functions of this process their new code."""
    for old, new in pairs:
        for function in functions.get(_key(old), ()):
            function.__code__ = new


class Finder(importlib.abc.MetaPathFinder):
    """Finds one module with another text, and leaves all others to those that follow."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text = str(path), text

    def find_spec(
        self, name: str, path: Sequence[str] | None, _: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.origin != self.path:
            return None
        spec.loader = _Loader(name, self.path)
        spec.loader.text = self.text
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    text: str

    def get_code(self, _: str) -> CodeType:
        return compiled(self.text, Path(self.path))


def header(path: Path, row: int) -> range | None:
    """The lines of the statement at a row, without its body; None: it runs at import."""
    inside, lines = False, None
    found: ast.AST = ast.parse(path.read_text())
    while True:
        below = [
            x
            for x in ast.walk(found)
            if isinstance(x, ast.stmt) and x is not found and x.lineno <= row <= (x.end_lineno or 0)
        ]
        if not below:
            return lines if inside else None
        inside = inside or isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef)
        found = below[0]  # ast.walk goes by depth: the outermost of them
        body = getattr(found, "body", None)
        lines = range(found.lineno, body[0].lineno if body else (found.end_lineno or row) + 1)

"""The project's own files, for the tidy tests: listed once, parsed once."""

from __future__ import annotations

import ast
import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_NOT_OURS = {".git", ".venv", "build", "dist", "traces", "__pycache__", ".hypothesis"}


@functools.cache
def files() -> tuple[Path, ...]:
    """Every file that is or would be committed, relative to ROOT."""
    git = shutil.which("git")
    if git and (ROOT / ".git").exists():
        command = [git, "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        found = [Path(name) for name in listed.stdout.split("\0") if name]
    else:  # a copy of the tree without its history
        found = list(_walk(ROOT))
    return tuple(sorted(path for path in found if (ROOT / path).is_file()))


def _walk(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.name in _NOT_OURS or entry.name.endswith((".egg-info", "_cache")):
            continue
        if entry.is_dir():
            yield from _walk(entry)
        else:
            yield entry.relative_to(ROOT)


def python_files(*tops: str) -> list[Path]:
    """The Python files below some top folders, or all of them."""
    return [
        path for path in files() if path.suffix == ".py" and (not tops or path.parts[0] in tops)
    ]


@functools.cache
def text(path: Path) -> str:
    """A file's text, by its path below ROOT."""
    return (ROOT / path).read_text(encoding="utf-8")


@functools.cache
def tree(path: Path) -> ast.Module:
    """A Python file's syntax tree."""
    return ast.parse(text(path), str(path))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a Python file's syntax tree, as ast.walk finds them."""
    return tuple(ast.walk(tree(path)))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, those inside functions too; `from a import b` is a.b."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain, or "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""

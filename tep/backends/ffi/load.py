"""A search for a shared library that explains itself: small steps, each saying why it failed.

A library is looked for once; the answer, good or bad, is remembered. Nothing here knows what the
library is for: a caller gives the steps, and a function that accepts or refuses what they find.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tep.base.errors import BackendUnavailable

__all__ = ["Found", "Step", "env_step", "find", "forget", "path_step", "system_step", "wheel_step"]


@dataclass(frozen=True, slots=True)
class Found:
    """A library that was loaded and accepted.

    Attributes:
        library: the handle.
        path: what was given to the loader.
        found_via: name of the step that found it.
        note: what `accept` said of it, e.g. its version.
        tried: (step, why it failed) of the steps before.
    """

    library: ctypes.CDLL
    path: str
    found_via: str
    note: str
    tried: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One place to look.

    Attributes:
        name: how reports call it.
        paths: the candidates there; raises LookupError, saying why, where there is none.
        binding: the user named this place: if it fails, no later step is tried.
    """

    name: str
    paths: Callable[[], Iterable[str]]
    binding: bool = False


_REMEMBERED: dict[str, Found | BackendUnavailable] = {}


def find(
    what: str, steps: Sequence[Step], accept: Callable[[ctypes.CDLL], str], cure: str
) -> Found:
    """Load the first library that the steps find and `accept` takes; remember the outcome.

    Args:
        what: the library's name, also the name under which the outcome is remembered.
        steps: where to look, best first.
        accept: returns a note on a loaded library; raises LookupError or AttributeError with the
            reason if it is not usable.
        cure: what to do when nothing is found, for the message.

    Raises:
        BackendUnavailable: with each step and its reason. The same error every time.
    """
    known = _REMEMBERED.get(what)
    if known is None:
        known = _REMEMBERED[what] = _search(what, steps, accept, cure)
    if isinstance(known, BackendUnavailable):
        raise known
    return known


def forget(what: str) -> None:
    """Look for a library anew at the next find(). For tests."""
    _REMEMBERED.pop(what, None)


def _search(
    what: str, steps: Sequence[Step], accept: Callable[[ctypes.CDLL], str], cure: str
) -> Found | BackendUnavailable:
    tried: list[tuple[str, str]] = []
    for step in steps:
        failed = len(tried)
        try:
            for path in step.paths():
                library = _load(path, step.name, tried)
                if library is None:
                    continue
                try:
                    return Found(library, path, step.name, accept(library), tuple(tried))
                except (LookupError, AttributeError) as error:
                    tried.append((f"{step.name}: {path}", _reason(error)))
        except LookupError as error:
            tried.append((step.name, _reason(error)))
            continue
        if step.binding and len(tried) > failed:
            break
    return BackendUnavailable(f"no usable {what} on this machine; {cure}", tuple(tried))


def _load(path: str, name: str, tried: list[tuple[str, str]]) -> ctypes.CDLL | None:
    try:
        # Local, so that two builds of one library can live in one process; now, so that a missing
        # symbol is a reason here and not a crash later.
        return ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        tried.append((f"{name}: {path}", _reason(error)))
        return None


def _reason(error: Exception) -> str:
    return str(error.args[0]) if error.args else type(error).__name__


def env_step(variable: str) -> Step:
    """Look where an environment variable points; what the user names is binding."""

    def paths() -> Iterable[str]:
        value = os.environ.get(variable)
        if not value:
            raise LookupError("not set")
        return (value,)

    return Step(name=variable, paths=paths, binding=True)


def path_step(name: str, candidates: Sequence[str]) -> Step:
    """Look at fixed places."""

    def paths() -> Iterable[str]:
        there = [path for path in candidates if Path(path).exists()]
        if not there:
            raise LookupError(f"no file {' or '.join(candidates)}")
        return there

    return Step(name=name, paths=paths)


def wheel_step(distribution: str, filename: str) -> Step:
    """Look among the files that pip installed for a distribution."""

    def paths() -> Iterable[str]:
        try:
            files = importlib.metadata.files(distribution) or ()
        except importlib.metadata.PackageNotFoundError:
            raise LookupError("not installed") from None
        there = [str(Path(str(f.locate())).resolve()) for f in files if f.name == filename]
        if not there:
            version = importlib.metadata.version(distribution)
            raise LookupError(f"version {version} holds no {filename}")
        return there

    return Step(name=f"wheel {distribution}", paths=paths)


def system_step(soname: str) -> Step:
    """Look where the system's loader looks."""
    return Step(name="system", paths=lambda: (soname,))

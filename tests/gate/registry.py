"""The planting of a bug: a function that names the replacement, and a `with` that applies it.

The product knows nothing of this, and pays nothing for it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final
from unittest import mock

from tests.gate import mutated

__all__ = [
    "BUGS", "CHANNEL", "FAILOVER", "GROUP", "HANDLES", "IMM", "MEMBERSHIP", "POSTING", "WORKER",
    "Bug", "Change", "bug", "changed", "mistake", "planted",
]  # fmt: skip

Change = tuple[object, str, object]
"""A replacement: owner, attribute, new value; or a file of tep/, what stands there once, and what
stands there then.
"""


CHANNEL: Final = "tep/control/channel.py"
FAILOVER: Final = "tep/control/failover.py"
GROUP: Final = "tep/core/group.py"
HANDLES: Final = "tep/core/handles.py"
IMM: Final = "tep/core/imm.py"
MEMBERSHIP: Final = "tep/control/membership.py"
POSTING: Final = "tep/core/posting.py"
WORKER: Final = "tep/engine/worker.py"


@dataclass(frozen=True)
class Bug:
    """One mistake.

    Attributes:
        name: of the function that plants it.
        plant: returns what to replace.
        budget: seeds within which the search must find it.
    """

    name: str
    plant: Callable[[], list[Change]]
    budget: int


BUGS: dict[str, Bug] = {}


def mistake(path: str, was: str, becomes: str) -> list[Change]:
    """Have other text in a file of tep/, where `was` stands once."""
    return [(path, was, becomes)]


Plant = Callable[[], list[Change]]


def bug(budget: int = 200, into: dict[str, Bug] = BUGS) -> Callable[[Plant], Plant]:
    """Register a bug in a family, with the seeds it may take to be found."""

    def register(plant: Plant) -> Plant:
        into[plant.__name__] = Bug(plant.__name__, plant, budget)
        return plant

    return register


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Have a bug in the product."""
    with changed(BUGS[name].plant()):
        yield


@contextmanager
def changed(changes: list[Change]) -> Iterator[None]:
    """Have these changes in the product."""
    with ExitStack() as stack:
        for owner, attribute, replacement in changes:
            if isinstance(owner, str) and owner.endswith(".py"):
                stack.enter_context(_mistaken(Path(owner), attribute, str(replacement)))
                continue
            place = importlib.import_module(owner) if isinstance(owner, str) else owner
            _check_fits(getattr(place, attribute), replacement)
            stack.enter_context(mock.patch.object(place, attribute, replacement))
        yield


@contextmanager
def _mistaken(path: Path, was: str, becomes: str) -> Iterator[None]:
    """Have other text in a file: its functions get the code of that, as in the mutation run."""
    text = path.read_text()
    assert text.count(was) == 1, f"{path} has {was!r} {text.count(was)} times"
    pairs = mutated.changed(
        *(mutated.compiled(x, path) for x in (text, text.replace(was, becomes)))
    )
    module = importlib.import_module(".".join(path.with_suffix("").parts))
    outer = [(old, new) for old, new in pairs or () if "<locals>" not in old.co_qualname]
    assert outer, f"{path}: {was!r} -> {becomes!r} changes no function"
    for old, new in outer:
        _function(module, old.co_qualname).__code__ = new
    try:
        yield
    finally:
        for old, _ in outer:
            _function(module, old.co_qualname).__code__ = old


def _function(module: ModuleType, qualname: str) -> FunctionType:
    found: Any = module
    for name in qualname.split("."):
        found = inspect.getattr_static(found, name)
    found = getattr(found, "fget", None) or getattr(found, "__func__", found)
    assert isinstance(found, FunctionType), qualname
    return found


def _check_fits(original: object, replacement: object) -> None:
    """A replacement takes what is given to the original; else its TypeError is what is found."""
    if not (inspect.isroutine(original) and callable(replacement)):
        return
    takes = inspect.signature(replacement)
    given = inspect.signature(original).parameters.values()
    for needed in (given, [it for it in given if it.default is it.empty]):
        places = [it for it in needed if it.kind in {it.POSITIONAL_ONLY, it.POSITIONAL_OR_KEYWORD}]
        takes.bind(*places, **{it.name: it for it in needed if it.kind is it.KEYWORD_ONLY})

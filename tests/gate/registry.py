"""The planting of a bug: a function that names the replacement, and a `with` that applies it.

The product knows nothing of this, and pays nothing for it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

__all__ = ["BUGS", "Bug", "Change", "bug", "changed", "planted"]

Change = tuple[object, str, object]
"""A replacement: owner, attribute, new value."""


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


def bug(budget: int = 200) -> Callable[[Callable[[], list[Change]]], Callable[[], list[Change]]]:
    """Register a bug, with the seeds it may take to be found."""

    def register(plant: Callable[[], list[Change]]) -> Callable[[], list[Change]]:
        BUGS[plant.__name__] = Bug(plant.__name__, plant, budget)
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
            place = importlib.import_module(owner) if isinstance(owner, str) else owner
            _check_fits(getattr(place, attribute), replacement)
            stack.enter_context(mock.patch.object(place, attribute, replacement))
        yield


def _check_fits(original: object, replacement: object) -> None:
    """A replacement takes what is given to the original; else its TypeError is what is found."""
    if not (inspect.isroutine(original) and callable(replacement)):
        return
    takes = inspect.signature(replacement)
    given = inspect.signature(original).parameters.values()
    for needed in (given, [it for it in given if it.default is it.empty]):
        places = [it for it in needed if it.kind in {it.POSITIONAL_ONLY, it.POSITIONAL_OR_KEYWORD}]
        takes.bind(*places, **{it.name: it for it in needed if it.kind is it.KEYWORD_ONLY})

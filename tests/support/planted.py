"""Mistakes planted in the product by tests, and the search for a drawn run that shows one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]


class PlantedBugs(dict[str, Plant]):
    """The planted bugs of a test module, by name. An instance is the decorator that adds one."""

    def __call__(self, plant: Plant) -> Plant:
        self[plant.__name__] = plant
        return plant


def first_shown(
    violations_of: Callable[[random.Random], Sequence[object]], seeds: Iterable[int]
) -> int | None:
    """The first seed whose drawn run shows the planted bug; None: none does.

    A hang or an error of the protocol shows the bug as well as a violation does.
    """
    for seed in seeds:
        try:
            if violations_of(random.Random(seed)):
                return seed
        except Exception:  # noqa: BLE001  # a hang or an error of the protocol shows it too
            return seed
    return None

"""Mistakes planted in the product by tests, and the search for a drawn run that shows one.

A search tries the seed first that showed the bug the last time: known_seeds.json. Where that seed
no longer does, the search takes longer and finds the same; with TEP_KNOWN_SEEDS=write it notes what
it found.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]

KNOWN = Path(__file__).with_name("known_seeds.json")
_WORTH_NOTING = 4  # a search as short as that needs no hint


class PlantedBugs(dict[str, Plant]):
    """The planted bugs of a test module, by name. An instance is the decorator that adds one."""

    def __call__(self, plant: Plant) -> Plant:
        self[plant.__name__] = plant
        return plant


def shows(play: Callable[[int], object], seed: int) -> bool:
    """Return True if the run of a seed shows the bug: an oracle raises, or the product breaks."""
    try:
        play(seed)
    except Exception as error:  # noqa: BLE001  # a hang or an error of the product shows it too
        check_is_of_product(error)
        return True
    return False


def check_is_of_product(found: BaseException) -> None:
    """Fail the test if the patch that plants the bug has raised what was found: no finding."""
    error: BaseException | None = found
    while error is not None:
        if isinstance(error, TypeError | NameError | AttributeError):
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            of_patch = re.search("/tests/(gate|property)/", frame.f_code.co_filename)
            if of_patch or ".<locals>." in str(error):  # it takes other arguments than it is given
                pytest.fail(f"the patch that plants this bug is broken: {error!r}")
        error = error.__cause__ or error.__context__


def first_shown(name: str, play: Callable[[int], object], seeds: Iterable[int]) -> int | None:
    """The first seed that shows the planted bug `name`; None: none does.

    Args:
        name: of the bug; together with the module of `play`, what its known seed is noted under.
        play: plays the run of a seed; it raises where the run shows the bug.
        seeds: those to try, after the one that is known.
    """
    name = f"{play.__module__.rpartition('.')[2]}.{name}"
    with KNOWN.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # another worker may be writing it
        known = json.load(file).get(name)
    if known is not None and shows(play, known):
        return int(known)
    for tried, seed in enumerate(seeds):
        if shows(play, seed):
            if tried >= _WORTH_NOTING and os.environ.get("TEP_KNOWN_SEEDS") == "write":
                _note(name, seed)
            return seed
    return None


def _note(name: str, seed: int) -> None:
    with KNOWN.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        known = json.load(file) | {name: seed}
        file.seek(0)
        file.truncate()
        file.write(json.dumps(dict(sorted(known.items())), indent=1) + "\n")

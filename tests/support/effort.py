"""The size of searches in this run: few cases under `scripts/test --fast`, else all; under --long
seeds that no run before has tried.
"""

from __future__ import annotations

import os
import random

FAST = os.environ.get("TEP_PROFILE") == "fast"


def effort(whole: int, fast: int) -> int:
    """Examples, seeds or rounds: so many in the whole run, and so many under --fast."""
    return fast if FAST else whole


def fresh(count: int) -> range:
    """Seeds from TEP_FIRST_SEED on, which `scripts/test --long` draws and prints; drawn if unset.

    A failing test shows the first of them; with it in TEP_FIRST_SEED the same seeds are tried.
    """
    first = int(os.environ.get("TEP_FIRST_SEED") or random.SystemRandom().randrange(2**32))
    print(f"TEP_FIRST_SEED={first}")  # noqa: T201  # pytest shows it if the test fails
    return range(first, first + count)

"""The size of searches in this run: few cases under `scripts/test --fast`, else all."""

from __future__ import annotations

import os

FAST = os.environ.get("TEP_PROFILE") == "fast"


def effort(whole: int, fast: int) -> int:
    """Examples, seeds or rounds: so many in the whole run, and so many under --fast."""
    return fast if FAST else whole

"""The open file descriptors of this process. Not a test."""

from __future__ import annotations

import gc
from contextlib import suppress
from pathlib import Path

__all__ = ["descriptors", "open_descriptors", "opened_since"]


def descriptors() -> set[tuple[int, str]]:
    """Each open descriptor and what it leads to.

    What earlier tests have left is collected first: a descriptor of theirs that closes between two
    looks would hide one that leaks, or make the later look smaller than the first.
    """
    gc.collect()
    found = set()
    for entry in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # the listing's own descriptor, and what a thread closes meanwhile
            found.add((int(entry.name), str(entry.readlink())))
    return found


def open_descriptors() -> int:
    return len(descriptors())


def opened_since(before: set[tuple[int, str]]) -> set[tuple[int, str]]:
    """Return the descriptors that are open now and were not in an earlier `descriptors()`."""
    return descriptors() - before

"""How many file descriptors this process has open. Not a test."""

from __future__ import annotations

from pathlib import Path

__all__ = ["open_descriptors"]


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))

"""Memory fences in Python, on any processor, without a library.

A fence is a lock let go and taken again by its only user: an atomic release followed by an atomic
acquire of one word is a full barrier on x86 (locked instructions) and on AArch64 (the architecture
orders a store-release before a later load-acquire). It orders memory of this host; what a device
has mapped may need more, see tep/backends/efa/ways.py.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from typing import Final

__all__ = ["STRONG", "new_fence", "order_of"]

STRONG: Final = platform.machine().lower() in {"x86_64", "amd64", "i386", "i686"}
"""Whether the processor keeps stores in order, and loads, by itself."""


def new_fence() -> Callable[[], None]:
    """Make a full barrier for one thread at a time."""
    lock = threading.Lock()
    lock.acquire()  # noqa: SIM115, RUF100  # held for ever
    release, acquire = lock.release, lock.acquire

    def fence() -> None:
        release()
        acquire()

    return fence


def order_of(fence: Callable[[], None]) -> Callable[[], None]:
    """Return what keeps stores in order, and loads, on this processor: nothing, or a fence."""
    return _nothing if STRONG else fence


def _nothing() -> None:
    pass

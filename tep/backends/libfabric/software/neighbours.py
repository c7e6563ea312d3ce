"""Shared-memory endpoints of one process that met each other: who may be unmapped, and when.

The shm provider writes straight into its peer's memory. Between processes each side has a mapping
of its own; within one process both share one, and a write to an endpoint that has been closed is a
segmentation fault. So a closed NIC stays mapped until no neighbour knows its address any more.

Engines of one process may run on threads of their own: everything here holds one lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final

__all__ = ["OPEN", "arrive", "forget", "leave", "meet", "retire"]

_LOCK = threading.Lock()
_KNOWN_BY: Final[dict[bytes, set[bytes]]] = {}  # raw address -> those who may still write there
OPEN: Final[set[bytes]] = set()
"""Who is open. A hint: it may be closed the moment after."""
_RETIRED: Final[dict[bytes, Callable[[], None]]] = {}


def meet(mine: bytes, other: bytes) -> bool:
    """Take note that two NICs may write to each other from now on; False = `other` is
    closed.

    Both ways at once: the other one answers what it finds in its queue, before it has looked at
    the address that it answers to.
    """
    with _LOCK:
        if other not in OPEN:
            return False
        _KNOWN_BY.setdefault(other, set()).add(mine)
        _KNOWN_BY.setdefault(mine, set()).add(other)
        return True


def arrive(raw: bytes) -> None:
    """A NIC has been opened."""
    with _LOCK:
        OPEN.add(raw)


def forget(raw: bytes, who: bytes) -> None:
    """`who` will not write there any more; a closed NIC that nobody knows is unmapped now."""
    with _LOCK:
        known_by = _KNOWN_BY.get(raw)
        if known_by is None:
            return
        known_by.discard(who)
        if known_by:
            return
        del _KNOWN_BY[raw]
        unmap = _RETIRED.pop(raw, None)
    if unmap is not None:
        unmap()


def leave(raw: bytes) -> None:
    """A NIC writes nowhere any more: it forgets everybody, also those whom it never answered."""
    with _LOCK:
        known = [other for other, known_by in _KNOWN_BY.items() if raw in known_by]
    for other in known:
        forget(other, raw)


def retire(raw: bytes, unmap: Callable[[], None]) -> None:
    """Unmap a NIC that its owner has closed: now, or when its last neighbour has forgotten it."""
    with _LOCK:
        OPEN.discard(raw)
        if _KNOWN_BY.get(raw):
            _RETIRED[raw] = unmap
            return
        _KNOWN_BY.pop(raw, None)
    unmap()


def _after_fork() -> None:
    """In a forked child nothing is open: what stands here is its parent's."""
    global _LOCK
    _LOCK = threading.Lock()  # another thread of the parent may have held it
    OPEN.clear()
    _KNOWN_BY.clear()
    _RETIRED.clear()


os.register_at_fork(after_in_child=_after_fork)

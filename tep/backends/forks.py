"""What a forked child must not touch: each thing that holds a NIC is told so, in the child."""

from __future__ import annotations

import os
import weakref
from typing import Final, Protocol

__all__ = ["hold", "release"]


class _Held(Protocol):
    def orphan(self) -> None:
        """In a forked child: forget everything, call nothing. May come again."""


_HELD: Final[weakref.WeakSet[_Held]] = weakref.WeakSet()

hold: Final = _HELD.add
"""Have orphan() called in forked children from now on; the thing is held weakly."""

release: Final = _HELD.discard


def _after_fork() -> None:
    for held in list(_HELD):
        held.orphan()


os.register_at_fork(after_in_child=_after_fork)

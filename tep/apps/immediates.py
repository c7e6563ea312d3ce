"""Which app uses which immediates, so that all of them can share one engine. Numbers only."""

from __future__ import annotations

from typing import Final

__all__ = ["KVCACHE", "MOE", "RL"]

KVCACHE: Final = range(1, 1 << 28)
"""Granted one by one: to each request of a decoder, or to each claim of a KvReceiver."""

RL: Final = range(1 << 28, 6 << 28)
"""Kind, attempt and number of a weight update; see `tep.apps.rl.ports`."""

MOE: Final = range(8 << 28, 1 << 32)
"""Sixteenths of all immediates, one an all-to-all; `MoeConfig.imm_base` picks it."""

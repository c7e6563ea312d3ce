"""Systems that stand on tep's public names, and what they share: the immediates of each, so that
all of them can use one engine, and a number of the GPU that their predictions are for.
"""

from __future__ import annotations

from typing import Final

__all__ = ["HBM_BYTES_S", "KVCACHE", "MOE", "RL"]

KVCACHE: Final = range(1, 1 << 28)
"""Granted one by one: to each request of a decoder, or to each claim of a KvReceiver."""

RL: Final = range(1 << 28, 6 << 28)
"""Kind, attempt and number of a weight update; see `tep.apps.rl.ports`."""

MOE: Final = range(8 << 28, 1 << 32)
"""Sixteenths of all immediates, one an all-to-all; `MoeConfig.imm_base` picks it."""

HBM_BYTES_S: Final = 4.8e12
"""Memory of an H200, reads and writes together. Source: NVIDIA's datasheet, quoted."""

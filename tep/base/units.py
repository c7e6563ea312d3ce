"""Units and the few number types that are easily swapped; no arithmetic on devices lives here.

Sizes are bytes, rates are bits a second, simulated time is an integer count of picoseconds, host
time is float seconds. Only the CLI and the notebooks show microseconds or GB/s.
"""

from __future__ import annotations

from typing import Final, NewType

__all__ = ["IMM_MAX", "PS_PER_MS", "PS_PER_NS", "PS_PER_S", "PS_PER_US", "GiB", "Imm", "KiB", "MiB"]

Imm = NewType("Imm", int)
"""A 32-bit immediate as a number, 0 to 2**32 - 1; byte order is a backend's private matter."""

IMM_MAX: Final = 2**32 - 1

KiB: Final = 1024
MiB: Final = 1024 * KiB
GiB: Final = 1024 * MiB

PS_PER_NS: Final = 1_000
PS_PER_US: Final = 1_000_000
PS_PER_MS: Final = 1_000_000_000
PS_PER_S: Final = 1_000_000_000_000

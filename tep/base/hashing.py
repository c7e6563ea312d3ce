"""Counter-based randomness: a hash of (seed, stream, entity, index).

Scalar and vectorised forms are equal bit for bit. No state is kept, so an event more or less
somewhere does not shift the draws of anything else: shrinking and bisecting a failing scenario stay
stable.

The mixer is the finaliser of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom
number generators", with Stafford's variant 13 of the constants), over a sum with two odd constants.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["below", "below_array", "draw", "draw_array", "draws", "stream_key"]

_M64: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_INDEX: Final = 0xD1342543DE82EF95
_MUL1: Final = 0xBF58476D1CE4E5B9
_MUL2: Final = 0x94D049BB133111EB

U64s = npt.NDArray[np.uint64]


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * _MUL1 & _M64
    x = (x ^ (x >> 27)) * _MUL2 & _M64
    return x ^ (x >> 31)


def stream_key(seed: int, stream: int) -> int:
    """Make the key of one stream of one seed. Keep it: a draw from a key mixes only once."""
    return _mix((_mix((seed + _GOLDEN) & _M64) + stream * _GOLDEN) & _M64)


def draw(key: int, entity: int, index: int = 0) -> int:
    """Draw 64 bits for (entity, index), both 0 or more, from a stream's key."""
    x = (key + entity * _GOLDEN + index * _INDEX) & _M64
    x = (x ^ (x >> 30)) * _MUL1 & _M64
    x = (x ^ (x >> 27)) * _MUL2 & _M64
    return x ^ (x >> 31)


def draws(key: int, entity: int = 0) -> Iterator[int]:
    """Draw for one entity after the other, without end.

    This is no generator, since a signal handler that raises would end it.
    """
    return map(partial(draw, key), count(entity))


def below(bits: int, n: int) -> int:
    """Turn 64 drawn bits into a number 0 .. n - 1; 1 <= n <= 2**32."""
    return (bits >> 32) * n >> 32


def draw_array(key: int, entity: int | U64s, index: int | U64s = 0) -> U64s:
    """Draw for arrays: uint64 of the broadcast shape of both, shape (1,) for two ints."""
    x: U64s = np.atleast_1d(np.asarray(entity, np.uint64)) * np.uint64(_GOLDEN) + np.uint64(key)
    x = x + np.asarray(index, np.uint64) * np.uint64(_INDEX)
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MUL1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MUL2)
    x ^= x >> np.uint64(31)
    return x


def below_array(bits: U64s, n: int) -> npt.NDArray[np.int64]:
    """Turn drawn bits into int64 numbers 0 .. n - 1; 1 <= n <= 2**32."""
    return ((bits >> np.uint64(32)) * np.uint64(n) >> np.uint64(32)).astype(np.int64)

"""Where tasks live in a staging area of fixed size, and for whom each has to wait. Pure.

The watermark is kept by construction: whatever begins has a place of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from tep import UsageError
from tep.base.units import GiB

__all__ = ["ring_layout"]


@lru_cache(maxsize=1024)
def ring_layout(sizes: tuple[int, ...], capacity: int) -> tuple[Sequence[int], Sequence[int]]:
    """Place allocations one behind the other in a ring; each stays contiguous.

    Args:
        sizes: bytes of each allocation, in order of use.
        capacity: bytes of the ring.

    Returns:
        offsets: of each allocation. after: the largest number of an earlier allocation that must
        have ended, with all before it, before this one may be used; -1: none.

    Raises:
        UsageError: one is larger than the ring.
    """
    offsets, after = [], []
    live: deque[tuple[int, int, int]] = deque()
    head, latest = 0, -1
    for k, size in enumerate(sizes):
        if size > capacity:
            raise UsageError(
                f"task {k} needs {size / GiB:.2f} GiB of temporary memory, but the watermark is "
                f"{capacity / GiB:.2f} GiB; raise watermark_bytes (tep rl plan: --watermark-gib, "
                "tep rl run: --watermark-mib), or shard the tensor more finely"
            )
        start = head if head + size <= capacity else 0
        stop = start + size
        if start < head:
            # A new lap begins at 0, where the last lap's first allocation lies. All that is older
            # than that one must have ended, too.
            while live[0][1]:
                latest = live.popleft()[0]
        # From here on the live ones lie in the ring in the order of their numbers.
        while live and live[0][1] < stop and start < live[0][2]:
            latest = live.popleft()[0]
        if size:
            live.append((k, start, stop))
        offsets.append(start)
        after.append(latest)
        head = stop
    return offsets, after

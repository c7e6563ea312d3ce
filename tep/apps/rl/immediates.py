"""The immediates of a weight update: 32 bits = kind, attempt, number. Values only.

bits 28-31  kind      1 to 5, below; who has the others is in tep.apps.immediates
bits 16-27  attempt   of the update, modulo 4096: late arrivals of an aborted one never count
bits 0-15   number    task, or barrier and round
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Final

from tep import Routing, Scatter, UsageError, count_imms

__all__ = ["ATTEMPTS", "ROUTING", "Kind", "count_rows", "cut_rows", "make_imm"]

ATTEMPTS: Final = 1 << 12
_NUMBERS: Final = 1 << 16
_ROW_BYTES_MAX: Final = 1 << 28

ROUTING: Final = Routing(scatter_by="bytes")
"""Every NIC of both sides carries a part of every row: no NIC is the bottleneck of a task."""


class Kind(IntEnum):
    """What an immediate says."""

    READY = 1
    """A sub-mesh member has room for a task's shards."""
    SHARD = 2
    """A shard of a task is in the member's staging."""
    BARRIER = 3
    """A round of a barrier among the training ranks."""
    DATA = 4
    """A row of weights is in the rollout worker's region."""
    FINISH = 5
    """All training ranks have written everything; of the one that tells this rollout worker."""


def make_imm(kind: Kind, attempt: int, number: int = 0) -> int:
    """Encode an immediate.

    Raises:
        UsageError: a number beyond 16 bits.
    """
    if not 0 <= number < _NUMBERS:
        raise UsageError(f"{kind.name} number={number}; a schedule has {_NUMBERS} tasks at most")
    return kind << 28 | attempt % ATTEMPTS << 16 | number


def cut_rows(start: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Cut a range in rows that a scatter can carry: (start, bytes)."""
    for at in range(start, start + nbytes, _ROW_BYTES_MAX):
        yield at, min(_ROW_BYTES_MAX, start + nbytes - at)


def count_rows(sizes: Iterable[int], nlocal: int, nremote: int) -> int:
    """How many immediates rows of these sizes make at their target, under ROUTING."""
    return sum(count_imms(Scatter(nbytes, ROUTING), nlocal, nremote) for nbytes in sizes)

"""Parts of a chaos NIC that know nobody else: its state, regions, and completions.

What the NIC does with them is the matter of `chaos_target` and `chaos`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import Final

from tep.backends.base import (
    COMPLETION_BYTES,
    Completions,
    Entry,
    Kind,
    put_completion,
)
from tep.base.hashing import below
from tep.memory.source import Memory
from tep.sim.clock import FabricEnv
from tep.sim.draws import Draw
from tep.sim.driver import nobody
from tep.sim.faults import Chaos

__all__ = ["CompletionQueue", "NicState", "Region"]

# Plain numbers: a look at a member of an Enum takes as long as all else in a short function.
_IMM: Final = int(Kind.IMM)
_DOWN: Final = int(Kind.DOWN)
_MERGED: Final = (int(Kind.WRITE), _IMM, int(Kind.READ))


class NicState(Enum):
    """The life of a NIC."""

    UP = auto()
    DEAD = auto()  # killed: it still hands out completions
    CLOSED = auto()  # by its owner
    GONE = auto()  # of an incarnation that crashed: nobody polls it any more


class Region:
    """Registered memory on one NIC."""

    __slots__ = ("alive", "base", "nbytes", "ptr", "view")

    def __init__(self, memory: Memory, base: int) -> None:
        self.view = memoryview(memory.bytes_view())  # type: ignore[arg-type]  # numpy below 3.12
        self.ptr = memory.ptr
        self.nbytes = memory.nbytes
        self.base = base
        self.alive = True


class CompletionQueue:
    """Entries that a NIC has finished and its owner has not polled.

    Attributes:
        entries: those that poll() can return now.
        imms_polled: immediates handed out so far.
        down_seen: whether the owner has polled that the NIC is gone.
    """

    def __init__(self, env: FabricEnv, chaos: Chaos, draw: Draw, uid: int) -> None:
        self.entries: deque[Entry] = deque()
        self.waker: Callable[[], object] = nobody
        self.imms_polled = 0
        self.down_seen = False
        self._env = env
        self._chaos = chaos
        self._draw = draw
        self._uid = uid
        self._hidden: list[Entry] = []
        self._bursts = 0

    @property
    def held(self) -> int:
        """Count the entries that nobody has polled."""
        return len(self.entries) + len(self._hidden)

    def push(self, entry: Entry) -> None:
        """Add one entry, visible now or with the next burst."""
        burst_ps = self._chaos.burst_ps
        if burst_ps == 0:
            self.entries.append(entry)
            self.waker()
            return
        self._hidden.append(entry)
        if len(self._hidden) == 1:
            self._bursts += 1
            delay_ps = below(self._draw(self._uid + self._bursts, 1), burst_ps)
            self._env.call_at(self._env.now + delay_ps, self._reveal)

    def _reveal(self, _: object) -> None:
        self.flush()
        self.waker()

    def flush(self) -> None:
        self.entries.extend(self._hidden)
        self._hidden.clear()

    def wake(self, _: object) -> None:
        """Call the waker for another reason: there is room again."""
        self.waker()

    def poll(self, out: Completions) -> int:
        """Fill `out` with the oldest entries, at most `cqe_limit`; return how many."""
        entries = self.entries
        limit = min(len(out), self._chaos.cqe_limit)
        merge = self._chaos.merge_cqes
        found: list[Entry] = []
        while entries:
            entry = entries[0]
            both = _merged(found[-1], entry) if merge and found else None
            if both is not None:
                found[-1] = both
            elif len(found) < limit:
                found.append(entry)
            else:
                break
            entries.popleft()
            kind = entry[0]
            if kind == _IMM:
                self.imms_polled += 1
            elif kind == _DOWN:
                self.down_seen = True
        at = 0
        for entry in found:
            put_completion(out, at, *entry)
            at += COMPLETION_BYTES
        return len(found)


def _merged(first: Entry, second: Entry) -> Entry | None:
    """One entry for two that say the same, or None where they do not."""
    kind, status, count, imm, row, ctx, nbytes = first
    if status or kind not in _MERGED or (kind, status) != second[:2]:
        return None
    if imm != second[3] or ctx != second[5]:
        return None
    return (kind, status, count + second[2], imm, row, ctx, nbytes + second[6])

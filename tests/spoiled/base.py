"""The list of spoiled loopbacks, their world, and a healthy base to spoil.

Each spoiled loopback breaks one clause, and the contract's suite must fail it there. Nothing broken
lives here, but in the rooms beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tep.backends.base import (
    Completions,
    DomainCaps,
    ReadBatch,
    ReadRow,
    Row,
    Status,
    WriteBatch,
)
from tep.backends.loopback import Hub, LoopbackDomain, Way
from tests.support.loopbacks import AnyBatch, MortalLoopback
from tests.support.worlds import LoopbackWorld

AnyRow = Row | ReadRow

_DEPTH: Final = 64


@dataclass(frozen=True, slots=True)
class Spoiled:
    """One broken backend.

    Attributes:
        clause: the number of the clause whose tests must fail.
        make: the domain's class.
    """

    clause: int
    make: type[LoopbackDomain]

    @property
    def name(self) -> str:
        """The fault, and the clause that must notice it."""
        return f"{self.make.__name__}-C{self.clause}"

    def world(self) -> SpoiledWorld:
        """Make a world of such domains."""
        return SpoiledWorld(self.make)


SPOILED: Final[list[Spoiled]] = []
"""The spoiled loopbacks of those rooms that were imported; `test_spoiled` imports all."""


class SpoiledWorld(LoopbackWorld):
    """A loopback world whose NICs are of a given class; it gives up waiting soon."""

    turns_max = 4000
    patience_s = 0.25

    def __init__(self, make: type[LoopbackDomain]) -> None:
        super().__init__(make, sq_depth=_DEPTH, reads=_DEPTH, peer_timeout_s=0.1)

    def twin(self) -> SpoiledWorld:
        return SpoiledWorld(self.make)


def breaks(clause: int) -> Callable[[type[LoopbackDomain]], type[LoopbackDomain]]:
    """List a class as breaking a clause; a class may break several."""

    def listed(make: type[LoopbackDomain]) -> type[LoopbackDomain]:
        SPOILED.append(Spoiled(clause, make))
        return make

    return listed


class ByRow(MortalLoopback):
    """A healthy loopback whose rows can be spoiled one by one.

    Spoil `write_row`, `read_row`, or both at once in `_carry_row`.
    """

    def __init__(self, hub: Hub, name: str, nic: int, *, epoch: int, caps: DomainCaps) -> None:
        super().__init__(hub, name, nic, epoch=epoch, caps=caps)
        self.turns = 0
        self.nrows = 0
        self._later: list[tuple[int, AnyRow]] = []

    def _carry_out(self, way: Way, batch: AnyBatch, start: int, stop: int) -> None:
        if self.down:
            super()._carry_out(way, batch, start, stop)
            return
        for index, row in enumerate(batch.rows(start, stop), start):
            status = self._carry_row(row)
            self._finish(way, status, batch.ctx, row=index, nbytes=row.nbytes)

    def _carry_row(self, row: AnyRow) -> Status:
        return self.read_row(row) if isinstance(row, ReadRow) else self.write_row(row)

    def write_row(self, row: Row) -> Status:
        """Carry out one write."""
        self.nrows += 1
        return self._carry(self._writes, WriteBatch(1, *row, 0), 0, 1)

    def read_row(self, row: ReadRow) -> Status:
        """Carry out one read."""
        return self._carry(self._reads, ReadBatch(1, *row, None, 0), 0, 1)

    def poll(self, out: Completions) -> int:
        self.turns += 1
        due = [row for turn, row in self._later if turn <= self.turns]
        self._later = [(turn, row) for turn, row in self._later if turn > self.turns]
        for row in due:
            ByRow.read_row(self, row) if isinstance(row, ReadRow) else ByRow.write_row(self, row)
        return super().poll(out)

    def carry_later(self, row: AnyRow) -> None:
        """Move a row three polls from now."""
        self._later.append((self.turns + 3, row))

    def end_of(self, row: AnyRow) -> LoopbackDomain | Status:
        """Return the other end of a row."""
        return self._reach(row.peer)


def announce(nic: LoopbackDomain, imm: int) -> None:
    """Hand over an immediate at a NIC, without a row."""
    nic.hand_over(imm, b"")
    nic.waker()


def keys_of(port: LoopbackDomain) -> list[int]:
    """Keys that are valid at a port."""
    return list(port.targets)

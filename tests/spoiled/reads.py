"""Spoiled loopbacks, fourth part: reads (C29 to C33)."""

from __future__ import annotations

import ctypes
from typing import Final

from tep.backends.base import (
    Access,
    Completions,
    DomainCaps,
    DomainKey,
    Kind,
    ReadRow,
    Status,
)
from tep.backends.common import at
from tep.backends.loopback import Hub, LoopbackDomain, Way
from tep.memory.source import Memory
from tests.spoiled.base import ByRow, announce, breaks
from tests.support.loopbacks import AnyBatch, SlowLoopback

# ---------------------------------------------------------------------- C29


@breaks(29)
class SaysReadsAreWrites(ByRow):
    """Has one kind of completion for both ways."""

    def poll(self, out: Completions) -> int:
        n = super().poll(out)
        kinds = out["kind"][:n]
        kinds[kinds == Kind.READ] = Kind.WRITE
        return n


@breaks(29)
class BringsWhatItReadBefore(ByRow):
    """Keeps pages that it has read, and never asks the owner again."""

    def __init__(self, hub: Hub, name: str, nic: int, *, epoch: int, caps: DomainCaps) -> None:
        super().__init__(hub, name, nic, epoch=epoch, caps=caps)
        self._pages: dict[tuple[int, int, int], bytes] = {}

    def read_row(self, row: ReadRow) -> Status:
        page = self._pages.get((row.rkey, row.remote, row.nbytes))
        if page is not None:
            ctypes.memmove(row.local, page, row.nbytes)
            return Status.OK
        status = super().read_row(row)
        if status is Status.OK and row.nbytes:
            page = ctypes.string_at(row.local, row.nbytes)
            self._pages[row.rkey, row.remote, row.nbytes] = page
        return status


@breaks(29)
class TellsTheOwner(ByRow):
    """Sends an immediate with every read."""

    def read_row(self, row: ReadRow) -> Status:
        owner = self._reach(row.peer)
        if isinstance(owner, LoopbackDomain):
            announce(owner, 0)
        return super().read_row(row)


@breaks(29)
class LosesEmptyReads(ByRow):
    """Sends nothing for a row of no bytes, and hears nothing back."""

    def _carry_out(self, way: Way, batch: AnyBatch, start: int, stop: int) -> None:
        for index in range(start, stop):
            if way is self._writes or at(batch.nbytes, index):
                super()._carry_out(way, batch, index, index + 1)


@breaks(29)
class ReadsTheFirstRowForAll(ByRow):
    """Takes the column's first address for all rows."""

    def _carry_out(self, way: Way, batch: AnyBatch, start: int, stop: int) -> None:
        if way is self._reads and not isinstance(batch.dst, int):
            batch.dst = int(batch.dst[0])
        super()._carry_out(way, batch, start, stop)


# ---------------------------------------------------------------------- C30


@breaks(30)
class WritesAfterTheEnd(ByRow):
    """Says OK when the request has left, and writes when the answer is here."""

    def read_row(self, row: ReadRow) -> Status:
        self.carry_later(row)
        return super().read_row(row)


@breaks(30)
class ReadsWholeWords(ByRow):
    """Copies by eight bytes."""

    def read_row(self, row: ReadRow) -> Status:
        status = super().read_row(row)
        over = -row.nbytes % 8
        if status is Status.OK and over:
            ctypes.memmove(row.local + row.nbytes, bytes(over), over)
        return status


@breaks(30)
class ReadsIntoWithdrawnMemory(SlowLoopback, ByRow):
    """Forgets that a region's end here ends the reads into it."""

    def deregister(self, key: DomainKey) -> None:
        kept = self._reads.regions.get(key.lkey)
        super().deregister(key)
        if kept is not None:
            self._reads.regions[key.lkey] = kept


@breaks(30)
class ReadsOnAfterAnError(SlowLoopback, ByRow):
    """Says that the owner is gone, and writes what had left it before."""

    def __init__(self, hub: Hub, name: str, nic: int, *, epoch: int, caps: DomainCaps) -> None:
        super().__init__(hub, name, nic, epoch=epoch, caps=caps)
        self._late: list[ReadRow] = []

    def read_row(self, row: ReadRow) -> Status:
        status = super().read_row(row)
        self._late += [row] * (status is Status.UNREACHABLE)
        return status

    def poll(self, out: Completions) -> int:
        n = super().poll(out)
        if not (n or self.held):
            while self._late:
                row = self._late.pop()
                ctypes.memset(row.local, 1, row.nbytes)
        return n


# ---------------------------------------------------------------------- C31


@breaks(31)
class ReadsAnyMemory(ByRow):
    """Registers everything for reading, since it is no harm to look."""

    def register(self, memory: Memory, access: Access) -> DomainKey:
        return super().register(memory, access | Access.READABLE)


@breaks(31)
class WritesReadableMemory(ByRow):
    """Has one right for both ways."""

    def register(self, memory: Memory, access: Access) -> DomainKey:
        both = access | Access.TARGET if access.readable else access
        return super().register(memory, both)


@breaks(31)
class OneRightARegion(ByRow):
    """Has one right for both ways, and reading was asked for last."""

    def register(self, memory: Memory, access: Access) -> DomainKey:
        one = access & ~Access.TARGET if access.readable else access
        return super().register(memory, one)


@breaks(31)
class FlushesWhatItRefuses(ByRow):
    """Says that a row was not tried, where it was refused."""

    def read_row(self, row: ReadRow) -> Status:
        status = super().read_row(row)
        return Status.FLUSHED if status is Status.REMOTE_KEY else status


@breaks(31)
class ReadsOnAfterDeregister(SlowLoopback, ByRow):
    """Leaves the key valid for readers."""

    def deregister(self, key: DomainKey) -> None:
        kept = self.readable.get(key.rkey)
        super().deregister(key)
        if kept is not None:
            self.readable[key.rkey] = kept


# ---------------------------------------------------------------------- C32


@breaks(32)
class LosesReadsOfADeadNic(SlowLoopback):
    """Forgets what is out when its device dies."""

    def fail(self) -> None:
        self.held.clear()
        super().fail()


@breaks(32)
class ReadsOnAfterClose(SlowLoopback):
    """Carries out what was open, when it is closed."""

    def poll(self, out: Completions) -> int:
        while self._late_reads:
            row = self._late_reads.pop()
            ctypes.memset(row.local, 1, row.nbytes)
        return super().poll(out)

    def __init__(self, hub: Hub, name: str, nic: int, *, epoch: int, caps: DomainCaps) -> None:
        super().__init__(hub, name, nic, epoch=epoch, caps=caps)
        self._late_reads: list[ReadRow] = []

    def _fail_rows(self, way: Way, batch: AnyBatch, start: int, stop: int, status: Status) -> None:
        rows = batch.rows(start, stop)
        self._late_reads += [row for row in rows if isinstance(row, ReadRow)]
        super()._fail_rows(way, batch, start, stop, status)


# ---------------------------------------------------------------------- C33


@breaks(33)
class ReadsThroughTheFence(ByRow):
    """Has fences for what is written, and forgot what is read."""

    def read_row(self, row: ReadRow) -> Status:
        status = super().read_row(row)
        owner = self._reach(row.peer)
        if status is Status.UNREACHABLE and isinstance(owner, LoopbackDomain):
            mine, self.address = self.address, b"somebody else"
            status = super().read_row(row)
            self.address = mine
        return status


@breaks(33)
class FencesReadsForGood(ByRow):
    """Lets writes in again, and no reads."""

    was_fenced: Final[set[bytes]] = set()

    def fence(self, source: bytes, ctx: int) -> None:
        self.was_fenced.add(source)
        super().fence(source, ctx)

    def read_row(self, row: ReadRow) -> Status:
        return Status.UNREACHABLE if self.address in self.was_fenced else super().read_row(row)

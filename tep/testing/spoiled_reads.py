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
    ReadBatch,
    ReadRow,
    Status,
)
from tep.backends.columns import Rows
from tep.backends.hostcopy import read_rows
from tep.backends.loopback import Hub
from tep.backends.loopback_port import Port
from tep.memory import Memory
from tep.testing.spoiled_base import ByRow, breaks

__all__ = ["BringsWhatItReadBefore", "ReadsAnyMemory", "ReadsThroughTheFence", "WritesAfterTheEnd"]

_LATER: Final = 3  # polls


class _Later(ByRow):
    """Can carry a read out some polls from now."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # as LoopbackDomain's
        self._reads_later: list[tuple[int, ReadRow]] = []

    def read_later(self, row: ReadRow) -> None:
        """Carry a read out three polls from now."""
        self._reads_later.append((self.turns + _LATER, row))

    def poll(self, out: Completions) -> int:
        due = [row for turn, row in self._reads_later if turn <= self.turns]
        self._reads_later = [late for late in self._reads_later if late[0] > self.turns]
        for row in due:
            ByRow._read_row(self, row)
        return super().poll(out)


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
class TakesMoreReadsThanItSays(ByRow):
    """Counts what each post takes, and not what is out."""

    def post_read(self, batch: ReadBatch, start: int, stop: int) -> int:
        self._open_reads = 0
        return super().post_read(batch, start, stop)


@breaks(29)
class BringsWhatItReadBefore(ByRow):
    """Keeps pages that it has read, and never asks the owner again."""

    def __init__(
        self, hub: Hub, name: str, nic: int, *, epoch: int, caps: DomainCaps, seed: int | None
    ) -> None:
        super().__init__(hub, name, nic, epoch=epoch, caps=caps, seed=seed)
        self._pages: dict[tuple[int, int, int], bytes] = {}

    def _read_row(self, row: ReadRow) -> Status:
        page = self._pages.get((row.rkey, row.remote, row.nbytes))
        if page is not None:
            ctypes.memmove(row.local, page, row.nbytes)
            return Status.OK
        status = super()._read_row(row)
        if status is Status.OK and row.nbytes:
            page = ctypes.string_at(row.local, row.nbytes)
            self._pages[row.rkey, row.remote, row.nbytes] = page
        return status


@breaks(29)
class TellsTheOwner(ByRow):
    """Sends an immediate with every read."""

    def _read_row(self, row: ReadRow) -> Status:
        owner = self._reach(row.peer)
        if isinstance(owner, Port):
            owner.announce(0, 1)
        return super()._read_row(row)


@breaks(29)
class LosesEmptyReads(ByRow):
    """Sends nothing for a row of no bytes, and hears nothing back."""

    def _read_each(self, batch: ReadBatch, rows: Rows) -> None:
        for index, row in read_rows(batch, rows):
            if row.nbytes:
                super()._read_each(batch, slice(index, index + 1))


@breaks(29)
class ReadsTheFirstRowForAll(ByRow):
    """Takes the column's first address for all rows."""

    def _read_each(self, batch: ReadBatch, rows: Rows) -> None:
        if not isinstance(batch.dst, int):
            batch.dst = int(batch.dst[0])
        super()._read_each(batch, rows)


# ---------------------------------------------------------------------- C30


@breaks(30)
class WritesAfterTheEnd(_Later):
    """Says OK when the request has left, and writes when the answer is here."""

    def _read_row(self, row: ReadRow) -> Status:
        self.read_later(row)
        return super()._read_row(row)


@breaks(30)
class ReadsWholeWords(ByRow):
    """Copies by eight bytes."""

    def _read_row(self, row: ReadRow) -> Status:
        status = super()._read_row(row)
        over = -row.nbytes % 8
        if status is Status.OK and over:
            ctypes.memmove(row.local + row.nbytes, bytes(over), over)
        return status


@breaks(30, seed=6)
class ReadsIntoWithdrawnMemory(ByRow):
    """Forgets that a region's end here ends the reads into it."""

    def deregister(self, key: DomainKey) -> None:
        kept = self._sinks.get(key.lkey)
        super().deregister(key)
        if kept is not None:
            self._sinks[key.lkey] = kept


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
class FlushesWhatItRefuses(ByRow):
    """Says that a row was not tried, where it was refused."""

    def _read_row(self, row: ReadRow) -> Status:
        status = super()._read_row(row)
        return Status.FLUSHED if status is Status.REMOTE_KEY else status


@breaks(31)
class CutsReadsAtTheEnd(ByRow):
    """Reads what there is, and says OK."""

    def _read_row(self, row: ReadRow) -> Status:
        status = super()._read_row(row)
        return Status.OK if status is Status.REMOTE_RANGE else status


@breaks(31)
class BlamesTheFirstRead(ByRow):
    """Reports an error of the batch, not of its row."""

    def _finish_read(
        self, status: Status, ctx: int, *, row: int = 0, count: int = 1, nbytes: int = 0
    ) -> None:
        super()._finish_read(status, ctx, row=0, count=count, nbytes=nbytes)


@breaks(31, seed=2)
class ReadsOnAfterDeregister(ByRow):
    """Leaves the key valid for readers."""

    def deregister(self, key: DomainKey) -> None:
        kept = self.port._readable.get(key.rkey)
        super().deregister(key)
        if kept is not None:
            self.port._readable[key.rkey] = kept


# ---------------------------------------------------------------------- C32


@breaks(32)
class SaysOkToReadsOfTheDead(ByRow):
    """Takes a request that left for an answer."""

    def _read_row(self, row: ReadRow) -> Status:
        status = super()._read_row(row)
        return Status.OK if status is Status.UNREACHABLE else status


@breaks(32)
class NoReadsAfterADeath(ByRow):
    """Refuses reads of the dead for ever."""

    def post_read(self, batch: ReadBatch, start: int, stop: int) -> int:
        assert isinstance(batch.peer, int)
        gone = isinstance(self._reach(batch.peer), Status)
        return 0 if gone else super().post_read(batch, start, stop)


@breaks(32, seed=4)
class LosesReadsOnClose(ByRow):
    """Frees the queue with reads in it."""

    def _fail_reads(self, batch: ReadBatch, rows: Rows, status: Status) -> None:
        pass


@breaks(32, seed=4)
class ReadsOnAfterClose(ByRow):
    """Carries out what was open, when it is closed."""

    def poll(self, out: Completions) -> int:
        while self._late_reads:
            row = self._late_reads.pop()
            ctypes.memset(row.local, 1, row.nbytes)
        return super().poll(out)

    def __init__(
        self, hub: Hub, name: str, nic: int, *, epoch: int, caps: DomainCaps, seed: int | None
    ) -> None:
        super().__init__(hub, name, nic, epoch=epoch, caps=caps, seed=seed)
        self._late_reads: list[ReadRow] = []

    def _fail_reads(self, batch: ReadBatch, rows: Rows, status: Status) -> None:
        self._late_reads += [row for _, row in read_rows(batch, rows)]
        super()._fail_reads(batch, rows, status)


# ---------------------------------------------------------------------- C33


@breaks(33)
class ReadsThroughTheFence(ByRow):
    """Has fences for what is written, and forgot what is read."""

    def _read_row(self, row: ReadRow) -> Status:
        status = super()._read_row(row)
        owner = self._reach(row.peer)
        if status is Status.UNREACHABLE and isinstance(owner, Port):
            return owner.read_row(row, b"somebody else")
        return status


@breaks(33)
class FencesReadsForGood(ByRow):
    """Lets writes in again, and no reads."""

    was_fenced: Final[set[bytes]] = set()

    def fence(self, source: bytes, ctx: int) -> None:
        self.was_fenced.add(source)
        super().fence(source, ctx)

    def _read_row(self, row: ReadRow) -> Status:
        return Status.UNREACHABLE if self.address in self.was_fenced else super()._read_row(row)

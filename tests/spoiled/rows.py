"""Loopbacks that break one of C1 to C11 each: rows and immediates.

Every class is a plausible slip of a backend's author, beside the clause that must catch it.
"""

from __future__ import annotations

import dataclasses
import threading

import numpy as np

from tep.backends.base import (
    Access,
    Completions,
    DomainCaps,
    DomainKey,
    Kind,
    Row,
    Status,
    WriteBatch,
)
from tep.backends.loopback import Hub, LoopbackDomain, Way
from tep.memory.source import Memory
from tests.spoiled.base import ByRow, announce, breaks
from tests.support.loopbacks import AnyBatch

# ---------------------------------------------------------------------- C1, C2, C3


@breaks(1)
class CompletesTwice(ByRow):
    """Hands out every completion again, as one polled from two queues."""

    def _finish(
        self, way: Way, status: Status, ctx: int, *, row: int = 0, count: int = 1, nbytes: int = 0
    ) -> None:
        for _ in range(2 if self.nrows > 20 else 1):
            super()._finish(way, status, ctx, row=row, count=count, nbytes=nbytes)


@breaks(1)
class NeverCompletesOne(ByRow):
    """Loses its third completion."""

    calls = 0

    def _finish(
        self, way: Way, status: Status, ctx: int, *, row: int = 0, count: int = 1, nbytes: int = 0
    ) -> None:
        self.calls += 1
        if self.calls != 3:
            super()._finish(way, status, ctx, row=row, count=count, nbytes=nbytes)


@breaks(1)
class CompletesAtPostAndReadsTheSourceLater(ByRow):
    """Says OK when the row is queued, and reads its bytes when they leave."""

    def write_row(self, row: Row) -> Status:
        self.carry_later(row)
        return Status.OK


@breaks(1)
class KeepsOnly32BitsOfTheContext(ByRow):
    """Packs the context into half a work request id."""

    def _finish(
        self, way: Way, status: Status, ctx: int, *, row: int = 0, count: int = 1, nbytes: int = 0
    ) -> None:
        super()._finish(way, status, ctx & 0xFFFFFFFF, row=row, count=count, nbytes=nbytes)


@breaks(2)
class WaitsForNewsInPoll(ByRow):
    """Sleeps in poll() until there is something."""

    def __init__(self, hub: Hub, name: str, nic: int, *, epoch: int, caps: DomainCaps) -> None:
        super().__init__(hub, name, nic, epoch=epoch, caps=caps)
        self._news = threading.Event()

    def poll(self, out: Completions) -> int:
        if not self.arrived:
            self._news.wait(60)
        return super().poll(out)

    def close(self) -> None:
        self._news.set()
        super().close()


@breaks(2)
class WaitsForRoomInPost(WaitsForNewsInPoll):
    """Sleeps in post() until there is room."""

    def poll(self, out: Completions) -> int:
        return ByRow.poll(self, out)

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        if self._writes.open == self.caps.sq_depth:
            self._news.wait(60)
        return super().post(batch, start, stop)


@breaks(3)
class TakesMoreRowsThanItSays(ByRow):
    """Sends what it refused as well."""

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        taken = super().post(batch, start, stop)
        for row in batch.rows(start + taken, stop):
            self.write_row(row)
        return taken


@breaks(3)
class SaysItTookThemAll(ByRow):
    """Forgets that the queue was full."""

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        super().post(batch, start, stop)
        return stop - start


@breaks(3)
class StartsFromTheFirstRow(ByRow):
    """Ignores `start`, and so posts rows again."""

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        return super().post(batch, 0, stop - start)


# ---------------------------------------------------------------------- C4, C5


@breaks(4)
class HoldsRowsBehindAStuckMessage(ByRow):
    """Has one queue for all peers, with a message without a receive at its head."""

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        return 0 if self._stalled else super().post(batch, start, stop)


@breaks(4)
class OneBatchForAPoll(ByRow):
    """Reads the batch of the first completion, and takes it for all that came with it."""

    def poll(self, out: Completions) -> int:
        n = super().poll(out)
        mine = np.flatnonzero(out["kind"][:n] == Kind.WRITE)
        out["ctx"][mine] = out["ctx"][mine[:1]]
        return n


@breaks(5)
class DropsRowsThatAreOverwritten(ByRow):
    """A write-combining queue: only the last row to an address goes out."""

    def _carry_out(self, way: Way, batch: AnyBatch, start: int, stop: int) -> None:
        last = {row.dst: row for row in batch.rows(start, stop) if isinstance(row, Row)}
        for row in last.values():
            self.write_row(row)
        self._finish(way, Status.OK, batch.ctx, count=stop - start)


# ---------------------------------------------------------------------- C6, C7, C8


@breaks(6)
class ImmediateBeforeTheBytes(ByRow):
    """Reports the immediate when its header arrives."""

    def write_row(self, row: Row) -> Status:
        target = self.end_of(row)
        if row.imm is not None and isinstance(target, LoopbackDomain):
            announce(target, row.imm)
            self.carry_later(row._replace(imm=None))
            return Status.OK
        return super().write_row(row)


@breaks(6)
class LastByteAfterTheImmediate(ByRow):
    """Reports the immediate when all packets but the last are placed."""

    def write_row(self, row: Row) -> Status:
        if row.imm is None or row.nbytes < 2:
            return super().write_row(row)
        last = row.nbytes - 1
        self.carry_later(row._replace(src=row.src + last, dst=row.dst + last, nbytes=1, imm=None))
        return super().write_row(row._replace(nbytes=last))


@breaks(7)
class ZeroForRowsWithoutImmediate(ByRow):
    """Takes 0 for no immediate, on the way out."""

    def write_row(self, row: Row) -> Status:
        return super().write_row(row if row.imm is not None else row._replace(imm=0))


@breaks(7)
class EchoesTheImmediate(ByRow):
    """Puts what it sends into its own queue, too."""

    def write_row(self, row: Row) -> Status:
        if row.imm is not None:
            announce(self, row.imm)
        return super().write_row(row)


@breaks(8)
class LosesOneImmediate(ByRow):
    """Sends its thirtieth row without the immediate."""

    def write_row(self, row: Row) -> Status:
        return super().write_row(row._replace(imm=None) if self.nrows == 30 else row)


@breaks(8)
class DoublesOneImmediate(ByRow):
    """Sends its thirtieth row again after a lost acknowledgement."""

    def write_row(self, row: Row) -> Status:
        if self.nrows == 30:
            super().write_row(row)
        return super().write_row(row)


@breaks(8)
class KeepsOnly16BitsOfTheImmediate(ByRow):
    """Packs the immediate into 16 bits."""

    def write_row(self, row: Row) -> Status:
        imm = None if row.imm is None else row.imm & 0xFFFF
        return super().write_row(row._replace(imm=imm))


@breaks(8)
class SwapsTheBytesOfTheImmediate(ByRow):
    """Forgets that the wire is big-endian on one side only."""

    def write_row(self, row: Row) -> Status:
        imm = None if row.imm is None else int.from_bytes(row.imm.to_bytes(4, "little"), "big")
        return super().write_row(row._replace(imm=imm))


@breaks(8)
class FirstImmediateForTheWholeBatch(ByRow):
    """Takes the column's first value for all rows."""

    def _carry_out(self, way: Way, batch: AnyBatch, start: int, stop: int) -> None:
        if batch.imm is not None and not isinstance(batch.imm, int):
            batch.imm = int(batch.imm[0])
        super()._carry_out(way, batch, start, stop)


@breaks(8)
class ForgetsHowManyEqualImmediates(LoopbackDomain):
    """Merges equal immediates and says 1."""

    def poll(self, out: Completions) -> int:
        n = super().poll(out)
        seen = out[["kind", "imm"]][:n]
        again = (seen["kind"] == Kind.IMM) & (seen == np.roll(seen, 1))
        kept = out[:n][~again | (np.arange(n) == 0)]
        out[: len(kept)] = kept
        return len(kept)


@breaks(8)
class DropsWhatTheReceiveQueueDoesNotHold(ByRow):
    """Has 512 receives, and no way to hold senders up."""

    def write_row(self, row: Row) -> Status:
        target = self.end_of(row)
        if isinstance(target, LoopbackDomain) and len(target.arrived) >= 512:
            row = row._replace(imm=None)
        return super().write_row(row)


# ---------------------------------------------------------------------- C9, C10, C11


@breaks(9)
class SkipsEmptyRows(ByRow):
    """Completes rows of no bytes without sending anything."""

    def write_row(self, row: Row) -> Status:
        return super().write_row(row) if row.nbytes else Status.OK


@breaks(9)
class LosesRowsThatDoNothing(ByRow):
    """Sends nothing for a row of no bytes and no immediate, and hears nothing back."""

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        if batch.imm is None and isinstance(batch.nbytes, int) and batch.nbytes == 0:
            return stop - start
        return super().post(batch, start, stop)


@breaks(9)
class WantsASourceForEmptyRows(ByRow):
    """Looks up the source key of rows that have no source."""

    def write_row(self, row: Row) -> Status:
        if row.lkey not in self._writes.regions:
            return Status.LOCAL_KEY
        return super().write_row(row)


@breaks(10)
class WritesOneByteTooMany(ByRow):
    """Treats the last byte's address as the length."""

    def write_row(self, row: Row) -> Status:
        status = Status.REMOTE_RANGE
        if row.nbytes:
            status = super().write_row(row._replace(nbytes=row.nbytes + 1))
        return status if status is Status.OK else super().write_row(row)


@breaks(10)
class WritesWholeWords(ByRow):
    """Copies by eight bytes and forgets the rest."""

    def write_row(self, row: Row) -> Status:
        cut = row.nbytes % 8 if row.nbytes > 8 else 0
        return super().write_row(row._replace(nbytes=row.nbytes - cut))


@breaks(10)
class FirstSourceForTheWholeBatch(ByRow):
    """Takes the column's first address for all rows."""

    def _carry_out(self, way: Way, batch: AnyBatch, start: int, stop: int) -> None:
        if way is self._writes and not isinstance(batch.src, int):
            batch.src = int(batch.src[0])
        super()._carry_out(way, batch, start, stop)


@breaks(11)
@breaks(31)
class EverythingIsATarget(ByRow):
    """Registers all memory for writing, since it costs no more."""

    def register(self, memory: Memory, access: Access) -> DomainKey:
        return super().register(dataclasses.replace(memory, readonly=False), access | Access.TARGET)

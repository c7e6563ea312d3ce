"""Transfers of an agent: rows cut from descriptors, their submission and their progress."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from tep import MrDesc, MrHandle, Pages, TepError, Transfer, TransferEngine, checksum
from tep.compat.nixl import bindings as nixlBind
from tep.compat.nixl.bindings import Rows, nixlXferTelemetry
from tep.compat.nixl.wire import Grant, Region, Remote

__all__ = ["Numbers", "Request", "Rows2", "Side", "cut_rows"]

Failure = tuple[type[nixlBind.Error], str]

_PIECE = 8 << 20
"""Longest row, bytes: long descriptors are cut, so that all NICs carry a part."""


class Side(NamedTuple):
    """The descriptors of one side: agent, rows, region of each row, regions with handle or desc."""

    remote: Remote | None
    rows: Rows
    where: Rows
    held: list[tuple[Region, Any]]

    def pick(self, which: Rows) -> Side:
        return self._replace(rows=self.rows[which], where=self.where[which])


class Rows2(NamedTuple):
    """Rows of one length between two regions: offsets in both."""

    length: int
    mr: MrHandle
    region: Region
    desc: MrDesc
    here: Rows
    there: Rows


def cut_rows(local: Side, there: Side) -> list[Rows2]:
    """Join neighbours, cut long rows, and sort by regions and length."""
    starts = [
        side.rows[:, 0] - np.array([r[0].start for r in side.held], np.int64)[side.where]
        for side in (local, there)
    ]
    table = np.stack([local.where, there.where, *starts, local.rows[:, 1]], 1)
    table = table[table[:, 4] > 0]
    if len(table) > 1:
        before, after = table[:-1], table[1:]
        joined = (before[:, :2] == after[:, :2]).all(1)
        joined &= (before[:, 2:4] + before[:, 4:] == after[:, 2:4]).all(1)
        heads = np.flatnonzero(np.concatenate([[True], ~joined]))
        lengths = np.add.reduceat(table[:, 4], heads)
        table = table[heads]
        table[:, 4] = lengths
    pieces = -(-table[:, 4] // _PIECE)
    which = np.repeat(np.arange(len(table)), pieces)
    at = (np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * _PIECE
    total = table[which, 4]
    table = table[which]
    table[:, 2] += at
    table[:, 3] += at
    table[:, 4] = np.minimum(_PIECE, total - at)
    keys, group = np.unique(table[:, [0, 1, 4]], axis=0, return_inverse=True)
    found = []
    for index, (here, far, length) in enumerate(keys.tolist()):
        rows = table[group.ravel() == index]
        mr, (region, desc) = local.held[here][1], there.held[far]
        found.append(Rows2(length, mr, region, desc, rows[:, 2], rows[:, 3]))
    return found


class Numbers:
    """Immediates of one writer at one target, in order; those of failed transfers are not reused.

    Rows of a failed transfer may have been counted, so its number would count short: it is burnt.
    """

    def __init__(self, grant: Grant) -> None:
        self._count = grant.stop - grant.start
        self._round = itertools.cycle(range(grant.start, grant.stop))
        self.burnt: set[int] = set()

    def take(self) -> int:
        for found in itertools.islice(self._round, self._count):
            if found not in self.burnt:
                return found
        raise nixlBind.nixlBackendError(f"no immediate is left of {self._count}")


class Request:
    """One transfer of this agent.

    Attributes:
        op, remote, parts, notif: the arguments; all times are of the clock `now_s`. `on_over` is
            called, under the agent's lock, when a posting is over.
        state: "NEW", "PROC", "DONE" or "ERR".
        error: class and reason of a failure; a raised one would keep its caller's frames.
        number: number of this posting.
        imm: the immediate of its rows.
        under_way: True while its memory may be touched.
        asked_s: time of the last message to its agent.
    """

    def __init__(
        self,
        op: int,
        remote: Remote,
        parts: list[Rows2],
        rows: Rows,
        notif: bytes,
        now_s: Callable[[], float],
        on_over: Callable[[], object],
    ) -> None:
        self.op, self.remote, self.parts, self.notif = op, remote, parts, notif
        self.nrows = sum(len(part.here) for part in parts)
        self._descs, self._nbytes = len(rows), int(rows[:, 1].sum())
        self.state = "NEW"
        self.error: Failure | None = None
        self.number = self.imm = 0
        self.under_way = False
        self.transfers: list[Transfer] = []
        self._now_s, self._on_over = now_s, on_over
        self._left = 0
        self._begun_s = self._ended_s = self.posted_s = self.asked_s = 0.0

    def begin(self, number: int) -> None:
        """Start a posting, the first or a later one."""
        self.state, self.error, self.number = "PROC", None, number
        self.transfers, self.under_way = [], True
        self._begun_s = self._now_s()

    def submit(
        self,
        engine: TransferEngine,
        lock: AbstractContextManager[object],
        on_end: Callable[[], object],
    ) -> None:
        """Submit the rows as writes, or as reads; on_end() under the lock when all are back."""

        def done(transfer: Transfer) -> None:
            with lock:
                if transfer.error is not None:
                    self.fail(*_error_of(transfer.error, self.remote.name))
                step()

        def step() -> None:
            self._left -= 1
            if self._left == 0:
                on_end()

        self._left = 1
        try:
            for part in self.parts:
                here, there = Pages(part.here, stride=1), Pages(part.there, stride=1)
                self._left += 1
                try:
                    if self.op == nixlBind.NIXL_WRITE:
                        one = engine.submit_paged_writes(
                            part.length, (part.mr, here), (part.desc, there), self.imm, on_done=done
                        )
                    else:
                        one = engine.submit_paged_reads(
                            part.length, (part.desc, there), (part.mr, here), on_done=done
                        )
                except TepError:
                    self._left -= 1
                    raise
                self.transfers.append(one)
        except TepError as error:
            self.fail(*_error_of(error, self.remote.name))
            for one in self.transfers:
                one.cancel()
        step()

    def end(self, number: int | None = None) -> None:
        """End the posting of this number, or the current one if there is none."""
        self.under_way = False
        if self.error is None and self.state == "PROC" and number in {None, self.number}:
            self.state, self._ended_s = "DONE", self._now_s()
            self._on_over()

    def fail(self, kind: type[nixlBind.Error], why: str) -> None:
        """Fail the request, unless it has ended already."""
        if self.state == "PROC":
            self.state, self.error = "ERR", (kind, why)
            self._on_over()

    def checksums(self) -> list[int]:
        """Compute the checksum of each part at this end."""
        return [checksum(one.mr, one.here, one.length, places=one.there) for one in self.parts]

    def telemetry(self) -> nixlXferTelemetry:
        took_us = max(1, round((self._ended_s - self._begun_s) * 1e6))
        post_us = min(took_us, max(1, round((self.posted_s - self._begun_s) * 1e6)))
        start_us = round(self._begun_s * 1e6)
        return nixlXferTelemetry(start_us, post_us, took_us, self._nbytes, self._descs)


def _error_of(error: TepError, name: str) -> Failure:
    """Return NIXL's error for one of the engine's."""
    gone = any(word in str(error) for word in ("UNREACHABLE", "PEER_LOST", "STALE", "NIC_DOWN"))
    kind = nixlBind.nixlRemoteDisconnectError if gone else nixlBind.nixlBackendError
    return kind, f"agent {name!r}: {error}"

"""Threads that copy beside the one that sends or reads: the option `copy_threads`.

The kernel's copies and memmove run without the interpreter's lock, so that a second thread moves
its share at the same time, where the memory's bandwidth is more than one core uses. What is handed
out is cut into one share a thread; a call returns when all shares are done. Rows of one call land
in no order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Final, TypeVar, cast

from tep.backends.base import Column
from tep.backends.hostcopy import HostRegion
from tep.backends.local.copying import Failures, Mover, Target, cut, extent

__all__ = ["Crew", "SharedMover"]

_SHARE_BYTES_MIN: Final = 512 * 1024
"""Less than this is not worth handing to another thread, which takes some 40 us (measured)."""

_PAGE: Final = 4096

_MAPPED_ROW_MIN: Final = 256 * 1024
"""Shorter rows into a mapping are a call each, and two threads would take turns at the lock."""

R = TypeVar("R")


class _Helper(threading.Thread):
    """One thread of a crew; it ends with None in its inbox."""

    def __init__(self) -> None:
        super().__init__(name="tep-copier", daemon=True)
        self.inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.outbox: SimpleQueue[object] = SimpleQueue()

    def run(self) -> None:
        while (share := self.inbox.get()) is not None:
            try:
                found = share()
            except BaseException as error:  # noqa: BLE001  # raised where the share was asked for
                found = error
            self.outbox.put(found)
            share = found = None  # hold nobody's memory while waiting


class Crew:
    """Who copies for one NIC.

    Args:
        threads: how many, with the thread that asks; the others start now.

    Raises:
        RuntimeError: no thread can be started.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._helpers = [_Helper() for _ in range(threads - 1)]
        for helper in self._helpers:
            helper.start()

    def run(self, shares: list[Callable[[], R]]) -> list[R]:
        """Carry out at most one share a thread; return what each returned, in order."""
        assert 1 <= len(shares) <= self.threads, (len(shares), self.threads)
        busy = self._helpers[: len(shares) - 1]
        for helper, share in zip(busy, shares[1:], strict=True):
            helper.inbox.put(share)
        try:
            mine = shares[0]()
        finally:  # nobody may copy any more when this returns
            others = [helper.outbox.get() for helper in busy]
        for found in others:
            if isinstance(found, BaseException):
                raise found
        return [mine, *cast("list[R]", others)]

    def close(self) -> None:
        """Let the threads end; none of them copies."""
        for helper in self._helpers:
            helper.inbox.put(None)


class SharedMover:
    """A Mover whose long calls are shared by a crew; one for each NIC and direction.

    Args:
        crew: who copies.
        make: makes a mover; each thread has one of its own.
    """

    def __init__(self, crew: Crew, make: Callable[[], Mover]) -> None:
        self._crew = crew
        self._movers = [make() for _ in range(crew.threads)]
        self.name = self._movers[0].name

    def move_row(self, pid: int, target: Target, src: int, dst: int, nbytes: int) -> int:
        """Copy one row; return 0, or errno."""
        n = min(self._crew.threads, nbytes // _SHARE_BYTES_MIN)
        if n <= 1:
            return self._movers[0].move_row(pid, target, src, dst, nbytes)
        size = -(-nbytes // n // _PAGE) * _PAGE
        shares: list[Callable[[], int]] = []
        for mover, at in zip(self._movers, range(0, nbytes, size), strict=False):
            size_here = min(size, nbytes - at)
            shares.append(partial(mover.move_row, pid, target, src + at, dst + at, size_here))
        codes = self._crew.run(shares)
        return next((code for code in codes if code), 0)

    def move_rows(
        self, pid: int, target: Target, source: HostRegion, src: Column, dst: Column, nbytes: Column
    ) -> Failures:
        """Copy rows between two regions, as a Mover does."""
        n = next(len(column) for column in (src, dst, nbytes) if not isinstance(column, int))
        longest, total = extent(nbytes, n)
        parts = min(self._crew.threads, total // _SHARE_BYTES_MIN, n)
        if parts <= 1 or (target.mapped is not None and longest < _MAPPED_ROW_MIN):
            return self._movers[0].move_rows(pid, target, source, src, dst, nbytes)
        shares: list[Callable[[], Failures]] = []
        starts = [n * k // parts for k in range(parts + 1)]
        for mover, start, stop in zip(self._movers, starts, starts[1:], strict=False):
            rows = slice(start, stop)
            columns = cut(src, rows), cut(dst, rows), cut(nbytes, rows)
            shares.append(partial(mover.move_rows, pid, target, source, *columns))
        failures: Failures = []
        for start, found in zip(starts, self._crew.run(shares), strict=False):
            failures += [(start + row, code) for row, code in found]
        return failures

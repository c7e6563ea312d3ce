"""Objects of memory that one process offers and others pull by one-sided reads. No Ray, no torch.

Rule 1: memory is released only when no row can touch it: a pull deregisters its regions when all
its reads have settled, even if nobody waits for it any more.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from tep import (
    Access,
    Cancelled,
    ClosedError,
    MrDesc,
    MrHandle,
    TepError,
    Transfer,
    TransferEngine,
    WaitTimeout,
)

__all__ = ["Pull", "Puller"]

_SETTLE_S: Final = 5.0
"""Time that a failed pull waits for its rows before it reports that they are not back, seconds."""

_LOOK_S: Final = 0.25
"""Interval at which a wait checks for a cancel, seconds."""

_NOTES_MAX: Final = 4096


class Pull:
    """The transfer of one object to this process; `Puller.pull` makes it."""

    def __init__(self, puller: Puller, object_id: str) -> None:
        self._puller, self._id = puller, object_id
        self._reads: list[Transfer] = []
        self._cancelled = False
        self._open = 1  # reads that have not settled, and `submit`
        self._lock = threading.Lock()
        self._regions: list[MrHandle] = []

    def submit(self, pieces: Sequence[tuple[bytes, Any]]) -> None:
        """Submit the reads, once. On a TepError, those submitted before it end by themselves."""
        engine = self._puller.engine
        try:
            for _, memory in pieces:
                self._regions.append(engine.reg_mr(memory, access=Access.SINK)[0])
            for (desc, _), region in zip(pieces, self._regions, strict=True):
                source, target = (MrDesc.from_bytes(desc), 0), (region, 0)
                nbytes = region.memory.nbytes
                with self._lock:
                    self._open += 1
                try:
                    read = engine.submit_single_read(nbytes, source, target, on_done=self._ended)
                except TepError:
                    self._ended()
                    raise
                self._reads.append(read)
                if self._cancelled:  # meanwhile
                    read.cancel()
        except TepError:
            self.cancel()
            raise
        finally:
            self._ended()

    def wait(self, timeout_s: float = math.inf) -> None:
        """Wait until all bytes are here.

        Raises:
            WaitTimeout: not yet; wait again, or cancel.
            TepError: a read failed, or the pull was cancelled. No row is in flight any more, unless
                a note of the error says so.
        """
        end_s = time.monotonic() + timeout_s
        try:
            for read in self._reads:
                while not self._cancelled:
                    left_s = max(0.0, end_s - time.monotonic())
                    try:
                        read.wait(min(left_s, _LOOK_S))
                        break
                    except WaitTimeout:
                        if left_s <= _LOOK_S and not self._cancelled:
                            raise
        except WaitTimeout:
            raise
        except TepError as error:
            self.cancel()
            self._settle(error)
            raise
        if self._cancelled:
            aborted = Cancelled(f"the transfer of {self._id} was aborted")
            self._settle(aborted)
            if not all(read.ok for read in self._reads):
                raise aborted

    def cancel(self) -> None:
        """Cancel the pull; `wait` then raises unless all bytes are here already."""
        self._cancelled = True
        for read in self._reads:
            read.cancel()

    def _settle(self, error: TepError) -> None:
        """Wait a while until no row is in flight; if some still are, add a note to the error."""
        end_s = time.monotonic() + _SETTLE_S
        for read in self._reads:
            try:
                read.wait(max(0.0, end_s - time.monotonic()))
            except WaitTimeout:
                note = f"rows are still in flight after {_SETTLE_S:g} s; their memory is kept"
                error.add_note(f"{self._id}: {note}")
                return
            except TepError:
                continue

    def _ended(self, _read: Transfer | None = None) -> None:
        with self._lock:
            self._open -= 1
            if self._open:
                return
        self._puller.over(self._id, self)
        for region in self._regions:
            with contextlib.suppress(ClosedError):  # the engine was closed, and with it the regions
                self._puller.engine.deregister(region)


class _Offered(NamedTuple):
    """A registered piece of memory, and the number of objects that it is in."""

    region: MrHandle
    desc: bytes
    objects: int


class Puller:
    """Offers objects of this process, and pulls those of others. Any thread may call.

    Args:
        engine: moves the bytes; its backend must have reads.
    """

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self._lock = threading.RLock()  # of what is offered
        self._offered: dict[tuple[int, int], _Offered] = {}
        self._objects: dict[str, list[tuple[int, int]]] = {}
        # The engine's worker waits for this one when a pull ends, so no call of the engine is made
        # under it.
        self._begun = threading.Lock()
        self._pulls: dict[str, list[Pull]] = {}
        self._seen: OrderedDict[str, bool] = OrderedDict()  # pulled: True, only aborted: False

    def offer(self, object_id: str, pieces: Sequence[tuple[int, int, Any]]) -> list[bytes]:
        """Register the pieces of an object, until `withdraw`, and describe them for `pull`.

        A piece that is in another object already is not registered again.

        Args:
            object_id: the object's id; an object offered again keeps its descriptors.
            pieces: (address, bytes, memory), contiguous; a piece without bytes gets b"".

        Raises:
            TepError: memory that cannot be registered, or a backend without reads.
        """
        with self._lock:
            if object_id in self._objects:
                keys = self._objects[object_id]
                return [self._offered[key].desc if key[1] else b"" for key in keys]
            taken: list[tuple[int, int]] = []
            self._objects[object_id] = taken
            try:
                return [self._take(taken, *piece) for piece in pieces]
            except TepError:
                self.withdraw(object_id)
                raise

    def _take(self, taken: list[tuple[int, int]], address: int, nbytes: int, memory: Any) -> bytes:
        key = address, nbytes
        if not nbytes:
            taken.append(key)
            return b""
        known = self._offered.get(key)
        if known is None:
            access = Access.SOURCE | Access.READABLE
            region, desc = self.engine.reg_mr(memory, access=access)
            known = _Offered(region, desc.to_bytes(), 0)
        self._offered[key] = known._replace(objects=known.objects + 1)
        taken.append(key)
        return known.desc

    def withdraw(self, object_id: str) -> None:
        """Stop offering an object: reads of it fail from now on. Ignore an unknown one."""
        with self._lock:
            for key in self._objects.pop(object_id, ()):
                if not key[1]:
                    continue
                left = self._offered[key]._replace(objects=self._offered[key].objects - 1)
                if left.objects:
                    self._offered[key] = left
                else:
                    del self._offered[key]
                    self.engine.deregister(left.region)

    def pull(self, object_id: str, pieces: Sequence[tuple[bytes, Any]]) -> Pull:
        """Begin to read an object.

        Args:
            object_id: for `abort`.
            pieces: each with bytes: the owner's descriptor, and memory as long, writable and
                contiguous.

        Raises:
            Cancelled: it was aborted before it began.
            TepError: memory that cannot be registered, a descriptor that is none.
        """
        pull = Pull(self, object_id)
        with self._begun:
            if self._note(object_id, pulled=True) is False:
                raise Cancelled(f"the transfer of {object_id} was aborted before it began")
            self._pulls.setdefault(object_id, []).append(pull)
        pull.submit(pieces)
        return pull

    def abort(self, object_id: str) -> None:
        """End the pulls of an object; one that has not begun yet will not begin."""
        with self._begun:
            pulls = list(self._pulls.get(object_id, ()))
            if not pulls and object_id not in self._seen:
                self._note(object_id, pulled=False)
        for pull in pulls:
            pull.cancel()

    def _note(self, object_id: str, *, pulled: bool) -> bool | None:
        """Record that an object was pulled or aborted; return the earlier record."""
        known = self._seen.pop(object_id, None)
        self._seen[object_id] = pulled
        while len(self._seen) > _NOTES_MAX:
            self._seen.popitem(last=False)
        return known

    def over(self, object_id: str, pull: Pull) -> None:
        """Forget a pull that has settled; called by the pull."""
        with self._begun:
            pulls = self._pulls.get(object_id, [])
            if pull in pulls:
                pulls.remove(pull)
            if not pulls:
                self._pulls.pop(object_id, None)

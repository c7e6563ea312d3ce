"""Loopbacks that break one of C11 to C23 or C28 each: errors, ends, promises.

What writes and reads can get wrong in the same way breaks the clauses of both (C29, C31, C32).

Every class is a plausible slip of a backend's author, beside the clause that must catch it.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import weakref
from collections.abc import Callable
from typing import Final

from tep.backends.base import (
    Access,
    Batch,
    Completions,
    DomainCaps,
    DomainKey,
    Kind,
    Row,
    Status,
    WriteBatch,
)
from tep.backends.loopback import Hub, LoopbackDomain, Message, Way
from tep.base.errors import BadDescriptor
from tep.base.units import KiB
from tep.memory.source import Memory
from tests.spoiled.base import AnyRow, ByRow, breaks, keys_of
from tests.support.loopbacks import Held, SlowLoopback

_PARENT: Final = os.getpid()
_ELSEWHERE: Final = itertools.count(1)
_DEAF_POLLS: Final = 30


# ---------------------------------------------------------------------- C11


@breaks(11)
class TakesAnyKey(ByRow):
    """Finds memory whatever the key says."""

    def write_row(self, row: Row) -> Status:
        status = super().write_row(row)
        target = self.end_of(row)
        if status is Status.REMOTE_KEY and isinstance(target, LoopbackDomain):
            for known in keys_of(target):
                status = super().write_row(row._replace(rkey=known))
        return status


@breaks(11)
class SwapsAKey(ByRow):
    """Uses the newest key of the peer for every row, whatever the row says."""

    def write_row(self, row: Row) -> Status:
        target = self.end_of(row)
        if isinstance(target, LoopbackDomain):
            row = row._replace(rkey=[row.rkey, *keys_of(target)][-1])
        return super().write_row(row)


@breaks(11)
@breaks(31)
class CutsRowsAtTheEndOfTheRegion(ByRow):
    """Writes or reads what fits, and says OK."""

    def _carry_row(self, row: AnyRow) -> Status:
        status = super()._carry_row(row)
        nbytes = row.nbytes
        while status is Status.REMOTE_RANGE and nbytes:
            nbytes -= 1
            status = super()._carry_row(row._replace(nbytes=nbytes))
        return Status.OK if status is Status.REMOTE_RANGE else status


@breaks(11)
@breaks(31)
class BlamesTheFirstRow(ByRow):
    """Reports an error of the batch, not of its row."""

    def _finish(
        self, way: Way, status: Status, ctx: int, *, row: int = 0, count: int = 1, nbytes: int = 0
    ) -> None:
        super()._finish(way, status, ctx, row=0, count=count, nbytes=nbytes)


@breaks(11)
class NeverRecoversFromAnError(ByRow):
    """Leaves its queue pair in the error state."""

    broken = False

    def write_row(self, row: Row) -> Status:
        status = Status.FLUSHED if self.broken else super().write_row(row)
        self.broken |= status is not Status.OK
        return status


# ---------------------------------------------------------------------- C12 to C15


@breaks(12)
class NewIdForEveryConnect(ByRow):
    """Makes a new connection each time it is asked."""

    def connect(self, peer: bytes) -> int:
        self._peer_ids.clear()
        return super().connect(peer)


@breaks(12)
class OneIdForAllNicsOfAPeer(ByRow):
    """Knows peers by host and not by NIC."""

    def connect(self, peer: bytes) -> int:
        return 0 if super().connect(peer) >= 0 else -1


_CALLERS: Final[weakref.WeakKeyDictionary[LoopbackDomain, set[bytes]]] = weakref.WeakKeyDictionary()


@breaks(12)
class OneConnectionAPair(ByRow):
    """Takes the peer's connection in place of its own, where both have asked for one."""

    def connect(self, peer: bytes) -> int:
        found = super().connect(peer)
        target = self._reach(found)
        if isinstance(target, LoopbackDomain):
            _CALLERS.setdefault(target, set()).add(self.address)
        return found

    def write_row(self, row: Row) -> Status:
        target = self.end_of(row)
        undone = isinstance(target, LoopbackDomain) and target.address in _CALLERS.get(self, ())
        return Status.UNREACHABLE if undone else super().write_row(row)


@breaks(13)
class OneAddressForAllNics(ByRow):
    """Gives out the address of its engine's first NIC."""

    def __init__(self, hub: Hub, name: str, nic: int, *, epoch: int, caps: DomainCaps) -> None:
        super().__init__(hub, name, nic, epoch=epoch, caps=caps)
        self.address = hub.address(name, 0, epoch)


@breaks(13)
class TakesGarbageForAnAddress(ByRow):
    """Inserts whatever bytes it is given."""

    def connect(self, peer: bytes) -> int:
        try:
            return super().connect(peer)
        except BadDescriptor:
            return 0


@breaks(13)
class WritesToTheNextIncarnation(ByRow):
    """Finds peers by name, as a NIC that knows an IP address would; the new keys equal the old."""

    def _reach(self, peer: int) -> LoopbackDomain | Status:
        found = super()._reach(peer)
        if found is Status.STALE_PEER:
            name = self._peer_addresses[peer][20:]
            known = self._hub._latest.values()
            return next((port for port in known if port.address[20:] == name), found)
        return found

    def write_row(self, row: Row) -> Status:
        status = super().write_row(row)
        target = self.end_of(row)
        if status is Status.REMOTE_KEY and isinstance(target, LoopbackDomain):
            key, region = next(iter(target.targets.items()))
            return super().write_row(row._replace(rkey=key, dst=region.base))
        return status


@breaks(14)
@breaks(32)
class LosesOpenRowsOnClose(SlowLoopback):
    """Frees the queue with rows in it."""

    def close(self) -> None:
        self.held.clear()
        super().close()


@breaks(14)
class LosesOpenMessagesOnClose(ByRow):
    """Frees the queue with a message in it."""

    def close(self) -> None:
        self._stalled.clear()
        super().close()


@breaks(14)
class FlushesAgainOnEveryClose(ByRow):
    """Runs its goodbye each time it is closed."""

    def close(self) -> None:
        super().close()
        self._finish(self._writes, Status.FLUSHED, 1)


@breaks(15)
class WorksOnAfterClose(ByRow):
    """Does not look whether it is closed."""

    def _check_open(self) -> None:
        pass


# ---------------------------------------------------------------------- C16 to C20


@breaks(16)
class WritesAfterDeregister(SlowLoopback):
    """Leaves the key valid."""

    def deregister(self, key: DomainKey) -> None:
        pass


@breaks(17)
class SilentAboutDeadPeers(ByRow):
    """Retries for ever."""

    def _finish(
        self, way: Way, status: Status, ctx: int, *, row: int = 0, count: int = 1, nbytes: int = 0
    ) -> None:
        if status is not Status.UNREACHABLE:
            super()._finish(way, status, ctx, row=row, count=count, nbytes=nbytes)


@breaks(17)
class KeepsMessagesForTheDead(ByRow):
    """Takes a peer that is gone for one that posts no receive."""

    def _try_send(self, message: Message) -> Status | None:
        status = super()._try_send(message)
        return None if status is Status.UNREACHABLE else status


@breaks(17)
class DeadOnceItWasDeaf(ByRow):
    """Gives up a peer that has not polled for a while, and does not ask again."""

    def __init__(self, hub: Hub, name: str, nic: int, *, epoch: int, caps: DomainCaps) -> None:
        super().__init__(hub, name, nic, epoch=epoch, caps=caps)
        self._silent = 0

    def poll(self, out: Completions) -> int:
        deaf = [
            k
            for k, port in enumerate(self._peers)
            if isinstance(port, LoopbackDomain) and port.arrived
        ]
        self._silent = self._silent + 1 if deaf else 0
        if self._silent > _DEAF_POLLS:
            for peer in deaf:
                self._peers[peer] = Status.UNREACHABLE
        return 0 if 0 < self._silent <= _DEAF_POLLS else super().poll(out)

    def _reach(self, peer: int) -> LoopbackDomain | Status:
        found = self._peers[peer]
        return found if isinstance(found, Status) else super()._reach(peer)


@breaks(17)
@breaks(32)
class SaysOkToTheDead(ByRow):
    """Takes a row that left for one that arrived."""

    def _carry_row(self, row: AnyRow) -> Status:
        status = super()._carry_row(row)
        return Status.OK if status is Status.UNREACHABLE else status


@breaks(17)
@breaks(32)
class RefusesForEverOnceThePeerIsDead(ByRow):
    """Says full where it means gone."""

    def _post(self, way: Way, batch: Batch, start: int, stop: int) -> int:
        assert isinstance(batch.peer, int)
        gone = isinstance(self._reach(batch.peer), Status)
        return 0 if gone else super()._post(way, batch, start, stop)


@breaks(18)
@breaks(29)
class TakesMoreThanItsDepth(ByRow):
    """Counts what each post takes, and not what is out."""

    def _post(self, way: Way, batch: Batch, start: int, stop: int) -> int:
        open_rows, way.open = way.open, 0
        taken = super()._post(way, batch, start, stop)
        way.open += open_rows
        return taken


@breaks(18)
class PromisesLongerRows(ByRow):
    """Takes rows of a page at the most, whatever its capabilities say."""

    def write_row(self, row: Row) -> Status:
        return Status.LENGTH if row.nbytes > 4 * KiB else super().write_row(row)


@breaks(18)
class TakesAnyPointerForTheHosts(ByRow):
    """Registers memory of a device as if it were the host's."""

    def register(self, memory: Memory, access: Access) -> DomainKey:
        return super().register(dataclasses.replace(memory, device="cpu"), access)


@breaks(18)
class PromisesOrder(SlowLoopback):
    """Says ordered, and carries out the last first."""

    def leave(self) -> list[Held]:
        return super().leave()[::-1]


@breaks(19)
class CrashesInTheChild(ByRow):
    """Frees the parent's handles in the child."""

    def close(self) -> None:
        if not self.alive and self.turns and os.getpid() != _PARENT:
            os._exit(3)
        super().close()


@breaks(19)
class PostsInTheChild(ByRow):
    """Rings a doorbell that is not mapped in the child."""

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        if os.getpid() != _PARENT:
            os._exit(3)
        return super().post(batch, start, stop)


@breaks(20)
class DrawsFromElsewhere(SlowLoopback):
    """Draws the order of its rows from something besides the seed."""

    def leave(self) -> list[Held]:
        held = super().leave()
        first = next(_ELSEWHERE) % max(1, len(held))
        return held[first:] + held[:first]


# ---------------------------------------------------------------------- C21 to C23


@breaks(28)
class ForgetsForGood(ByRow):
    """Does not know a peer any more that was forgotten."""

    def forget(self, peer: int) -> None:
        self._peers[peer] = Status.UNREACHABLE
        self._peer_addresses[peer] = self.address


@breaks(22)
class WakesNobody(ByRow):
    """Never calls the waker."""

    def set_waker(self, waker: Callable[[], None]) -> None:
        pass


@breaks(22)
class SleepsWithNewsWaiting(ByRow):
    """Wakes only at what arrives, not at what its own rows come to."""

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        waker, self.waker = self.waker, lambda: None
        taken = super().post(batch, start, stop)
        self.waker = waker
        return taken


@breaks(23)
class DiesInSilence(ByRow):
    """Ends its rows when it dies, and says no more."""

    def poll(self, out: Completions) -> int:
        n = super().poll(out)
        keep = out[:n][out["kind"][:n] != Kind.DOWN]
        out[: len(keep)] = keep
        return len(keep)


@breaks(23)
class DiesWithWhatHadCome(ByRow):
    """Does not look at its completion queue again once the device says that it is dead."""

    def fail(self) -> None:
        self.arrived.clear()
        super().fail()

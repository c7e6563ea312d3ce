"""Connections that have failed, until all that they held is handed out; and fences, which wait so.

Rule 1: a connection counts as drained once its markers are back, its queue pairs receive no more,
and the completion queue was read to its end after that. Rule 2: a fence is said to hold only when
all connections with its peer have drained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from tep.backends.base import Entry, Kind, Status
from tep.backends.verbs.depths import MARKERS_MAX

if TYPE_CHECKING:
    from tep.backends.verbs.conns import Conn
    from tep.backends.verbs.peer import Peer
    from tep.backends.verbs.writes import Writer

__all__ = ["Draining"]

_FENCED: Final = int(Kind.FENCED)


class Draining:
    """The failed connections of one NIC.

    Args:
        writer: posts markers.
        ready: where entries for poll() go.
        depth: completions that the queue holds.
        retire: what to do with a connection that has drained (True), or did not in time (False).

    Attributes:
        conns: by their own number.
    """

    def __init__(
        self,
        writer: Writer,
        ready: deque[Entry],
        depth: int,
        retire: Callable[[Conn, bool], object],
    ) -> None:
        self.conns: dict[int, Conn] = {}
        self._writer = writer
        self._ready = ready
        self._depth = depth
        self._retire = retire
        self._rounds = 0  # how often the completion queue was read to its end
        self._left = depth
        self._due: dict[int, int] = {}  # the round in which a connection may go
        self._fences: list[tuple[Peer, int]] = []
        self._markers_left = MARKERS_MAX  # the completion queue has room for so many

    def add(self, conn: Conn, now_s: float) -> None:
        """Let a connection fail."""
        conn.fail(now_s)
        self.conns[conn.number] = conn
        self._mark(conn)

    def _mark(self, conn: Conn) -> None:
        if self._markers_left:
            self._markers_left -= conn.mark(self._writer.post_marker, self._markers_left)

    def take_marker(self, number: int) -> None:
        """A failed queue pair has returned all that was posted on it."""
        conn = self.conns.get(number)
        if conn is not None:
            conn.take_marker()
            self._markers_left += 1

    def take_last(self, qp: int) -> None:
        """The device says that a failed queue pair has used its last receive."""
        for conn in self.conns.values():
            if conn.holds(qp):
                conn.take_last(qp)

    def fence(self, peer: Peer, ctx: int) -> None:
        """Say FENCED once nothing of a peer is left; it has no connection for rows any more."""
        self._fences.append((peer, ctx))

    def is_fencing(self, peer: Peer) -> bool:
        """Whether a fence against a peer has not ended."""
        return any(fenced is peer for fenced, _ in self._fences)

    @property
    def busy(self) -> bool:
        """Whether progress() has to be called, with each read."""
        return bool(self.conns or self._fences)

    def progress(self, now_s: float, n: int, *, whole: bool) -> None:
        """Take note of a read of `n` completions, `whole` if that was all there were."""
        self._left -= n
        if whole or self._left <= 0:
            self._rounds += 1
            self._left = self._depth
        for conn in list(self.conns.values()):
            self._mark(conn)
            drained = conn.is_drained(now_s)
            if not drained and now_s < conn.deadline_s:
                continue
            # This round may have begun before the last completion came: read another.
            if self._rounds >= self._due.setdefault(conn.number, self._rounds + 2):
                del self.conns[conn.number], self._due[conn.number]
                self._markers_left += conn.markers_out
                self._retire(conn, drained)
        if self._fences:
            self._say_fenced()

    def _say_fenced(self) -> None:
        open_ = {conn.peer for conn in self.conns.values()}
        fences, self._fences = self._fences, []
        for peer, ctx in fences:
            if peer.number in open_:
                self._fences.append((peer, ctx))
            else:
                status = int(Status.PROVIDER if peer.blurred else Status.OK)
                self._ready.append((_FENCED, status, 1, 0, 0, ctx, 0))

    def next_s(self, now_s: float) -> list[float]:
        """When progress() has something to do though nothing came."""
        if self._due or (self._fences and not self.conns):
            return [now_s]
        return [conn.next_s for conn in self.conns.values()]

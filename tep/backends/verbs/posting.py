"""Rows to connected peers: a run to one, or a row to each of many; what finds no room follows.

Scatters go to the same peers again and again: who they are is kept after the first, a fan is made
for the second; both until some peer loses its connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from tep.backends.base import Batch, ReadBatch, WriteBatch
from tep.backends.verbs.conns import Conn
from tep.backends.verbs.limits import LOOSE_MAX, Limits
from tep.backends.verbs.writes import ROWS_FEW, Fan, Writer

__all__ = ["Posting"]

_SETS_MAX: Final = 64


class Posting:
    """The rows of one NIC, on their way to queue pairs.

    Args:
        writer: posts them.
        keep: is told of rows that found no room on their queue pair: (peer, batch, row).
        one_qp: whether each peer has one queue pair for rows.

    Attributes:
        up: by PeerId, the connection that rows can be posted on, or None.
    """

    def __init__(
        self, writer: Writer, keep: Callable[[int, WriteBatch, int], object], *, one_qp: bool
    ) -> None:
        self.up: list[Conn | None] = []
        self._writer = writer
        self._keep = keep
        self._one_qp = one_qp
        self._sets: dict[bytes, list[Conn]] = {}
        self._fans: dict[bytes, Fan] = {}

    def post_up(self, conn: Conn, batch: WriteBatch, start: int, stop: int) -> int:
        """Post rows to one connected peer; return how many were taken, a prefix."""
        if stop - start <= ROWS_FEW:
            return self._writer.post_few(conn, batch, start, stop)
        if len(conn.qps) == 1:
            return self._writer.post_run(conn, batch, start, stop)
        self.post_loose([conn] * (stop - start), batch, start)
        return stop - start

    def post_held(self, conn: Conn, batch: Batch, start: int, stop: int) -> int:
        """Post rows that had to wait, of either kind; return how many were taken, a prefix."""
        if isinstance(batch, ReadBatch):
            return self._writer.post_reads(conn, batch, start, stop)
        assert isinstance(batch, WriteBatch), batch
        return self.post_up(conn, batch, start, stop)

    def scatter(self, batch: WriteBatch, start: int, stop: int, limits: Limits) -> bool:
        """Post each row to a peer of its own.

        False = not all are connected, or a row is impossible; nothing is done.
        """
        peers = batch.peer
        assert not isinstance(peers, int)
        key = (peers if stop - start == batch.n else peers[start:stop]).tobytes()
        fan = self._fans.get(key)
        if fan is None:
            conns = self._sets.get(key)
            if conns is None or len(conns) > LOOSE_MAX or not self._one_qp:
                return self._first_scatter(key, batch, start, stop, limits)
            fan = self._fans[key] = self._writer.new_fan(conns, limits)
        later = self._writer.post_fan(fan, batch, start)
        for row in later or ():
            self._keep(fan.conns[row - start].peer, batch, row)
        return later is not None

    def _first_scatter(
        self, key: bytes, batch: WriteBatch, start: int, stop: int, limits: Limits
    ) -> bool:
        assert not isinstance(batch.peer, int)
        conns = self._sets.get(key)
        if conns is None:
            found = [self.up[peer] for peer in batch.peer[start:stop].tolist()]
            conns = [conn for conn in found if conn is not None]
            if len(conns) < len(found):
                return False
            if len(self._sets) >= _SETS_MAX:
                self.forget_sets()
            self._sets[key] = conns
        if limits.possible_until(batch, start, stop) < stop:
            return False
        self.post_loose(conns, batch, start)
        return True

    def forget_sets(self) -> None:
        """Forget who scatters went to: some peer has lost its connection."""
        self._sets.clear()
        self._fans.clear()

    def post_loose(self, conns: Sequence[Conn], batch: WriteBatch, start: int) -> None:
        """Post row `start + k` to conns[k]; what finds no room is kept."""
        for first in range(0, len(conns), LOOSE_MAX):
            part = conns[first : first + LOOSE_MAX] if len(conns) > LOOSE_MAX else conns
            qps = [conn.qp for conn in part] if self._one_qp else [conn.pick() for conn in part]
            for row in self._writer.post_loose(part, qps, batch, start + first):
                self._keep(conns[row - start].peer, batch, row)

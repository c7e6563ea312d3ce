"""Long batches are shared out as NICs get through with them, so that a slow link carries less.

What is posted cannot move any more, what is queued can: a long batch is posted in pieces, and a NIC
that has nothing left takes half of what waits at another. Pieces grow while NICs get on alike; one
that falls behind gets small ones. No time is measured, and nothing is remembered beyond a transfer:
a link that recovers has its full share at once. Rows stay whole, so that the number of immediates
is the shape's alone. A single write is no batch of rows, and keeps its equal shards.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Final

from tep.core.moving import on_lanes
from tep.core.pending import Pending, varies
from tep.core.transfer import Transfer
from tep.errors import TepError

if TYPE_CHECKING:
    from tep.core.group import DomainGroup

__all__ = [
    "LONG_BYTES",
    "PIECE_BYTES",
    "SHARED_ROWS",
    "Pace",
    "cut_piece",
    "is_long",
    "share_backlog",
]

_PIECES: Final = 12
"""A NIC that is slow, or not known yet, takes this part of its share of what is left at a time: a
link at an eighth of its speed is through with two of them before the others are with the rest.
"""

_AHEAD: Final = 2
"""So many pieces a NIC has: the wire takes one while the end of the other is on its way."""

SHARED_ROWS: Final = 4
"""Fewer rows are not worth a look whether another NIC could take some."""

PIECE_BYTES: Final = 2 << 20
"""No piece of a long batch is smaller: 40 us of a link of 400 Gb/s."""

_PIECES_MAX: Final = 64
"""Nor is it a smaller part of its transfer: each piece costs some time of the CPU."""

LONG_BYTES: Final = 32 << 20
"""A batch with more than this is posted in pieces, which leaves time to think again between them:
0.7 ms of such a link.
"""


_LOOKED_AT: Final = 64
"""Batches of a queue that are looked at for rows to give away: a look must not take longer the more
there are.
"""


class Pace:
    """How NICs get on with one long transfer.

    Attributes:
        out: pieces that each NIC has.
        through: rows of pieces that each NIC has given back.
        part: each takes one part in so many of its share of what is left as its next piece.
        last: the piece that each was given last.
    """

    __slots__ = ("last", "out", "part", "through")

    def __init__(self, nics: int) -> None:
        self.out = [0] * nics
        self.through = [0] * nics
        self.part = [_PIECES] * nics
        self.last: list[Pending | None] = [None] * nics

    def end(self, nic: int, rows: int) -> None:
        """A NIC has given a piece back, of which it had been given `rows`."""
        self.out[nic] -= 1
        self.through[nic] += rows
        keeps_up = 4 * self.through[nic] >= 3 * max(self.through)
        self.part[nic] = max(2, self.part[nic] // 3) if keeps_up else _PIECES

    def is_full(self, nic: int) -> bool:
        """Whether a NIC has enough to do. One that fell behind gets nothing ahead."""
        slow = self.part[nic] == _PIECES and self.through[nic] > 0
        return self.out[nic] >= (1 if slow else _AHEAD)


def waiting(pending: Pending) -> int:
    """Bytes that could be posted on another NIC as well; 0 where that is not worth while."""
    nbytes = pending.batch.nbytes
    if not isinstance(nbytes, int) or pending.transfer.job.routing.domain is not None:
        return 0
    return 0 if varies(pending) else nbytes * (pending.stop - pending.at)


def is_long(pending: Pending) -> bool:
    """Whether it is posted in pieces: because of its length, or because it is the rest of such."""
    if pending.is_piece:
        return False
    nbytes = waiting(pending)
    return nbytes > LONG_BYTES or (nbytes > 0 and pending.transfer.pace is not None)


def share_backlog(group: DomainGroup) -> bool:
    """Give a NIC that has nothing to post half of what waits longest at another."""
    idle = [d for d, queue in enumerate(group._queues) if not queue and group.alive[d]]
    first = (p for queue in group._queues for p in itertools.islice(queue, _LOOKED_AT))
    found = max(first, key=waiting)
    rows = (found.stop - found.at) // 2
    if not idle or rows == 0 or waiting(found) <= PIECE_BYTES:
        return False
    remote, _ = found.target(0)
    domain = idle[0]
    here, nic = remote.link.route(group.alive, domain, domain % remote.nics)
    if here != domain:
        return False  # it has no path to this peer
    try:
        moved = on_lanes(found, found.stop - rows, found.stop, domain, [nic])
    except TepError:  # it cannot connect; the rows wait where they are
        return False
    _pace(group, found.transfer)
    found.stop -= rows
    group.backlog -= rows
    group._push(moved)
    return True


def cut_piece(group: DomainGroup, pending: Pending, domain: int, queue: deque[Pending]) -> bool:
    """Put a piece of a long batch in front of the queue, and what is left of it at the end.

    Returns:
        False: the NIC has enough for now, and will say when a piece is through.
    """
    nbytes = pending.batch.nbytes
    assert isinstance(nbytes, int)
    transfer = pending.transfer
    pace = _pace(group, transfer)
    last = pace.last[domain]
    if pace.is_full(domain) or (last is not None and last.at < last.stop):  # it is queued still
        return False
    # Ever smaller ones: the mistake that can be made with the last piece is small, and so is the
    # number of pieces. The last one is a batch of its own as well: a NIC may wait for its end.
    part = group.offered // (pace.part[domain] * len(group.domains))
    part = max(1, PIECE_BYTES // nbytes, transfer.rows // _PIECES_MAX, part)
    rows = min(part, pending.stop - pending.at)
    piece = on_lanes(pending, pending.stop - rows, pending.stop, domain, [pending.target(0)[1]])
    piece.is_piece = True
    piece.older, transfer.queued = transfer.queued, piece
    pace.last[domain] = piece
    pace.out[domain] += 1
    pending.stop -= rows
    group._ctx = piece.batch.ctx = group._ctx + 1
    group.batches[group._ctx] = piece
    if pending.stop > pending.at:
        queue.rotate(-1)
    else:
        queue.popleft()
        group._cut(pending)
    queue.appendleft(piece)
    return True


def _pace(group: DomainGroup, transfer: Transfer) -> Pace:
    if transfer.pace is None:
        transfer.pace = Pace(len(group.domains))
    return transfer.pace

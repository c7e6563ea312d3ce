"""Long batches are shared out as NICs get through with them, so that a slow link carries less.

What is posted cannot move any more, what is queued can: a long batch is posted in pieces, and a NIC
that has nothing left takes half of what waits at another. Nothing is measured and nothing is
remembered: a link that recovers has its full share at once. Rows stay whole, so that the number of
immediates is the shape's alone. A single write is no batch of rows, and keeps its equal shards.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from tep.errors import TepError
from tep.moving import on_lanes
from tep.pending import Pending, varies

if TYPE_CHECKING:
    from tep.group import DomainGroup

__all__ = ["LONG_BYTES", "PIECE_BYTES", "SHARED_ROWS", "cut_piece", "is_long", "share_backlog"]

_PIECES: Final = 8
"""A NIC takes this part of its share of what is left of a long batch at a time."""

_AHEAD: Final = 2
"""So many such it has: a link at a quarter of its speed is through with them before the others are
with the rest.
"""

SHARED_ROWS: Final = 4
"""Fewer rows are not worth a look whether another NIC could take some."""

PIECE_BYTES: Final = 2 << 20
"""No piece of a long batch is smaller: 40 us of a link of 400 Gb/s."""

LONG_BYTES: Final = 32 << 20
"""A batch with more than this is posted in pieces, which leaves time to think again between them:
0.7 ms of such a link.
"""


def waiting(pending: Pending) -> int:
    """Bytes that could be posted on another NIC as well; 0 where that is not worth while."""
    nbytes = pending.batch.nbytes
    if not isinstance(nbytes, int) or pending.transfer.job.routing.domain is not None:
        return 0
    return 0 if varies(pending) else nbytes * (pending.stop - pending.at)


def is_long(pending: Pending) -> bool:
    """Whether it is posted in pieces: because of its length, or because it is the rest of such."""
    nbytes = waiting(pending)
    return nbytes > LONG_BYTES or (pending.shared and nbytes > 0)


def share_backlog(group: DomainGroup) -> bool:
    """Give a NIC that has nothing to post half of what waits longest at another."""
    idle = [d for d, queue in enumerate(group._queues) if not queue and group.alive[d]]
    found = max((p for queue in group._queues for p in queue), key=waiting)
    rows = (found.stop - found.at) // 2
    if not idle or rows == 0 or waiting(found) <= PIECE_BYTES:
        return False
    remote, _ = found.target(0)
    domain = idle[0]
    _, nic = group._route(domain, remote, domain % remote.nics)
    try:
        moved = on_lanes(found, found.stop - rows, found.stop, domain, [nic])
    except TepError:  # it cannot connect; the rows wait where they are
        return False
    found.shared = moved.shared = True
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
    # Large pieces while much is left, small ones towards the end: the mistake that can be made
    # with the last one stays small, and so does their number.
    part = group.backlog // (_PIECES * len(group.domains))
    some = max(1, PIECE_BYTES // nbytes, part)
    pending.shared = True
    before = any(p.transfer is pending.transfer and not p.shared for p in queue)
    if before or group.outstanding[domain] >= _AHEAD * some:
        return False
    # The last piece is a batch of its own as well: a NIC may wait for the end of a batch.
    rows = min(some, pending.stop - pending.at)
    piece = on_lanes(pending, pending.stop - rows, pending.stop, domain, [pending.target(0)[1]])
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

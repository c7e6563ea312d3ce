"""What the timing fabric writes into a row log: its columns as records. Nothing is modelled here.

Called only where somebody asked for a row log.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Final

import numpy as np

from tep.backends.base import Status
from tep.sim.queues import Ints
from tep.sim.row_log import Record, What
from tep.sim.timing_faces import Nic, Region

__all__ = ["trace_ends", "trace_landed", "trace_posts", "trace_rows"]

_OK: Final = int(Status.OK)


def trace_rows(nic: Nic, what: What, times: Ints | int, numbers: Ints, peer: str) -> None:
    """Record rows of one batch at a NIC that go to, or are from, one peer."""
    ledger, row_log = nic.fabric.ledger, nic.fabric.row_log
    assert row_log is not None, "checked by the caller"
    rows = numbers - ledger.base
    row_log.add_rows(
        len(rows),
        times,
        what,
        nic.node.name,
        nic.index,
        peer=peer,
        row=numbers,
        ctx=int(ledger.ctx[rows[0]]),
        nbytes=ledger.nbytes[rows],
        value=ledger.status[rows].astype(np.int64),
    )


def trace_posts(nic: Nic, where: slice, ctx: int) -> None:
    """Record rows that a NIC has just accepted."""
    fabric = nic.fabric
    ledger, row_log = fabric.ledger, fabric.row_log
    assert row_log is not None, "checked by the caller"
    region = nic.sources.get(int(ledger.lkey[where.start]))
    for target in np.unique(ledger.target[where]).tolist():
        rows = np.flatnonzero(ledger.target[where] == target) + where.start
        row_log.add_rows(
            len(rows),
            fabric.env.now,
            "post",
            nic.node.name,
            nic.index,
            peer=fabric.name_of(target),
            row=rows + ledger.base,
            ctx=ctx,
            # A row without a source has no offset.
            offset=0 if region is None else ledger.src[rows] - np.uint64(region.ptr),
            nbytes=ledger.nbytes[rows],
        )


def trace_ends(nic: Nic, times: Ints, numbers: Ints) -> None:
    """Record the ends of rows and messages at their sender."""
    ledger = nic.fabric.ledger
    for index, number in enumerate(numbers.tolist()):
        row = number - ledger.base
        failed = ledger.status[row] != _OK
        what: What = "sent" if ledger.message[row] else "fail" if failed else "done"
        peer = nic.fabric.name_of(int(ledger.target[row]))
        trace_rows(nic, what, int(times[index]), numbers[index : index + 1], peer)


def trace_landed(nic: Nic, targets: Mapping[int, Region], times: Ints, rows: Ints) -> None:
    """Record placements and immediates of rows that landed well at a NIC."""
    ledger, row_log = nic.fabric.ledger, nic.fabric.row_log
    assert row_log is not None, "checked by the caller"
    for time_ps, row in zip(times.tolist(), rows.tolist()):
        target = targets[int(ledger.rkey[row])]
        nbytes, offset = int(ledger.nbytes[row]), int(ledger.dst[row]) - target.ptr
        crc = 0
        if target.host is not None:
            crc = zlib.crc32(target.host.view[offset : offset + nbytes].data)
        peer = nic.fabric.name_of(int(ledger.source[row]))
        where = (nic.node.name, nic.index, peer, row + ledger.base, int(ledger.ctx[row]))
        row_log.add(Record(time_ps, "place", *where, offset, nbytes, crc))
        if ledger.imm[row] >= 0:
            row_log.add(Record(time_ps, "imm", *where, 0, nbytes, int(ledger.imm[row])))

"""One EFA NIC behind the seam, without libfabric: its queues, under the care of `FabricDomain`.

Greetings, deadlines, messages and what becomes of rows that fail are the same whoever posts them,
and stand in tep.backends.libfabric; of libfabric's own objects nothing is used here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, cast

from tep.backends.base import Completions, DomainCaps, WriteBatch
from tep.backends.columns import part
from tep.backends.efa import flight
from tep.backends.efa.device import Nic
from tep.backends.efa.flight import Slots
from tep.backends.efa.ways import Columns
from tep.backends.libfabric import completions, regions
from tep.backends.libfabric.domain import FabricDomain
from tep.backends.libfabric.frames import HEAD_BYTES_MAX
from tep.backends.libfabric.peer import Peer, State
from tep.backends.libfabric.slots import Ticket
from tep.base.units import MiB

if TYPE_CHECKING:
    from tep.backends.libfabric.regions import Region
    from tep.backends.libfabric.rules import Rules
    from tep.memory.source import DmabufExport

__all__ = ["EfaDomain"]

_LOOK_EVERY: Final = 4096  # polls between two looks at the device's events
_FEW: Final = 3  # rows up to which one by one is cheaper than columns
_SLOWEST_BYTES_PER_S: Final = 64 * MiB  # a row may take so much longer than peer_timeout_s: guessed
_READY: Final = State.READY  # looking it up in its class takes 0.1 us


class EfaDomain(FabricDomain):
    """One NIC.

    Args:
        nic: opened; this object closes it.
        way: its queues.
        rules: how its peers are treated, and how many rows may be out.
        caps, epoch, dmabuf, about: as for `FabricDomain`.
    """

    _lone_reads_are_simple = True

    def __init__(
        self,
        nic: Nic,
        way: Columns,
        rules: Rules,
        caps: DomainCaps,
        *,
        epoch: int,
        dmabuf: DmabufExport | None,
        about: str,
    ) -> None:
        self._way = way
        self._device = nic
        self._polls = 0
        self._depth, self._longest = caps.sq_depth, caps.max_write_bytes
        self._half_window = max(1, rules.window_rows // 2)
        # A NIC of libfabric by what is asked of it.
        face = cast("Any", nic)
        super().__init__(face, rules, caps, epoch=epoch, dmabuf=dmabuf, about=about)

    def _parts(
        self, nic: Any, rules: Rules, dmabuf: DmabufExport | None, *, delivery_complete: bool
    ) -> tuple[Slots, regions.Regions, completions.Mailbox, completions.Queue]:
        del nic, delivery_complete  # libfabric's
        rows = self._flight = Slots(rules.window_rows, self._way, self._device)
        frame_bytes = rules.msg_bytes_max + HEAD_BYTES_MAX
        box = flight.Mailbox(
            self._device, self._way, frame_bytes, rules.frames_in, rules.frames_out, rows.count
        )
        queue = flight.Queue(self._device, self._way, rows, box)
        return rows, flight.Regions(self._device, dmabuf), box, queue

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        """Post what is simple without a detour: one peer that is ready, one key."""
        number, rkey = batch.peer, batch.rkey
        if type(number) is int and type(rkey) is int and not (self._closed or self._device.closed):
            peer = self._peers.all[number]
            region = self._regions.by_lkey.get(batch.lkey)
            if region is not None and peer.state is _READY and not peer.held:
                slots, rows = self._slots, self._rows
                room = min(slots.room, self._depth - slots.open - rows.waiting)
                if room <= 0:
                    return 0
                if batch.n == 1:
                    taken = self._post_lone(batch, rkey, peer, region)
                else:
                    taken = self._post_columns(batch, start, stop, room, peer, region)
                if taken is not None:
                    return taken
        return super().post(batch, start, stop)

    def _post_lone(self, batch: WriteBatch, rkey: int, peer: Peer, region: Region) -> int | None:
        """Post the only row of a batch; None = it is not simple."""
        src, dst, nbytes, imm = batch.src, batch.dst, batch.nbytes, batch.imm
        if not (type(src) is int and type(dst) is int and type(nbytes) is int):
            return None
        if not (imm is None or type(imm) is int):
            return None
        if not (region.start <= src and src + nbytes <= region.end and 0 < nbytes <= self._longest):
            return None
        due_s = time.monotonic() + self._timeout_s + nbytes / _SLOWEST_BYTES_PER_S
        ticket = Ticket(batch, 0, peer, region, due_s)
        return self._flight.post_row(_no_call, None, ticket, src, dst, rkey, nbytes, imm)

    def _post_columns(
        self, batch: WriteBatch, start: int, stop: int, room: int, peer: Peer, region: Region
    ) -> int | None:
        """Post what there is room for of some rows; None = they are not simple."""
        slots = self._flight
        n = wanted = min(stop - start, slots.chunk_rows)
        if room < wanted:
            # Half a window at a time: a row by itself costs ten times what it costs among others.
            if slots.open and room < self._half_window:
                return 0
            n = room
        if n <= _FEW:
            return None
        src, dst, nbytes, imm = batch.src, batch.dst, batch.nbytes, batch.imm
        if n < batch.n:
            stop = start + n
            src, dst, nbytes = (part(column, start, stop) for column in (src, dst, nbytes))
            imm = None if imm is None else part(imm, start, stop)
        longest = nbytes if isinstance(nbytes, int) else int(nbytes.max())
        if not 0 < longest <= self._longest:
            return None
        # Whether the rows lie in the region is looked at by the device, which ends each that does
        # not by itself (status 5); two passes over the column here cost 3 us a batch.
        due_s = time.monotonic() + self._timeout_s + n * longest / _SLOWEST_BYTES_PER_S
        ticket = Ticket(batch, start, peer, region, due_s)
        return slots.post_columns(ticket, n, src, dst, nbytes, imm)

    def poll(self, out: Completions) -> int:
        self._polls += 1
        if not self._polls % _LOOK_EVERY and not self._device.closed:
            self._device.read_event()
        return FabricDomain.poll(self, out)  # super() takes 0.1 us more


def _no_call(*_: object) -> int:
    """Stand where a call of libfabric would; never called."""
    raise AssertionError

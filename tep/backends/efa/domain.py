"""One EFA NIC behind the seam, without libfabric: its queues, under the care of `HardwareDomain`.

Greetings, deadlines, messages and what becomes of rows that fail are the same whoever posts them,
and stand in tep.backends.libfabric; of libfabric's own objects nothing is used here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from tep.backends.base import Completions, DomainCaps, Status
from tep.backends.efa import flight
from tep.backends.efa.columns import Columns
from tep.backends.efa.device import Nic
from tep.backends.efa.rowwise import RowWise
from tep.backends.libfabric import completions, mailbox, regions, slots
from tep.backends.libfabric.efa.domain import HardwareDomain
from tep.backends.libfabric.frames import HEAD_BYTES_MAX
from tep.backends.libfabric.texts import STATUS_TEXT
from tep.errors import BackendUnavailable, FabricError

if TYPE_CHECKING:
    from tep.backends.libfabric.rules import Rules
    from tep.memory import DmabufExport

__all__ = ["EfaDomain", "choose_way"]

_LOOK_EVERY: Final = 4096  # polls between two looks at the device's events


def choose_way(nic: Nic, post: str) -> tuple[RowWise | Columns, str]:
    """The way that entries take, and in words which, and why not the other.

    Raises:
        BackendUnavailable, FabricError: by columns was asked for, and is not to be had.
    """
    if post == "rows":
        return RowWise(nic), f"{RowWise.name} (post='rows')"
    try:
        way = Columns(nic)
    except (BackendUnavailable, FabricError) as error:
        if post == "columns":
            raise
        return RowWise(nic), f"{RowWise.name}: {error}"
    return way, way.name


class EfaDomain(HardwareDomain):
    """One NIC.

    Args:
        nic: opened; this object closes it.
        way: how its entries are written and read.
        rules: how its peers are treated, and how many rows may be out.
        caps, epoch, dmabuf, about: as for `HardwareDomain`.
    """

    def __init__(
        self,
        nic: Nic,
        way: RowWise | Columns,
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
        # A NIC of libfabric by what is asked of it.
        face = cast("Any", nic)
        super().__init__(face, rules, caps, epoch=epoch, dmabuf=dmabuf, about=about)

    def _parts(
        self, nic: Any, rules: Rules, dmabuf: DmabufExport | None, *, delivery_complete: bool
    ) -> tuple[slots.Slots, regions.Regions, mailbox.Mailbox, completions.Queue]:
        del nic, delivery_complete  # libfabric's
        rows = flight.Slots(rules.window_rows, self._way, self._device)
        frame_bytes = rules.msg_bytes_max + HEAD_BYTES_MAX
        box = flight.Mailbox(
            self._device, self._way, frame_bytes, rules.frames_in, rules.frames_out, rows.count
        )
        queue = flight.Queue(self._device, self._way, rows, box)
        return rows, flight.Regions(self._device, dmabuf), box, queue

    def poll(self, out: Completions) -> int:
        self._polls += 1
        if not self._polls % _LOOK_EVERY and not self._device.closed:
            self._device.read_event()
        return super().poll(out)

    def status_text(self, status: int) -> str:
        if status == Status.NIC_DOWN and self._device.failure:
            return f"the NIC is lost; whether the row landed is unknown; {self._device.failure}"
        own = self._texts.get(status, "")
        if status == Status.UNREACHABLE:
            own = self._peers.complaint or self._peers.refusal or own
        usual = STATUS_TEXT.get(status, "")
        return f"{usual}; {own}" if usual and own else usual or own

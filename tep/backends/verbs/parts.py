"""What one NIC is made of: queues, memory, peers, the poller; made in order, freed in reverse."""

from __future__ import annotations

import contextlib
import random
import time
from collections import deque
from collections.abc import Callable

from tep.backends.base import Entry
from tep.backends.verbs.address import Address, identity_of
from tep.backends.verbs.conns import Queues
from tep.backends.verbs.datagrams import Datagrams
from tep.backends.verbs.depths import MESSAGES_OUT, plan_depths
from tep.backends.verbs.device import Device
from tep.backends.verbs.messages import Messages
from tep.backends.verbs.peers import Peers
from tep.backends.verbs.poller import Poller
from tep.backends.verbs.receives import ImmReceives
from tep.backends.verbs.regions import Regions
from tep.backends.verbs.wakeup import Wakeup
from tep.backends.verbs.writes import Writer
from tep.memory.source import DmabufExport

__all__ = ["Parts"]


class Parts:
    """The parts of one NIC.

    Args:
        device: closed with the parts, also if they cannot be made.
        name: of the engine; with `nic` the identity that outlives a restart.
        nic: index in its engine.
        epoch: of its engine's incarnation.
        export: exports CUDA memory as a dma-buf.
        ready: where entries for poll() go.
        link_lost: says whether our own port is at fault when nobody answers.
        failed: is called with the reason where a queue fails.

    Attributes:
        own: this NIC's address.
        close: frees everything.
    """

    def __init__(
        self,
        device: Device,
        *,
        name: str,
        nic: int,
        epoch: int,
        export: DmabufExport | None,
        ready: deque[Entry],
        link_lost: Callable[[], bool],
        failed: Callable[[str], None],
    ) -> None:
        qkey = random.SystemRandom().getrandbits(31)  # the top bit is for the kernel's own
        self.regions = Regions(device, export)
        with contextlib.ExitStack() as undo:
            undo.callback(device.close)
            undo.callback(self.regions.close)
            self._make_queues(device, qkey, ready, undo)
            self.close = undo.pop_all().close
        self.own = Address(
            link=int(device.port.link_layer),
            lid=int(device.port.lid),
            gid=device.gid.seen.gid,
            gid_type=device.gid.seen.gid_type,
            ud_qpn=self.datagrams.number,
            qkey=qkey,
            epoch=epoch,
            identity=identity_of(name, nic),
        )
        self.writer = Writer(device, self.depths, self.regions.on_devices, ready)
        self.peers = Peers(
            device,
            Queues(
                cq=self.cq,
                depth=self.depths.cq,
                imm_srq=self.imms.srq,
                msg_srq=self.messages.srq,
                row_depth=self.depths.rows + self.depths.reads,
                msg_depth=MESSAGES_OUT,
            ),
            self.writer,
            self.messages,
            self.datagrams,
            self.own,
            ready,
            time.monotonic,
            link_lost,
        )
        self.poller = Poller(
            device,
            self.cq,
            imms=self.imms,
            writer=self.writer,
            messages=self.messages,
            datagrams=self.datagrams,
            peers=self.peers,
            ready=ready,
            failed=failed,
        )

    def _make_queues(
        self, device: Device, qkey: int, ready: deque[Entry], undo: contextlib.ExitStack
    ) -> None:
        """Make what all peers share."""
        self.depths = depths = plan_depths(device)
        self.wakeup = Wakeup(device)
        undo.callback(self.wakeup.close)
        self.cq = device.lib.make(
            "ibv_create_cq", device.context, depths.cq, None, self.wakeup.channel, 0
        )
        undo.callback(device.free, "ibv_destroy_cq", self.cq)
        undo.callback(self.wakeup.clear, self.cq)  # events that nobody took keep it busy
        self.imms = ImmReceives(device, depths.imms)
        undo.callback(device.free, "ibv_destroy_srq", self.imms.srq)
        self.messages = Messages(device, depths.messages_in, ready)
        undo.callback(self.messages.close)
        undo.callback(device.free, "ibv_destroy_srq", self.messages.srq)
        self.datagrams = Datagrams(device, self.cq, qkey)
        undo.callback(self.datagrams.close)

"""Address handles: the way to each peer for datagrams, made without holding up the worker.

On RoCE the kernel asks for the neighbour's Ethernet address inside ibv_create_ah, and waits up to a
second for its answer, uninterruptibly (Linux, drivers/infiniband/core/addr.c,
rdma_addr_find_l2_eth_by_grh). A host that is off never answers, and one worker serves all peers. So
a helper thread makes the call. The worker waits for it for as long as a neighbour takes that is
there; one that did not answer is not asked again at once.
"""

from __future__ import annotations

import ctypes
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

from tep.backends.verbs.address import Address
from tep.base.errors import FabricError

if TYPE_CHECKING:
    from tep.backends.verbs.device import Device

__all__ = ["Routes"]

_NEIGHBOUR_S: Final = 0.05
"""The worker waits so long: far more than a neighbour takes that is there (guessed)."""

_PAUSE_S: Final = 1.0
_PAUSE_MAX_S: Final = 8.0
_HELPERS_MAX: Final = 16  # neighbours that are waited for at a time
_CLOSE_S: Final = 5.0
"""close() waits so long for a call of the kernel, which ends after one second (quoted)."""


class _Helper(threading.Thread):
    """Calls ibv_create_ah for whoever is put into `asked`; None ends it. An answer of 0: failed."""

    def __init__(self, device: Device) -> None:
        super().__init__(name="tep-route", daemon=True)
        self._device = device
        self.asked: SimpleQueue[Address | None] = SimpleQueue()
        self.answer: SimpleQueue[int] = SimpleQueue()

    def run(self) -> None:
        while (to := self.asked.get()) is not None:
            self.answer.put(_create(self._device, to))


def _create(device: Device, to: Address) -> int:
    attr = device.route(to.gid, to.lid)
    try:
        return device.lib.make("ibv_create_ah", device.pd, ctypes.byref(attr), to=to)
    except FabricError:  # no such neighbour: the datagram is lost, and whoever waits repeats it
        return 0


class Routes:
    """The address handles of one NIC.

    Args:
        device: where.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._made: dict[Address, int] = {}
        self._asked: dict[Address, _Helper] = {}
        self._silent: dict[Address, tuple[float, float]] = {}  # until when, and the next pause
        self._idle: list[_Helper] = []
        self._helpers: list[_Helper] = []

    def find(self, to: Address) -> int:
        """The handle for a peer; 0: there is none, now or at all."""
        found = self._made.get(to)
        return self._make(to) if found is None else found

    def _make(self, to: Address) -> int:
        if self._device.is_ib:  # no neighbour to be asked
            return self._settle(to, _create(self._device, to))
        if to not in self._asked:
            until_s, _ = self._silent.get(to, (0.0, 0.0))
            helper = None if time.monotonic() < until_s else self._take_helper()
            if helper is None:
                return 0
            self._asked[to] = helper
            helper.asked.put(to)
            return self._look(to, _NEIGHBOUR_S)
        return self._look(to, 0.0)

    def _look(self, to: Address, wait_s: float) -> int:
        """The handle that a helper was asked for, if its call has returned."""
        helper = self._asked[to]
        try:
            handle = helper.answer.get(wait_s > 0, wait_s)
        except Empty:
            return 0
        del self._asked[to]
        self._idle.append(helper)
        return self._settle(to, handle)

    def _settle(self, to: Address, handle: int) -> int:
        _, pause_s = self._silent.pop(to, (0.0, _PAUSE_S))
        if handle:
            self._made[to] = handle
        else:
            self._silent[to] = time.monotonic() + pause_s, min(2 * pause_s, _PAUSE_MAX_S)
        return handle

    def _take_helper(self) -> _Helper | None:
        """A helper that is idle; None: all wait for neighbours."""
        if not self._idle:
            for to in tuple(self._asked):  # some may have been forgotten
                self._look(to, 0.0)
        if not self._idle and len(self._helpers) < _HELPERS_MAX:
            helper = _Helper(self._device)
            helper.start()
            self._helpers.append(helper)
            return helper
        return self._idle.pop() if self._idle else None

    def forget(self, to: Address) -> None:
        """Drop the handle for a peer that is gone; close() drops one that is in the making."""
        self._silent.pop(to, None)
        handle = self._made.pop(to, None)
        if handle is not None:
            self._device.free("ibv_destroy_ah", handle)

    def close(self) -> None:
        """Give all back; waits for calls of the kernel that have not returned."""
        for helper in self._helpers:
            helper.asked.put(None)
        for helper in self._helpers:
            helper.join(_CLOSE_S)
        handles = [*self._made.values()]
        handles += [one.answer.get() for one in self._asked.values() if not one.answer.empty()]
        for handle in filter(None, handles):
            self._device.free("ibv_destroy_ah", handle)
        self._made.clear()
        self._asked.clear()
        self._helpers.clear()
        self._idle.clear()

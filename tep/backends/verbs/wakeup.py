"""One descriptor to sleep on: completion channel, device events and a timer, behind epoll.

The timer is there for the handshake's repetitions, which no completion announces.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

from tep.backends.ffi.libc import Timer
from tep.backends.ibevents import Events

if TYPE_CHECKING:
    from tep.backends.verbs.device import Device

__all__ = ["Wakeup"]


class Wakeup(Events):
    """What becomes readable when a NIC has news.

    Args:
        device: where.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device.lib, device.context)
        self._device = device
        self._timer = Timer()
        self.epoll.register(self._timer.fd, select.EPOLLIN)

    def set_timer(self, pause_s: float | None) -> None:
        """Become readable after `pause_s` seconds too; None = never."""
        self._timer.set(pause_s)

    def clear(self, cq: int) -> None:
        """Take the completion events that are there off the channel."""
        taken = self.take_completions()
        if taken:
            self._lib.do("ibv_ack_cq_events", cq, taken)

    def close(self) -> None:
        """Let go; the completion queue must be gone."""
        self.epoll.close()
        self._timer.close()
        self._device.free("ibv_destroy_comp_channel", self.channel)

"""One descriptor to sleep on: completion channel, device events and a timer, behind epoll.

The timer is there for the handshake's repetitions, which no completion announces.
"""

from __future__ import annotations

import ctypes
import os
import select
from typing import TYPE_CHECKING

from tep.ffi.ibverbs_device import AsyncEvent
from tep.ffi.ibverbs_structs import CompChannel
from tep.ffi.libc import Timer

if TYPE_CHECKING:
    from tep.backends.verbs.device import Device

__all__ = ["Wakeup"]


class Wakeup:
    """What becomes readable when a NIC has news.

    Args:
        device: where.

    Attributes:
        channel: for ibv_create_cq.
        fd: readable once there is news and the completion queue was armed.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.channel = device.lib.make("ibv_create_comp_channel", device.context)
        self._channel_fd = int(CompChannel.from_address(self.channel).fd)
        os.set_blocking(self._channel_fd, False)
        self._timer = Timer()
        self._epoll = select.epoll()
        for fd in (self._channel_fd, device.async_fd, self._timer.fd):
            self._epoll.register(fd, select.EPOLLIN)
        self.fd = self._epoll.fileno()

    def set_timer(self, pause_s: float | None) -> None:
        """Become readable after `pause_s` seconds too; None = never."""
        self._timer.set(pause_s)

    def clear(self, cq: int) -> None:
        """Take the completion events that are there off the channel."""
        lib, found, context = self._device.lib, ctypes.c_void_p(), ctypes.c_void_p()
        arguments = (self.channel, ctypes.byref(found), ctypes.byref(context))
        taken = 0
        while lib.ask("ibv_get_cq_event", *arguments) == 0:
            taken += 1
        if taken:
            lib.do("ibv_ack_cq_events", cq, taken)

    def device_events(self) -> list[tuple[int, int]]:
        """Take what the device itself reports: (type, the queue's pointer or the port's number)."""
        lib, event = self._device.lib, AsyncEvent()
        found = []
        while lib.ask("ibv_get_async_event", self._device.context, ctypes.byref(event)) == 0:
            found.append((int(event.event_type), int(event.element or 0)))
            lib.do("ibv_ack_async_event", ctypes.byref(event))
        return found

    def ignore_device(self) -> None:
        """The device is dead: its own descriptor may stay readable for ever."""
        self._epoll.unregister(self._device.async_fd)

    def close(self) -> None:
        """Let go; the completion queue must be gone."""
        self._epoll.close()
        self._timer.close()
        self._device.free("ibv_destroy_comp_channel", self.channel)

"""The parts that verbs and efa share: events that libibverbs reports unasked, and access rights."""

from __future__ import annotations

import ctypes
import os
import select

from tep.backends.base import Access
from tep.backends.ffi.ibverbs import ENUMS, C, Library

__all__ = ["Events", "rights"]


def rights(access: Access) -> int:
    """The rights to a region, as ibv_reg_mr takes them."""
    local = ENUMS["IBV_ACCESS_LOCAL_WRITE"] if access.sink else 0
    remote = ENUMS["IBV_ACCESS_REMOTE_WRITE"] if access.target else 0
    return local | remote | (ENUMS["IBV_ACCESS_REMOTE_READ"] if access.readable else 0)


class Events:
    """The two descriptors of a device's context, joined behind an epoll.

    Args:
        lib: the library.
        context: of the device.

    Attributes:
        channel: for ibv_create_cq; who made this object destroys it, after the completion queue.
        fd: readable once either has news.
    """

    def __init__(self, lib: Library, context: int) -> None:
        self._lib = lib
        self._context = context
        self.channel = lib.make("ibv_create_comp_channel", context)
        channel_fd = int(C.ibv_comp_channel.from_address(self.channel).fd)
        self._async_fd = int(C.ibv_context.from_address(context).async_fd)
        self.epoll = select.epoll()
        self.fd = self.epoll.fileno()
        for fd in (channel_fd, self._async_fd):
            os.set_blocking(fd, False)
            self.epoll.register(fd, select.EPOLLIN)

    def take_completions(self) -> int:
        """Take completion events off the channel; return how many, to be acknowledged."""
        found, context, taken = ctypes.c_void_p(), ctypes.c_void_p(), 0
        arguments = (self.channel, ctypes.byref(found), ctypes.byref(context))
        while self._lib.ask("ibv_get_cq_event", *arguments) == 0:
            taken += 1
        return taken

    def take_device(self) -> list[tuple[int, int]]:
        """Take what the device itself reports: (type, the queue's pointer or the port's number)."""
        event, found = C.ibv_async_event(), []
        while self._lib.ask("ibv_get_async_event", self._context, ctypes.byref(event)) == 0:
            found.append((int(event.event_type), int(event.element.cq or 0)))
            self._lib.do("ibv_ack_async_event", ctypes.byref(event))
        return found

    def ignore_device(self) -> None:
        """The device is dead: its own descriptor may stay readable for ever."""
        self.epoll.unregister(self._async_fd)

"""Control messages between local NICs, over their socket: what goes out, what has come. No rows,
no messages.

A control message needs neither the rings nor a buffer. Once the kernel has taken it for the peer
it is as good
as in the peer's NIC, and lost only together with the peer; a full socket lets it wait here.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from tep.backends.base import Entry, Kind, Status
from tep.backends.handing import Unread
from tep.backends.local import channel
from tep.backends.local.outbound import Outbound, Way

__all__ = ["CONTROL_BYTES_MAX", "ControlMessages"]

CONTROL_BYTES_MAX: Final = 2048
"""Fits, with its sender's address, into what a socket is read with."""

_WAITING_MAX: Final = 64

_SENT: Final = int(Kind.SENT)


class ControlMessages:
    """The control messages of one NIC.

    Args:
        me: its address.
        done: where completions go.

    Attributes:
        unread: what has come.
    """

    def __init__(self, me: bytes, done: deque[Entry]) -> None:
        self._me = me
        self._done = done
        self.unread = Unread(done.append)

    def post(self, out: Outbound, payload: bytes, ctx: int) -> bool:
        """Take a control message; False = too many wait for room in the peer's socket."""
        if out.way is Way.GONE:
            self._end(ctx, Status.UNREACHABLE)
        elif len(payload) > CONTROL_BYTES_MAX:
            self._end(ctx, Status.LENGTH)
        elif len(out.controls) >= _WAITING_MAX:
            return False
        else:
            out.controls.append((channel.Control(self._me, bytes(payload)), ctx))
            self.serve(out)
        return True

    def serve(self, out: Outbound) -> None:
        """Hand the kernel what it has room for."""
        while out.controls and out.try_say(out.controls[0][0]):
            self._end(out.controls.popleft()[1], Status.OK)

    def end(self, out: Outbound, status: Status) -> None:
        """Nothing more goes to this peer."""
        while out.controls:
            self._end(out.controls.popleft()[1], status)

    def _end(self, ctx: int, status: Status) -> None:
        self._done.append((_SENT, int(status), 1, 0, 0, ctx, 0))

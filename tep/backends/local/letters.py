"""Messages of a local NIC to its peers: what waits for room in a lane, what is acknowledged."""

from __future__ import annotations

from collections import deque
from typing import Final

from tep.backends.base import Entry, Kind, Status
from tep.backends.local.outbound import Outbound, Way
from tep.backends.local.rings import ACKS

__all__ = ["Letters"]

_SENT: Final = int(Kind.SENT)


class Letters:
    """The messages of one NIC.

    Args:
        longest: bytes that a message may have.
        done: where completions go.
    """

    def __init__(self, longest: int, done: deque[Entry]) -> None:
        self._longest = longest
        self._done = done

    def post(self, out: Outbound, payload: bytes, ctx: int) -> bool:
        """Take a message; False = too many are on their way to that peer."""
        if out.way is Way.GONE:
            self._end(ctx, Status.UNREACHABLE)
        elif len(out.open) + len(out.letters) >= ACKS:
            return False
        elif len(payload) > self._longest:
            self._end(ctx, Status.LENGTH)
        else:
            out.letters.append((bytes(payload), ctx))
            if out.way is Way.UP:
                self.serve(out)
        return True

    def serve(self, out: Outbound) -> None:
        """Take acknowledgements, and put into the lane what it has room for."""
        self.take_acks(out)
        put = False
        while out.letters and out.lane.put_message(out.letters[0][0]):
            out.open.append(out.letters.popleft()[1])
            put = True
        if put:
            out.publish()

    def take_acks(self, out: Outbound) -> None:
        """End the messages that the peer, which is up, has taken."""
        for status in out.lane.take_acks():
            self._end(out.open.popleft(), status)

    def end(self, out: Outbound, status: Status) -> None:
        """Nothing more goes to this peer."""
        for ctx in (*out.open, *(ctx for _, ctx in out.letters)):
            self._end(ctx, status)
        out.open.clear()
        out.letters.clear()

    def _end(self, ctx: int, status: int) -> None:
        self._done.append((_SENT, int(status), 1, 0, 0, ctx, 0))

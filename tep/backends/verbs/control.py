"""Control messages between engines, over the handshake's datagrams: no connection is needed for
them.

So they pass where queue pairs have failed, or were fenced. Rule 1: to one peer one control message
is out at a
time, and is repeated until the peer has answered; so a control message that comes twice has the
number of the
one before. Rule 2: a peer that does not answer in time loses all control messages that wait for
it, and the time is a part of a handshake's: engines ask four times before they give a peer up.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from tep.backends.base import Entry, Status
from tep.backends.base import Kind as Completed
from tep.backends.handing import Unread
from tep.backends.verbs.handshake import Hello, Kind

if TYPE_CHECKING:
    from tep.backends.verbs.peer import Peer
    from tep.backends.verbs.settings import Settings

__all__ = ["ControlMessages"]

_CONTROLS_MAX: Final = 64
_PARTS: Final = 4
_PAUSES: Final = 8  # the longest pause is such a part of the time, or the first one

_SENT: Final = int(Completed.SENT)


class _Line:
    """The control messages that wait for one peer; the first is out.

    Attributes:
        number: of the one that is out.
        due_s: when it is repeated.
        deadline_s: when the peer is given up.
    """

    __slots__ = ("deadline_s", "due_s", "number", "pause_s", "waiting")

    def __init__(self) -> None:
        self.number = 0
        self.waiting: deque[tuple[bytes, int]] = deque()
        self.due_s = self.deadline_s = self.pause_s = 0.0


class ControlMessages:
    """The control messages of one NIC.

    Args:
        settings: how long to wait for an answer, and between repetitions.
        ready: where entries for poll() go.

    Attributes:
        open: lines with a control message that is out.
        unread: what has come.
    """

    def __init__(self, settings: Settings, ready: deque[Entry]) -> None:
        self.open: dict[Peer, _Line] = {}
        self.unread = Unread(ready.append)
        self._patience_s = settings.handshake_s / _PARTS
        self._pause_s = settings.resend_s
        self._pause_s_max = max(settings.resend_s, self._patience_s / _PAUSES)
        self._ready = ready
        self._lines: dict[Peer, _Line] = {}
        self._count = 0
        self._last: dict[Peer, int] = {}  # number of the control message that came last

    def post(self, peer: Peer, payload: bytes, ctx: int, now_s: float) -> bool:
        """Take a control message; False = too many wait."""
        if self._count == _CONTROLS_MAX:
            return False
        self._count += 1
        if peer.gone is not None:
            self._end(ctx, peer.gone)
            return True
        line = self._lines.get(peer)
        if line is None:
            line = self._lines[peer] = _Line()
        line.waiting.append((payload, ctx))
        if len(line.waiting) == 1:
            self._begin(peer, line, now_s)
        return True

    def _begin(self, peer: Peer, line: _Line, now_s: float) -> None:
        """Send the first of a line."""
        self.open[peer] = line
        line.number += 1
        line.pause_s = self._pause_s / 2
        line.deadline_s = now_s + self._patience_s
        self._say(peer, line, now_s)

    def _say(self, peer: Peer, line: _Line, now_s: float) -> None:
        line.pause_s = min(2 * line.pause_s, self._pause_s_max)
        line.due_s = now_s + line.pause_s
        peer.say(Kind.CONTROL, peer.negotiation.attempt, line.number, line.waiting[0][0])

    def hear(self, peer: Peer, hello: Hello, now_s: float) -> None:
        """Take a CONTROL, or the answer to one."""
        if hello.kind is Kind.CONTROL:
            if hello.echo > self._last.get(peer, 0):
                self._last[peer] = hello.echo
                self.unread.add(hello.payload, peer.where.encode())
            peer.say(Kind.CONTROL_ACK, peer.negotiation.attempt, hello.echo)
            return
        line = self.open.get(peer)
        if line is None or hello.echo != line.number:
            return
        _, ctx = line.waiting.popleft()
        self._end(ctx, Status.OK)
        if line.waiting:
            self._begin(peer, line, now_s)
        else:
            del self.open[peer]

    def progress(self, now_s: float) -> None:
        """Repeat what was not answered, or give up."""
        for peer, line in list(self.open.items()):
            if now_s < line.due_s:
                continue
            # If we come late, it is this process that was held up, and not the peer.
            line.deadline_s += now_s - line.due_s
            if now_s >= line.deadline_s:
                self.fail(peer, Status.UNREACHABLE)
            else:
                self._say(peer, line, now_s)

    def next_s(self) -> list[float]:
        """When progress() has something to do."""
        return [line.due_s for line in self.open.values()]

    def fail(self, peer: Peer, status: Status) -> None:
        """End every control message that waits for a peer."""
        line = self.open.pop(peer, None)
        while line is not None and line.waiting:
            _, ctx = line.waiting.popleft()
            self._end(ctx, status)

    def _end(self, ctx: int, status: Status) -> None:
        self._count -= 1
        self._ready.append((_SENT, int(status), 1, 0, 0, ctx, 0))

"""Users' messages to be sent: a queue for each peer, so that no peer delays another.

A NIC has room for a limited number of messages, and messages to a peer without a free receive
buffer stay there. Hence only a few messages to each peer may be in flight at a time, and more once
the peer has shown that it takes messages.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from tep.backends.base import Domain, Status
from tep.base.errors import FabricError, TepError
from tep.core.group import DomainGroup
from tep.core.handles import Message, State
from tep.core.path import Link, PeerRestarted

__all__ = ["WINDOW", "WINDOW_MAX", "Outbox"]

WINDOW: Final = 8
"""Messages to one peer that may be in flight before it has taken the first."""

WINDOW_MAX: Final = 32
"""The same for a peer that takes them; half of the smallest queue of a known NIC."""

_DONE: Final = State.DONE
_FAILED: Final = State.FAILED
_OK: Final = int(Status.OK)


class _Line:
    """The messages to one peer: `out` are in flight, `window` may be.

    `in_turn`: it is in `turns`; else the end of a message puts it there.
    """

    __slots__ = ("in_turn", "link", "out", "waiting", "window")

    def __init__(self, link: Link) -> None:
        self.link = link
        # Not a dict: removing the first entry repeatedly takes quadratic time there.
        self.waiting: OrderedDict[Message, None] = OrderedDict()
        self.out = 0
        self.window = WINDOW
        self.in_turn = False


class Outbox:
    """All messages of one engine that have not ended.

    Attributes:
        waiting: how many messages are queued.
        posted: messages in flight, by ctx.
        turns: peers with a message that may be posted, in the order of their turns.
    """

    def __init__(
        self, group: DomainGroup, end: Callable[[Message, State, TepError | None], None]
    ) -> None:
        self.waiting = 0
        self.posted: dict[int, Message] = {}
        self.turns: deque[_Line] = deque()
        self._lines: dict[Link, _Line] = {}
        self._ctx = 0
        self._group = group
        self._end = end

    def add(self, message: Message) -> None:
        """Queue a message behind the others to its peer."""
        line = self._lines.get(message.link)
        if line is None:
            line = self._lines[message.link] = _Line(message.link)
        line.waiting[message] = None
        self.waiting += 1
        self._give_turn(line)

    def cancel(self, message: Message) -> bool:
        """Take a message back; False: a NIC has it."""
        if message.posted:
            return False
        line = self._lines[message.link]
        del line.waiting[message]
        self.waiting -= 1
        return True

    def post(self) -> bool:
        """Offer the NICs one message of each peer in turn; True if one was taken, or failed."""
        work = False
        turns, refused = self.turns, []
        while turns:
            line = turns.popleft()
            line.in_turn = False
            if line.waiting and line.out < line.window:
                if self._offer(line):
                    work = True
                else:  # full for this peer: go on with the others
                    refused.append(line)
                    continue
            self._give_turn(line)
        for line in refused:
            self._give_turn(line)
        return work

    def _give_turn(self, line: _Line) -> None:
        """Put a line into `turns` if it may post; forget it if it has no messages."""
        if line.in_turn:
            return
        if line.waiting and line.out < line.window:
            line.in_turn = True
            self.turns.append(line)
        elif not (line.waiting or line.out):
            del self._lines[line.link]

    def _offer(self, line: _Line) -> bool:
        """Offer the first message of a line to the first NIC that works; False: it is full.

        If the peer cannot be reached, the message fails.
        """
        group, link = self._group, line.link
        message = next(iter(line.waiting))
        try:
            domain, message.nic = link.route(group.alive, group.first_alive(), 0)
            peer = link.peer(domain, message.nic)
        except TepError as error:
            self._take_first(line)
            self._end(message, _FAILED, error)
            return True
        self._ctx += 1  # each try has its own: one that raised may have been taken
        try:
            taken = group.domains[domain].post_send(peer, message.payload, self._ctx)
        except (OSError, MemoryError) as error:
            group.give_up(domain, error)
            return True  # the next try uses another NIC, or the same one after a signal
        if not taken:
            return False
        self._take_first(line)
        self.posted[self._ctx] = message
        message.posted = True
        message.over = domain
        line.out += 1
        return True

    def _take_first(self, line: _Line) -> None:
        line.waiting.popitem(last=False)
        self.waiting -= 1

    def lost(self, domain: int) -> None:
        """A NIC is gone: its messages will not complete."""
        for ctx, message in tuple(self.posted.items()):
            if message.over == domain:
                self.sent(domain, ctx, Status.NIC_DOWN)

    def sent(self, domain: int, ctx: int, status: int) -> None:
        """Take a NIC's completion of a message."""
        message = self.posted.pop(ctx)
        line = self._lines[message.link]
        line.out -= 1
        if status == _OK and line.window < WINDOW_MAX:
            line.window += 1
        self._give_turn(line)
        if status == _OK:
            self._end(message, _DONE, None)
            return
        error = _error(message, self._group.domains[domain], domain, status)
        if status == Status.UNREACHABLE:  # the next message uses another NIC of the peer
            self._group.is_silent(domain, message.link, message.nic)
        elif status == Status.STALE_PEER:
            self._group.events.append(PeerRestarted(message.link))
        self._end(message, _FAILED, error)


def _error(message: Message, nic: Domain, domain: int, status: int) -> FabricError:
    """Make the error of a message that did not arrive; `domain` is the number of our NIC."""
    code, hint, name = Status(status).name, nic.status_text(status), message.link.addr.name
    return FabricError(
        f"message of {len(message.payload)} bytes to {name} failed on NIC {domain}: "
        f"{code}{': ' + hint if hint else ''}",
        code=code,
        domain=domain,
        peer=name,
    )

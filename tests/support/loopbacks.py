"""Loopback NICs that die, and NICs that hold their rows back for a while. Not a test."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from tep.backends.base import Completions, Kind, Opened, ReadBatch, Status, WriteBatch
from tep.backends.loopback import Hub, LoopbackDomain, Message, Way, open_domains

__all__ = ["MortalLoopback", "SlowLoopback", "open_made"]

_POLLS_HELD: Final = 3

AnyBatch = WriteBatch | ReadBatch
Held = tuple[int, Way, AnyBatch, int, int]
"""A row that has not left: the poll in which it leaves, way, batch, its number, and one more."""


def open_made(
    make: type[LoopbackDomain],
    nics: int,
    *,
    hub: Hub,
    name: str,
    **caps: Any,
) -> Opened:
    """Open NICs of a class as `open_domains` opens the loopback's; `caps` replace some of them."""
    plain = open_domains(nics, hub=hub, name=name)
    if make is LoopbackDomain and not caps:
        return plain
    made = []
    for nic, domain in enumerate(plain.domains):
        domain.close()
        own = dataclasses.replace(domain.caps, **caps)
        made.append(make(hub, name, nic, epoch=plain.epoch, caps=own))
    return plain._replace(domains=tuple(made))


class MortalLoopback(LoopbackDomain):
    """A loopback NIC that can die as hardware does."""

    down = False

    def fail(self) -> None:
        """Let this NIC die: NIC_DOWN for all that is open, and Kind.DOWN."""
        if self.alive:
            self.down = True
            self._end(Status.NIC_DOWN)
            self.arrived.append((int(Kind.DOWN), int(Status.NIC_DOWN), 1, 0, 0, 0, 0))
            self.waker()

    def close(self) -> None:
        self.down = False
        super().close()

    def _carry_out(self, way: Way, batch: AnyBatch, start: int, stop: int) -> None:
        if self.down:
            self._fail_rows(way, batch, start, stop, Status.NIC_DOWN)
        else:
            super()._carry_out(way, batch, start, stop)

    def _fail_rows(self, way: Way, batch: AnyBatch, start: int, stop: int, status: Status) -> None:
        # What a read has not brought when its NIC dies never comes: FLUSHED is the truth (C30).
        status = Status.FLUSHED if way is self._reads else status
        for row in range(start, stop):
            self._finish(way, status, batch.ctx, row=row)

    def _try_send(self, message: Message) -> Status | None:
        return Status.NIC_DOWN if self.down else super()._try_send(message)

    def post_control(self, peer: int, payload: bytes, ctx: int) -> bool:
        if not self.down:
            return super().post_control(peer, payload, ctx)
        if self._has_room():
            self._sent(Status.NIC_DOWN, ctx)
            return True
        return False

    def _check_open(self) -> None:
        if not self.down:
            super()._check_open()


class SlowLoopback(MortalLoopback):
    """A loopback NIC whose rows leave some polls after they were posted.

    Attributes:
        held: the rows that have not left.
        polls: so far.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.polls = 0
        self.held: list[Held] = []

    def _carry_out(self, way: Way, batch: AnyBatch, start: int, stop: int) -> None:
        if self.down:
            super()._carry_out(way, batch, start, stop)
        else:
            left = self.polls + _POLLS_HELD
            self.held += [(left, way, batch, row, row + 1) for row in range(start, stop)]

    def poll(self, out: Completions) -> int:
        self.polls += 1
        for held in self.leave():
            self.held.remove(held)
            super()._carry_out(*held[1:])
        filled = super().poll(out)
        if self.held:
            self.waker()
        return filled

    def leave(self) -> list[Held]:
        """Choose the rows that leave now, in order."""
        return [held for held in self.held if held[0] <= self.polls]

    def arm(self) -> bool:
        return not self.held and super().arm()

    def _end(self, status: Status) -> None:
        for _, way, batch, start, stop in self.held:
            self._fail_rows(way, batch, start, stop, status)
        self.held.clear()
        super()._end(status)

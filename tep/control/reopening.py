"""Paths that were fenced off are taken into use again: the sender asks, the receiver agrees.

A fence ends what was sent before it, for good (C26); with `unfence` a NIC takes what is sent later
(C27). Rule 1: a sender asks only when none of its rows is out on the path or waits to be made good.
Rule 2: a receiver agrees only when the same holds of its own rows on the way back, since NICs may
have one connection for both. Rule 3: what a lease keeps shut stays shut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tep.control.messages import WHY_MAX, Answer, Asked, Reopen, Told
from tep.core.region import Link

if TYPE_CHECKING:
    from tep.engine.worker import Worker

__all__ = ["Reopening"]

Lane = tuple[Link, int, int]
"""A peer, our NIC, its NIC."""


class Reopening:
    """Both ends of it, for one engine.

    Args:
        worker: whose paths they are.
        find: the peer that a NIC's address belongs to, and the NIC's number; None: nothing is
            known of it.
        opened: takes note of a lane, by peer and its NIC, that is in use again.
    """

    def __init__(
        self,
        worker: Worker,
        find: Callable[[bytes], tuple[Link, int] | None],
        opened: Callable[[Link, int], object],
    ) -> None:
        self._group = worker.group
        self._channel = worker.channel
        self._recovery = worker.recovery
        self._fencing = worker.fencing
        self._find = find
        self._opened = opened
        self._asking: set[Lane] = set()
        self._channel.hear(Reopen, self._asked)

    # ------------------------------------------------------------------ the sender's half

    def wanted(self, link: Link, nic: int) -> list[tuple[int, int]]:
        """The lanes to a NIC of a peer that are shut, although our NIC lives."""
        alive = self._group.alive
        return [lane for lane in sorted(link.shut) if lane[1] == nic and alive[lane[0]]]

    def begin(self, link: Link, domain: int, nic: int) -> None:
        """A peer answers over a lane: ask for it back if it is shut.

        One that could not be fenced while the peer did not answer is fenced first.
        """
        lane = link, domain, nic
        if (domain, nic) in link.shut and lane not in self._asking and self._is_clear(lane):
            self._asking.add(lane)
            if (domain, nic) in link.fenced:
                self._ask(lane)
            else:
                self._put(lane, lambda n, at: Asked(n, at, nic, ()), self._is_fenced)

    def _is_clear(self, lane: Lane) -> bool:
        link, domain, nic = lane
        live = link.current and self._group.alive[domain]
        return live and self._recovery.is_clear(domain, link, nic)

    def _put(
        self,
        lane: Lane,
        note: Callable[[int, bytes], Asked | Reopen],
        told: Callable[[Lane], object],
    ) -> None:
        link, domain, _ = lane
        own = self._group.domains[domain].address
        self._channel.ask(
            link,
            lambda number: note(number, own),
            lambda answer: self._told(lane, answer, told),
            lambda _: self._asking.discard(lane),
        )

    def _told(self, lane: Lane, answer: Answer, told: Callable[[Lane], object]) -> None:
        # What was refused is asked for again when the peer answers the next time.
        self._asking.discard(lane)
        if not answer.why and lane[0].current:
            told(lane)

    def _is_fenced(self, lane: Lane) -> None:
        link, domain, nic = lane
        link.fence(domain, nic)
        if self._is_clear(lane):
            self._asking.add(lane)
            self._ask(lane)

    def _ask(self, lane: Lane) -> None:
        nic = lane[2]
        self._put(lane, lambda n, at: Reopen(n, at, nic), self._is_open)

    def _is_open(self, lane: Lane) -> None:
        if not self._is_clear(lane):
            return
        link, domain, nic = lane
        self._fencing.lift(link.addr.domains[nic], domain)  # the way back, if it is ours to open
        self._group.reopen(link, domain, nic)
        self._opened(link, nic)

    # ------------------------------------------------------------------ the receiver's half

    def _asked(self, nic: int, address: bytes, note: Reopen) -> None:
        if not self._fencing.admit(nic, address, note) or self._fencing.is_outdated(note):
            return
        why = self._why_not(note) or self._fencing.lift(note.source, note.nic)
        self._channel.answer(nic, address, Told(note.number, why[:WHY_MAX], ()))

    def _why_not(self, note: Reopen) -> str:
        if not self._group.alive[note.nic]:
            return f"its NIC {note.nic} is down"
        found = self._find(note.source)
        if found is not None:
            link, number = found
            shut = (note.nic, number) in link.shut
            if shut and not self._recovery.is_clear(note.nic, link, number):
                return "rows of its own wait to be made good there"
        return ""

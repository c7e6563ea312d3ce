"""Fairness at one engine's NICs, as their taps see it: who waits, and who is served meanwhile.

Two rules. Nobody waits for another to end: while rows wait for a NIC, no other batch gets two turns
there, and none more rows in a turn than `post_rows_max`. And nobody waits for nothing: no NIC with
room ends a step with a batch that it was not offered, unless more wait than a step can offer.
Whatever may have moved or dropped what waits (an error, a cancel, a close) makes this judge forget,
not guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Final, Protocol

from tep.core.posting import TURNS_MAX


class Waiting(Protocol):
    """The owner of rows; here it matters only whether they may still be posted.

    Attributes:
        failed: rows that came back with an error.
    """

    failed: int

    def may_post(self) -> str:
        """Why no row of it may be posted now; "" if it may."""

    def is_failing(self) -> bool:
        """Return True if it has an error without a failed row: e.g. every path is fenced off."""


class Turns:
    """The batches that wait at the NICs of one engine.

    Args:
        nics: number of NICs.
        rows_max: most rows of one turn while others wait.
        depth: rows that a NIC holds.
        blame: takes the unfair wait, in words.
        in_pieces: True if an idle NIC may get queued rows of another one, which no tap sees:
            then the queue of one NIC is unknown, and only the rule about all NICs is left.

    Attributes:
        crowded: turns of a batch while others waited.
    """

    def __init__(
        self,
        nics: int,
        rows_max: int,
        depth: int,
        blame: Callable[[str], object],
        *,
        in_pieces: bool = False,
    ) -> None:
        self._in_pieces = in_pieces
        self.crowded = 0
        self._blame = blame
        self._rows_max: Final = rows_max
        self._depth: Final = depth
        # By NIC: what was offered and has rows left, by ctx, and what was served there since.
        self._queued: list[dict[int, tuple[Waiting, set[int]]]] = [{} for _ in range(nics)]
        self._offered: list[set[int]] = [set() for _ in range(nics)]
        # Submitted and never offered: nobody knows on which NICs. What each NIC has served since,
        # and which NICs served something twice.
        self._fresh: dict[Waiting, tuple[list[set[int]], set[int]]] = {}
        self._idle: set[int] = set()
        self._live = set(range(nics))

    def watched(self, nic: int) -> tuple[Sized, Sized, Sized]:
        """While all of these are empty, stepped() of a NIC has nothing to judge."""
        return self._fresh, self._queued[nic], self._offered[nic]

    def submitted(self, who: Waiting) -> None:
        """Somebody has rows to be posted, from the next step on."""
        self._fresh[who] = [set() for _ in self._queued], set()

    def forget(self) -> None:
        """Something may have taken rows out of the queues, or to another NIC."""
        self._fresh.clear()
        for queued in self._queued:
            queued.clear()

    def lost(self, nic: int) -> None:
        """A NIC is gone."""
        self._live.discard(nic)
        self.forget()

    def offered(self, nic: int, who: Waiting, ctx: int, taken: int, left: int) -> None:
        """Note a batch that a NIC was offered, and the rows that it took."""
        self._fresh.pop(who, None)
        queued = self._queued[nic]
        self._offered[nic].add(ctx)
        if taken and (self._fresh or len(queued) > (ctx in queued)):
            self._served(nic, ctx, taken)
        if left and not self._in_pieces:
            queued[ctx] = who, set()
        else:
            queued.pop(ctx, None)

    def _served(self, nic: int, ctx: int, taken: int) -> None:
        """A NIC took rows while others waited, as far as is known."""
        waits = False
        for other, (who, served) in self._queued[nic].items():
            if other != ctx and _waits(who):
                waits = True
                if ctx in served:
                    self._blame(f"NIC {nic} served batch {ctx} twice while {who} waited")
                served.add(ctx)
        self.crowded += waits
        if waits and taken > self._rows_max:
            self._blame(f"NIC {nic} took {taken} rows of one batch while others waited")
        for who, (served_by, passed_by) in self._fresh.items():
            if ctx in served_by[nic]:
                passed_by.add(nic)
                if passed_by >= self._live and _waits(who):
                    self._blame(f"every NIC served others twice before any was offered {who}")
            served_by[nic].add(ctx)

    def stepped(self, nic: int, outstanding: int) -> None:
        """A step has posted what it would on a NIC that lives, and is about to poll it.

        Args:
            nic: which; they come in order.
            outstanding: rows that it holds.
        """
        offered, queued = self._offered[nic], self._queued[nic]
        if outstanding >= self._depth:
            self._idle.discard(nic)
        else:
            self._idle.add(nic)
            if queued and len(queued) + len(offered) < TURNS_MAX:
                for ctx, (who, _) in queued.items():
                    if ctx not in offered and _waits(who):
                        self._blame(f"NIC {nic} has room, and was not offered {who}")
        if offered:
            offered.clear()
        if self._fresh and nic == max(self._live, default=-1) and self._idle >= self._live:
            if max(map(len, self._queued)) + len(self._fresh) >= TURNS_MAX:
                return
            for who in filter(_waits, self._fresh):
                self._blame(f"every NIC has room, and none was offered {who}")


def _waits(who: Waiting) -> bool:
    return not (who.failed or who.is_failing() or who.may_post())

"""The link of one chaos NIC: slow, clogged, deaf, cut off from some, or without acknowledgements.

It holds what cannot pass and lets it go in the order it came. What a row that waits too long ends
in is the NIC's matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Literal, TypeVar

from tep.sim.clock import FabricEnv

__all__ = ["Link", "Trouble"]

Trouble = Literal["clog", "deaf", "mute"]

FragmentT = TypeVar("FragmentT")
RowT = TypeVar("RowT")


class Link(Generic[FragmentT, RowT]):
    """What becomes of fragments and acknowledgements on their way to or from one NIC.

    Attributes:
        clogs: how many faults last by which nothing passes; 0: none.
        deafs: the same of those by which nothing comes in.
        mutes: the same of those by which no acknowledgement comes in.
        cuts: how many faults last by which nothing comes in from a link; not in it: none.
        factor: how many times as long as usual everything takes.

    Args:
        env: the clock.
        land: takes a fragment again that was held.
        acknowledge: takes a row again whose acknowledgement was held.
    """

    __slots__ = (
        "_acknowledge",
        "_acks",
        "_env",
        "_fragments",
        "_healed",
        "_land",
        "_slows",
        "clogs",
        "cuts",
        "deafs",
        "factor",
        "mutes",
    )

    def __init__(
        self,
        env: FabricEnv,
        land: Callable[[FragmentT], None],
        acknowledge: Callable[[RowT], None],
    ) -> None:
        self.clogs = 0
        self.deafs = 0
        self.mutes = 0
        self.cuts: dict[Link[FragmentT, RowT], int] = {}
        self.factor = 1
        self._env = env
        self._land = land
        self._acknowledge = acknowledge
        self._slows: list[int] = []
        self._fragments: list[FragmentT] = []
        self._acks: list[RowT] = []
        self._healed = 0

    def lets_in(self, source: Link[FragmentT, RowT]) -> bool:
        """Whether fragments from another link come in here now."""
        return not (self.clogs or self.deafs or source.clogs or source in self.cuts)

    def hears(self, target: Link[FragmentT, RowT]) -> bool:
        """Whether answers of another link to what was sent from here come in now."""
        return not self.mutes and self.lets_in(target)

    def hold(self, fragment: FragmentT) -> None:
        """Keep a fragment until the clog is gone."""
        self._fragments.append(fragment)

    def hold_ack(self, row: RowT) -> None:
        """Keep an acknowledgement until it can be heard."""
        self._acks.append(row)

    def trouble(self, what: Trouble, for_ps: int | None) -> None:
        """Begin a clog, or deafness."""
        self._count(what, 1)
        if for_ps is not None:
            self._env.call_at(self._env.now + for_ps, self._ends, (what, self._healed))

    def cut(self, source: Link[FragmentT, RowT], for_ps: int | None) -> None:
        """Let nothing in that comes from another link."""
        self.cuts[source] = self.cuts.get(source, 0) + 1
        if for_ps is not None:
            self._env.call_at(self._env.now + for_ps, self._joins, (source, self._healed))

    def slow(self, factor: int, for_ps: int | None) -> None:
        """Take `factor` times as long; of several the slowest counts."""
        self._slows.append(factor)
        self.factor = max(self._slows)
        if for_ps is not None:
            self._env.call_at(self._env.now + for_ps, self._hurries, (factor, self._healed))

    def heal(self) -> None:
        """End every trouble at once."""
        self._healed += 1
        self.clogs = self.deafs = self.mutes = 0
        self.cuts.clear()
        self._slows.clear()
        self.factor = 1
        self._let_go()

    def _ends(self, which: tuple[Trouble, int]) -> None:
        what, healed = which
        if healed != self._healed:
            return
        self._count(what, -1)
        self._let_go()

    def _joins(self, which: tuple[Link[FragmentT, RowT], int]) -> None:
        source, healed = which
        if healed != self._healed:
            return
        self.cuts[source] -= 1
        if not self.cuts[source]:
            del self.cuts[source]
            self._let_go()

    def _count(self, what: Trouble, change: int) -> None:
        match what:
            case "clog":
                self.clogs += change
            case "deaf":
                self.deafs += change
            case "mute":
                self.mutes += change

    def _hurries(self, which: tuple[int, int]) -> None:
        factor, healed = which
        if healed == self._healed:
            self._slows.remove(factor)
            self.factor = max(self._slows, default=1)

    def _let_go(self) -> None:
        if self.clogs:
            return
        fragments, self._fragments = self._fragments, []
        for fragment in fragments:
            self._land(fragment)
        acks, self._acks = self._acks, []
        for row in acks:  # one that its sender cannot hear yet is held again, at the sender's link
            self._acknowledge(row)

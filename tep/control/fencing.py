"""The receiver's half of a failover: fence a sender's dead path, and say what had come over it;
lift the fence when both sides are through with it.

The sender's half is `recovery`. Rule: nothing is said of a path before it is fenced, since more
could come.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Final, cast

from tep.backends.base import Domain, Noting, Status
from tep.control.channel import Channel, Drop
from tep.control.messages import NICS_MAX, WHY_MAX, Asked, Prune, Reopen, Told
from tep.core.sums import Arrivals
from tep.errors import FabricError, TepError

__all__ = ["Fencing"]

_ASKING_MAX: Final = 64
"""Questions about one path that wait for its fence; those beyond are put again."""

_PATHS_MAX: Final = 1 << 14
"""Paths that are remembered. Beyond them those of the engine that was met first are forgotten: at
worst a late copy of a question fences or opens a path once more, and its rows are made good."""

_OTHER: Final[dict[type[Asked | Reopen], type[Asked | Reopen]]] = {Asked: Reopen, Reopen: Asked}


class _Fence:
    """One path that is being fenced, or was: who wants to know, and how it ended."""

    __slots__ = ("asking", "status")

    def __init__(self) -> None:
        self.asking: list[Callable[[int], object]] = []
        self.status = -1


class Fencing:
    """All fences of one engine.

    Args:
        domains: its NICs.
        arrivals: what came in on each; empty where that is not noted.
        mail: where questions come in and answers go out.

    Attributes:
        arrivals: as above.
        guarded: says whether a lease keeps the paths of the NIC at an address shut.
    """

    def __init__(
        self, domains: Sequence[Domain], arrivals: Sequence[Arrivals], mail: Channel
    ) -> None:
        self._nics = [cast("Noting", domain) for domain in domains]
        self.arrivals = arrivals
        self._channel = mail
        self._fences: dict[tuple[bytes, int], _Fence] = {}
        self._begun: dict[int, _Fence] = {}
        self.guarded: Callable[[bytes], bool] = lambda _: False
        # By path: the number of the last question of either kind. Copies of older ones come late.
        self._numbers: dict[type[Asked | Reopen], dict[tuple[bytes, int], int]] = {
            Asked: {},
            Reopen: {},
        }
        self._paths: dict[bytes, set[tuple[bytes, int]]] = {}  # asked about, by engine
        self._npaths = 0
        self._ctxs = itertools.count()
        mail.hear(Asked, self._asked)
        mail.hear(Prune, self._prune)

    def is_outdated(self, note: Asked | Reopen) -> bool:
        """Whether a question is a late copy: its path was shut, or opened, after it was put."""
        key = note.source, note.nic
        mine, other = self._numbers[type(note)], self._numbers[_OTHER[type(note)]]
        if note.number < other.get(key, 0):
            return True
        mine[key] = max(note.number, mine.get(key, 0))
        return False

    def admit(self, nic: int, address: bytes, note: Asked | Reopen) -> bool:
        """Whether a question is about a path that can be, and there is room to remember it."""
        if note.nic >= len(self._nics):
            why = f"it has NICs 0 to {len(self._nics) - 1}, and was asked about NIC {note.nic}"
            self._channel.answer(nic, address, Told(note.number, why, ()))
            return False
        engine, key = self._channel.engine_of(nic, address), (note.source, note.nic)
        mine = self._paths.setdefault(engine, set())
        if key in mine:
            return True
        if len(mine) >= NICS_MAX * len(self._nics):
            self._channel.drop(Drop.FULL, address, f"{len(mine)} paths of this engine are known")
            return False
        mine.add(key)
        self._npaths += 1
        while self._npaths > _PATHS_MAX and len(self._paths) > 1:
            self._forget_paths(self._paths.pop(next(iter(self._paths))))
        return True

    def _forget_paths(self, keys: Collection[tuple[bytes, int]]) -> None:
        self._npaths -= len(keys)
        for key in keys:
            if key in self._fences and self._fences[key].status >= 0:
                del self._fences[key]
            for known in self._numbers.values():
                known.pop(key, None)

    def _asked(self, nic: int, address: bytes, note: Asked) -> None:
        if not self.admit(nic, address, note) or self.is_outdated(note):
            return
        fence = self._fences.get((note.source, note.nic))
        if fence is not None and len(fence.asking) >= _ASKING_MAX:
            self._channel.drop(Drop.FULL, address, "too many questions about one path")
            return

        def tell(status: int) -> None:
            self._channel.guard(address, self._tell, nic, address, note, status)

        try:
            self.fence(note.source, note.nic, tell)
        except TepError as error:
            why = f"no fence: {error}"[:WHY_MAX]
            self._channel.answer(nic, address, Told(note.number, why, ()))

    def fence(self, source: bytes, nic: int, then: Callable[[int], object]) -> None:
        """Fence the NIC at an address off at our NIC `nic`; then(status), at once if it was before.

        One that failed is tried again. Raises TepError where the NIC cannot even begin.
        """
        there = self._nics[nic].caps
        if not there.imm_source:
            raise FabricError(f"its NIC {there.nic} cannot fence a path off", code="PROVIDER")
        key = source, nic
        fence = self._fences.get(key)
        if fence is None or fence.status > Status.OK:
            ctx = next(self._ctxs)
            self._nics[nic].fence(source, ctx)
            fence = self._fences[key] = self._begun[ctx] = _Fence()
        if fence.status < 0:
            fence.asking.append(then)
        else:
            then(fence.status)

    def lift(self, source: bytes, nic: int) -> str:
        """Take rows of the NIC at an address again at our NIC `nic`; say why not, or "".

        Of those that had ended before none lands any more (C27).
        """
        key = source, nic
        fence = self._fences.get(key)
        if self.guarded(source):
            return "a lease that its holder has not let go of keeps this path shut"
        if fence is not None and fence.status != Status.OK:
            return self.why_not(nic, fence.status) if fence.status > 0 else "it is being fenced off"
        try:
            self._nics[nic].unfence(source)
        except TepError as error:
            return str(error)
        self._fences.pop(key, None)
        return ""

    def fenced(self, ctx: int, status: int) -> None:
        """A NIC says how a fence ended."""
        fence = self._begun.pop(ctx)
        fence.status = status
        asking, fence.asking = fence.asking, []
        for then in asking:
            then(status)

    def why_not(self, nic: int, status: int) -> str:
        """Say why a path cannot be fenced off, or "" if it could."""
        if status == Status.OK:
            return ""
        there = self._nics[nic]
        hint = there.status_text(status)
        why = f"its NIC {there.caps.nic} cannot fence the path off: {Status(status).name}"
        return why + (f": {hint}" if hint else "")

    def forget(self, addresses: Collection[bytes]) -> None:
        """Drop what is remembered of a peer that has left, by its NICs' addresses."""
        for key, fence in tuple(self._fences.items()):
            if key[0] in addresses and fence.status >= 0:
                del self._fences[key]
        for known in self._numbers.values():
            for key in [key for key in known if key[0] in addresses]:
                del known[key]
        for engine, keys in tuple(self._paths.items()):
            gone = {key for key in keys if key[0] in addresses}
            keys.difference_update(gone)
            self._npaths -= len(gone)
            if not keys:
                del self._paths[engine]
        for nic, arrivals in zip(self._nics, self.arrivals, strict=False):
            arrivals.forget(nic, addresses)

    def _tell(self, nic: int, address: bytes, note: Asked, status: int) -> None:
        counts: tuple[int, ...] = ()
        pruned = 0
        there = self._nics[note.nic]
        why = self.why_not(note.nic, status)
        if note.imms and not why:
            if not self.arrivals:
                why = "it does not note where immediates come from"
            elif not (why := self.arrivals[note.nic].forgot(there, note.source)):
                counts = self.arrivals[note.nic].sums(there, note.source, note.imms)
                pruned = self.arrivals[note.nic].pruned(note.source)
        self._channel.answer(nic, address, Told(note.number, why[:WHY_MAX], counts, pruned))

    def _prune(self, nic: int, address: bytes, note: Prune) -> None:
        # What is told of a fenced path must not change while its sender compares.
        if note.nic >= len(self.arrivals):
            why = f"it notes no immediates at a NIC {note.nic}"
        elif (note.source, note.nic) in self._fences:
            why = "this path is fenced off"
        else:
            why = self.arrivals[note.nic].prune(
                self._nics[note.nic], note.source, note.generation, note.runs
            )
        self._channel.answer(nic, address, Told(note.number, why[:WHY_MAX], ()))

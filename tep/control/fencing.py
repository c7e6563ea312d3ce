"""The receiver's half of a failover: fence a failed path, and count what arrived over it.

The fence is lifted when both sides have settled their rows. The sender's half is `failover`.
Rule: counts of a path are sent only after it is fenced, since more rows could arrive before that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Final, cast

from tep.backends.base import ControlDomain, Status
from tep.control.channel import Channel, Drop
from tep.control.messages import NICS_MAX, FenceOff, Prune, Reopen
from tep.core.events import PathKeptShut
from tep.core.group import DomainGroup
from tep.core.path import Fence
from tep.core.sums import Arrivals
from tep.errors import FabricError, TepError

__all__ = ["Fencing"]

_ASKING_MAX: Final = 64
"""Questions about one path that may wait for its fence; others are dropped and repeated."""

_PATHS_MAX: Final = 1 << 14
"""Paths that are remembered. Beyond that, the paths of the first engine are forgotten: then a late
copy of a question may fence or open a path once more, and its rows are retransmitted."""


class Fencing:
    """All fences of one engine.

    Args:
        group: its NICs, and the far ends of its paths.
        arrivals: the immediates that arrived on each NIC; empty if they are not counted.
        channel: control messages from and to the peers' engines.

    Attributes:
        arrivals: as above.
    """

    def __init__(self, group: DomainGroup, arrivals: Sequence[Arrivals], channel: Channel) -> None:
        self._nics = [cast("ControlDomain", domain) for domain in group.domains]
        self.arrivals = arrivals
        self._channel = channel
        self._far_ends, self._events = group.far_ends, group.events
        self._begun: dict[int, Fence] = {}
        self._paths: dict[bytes, set[tuple[int, bytes]]] = {}  # that were asked about, by engine
        self._npaths = 0
        self._ctxs = itertools.count()
        channel.hear(FenceOff, self._asked)
        channel.hear(Prune, self._prune)

    def is_outdated(self, message: FenceOff | Reopen) -> bool:
        """Whether a question is a late copy: a later question has opened or fenced its path."""
        far = self._far_ends.at(message.nic, message.source)
        if message.number < (far.reopened if isinstance(message, FenceOff) else far.asked):
            return True
        if isinstance(message, FenceOff):
            far.asked = max(message.number, far.asked)
        else:
            far.reopened = max(message.number, far.reopened)
        return False

    def admit(self, nic: int, address: bytes, message: FenceOff | Reopen) -> bool:
        """Whether a question is about a path that can exist and for which there is room."""
        if message.nic >= len(self._nics):
            why = f"it has NICs 0 to {len(self._nics) - 1}, and was asked about NIC {message.nic}"
            self._channel.tell(nic, address, message.number, why)
            return False
        engine, key = self._channel.engine_of(nic, address), (message.nic, message.source)
        mine = self._paths.setdefault(engine, set())
        if key in mine:
            return True
        if len(mine) >= NICS_MAX * len(self._nics):
            self._channel.drop(Drop.FULL, address, f"{len(mine)} paths of this engine are known")
            return False
        mine.add(key)
        self._npaths += 1
        while self._npaths > _PATHS_MAX:
            self._forget_paths(self._paths.pop(next(iter(self._paths))))
        return True

    def _forget_paths(self, keys: Collection[tuple[int, bytes]]) -> None:
        self._npaths -= len(keys)
        for key in keys:
            self._far_ends.drop(*key)

    def _asked(self, nic: int, address: bytes, message: FenceOff) -> None:
        if not self.admit(nic, address, message) or self.is_outdated(message):
            return
        fence = self._far_ends.at(message.nic, message.source).fence
        if fence is not None and len(fence.asking) >= _ASKING_MAX:
            self._channel.drop(Drop.FULL, address, "too many questions about one path")
            return

        def tell(status: int) -> None:
            self._channel.guard(address, self._tell, nic, address, message, status)

        try:
            self.fence(message.source, message.nic, tell)
        except TepError as error:
            why = f"no fence: {error}"
            self._channel.tell(nic, address, message.number, why)

    def fence(self, source: bytes, nic: int, then: Callable[[int], object]) -> None:
        """Fence the NIC at an address off at our NIC `nic`, and call then(status) when that ends.

        If the path is fenced already, then(status) is called at once. A fence that failed is tried
        again. Raises TepError if the NIC cannot begin.
        """
        there = self._nics[nic].caps
        if not there.imm_source:
            raise FabricError(f"its NIC {there.nic} cannot fence a path off", code="PROVIDER")
        far = self._far_ends.at(nic, source)
        fence = far.fence
        if fence is None or fence.status not in (None, Status.OK):
            ctx = next(self._ctxs)
            self._nics[nic].fence(source, ctx)
            fence = far.fence = self._begun[ctx] = Fence()
        if fence.status is None:
            fence.asking.append(then)
        else:
            then(fence.status)

    def lift(self, source: bytes, nic: int) -> str | None:
        """Accept rows of the NIC at an address at our NIC `nic` again; return why not, or None.

        Rows that had ended before this call do not land any more (C27). A fence that failed, for a
        lease, is forgotten: who asks has been told of an earlier one that did not.
        """
        far = self._far_ends.get(nic, source)
        fence = None if far is None else far.fence
        if far is not None and far.leases:
            self._events.append(PathKeptShut(nic, source))
            return "a lease that its holder has not let go of keeps this path shut"
        if fence is not None and fence.status is None:
            return "it is being fenced off"
        try:
            self._nics[nic].unfence(source)
        except TepError as error:
            return str(error)
        if far is not None:
            far.fence = None
        return None

    def fenced(self, ctx: int, status: int) -> None:
        """Take a NIC's completion of a fence."""
        fence = self._begun.pop(ctx)
        fence.status = status
        asking, fence.asking = fence.asking, []
        for then in asking:
            then(status)

    def why_not(self, nic: int, status: int) -> str | None:
        """Why a path could not be fenced off; None: it was fenced."""
        if status == Status.OK:
            return None
        there = self._nics[nic]
        hint = there.status_text(status)
        why = f"its NIC {there.caps.nic} cannot fence the path off: {Status(status).name}"
        return why + (f": {hint}" if hint else "")

    def forget(self, addresses: Collection[bytes]) -> None:
        """Drop what is known of a peer that was removed, by its NICs' addresses."""
        self._far_ends.forget(addresses)
        for engine, keys in tuple(self._paths.items()):
            gone = {key for key in keys if key[1] in addresses}
            keys.difference_update(gone)
            self._npaths -= len(gone)
            if not keys:
                del self._paths[engine]
        for nic, arrivals in zip(self._nics, self.arrivals, strict=False):
            arrivals.forget(nic, addresses)

    def _tell(self, nic: int, address: bytes, message: FenceOff, status: int) -> None:
        counts: tuple[int, ...] = ()
        pruned = 0
        there = self._nics[message.nic]
        why = self.why_not(message.nic, status)
        if message.imms and why is None:
            if not self.arrivals:
                why = "it does not count immediates by their sender"
            elif (why := self.arrivals[message.nic].forgot(there, message.source)) is None:
                counts = self.arrivals[message.nic].sums(there, message.source, message.imms)
                pruned = self.arrivals[message.nic].pruned(message.source)
        self._channel.tell(nic, address, message.number, why, counts, pruned)

    def _prune(self, nic: int, address: bytes, message: Prune) -> None:
        # The counts of a fenced path must not change while its sender compares them.
        far = self._far_ends.get(message.nic, message.source)
        why: str | None
        if message.nic >= len(self.arrivals):
            why = f"it counts no immediates at a NIC {message.nic}"
        elif far is not None and far.fence is not None:
            why = "this path is fenced off"
        else:
            why = self.arrivals[message.nic].prune(
                self._nics[message.nic], message.source, message.generation, message.runs
            )
        self._channel.tell(nic, address, message.number, why)

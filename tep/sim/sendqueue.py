"""What one simulated NIC still has to send: quanta of its queue pairs, planned in turn.

No clock here. The plan is made anew when rows are added, but only from then on: a quantum that has
started stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tep.sim.queues import Ints, fifo, has_all, is_alike, round_robin

__all__ = ["Depths", "SendQueue", "Units"]


class Units(NamedTuple):
    """Quanta to send, a column each; those of one row stand together and in order.

    Attributes:
        number: of the row.
        target: NIC it goes to; the queue pairs of a NIC are told apart by it.
        ready: when it may leave, ps.
        service: how long it holds the wire, ps.
        last: whether the row ends with it.
        nbytes: of it.
        holds: how long it holds its receiver, ps; None: `service`.
    """

    number: Ints
    target: Ints
    ready: Ints
    service: Ints
    last: npt.NDArray[np.bool_]
    nbytes: Ints
    holds: Ints | None = None

    def pick(self, which: slice | Ints) -> Units:
        """Select some."""
        number, target, ready, service, last, nbytes, holds = self
        return Units(
            number[which],
            target[which],
            ready[which],
            service[which],
            last[which],
            nbytes[which],
            None if holds is None else holds[which],
        )

    def rows(self) -> Iterator[tuple[int, int, int, int, bool, int, int]]:
        """All columns, a quantum each."""
        columns = (*self[:-1], self.service if self.holds is None else self.holds)
        return zip(*(column.tolist() for column in columns))

    @staticmethod
    def join(parts: list[Units]) -> Units:
        """Put some behind each other."""
        if len(parts) == 1:
            return parts[0]
        return Units(
            np.concatenate([part.number for part in parts]),
            np.concatenate([part.target for part in parts]),
            np.concatenate([part.ready for part in parts]),
            np.concatenate([part.service for part in parts]),
            np.concatenate([part.last for part in parts]),
            np.concatenate([part.nbytes for part in parts]),
            # Only a plan that nothing was added to so far, and that is empty, has none.
            None
            if parts[-1].holds is None
            else np.concatenate([p.service if p.holds is None else p.holds for p in parts]),
        )


_NO_INTS = np.empty(0, np.int64)
_NOTHING = Units(_NO_INTS, _NO_INTS, _NO_INTS, _NO_INTS, np.empty(0, np.bool_), _NO_INTS)


class SendQueue:
    """The plan of one NIC.

    Attributes:
        units: in the order they leave.
        starts: when each leaves, ps.
        at: the first that was not yet taken over by the receiving side.
        lone: the target of all units, if there is one that all have for sure; else -1.
    """

    def __init__(self) -> None:
        self.units = _NOTHING
        self.starts: Ints = np.empty(0, np.int64)
        self.at = 0
        self.lone = -1
        self._free_ps = 0
        self._ended: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.starts) - self.at

    def before(self, limit_ps: int) -> int:
        """Index behind the last unit that leaves before the limit."""
        return int(self.starts.searchsorted(limit_ps, "left"))

    def cut(self, now_ps: int) -> int:
        """Index of the first unit that can still be planned otherwise."""
        return max(self.at, self.before(now_ps))

    def add(self, units: Units, now_ps: int) -> None:
        """Take more units and plan again what has not started."""
        cut = self.cut(now_ps)
        self._control_ended(cut)
        waits = len(self.starts) - cut
        target = units.target.item(0) if is_alike(units.target) else -1
        alone = target >= 0 and (self.at == len(self.starts) or self.lone == target)
        self.lone = target if alone else -1
        if alone or (target >= 0 and (not waits or has_all(self.units.target[cut:] == target))):
            # One queue pair: what waits keeps its place, the new stands behind it.
            busy_ps = self._free_ps
            if waits:
                busy_ps = self.starts.item(-1) + self.units.service.item(-1)
            starts = fifo(units.ready, units.service, busy_ps) - units.service
            kept, planned = slice(self.at, None), units
        else:
            both = Units.join([self.units.pick(slice(cut, None)), units]) if waits else units
            order, starts = round_robin(
                both.target, both.ready, both.service, self._free_ps, self._ended
            )
            kept, planned = slice(self.at, cut), both.pick(order)
        if self.at == (len(self.starts) if kept.stop is None else cut):
            self.starts, self.units = starts, planned
        else:
            self.starts = np.concatenate((self.starts[kept], starts))
            self.units = Units.join([self.units.pick(kept), planned])
        self.at = 0

    def _control_ended(self, cut: int) -> None:
        """Remember when the wire is free, and when each queue pair that waits was served last."""
        if not cut:
            return
        targets, services = self.units.target, self.units.service
        self._free_ps = self.starts.item(cut - 1) + services.item(cut - 1)
        # Of a queue pair with nothing waiting only the service that may still go on matters.
        last = targets.item(cut - 1)
        waiting = targets[cut:]
        if not len(waiting) or has_all(waiting == last):
            self._ended = {last: self._free_ps}
            return
        alive = {last, *waiting.tolist()}
        ends = self.starts[:cut] + services[:cut]
        latest = self._ended | dict(zip(targets[:cut].tolist(), ends.tolist()))
        self._ended = {target: end for target, end in latest.items() if target in alive}

    def drop_waiting(self, now_ps: int) -> Units:
        """Give up what has not started; return it."""
        cut = self.cut(now_ps)
        dropped = self.units.pick(slice(cut, None))
        self.units = self.units.pick(slice(0, cut))
        self.starts = self.starts[:cut]
        return dropped


class Depths:
    """The rows outstanding on each queue pair of one NIC, where each has a depth of its own.

    Args:
        depth: rows that one queue pair takes.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._open: Counter[int] = Counter()

    def take(self, peer: int | npt.NDArray[np.unsignedinteger], start: int, n: int) -> int:
        """Take up to n rows of a batch, from row `start` on, up to the first that does not fit."""
        peers = [peer] * n if isinstance(peer, int) else peer[start : start + n].tolist()
        for taken, one in enumerate(peers):
            if self._open[one] == self._depth:
                return taken
            self._open[one] += 1
        return n

    def free(self, peers: Ints) -> None:
        """These rows are completed."""
        self._open.subtract(peers.tolist())

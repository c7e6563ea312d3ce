"""The timing fabric: how long transfers take on a profiled machine, in integer ps. Only time here.

A row costs the worker's CPU (a serial server of the node), waits until enough of it is in the NIC,
leaves in quanta in turn with the other queue pairs, crosses the wire, and is taken by the receiving
NIC in order of arrival. None of this is an event: plans are columns, and one event, `_resolve`,
settles many rows.

Rule 1 (lookahead): nothing posted from now on can arrive before the next event plus the wire's
latency. So `_resolve` settles every quantum that leaves before the next event in the queue, or the
first wake it causes itself, whichever is earlier; the result equals one event for each arrival.
Rule 2: receivers serve in order of arrival. Reserving them in order of posting would overstate an
all-to-all of 64 ranks by three quarters.
Rule 3: no draw but a hash of (seed, NIC, row); no wall clock, no set order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from tep.backends.base import Status
from tep.base.errors import UsageError
from tep.sim.clock import FabricEnv, in_one_process
from tep.sim.congestion import (
    LAST,
    NBYTES,
    NUMBER,
    SOURCE,
    TARGET,
    Marks,
    PacedQueue,
    Passing,
    Paths,
    flights,
    is_paced,
    no_flights,
)
from tep.sim.ledger import Hold
from tep.sim.machines import InOrder, Machines
from tep.sim.profile import Profile
from tep.sim.queues import NEVER_PS, Ints, by_value, fifo_grouped, has_any
from tep.sim.row_log import RowLog
from tep.sim.timing_nic import MortalNic, TimingNic
from tep.sim.wakes import Fabric, Nic, Node, address_of

__all__ = ["Node", "TimingFabric"]

_WIRE: Final = np.uint8(Hold.WIRE)
_WINDOW_MIN: Final = 64
"""Quanta of one NIC that are looked at in one pass, at the least. No result depends on it."""


class _Rows(NamedTuple):
    """Rows whose arrival is known.

    Attributes:
        numbers, landed: the rows, and their landing times.
        rows: their indices in the ledger.
        seen, acked: times when the receiver sees each, and when the sender learns of it.
        counts: rows of each batch.
        mine: batches that have some.
    """

    numbers: Ints
    landed: Ints
    rows: Ints
    source: Ints
    target: Ints
    batch: Ints
    seen: Ints
    acked: Ints
    counts: Ints
    mine: Ints


class TimingFabric(Fabric):
    """A switched network of machines, equal ones or of one transport.

    Args:
        env: the clock.
        profile: the machine, or the name of one that comes with tep; or several: see `node`.
        seed: of the jitter of unordered profiles.
        row_log: None: nothing is recorded.
        move_bytes: False: rows take time and immediates arrive, but nothing is copied.
        mortal: whether NICs can die, and fence others off; costs control messages.
    """

    def __init__(
        self,
        env: FabricEnv,
        profile: Profile | str | Sequence[Profile | str],
        *,
        seed: int = 0,
        row_log: RowLog | None = None,
        move_bytes: bool = True,
        mortal: bool = False,
    ) -> None:
        machines = Machines(profile, seed)
        log = row_log if row_log is not None and row_log.on else None
        super().__init__(env, machines, log, move_bytes=move_bytes, mortal=mortal)
        self.profile = machines.first.profile
        self._shortest_ps = machines.shortest_ps
        self.active: dict[int, Nic] = {}
        self.in_order = InOrder() if any(p.loss_ppm for p in machines.profiles) else None
        self.marks = Marks(self.profile, self.pairs, seed) if is_paced(self.profile) else None
        self._epochs: dict[str, int] = {}
        self._polls = False
        self._due_ps = NEVER_PS
        self._window = _WINDOW_MIN
        ways = None if self.pairs is None else self.pairs.latency_ps
        self.paths = Paths(self.profile, self._shortest_ps, self._receiving, ways, seed)

    # ------------------------------------------------------------------ nodes and NICs

    __reduce__ = in_one_process

    def __repr__(self) -> str:
        return f"TimingFabric({self.machines.names}; {len(self._epochs)} nodes)"

    def node(self, name: str, profile: Profile | str | None = None) -> Node:
        """Start a node; a name used before is a later incarnation, and the earlier must be closed.

        Args:
            name: 1 to 64 characters but / and #.
            profile: of its machine, one of the fabric's; None: the first of them.

        Raises:
            UsageError: that node is still open, or no such name, or machine, is possible.
        """
        machine = self.machines.find(profile)
        if not 1 <= len(name) <= 64 or set("/#") & set(name):
            raise UsageError(f"node name {name!r}: 1 to 64 characters, without '/' and '#'")
        epoch = self._epochs.get(name, 0) + 1
        old = self._numbers.get(address_of(name, epoch - 1, 0))
        if old is not None and not self.gone[old]:
            raise UsageError(f"node {name!r} is open; close its NICs before it starts again")
        self._epochs[name] = epoch
        self._polls |= machine.profile.poll_ps > 0
        made, make = Node(self, name, epoch, machine), MortalNic if self.mortal else TimingNic
        made.domains = nics = [make(self, made, index) for index in range(machine.profile.nics)]
        for nic in nics:
            self.paths.place(nic.number, name, nic.index, len(nics), nic.profile.bus_bps)
        return made

    def _why_gone(self, number: int) -> Status:
        nic = self._nics[number]
        if nic is not None and self._epochs[nic.node.name] > nic.node.epoch:
            return Status.STALE_PEER
        return Status.UNREACHABLE

    def slow_down(self, name: str, index: int, times: float) -> None:
        """Let one NIC take `times` as long for every byte, both ways: a bad cable, a lost lane.

        It holds for what is launched from now on; whole percents; 1 makes the NIC sound again.

        Raises:
            UsageError: no such NIC, or times < 0.01.
        """
        number = self._living("slow_down", name, index).number
        if times < 0.01:
            raise UsageError(f"slow_down: times={times}; 0.01 at the least")
        self.slow[number] = round(100 * times)

    def kill_nic(self, name: str, index: int) -> None:
        """Let one NIC die for good.

        Raises:
            UsageError: no such NIC, or the fabric is not mortal.
        """
        nic = self._living("kill_nic", name, index)
        if not isinstance(nic, MortalNic):
            raise UsageError(
                "kill_nic: the NICs of this fabric never fail; open the Cluster with mortal=True"
            )
        nic.kill()

    def _living(self, what: str, name: str, index: int) -> Nic:
        number = self._numbers.get(address_of(name, self._epochs.get(name, 0), index))
        if number is None or self.gone[number]:
            raise UsageError(f"{what}: there is no NIC {index} of {name!r}")
        return self.nic(number)

    # ------------------------------------------------------------------ the wire

    def sending(self, nic: Nic) -> None:
        self.active[nic.number] = nic
        self._arm(int(nic.queue.starts[nic.queue.at]) + self._shortest_ps)

    def _arm(self, due_ps: int) -> None:
        due_ps = max(due_ps, self.env.now)
        if due_ps < self._due_ps:
            self._due_ps = due_ps
            self.env.call_at(due_ps, self._resolve, due_ps)

    def _resolve(self, due_ps: int) -> None:
        """Settle the arrival of every quantum that nothing can change any more."""
        if due_ps != self._due_ps:
            return  # an earlier one was armed since
        self._due_ps = NEVER_PS
        nics = [self.active[number] for number in sorted(self.active)]
        limit_ps = min(self._next_event_ps(), self._window_ps(nics))
        taken = [(nic, nic.queue.before(limit_ps)) for nic in nics]
        taken = [(nic, stop) for nic, stop in taken if stop > nic.queue.at]
        self._settle(taken, limit_ps)
        due_ps = self._first_due_ps()
        for nic in nics:
            queue = nic.queue
            if len(queue):
                due_ps = min(due_ps, queue.starts.item(queue.at) + self._shortest_ps)
            else:
                del self.active[nic.number]
        if due_ps < NEVER_PS:
            self._arm(due_ps)

    def _next_event_ps(self) -> int:
        """The earliest time at which anybody may post again: Rule 1."""
        return min(self.env.next_ps(), self.env.deadline_ps, NEVER_PS)

    def _window_ps(self, nics: list[Nic]) -> int:
        """The time when the first NIC has sent a window full of quanta.

        A pass looks at every quantum that leaves before its limit, and then keeps those that leave
        before the first wake. Without a window a write of n rows would look at all its quanta n
        times. The window follows what the last pass kept.
        """
        limit_ps = NEVER_PS
        if self.marks is not None:
            return self._notice_ps(nics)
        for nic in nics:
            queue, at = nic.queue, nic.queue.at
            if len(queue) > self._window:
                first_ps = int(queue.starts[at])
                limit_ps = min(limit_ps, max(int(queue.starts[at + self._window]), first_ps + 1))
        return limit_ps

    def _notice_ps(self, nics: list[Nic]) -> int:
        """No sender can learn of an unsettled quantum before this time: rule 2 of `congestion`."""
        first_ps = min([int(nic.queue.starts[nic.queue.at]) for nic in nics], default=NEVER_PS)
        return min(first_ps + self._shortest_ps, self._first_due_ps())

    def _first_due_ps(self) -> int:
        """The time when the first of what is under way lands, or may be marked."""
        marked_ps = NEVER_PS if self.marks is None else self.marks.due_ps() + self._shortest_ps
        return min(self.paths.due_ps(), marked_ps)

    def _notify(self, marks: Marks, passing: Passing, limit_ps: int) -> None:
        """Notify senders of quanta that were taken, and of marks."""
        rows, done = passing.flights, passing.done
        waited, known_ps = self.paths.waited(passing), limit_ps + self._shortest_ps
        marked, times = marks.notices(passing, waited, known_ps)
        if self.profile.pause_bytes:
            rows, times = np.concatenate((marked, rows)), np.concatenate((times, done))
        else:
            rows = marked
        times = times + self.machines.latency_ps(rows[:, TARGET], rows[:, SOURCE])
        columns = [column.tolist() for column in (*rows[:, [SOURCE, TARGET, NBYTES]].T, times)]
        queues: dict[int, PacedQueue] = {}
        for place, (source, target, nbytes, time_ps) in enumerate(zip(*columns)):
            if source not in queues:
                queue = self.nic(source).queue
                assert isinstance(queue, PacedQueue), "all of a fabric are"
                queues[source] = queue
            is_mark = place < len(marked)
            queues[source].notify(time_ps, target, 0 if is_mark else nbytes, marked=is_mark)
        for queue in queues.values():
            queue.foresee()

    def _settle(self, taken: list[tuple[Nic, int]], limit_ps: int) -> None:
        """Let quanta pass, and those land that nothing can change; the pass may be shortened.

        A pass says which rows land if nothing new starts before the limit. If the first wake that
        they cause comes before, only what starts before that wake passes. Fewer rows wake nobody
        earlier, so this is the end of it.
        """
        paths = self.paths
        passing = paths.advance(self._flights(taken), limit_ps, self.free)
        rows = self._landing(passing)
        wake_ps = self._first_wake_ps(rows)
        if wake_ps < limit_ps:
            assert self.marks is None, "a paced plan is made once"
            limit_ps = wake_ps
            taken = [(nic, max(nic.queue.at, nic.queue.before(limit_ps))) for nic, _ in taken]
            shorter = paths.shorten(passing, limit_ps, self.free)
            if shorter is None:
                shorter = paths.advance(self._flights(taken), limit_ps, self.free)
            passing, rows = shorter, self._landing(shorter)
        paths.keep(passing)
        if self.marks is not None:
            self._notify(self.marks, passing, limit_ps)
        self.free = passing.receivers
        kept = [stop - nic.queue.at for nic, stop in taken]
        self._window = max(_WINDOW_MIN, 2 * max(kept, default=0))
        for nic, stop in taken:
            nic.queue.at = stop
        if len(rows.numbers):
            self._land(rows)

    @staticmethod
    def _flights(taken: list[tuple[Nic, int]]) -> Ints:
        parts = []
        for nic, stop in taken:
            span = slice(nic.queue.at, stop)
            units, starts = nic.queue.units.pick(span), nic.queue.starts[span]
            parts.append(flights(units, starts, nic.number))
        return parts[0] if len(parts) == 1 else np.concatenate([no_flights(), *parts])

    def _landing(self, passing: Passing) -> _Rows:
        """Find the rows whose last quanta these are."""
        ends = passing.flights[:, LAST] != 0
        numbers = passing.flights[ends, NUMBER]
        return self._rows(numbers, self._late(numbers, passing.done[ends]))

    def _receiving(self, source: Ints, target: Ints, service: Ints) -> Ints:
        """The time that each quantum holds its receiver: its sender's time, but for slow NICs.

        A slow sender leaves gaps, in which others are received; a slow receiver takes longer.
        """
        if not self.slow:
            return service
        percent = np.full(len(self.free), 100)
        percent[list(self.slow)] = list(self.slow.values())
        found: Ints = service * percent[target] // percent[source]
        return found

    def _late(self, numbers: Ints, done: Ints) -> Ints:
        """The landing times of rows whose last bytes are in."""
        rows = numbers - self.ledger.base
        landed: Ints = done + self.ledger.extra_ps[rows]
        if self.in_order is None or not len(rows):
            return landed
        source, target = self.ledger.source[rows], self.ledger.target[rows]
        return self.in_order.settle(source, target, numbers, landed)

    def _rows(self, numbers: Ints, landed: Ints) -> _Rows:
        """Look rows up in the ledger, as if they landed at these times."""
        ledger = self.ledger
        rows = numbers - ledger.base
        source, target, batch = ledger.source[rows], ledger.target[rows], ledger.batch[rows]
        seen, acked = self.machines.seen_and_acked_ps(source, target, landed)
        if self._polls and len(rows):
            seen = self._heard(rows, target, seen)
            acked = np.maximum(acked, seen)
        counts = np.bincount(batch, minlength=len(self.batches.left))
        mine = counts.nonzero()[0]
        return _Rows(numbers, landed, rows, source, target, batch, seen, acked, counts, mine)

    def _heard(self, rows: Ints, target: Ints, seen: Ints) -> Ints:
        """The times when workers have taken rows in: immediates one behind the other.

        A sender learns of a row no earlier, which a real one does. Of long runs this is right: a
        receiver that is late with its receive buffers holds the sender up.
        """
        mine = (self.ledger.imm[rows] >= 0).nonzero()[0]
        if len(mine):
            mine = mine[np.argsort(seen[mine], kind="stable")]
            nics, seen = target[mine], seen.copy()
            costs, workers = self.poll_ps[nics], self.first[nics]
            seen[mine] = fifo_grouped(seen[mine], costs, workers, self.heard_ps)
        return seen

    def _busy_until(self, nics: Ints, heard: Ints) -> None:
        """Note until when workers are busy with immediates, which they hear at these times.

        It is counted from the first of them on, as if none had to be waited for: those of a slow
        NIC may land long after others that are planned later.
        """
        for worker, which in by_value(self.first[nics]):
            costs = self.poll_ps[nics[which]]
            first = int(heard[which].argmin())
            self.heard_ps[worker] = heard[which].item(first) + int(costs.sum()) - costs.item(first)

    def _first_wake_ps(self, found: _Rows) -> int:
        """A time before which these rows wake nobody if they land as computed."""
        if not len(found.numbers):
            return NEVER_PS
        batches = self.batches
        _, _, _, source, target, batch, seen, acked, counts, mine = found
        first = int(np.maximum(seen, self.soft[target]).min())
        first = min(first, int(np.maximum(acked, self.soft_acks[source]).min()))
        if has_any(batches.target[mine] < 0):
            first = min(first, int(seen[batches.target[batch] < 0].min()))
        # For a batch with one target, only the last row forces a wake-up.
        closing = mine[batches.whole[mine] & (batches.left[mine] == counts[mine])]
        if len(closing):
            latest = batches.seen_ps.copy()
            np.maximum.at(latest, batch, seen)
            first = min(first, int(latest[closing].min()))
        for number, nic in self.refused.items():
            first = min(first, nic.node.wakes.room_ps(nic, acked[source == number]))
        return first

    def _land(self, found: _Rows) -> None:
        """Record the arrivals at both ends and schedule their wake-ups."""
        ledger, batches = self.ledger, self.batches
        numbers, landed, rows, source, target, batch, seen, acked, counts, mine = found
        if self.in_order is not None:
            self.in_order.keep(source, target, landed)
        batches.left -= counts
        np.maximum.at(batches.seen_ps, batch, seen)
        if self._polls:
            said = ledger.imm[rows] >= 0
            self._busy_until(target[said], seen[said])
        if self.pairs is not None:
            np.maximum.at(batches.acked_ps, batch, acked)
        touched: dict[int, None] = {}
        lost = left_out = None
        if has_any(self.gone[: len(self._nics)]):
            lost = self.gone[target]
            left_out = lost | self.gone[source]
            if has_any(lost):
                self._lose(numbers[lost], landed[lost], touched)
        for number, which in by_value(target, lost):
            nic = self.nic(number)
            nic.inbox.add(seen[which], numbers[which])
            touched[number] = None
        if self.payloads:
            # A message is completed where it lands: it may have to wait for a buffer there.
            messages = ledger.message[rows]
            left_out = messages if left_out is None else left_out | messages
        for number, which in by_value(source, left_out):
            self.nic(number).outbox.add(acked[which], numbers[which])
            touched[number] = None
        if has_any(batches.target[mine] < 0):
            several = batches.target[batch] < 0
            if lost is not None:
                several &= ~lost
            for number, time_ps in zip(target[several].tolist(), seen[several].tolist()):
                self.nic(number).node.wakes.wake_at(time_ps)
        closing = mine[batches.whole[mine] & (batches.left[mine] == 0)]
        if len(closing):
            senders = np.empty(len(counts), np.int64)
            senders[batch] = source  # a batch has one
            for number, sender in zip(closing.tolist(), senders[closing].tolist()):
                self._close_batch(number, sender)
        for wakes in {self.nic(number).node.wakes: None for number in touched}:
            wakes.book()

    def _lose(self, numbers: Ints, landed: Ints, touched: dict[int, None]) -> None:
        """Fail rows to NICs that are gone: their senders learn it by a timeout."""
        ledger = self.ledger
        rows = numbers - ledger.base
        ledger.hold[rows] &= ~_WIRE
        for number, row, landed_ps in zip(numbers.tolist(), rows.tolist(), landed.tolist()):
            ledger.status[row] = self._why_gone(int(ledger.target[row]))
            source = int(ledger.source[row])
            if self.gone[source]:
                continue
            nic = self.nic(source)
            failed_ps = landed_ps + nic.profile.peer_timeout_ps
            nic.outbox.add(np.array([failed_ps]), np.array([number]))
            nic.node.wakes.wake_at(failed_ps)
            self.payloads.pop(number, None)
            self.controls.discard(number)
            touched[source] = None

    def _close_batch(self, number: int, source: int) -> None:
        """The last row of a batch has landed: both ends must know at that very time."""
        batches = self.batches
        seen_ps, target = int(batches.seen_ps[number]), int(batches.target[number])
        if target >= 0 and not self.gone[target]:
            self.nic(target).node.wakes.wake_at(seen_ps)
        if self.pairs is None:
            acked_ps = seen_ps + self.profile.ack_ps - self.profile.receive_ps
        else:
            acked_ps = int(batches.acked_ps[number])
        self.nic(source).node.wakes.wake_at(acked_ps)
        batches.end(number)

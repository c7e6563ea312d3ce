"""The handles that submits and expectations return; each counts its own progress.

The worker updates the counts; users read them through `stats()` and `describe()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from tep.base.errors import TepError
from tep.core.handle import PENDING, Handle, Owner
from tep.core.imm import ImmTable
from tep.core.path import Link
from tep.core.region import Job, Remote, Targets
from tep.core.stats import NicBytes, TransferStats

__all__ = [
    "Expectation", "Message", "Pace", "Removal", "Transfer",
    "names_of",
]  # fmt: skip

_NAMES_MAX: Final = 4  # peers that a report names


_PIECES: Final = 12
"""A NIC that is slow, or not known yet, gets pieces of one part in so many of its share of what is
left: a link at an eighth of its speed ends two of them before the others end the rest.
"""

_AHEAD: Final = 2
"""Pieces that a NIC has: it sends one while the completion of the other is on its way."""


_TOOK_MAX: Final = 24
"""With so many entries of what NICs took, those of one NIC become one."""


class Queued(Protocol):
    """A batch of a transfer that was queued; see `tep.core.pending.Pending`."""

    at: int
    stop: int
    older: Queued | None


class Pace:
    """The progress of each NIC in one long transfer.

    Attributes:
        out: pieces that each NIC has.
        through: rows of pieces that each NIC has returned.
        part: the next piece of each NIC is one part in so many of its share of what is left.
        last: the last piece of each NIC.
    """

    __slots__ = ("last", "out", "part", "through")

    def __init__(self, nics: int) -> None:
        self.out = [0] * nics
        self.through = [0] * nics
        self.part = [_PIECES] * nics
        self.last: list[Queued | None] = [None] * nics

    def end(self, nic: int, rows: int) -> None:
        """A NIC has returned a piece, of which `rows` had been posted."""
        self.out[nic] -= 1
        self.through[nic] += rows
        keeps_up = 4 * self.through[nic] >= 3 * max(self.through)
        self.part[nic] = max(2, self.part[nic] // 3) if keeps_up else _PIECES

    def is_full(self, nic: int) -> bool:
        """Whether a NIC has enough pieces; one that fell behind gets only one at a time."""
        slow = self.part[nic] == _PIECES and self.through[nic] > 0
        return self.out[nic] >= (1 if slow else _AHEAD)


class Transfer(Handle):
    """One submitted request.

    `ok` means only that the source buffer may be reused; of a read, that all bytes are here.

    Attributes:
        job: the request.
        rows: how many writes it makes; with an immediate, also how many immediates, over all
            targets. A read: its rows, and one more for each owner if an immediate follows.
        left: rows that have not come back from a NIC, posted or not.
        failed_rows: rows that came back with an error.
        failure: the first error; the transfer fails with it when nothing is posted any more.
        dropped: queued rows that were removed by a cancel or a failure.
        held: rows whose NIC or peer's NIC died, until it is known whether they landed.
        extra: rows that were added to retransmit such rows.
        pace: the progress of its NICs, if it is posted in pieces; else None.
        queued: the batch that was queued last, which names the one before it, and so on; all its
            queued rows are in these batches. None: no row is queued.
        took: (NIC, rows, bytes) of what NICs have taken; of one NIC perhaps in several entries.
        settled_s: when its last row came back, or None.
        reserved: how many rows `Machine.reserve` counted for it.
    """

    __slots__ = (
        "dropped", "extra", "failed_rows", "failure", "held", "job", "left", "pace", "queued",
        "reserved", "rows", "settled_s", "took",
    )  # fmt: skip

    def __init__(
        self, owner: Owner, job: Job, rows: int, submitted_s: float, reserved: int
    ) -> None:
        # What Handle.__init__ does, without the call.
        self._owner = owner
        self.submitted_s = submitted_s
        self._state = PENDING
        self._error = None
        self._callbacks = None
        self._delivered = False
        self.reserved = reserved
        self.job = job
        self.rows = self.left = rows
        self.failed_rows = 0
        self.failure: TepError | None = None
        self.dropped = self.held = self.extra = 0
        self.pace: Pace | None = None
        self.queued: Queued | None = None
        self.took: tuple[tuple[int, int, int], ...] = ()  # a list for each NIC takes 0.15 us
        self.settled_s: float | None = None

    def batches(self) -> Iterator[Queued]:
        """The batches that were queued, the last one first."""
        batch = self.queued
        while batch is not None:
            yield batch
            batch = batch.older

    def is_ending(self) -> bool:
        """Whether it will fail or be cancelled, so that nothing more of it needs to be posted."""
        return self.failure is not None or self.dropped > 0

    def count_posted(self, nic: int, rows: int, nbytes: int) -> None:
        """A NIC has taken rows."""
        if len(self.took) >= _TOOK_MAX:
            self.took = tuple((k, *sums) for k, sums in enumerate(self._taken()) if sums.rows)
        self.took += ((nic, rows, nbytes),)

    def _taken(self) -> list[NicBytes]:
        """What each NIC has taken."""
        nics = [NicBytes(0, 0) for _ in self._owner.domains]
        for nic, rows, nbytes in self.took:
            nics[nic] = NicBytes(nics[nic].rows + rows, nics[nic].nbytes + nbytes)
        return nics

    def stats(self) -> TransferStats:
        """What it has done so far; see TransferStats."""
        nics = self._taken()
        posted = sum(nic.rows for nic in nics)
        end_s = self._owner.driver.now_s() if self.settled_s is None else self.settled_s
        return TransferStats(
            kind=self.job.kind,
            state=self._state.value,
            rows=self.rows,
            nbytes=self.job.total,
            rows_posted=posted,
            rows_back=self.rows + self.extra - self.left - self.dropped,
            rows_failed=self.failed_rows,
            rows_dropped=self.dropped,
            rows_again=self.extra,
            nics=tuple(nics),
            elapsed_s=end_s - self.submitted_s,
        )

    def describe(self) -> str:
        """One line for reports."""
        stats = self.stats()
        peers = names_of(self.job.remotes)
        return (
            f"{stats.kind} of {stats.rows} rows, {stats.nbytes} bytes "
            f"{'from' if self.job.is_read else 'to'} {peers}: {stats.state}; "
            f"{stats.rows_posted} posted, {stats.rows_back} back, {stats.rows_failed} failed, "
            f"{stats.rows_dropped} dropped"
            + (
                f"; a NIC lost {self.held} rows, and the peer is asked whether they landed"
                if self.held
                else ""
            )
        )


def names_of(remotes: Remote | Targets) -> str:
    """The names of the first peers, for reports."""
    listed = remotes.remotes if isinstance(remotes, Targets) else [remotes]
    names = [remote.desc.addr.name for remote in listed]
    more = f" and {len(names) - _NAMES_MAX} more" if len(names) > _NAMES_MAX else ""
    return ", ".join(names[:_NAMES_MAX]) + more


class Message(Handle):
    """One message of submit_send. `ok` means that the peer's engine has it.

    Attributes:
        payload: its bytes, copied at submission.
        link: the peer.
        posted: whether a NIC has it.
        nic, over: the peer's NIC and ours, once it is posted.
        reserved: as of a transfer.
    """

    rows = 1
    __slots__ = ("link", "nic", "over", "payload", "posted", "reserved")

    def __init__(
        self, owner: Owner, payload: bytes, link: Link, submitted_s: float, reserved: int
    ) -> None:
        super().__init__(owner, submitted_s)
        self.reserved = reserved
        self.payload = payload
        self.link = link
        self.posted = False
        self.nic = self.over = 0

    def describe(self) -> str:
        """One line for reports."""
        where = "posted" if self.posted else "waiting for the NIC"
        what = f"message of {len(self.payload)} bytes to {self.link.addr.name}"
        return f"{what}: {self._state.value}, {where}"


class Removal(Handle):
    """The removal of a peer. `ok` means that nothing refers to it any more.

    Attributes:
        link: the peer.
        why: why it is removed, if no user asked for that.
        waits: handles that may still refer to it; some of them may have settled.
        fencing: how many paths from it are being fenced off; -1: handles may still refer to it.
        unfenced: once it has settled: why what the peer has sent may still land here; "" = nothing
            of it lands any more.
    """

    counted = False
    __slots__ = ("fencing", "link", "unfenced", "waits", "why")

    def __init__(self, owner: Owner, link: Link, submitted_s: float, why: str = "") -> None:
        super().__init__(owner, submitted_s)
        self.link = link
        self.why = why
        self.waits: list[Handle] = []
        self.fencing = -1
        self.unfenced = ""

    def describe(self) -> str:
        """One line for reports."""
        left = sum(not handle.finished for handle in self.waits)
        what = f"removal of {self.link.addr.name} (epoch {self.link.addr.epoch})"
        why = f"; it may still write here: {self.unfenced}" if self.unfenced else ""
        return f"{what}: {self._state.value}, {left} transfers to it have not ended{why}"


class Expectation(Handle):
    """Waits for a count of one immediate.

    Attributes:
        imm: the immediate.
        count: how many arrivals make it ok.
        sender: the peer that sends them, if it was named.
    """

    counted = False
    __slots__ = ("_came", "_table", "count", "imm", "sender")

    def __init__(
        self,
        owner: Owner,
        table: ImmTable[Expectation],
        imm: int,
        count: int,
        sender: Link | None,
        submitted_s: float,
    ) -> None:
        Handle.__init__(self, owner, submitted_s)  # super() takes 0.1 us
        self._table = table
        self.imm = imm
        self.count = count
        self.sender = sender

    @property
    def arrived(self) -> int:
        """How many have arrived; `count` once it is ok; if it failed, how many had by then."""
        if self.ok:
            return self.count
        came: int | None = getattr(self, "_came", None)  # it is set by fix_arrived() only
        return min(self.count, self._table.counts.get(self.imm, 0)) if came is None else came

    def fix_arrived(self, came: int) -> None:
        """Let `arrived` stay what it is: the expectation fails, and its count is dropped."""
        self._came = min(came, self.count)

    def describe(self) -> str:
        """One line for reports."""
        return f"imm {self.imm:#x}: {self.arrived} of {self.count} arrived; {self._state.value}"

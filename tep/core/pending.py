"""Batches of rows, each on one NIC: how many rows are posted and back, and how to cut columns.

Values and arithmetic only; the group decides when rows are posted, moved or ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tep.backends.base import Column, Domain, Status, WriteBatch
from tep.base.errors import FabricError
from tep.core.handles import Message, Queued, Transfer
from tep.core.path import Link, Path
from tep.core.regions import Remote, Targets, Template, shifted

__all__ = [
    "NO_IMM", "NO_ROWS", "Acks", "Loss", "LostRow", "Pending", "Retransmission", "as_slice",
    "cut_column", "goes_to", "ints", "message_error", "on_lanes", "pick", "row_error",
    "template_of", "varies",
]  # fmt: skip


_WIDE_MAX: Final = 1024
"""Kinds of scatters that are counted as a whole; with more, they are counted target by target."""

NO_ROWS: Final[set[int]] = set()
"""The lost rows of every batch that has lost none; it is never changed."""

NO_IMM: Final = frozenset((Status.LOCAL_KEY, Status.REMOTE_KEY, Status.REMOTE_RANGE, Status.LENGTH))
"""A row with one of these statuses has made no immediate (C11)."""


class Retransmission:
    """Rows that are written again, and the immediates that follow once all of them have arrived.

    Attributes:
        left: rows that are not over yet.
        missed: whether the bytes of one did not arrive, since its transfer failed meanwhile. Then
            no immediate follows, because it could stand for that row.
        after: (batch, row, error) of the rows whose immediates follow.
    """

    __slots__ = ("after", "left", "missed")

    def __init__(self) -> None:
        self.left = 0
        self.missed = False
        self.after: list[tuple[Pending, int, FabricError]] = []


class LostRow(NamedTuple):
    """A row that may have landed, and the error that it may fail with."""

    pending: Pending
    row: int
    error: FabricError

    @property
    def imm(self) -> int | None:
        """Its immediate."""
        return self.pending.imm(self.row)


class Loss:
    """Rows that one path lost, until it is known which of them landed.

    Attributes:
        path: the path.
        rows: the lost rows.
        asked: whether the receiver was asked about them; no row is added after that.
        counts: the receiver's sums, by immediate.
        pruned: the generation of these sums; None: no answer has come yet.
        left: answers that are missing.
    """

    __slots__ = ("asked", "counts", "left", "path", "pruned", "rows")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[LostRow] = []
        self.asked = False
        self.counts: dict[int, int] = {}
        self.pruned: int | None = None
        self.left = 0


class Pending:
    """Rows of one batch on one NIC: `at` of them are posted, `back` of them have returned.

    `nbytes` is the sum over the whole batch if it is known, else -1. `lost` has the rows that came
    back with an error. `retransmission` is the one that a row belongs to which is written
    again. `is_piece`: it is a piece of a long batch. `tries`: on how many paths its row was lost
    before. `older`: the batch of the same transfer that was queued before it. `is_read`: it is a
    batch of `tep.core.reads`, which queues, posts and ends it.
    """

    is_read = False
    __slots__ = (
        "at", "back", "batch", "domain", "is_piece", "lost", "nbytes", "nics", "older", "remotes",
        "retransmission", "stop", "transfer", "tries",
    )  # fmt: skip

    def __init__(
        self,
        transfer: Transfer,
        domain: int,
        batch: WriteBatch,
        remotes: Remote | Sequence[Remote],
        nics: int | Sequence[int],
    ) -> None:
        self.transfer = transfer
        self.domain = domain
        self.batch = batch
        self.remotes = remotes
        self.nics = nics
        self.at = 0
        self.back = 0
        self.stop = batch.n
        self.nbytes = -1
        self.lost = NO_ROWS
        self.retransmission: Retransmission | None = None
        self.is_piece = False
        self.tries = 0
        self.older: Queued | None = None

    def lose(self, row: int) -> None:
        """Record a row that came back with an error."""
        if not self.lost:
            self.lost = set()
        self.lost.add(row)

    def posted_rows(self) -> range:
        """The rows that a NIC has taken, returned or not."""
        return range(self.at)

    def imm(self, row: int) -> int | None:
        """The immediate of one row."""
        imm = self.batch.imm
        return imm if imm is None or isinstance(imm, int) else int(imm[row])

    def row_bytes(self, row: int) -> int:
        """Bytes of one row."""
        nbytes = self.batch.nbytes
        return nbytes if isinstance(nbytes, int) else int(nbytes[row])

    def sum_bytes(self, start: int, stop: int) -> int:
        """Bytes of rows start..stop."""
        nbytes = self.batch.nbytes
        if isinstance(nbytes, int):
            return nbytes * (stop - start)
        if self.nbytes >= 0 and stop - start == self.batch.n:
            return self.nbytes
        return int(np.add.reduce(nbytes[start:stop]))

    def target(self, row: int) -> tuple[Remote, int]:
        """The region and the remote NIC that a row goes to."""
        remote = self.remotes if isinstance(self.remotes, Remote) else self.remotes[row]
        return remote, self.nics if isinstance(self.nics, int) else self.nics[row]


def goes_to(pending: Pending, link: Link, nic: int) -> bool:
    """Whether a row that was not posted goes to this NIC of this peer."""
    rows = range(pending.at, pending.stop) if varies(pending) else (pending.at,)
    return any(remote.link is link and j == nic for remote, j in map(pending.target, rows))


def varies(pending: Pending) -> bool:
    """Whether its rows go to different regions."""
    return not isinstance(pending.remotes, Remote)


def ints(column: Column, n: int) -> list[int]:
    """A column of n rows as plain ints."""
    return [column] * n if isinstance(column, int) else column.tolist()


def pick(column: Column, rows: slice | npt.NDArray[np.int64]) -> Column:
    """Some rows of a column."""
    return column if isinstance(column, int) else column[rows]


def as_slice(rows: list[int]) -> slice | npt.NDArray[np.int64]:
    """Row numbers as a slice, which costs no copy, if they are consecutive, as they usually are."""
    if rows == list(range(rows[0], rows[-1] + 1)):
        return slice(rows[0], rows[-1] + 1)
    return np.array(rows, np.int64)


def cut_column(column: Column | None, start: int, stop: int) -> Column | None:
    """Rows start..stop of a column, if there is one."""
    return column if column is None or isinstance(column, int) else column[start:stop]


def row_error(domain: Domain, pending: Pending, row: int, status: int) -> FabricError:
    """The error of a row that did not complete with OK."""
    remote, nic = pending.target(row)
    code, hint = Status(status).name, domain.status_text(status)
    peer = f"{remote.link.addr.name} NIC {nic}"
    what = f"{pending.transfer.job.kind} {'from' if pending.is_read else 'to'} {peer}"
    return FabricError(
        f"{what} failed on NIC {pending.domain} "
        f"({domain.caps.nic}) at row {row}: {code}{': ' + hint if hint else ''}",
        code=code,
        domain=pending.domain,
        peer=peer,
        row=row,
    )


def message_error(message: Message, nic: Domain, domain: int, status: int) -> FabricError:
    """The error of a message that did not arrive; `domain` is the number of our NIC."""
    code, hint, name = Status(status).name, nic.status_text(status), message.link.addr.name
    return FabricError(
        f"message of {len(message.payload)} bytes to {name} failed on NIC {domain}: "
        f"{code}{': ' + hint if hint else ''}",
        code=code,
        domain=domain,
        peer=name,
    )


def template_of(targets: Targets, domain: int, mine: Sequence[tuple[int, int]]) -> Template:
    """Return the columns that rows of one NIC share; `mine` are (target, its NIC) pairs."""
    whole = len(mine) == len(targets.remotes)
    remotes = targets.remotes if whole else [targets.remotes[k] for k, _ in mine]
    nics = [nic for _, nic in mine]
    lanes_of = list(zip(remotes, nics, strict=True))
    columns = (
        [remote.link.peer(domain, nic) for remote, nic in lanes_of],
        [remote.rkeys[nic] for remote, nic in lanes_of],
        [remote.bases[nic] for remote, nic in lanes_of],
    )
    peer, rkey, base = (np.array(column, np.uint64) for column in columns)
    rows = None if whole else as_slice([k for k, _ in mine])
    return Template(domain, remotes, nics, (peer, rkey, base), rows)


def on_lanes(old: Pending, start: int, stop: int, domain: int, nics: Sequence[int]) -> Pending:
    """Rows start..stop of a batch as a new batch on our NIC `domain`; the old one is not changed.

    Args:
        old: the batch.
        start: the first of the rows.
        stop: one behind the last.
        domain: our NIC.
        nics: the peers' NICs: of each row where the rows go to different regions, else one for all.
    """
    batch, mr = old.batch, old.transfer.job.mr
    lkey = 0 if mr is None else mr.keys[domain].lkey
    src, nbytes, imm = (cut_column(c, start, stop) for c in (batch.src, batch.nbytes, batch.imm))
    assert src is not None
    assert nbytes is not None
    n = stop - start
    if isinstance(old.remotes, Remote):
        assert isinstance(old.nics, int)
        remote, nic = old.remotes, nics[0]
        dst = cut_column(batch.dst, start, stop)
        dst = shifted(dst, remote.bases[nic] - remote.bases[old.nics])
        peer = remote.link.peer(domain, nic)
        fresh = WriteBatch(n, peer, src, lkey, dst, remote.rkeys[nic], nbytes, imm, 0)
        return Pending(old.transfer, domain, fresh, remote, nic)
    targets = [old.target(row) for row in range(start, stop)]
    dsts = ints(batch.dst, batch.n)[start:stop]
    moved = [
        at - remote.bases[was] + remote.bases[now]
        for at, (remote, was), now in zip(dsts, targets, nics, strict=True)
    ]
    lanes = [(remote, nic) for (remote, _), nic in zip(targets, nics, strict=True)]
    peers = [remote.link.peer(domain, nic) for remote, nic in lanes]
    rkeys = [remote.rkeys[nic] for remote, nic in lanes]
    peer_column, dst_column, rkey_column = (
        np.array(column, np.uint64) for column in (peers, moved, rkeys)
    )
    fresh = WriteBatch(n, peer_column, src, lkey, dst_column, rkey_column, nbytes, imm, 0)
    return Pending(old.transfer, domain, fresh, [remote for remote, _ in lanes], list(nics))


class _Wide:
    """Scatters or barriers over the same lanes with the same immediate."""

    __slots__ = ("count", "domain", "imm", "nics", "remotes")

    def __init__(
        self, domain: int, remotes: Sequence[Remote], nics: Sequence[int], imm: int
    ) -> None:
        self.domain = domain
        self.remotes = remotes
        self.nics = nics
        self.imm = imm
        self.count = 1


class Acks:
    """The rows that one engine's peers have acknowledged.

    A scatter or barrier in a steady group uses the same lanes each time. It is counted by (lanes,
    immediate), and divided among the paths only when somebody asks, or when there are too many.

    Attributes:
        large: paths with so many values that they should be pruned.
    """

    __slots__ = ("_wide", "large")

    def __init__(self) -> None:
        self.large: dict[Path, None] = {}
        self._wide: dict[tuple[int, int], _Wide] = {}

    def add(self, pending: Pending) -> None:
        """Count a batch whose rows have all come back, without its lost rows."""
        imm, n, remotes = pending.batch.imm, pending.stop, pending.remotes
        if n == 0 or imm is None:
            return
        if isinstance(remotes, Remote):
            assert isinstance(pending.nics, int)
            path = remotes.link.path(pending.domain, pending.nics)
            sent = path.sums.sent
            if not isinstance(imm, int):
                rows = imm[:n].astype(np.uint64)
                sent.add_many(np.delete(rows, list(pending.lost)) if pending.lost else rows)
            elif n > len(pending.lost):
                sent.add(imm, n - len(pending.lost))
            if sent.large:
                self.large[path] = None
        elif pending.lost or n < pending.batch.n or not isinstance(imm, int):
            for row in range(n):
                one = pending.imm(row)
                if row not in pending.lost and one is not None:
                    remote, nic = pending.target(row)
                    self._add(remote.link, pending.domain, nic, one, 1)
        else:
            # The list of NICs identifies the lanes: each template has one list, which _Wide keeps.
            key = id(pending.nics), imm
            known = self._wide.get(key)
            if known is not None:
                known.count += 1
                return
            assert not isinstance(pending.nics, int)
            self._wide[key] = _Wide(pending.domain, remotes, pending.nics, imm)
            if len(self._wide) > _WIDE_MAX:
                self.fold()

    def miss(self, pending: Pending, row: int) -> None:
        """Note that nobody will know whether a failed row landed."""
        imm = pending.imm(row)
        if imm is not None:
            remote, nic = pending.target(row)
            remote.link.path(pending.domain, nic).sums.unsure.add(imm)

    def fold(self) -> None:
        """Add everything that is counted as a whole to the sums of its paths."""
        wide, self._wide = self._wide, {}
        for each in wide.values():
            for remote, nic in zip(each.remotes, each.nics, strict=True):
                self._add(remote.link, each.domain, nic, each.imm, each.count)

    def _add(self, link: Link, domain: int, nic: int, imm: int, count: int) -> None:
        path = link.path(domain, nic)
        path.sums.sent.add(imm, count)
        if path.sums.sent.large:
            self.large[path] = None

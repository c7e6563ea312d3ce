"""Rows on their way: one batch on one NIC, how far it is, and how its columns are cut.

Values and arithmetic only; when they are posted, moved or ended is the group's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tep.backends.base import Column, WriteBatch
from tep.region import Link, Remote
from tep.transfer import Transfer

__all__ = [
    "Pending",
    "as_slice",
    "cut_column",
    "goes_to",
    "ints",
    "pick",
    "shifted",
    "varies",
]


class Pending:
    """Rows of one batch on one NIC: `at` of them posted, `back` of them returned.

    `nbytes` is the sum over the whole batch where somebody knew it, else -1.
    """

    __slots__ = (
        "at",
        "back",
        "batch",
        "domain",
        "nbytes",
        "nics",
        "remotes",
        "stop",
        "transfer",
    )

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
    """Row numbers as a slice, which costs no copy, where they are neighbours: the usual case."""
    if rows == list(range(rows[0], rows[-1] + 1)):
        return slice(rows[0], rows[-1] + 1)
    return np.array(rows, np.int64)


def cut_column(column: Column | None, start: int, stop: int) -> Column | None:
    """Rows start..stop of a column, if there is one."""
    return column if column is None or isinstance(column, int) else column[start:stop]


def shifted(column: Column | None, shift: int) -> Column:
    """A column of addresses, all moved by the same distance, which may be negative."""
    assert column is not None
    if isinstance(column, int):
        return column + shift
    # Unsigned arithmetic wraps, so a negative shift is the addition of its complement.
    return column + np.uint64(shift % 2**64) if shift else column

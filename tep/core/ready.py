"""Prepared writes on their way: what one submit adds to a request, and how the group dealt it out.

Values only: the group posts. Rule: what is kept here was made by the group when it dealt the same
request out, at another offset; so a prepared write goes where its verb would go.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple, cast
from weakref import ref

import numpy as np
import numpy.typing as npt

from tep.backends.base import Column, WriteBatch
from tep.core.handles import Transfer
from tep.core.posting import IN_TURN_ROWS, Pending, is_seen
from tep.core.regions import Job, Remote, Targets, shifted, summand

__all__ = ["Dealt", "Laid", "Part", "Ready"]

U64 = npt.NDArray[np.uint64]

_KEPT_ROWS_MAX: Final = 2048
"""Rows of the longest write whose batches are kept: of longer ones making them is a small part."""

_CURSORS_MAX: Final = 16
"""Cursors for which a prepared write keeps its parts; unusual mixes of NIC counts have more."""


class Part(NamedTuple):
    """The rows of one batch, without what a submit adds: addresses, immediate, ctx.

    Attributes:
        place: its number among the parts, in the order in which they are queued.
        total: bytes of all rows.
        remotes, nics: as of Pending.
    """

    place: int
    domain: int
    n: int
    nbytes: Column
    total: int
    peer: Column
    lkey: int
    rkey: Column
    remotes: Remote | Sequence[Remote]
    nics: int | Sequence[int]

    def pending(
        self, transfer: Transfer, columns: tuple[Column, Column], imm: Column | None
    ) -> Pending:
        """The batch of a submit, without a number."""
        _, domain, n, nbytes, total, peer, lkey, rkey, remotes, nics = self
        src, dst = columns
        batch = WriteBatch(n, peer, src, lkey, dst, rkey, nbytes, imm, 0)
        pending = Pending(transfer, domain, batch, remotes, nics)
        pending.nbytes = total
        return pending


class Dealt:
    """The batches of a request at one cursor.

    The batches of the last submit that was posted at once are kept with their columns, and posted
    again once it has ended well: then only the offsets are added, in place.

    Attributes:
        parts: in the order in which they are queued.
        by_nic: the same in the order in which they are posted.
        columns: source and target addresses of each part, at no offset.
        whole: both columns of all rows, and which rows each part has; None: addresses are ints.
        cursor: where the next request starts.
        in_turn: some NIC has several parts that it takes in turn, so that they are queued.
        is_watched: the pace of its parts is worth to be seen; all go to one peer.
        took, places: NIC, rows and bytes of each part, and its place, as `by_nic`.
        kept: the batches, as `by_nic`.
    """

    __slots__ = (
        "_at", "_moved", "by_nic", "columns", "cursor", "in_turn", "is_watched", "kept", "parts",
        "places", "took", "whole",
    )  # fmt: skip

    def __init__(
        self,
        parts: tuple[Part, ...],
        columns: list[tuple[Column, Column]],
        whole: tuple[U64, U64, list[slice]] | None,
        cursor: int,
    ) -> None:
        self.parts = parts
        self.by_nic = tuple(sorted(parts, key=lambda part: part.domain))
        self.columns = columns
        self.whole = whole
        self.cursor = cursor
        self.in_turn = len(parts) > len({part.domain for part in parts}) and any(
            part.n > IN_TURN_ROWS for part in parts
        )
        to_one = all(part.remotes is parts[0].remotes for part in parts)  # no lists
        self.is_watched = to_one and is_seen(len(parts), sum(part.total for part in parts))
        self.took = tuple((part.domain, part.n, part.total) for part in self.by_nic)
        self.places = tuple(part.place for part in self.by_nic)
        self.kept: list[Pending] = []
        self._at = 0, 0
        self._moved: tuple[U64, U64] | None = None

    def at(self, here: int, there: int) -> list[tuple[Column, Column]]:
        """Source and target addresses of each part, at these offsets."""
        if not (here or there):
            return self.columns
        if self.whole is None:
            return [(src + here, dst + there) for src, dst in self.columns]
        src, dst, rows = self.whole
        if here:
            src = np.add(src, summand(here))
        if there:
            dst = np.add(dst, summand(there))
        if len(rows) == 1:
            return [(src, dst)]
        return [(src[part], dst[part]) for part in rows]

    def posts(self, transfer: Transfer, job: Ready, *, moves: bool) -> list[Pending]:
        """The batches of a submit, as `by_nic`, and as they are once NICs have taken them whole.

        Kept ones are as the submit before left them, but for their columns: what else belongs to
        one submit is for the caller to set. `moves`: some NIC reads addresses, else they stay as
        they are.
        """
        kept = self.kept
        here, there = (job.here, job.there) if moves else (0, 0)
        if kept and kept[0].transfer.ok:
            if (here, there) != self._at:
                self._at = here, there
                self._move(kept, here, there)
            return kept
        columns = self.at(here, there)
        fresh = [part.pending(transfer, columns[part.place], job.imm) for part in self.by_nic]
        last: Pending | None = None
        for pending in fresh:
            pending.at, pending.older, last = pending.stop, last, pending
        if transfer.rows <= _KEPT_ROWS_MAX:
            self.kept, self._at, self._moved = fresh, (here, there), None
        return fresh

    def _move(self, kept: list[Pending], here: int, there: int) -> None:
        """Write the addresses at these offsets into the columns of the kept batches."""
        if self._moved is not None:
            base, moved = self._moved
            if here == there:
                np.add(base, summand(here), moved)
            else:
                n = len(base) // 2
                np.add(base[:n], summand(here), moved[:n])
                np.add(base[n:], summand(there), moved[n:])
            return
        columns = self.at(here, there)
        if self.whole is not None:  # columns of their own, to be written to from now on
            src, dst, rows = self.whole
            moved = np.concatenate((np.add(src, summand(here)), np.add(dst, summand(there))))
            self._moved = np.concatenate((src, dst)), moved
            src, dst = moved[: len(src)], moved[len(src) :]
            columns = [(src[part], dst[part]) for part in rows]
        for part, pending in zip(self.by_nic, kept, strict=True):
            pending.batch.src, pending.batch.dst = columns[part.place]


class Laid:
    """The batches of one prepared write by cursor: good as long as no route changes.

    Attributes:
        cycle: the lanes are the same again after so many cursors.
        version: of the group's routes.
        dealt: by cursor.
    """

    __slots__ = ("__weakref__", "cycle", "dealt", "version")

    def __init__(self, remotes: Remote | Targets, nlocal: int) -> None:
        nics = remotes.nics if isinstance(remotes, Remote) else remotes.cycle
        self.cycle = math.lcm(nlocal, nics)
        self.version = -1
        self.dealt: dict[int, Dealt] = {}

    def find(self, cursor: int, version: int) -> Dealt | None:
        """Find the batches at this cursor, if they are known."""
        if self.version != version:
            self.dealt.clear()
            self.version = version
        return self.dealt.get(cursor % self.cycle)

    def learn(self, cursor: int, job: Ready, transfer: Transfer, following: int) -> None:
        """Keep how it was dealt out just now; nothing of it was posted."""
        made = cast("list[Pending]", list(transfer.batches()))[::-1]
        if len(self.dealt) >= _CURSORS_MAX:
            self.dealt.clear()
        parts = tuple(_part(place, pending) for place, pending in enumerate(made))
        columns = [
            (shifted(each.batch.src, -job.here), shifted(each.batch.dst, -job.there))
            for each in made
        ]
        whole = _whole(job.base, columns)
        self.dealt[cursor % self.cycle] = Dealt(parts, columns, whole, following)


class Ready(Job):
    """A prepared write at its offsets, with its immediate.

    Every submit shares the rest with `base`.

    Attributes:
        base: the request at no offset.
        laid: names how it was dealt out so far, which its Prepared holds: batches that are kept
            there know their transfer, and by that this request.
        here, there: what is added to the addresses at both ends.
    """

    __slots__ = ("base", "here", "laid", "there")
    is_plain = False

    def __init__(self, base: Job, laid: Laid, here: int, there: int, imm: int | None) -> None:
        self.base = base
        self.laid = ref(laid)
        self.here = here
        self.there = there
        self.imm = imm
        self.mr = base.mr
        self.n = base.n
        self.longest = base.longest

    def __getattr__(self, name: str) -> object:
        return getattr(self.base, name)

    def placed(self) -> Job:
        """The same with columns of its own, to be dealt out as any other."""
        return self.base.moved(self.here, self.there, self.imm)


def _part(place: int, pending: Pending) -> Part:
    batch = pending.batch
    rows = batch.n, batch.nbytes, pending.sum_bytes(0, batch.n)
    keys = batch.peer, batch.lkey, batch.rkey
    return Part(place, pending.domain, *rows, *keys, pending.remotes, pending.nics)


def _whole(base: Job, columns: list[tuple[Column, Column]]) -> tuple[U64, U64, list[slice]] | None:
    """The columns of all parts joined, so that a submit adds an offset once, and not once a part.

    Where they are the request's own, which is usual, no copy is kept.
    """
    srcs, dsts = zip(*columns, strict=True)
    if any(isinstance(column, int) for column in (*srcs, *dsts)):
        return None
    src, dst = np.concatenate(srcs), np.concatenate(dsts)
    ends = np.cumsum([len(column) for column in srcs]).tolist()
    rows = [slice(a, b) for a, b in zip((0, *ends), ends, strict=False)]
    if isinstance(base.src, np.ndarray) and np.array_equal(src, base.src):
        src = base.src
    if isinstance(base.dst, np.ndarray) and np.array_equal(dst, base.dst):
        dst = base.dst
    for place, part in enumerate(rows):
        columns[place] = src[part], dst[part]
    return src, dst, rows

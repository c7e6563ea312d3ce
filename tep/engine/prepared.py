"""Prepared transfers: a verb's checks, columns and lookups are made once, and `submit` posts them.

A prepared transfer follows its verb by construction. What is not known to be fine (an offset out of
bounds, a peer that was replaced, a region that was given back) goes through the checks of the verb
itself, with the arguments that the verb would have been given. Which NICs and paths carry the rows
is decided at each submit, as for every transfer (`tep.core.posting`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tep.backends.base import Column
from tep.base.api import Pages, Routing
from tep.base.checks import check_int, shown, unpicklable
from tep.base.errors import BadRequest
from tep.base.units import IMM_MAX
from tep.base.wire import MrDesc
from tep.core.group import Laid, Ready
from tep.core.handles import Transfer, names_of
from tep.core.imm import check_imm
from tep.core.regions import Job, MrHandle, PeerBook, PeerGroup, Remote, Targets, check_source
from tep.core.requests import (
    ImmArg,
    Slices,
    barrier_job,
    imm_column,
    paged_job,
    scatter_job,
)
from tep.engine.machine import Machine

__all__ = ["Prepared", "prepared_barrier", "prepared_pages", "prepared_scatter"]

Key = tuple[int | None, int, int]


class _Verb(NamedTuple):
    """The differences between the verbs.

    Attributes:
        job: makes what the verb makes of (targets, offset here, offset there, immediate), and
            raises what it raises.
        imm: checks an immediate, given the number of rows.
    """

    name: str
    job: Callable[[Remote | Targets, int, int, ImmArg], Job]
    imm: Callable[[ImmArg, int], Column | None]


class _Base(NamedTuple):
    """A request at no offset, and the offsets at which its bytes are inside their regions."""

    job: Job
    laid: Laid
    here_min: int
    here_max: int
    there_min: int
    there_max: int


class Prepared:
    """A request whose checks and columns are made once; each `submit` only posts it.

    Made by `engine.prepare_paged_writes`, `prepare_scatter` and `prepare_barrier`. It holds no room
    at the NICs; drop it when it is not needed any more. Any thread may submit.

    Attributes:
        verb: the verb that it stands for.
    """

    __slots__ = (
        "_base", "_book", "_generation", "_group", "_last", "_machine", "_mr", "_targets", "_verb",
        "verb",
    )  # fmt: skip

    def __init__(
        self,
        machine: Machine,
        mr: MrHandle | None,
        targets: MrDesc | tuple[MrDesc, ...],
        verb: _Verb,
        group: PeerGroup | None = None,
    ) -> None:
        self.verb = verb.name
        self._verb = verb
        self._machine = machine
        self._book: PeerBook = machine.peers
        self._mr = mr
        self._targets = targets
        self._group = group
        machine.check_open(self.verb.replace("submit", "prepare"))
        self._renew()

    __reduce__ = unpicklable("it belongs to an engine of this process; prepare it anew there")

    def __repr__(self) -> str:
        job = self._base.job
        what = f"{job.kind} of {job.n} rows, {job.total} bytes to {names_of(job.remotes)}"
        return f"{type(self).__name__}({what})"

    def submit(
        self,
        imm: ImmArg = None,
        *,
        src_offset: int = 0,
        dst_offset: int = 0,
        on_done: Callable[[Transfer], object] | None = None,
    ) -> Transfer:
        """Post it: the effect, the guarantees and the errors are those of the verb.

        Args:
            imm: as of the verb: None or a 32-bit number; of a paged write also an array, one for
                each page.
            src_offset: added to every source offset, bytes; may be negative.
            dst_offset: added to every target offset, bytes; may be negative.
            on_done: called with the transfer once it settles.

        Raises:
            BadRequest: bytes outside a region at these offsets; no immediate.
            BusyError: too many rows wait already.
            ClosedError, StaleEpoch: the engine is closed, the region here was given back, the peer
                is being removed or has restarted.
            BurntImm: an earlier request with this immediate failed.
        """
        mr = self._mr
        if self._generation != self._book.generation or (mr is not None and mr.closed):
            self._renew()
        last = self._last
        if (
            type(imm) is int
            and type(src_offset) is type(dst_offset) is int
            and (imm, src_offset, dst_offset) == last[0]
        ):
            job = last[1]
        else:
            job = self._at(imm, src_offset, dst_offset)
        return self._machine.submit(job, on_done)

    def _renew(self) -> None:
        """Check everything again, and lay out anew what is not what it was."""
        book, name, targets = self._book, self.verb, self._targets
        generation = book.generation  # first: it may grow meanwhile
        if self._mr is not None:
            check_source(self._mr, self._machine, name)
        remotes: Remote | Targets
        if isinstance(targets, tuple):
            remotes = book.targets(targets, self._group, name)
        else:
            remotes = book.resolve(targets, name)
        job = self._verb.job(remotes, 0, 0, None)
        self._machine.check_longest(job)
        here = there = 0, 0
        if self._mr is not None:
            whole = self._mr.memory
            here = _room(job.src, job.nbytes, whole.ptr, whole.nbytes)
            if isinstance(remotes, Remote):
                there = _room(job.dst, job.nbytes, remotes.bases[0], remotes.nbytes)
            else:
                limits = np.array([remote.nbytes for remote in remotes.remotes])
                there = _room(job.dst, job.nbytes, 0, limits)
        self._base = _Base(job, Laid(remotes, len(self._machine.domains)), *here, *there)
        self._last: tuple[Key | None, Job] = None, job
        self._generation = generation

    def _at(self, imm: ImmArg, here: int, there: int) -> Job:
        if type(here) is not int:
            here = check_int(f"{self.verb}: src_offset", here)
        if type(there) is not int:
            there = check_int(f"{self.verb}: dst_offset", there)
        job, laid, here_min, here_max, there_min, there_max = self._base
        if not (here_min <= here <= here_max and there_min <= there <= there_max):
            try:
                return self._verb.job(job.remotes, here, there, imm)
            except BadRequest as error:
                at = f"prepared, at src_offset={shown(here)} dst_offset={shown(there)}"
                raise BadRequest(f"{error} ({at})") from None
        known = imm if type(imm) is int and 0 <= imm <= IMM_MAX else self._verb.imm(imm, job.n)
        if not (known is None or type(known) is int):
            return job.moved(here, there, known)
        found = Ready(job, laid, here, there, known)
        self._last = (known, here, there), found
        return found


def prepared_pages(
    machine: Machine,
    page_bytes: int,
    src: tuple[MrHandle, Pages],
    dst: tuple[MrDesc, Pages],
    routing: Routing,
) -> Prepared:
    """Prepare paged writes."""
    mr, nlocal = src[0], len(machine.domains)

    def job(remotes: Remote | Targets, here: int, there: int, imm: ImmArg) -> Job:
        assert isinstance(remotes, Remote)
        pages = src[1], dst[1]
        if here or there:
            pages = _moved(src[1], here), _moved(dst[1], there)
        mine, theirs = (mr, pages[0]), (remotes, pages[1])
        return paged_job(page_bytes, mine, theirs, imm, routing, nlocal)

    name = "submit_paged_writes"
    verb = _Verb(name, job, lambda imm, rows: imm_column(name, imm, rows))
    return Prepared(machine, mr, dst[0], verb)


def prepared_scatter(
    machine: Machine, mr: MrHandle, slices: Slices, group: PeerGroup | None, routing: Routing
) -> Prepared:
    """Prepare a scatter."""
    nlocal = len(machine.domains)

    def job(remotes: Remote | Targets, here: int, there: int, imm: ImmArg) -> Job:
        assert isinstance(remotes, Targets)
        moved = slices
        if here or there:
            mine = tuple(int(at) + here for at in slices.here)
            theirs = tuple(int(at) + there for at in slices.there)
            moved = Slices(slices.lengths, mine, slices.descs, theirs)
        return scatter_job(mr, moved, remotes, _one(imm), routing, nlocal)

    verb = _Verb("submit_scatter", job, lambda imm, _: _one(imm))
    return Prepared(machine, mr, slices.descs, verb, group)


def prepared_barrier(
    machine: Machine, descs: Sequence[MrDesc], group: PeerGroup | None, routing: Routing
) -> Prepared:
    """Prepare a barrier."""
    name, nlocal = "submit_barrier", len(machine.domains)

    def job(remotes: Remote | Targets, here: int, there: int, imm: ImmArg) -> Job:
        assert isinstance(remotes, Targets)
        if here or there:
            raise BadRequest(f"{name}: src_offset={here} dst_offset={there}; it has no bytes")
        return barrier_job(remotes, _one(imm) or 0, routing, nlocal)

    verb = _Verb(name, job, lambda imm, _: check_imm(imm))  # type: ignore[arg-type]  # it checks
    return Prepared(machine, None, tuple(descs), verb, group)


def _one(imm: ImmArg) -> int | None:
    return None if imm is None else check_imm(imm)  # type: ignore[arg-type]  # checked there


def _moved(pages: Pages, offset: int) -> Pages:
    return Pages(pages.indices, stride=pages.stride, offset=pages.offset + offset)


def _room(
    starts: Column, nbytes: Column, first: int, limits: int | npt.NDArray[np.int64]
) -> tuple[int, int]:
    """Compute the smallest and the largest offset at which all rows are inside their regions.

    A region has the length `limits` and begins at `first`, as `starts` count.
    """
    places = (np.asarray(starts, np.uint64) - np.uint64(first)).astype(np.int64)
    after = limits - (places + np.asarray(nbytes, np.int64))
    return -int(places.min()), int(after.min())

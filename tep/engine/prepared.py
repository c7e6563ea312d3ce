"""Prepared transfers: a verb's checks, columns and lookups are made once, and `submit` posts them.

A prepared transfer follows its verb by construction. What is not known to be fine (an offset out of
bounds, a peer that was replaced, a region that was given back, a lease) goes through the checks of
the verb itself, with the arguments that the verb would have been given. Which NICs and paths carry
the rows is decided at each submit, as for every transfer (`tep.core.group`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Final, NamedTuple

from tep.api import Pages, Routing
from tep.backends.base import Column
from tep.checks import check_int, shown, unpicklable
from tep.core.imm import check_imm
from tep.core.peers import PeerBook, PeerGroup
from tep.core.ready import Laid, Ready
from tep.core.region import Job, MrHandle, Remote, Targets, check_source
from tep.core.requests import (
    ImmArg,
    Slices,
    barrier_job,
    imm_column,
    paged_job,
    scatter_job,
    single_job,
)
from tep.core.transfer import Transfer, names_of
from tep.engine.machine import Machine
from tep.errors import BadRequest
from tep.units import IMM_MAX
from tep.wire import Target

__all__ = ["Prepared", "PreparedBarrier", "PreparedPages", "PreparedSingle", "PreparedSlices"]

_PARTS_MAX: Final = 256
"""Parts of a page list that a prepared transfer remembers; beyond it all are forgotten."""

Key = tuple[int | None, int, int, slice | None]
Span = tuple[int, int]
"""Where bytes of a request begin and end in their region."""


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

    Made by `engine.prepare_single_write`, `prepare_paged_writes`, `prepare_scatter` and
    `prepare_barrier`. It holds no room at the NICs; drop it when it is not needed any more. Any
    thread may submit.

    Attributes:
        verb: the verb that it stands for.
        submitted: how many transfers it has submitted.
        laid_out: how often its checks were made: once, and again after a peer was replaced or
            removed; before each submit under a lease.
    """

    __slots__ = (
        "__weakref__", "_base", "_book", "_generation", "_group", "_last", "_leased", "_machine",
        "_mr", "_nlocal", "_parts", "_routing", "_targets", "laid_out", "submitted",
    )  # fmt: skip

    verb: ClassVar[str]

    def __init__(
        self,
        machine: Machine,
        mr: MrHandle | None,
        targets: Target | tuple[Target, ...],
        routing: Routing,
        *,
        group: PeerGroup | None = None,
    ) -> None:
        self._machine = machine
        self._book: PeerBook = machine.peers
        self._nlocal = len(machine.domains)
        self._mr = mr
        self._targets = targets
        self._group = group
        self._routing = routing
        self.submitted = self.laid_out = 0
        machine.check_open(self.verb.replace("submit", "prepare"))
        self._renew()
        machine.prepared.add(self)

    __reduce__ = unpicklable("it belongs to an engine of this process; prepare it anew there")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()})"

    @property
    def rows(self) -> int:
        """How many writes a submit makes, without `pages`."""
        return self._base.job.n

    @property
    def nbytes(self) -> int:
        """How many bytes a submit moves, without `pages`."""
        return self._base.job.total

    def describe(self) -> str:
        """One line for reports."""
        job = self._base.job
        return (
            f"{job.kind} of {job.n} rows, {job.total} bytes to "
            f"{names_of(job.remotes)}, prepared: {self.submitted} submitted, laid out "
            f"{self.laid_out} times"
        )

    def submit(
        self,
        imm: ImmArg = None,
        *,
        src_offset: int = 0,
        dst_offset: int = 0,
        pages: slice | None = None,
        on_done: Callable[[Transfer], object] | None = None,
    ) -> Transfer:
        """Post it: the effect, the guarantees and the errors are those of the verb.

        Args:
            imm: as of the verb: None or a 32-bit number; of a paged write also an array, one for
                each page.
            src_offset: added to every source offset, bytes; may be negative.
            dst_offset: added to every target offset, bytes; may be negative.
            pages: of page lists: these entries of both lists only, by numpy's rules for slices.
            on_done: called with the transfer once it settles.

        Raises:
            BadRequest: bytes outside a region at these offsets; no immediate; no such pages.
            BusyError: too many rows wait already.
            ClosedError, LeaseError, StaleEpoch: the engine is closed, the region here was given
                back, the peer is being removed or has restarted, the lease is over.
        """
        mr = self._mr
        if (
            self._generation != self._book.generation
            or self._leased
            or (mr is not None and mr.closed)
        ):
            self._renew()
        last = self._last
        if (
            type(imm) is int
            and type(src_offset) is type(dst_offset) is int
            and (imm, src_offset, dst_offset, pages) == last[0]
        ):
            job = last[1]
        else:
            job = self._at(imm, src_offset, dst_offset, pages)
        transfer = self._machine.submit(job, on_done)
        self.submitted += 1
        return transfer

    # ------------------------------------------------------------------ what the verbs differ in

    def _job(
        self,
        remotes: Remote | Targets,
        offsets: tuple[int, int],
        imm: ImmArg,
        pages: slice | None,
    ) -> Job:
        """What the verb makes of the arguments; raises what it raises. `offsets`: here, there."""
        raise NotImplementedError

    def _spans(self, pages: slice | None) -> tuple[list[Span], list[Span]]:
        """The bytes here, and those at each target. Arguments that _job() has checked only."""
        raise NotImplementedError

    def _imm(self, imm: ImmArg, _rows: int) -> Column | None:
        return _one(imm)

    def _part(self, pages: object) -> _Base:
        raise BadRequest(
            f"{self.verb}: pages={shown(pages)}; only page lists that were prepared have pages"
        )

    # ------------------------------------------------------------------ inside

    def _renew(self) -> None:
        """Check everything again, and lay out anew what is not what it was."""
        book, verb, targets = self._book, self.verb, self._targets
        generation = book.generation  # first: it may grow meanwhile
        if self._mr is not None:
            check_source(self._mr, self._machine, verb)
        remotes: Remote | Targets
        if isinstance(targets, tuple):
            remotes = book.targets(targets, self._group, verb)
        else:
            remotes = book.resolve(targets, verb)
        base = self._lay_out(remotes, None)
        self._machine.check_longest(base.job)
        self._leased = any(remote.held_lease is not None for remote in _each(remotes))
        self._base = base
        self._parts: dict[tuple[object, ...], _Base] = {}
        self._last: tuple[Key | None, Job] = None, base.job
        self._generation = generation
        self.laid_out += 1

    def _lay_out(self, remotes: Remote | Targets, pages: slice | None) -> _Base:
        """The request at no offset, with its bounds."""
        job = self._job(remotes, (0, 0), None, pages)
        here, there = self._spans(pages)
        mine = 0 if self._mr is None else self._mr.memory.nbytes
        limits = (remote.nbytes for remote in _each(remotes))
        laid = Laid(remotes, self._nlocal)
        return _Base(job, laid, *_room(here, [mine] * len(here)), *_room(there, limits))

    def _at(self, imm: ImmArg, here: int, there: int, pages: slice | None) -> Job:
        """The request at these offsets, with this immediate."""
        base = self._base if pages is None else self._part(pages)
        if type(here) is not int:
            here = check_int(f"{self.verb}: src_offset", here)
        if type(there) is not int:
            there = check_int(f"{self.verb}: dst_offset", there)
        job, laid, here_min, here_max, there_min, there_max = base
        if not (here_min <= here <= here_max and there_min <= there <= there_max):
            return self._refused((here, there), imm, pages)
        known = imm if type(imm) is int and 0 <= imm <= IMM_MAX else self._imm(imm, job.n)
        # A lease is looked at when rows are dealt out.
        if self._leased or not (known is None or type(known) is int):
            return job.moved(here, there, known)
        found = Ready(job, laid, here, there, known)
        self._last = (known, here, there, pages), found
        return found

    def _refused(self, offsets: tuple[int, int], imm: ImmArg, pages: slice | None) -> Job:
        """What the verb says of these offsets: an error, since they are out of bounds."""
        try:
            return self._job(self._base.job.remotes, offsets, imm, pages)
        except BadRequest as error:
            src, dst = map(shown, offsets)
            at = f"prepared, at src_offset={src} dst_offset={dst}"
            raise BadRequest(f"{error} ({at})") from None


class PreparedSingle(Prepared):
    """A prepared single write."""

    __slots__ = ("_here", "_nbytes", "_there")

    verb = "submit_single_write"

    def __init__(
        self,
        machine: Machine,
        nbytes: int,
        here: tuple[MrHandle, int],
        there: tuple[Target, int],
        routing: Routing,
    ) -> None:
        self._nbytes, self._here, self._there = nbytes, here[1], there[1]
        super().__init__(machine, here[0], there[0], routing)

    def _job(
        self,
        remotes: Remote | Targets,
        offsets: tuple[int, int],
        imm: ImmArg,
        _pages: slice | None,
    ) -> Job:
        assert isinstance(remotes, Remote)
        assert self._mr is not None
        here, there = self._here, self._there
        if any(offsets):  # else they may be no numbers yet
            here, there = here + offsets[0], there + offsets[1]
        mine, rest = (self._mr, here), (_one(imm), self._routing, self._nlocal)
        return single_job(self._nbytes, mine, remotes, there, *rest)

    def _spans(self, _pages: slice | None) -> tuple[list[Span], list[Span]]:
        n, here, there = int(self._nbytes), int(self._here), int(self._there)
        self._nbytes, self._here, self._there = n, here, there  # plain from now on
        return [(here, here + n)], [(there, there + n)]


class PreparedPages(Prepared):
    """Prepared paged writes."""

    __slots__ = ("_lists", "_page_bytes")

    verb = "submit_paged_writes"

    def __init__(
        self,
        machine: Machine,
        page_bytes: int,
        here: tuple[MrHandle, Pages],
        there: tuple[Target, Pages],
        routing: Routing,
    ) -> None:
        self._page_bytes, self._lists = page_bytes, (here[1], there[1])
        super().__init__(machine, here[0], there[0], routing)

    def _cut(self, pages: slice | None, offsets: tuple[int, int] = (0, 0)) -> tuple[Pages, Pages]:
        """Both page lists, or a part of them, at these offsets."""
        if pages is None and not any(offsets):
            return self._lists
        part = slice(None) if pages is None else pages
        here, there = (
            Pages(each.indices[part], stride=each.stride, offset=each.offset + offset)
            for each, offset in zip(self._lists, offsets, strict=True)
        )
        return here, there

    def _job(
        self,
        remotes: Remote | Targets,
        offsets: tuple[int, int],
        imm: ImmArg,
        pages: slice | None,
    ) -> Job:
        assert isinstance(remotes, Remote)
        assert self._mr is not None
        here, there = self._cut(pages, offsets)
        mine, theirs = (self._mr, here), (remotes, there)
        return paged_job(self._page_bytes, mine, theirs, imm, self._routing, self._nlocal)

    def _spans(self, pages: slice | None) -> tuple[list[Span], list[Span]]:
        here, there = (
            (each.offset, each.offset + each.index_max * stride + nbytes)
            for each in self._cut(pages)
            for nbytes in (int(self._page_bytes),)
            for stride in (nbytes if each.stride is None else each.stride,)
        )
        return [here], [there]

    def _part(self, pages: object) -> _Base:
        if not isinstance(pages, slice):
            raise BadRequest(f"{self.verb}: pages={shown(pages)} is no slice of the page lists")
        key = pages.start, pages.stop, pages.step
        try:
            found = self._parts.get(key)
            some = found is not None or range(self.rows)[pages]
        except (TypeError, ValueError) as error:
            raise BadRequest(f"{self.verb}: pages={shown(pages)}: {error}") from None
        if not some:
            raise BadRequest(f"{self.verb}: pages={shown(pages)} are none of {self.rows} pages")
        if found is None:
            if len(self._parts) >= _PARTS_MAX:
                self._parts.clear()
            found = self._parts[key] = self._lay_out(self._base.job.remotes, pages)
        return found

    def _imm(self, imm: ImmArg, rows: int) -> Column | None:
        return imm_column(self.verb, imm, rows)


class PreparedSlices(Prepared):
    """A prepared scatter."""

    __slots__ = ("_slices",)

    verb = "submit_scatter"

    def __init__(
        self,
        machine: Machine,
        mr: MrHandle,
        slices: Slices,
        group: PeerGroup | None,
        routing: Routing,
    ) -> None:
        self._slices = slices
        super().__init__(machine, mr, slices.descs, routing, group=group)

    def _job(
        self,
        remotes: Remote | Targets,
        offsets: tuple[int, int],
        imm: ImmArg,
        _pages: slice | None,
    ) -> Job:
        assert isinstance(remotes, Targets)
        assert self._mr is not None
        slices = self._slices
        if any(offsets):
            here = tuple(int(at) + offsets[0] for at in slices.here)
            there = tuple(int(at) + offsets[1] for at in slices.there)
            slices = Slices(slices.lengths, here, slices.descs, there)
        return scatter_job(self._mr, slices, remotes, _one(imm), self._routing, self._nlocal)

    def _spans(self, _pages: slice | None) -> tuple[list[Span], list[Span]]:
        lengths, here, _, there = self._slices
        mine, theirs = (
            [(int(at), int(at) + int(n)) for at, n in zip(column, lengths, strict=True)]
            for column in (here, there)
        )
        return mine, theirs


class PreparedBarrier(Prepared):
    """A prepared barrier."""

    __slots__ = ()

    verb = "submit_barrier"

    def __init__(
        self,
        machine: Machine,
        descs: Sequence[Target],
        group: PeerGroup | None,
        routing: Routing,
    ) -> None:
        super().__init__(machine, None, tuple(descs), routing, group=group)

    def _job(
        self,
        remotes: Remote | Targets,
        offsets: tuple[int, int],
        imm: ImmArg,
        _pages: slice | None,
    ) -> Job:
        assert isinstance(remotes, Targets)
        if any(offsets):
            raise BadRequest(
                f"{self.verb}: src_offset={offsets[0]} dst_offset={offsets[1]}; it has no bytes"
            )
        return barrier_job(remotes, _one(imm) or 0, self._routing, self._nlocal)

    def _spans(self, _pages: slice | None) -> tuple[list[Span], list[Span]]:
        return [], []

    def _imm(self, imm: ImmArg, _rows: int) -> Column | None:
        return check_imm(imm)  # type: ignore[arg-type]  # checked there


def _one(imm: ImmArg) -> int | None:
    """No immediate, or one."""
    return None if imm is None else check_imm(imm)  # type: ignore[arg-type]  # checked there


def _each(remotes: Remote | Targets) -> Sequence[Remote]:
    return [remotes] if isinstance(remotes, Remote) else remotes.remotes


def _room(spans: Sequence[Span], limits: Iterable[int]) -> Span:
    """The smallest and largest offset at which each span is inside its region."""
    after = (limit - end for limit, (_, end) in zip(limits, spans, strict=False))
    return -min((start for start, _ in spans), default=0), min(after, default=0)

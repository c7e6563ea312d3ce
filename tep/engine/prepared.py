"""Prepared transfers: a verb's checks, columns and lookups are made once, and `submit` posts them.

A prepared transfer follows its verb by construction. What is not known to be fine (an offset out of
bounds, a peer that was replaced, a region that was given back, a lease) goes through the checks of
the verb itself, with the arguments that the verb would have been given. Which NICs and paths carry
the rows is decided at each submit, as for every transfer (`tep.core.group`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from tep.api import Pages, Routing
from tep.backends.base import Column
from tep.checks import check_int, shown, unpicklable
from tep.core.imm import check_imm
from tep.core.peers import PeerBook, PeerGroup
from tep.core.pending import shifted
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

__all__ = ["Prepared", "PreparedBarrier", "PreparedPages", "PreparedScatter", "PreparedSingle"]

_PARTS_MAX: Final = 256
"""Parts of a page list that a prepared transfer remembers; beyond it all are forgotten."""

Key = tuple[int, int, int, slice | None]


class _Base(NamedTuple):
    """A request at no offset, and the offsets at which its bytes are inside their regions."""

    job: Job
    src_min: int
    src_max: int
    dst_min: int
    dst_max: int


class Prepared:
    """A request whose checks and columns are made once; each `submit` only posts it.

    Made by `engine.prepare_single_write`, `prepare_paged_writes`, `prepare_scatter` and
    `prepare_barrier`. It holds no room at the NICs; drop it when it is not needed any more. Any
    thread may submit.

    Attributes:
        submitted: how many transfers it has submitted.
        laid_out: how often its checks were made: once, and again after a peer was replaced or
            removed; before each submit under a lease.
    """

    __slots__ = (
        "__weakref__", "_base", "_book", "_generation", "_last", "_leased", "_machine",
        "_mr", "_nlocal", "_parts", "_routing", "laid_out", "submitted",
    )  # fmt: skip

    verb: str

    def __init__(self, machine: Machine, mr: MrHandle | None, routing: Routing) -> None:
        self._machine = machine
        self._book: PeerBook = machine.peers
        self._nlocal = len(machine.domains)
        self._mr = mr
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
        """How many bytes a submit writes, without `pages`."""
        return self._base.job.total

    def describe(self) -> str:
        """One line for reports."""
        job = self._base.job
        return (
            f"{job.kind} of {job.n} rows, {job.total} bytes to {names_of(job.remotes)}, prepared: "
            f"{self.submitted} submitted, laid out {self.laid_out} times"
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
            imm: as of the verb: None or a 32-bit number; of pages also an array, one for each.
            src_offset: added to every source offset, bytes; may be negative.
            dst_offset: added to every target offset, bytes; may be negative.
            pages: of a paged write: these entries of both lists only, by numpy's rules for slices.
            on_done: called with the transfer once it settles.

        Raises:
            BadRequest: bytes outside a region at these offsets; no immediate; no such pages.
            BusyError: too many rows wait already.
            ClosedError, LeaseError, StaleEpoch: the engine is closed, the source region was given
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

    def _resolve(self) -> Remote | Targets:
        """Look all descriptors up, as the verb does."""
        raise NotImplementedError

    def _job(
        self,
        remotes: Remote | Targets,
        offsets: tuple[int, int],
        imm: ImmArg,
        pages: slice | None,
    ) -> Job:
        """What the verb makes of the arguments; raises what it raises."""
        raise NotImplementedError

    def _lay_out(self, remotes: Remote | Targets, pages: slice | None) -> _Base:
        """The request at no offset, with its bounds."""
        raise NotImplementedError

    # ------------------------------------------------------------------ inside

    def _renew(self) -> None:
        """Check everything again, and lay out anew what is not what it was."""
        generation = self._book.generation  # first: it may grow meanwhile
        if self._mr is not None:
            check_source(self._mr, self._machine, self.verb)
        remotes = self._resolve()
        base = self._lay_out(remotes, None)
        self._machine.check_longest(base.job)
        each = [remotes] if isinstance(remotes, Remote) else remotes.remotes
        self._leased = any(remote.held_lease is not None for remote in each)
        self._base = base
        self._parts: dict[tuple[object, ...], _Base] = {}
        self._last: tuple[Key | None, Job] = None, base.job
        self._generation = generation
        self.laid_out += 1

    def _at(self, imm: ImmArg, src_offset: int, dst_offset: int, pages: slice | None) -> Job:
        """The request at these offsets, with this immediate."""
        base = self._base if pages is None else self._part(pages)
        if type(src_offset) is not int:
            src_offset = check_int(f"{self.verb}: src_offset", src_offset)
        if type(dst_offset) is not int:
            dst_offset = check_int(f"{self.verb}: dst_offset", dst_offset)
        job = base.job
        if not (
            base.src_min <= src_offset <= base.src_max
            and base.dst_min <= dst_offset <= base.dst_max
        ):
            return self._refused(src_offset, dst_offset, imm, pages)
        known = imm if type(imm) is int and 0 <= imm <= IMM_MAX else self._imm(imm, job.n)
        src, dst, nbytes = job.src, job.dst, job.nbytes
        src = shifted(src, src_offset) if src_offset else src
        moves = not job.split and isinstance(job.remotes, Targets)  # by Job.dst_shift
        dst = shifted(dst, dst_offset) if dst_offset and not moves else dst
        found = Job(
            job.kind, job.mr, job.remotes, (src, dst, nbytes), known, job.n, job.total,
            job.longest, job.routing, job.lengths, dst_offset if moves else 0,
        )  # fmt: skip
        if isinstance(known, int):
            self._last = (known, src_offset, dst_offset, pages), found
        return found

    def _refused(self, src: int, dst: int, imm: ImmArg, pages: slice | None) -> Job:
        """What the verb says of these offsets: an error, since they are out of bounds."""
        try:
            return self._job(self._base.job.remotes, (src, dst), imm, pages)
        except BadRequest as error:
            at = f"prepared, at src_offset={shown(src)} dst_offset={shown(dst)}"
            raise BadRequest(f"{error} ({at})") from None

    def _imm(self, imm: ImmArg, rows: int) -> Column | None:  # noqa: ARG002  # pages use it
        return None if imm is None else check_imm(imm)  # type: ignore[arg-type]  # checked there

    def _part(self, pages: object) -> _Base:
        raise BadRequest(
            f"{self.verb}: pages={shown(pages)}; only a paged write that was prepared has pages"
        )


class PreparedSingle(Prepared):
    """A prepared single write."""

    __slots__ = ("_dst", "_nbytes", "_src")

    verb = "submit_single_write"

    def __init__(
        self,
        machine: Machine,
        nbytes: int,
        src: tuple[MrHandle, int],
        dst: tuple[Target, int],
        routing: Routing,
    ) -> None:
        self._nbytes, self._src, self._dst = nbytes, src, dst
        super().__init__(machine, src[0], routing)

    def _resolve(self) -> Remote:
        return self._book.resolve(self._dst[0], self.verb)

    def _job(
        self,
        remotes: Remote | Targets,
        offsets: tuple[int, int],
        imm: ImmArg,
        pages: slice | None,  # noqa: ARG002  # refused before
    ) -> Job:
        (mr, src), (_, dst) = self._src, self._dst
        assert isinstance(remotes, Remote)
        one = None if imm is None else check_imm(imm)  # type: ignore[arg-type]  # checked there
        at, to = src + offsets[0], dst + offsets[1]
        return single_job(self._nbytes, (mr, at), remotes, to, one, self._routing, self._nlocal)

    # A single write has no pages.
    def _lay_out(self, remotes: Remote | Targets, pages: slice | None) -> _Base:  # noqa: ARG002
        assert isinstance(remotes, Remote)
        (mr, src), (_, dst) = self._src, self._dst
        args = (mr, src), remotes, dst, None, self._routing, self._nlocal
        job = single_job(self._nbytes, *args)
        self._nbytes, self._src = job.total, (mr, int(src))  # plain, once they are checked
        self._dst = self._dst[0], int(dst)
        src_max = mr.memory.nbytes - job.total - int(src)
        return _Base(job, -int(src), src_max, -int(dst), remotes.nbytes - job.total - int(dst))


class PreparedPages(Prepared):
    """A prepared paged write."""

    __slots__ = ("_dst", "_page_bytes", "_src")

    verb = "submit_paged_writes"

    def __init__(
        self,
        machine: Machine,
        page_bytes: int,
        src: tuple[MrHandle, Pages],
        dst: tuple[Target, Pages],
        routing: Routing,
    ) -> None:
        self._page_bytes, self._src, self._dst = page_bytes, src, dst
        super().__init__(machine, src[0], routing)

    def _resolve(self) -> Remote:
        return self._book.resolve(self._dst[0], self.verb)

    def _lists(
        self, pages: slice | None, src_offset: int = 0, dst_offset: int = 0
    ) -> tuple[Pages, Pages]:
        """Both page lists, or a part of them, at these offsets."""
        lists = self._src[1], self._dst[1]
        if pages is None and not (src_offset or dst_offset):
            return lists
        part = slice(None) if pages is None else pages
        src, dst = (
            Pages(each.indices[part], stride=each.stride, offset=each.offset + offset)
            for each, offset in zip(lists, (src_offset, dst_offset), strict=True)
        )
        return src, dst

    def _job(
        self,
        remotes: Remote | Targets,
        offsets: tuple[int, int],
        imm: ImmArg,
        pages: slice | None,
    ) -> Job:
        assert isinstance(remotes, Remote)
        src, dst = self._lists(pages, *offsets)
        to, nlocal = (remotes, dst), self._nlocal
        return paged_job(self._page_bytes, (self._src[0], src), to, imm, self._routing, nlocal)

    def _lay_out(self, remotes: Remote | Targets, pages: slice | None) -> _Base:
        assert isinstance(remotes, Remote)
        job = self._job(remotes, (0, 0), None, pages)
        mr, (src, dst) = self._src[0], self._lists(pages)
        page_bytes = job.longest
        src_end = _end(src, page_bytes)
        dst_end = _end(dst, page_bytes)
        return _Base(
            job, -src.offset, mr.memory.nbytes - src_end, -dst.offset, remotes.nbytes - dst_end
        )

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


class PreparedScatter(Prepared):
    """A prepared scatter."""

    __slots__ = ("_group", "_slices")

    verb = "submit_scatter"

    def __init__(
        self,
        machine: Machine,
        src: MrHandle,
        slices: Slices,
        group: PeerGroup | None,
        routing: Routing,
    ) -> None:
        self._slices, self._group = slices, group
        super().__init__(machine, src, routing)

    def _resolve(self) -> Targets:
        return self._book.targets(self._slices.descs, self._group, self.verb)

    def _job(
        self,
        remotes: Remote | Targets,
        offsets: tuple[int, int],
        imm: ImmArg,
        pages: slice | None,  # noqa: ARG002  # refused before
    ) -> Job:
        assert isinstance(remotes, Targets)
        assert self._mr is not None
        lengths, sources, descs, targets = self._slices
        moved = sources, targets
        if any(offsets):
            moved = (
                tuple(int(at) + offsets[0] for at in sources),
                tuple(int(at) + offsets[1] for at in targets),
            )
        one = None if imm is None else check_imm(imm)  # type: ignore[arg-type]  # checked there
        slices = Slices(lengths, moved[0], descs, moved[1])
        return scatter_job(self._mr, slices, remotes, one, self._routing, self._nlocal)

    def _lay_out(self, remotes: Remote | Targets, pages: slice | None) -> _Base:
        assert isinstance(remotes, Targets)
        assert self._mr is not None
        job = self._job(remotes, (0, 0), None, pages)
        lengths, sources, targets = (
            tuple(map(int, column))
            for column in (self._slices.lengths, self._slices.sources, self._slices.offsets)
        )
        ends = zip(remotes.remotes, targets, lengths, strict=True)
        return _Base(
            job,
            -min(sources),
            self._mr.memory.nbytes - max(map(sum, zip(sources, lengths, strict=True))),
            -min(targets),
            min(remote.nbytes - at - nbytes for remote, at, nbytes in ends),
        )


class PreparedBarrier(Prepared):
    """A prepared barrier."""

    __slots__ = ("_descs", "_group")

    verb = "submit_barrier"

    def __init__(
        self,
        machine: Machine,
        descs: Sequence[Target],
        group: PeerGroup | None,
        routing: Routing,
    ) -> None:
        self._descs, self._group = tuple(descs), group
        super().__init__(machine, None, routing)

    def _resolve(self) -> Targets:
        return self._book.targets(self._descs, self._group, self.verb)

    def _job(
        self,
        remotes: Remote | Targets,
        offsets: tuple[int, int],
        imm: ImmArg,
        pages: slice | None,  # noqa: ARG002  # refused before
    ) -> Job:
        assert isinstance(remotes, Targets)
        if any(offsets):
            raise BadRequest(
                f"{self.verb}: src_offset={offsets[0]} dst_offset={offsets[1]}; it has no bytes"
            )
        one = check_imm(imm)  # type: ignore[arg-type]  # checked there
        return barrier_job(remotes, one, self._routing, self._nlocal)

    def _lay_out(self, remotes: Remote | Targets, pages: slice | None) -> _Base:
        return _Base(self._job(remotes, (0, 0), 0, pages), 0, 0, 0, 0)

    def _imm(self, imm: ImmArg, rows: int) -> Column | None:  # noqa: ARG002  # see the base
        return check_imm(imm)  # type: ignore[arg-type]  # checked there


def _end(pages: Pages, page_bytes: int) -> int:
    """Where the last page ends."""
    stride = page_bytes if pages.stride is None else pages.stride
    return pages.offset + pages.index_max * stride + page_bytes

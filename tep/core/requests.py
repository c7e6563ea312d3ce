"""From a verb's arguments to columns: every check a request can fail, before anything is posted.

Each function makes a Job, which the group deals out to NICs, and raises BadRequest for what cannot
be. The columns of a read stand at the same ends as those of a write: `src` is here, where the bytes
go, and `dst` is at the owner.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tep.backends.base import Column
from tep.base.api import Pages, Routing, ScatterDst, as_array
from tep.base.checks import FOREIGN, check_int, check_kind, shown
from tep.base.errors import BadRequest, BurntImm
from tep.base.wire import MrDesc
from tep.core.handles import Queued
from tep.core.imm import Burnt, check_imm
from tep.core.path import Link
from tep.core.plan import ROW_BYTES_MAX, is_one_row, plan_single
from tep.core.regions import Job, MrHandle, Places, Remote, Targets, check_source

__all__ = [
    "DEFAULT", "ImmArg", "ReadJob", "Slices", "barrier_job", "check_pair", "check_sink",
    "imm_column", "longest_row", "no_pair", "paged_job", "paged_read_job", "scatter_job",
    "single_job", "single_read_job", "slices_of",
]  # fmt: skip

U64 = npt.NDArray[np.uint64]
ImmArg = int | npt.NDArray[np.integer] | Sequence[int] | None
"""No immediate, one for every page, or one for each."""

DEFAULT: Final = Routing()
"""The routing of a request without one; known by identity, so that it needs no checking."""


def single_job(
    nbytes: int,
    src: tuple[MrHandle, int],
    remote: Remote,
    dst_offset: int,
    imm: int | None,
    routing: Routing,
    nlocal: int,
) -> Job:
    """Check one contiguous write, unless it is the one that the region got last."""
    mr, src_offset = src
    asked, steady = (nbytes, mr, src_offset, dst_offset, imm, routing), remote.steady
    plain = type(nbytes) is type(src_offset) is type(dst_offset) is int
    plain = plain and (routing is DEFAULT or type(routing) is Routing)
    if plain and steady is not None and type(imm) is int and steady[0] == asked:
        return steady[1]
    verb = "submit_single_write"
    if not plain:
        nbytes = check_int(f"{verb}: nbytes", nbytes)
        src_offset = check_int(f"{verb}: source offset", src_offset)
        dst_offset = check_int(f"{verb}: target offset", dst_offset)
    memory = mr.memory
    if nbytes < 0 or not 0 <= src_offset <= memory.nbytes - nbytes:
        _check_range(verb, "source", src_offset, nbytes, memory.nbytes, mr)
    if not 0 <= dst_offset <= remote.nbytes - nbytes:
        _check_range(verb, "target", dst_offset, nbytes, remote.nbytes, remote.desc)
    if imm is not None:
        imm = check_imm(imm)
    if routing is not DEFAULT:
        _check_routing(verb, routing, nlocal)
    if routing is DEFAULT and is_one_row(nbytes):
        rows = 1
    else:
        rows = len(plan_single(nbytes, nlocal, remote.nics, 0, routing).shares)
    columns = (memory.ptr + src_offset, remote.bases[0] + dst_offset, nbytes)
    job = Job("single", mr, remote, columns, imm, rows, nbytes, nbytes, routing)
    if plain:
        remote.steady = asked, job
    return job


def paged_job(
    page_bytes: int,
    src: tuple[MrHandle, Pages],
    dst: tuple[Remote, Pages],
    imm: ImmArg,
    routing: Routing,
    nlocal: int,
) -> Job:
    """Check a paged write: page k of the source list goes to page k of the target list."""
    verb = "submit_paged_writes"
    columns, npages = _paged(verb, page_bytes, src, dst, routing, nlocal)
    total, longest = npages * columns[2], columns[2]
    imms = imm_column(verb, imm, npages)
    return Job("paged", src[0], dst[0], columns, imms, npages, total, longest, routing)


def _paged(
    verb: str,
    page_bytes: int,
    near: tuple[MrHandle, Pages],
    far: tuple[Remote, Pages],
    routing: Routing,
    nlocal: int,
    *,
    reads: bool = False,
) -> tuple[tuple[Column, Column, int], int]:
    """Check a paged write, or read: return the columns of a Job, and how many pages there are."""
    (mr, here), (remote, there) = near, far
    ends = (
        (here, (mr.memory.ptr, mr.memory.nbytes, mr)),
        (there, (remote.bases[0], remote.nbytes, remote.desc)),
    )
    (src, source), (dst, target) = ends[::-1] if reads else ends
    what, side = ("reads", "destination") if reads else ("writes", "target")
    if not (isinstance(src, Pages) and isinstance(dst, Pages)):
        wrong = dst if isinstance(src, Pages) else src
        raise BadRequest(f"{verb}: a page list is a tep.Pages, not a {type(wrong).__name__}")
    npages = len(src.indices)
    if npages != len(dst.indices):
        raise BadRequest(f"{verb}: {npages} source pages but {len(dst)} {side} pages; one each")
    if type(page_bytes) is not int:
        page_bytes = check_int(f"{verb}: page_bytes", page_bytes)
    if not 0 <= page_bytes <= ROW_BYTES_MAX:
        raise BadRequest(
            f"{verb}: page_bytes={shown(page_bytes)} is outside 0 .. {ROW_BYTES_MAX}; cut the pages"
        )
    if routing is not DEFAULT:
        _check_routing(verb, routing, nlocal)
        _refuse_shards(verb, routing, f"pages stay whole, only single {what} shard")
    sources, _ = _starts(verb, "source", src, page_bytes, source)
    targets, stride = _starts(verb, side, dst, page_bytes, target)
    if npages > 1 and page_bytes and not (stride >= page_bytes and dst.distinct):
        _refuse_overlap(verb, dst, page_bytes, stride, side)
    columns = (targets, sources) if reads else (sources, targets)
    return (*columns, page_bytes), npages


class Slices(NamedTuple):
    """The slices of a scatter as columns, not checked: bytes from `here` go to `descs`, `there`."""

    lengths: tuple[int, ...]
    here: tuple[int, ...]
    descs: tuple[MrDesc, ...]
    there: tuple[int, ...]


def slices_of(listed: Sequence[ScatterDst]) -> Slices:
    """Turn a list of slices into columns."""
    try:
        if not listed:
            return Slices((), (), (), ())
        lengths, here, places = zip(*listed, strict=True)
        return Slices(lengths, here, *zip(*places, strict=True))
    except (TypeError, ValueError):
        raise _no_slices(listed) from None


def _no_slices(listed: object) -> BadRequest:
    form = "a slice is tep.ScatterDst(nbytes, src, (descriptor, offset))"
    for k, one in enumerate(listed if isinstance(listed, list | tuple) else ()):
        try:
            _, _, (_, _) = one
        except (TypeError, ValueError):
            return BadRequest(f"submit_scatter: slice {k} is {shown(one)}; {form}")
    return BadRequest(f"submit_scatter: dsts={shown(listed)} is no list of slices; {form}")


def scatter_job(
    mr: MrHandle,
    slices: Slices,
    targets: Targets,
    imm: int | None,
    routing: Routing,
    nlocal: int,
) -> Job:
    """Check a scatter: one slice of the source region to each target."""
    verb = "submit_scatter"
    if imm is not None:
        imm = check_imm(imm)
    if routing is not DEFAULT:
        _check_routing(verb, routing, nlocal)
        if routing.scatter_by == "peers":
            _refuse_shards(verb, routing, "it needs scatter_by='bytes'")
    lengths, sources, _, offsets = slices
    pack = _packer(len(lengths))
    try:
        # Packing takes nothing but integers of 64 bits, and is four times as fast as np.array.
        nbytes, src = pack(*lengths), pack(*sources)
        places = _places(targets, pack(*offsets), offsets)
    except (struct.error, TypeError, ValueError, OverflowError):
        _check_slices(verb, mr, targets, (lengths, sources, offsets))
        raise
    # The sum of numpy's integers may wrap, with a warning.
    if type(lengths[0]) is not int or type(total := sum(lengths)) is not int:
        lengths = tuple(map(int, lengths))
        total = sum(lengths)
    longest = max(lengths)
    # The extremes of the three columns suffice nearly always; if not, look at every row.
    if not (
        longest <= ROW_BYTES_MAX
        and int(max(sources)) + longest <= mr.memory.nbytes
        and places.offset_max + longest <= targets.limit_min
    ):
        _check_slices(verb, mr, targets, (lengths, sources, offsets))
    if targets.are_shared():
        _refuse_shared(verb, targets, lengths, places.column)
    split = routing.scatter_by == "bytes"
    rows = _count_rows(lengths, targets, routing, nlocal) if split else len(lengths)
    src_column = np.frombuffer(src, np.uint64) + mr.ptr
    columns = (src_column, places.column, np.frombuffer(nbytes, np.uint64))
    return Job("scatter", mr, targets, columns, imm, rows, total, longest, routing, lengths)


@lru_cache(maxsize=256)
def _packer(n: int) -> Callable[..., bytes]:
    return struct.Struct(f"={n}Q").pack


def _places(targets: Targets, raw: bytes, offsets: Sequence[int]) -> Places:
    """Return the targets' offsets as a column: the last request's where it is the same."""
    found = targets.places
    if raw != found.raw:
        found = targets.places = Places(raw, np.frombuffer(raw, np.uint64), int(max(offsets)))
    return found


def _count_rows(lengths: Sequence[int], targets: Targets, routing: Routing, nlocal: int) -> int:
    each = zip(lengths, targets.nics, strict=True)
    return sum(len(plan_single(n, nlocal, nics, 0, routing).shares) for n, nics in each)


def barrier_job(targets: Targets, imm: int, routing: Routing, nlocal: int) -> Job:
    """Check a barrier: an immediate without bytes for each target."""
    imm = check_imm(imm)
    if routing is not DEFAULT:
        _check_routing("submit_barrier", routing, nlocal)
        _refuse_shards("submit_barrier", routing, "it has no bytes to shard")
    n = len(targets.remotes)
    return Job("barrier", None, targets, (0, 0, 0), imm, n, 0, 0, routing)


def longest_row(job: Job, nlocal: int) -> int:
    """Compute the longest row that a NIC will have to carry, bytes."""
    if not job.split:
        return job.longest
    if isinstance(job.remotes, Remote):
        slices = [(job.longest, job.remotes.nics)]
    else:
        assert not isinstance(job.nbytes, int)
        slices = list(zip(job.nbytes.tolist(), job.remotes.nics, strict=True))
    plans = (plan_single(nbytes, nlocal, nics, 0, job.routing) for nbytes, nics in slices)
    return max(share.stop - share.start for plan in plans for share in plan.shares)


def _check_routing(verb: str, routing: Routing, nlocal: int) -> None:
    check_kind(f"{verb}: routing", routing, Routing, cure="leave it out for the usual one")
    pinned = routing.domain
    if pinned is not None and not 0 <= pinned < nlocal:
        raise BadRequest(
            f"{verb}: routing.domain={pinned}, but this engine has NICs 0 to {nlocal - 1}"
        )


def _refuse_shards(verb: str, routing: Routing, why: str) -> None:
    if routing.num_shards is not None:
        raise BadRequest(f"{verb}: routing.num_shards={routing.num_shards}; {why}")


def _check_range(
    verb: str, side: str, offset: int, nbytes: int, limit: int, region: object
) -> None:
    if offset < 0 or nbytes < 0:
        raise BadRequest(
            f"{verb}: {side} offset={shown(offset)} nbytes={shown(nbytes)}; neither may be negative"
        )
    if offset + nbytes > limit:
        raise BadRequest(
            f"{verb}: {side} bytes {shown(offset)} .. {shown(offset + nbytes)} are outside the "
            f"{limit} bytes of {region} (nbytes={shown(nbytes)})"
        )


def _check_slices(
    verb: str, mr: MrHandle, targets: Targets, columns: tuple[Sequence[int], ...]
) -> None:
    for k, row in enumerate(zip(*columns, strict=True)):
        remote, what = targets.remotes[k], f"{verb}: slice {k}"
        names = ("nbytes", "src", "target offset")
        nbytes, source, offset = (
            check_int(f"{what}: {name}", n) for n, name in zip(row, names, strict=True)
        )
        _check_range(what, "source", source, nbytes, mr.memory.nbytes, mr)
        _check_range(what, "target", offset, nbytes, remote.nbytes, remote.desc)
        if nbytes > ROW_BYTES_MAX:
            raise BadRequest(
                f"{what}: {nbytes} bytes; a slice is {ROW_BYTES_MAX} at the most, cut it"
            )


def _starts(
    verb: str, side: str, pages: Pages, page_bytes: int, region: tuple[int, int, object]
) -> tuple[Column, int]:
    """Return addresses and stride of pages that are all inside (first byte, length, region).

    The addresses are a column, or a plain int where there is one page.
    """
    first, limit, name = region
    offset, stride = pages.offset, pages.stride
    if stride is None:
        stride = page_bytes
    end = offset + pages.index_max * stride + page_bytes
    if end > limit:
        raise BadRequest(
            f"{verb}: {side} page {pages.index_max} ends at byte {end} (offset {offset}, "
            f"stride {stride}, page {page_bytes}), outside the {limit} bytes of {name}"
        )
    if len(pages.indices) == 1:
        return first + offset + pages.index_max * stride, stride
    return pages.starts(stride, first + offset), stride


def _refuse_overlap(verb: str, pages: Pages, page_bytes: int, stride: int, side: str) -> None:
    """Refuse pages that share bytes where they arrive: which would win is undefined.

    A page is listed twice, or the stride is below their size, so that they may overlap.
    """
    if stride >= page_bytes:
        order = np.sort(pages.indices)
        twice = int(order[np.flatnonzero(order[1:] == order[:-1])[0]])
        raise BadRequest(f"{verb}: {side} page {twice} is listed more than once")
    order = np.sort(pages.indices) * np.uint64(stride)
    close = np.flatnonzero(order[1:] - order[:-1] < np.uint64(page_bytes))
    if close.size:
        at = pages.offset + int(order[close[0]])
        raise BadRequest(
            f"{verb}: {side} pages overlap: two pages of {page_bytes} bytes start within one page "
            f"of byte {at} (stride {stride})"
        )


def _refuse_shared(
    verb: str, targets: Targets, lengths: Sequence[int], offsets: npt.NDArray[np.uint64]
) -> None:
    """Refuse slices that share bytes of a target: which would win is undefined on every fabric."""
    spans: dict[object, list[tuple[int, int, int]]] = {}
    for k, (remote, nbytes, offset) in enumerate(
        zip(targets.remotes, lengths, offsets.tolist(), strict=True)
    ):
        if nbytes:
            spans.setdefault(remote.memory(), []).append((offset, offset + nbytes, k))
    for mine in spans.values():
        mine.sort()
        for (_, stop, k), (start, _, other) in itertools.pairwise(mine):
            if start < stop:
                one, two = sorted((k, other))
                raise BadRequest(
                    f"{verb}: slices {one} and {two} overlap: both write to bytes from {start} on "
                    f"of {targets.remotes[other].desc}"
                )


def imm_column(verb: str, imm: ImmArg, npages: int) -> Column | None:
    """Check the immediates of a paged write: none, one for all, or one for each page."""
    if imm is None or type(imm) is int:
        return imm if imm is None else check_imm(imm)
    try:
        found = as_array(imm)
    except FOREIGN as error:
        raise BadRequest(f"{verb}: imm={shown(imm)} is no integer, and no list of them") from error
    if found.shape == ():
        return check_imm(found.item())
    if found.shape != (npages,) or found.dtype.kind not in "iu":
        raise BadRequest(
            f"{verb}: imm of shape {found.shape} {found.dtype}; one integer, or one for each of "
            f"{npages} pages"
        )
    if found.dtype != np.uint32:
        check_imm(int(found.min()))
        check_imm(int(found.max()))
    return found.astype(np.uint32)


class ReadJob(Job):
    """One read as columns. `n` counts the immediate that follows it, too.

    Attributes:
        owner_imm: the immediate that the owner gets once all rows are back, or None; `told` says
            how many these are, 0 or 1, and `after` is the row while it waits.
        silent: paths, by NICs, on which a row of it got no answer since one came back.
    """

    __slots__ = ("after", "owner_imm", "silent", "told")
    is_read = True
    is_plain = False

    def __init__(
        self,
        kind: str,
        mr: MrHandle | None,
        remote: Remote,
        columns: tuple[Column, Column, Column],
        imm: int | None,
        n: int,
        total: int,
        longest: int,
        routing: Routing,
    ) -> None:
        self.owner_imm = None if imm is None else check_imm(imm)
        self.told = int(imm is not None)
        self.after: Queued | None = None
        self.silent: set[tuple[int, int]] = set()
        super().__init__(kind, mr, remote, columns, None, n + self.told, total, longest, routing)
        self.split = kind == "single read"

    @property
    def counted_imm(self) -> Column | None:
        return self.owner_imm


def check_sink(mr: object, owner: object, what: str) -> None:
    """Raise unless this is a live region of the engine `owner` that reads may write to."""
    check_source(mr, owner, what)  # type: ignore[arg-type]  # it is compared only
    assert isinstance(mr, MrHandle)
    if not mr.access.sink:
        raise BadRequest(
            f"{what}: {mr!r} was registered with {mr.access!r}; bytes are read into memory of "
            "Access.SINK or Access.SOURCE_AND_TARGET"
        )


def single_read_job(
    nbytes: int,
    src: tuple[Remote, int],
    dst: tuple[MrHandle, int],
    imm: int | None,
    routing: Routing,
    nlocal: int,
) -> ReadJob:
    """Check one contiguous read."""
    verb = "submit_single_read"
    (remote, there), (mr, here) = src, dst
    nbytes = check_int(f"{verb}: nbytes", nbytes)
    there = check_int(f"{verb}: source offset", there)
    here = check_int(f"{verb}: destination offset", here)
    _check_range(verb, "source", there, nbytes, remote.nbytes, remote.desc)
    _check_range(verb, "destination", here, nbytes, mr.memory.nbytes, mr)
    _check_routing(verb, routing, nlocal)
    rows = len(plan_single(nbytes, nlocal, remote.nics, 0, routing).shares)
    columns = (mr.memory.ptr + here, remote.bases[0] + there, nbytes)
    return ReadJob("single read", mr, remote, columns, imm, rows, nbytes, nbytes, routing)


def paged_read_job(
    page_bytes: int,
    src: tuple[Remote, Pages],
    dst: tuple[MrHandle, Pages],
    imm: int | None,
    routing: Routing,
    nlocal: int,
) -> ReadJob:
    """Check a paged read: page k of the source list comes to page k of the destination list."""
    verb = "submit_paged_reads"
    columns, npages = _paged(verb, page_bytes, dst, src, routing, nlocal, reads=True)
    total, longest = npages * columns[2], columns[2]
    return ReadJob("paged read", dst[0], src[0], columns, imm, npages, total, longest, routing)


def check_pair(verb: str, src: object, dst: object, second: str, *, reads: bool = False) -> None:
    """Raise BadRequest unless source and destination are two things each."""
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in (src, dst)):
        raise no_pair(verb, src, dst, second, reads=reads)


def no_pair(verb: str, src: object, dst: object, second: str, *, reads: bool = False) -> BadRequest:
    """Make the error where source or destination is not two things."""
    ends = ("MrDesc", "MrHandle") if reads else ("MrHandle", "MrDesc")
    given = f"src={shown(src)} dst={shown(dst)}"
    wanted = f"src is ({ends[0]}, {second}), dst is ({ends[1]}, {second})"
    return BadRequest(f"{verb}: {given}; {wanted}")


def refuse_burnt(job: Job, burnt: Burnt[tuple[Link, int], str]) -> None:
    """Raise BurntImm if a request would use an immediate that is burnt at one of its targets."""
    for link, imms in job.imms_by_peer():
        for imm in imms:
            why = burnt.why.get((link, imm))
            if why is not None:
                raise BurntImm(
                    f"{job.kind}: imm {imm:#x} is burnt at {link.addr.name}, because an earlier "
                    f"request with it failed: {why}. Take a fresh immediate, and have the "
                    f"receiver expect that one; or, once nothing of the earlier one is on its way, "
                    f"call remove_imm({imm:#x}) at both ends"
                )

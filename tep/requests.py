"""From a verb's arguments to columns: every check a request can fail, before anything is posted.

Pure: nothing here queues, posts or remembers. What comes out is a Job, which the group deals out to
NICs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Final, SupportsIndex

import numpy as np
import numpy.typing as npt

from tep.api import Pages, Routing, ScatterDst
from tep.backends.base import Column
from tep.errors import BadRequest
from tep.imm import check_imm
from tep.plan import ROW_BYTES_MAX, Share, plan_single
from tep.region import MrHandle, Remote, Targets

__all__ = [
    "DEFAULT",
    "ImmArg",
    "Job",
    "as_int",
    "barrier_job",
    "longest_row",
    "paged_job",
    "scatter_job",
    "shares_of",
    "single_job",
]

U64 = npt.NDArray[np.uint64]
ImmArg = int | npt.NDArray[np.integer] | Sequence[int] | None
"""No immediate, one for every page, or one for each."""

DEFAULT: Final = Routing()
"""What a request without routing gets; known by identity, so that it needs no checking."""


class Job:
    """One request as columns, not yet dealt out to NICs.

    Attributes:
        kind: the verb, for reports.
        remotes: the target, or one target a row (or, byte-sharded, one a slice).
        src: address of each row's first byte; a column.
        dst: of each row; a column. One target: address of its first byte, for the target's NIC 0.
            Several targets: byte offset in the row's own region.
        nbytes: of each row; a column.
        lengths: the same as plain ints where the rows differ, else empty: sums of few are cheaper
            so.
        imm: u32 for all rows, one a row, or None.
        n: rows that NICs will carry.
        total: bytes of all rows.
        longest: no row is longer; bytes. `longest_row` is exact.
        routing: which NICs.
        split: the columns are whole writes that NICs share; `shares_of` makes their rows.
    """

    __slots__ = (
        "dst",
        "imm",
        "kind",
        "lengths",
        "longest",
        "mr",
        "n",
        "nbytes",
        "remotes",
        "routing",
        "split",
        "src",
        "total",
    )

    def __init__(
        self,
        kind: str,
        mr: MrHandle | None,
        remotes: Remote | Targets,
        columns: tuple[Column, Column, Column],
        imm: Column | None,
        n: int,
        *,
        total: int,
        longest: int,
        routing: Routing,
        split: bool = False,
        lengths: tuple[int, ...] = (),
    ) -> None:
        self.kind = kind
        self.mr = mr
        self.remotes = remotes
        self.src, self.dst, self.nbytes = columns
        self.imm = imm
        self.n = n
        self.total = total
        self.longest = longest
        self.routing = routing
        self.split = split
        self.lengths = lengths


def as_int(value: SupportsIndex, what: str) -> int:
    """Return a plain int: numpy's integers would count in 64 bits, and floats would be cut.

    Raises:
        BadRequest: it is no integer.
    """
    if type(value) is int:
        return value
    try:
        return int(operator.index(value))
    except TypeError:
        raise BadRequest(f"{what}={value!r} is not an integer") from None


def single_job(
    nbytes: int,
    src: tuple[MrHandle, int],
    remote: Remote,
    dst_offset: int,
    imm: int | None,
    routing: Routing,
    nlocal: int,
) -> Job:
    """Check one contiguous write.

    Raises:
        BadRequest: a range outside its region, an immediate beyond 32 bits, or more shards than
            lanes.
    """
    verb = "submit_single_write"
    mr, src_offset = src
    if not (type(nbytes) is type(src_offset) is type(dst_offset) is int):
        nbytes = as_int(nbytes, f"{verb}: nbytes")
        src_offset = as_int(src_offset, f"{verb}: source offset")
        dst_offset = as_int(dst_offset, f"{verb}: target offset")
    _check_range(verb, "source", src_offset, nbytes, mr.memory.nbytes, mr)
    _check_range(verb, "target", dst_offset, nbytes, remote.nbytes, remote.desc)
    if imm is not None:
        imm = check_imm(imm)
    if routing is not DEFAULT:
        _check_routing(verb, routing, nlocal)
    rows = len(plan_single(nbytes, nlocal, remote.nics, 0, routing).shares)
    columns = (mr.memory.ptr + src_offset, remote.bases[0] + dst_offset, nbytes)
    return Job(
        "single",
        mr,
        remote,
        columns,
        imm,
        rows,
        total=nbytes,
        longest=nbytes,
        routing=routing,
        split=True,
    )


def paged_job(
    page_bytes: int,
    src: tuple[MrHandle, Pages],
    dst: tuple[Remote, Pages],
    imm: ImmArg,
    routing: Routing,
    nlocal: int,
) -> Job:
    """Check a paged write: page k of the source list goes to page k of the target list.

    Raises:
        BadRequest: lists of different length, a page outside its region, target pages that overlap,
            an immediate beyond 32 bits, or a NIC that is not there.
    """
    verb = "submit_paged_writes"
    mr, src_pages = src
    remote, dst_pages = dst
    for pages in (src_pages, dst_pages):
        if not isinstance(pages, Pages):
            raise BadRequest(f"{verb}: a page list is a tep.Pages, not a {type(pages).__name__}")
    npages = len(src_pages)
    if npages != len(dst_pages):
        raise BadRequest(
            f"{verb}: {npages} source pages but {len(dst_pages)} target pages; one each"
        )
    page_bytes = as_int(page_bytes, f"{verb}: page_bytes")
    if not 0 <= page_bytes <= ROW_BYTES_MAX:
        raise BadRequest(
            f"{verb}: page_bytes={page_bytes} is outside 0 .. {ROW_BYTES_MAX}; cut the pages"
        )
    if routing is not DEFAULT:
        _check_routing(verb, routing, nlocal)
        _refuse_shards(verb, routing, "pages stay whole, only single writes shard")
    src_offset, src_stride = _check_pages(
        verb, "source", src_pages, page_bytes, mr.memory.nbytes, mr
    )
    dst_offset, dst_stride = _check_pages(
        verb, "target", dst_pages, page_bytes, remote.nbytes, remote.desc
    )
    _check_overlap(verb, dst_pages, page_bytes, dst_stride)
    sources = _addresses(src_pages, src_stride, mr.memory.ptr + src_offset)
    targets = _addresses(dst_pages, dst_stride, remote.bases[0] + dst_offset)
    return Job(
        "paged",
        mr,
        remote,
        (sources, targets, page_bytes),
        _imm_column(verb, imm, npages),
        npages,
        total=npages * page_bytes,
        longest=page_bytes,
        routing=routing,
    )


def scatter_job(
    mr: MrHandle,
    dsts: Sequence[ScatterDst],
    targets: Targets,
    imm: int | None,
    routing: Routing,
    nlocal: int,
) -> Job:
    """Check a scatter: one slice of the source region to each target.

    Raises:
        BadRequest: a slice outside the source or its target, an immediate beyond 32 bits, or a NIC
            that is not there.
    """
    verb = "submit_scatter"
    if imm is not None:
        imm = check_imm(imm)
    if routing is not DEFAULT:
        _check_routing(verb, routing, nlocal)
        if routing.scatter_by == "peers":
            _refuse_shards(verb, routing, "it needs scatter_by='bytes'")
    lengths, sources, places = zip(*dsts, strict=True)
    _, offsets = zip(*places, strict=True)
    total = sum(lengths)
    # A sum of plain ints is one; anything else in there shows.
    if not (type(total) is type(sum(sources)) is type(sum(offsets)) is int):
        lengths = tuple(as_int(n, f"{verb}: slice {k}: nbytes") for k, n in enumerate(lengths))
        sources = tuple(as_int(n, f"{verb}: slice {k}: src") for k, n in enumerate(sources))
        offsets = tuple(
            as_int(n, f"{verb}: slice {k}: target offset") for k, n in enumerate(offsets)
        )
        total = sum(lengths)
    longest = max(lengths)
    try:
        nbytes = np.array(lengths, np.uint64)
        src, dst = np.array(sources, np.uint64), np.array(offsets, np.uint64)
        fits = longest <= ROW_BYTES_MAX and max(sources) + longest <= mr.memory.nbytes
        fits = fits and max(offsets) + longest <= targets.limit_min
    except OverflowError:  # negative, or beyond 64 bits
        fits = False
    # The extremes of the three columns suffice nearly always; if not, look at every row.
    if not fits:
        _check_slices(verb, mr, targets, (lengths, sources, offsets))
    split = routing.scatter_by == "bytes"
    rows = _count_rows(lengths, targets, routing, nlocal) if split else len(lengths)
    columns = (src + np.uint64(mr.memory.ptr), dst, nbytes)
    return Job(
        "scatter",
        mr,
        targets,
        columns,
        imm,
        rows,
        total=total,
        longest=longest,
        routing=routing,
        split=split,
        lengths=lengths,
    )


def _count_rows(lengths: Sequence[int], targets: Targets, routing: Routing, nlocal: int) -> int:
    """Rows of slices that all NICs share."""
    each = zip(lengths, targets.nics, strict=True)
    return sum(len(plan_single(n, nlocal, nics, 0, routing).shares) for n, nics in each)


def barrier_job(targets: Targets, imm: int, routing: Routing, nlocal: int) -> Job:
    """Check a barrier: an immediate without bytes for each target.

    Raises:
        BadRequest: an immediate beyond 32 bits, or a NIC that is not there.
    """
    imm = check_imm(imm)
    if routing is not DEFAULT:
        _check_routing("submit_barrier", routing, nlocal)
        _refuse_shards("submit_barrier", routing, "it has no bytes to shard")
    n = len(targets.remotes)
    return Job("barrier", None, targets, (0, 0, 0), imm, n, total=0, longest=0, routing=routing)


def longest_row(job: Job, nlocal: int) -> int:
    """The longest row that a NIC will have to carry, bytes; `job.longest` is an upper bound."""
    if not job.split:
        return job.longest
    if isinstance(job.remotes, Remote):
        slices = [(job.longest, job.remotes.nics)]
    else:
        assert not isinstance(job.nbytes, int)
        slices = list(zip(job.nbytes.tolist(), job.remotes.nics, strict=True))
    plans = (plan_single(nbytes, nlocal, nics, 0, job.routing) for nbytes, nics in slices)
    return max(share.stop - share.start for plan in plans for share in plan.shares)


def shares_of(
    job: Job, nremote: int, nbytes: int, nlocal: int, cursor: int
) -> tuple[tuple[Share, ...], int]:
    """Shards of one byte-sharded slice, and where the cursor goes."""
    plan = plan_single(nbytes, nlocal, nremote, cursor, job.routing)
    return plan.shares, plan.cursor


def _addresses(pages: Pages, stride: int, start: int) -> Column:
    """The address of each page's first byte; a plain int where there is one page."""
    if len(pages) == 1:
        return start + int(pages.indices[0]) * stride
    return pages.starts(stride) + np.uint64(start)


def _check_routing(verb: str, routing: Routing, nlocal: int) -> None:
    if routing.num_shards is not None:
        as_int(routing.num_shards, f"{verb}: routing.num_shards")
    if routing.domain is not None:
        pinned = as_int(routing.domain, f"{verb}: routing.domain")
        if not 0 <= pinned < nlocal:
            raise BadRequest(
                f"{verb}: routing.domain={pinned}, but this engine has NICs 0 to {nlocal - 1}"
            )
    if routing.scatter_by not in {"peers", "bytes"}:
        raise BadRequest(
            f"{verb}: routing.scatter_by={routing.scatter_by!r} is neither 'peers' nor 'bytes'"
        )


def _refuse_shards(verb: str, routing: Routing, why: str) -> None:
    if routing.num_shards is not None:
        raise BadRequest(f"{verb}: routing.num_shards={routing.num_shards}; {why}")


def _check_range(
    verb: str, side: str, offset: int, nbytes: int, limit: int, region: object
) -> None:
    if offset < 0 or nbytes < 0:
        raise BadRequest(f"{verb}: {side} offset={offset} nbytes={nbytes}; neither may be negative")
    if offset + nbytes > limit:
        raise BadRequest(
            f"{verb}: {side} bytes {offset} .. {offset + nbytes} are outside the {limit} bytes of "
            f"{region}"
        )


def _check_slices(
    verb: str, mr: MrHandle, targets: Targets, columns: tuple[Sequence[int], ...]
) -> None:
    for k, (nbytes, source, offset) in enumerate(zip(*columns, strict=True)):
        remote, what = targets.remotes[k], f"{verb}: slice {k}"
        _check_range(what, "source", source, nbytes, mr.memory.nbytes, mr)
        _check_range(what, "target", offset, nbytes, remote.nbytes, remote.desc)
        if nbytes > ROW_BYTES_MAX:
            raise BadRequest(
                f"{what}: {nbytes} bytes; a slice is {ROW_BYTES_MAX} at the most, cut it"
            )


def _check_pages(
    verb: str, side: str, pages: Pages, page_bytes: int, limit: int, region: object
) -> tuple[int, int]:
    """Return offset and stride of pages that are all inside their region."""
    offset = as_int(pages.offset, f"{verb}: {side} offset")
    stride = page_bytes
    if pages.stride is not None:
        stride = as_int(pages.stride, f"{verb}: {side} stride")
    end = offset + pages.index_max * stride + page_bytes
    if end > limit:
        raise BadRequest(
            f"{verb}: {side} page {pages.index_max} ends at byte {end} (offset {offset}, "
            f"stride {stride}, page {page_bytes}), outside the {limit} bytes of {region}"
        )
    return offset, stride


def _check_overlap(verb: str, pages: Pages, page_bytes: int, stride: int) -> None:
    """Refuse target pages that share bytes: which would win is undefined on every fabric."""
    n = len(pages)
    if n == 1 or page_bytes == 0:
        return
    if stride >= page_bytes:
        if not pages.distinct:
            order = np.sort(pages.indices)
            twice = int(order[np.flatnonzero(order[1:] == order[:-1])[0]])
            raise BadRequest(f"{verb}: target page {twice} is listed more than once")
        return
    order = np.sort(pages.indices) * np.uint64(stride)
    close = np.flatnonzero(order[1:] - order[:-1] < np.uint64(page_bytes))
    if close.size:
        at = pages.offset + int(order[close[0]])
        raise BadRequest(
            f"{verb}: target pages overlap: two pages of {page_bytes} bytes start within one page "
            f"of byte {at} (stride {stride})"
        )


def _imm_column(verb: str, imm: ImmArg, npages: int) -> Column | None:
    if imm is None or type(imm) is int:
        return imm if imm is None else check_imm(imm)
    found = np.asarray(imm)
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

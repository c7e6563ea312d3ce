"""From a read's arguments to columns: every check that a read can fail, before anything is posted.

The columns stand at the same ends as those of a write: `src` is here, where the bytes go, `dst` at
the owner. Nothing here queues or posts.
"""

from __future__ import annotations

from typing import TypeVar

from tep.api import Pages, Routing
from tep.backends.base import Column
from tep.checks import check_int, shown
from tep.core.imm import check_imm
from tep.core.path import Link
from tep.core.pending import Pending
from tep.core.plan import ROW_BYTES_MAX, plan_single
from tep.core.region import Job, MrHandle, Remote, check_source
from tep.core.requests import (
    _addresses,
    _check_pages,
    _check_range,
    _check_routing,
    _refuse_overlap,
    _refuse_shards,
)
from tep.errors import BadRequest
from tep.wire import Target

__all__ = [
    "ReadJob",
    "check_sink",
    "paged_read_job",
    "pair_of",
    "single_read_job",
]

T = TypeVar("T")


class ReadJob(Job):
    """One read as columns. `n` counts the immediate that follows it, too.

    Attributes:
        owner_imm: the immediate that the owner gets once all rows are back; None: none.
        told: how many immediates that are: 0 or 1.
        after: this immediate, while it waits for the rows.
        leased: whether its source is read under a lease.
        silent: paths, by link and NICs, on which a row of it got no answer since one came back.
    """

    __slots__ = ("after", "leased", "owner_imm", "silent", "told")
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
        self.leased = remote.held_lease is not None
        self.after: Pending | None = None
        self.silent: set[tuple[Link, int, int]] = set()
        super().__init__(kind, mr, remote, columns, None, n + self.told, total, longest, routing)
        self.split = kind == "single read"


def check_sink(mr: object, owner: object, what: str) -> None:
    """Raise unless this is a live region of the engine `owner` that reads may write to."""
    check_source(mr, owner, what)  # type: ignore[arg-type]  # it is compared only
    assert isinstance(mr, MrHandle)
    if not mr.access.sink:
        raise BadRequest(
            f"{what}: {mr!r} was registered with {mr.access!r}; bytes are read into memory of "
            "Access.SINK or Access.SOURCE_AND_TARGET"
        )


def pair_of(verb: str, src: tuple[Target, T], dst: tuple[MrHandle, T], second: str) -> None:
    """Raise unless source and destination are two things each."""
    try:
        (_, _), (_, _) = src, dst
    except (TypeError, ValueError):
        raise BadRequest(
            f"{verb}: src={shown(src)} dst={shown(dst)}; src is (MrDesc or Lease, {second}), dst "
            f"is (MrHandle, {second})"
        ) from None


def single_read_job(
    nbytes: int,
    src: tuple[Remote, int],
    dst: tuple[MrHandle, int],
    imm: int | None,
    routing: Routing,
    nlocal: int,
) -> ReadJob:
    """Check one contiguous read.

    Raises:
        BadRequest: a range outside its region, an immediate beyond 32 bits, or more shards than
            lanes.
    """
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
    return ReadJob("single read", mr.root, remote, columns, imm, rows, nbytes, nbytes, routing)


def paged_read_job(
    page_bytes: int,
    src: tuple[Remote, Pages],
    dst: tuple[MrHandle, Pages],
    imm: int | None,
    routing: Routing,
    nlocal: int,
) -> ReadJob:
    """Check a paged read: page k of the source list comes to page k of the destination list.

    Raises:
        BadRequest: lists of different length, a page outside its region, destination pages that
            overlap, an immediate beyond 32 bits, or a NIC that is not there.
    """
    verb = "submit_paged_reads"
    (remote, there), (mr, here) = src, dst
    for pages in (there, here):
        if not isinstance(pages, Pages):
            raise BadRequest(f"{verb}: a page list is a tep.Pages, not a {type(pages).__name__}")
    npages = len(there)
    if npages != len(here):
        raise BadRequest(
            f"{verb}: {npages} source pages but {len(here)} destination pages; one each"
        )
    page_bytes = check_int(f"{verb}: page_bytes", page_bytes)
    if not 0 <= page_bytes <= ROW_BYTES_MAX:
        raise BadRequest(
            f"{verb}: page_bytes={shown(page_bytes)} is outside 0 .. {ROW_BYTES_MAX}; cut the pages"
        )
    _check_routing(verb, routing, nlocal)
    _refuse_shards(verb, routing, "pages stay whole, only single reads shard")
    limit = mr.memory.nbytes
    there_at, there_stride = _check_pages(
        verb, "source", there, page_bytes, remote.nbytes, remote.desc
    )
    here_at, here_stride = _check_pages(verb, "destination", here, page_bytes, limit, mr)
    if npages > 1 and page_bytes and not (here_stride >= page_bytes and here.distinct):
        _refuse_overlap(verb, here, page_bytes, here_stride, "destination")
    columns = (
        _addresses(here, here_stride, mr.memory.ptr + here_at),
        _addresses(there, there_stride, remote.bases[0] + there_at),
        page_bytes,
    )
    total = npages * page_bytes
    return ReadJob("paged read", mr.root, remote, columns, imm, npages, total, page_bytes, routing)

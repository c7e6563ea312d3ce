"""The nouns a user writes down: pages, slices, routing, options, and the shapes of requests.

Values only: nothing here posts, waits, or knows an engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tep.base.checks import (
    FOREIGN,
    INT64_MAX,
    check_flag,
    check_int,
    check_kind,
    check_seconds,
    shown,
)
from tep.base.errors import BadRequest
from tep.base.wire import MrDesc, NetAddr

__all__ = [
    "Barrier", "CudaDevice", "EngineOptions", "Paged", "Pages", "Routing", "Scatter",
    "ScatterDst", "Sender", "Shape", "Single", "as_array",
]  # fmt: skip


SHAPE_BYTES_MAX: Final = 2**50
"""The longest write that is planned: its rows of 1 GiB are listed one by one."""

_POLL_ROWS_MAX: Final = 2**20

_DENSE: Final = 16
"""Limit of the largest index, in multiples of the page count, up to which a bitmap is used."""


def as_array(values: object) -> npt.NDArray[Any]:
    """Return a list of numbers as a numpy array; objects that have only DLPack work too."""
    kind = type(values)
    if hasattr(kind, "__dlpack__") and not hasattr(kind, "__array__"):
        return np.from_dlpack(values)  # type: ignore[arg-type]  # what it lacks is its error
    return np.asarray(values)


class Pages:
    """The list of a region's pages, in order: page k starts at `offset + indices[k] * stride`.

    Args:
        indices: any sequence or array of integers >= 0, length npages >= 1. It is copied; a page
            list stays one integer array from end to end.
        stride: bytes from one page's start to the next; None = the page size of the request, pages
            back to back.
        offset: bytes from the region's start to page 0.

    Attributes:
        index_max: the largest index.

    Raises:
        BadRequest: no pages, not integers, or something negative.
    """

    __slots__ = ("_distinct", "_starts", "index_max", "indices", "offset", "stride")

    def __init__(
        self,
        indices: Sequence[int] | npt.NDArray[np.integer],
        *,
        stride: int | None = None,
        offset: int = 0,
    ) -> None:
        try:
            found = as_array(indices)
        except FOREIGN as error:
            raise BadRequest(
                f"Pages: indices={shown(indices)} are no one-dimensional list of integers: {error}"
            ) from error
        if found.ndim != 1 or found.size == 0:
            raise BadRequest(
                f"Pages: indices of shape {found.shape}; one dimension and one page at the least"
            )
        if found.dtype.kind not in "iu":
            raise BadRequest(f"Pages: indices are {found.dtype}, not integers")
        if stride is not None:
            stride = check_int("Pages: stride", stride, 0, INT64_MAX)
        if type(offset) is not int or not 0 <= offset <= INT64_MAX:
            offset = check_int("Pages: offset", offset, 0, INT64_MAX)
        self.indices: npt.NDArray[np.uint64] = found.astype(np.uint64)
        self.indices.flags.writeable = False
        self.stride = stride
        self.offset = offset
        self.index_max = int(np.maximum.reduce(self.indices))
        if self.index_max >> 63 and int(found.min()) < 0:  # a negative one has become huge
            raise BadRequest(f"Pages: index {int(found.min())} is negative")

        # Cached results, for lists that are used again.
        self._distinct: bool | None = None
        self._starts: tuple[int, int, npt.NDArray[np.uint64]] | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        pages = f"{len(self)} pages, largest index {self.index_max}"
        return f"Pages({pages}, stride={self.stride}, offset={self.offset})"

    @property
    def distinct(self) -> bool:
        """True if no page is listed twice."""
        if self._distinct is None:
            self._distinct = self._count_distinct() == len(self)
        return self._distinct

    def _count_distinct(self) -> int:
        if self.index_max >= _DENSE * len(self):
            return len(np.unique(self.indices))
        seen = np.zeros(self.index_max + 1, np.bool_)
        seen[self.indices.view(np.int64)] = True
        return int(np.count_nonzero(seen))

    def starts(self, stride: int, first: int = 0) -> npt.NDArray[np.uint64]:
        """Return the start of each page if page 0 starts at `first`: read-only uint64[npages].

        The last result is cached: a list used again with the same region costs nothing, with
        another region one addition.
        """
        known = self._starts
        if known is not None and known[0] == stride:
            if known[1] == first:
                return known[2]
            # Adding an array of no dimension takes half the time of adding a scalar.
            step = first - known[1]
            column = known[2] + np.array(step if step >= 0 else step + 2**64, np.uint64)
        else:
            column = self.indices * np.uint64(stride)
            column += np.array(first, np.uint64)  # in place: fresh pages cost more than the sum
        self._starts = stride, first, column
        return column


def _put(record: object, name: str, value: object) -> None:
    """Set a field of a frozen record in its __post_init__, to the checked plain value."""
    object.__setattr__(record, name, value)


class ScatterDst(NamedTuple):
    """One slice for one peer.

    A tuple and not a dataclass: a scatter's columns come from one `zip(*dsts)` in C, which is what
    keeps 63 peers inside the time budget.

    Attributes:
        nbytes: length of the slice; 0 is legal.
        src: byte offset in the source region.
        dst: target descriptor, and byte offset in it.
    """

    nbytes: int
    src: int
    dst: tuple[MrDesc, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The NICs that a request uses.

    Attributes:
        num_shards: cut a single write in exactly this many shards; None = as many as pay off.
        domain: use this local NIC only; None = all of them, starting where the last request
            stopped.
        scatter_by: "peers": each peer's slice goes whole over one NIC. "bytes": every NIC carries a
            part of each.
    """

    num_shards: int | None = None
    domain: int | None = None
    scatter_by: Literal["peers", "bytes"] = "peers"

    def __post_init__(self) -> None:
        for name in ("num_shards", "domain"):
            value = getattr(self, name)
            if value is not None:
                _put(self, name, check_int(f"routing.{name}", value))
        if not (isinstance(self.scatter_by, str) and self.scatter_by in {"peers", "bytes"}):
            raise BadRequest(
                f"routing.scatter_by={shown(self.scatter_by)} is neither 'peers' nor 'bytes'"
            )


@dataclass(frozen=True, slots=True)
class Single:
    """The shape of one contiguous write of `nbytes`."""

    nbytes: int
    routing: Routing = Routing()

    def __post_init__(self) -> None:
        _check_shape(self)


@dataclass(frozen=True, slots=True)
class Paged:
    """The shape of one paged write of `npages` pages, 1 or more."""

    npages: int

    def __post_init__(self) -> None:
        _put(self, "npages", check_int("Paged: npages", self.npages, 1, INT64_MAX))


@dataclass(frozen=True, slots=True)
class Scatter:
    """The shape of a scatter, as one of its targets sees it: a slice of `nbytes`."""

    nbytes: int
    routing: Routing = Routing()

    def __post_init__(self) -> None:
        _check_shape(self)


@dataclass(frozen=True, slots=True)
class Barrier:
    """The shape of a barrier."""


def _check_shape(shape: Single | Scatter) -> None:
    name = type(shape).__name__
    _put(shape, "nbytes", check_int(f"{name}: nbytes", shape.nbytes, 0, SHAPE_BYTES_MAX))
    check_kind(f"{name}: routing", shape.routing, Routing)


Shape = Single | Paged | Scatter | Barrier
"""The argument of `count_imms`: enough of a request to count the immediates for one target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Limits and defaults of one engine.

    Attributes:
        wait_timeout_s: what wait() uses when no timeout is given, seconds; infinite: wait for ever.
        post_rows_max: rows one transfer may post in a row before others get their turn, 1 or more.
        backlog_rows_max: rows that may wait behind full queues, 1 or more; beyond it a submit
            raises BusyError.
        poll_rows: completions read from one NIC in one go, 1 to 2**20.
        commands_max: commands taken in one step, 1 or more.
        failover: remember which immediates came from where, so that a request survives a NIC that
            dies in the middle of it. Without it such a request fails.
        probe_first_s: seconds until a peer's NIC that did not answer is probed for the first time;
            the wait doubles after each probe, unless it was answered and only rows in flight keep
            the path shut.
        probe_max_s: the longest wait between two probes, `probe_first_s` or more; infinite: the
            wait doubles without end. Keep it well above the time that a NIC takes to report an
            unreachable peer, since that report starts a probe too.
        switch_interval_s: what `sys.setswitchinterval` is lowered to while rows are in flight, a
            handle is open or somebody waits, and put back after; infinite: it is left alone. It
            holds for the whole process: a thread that computes in Python gives the interpreter up
            within this time when the engine needs it, and not after 5 ms. Threads that all compute
            in Python take turns more often: two or four of them lose a seventh of their pace.
    """

    wait_timeout_s: float = 60.0
    post_rows_max: int = 1024
    backlog_rows_max: int = 1 << 26
    poll_rows: int = 4096
    commands_max: int = 128
    failover: bool = True
    probe_first_s: float = 1.0
    probe_max_s: float = 60.0
    switch_interval_s: float = 3e-5

    def __post_init__(self) -> None:
        limits = {
            "post_rows_max": INT64_MAX,
            "backlog_rows_max": INT64_MAX,
            "poll_rows": _POLL_ROWS_MAX,
            "commands_max": INT64_MAX,
        }
        for name, high in limits.items():
            value = check_int(f"EngineOptions: {name}", getattr(self, name), 1, high)
            _put(self, name, value)
        wait_s = check_seconds("EngineOptions: wait_timeout_s", self.wait_timeout_s, 0.0, math.inf)
        _put(self, "wait_timeout_s", wait_s)
        for name in ("probe_first_s", "probe_max_s"):
            what, never = f"EngineOptions: {name}", name == "probe_max_s"
            _put(self, name, check_seconds(what, getattr(self, name), 1e-9, never=never))
        if self.probe_max_s < self.probe_first_s:
            raise BadRequest(
                f"EngineOptions: probe_max_s={self.probe_max_s} is below "
                f"probe_first_s={self.probe_first_s}"
            )
        switch_s = check_seconds(
            "EngineOptions: switch_interval_s", self.switch_interval_s, 1e-6, math.inf
        )
        _put(self, "switch_interval_s", switch_s)
        _put(self, "failover", check_flag("EngineOptions: failover", self.failover))


@dataclass(frozen=True, slots=True)
class Sender:
    """The origin of a message; see `submit_recvs(..., with_sender=True)`.

    Attributes:
        nic: the address of the NIC that sent it.
        engine: identifies the incarnation of the sending engine; the same for all its NICs.
        peer: the engine's address, for an answer; None: the receiving engine does not know it.
    """

    nic: bytes
    engine: bytes
    peer: NetAddr | None
    _engine_of: Callable[[bytes], bytes] = field(compare=False, default=bytes)

    def __reduce__(self) -> tuple[type[Sender], tuple[object, ...]]:
        """Pickle the fields; a copy in another process owns no address."""
        return Sender, (self.nic, self.engine, self.peer)

    def owns(self, addr: NetAddr) -> bool:
        """Tell whether an address in the message belongs to the engine that sent the message.

        The sending NIC must be listed in the address, and all listed NICs must be of that engine.
        """
        return self.nic in addr.domains and all(
            self._engine_of(nic) == self.engine for nic in addr.domains
        )

    def __repr__(self) -> str:
        if self.peer is None:
            return f"Sender(NIC {self.nic!r} of an engine that was not met)"
        return f"Sender(NIC {self.peer.domains.index(self.nic)} of {self.peer})"


class CudaDevice(NamedTuple):
    """One GPU as the CUDA driver numbers it.

    Attributes:
        ordinal: N of "cuda:N".
        pci: its address, e.g. "0000:53:00.0".
        name: model name.
    """

    ordinal: int
    pci: str
    name: str

"""The routing table as records: tasks, what they gather and make, and one row for each write.

Static, serialisable, the same on every rank. How it is made is `schedule`'s matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tep import BadDescriptor
from tep.apps.rl.metadata import Box, DType

__all__ = ["ROW", "Gather", "GatherPiece", "Out", "OutPart", "Rows", "Schedule", "Task"]

ROW: Final = np.dtype(
    [
        ("task", "<i4"),
        ("sender", "<i4"),
        ("receiver", "<i4"),
        ("src", "<i8"),
        ("dst", "<i8"),
        ("nbytes", "<i8"),
    ]
)
"""One write. src: byte in the task's staging; dst: byte in the receiver's weight region."""

Rows = npt.NDArray[np.void]

_VERSION: Final = 2
_RANKS_MAX: Final = 1 << 31


class GatherPiece(NamedTuple):
    """One shard of a source tensor, packed in the task's staging.

    Attributes:
        box: in the tensor.
        offset: byte in the task's staging.
        holders: ranks that have it; the others get it from one of them.
    """

    box: Box
    offset: int
    holders: tuple[int, ...]

    def sender_to(self, rank: int) -> int | None:
        """The rank that sends this piece to a member of the sub-mesh; None if it has it already."""
        if rank in self.holders:
            return None
        return self.holders[rank % len(self.holders)]


class Gather(NamedTuple):
    """One source tensor that a task unshards.

    Attributes:
        name: of the tensor.
        dtype: of the tensor.
        box: what is there once all pieces are; they tile it.
        pieces: by box.
        offset: byte in the task's staging of the whole tensor in C order; the first piece's offset
            if the pieces, one behind the other, are the whole already.
    """

    name: str
    dtype: DType
    box: Box
    pieces: tuple[GatherPiece, ...]
    offset: int

    @property
    def in_place(self) -> bool:
        """Whether the pieces as they lie are the whole."""
        return self.offset == self.pieces[0].offset


class OutPart(NamedTuple):
    """A slice of a gathered tensor that becomes a part of an output."""

    gather: int
    box: Box


class Out(NamedTuple):
    """One output of a task: parts joined, quantised, packed.

    Attributes:
        target: name of the fused parameter.
        dtype: in inference.
        parts: joined along the last axis but one, in order.
        offset: byte in the task's staging.
        nbytes: of the values.
        scale_offset: byte of the block scales, -1 if there are none.
        scale_nbytes: of the block scales.
    """

    target: str
    dtype: DType
    parts: tuple[OutPart, ...]
    offset: int
    nbytes: int
    scale_offset: int
    scale_nbytes: int


class Task(NamedTuple):
    """One parameter, or a few small ones, of one sub-mesh: gather, make, write.

    Attributes:
        number: in the schedule.
        name: of its first output.
        group: number of its mesh group.
        members: ranks of its sub-mesh; all take part.
        gathers: what is unsharded.
        outs: what is made of it.
        gather_bytes: of all gathered tensors.
        nbytes: staging that every member needs for it.
        staging: where that begins in each member's staging region.
        after: for each member, the position in its own list of tasks up to which all must have
            ended before this may begin; -1: none.
    """

    number: int
    name: str
    group: int
    members: tuple[int, ...]
    gathers: tuple[Gather, ...]
    outs: tuple[Out, ...]
    gather_bytes: int
    nbytes: int
    staging: tuple[int, ...]
    after: tuple[int, ...]

    def staging_of(self, rank: int) -> int:
        """The byte at which the task's staging begins at a member."""
        return self.staging[self.members.index(rank)]

    def after_of(self, rank: int) -> int:
        """Up to which of its own tasks a member must have ended; -1: none."""
        return self.after[self.members.index(rank)]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The routing table: all writes, in order. Made once; recomputed when membership changes.

    Attributes:
        ranks: number of training ranks.
        receivers: names of the rollout workers.
        groups: names of the mesh groups, in order.
        tasks: ordered by group.
        rows: ROW, ordered by task, sender and position.
        watermark_bytes: staging that no rank exceeds.
    """

    ranks: int
    receivers: tuple[str, ...]
    groups: tuple[str, ...]
    tasks: tuple[Task, ...]
    rows: Rows
    watermark_bytes: int
    _starts: npt.NDArray[np.int64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the rows by task and sender."""
        key = self.rows["task"].astype(np.int64) * self.ranks + self.rows["sender"]
        object.__setattr__(self, "_starts", key)

    def rows_of(self, task: int, sender: int) -> Rows:
        """The rows that one rank writes in one task."""
        key = task * self.ranks + sender
        first, last = np.searchsorted(self._starts, (key, key + 1))
        return self.rows[first:last]

    def tasks_of(self, rank: int) -> Iterator[Task]:
        """The tasks that a rank takes part in, in order."""
        return (task for task in self.tasks if rank in task.members)

    def finishes(self, rank: int) -> slice:
        """The receivers that a rank tells when all ranks are through, each receiver by one rank.

        One is enough: no rank is past the last barrier before all have entered it. If every rank
        told every receiver, 4,096 ranks would send millions of words that say the same.
        """
        return slice(rank, None, self.ranks)

    def sent_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes that each training rank writes to rollout workers."""
        return self._sums("sender", self.ranks)

    def received_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes that each rollout worker is written."""
        return self._sums("receiver", len(self.receivers))

    def _sums(self, column: str, count: int) -> npt.NDArray[np.int64]:
        found = np.zeros(count, np.int64)
        np.add.at(found, self.rows[column], self.rows["nbytes"])
        return found

    def to_bytes(self) -> bytes:
        """Encode; `from_bytes` is the inverse."""
        wire = _Wire(
            _VERSION,
            self.ranks,
            self.receivers,
            self.groups,
            self.tasks,
            self.rows.tobytes(),
            self.watermark_bytes,
        )
        return msgspec.msgpack.encode(wire)

    @classmethod
    def from_bytes(cls, data: bytes) -> Schedule:
        """Decode strictly.

        Raises:
            BadDescriptor: these bytes are no schedule of this version.
        """
        try:
            wire = msgspec.msgpack.decode(data, type=_Wire)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadDescriptor(f"Schedule: {error}") from error
        if wire.version != _VERSION or len(wire.rows) % ROW.itemsize:
            raise BadDescriptor(
                f"Schedule: version {wire.version} with {len(wire.rows)} bytes of rows; this tep "
                f"reads version {_VERSION} and rows of {ROW.itemsize} bytes"
            )
        rows = np.frombuffer(wire.rows, ROW)
        wrong = _wrong(wire, rows)
        if wrong:
            raise BadDescriptor(f"Schedule: {wrong}")
        return cls(wire.ranks, wire.receivers, wire.groups, wire.tasks, rows, wire.watermark_bytes)

    def digest(self) -> str:
        """SHA-256 of the encoded table: equal on all ranks, or they do not fit together."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


class _Wire(msgspec.Struct, array_like=True):
    """A schedule as it travels."""

    version: int
    ranks: int
    receivers: tuple[str, ...]
    groups: tuple[str, ...]
    tasks: tuple[Task, ...]
    rows: bytes
    watermark_bytes: int


def _wrong(wire: _Wire, rows: Rows) -> str:
    """Say which of a schedule's numbers cannot be; "" = none."""
    if not 0 <= wire.ranks <= _RANKS_MAX:
        return f"ranks={wire.ranks} is outside 0 .. {_RANKS_MAX}"
    if not len(rows):
        return ""
    limits = {"task": len(wire.tasks), "sender": wire.ranks, "receiver": len(wire.receivers)}
    for name, count in limits.items():
        low, high = int(rows[name].min()), int(rows[name].max())
        if low < 0 or high >= count:
            return f"rows name {name} {low if low < 0 else high}, there are {count}"
    if int(rows["nbytes"].min()) < 0 or rows["nbytes"].sum(dtype=np.float64) >= 2**63:
        return "the rows' bytes are negative, or too many"
    return ""

"""The seam between controller and workers: workers of other processes; reports, regions and
immediates.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import NoneType
from typing import Final, NamedTuple, Self

import msgspec
import numpy as np

from tep import BadDescriptor, FabricError, MrDesc, Routing, Scatter, Span, UsageError, count_imms
from tep.apps.rl.metadata import RolloutMeta, Schedule, TrainMeta
from tep.rendezvous.calls import Call, Remote

__all__ = [
    "ATTEMPTS", "ROUTING", "Kind", "PeerResult", "Regions", "RemoteRollout", "RemoteTraining",
    "RolloutState", "TrainReport", "UpdateReport", "count_data", "count_row", "cut_rows",
    "make_imm", "stage_span",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainReport:
    """One training rank's part in one update.

    Attributes:
        written_bytes: to rollout workers.
        gathered_bytes: sent to other members of its sub-meshes.
        peak_bytes: most staging that its tasks held at once.
        lost: rollout worker -> why it could not be written to.
        spans: its stages; see stage_span().
    """

    rank: int
    written_bytes: int
    gathered_bytes: int
    peak_bytes: int
    lost: dict[str, str]
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class RolloutState:
    """The state of a rollout worker.

    Attributes:
        serving: version it may serve; None while its weights are mixed or were never written.
        attempt: the last update it was told of.
        arrived: immediates of that update counted so far.
        expected: how many there will be.
    """

    serving: int | None
    attempt: int
    arrived: int
    expected: int


def stage_span(who: str, stage: str, task: str, start_s: float, stop_s: float) -> Span:
    """Make the span of one stage of one task; writes overlap each other, as transfers do."""
    return Span("transfer" if stage == "write" else "step", who, stage, task, start_s, stop_s, {})


class RemoteTraining(Remote):
    """A TrainingWorker in another process."""

    set_routing = Call(bytes)
    connect = Call(NoneType)
    transfer_weights = Call(TrainReport)
    abort = Call(NoneType)
    load = Call(NoneType)

    async def param_meta(self) -> TrainMeta:
        """Ask the rank what it holds; raise FabricError if it says that it is another one."""
        found, name = await self.caller.call(TrainMeta, "param_meta"), self.caller.hello.name
        if str(found.rank) != name.removeprefix("train"):
            raise FabricError(f"training rank {name} says that it is {found.rank}", peer=name)
        return found


class RemoteRollout(Remote):
    """A RolloutWorker in another process."""

    begin = Call(bytes)
    finished = Call(int)
    abort = Call(RolloutState)
    state = Call(RolloutState)
    digest = Call(str)

    async def param_meta(self) -> RolloutMeta:
        """Ask the worker what it holds; raise FabricError if it says that it is another one."""
        found, name = await self.caller.call(RolloutMeta, "param_meta"), self.caller.hello.name
        if found.name != name:
            raise FabricError(f"rollout worker {name!r} says that it is {found.name!r}", peer=name)
        return found


@dataclass(frozen=True, slots=True)
class PeerResult:
    """The end of an update for one peer.

    Attributes:
        name: "rank 3" or the rollout worker's name.
        outcome: "updated", "sent", "lost", "aborted" or "failed".
        detail: why, if not well.
    """

    name: str
    outcome: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The end of an update.

    Attributes:
        version: of the weights.
        attempt: number of the try; each has its own immediates.
        ok: all training ranks did their part, and some rollout worker serves the version; if
            not, `error` says why.
        elapsed_s: of the controller's clock.
        trains: reports of the training ranks, if they ended well.
        rerouted: the schedule was computed anew for it.
    """

    version: int
    attempt: int
    ok: bool
    error: str
    elapsed_s: float
    peers: tuple[PeerResult, ...]
    trains: tuple[TrainReport, ...] = ()
    rerouted: bool = False

    def outcome(self, name: str) -> str:
        """The outcome for one peer, "" if that took no part."""
        return next((peer.outcome for peer in self.peers if peer.name == name), "")

    def table(self) -> str:
        """One line a peer."""
        width = max((len(peer.name) for peer in self.peers), default=0)
        return "\n".join(
            f"{peer.name:<{width}}  {peer.outcome:<8} {peer.detail}".rstrip() for peer in self.peers
        )


class Regions(NamedTuple):
    """The offsets of a RolloutMeta, and the memory behind them.

    Attributes:
        starts: offset at which each region begins; ascending, the first is 0.
        descs: of each region.
    """

    starts: tuple[int, ...]
    descs: tuple[MrDesc, ...]

    def at(self, offset: int) -> tuple[MrDesc, int]:
        """The region behind an offset, and the byte in it."""
        k = bisect_right(self.starts, offset) - 1
        return self.descs[k], offset - self.starts[k]

    def to_bytes(self) -> bytes:
        """Encode; `from_bytes` is the inverse."""
        return msgspec.msgpack.encode((self.starts, [desc.to_bytes() for desc in self.descs]))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decode strictly: BadDescriptor if these bytes are no regions."""
        try:
            starts, descs = msgspec.msgpack.decode(data, type=tuple[tuple[int, ...], list[bytes]])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadDescriptor(f"Regions: {error}") from error
        if len(starts) != len(descs) or starts[:1] != (0,) or sorted(set(starts)) != list(starts):
            raise BadDescriptor(f"Regions: {len(descs)} regions that begin at {starts[:4]}")
        return cls(starts, tuple(MrDesc.from_bytes(desc) for desc in descs))


ATTEMPTS: Final = 1 << 12
_NUMBERS: Final = 1 << 16
_ROW_BYTES_MAX: Final = 1 << 28

ROUTING: Final = Routing(scatter_by="bytes")
"""Every NIC of both sides carries a part of every row: no NIC is the bottleneck of a task."""


class Kind(IntEnum):
    """The meaning of an immediate."""

    READY = 1
    """A sub-mesh member has room for a task's shards."""
    SHARD = 2
    """A shard of a task is in the member's staging."""
    BARRIER = 3
    """A round of a barrier among the training ranks."""
    DATA = 4
    """A row of weights is in the rollout worker's region."""
    FINISH = 5
    """All training ranks have written everything; of the one that tells this rollout worker."""


def make_imm(kind: Kind, attempt: int, number: int = 0) -> int:
    """Encode an immediate; UsageError for a number beyond 16 bits."""
    if not 0 <= number < _NUMBERS:
        raise UsageError(f"{kind.name} number={number}; a schedule has {_NUMBERS} tasks at most")
    return kind << 28 | attempt % ATTEMPTS << 16 | number


def cut_rows(start: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Cut a range in rows that a scatter can carry: (start, bytes)."""
    for at in range(start, start + nbytes, _ROW_BYTES_MAX):
        yield at, min(_ROW_BYTES_MAX, start + nbytes - at)


def count_row(nbytes: int, nlocal: int, nremote: int) -> int:
    """Number of immediates that a row of this size makes at its target, under ROUTING."""
    return count_imms(Scatter(nbytes, ROUTING), nlocal, nremote)


def count_data(schedule: Schedule, receiver: int, nlocal: Sequence[int], nremote: int) -> int:
    """Number of immediates that all weights make at one rollout worker, with `nremote` NICs.

    `receiver` is its number in the schedule, `nlocal` the NICs of each training rank.
    """
    rows = schedule.rows[schedule.rows["receiver"] == receiver]
    nics = np.array(nlocal)[rows["sender"]]
    kinds = Counter(zip(rows["nbytes"].tolist(), nics.tolist()))
    return sum(count_row(*kind, nremote) * times for kind, times in kinds.items())

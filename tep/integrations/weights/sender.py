"""A training rank: takes a version of the weights, sends its part when the hub says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tep import FabricError, TepError, TransferEngine, UsageError
from tep.apps.rl import (
    AtOnce,
    Box,
    Compute,
    MeshGroup,
    SourceShard,
    TrainingWorker,
    TrainMeta,
    TrainReport,
    box_size,
)
from tep.integrations.weights.params import Param, piece_of, wire_form

if TYPE_CHECKING:
    Array = npt.NDArray[Any]

__all__ = ["Held", "WeightSender"]


@dataclass(frozen=True, slots=True)
class Held:
    """What one training rank has of a version.

    Attributes:
        params: all that it was given, in order.
        boxes: what it sends of each, in the shape in which that travels; empty ones are left out.
    """

    params: tuple[Param, ...]
    boxes: dict[str, tuple[Box, ...]]


class WeightSender:
    """One training rank over one engine; a TrainingPort of the hub.

    Args:
        engine: of this rank; the caller closes it.
        rank, world: this rank's number, and how many there are.
        compute: where copies and quantisation run.
    """

    def __init__(
        self, engine: TransferEngine, rank: int, world: int, *, compute: Compute | None = None
    ) -> None:
        if not 0 <= rank < world:
            raise UsageError(f"training rank {rank} of {world}")
        self.rank, self.world = rank, world
        self._engine = engine
        self._compute = compute or AtOnce()
        self._shards: dict[tuple[str, Box], Array] = {}
        self._held = Held((), {})
        self._version: int | None = None
        self._ready = asyncio.Event()
        self._ended: asyncio.Future[str] | None = None
        self._worker: TrainingWorker | None = None
        self._gone = ""

    def load(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Copy this rank's part of a version; see loading()."""
        with self.loading() as add:
            for name, tensor in weights:
                add(name, tensor)

    @contextmanager
    def loading(self) -> Iterator[Callable[[str, Any], None]]:
        """Copy this rank's part of a version: nobody else may change it while it is sent.

        Yields a function that takes a name and a tensor. A DTensor is sent as it is sharded, of any
        other tensor each rank sends a share. All ranks must give the same names.

        Raises:
            UsageError: a name that comes twice, or what is no tensor.
        """
        params: list[Param] = []
        boxes: dict[str, tuple[Box, ...]] = {}
        shards: dict[tuple[str, Box], Array] = {}

        def add(name: str, tensor: Any) -> None:
            if name in boxes:
                raise UsageError(f"rank {self.rank}: the weights have {name!r} twice")
            param, box, values = piece_of(name, tensor, self.rank, self.world)
            params.append(param)
            boxes[name] = (box,) if box_size(box) else ()
            if boxes[name]:
                mine = self._shards.get((name, box))
                if mine is None or mine.dtype != values.dtype:
                    mine = np.empty_like(values)
                mine[...] = values
                shards[name, box] = mine

        yield add
        self._shards.clear()
        self._shards.update(shards)  # the worker holds this dict
        self._held = Held(tuple(params), boxes)

    async def send(self, version: int, timeout_s: float) -> None:
        """Offer what was loaded as a version, and wait until the hub has sent it.

        Raises:
            TepError: it could not be sent.
        """
        if self._gone:
            raise FabricError(f"rank {self.rank}: {self._gone}", code="NO_HUB")
        self._ended = asyncio.get_running_loop().create_future()
        self._version = version
        self._ready.set()
        try:
            why = await asyncio.wait_for(self._ended, timeout_s)
        except TimeoutError:
            text = f"rank {self.rank}: version {version} was not asked for in {timeout_s} s"
            raise FabricError(text, code="TIMEOUT") from None
        finally:
            self._ready.clear()
            self._version = None
        if why:
            raise TepError(why)

    # ------------------------------------------------------------------ for the hub

    async def held(self, version: int) -> Held:
        """Wait until a version is loaded; return what there is of it."""
        await self._ready.wait()
        if self._version != version:
            raise UsageError(
                f"rank {self.rank} sends version {self._version}, rank 0 version {version}"
            )
        return self._held

    async def plan(self, groups: tuple[MeshGroup, ...]) -> None:
        """Take the mesh groups, which belong to what held() said."""
        if self._worker is not None:
            await self._worker.abort()
            self._worker.close()
        shards = tuple(SourceShard(name, box) for name, box in self._shards)
        dtypes = {param.name: wire_form(param)[0] for param in self._held.params}
        nics = len(self._engine.main_address.domains)
        meta = TrainMeta(self.rank, nics, shards, dtypes, groups)
        self._worker = TrainingWorker(self._engine, meta, self._shards, compute=self._compute)

    async def ended(self, why: str) -> None:
        """The version has been sent, or could not be."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(why)

    async def gone(self, why: str) -> None:
        """The hub hung up."""
        self._gone = why
        await self.ended(why)

    def _planned(self) -> TrainingWorker:
        if self._worker is None:
            raise UsageError(f"rank {self.rank}: the hub has not planned an update yet")
        return self._worker

    async def param_meta(self) -> TrainMeta:
        return await self._planned().param_meta()

    async def set_routing(self, schedule: bytes) -> bytes:
        return await self._planned().set_routing(schedule)

    async def connect(self, peers: Sequence[bytes], rollouts: dict[str, bytes]) -> None:
        await self._planned().connect(peers, rollouts)

    async def transfer_weights(self, attempt: int, skip: Sequence[str] = ()) -> TrainReport:
        return await self._planned().transfer_weights(attempt, skip)

    async def abort(self) -> None:
        if self._worker is not None:
            await self._worker.abort()

"""A rollout worker: memory that is written to, two counts, and whether its weights may be served.

Passive: between begin() and the last immediate nothing runs here but the engine's counting.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tep import Expectation, TepError, TransferEngine, UsageError, WaitTimeout
from tep.apps.rl.compute import numpy_dtypes
from tep.apps.rl.metadata import RolloutMeta, TargetShard, extents_of
from tep.apps.rl.ports import Kind, Regions, RolloutState, make_imm

if TYPE_CHECKING:
    Array = npt.NDArray[Any]

Parameter: TypeAlias = Any
"""Memory of a parameter as reg_mr takes it, e.g. a tensor; or a pair: values, block scales."""

__all__ = ["RolloutWorker"]


class RolloutWorker:
    """One inference worker over one engine.

    Args:
        engine: of this worker's device; the caller closes it.
        meta: what it holds.
        region: memory of meta.nbytes bytes for the weights; None: allocate it. Or the memory of
            each parameter, by name, where `lay_out(apart=True)` has laid them out.
    """

    def __init__(
        self,
        engine: TransferEngine,
        meta: RolloutMeta,
        region: npt.NDArray[np.uint8] | Mapping[str, Parameter] | None = None,
    ) -> None:
        self.engine = engine
        self.hold(meta, region)
        self._attempt = 0
        self._version = 0
        self._expected = 0
        self._leases = 0
        self._free = asyncio.Event()
        self._free.set()
        self._updating = False
        self._aborts = 0

    def hold(
        self,
        meta: RolloutMeta,
        region: npt.NDArray[np.uint8] | Mapping[str, Parameter] | None = None,
    ) -> None:
        """Hold other parameters from now on, in other memory; no version of them is here yet."""
        self._parameters: Mapping[str, Parameter] = {}
        if isinstance(region, Mapping):
            self._parameters, self._memory = region, _memory_of(meta, region)
        else:
            arena = np.zeros(meta.nbytes, np.uint8) if region is None else region
            if arena.nbytes != meta.nbytes:
                raise UsageError(
                    f"{meta.name}: a region of {arena.nbytes} bytes, the layout needs {meta.nbytes}"
                )
            self._memory = {0: (arena, meta.nbytes)}
        self.meta = meta
        self._waiting: list[Expectation] = []
        self._register()

    def _register(self) -> None:
        """Register all memory, with keys that nobody has yet."""
        self._mrs = []
        for start, (memory, nbytes) in self._memory.items():
            mr, desc = self.engine.reg_mr(memory)
            self._mrs.append(mr)
            if desc.nbytes != nbytes:
                self.close()
                raise UsageError(
                    f"{self.meta.name}: the memory at {start} has {desc.nbytes} bytes, the layout "
                    f"needs {nbytes}"
                )

    @property
    def region(self) -> npt.NDArray[np.uint8]:
        """The one region of all weights; UsageError if each parameter has its own."""
        if self._parameters:
            raise UsageError(f"{self.meta.name}: each parameter has a region of its own")
        arena: npt.NDArray[np.uint8] = self._memory[0][0]
        return arena

    @property
    def serving(self) -> int | None:
        """Version that may be served; None while the weights are mixed, or none are there.

        Two counts make a version: all of its rows are here, and a training rank has said that all
        ranks are through.
        """
        whole = bool(self._waiting) and all(waiting.ok for waiting in self._waiting)
        return self._version if whole else None

    @contextlib.contextmanager
    def lease(self) -> Iterator[int]:
        """Serve from the weights: yields their version, which no update touches before the exit.

        Raises:
            UsageError: no whole version is here, or an update is about to begin.
        """
        version = self.serving
        if version is None or self._updating:
            raise UsageError(f"{self.meta.name}: no whole version is here; try again later")
        self._leases += 1
        self._free.clear()
        try:
            yield version
        finally:
            self._leases -= 1
            if not self._leases:
                self._free.set()

    @property
    def regions(self) -> Regions:
        """The regions of the weights, for the training ranks."""
        return Regions(tuple(self._memory), tuple(mr.desc for mr in self._mrs))

    async def param_meta(self) -> RolloutMeta:
        """Say what it holds."""
        return self.meta

    async def begin(self, attempt: int, version: int, data_imms: int) -> bytes:
        """End what runs, stop serving, and count; return the Regions of its weights."""
        if any(not waiting.finished for waiting in self._waiting):
            await self.abort()  # of an update that the controller has given up
        self._updating = True
        aborts = self._aborts
        try:
            await self._free.wait()  # whoever reads the weights ends with the version it began with
        finally:
            self._updating = False
        if aborts != self._aborts:
            raise UsageError(f"{self.meta.name}: update {attempt} was aborted before it began")
        # From the first byte on the weights are of two versions, and none is served. What was
        # counted before goes first: with it, a new number whose counting cannot begin would be
        # served.
        self._waiting = []
        self._attempt, self._version, self._expected = attempt, version, data_imms
        counts = ((Kind.DATA, data_imms), (Kind.FINISH, 1))
        self._waiting = [
            self.engine.expect_imm_count(make_imm(kind, attempt), count) for kind, count in counts
        ]
        return self.regions.to_bytes()

    async def finished(self, timeout_s: float) -> int:
        """Wait until all is counted; return the version it serves."""
        try:
            async with asyncio.timeout(timeout_s):
                for waiting in self._waiting:
                    await waiting
        except TimeoutError:
            stuck = "; ".join(waiting.describe() for waiting in self._waiting)
            raise WaitTimeout(f"{self.meta.name}: {stuck} after {timeout_s} s") from None
        if self.serving is None:
            raise UsageError(f"{self.meta.name}: no update runs")
        return self.serving

    async def abort(self) -> RolloutState:
        """Give up on the update, unless all of it is here; return what is served then.

        The memory gets new keys, so that a write of a dead rank which is still on its way is
        refused and does not land in the next version.
        """
        self._aborts += 1
        for waiting in self._waiting:
            waiting.cancel()
        for waiting in self._waiting:
            with contextlib.suppress(TepError):
                await waiting
        if self.serving is not None:
            return await self.state()  # all is counted, and every rank has said so
        self._waiting = []
        self.close()
        self._register()
        for kind in (Kind.DATA, Kind.FINISH):
            self.engine.remove_imm(make_imm(kind, self._attempt))
        return await self.state()

    async def state(self) -> RolloutState:
        """Say where it stands."""
        arrived = self._waiting[0].arrived if self._waiting else 0
        return RolloutState(self.serving, self._attempt, arrived, self._expected)

    def weights(self) -> dict[str, tuple[Array, Array | None]]:
        """Views of the weights, and of the block scales of quantised ones, by name; of parameters
        with regions of their own, what the worker was made with.

        Raises:
            UsageError: they are mixed, or none are there.
        """
        if self.serving is None:
            raise UsageError(f"{self.meta.name}: no whole version is here; weights are not served")
        return {shard.name: self._views(shard) for shard in self.meta.shards}

    def _views(self, shard: TargetShard) -> tuple[Array, Array | None]:
        if self._parameters:
            own = self._parameters[shard.name]
            return own if isinstance(own, tuple) else (own, None)
        extents, dtypes = extents_of(shard.parts, shard.dtype), numpy_dtypes(shard.dtype)
        found = [
            self.region[start : start + nbytes].view(dtype).reshape(shape)
            for start, dtype, (shape, nbytes) in zip(shard.offsets, dtypes, extents)
        ]
        return found[0], found[1] if len(found) > 1 else None

    def close(self) -> None:
        """Give the regions back; the engine stays open."""
        for mr in self._mrs:
            if not mr.closed:
                self.engine.deregister(mr)


def _memory_of(
    meta: RolloutMeta, parameters: Mapping[str, Parameter]
) -> dict[int, tuple[Parameter, int]]:
    """Memory and bytes of each parameter, by the offset in the layout at which it begins."""
    odd = sorted({shard.name for shard in meta.shards} ^ set(parameters))
    if odd:
        raise UsageError(f"{meta.name}: layout and memory name different parameters: {odd[:4]}")
    found: dict[int, tuple[Parameter, int]] = {}
    for shard in meta.shards:
        own = parameters[shard.name]
        pair = own if isinstance(own, tuple) else (own,)
        sizes = [nbytes for _, nbytes in extents_of(shard.parts, shard.dtype)]
        if len(pair) != len(sizes):
            raise UsageError(
                f"{meta.name}: {shard.name} is {shard.dtype}, and has {len(pair)} pieces of memory "
                f"where {len(sizes)} are needed (values, and the scales of a quantised parameter)"
            )
        found.update(zip(shard.offsets, zip(pair, sizes)))
    return dict(sorted(found.items()))

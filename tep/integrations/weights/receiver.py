"""A rollout rank: memory for a version beside the model that serves, and when it may be loaded.

The model goes on with its version while the next one arrives. A version is given out only when all
of it is here, by count, and the hub has said that every other rank has it too; and while it is
being read, no update begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tep import FabricError, TransferEngine, UsageError, WaitTimeout
from tep.apps.rl import (
    Box,
    DType,
    RolloutMeta,
    RolloutState,
    RolloutWorker,
    SourceShard,
    box_shape,
    lay_out,
    numpy_dtype,
    scale_dtype,
    scale_shape,
    whole,
)
from tep.integrations.weights.params import Param, wire_form

if TYPE_CHECKING:
    Array = npt.NDArray[Any]

__all__ = ["Want", "Wants", "Weight", "WeightReceiver"]


class Want(NamedTuple):
    """What a rollout rank wants of a parameter.

    Attributes:
        dtype: to convert to, or to quantise to.
        box: of the parameter in the shape in which it travels.
    """

    dtype: DType
    box: Box


Wants = Callable[[Param], Want | None]
"""Says what is wanted of a parameter; None: nothing."""


class Weight(NamedTuple):
    """A parameter that has arrived.

    Attributes:
        param: as the trainer has it.
        dtype: in which it is here; "u8": the bytes of param.dtype.
        values: in the shape of the box that was wanted.
        scales: of a quantised one.
    """

    param: Param
    dtype: DType
    values: Array
    scales: Array | None


def as_sent(param: Param) -> Want:
    """All of a parameter, in its own dtype."""
    dtype, shape = wire_form(param)
    return Want(dtype, whole(shape))


class WeightReceiver:
    """One rollout rank over one engine; a RolloutPort of the hub.

    Args:
        engine: of this rank; the caller closes it.
        name: its own among all rollout ranks.
        wants: what it wants of each parameter; all of each, as it is sent.
    """

    def __init__(self, engine: TransferEngine, name: str, wants: Wants = as_sent) -> None:
        self.name = name
        self._engine = engine
        self._wants = wants
        self._params: tuple[Param, ...] = ()
        self._wanted: dict[str, tuple[Param, Want]] = {}
        self._memory: dict[str, Array | tuple[Array, Array]] = {}
        self._worker: RolloutWorker | None = None
        self._complete: int | None = None
        self._taken = True
        self._failed: tuple[int, str] | None = None
        self._gone = ""
        self._news = asyncio.Condition()
        self.welcomed = asyncio.Event()

    @property
    def why_gone(self) -> str:
        """Why nothing more will come, "" while the hub is there."""
        return self._gone

    # ------------------------------------------------------------------ for its engine

    async def whole(self, version: int | None, timeout_s: float) -> int:
        """Wait for a version; None: for the next one that was not waited for. Return its number.

        Raises:
            TepError: the update failed, or the trainer is gone.
            WaitTimeout: neither came.
        """

        def settled() -> bool:
            return self._is_here(version) or self._why(version) != ""

        try:
            async with asyncio.timeout(timeout_s), self._news:
                await self._news.wait_for(settled)
        except TimeoutError:
            raise WaitTimeout(
                f"{self.name}: version {'(any)' if version is None else version} did not come in "
                f"{timeout_s} s; {await self.state()}"
            ) from None
        if not self._is_here(version):
            why, self._failed = self._why(version), None
            raise FabricError(f"{self.name}: {why}", code="UPDATE_FAILED")
        assert self._complete is not None
        self._taken = True
        return self._complete

    def _is_here(self, version: int | None) -> bool:
        if self._complete is None or self._complete != self._serving():
            return False
        return not self._taken if version is None else self._complete == version

    def _why(self, version: int | None) -> str:
        """Why a version will not come, "" if it may."""
        if self._failed is not None and version in {None, self._failed[0]}:
            return self._failed[1]
        return self._gone

    def _serving(self) -> int | None:
        return None if self._worker is None else self._worker.serving

    @contextmanager
    def read(self, version: int) -> Iterator[list[Weight]]:
        """Give out a version; no update begins before the exit. Scales follow their values.

        Raises:
            UsageError: another version is here, or none.
        """
        if self._complete != version or not self._is_here(version):
            raise UsageError(
                f"{self.name}: version {version} is asked for, {self._complete} is here; a version "
                "that is not whole on all ranks is not given out"
            )
        with self._described().lease():
            yield [self._weight(param) for param, _ in self._wanted.values()]

    def _weight(self, param: Param) -> Weight:
        _, want = self._wanted[param.name]
        own = self._memory[param.name]
        values, scales = own if isinstance(own, tuple) else (own, None)
        return Weight(param, want.dtype, values, scales)

    # ------------------------------------------------------------------ for the hub

    async def welcome(self) -> None:
        """The hub knows this rank."""
        self.welcomed.set()

    async def describe(self, params: tuple[Param, ...]) -> None:
        """Allocate memory for the parameters that are wanted, if they are others than before.

        Raises:
            UsageError: wants raised, wants nothing at all, or what does not fit its parameter.
        """
        if params == self._params and self._worker is not None:
            return
        if self._worker is not None:
            await self._worker.abort()
            self._worker.close()
        self._params, self._memory, self._worker = (), {}, None
        self._wanted = {p.name: (p, want) for p in params if (want := self._want(p))}
        if params and not self._wanted:
            raise UsageError(f"{self.name}: wants says None for all {len(params)} parameters")
        targets = []
        for param, (dtype, box) in self._wanted.values():
            shape = box_shape(box)
            self._check(param, dtype, box)
            values: Array = np.zeros(shape, numpy_dtype(dtype))
            self._memory[param.name] = values
            if dtype.startswith("fp8"):
                scales = np.zeros(scale_shape(shape, dtype), scale_dtype(dtype))
                self._memory[param.name] = values, scales
            if values.size:
                targets.append((param.name, dtype, (SourceShard(param.name, box),)))
        nics = len(self._engine.main_address.domains)
        meta = RolloutMeta(self.name, nics, *lay_out(targets, apart=True))
        memory = {name: self._memory[name] for name, _, _ in targets}
        self._worker, self._params = RolloutWorker(self._engine, meta, memory), params

    def _want(self, param: Param) -> Want | None:
        """Return what the user's function says of a parameter; an error names the parameter."""
        try:
            found = self._wants(param)
            want = None if found is None else msgspec.convert(tuple(found), Want)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            text = f"{self.name}: wants({param}) is no Want, or raised: {why}"
            raise UsageError(text) from error
        return want

    def _check(self, param: Param, dtype: DType, box: Box) -> None:
        sent, shape = wire_form(param)
        inside = len(box) == len(shape) and all(
            0 <= low <= high <= extent for (low, high), extent in zip(box, shape)
        )
        if not inside or (sent == "u8") != (dtype == "u8"):
            raise UsageError(
                f"{self.name}: {param.name} travels as {sent}{list(shape)}; wanted is {dtype} of "
                f"{list(box)}"
            )

    def _described(self) -> RolloutWorker:
        if self._worker is None:
            raise UsageError(f"{self.name}: the hub has not described the weights yet")
        return self._worker

    async def param_meta(self) -> RolloutMeta:
        return await self._described().param_meta()

    async def begin(self, attempt: int, version: int, data_imms: int) -> bytes:
        regions = await self._described().begin(attempt, version, data_imms)
        self._complete = self._failed = None
        return regions

    async def finished(self, timeout_s: float) -> int:
        return await self._described().finished(timeout_s)

    async def abort(self) -> RolloutState:
        return await self._described().abort()

    async def state(self) -> RolloutState:
        if self._worker is None:
            return RolloutState(None, 0, 0, 0)
        return await self._worker.state()

    async def complete(self, version: int) -> None:
        """Every rank has all of a version: it may be loaded."""
        self._complete, self._taken = version, False
        await self._tell()

    async def failed(self, version: int, why: str) -> None:
        """The update of a version has failed, here or elsewhere: it is not to be waited for."""
        self._failed = version, why
        await self._tell()

    async def gone(self, why: str) -> None:
        """The trainer hung up: nothing more will come."""
        self._gone = why
        await self._tell()

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    def close(self) -> None:
        """Give the memory back; the engine stays open."""
        if self._worker is not None:
            self._worker.close()

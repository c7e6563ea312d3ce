"""The two kinds of ranks of a weight update: what a training rank sends, a rollout rank gives out.

Both are the workers of `tep.apps.rl`, with weights that the framework names as it goes along.
bfloat16, float16 and float32 travel as what they are, so that they can be converted and quantised;
any other dtype (integers, fp8 that is quantised already) travels as bytes. torch is not imported.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tep import FabricError, TepError, TransferEngine, UsageError, WaitTimeout
from tep.apps.rl import (
    Box,
    Compute,
    DType,
    MeshGroup,
    RolloutMeta,
    RolloutWorker,
    SourceShard,
    TrainingWorker,
    TrainMeta,
    as_bytes,
    box_shape,
    box_size,
    extents_of,
    lay_out,
    numpy_dtype,
    numpy_dtypes,
    shard_of,
    whole,
)

if TYPE_CHECKING:
    Array = npt.NDArray[Any]

__all__ = [
    "Held", "Param", "Want", "Wants", "Weight", "WeightReceiver", "WeightSender", "as_sent",
    "named_tensors", "piece_of", "wire_form",
]  # fmt: skip


_FLOATS: Final[dict[str, DType]] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class Param(NamedTuple):
    """One parameter by its name in the checkpoint; whole, and not sharded.

    The dtype is the framework's name, e.g. "bfloat16"; `item` are the bytes of an element.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    item: int


def wire_form(param: Param) -> tuple[DType, tuple[int, ...]]:
    """The dtype and the shape in which a parameter travels."""
    dtype = _FLOATS.get(param.dtype, "u8")
    if dtype == "u8":
        return dtype, (math.prod(param.shape) * param.item,)
    return dtype, param.shape or (1,)


def piece_of(name: str, tensor: Any, rank: int, world: int) -> tuple[Param, Box, Array]:
    """Cut the share that one of `world` training ranks sends: its box, and a view of the values.

    Of a DTensor that is its shard. Any other tensor is taken for a whole one, which every rank has:
    each sends an equal share of it. The box is in the shape of wire_form().

    Raises:
        UsageError: neither torch's nor numpy's, or a DTensor whose box cannot travel.
    """
    shape, box, local = shard_of(tensor)
    raw = as_bytes(local, name)
    text = str(tensor.dtype).removeprefix("torch.")
    item = raw.nbytes // max(1, math.prod(local.shape)) or np.dtype(np.uint8).itemsize
    param = Param(name, text, shape, item)
    dtype, wire = wire_form(param)
    if dtype == "u8":
        inner = math.prod(shape[1:]) * item
        if box[1:] != whole(shape)[1:]:
            raise UsageError(f"{name}: a DTensor of {text} that is not cut along axis 0 alone")
        box = tuple((low * inner, high * inner) for low, high in box[:1]) or whole(wire)
    elif not shape:
        box = whole(wire)
    values = raw.view(numpy_dtype(dtype)).reshape(box_shape(box) if box_size(box) else (0,))
    if local is tensor and box_size(box):
        low, high = (wire[0] * k // world for k in (rank, rank + 1))
        box, values = ((low, high), *box[1:]), values[low:high]
    return param, box, values


@dataclass(frozen=True, slots=True)
class Held:
    """One training rank's part of a version: all parameters that it was given, in order.

    The boxes are what it sends of each, in the shape in which that travels, without empty ones.
    """

    nics: int
    params: tuple[Param, ...]
    boxes: dict[str, tuple[Box, ...]]

    def meta(self, rank: int, groups: tuple[MeshGroup, ...]) -> TrainMeta:
        """The same as the controller has it."""
        shards = (SourceShard(name, box) for name, mine in self.boxes.items() for box in mine)
        dtypes = {param.name: wire_form(param)[0] for param in self.params}
        return TrainMeta(rank, self.nics, tuple(shards), dtypes, groups)


class WeightSender(TrainingWorker):
    """One training rank, whose weights change in shape; a port of the hub.

    The caller closes the engine; copies and quantisation run in `compute`.
    """

    def __init__(
        self, engine: TransferEngine, rank: int, world: int, *, compute: Compute | None = None
    ) -> None:
        if not 0 <= rank < world:
            raise UsageError(f"training rank {rank} of {world}")
        self.world = world
        self._shards: dict[tuple[str, Box], Array] = {}
        self._held = Held(len(engine.main_address.domains), (), {})
        super().__init__(engine, self._held.meta(rank, ()), self._shards, compute=compute)
        self._version: int | None = None
        self._ready = asyncio.Event()
        self._sent: asyncio.Future[str] | None = None
        self._gone = ""

    def load(self, weights: Iterable[tuple[str, Any]]) -> None:
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
        self._shards.update(shards)
        self._held = Held(self._held.nics, tuple(params), boxes)

    async def send(self, version: int, timeout_s: float) -> None:
        """Offer what was loaded as a version, and wait until the hub has sent it."""
        self._check_hub()
        self._sent = asyncio.get_running_loop().create_future()
        self._version = version
        self._ready.set()
        try:
            why = await asyncio.wait_for(self._sent, timeout_s)
        except TimeoutError:
            text = f"rank {self.rank}: version {version} was not asked for in {timeout_s} s"
            raise FabricError(text, code="TIMEOUT") from None
        finally:
            self._ready.clear()
            self._version = None
        self._check_hub()  # it may have hung up meanwhile
        if why:
            raise TepError(why)

    def _check_hub(self) -> None:
        if self._gone:
            raise FabricError(f"rank {self.rank}: {self._gone}", code="NO_HUB")

    async def held(self, version: int) -> Held:
        """Wait until a version is loaded; return what there is of it."""
        await self._ready.wait()
        if self._version != version:
            raise UsageError(
                f"rank {self.rank} sends version {self._version}, rank 0 version {version}"
            )
        return self._held

    async def ended(self, version: int, why: str) -> None:
        """The version has been sent, or could not be."""
        del version  # the hub may have heard of another one than this rank sends
        self._settle(why)

    def _settle(self, why: str) -> None:
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(why)

    async def gone(self, why: str) -> None:
        self._gone = why
        self._settle(why)


class Want(NamedTuple):
    """A rollout rank's wish: a box of a parameter in the shape in which it travels, in a dtype."""

    dtype: DType
    box: Box


Wants = Callable[[Param], Want | None]
"""Says what is wanted of a parameter; None: nothing."""


class Weight(NamedTuple):
    """A parameter of the trainer's that has arrived, by the box and the dtype that were wanted.

    The dtype "u8" stands for the bytes of param.dtype; a quantised one has scales.
    """

    param: Param
    dtype: DType
    box: Box
    values: Array
    scales: Array | None = None


def as_sent(param: Param) -> Want:
    """All of a parameter, in its own dtype."""
    dtype, shape = wire_form(param)
    return Want(dtype, whole(shape))


class WeightReceiver(RolloutWorker):
    """One rollout rank over one engine, with memory for a version beside the model that serves.

    The model goes on with its version while the next one arrives. A version is given out only when
    all of it is here, by count, and the hub has said that every other rank has it too; and while it
    is being read, no update begins.

    Args:
        engine: of this rank; the caller closes it.
        name: its own among all rollout ranks.

    Attributes:
        why_gone: why nothing more will come, "" while the hub is there.
        welcomed: set when the hub knows this rank.
    """

    def __init__(self, engine: TransferEngine, name: str, wants: Wants = as_sent) -> None:
        self._nics = len(engine.main_address.domains)
        super().__init__(engine, RolloutMeta(name, self._nics, (), 0), {})
        self.name = name
        self._wants = wants
        self._params: tuple[Param, ...] = ()
        self._weights: list[Weight] = []
        self._complete: int | None = None
        self._taken = True
        self._failed: tuple[int, str] | None = None
        self.why_gone = ""
        self._news = asyncio.Condition()
        self.welcomed = asyncio.Event()

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
        if self._complete is None or self._complete != self.serving:
            return False
        return not self._taken if version is None else self._complete == version

    def _why(self, version: int | None) -> str:
        """Why a version will not come, "" if it may."""
        if self._failed is not None and version in {None, self._failed[0]}:
            return self._failed[1]
        return self.why_gone

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
        with self.lease():
            yield list(self._weights)

    async def welcome(self) -> None:
        self.welcomed.set()

    async def describe(self, params: tuple[Param, ...]) -> RolloutMeta:
        """Allocate memory for the parameters that are wanted, if they are others than before."""
        if params == self._params:
            return self.meta
        await self.abort()
        self.close()
        self._params, self._weights = (), []
        targets, memory = [], {}
        for param in params:
            want = self._want(param)
            if want is None:
                continue
            self._check(param, *want)
            parts = (SourceShard(param.name, want.box),)
            extents, dtypes = extents_of(parts, want.dtype), numpy_dtypes(want.dtype)
            arrays = tuple(np.zeros(shape, kind) for (shape, _), kind in zip(extents, dtypes))
            self._weights.append(Weight(param, *want, *arrays))
            if arrays[0].size:
                targets.append((param.name, want.dtype, parts))
                memory[param.name] = arrays
        if params and not self._weights:
            raise UsageError(f"{self.name}: wants says None for all {len(params)} parameters")
        self.hold(RolloutMeta(self.name, self._nics, *lay_out(targets, apart=True)), memory)
        self._params = params
        return self.meta

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

    async def begin(self, attempt: int, version: int, data_imms: int) -> bytes:
        regions = await super().begin(attempt, version, data_imms)
        self._complete = self._failed = None
        return regions

    async def ended(self, version: int, why: str) -> None:
        """Every rank has all of a version, so that it may be loaded; or it will not come."""
        if why:
            self._failed = version, why
        else:
            self._complete, self._taken = version, False
        await self._tell()

    async def gone(self, why: str) -> None:
        self.why_gone = why
        await self._tell()

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()


_SCALES: Final[dict[DType, tuple[str, str]]] = {
    "fp8": ("_scale_inv", "float32"),
    "fp8_channel": ("_scale", "float32"),
    "fp8_ue8m0": ("_scale_inv", "float8_e8m0fnu"),
}
"""The suffix of a quantised weight's name, and the dtype of the scales. Source: names in
DeepSeek-V3's checkpoint (blocks) and of compressed-tensors (channels), quoted."""


def named_tensors(weights: Iterable[Weight], device: Any = "cpu") -> Iterator[tuple[str, Any]]:
    """Name and torch tensor of each weight; its scales follow it.

    On the CPU a tensor is a view of memory that the next version is written to: use it before the
    version is given back, or copy it.
    """
    for param, dtype, _, values, scales in weights:
        shape = param.shape if dtype == "u8" or not param.shape else values.shape
        kind = param.dtype if dtype == "u8" else values.dtype.name
        yield param.name, _as_tensor(values, kind, shape).to(device)
        if scales is not None:
            suffix, kind = _SCALES[dtype]
            yield param.name + suffix, _as_tensor(scales, kind, scales.shape).to(device)


def _as_tensor(raw: Array, dtype: str, shape: tuple[int, ...]) -> Any:
    """A torch tensor over an array's memory; the program has imported torch."""
    torch: Any = sys.modules["torch"]
    return torch.from_numpy(raw.reshape(-1).view(np.uint8)).view(getattr(torch, dtype)).view(shape)

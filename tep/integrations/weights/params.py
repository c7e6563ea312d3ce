"""Parameters as a framework names them, and the arrays that travel for them. torch is not imported.

bfloat16, float16 and float32 travel as what they are, so that they can be converted and quantised;
any other dtype (integers, fp8 that is quantised already) travels as bytes.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tep import UsageError
from tep.apps.rl import Box, DType, box_shape, box_size, numpy_dtype, shard_of, whole

if TYPE_CHECKING:
    Array = npt.NDArray[Any]

__all__ = ["Param", "as_tensor", "piece_of", "wire_form"]

_FLOATS: Final[dict[str, DType]] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class Param(NamedTuple):
    """One parameter.

    Attributes:
        name: in the checkpoint's words.
        dtype: the framework's name, e.g. "bfloat16".
        shape: whole, not sharded.
        item: bytes of an element.
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
    raw = _bytes_of(local, name)
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


def _bytes_of(values: Any, name: str) -> npt.NDArray[np.uint8]:
    """All bytes in C order: of an array or a tensor on the host where they lie, else a copy."""
    if isinstance(values, np.ndarray):
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    if torch is None or not isinstance(values, torch.Tensor):
        raise UsageError(f"{name}: a weight is a numpy array or a torch tensor, not {type(values)}")
    flat = values.detach().contiguous().cpu().reshape(-1)
    found: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return found


def as_tensor(raw: Array, dtype: str, shape: tuple[int, ...]) -> Any:
    """A torch tensor over an array's memory; the program has imported torch."""
    torch: Any = sys.modules["torch"]
    return torch.from_numpy(raw.reshape(-1).view(np.uint8)).view(getattr(torch, dtype)).view(shape)

"""Weights in safetensors files: read slices without loading the file, write small ones.

The format: eight bytes of length, a JSON header {name: {dtype, shape, data_offsets}}, raw values.
Nothing of it is executed; every number is checked against the file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tep import UsageError
from tep.apps.rl.metadata import Box, DType, Tensor, box_shape, nbytes_of
from tep.apps.rl.models import Model
from tep.apps.rl.quantise import numpy_dtype

if TYPE_CHECKING:
    Array = npt.NDArray[Any]

__all__ = ["Checkpoint", "write_safetensors"]

_DTYPES: Final[dict[str, DType]] = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F8_E4M3": "fp8"}
_DTYPE_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_HEADER_MAX: Final = 100 << 20
"""Longest header that readers of the format accept. Source: safetensors' own limit, quoted."""


class Checkpoint:
    """One safetensors file, mapped and read slice by slice.

    Args:
        path: of the file.

    Raises:
        UsageError: it is no such file, truncated, or its header contradicts it.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
            if not 2 <= length <= min(size - 8, _HEADER_MAX):
                raise UsageError(f"{path}: {size} bytes are no safetensors file")
            try:
                header = json.loads(file.read(length))
            except ValueError as error:
                raise UsageError(f"{path}: its header is no JSON: {error}") from error
        self._data = np.memmap(self.path, np.uint8, "r", 8 + length)
        self._entries: dict[str, tuple[DType, tuple[int, ...], int]] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                self._entries[name] = self._entry(name, entry)

    def _entry(self, name: str, entry: Mapping[str, Any]) -> tuple[DType, tuple[int, ...], int]:
        try:
            dtype, shape = _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
            start, stop = map(int, entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{self.path}: {name}: cannot read {entry!r}: {error!r}") from error
        if min((*shape, start)) < 0 or stop > len(self._data):
            raise UsageError(f"{self.path}: {name}: {entry!r} is outside the file")
        if stop - start != nbytes_of(shape, dtype):
            raise UsageError(f"{self.path}: {name}: {entry!r}: bytes and shape do not fit")
        return dtype, shape, start

    def names(self) -> tuple[str, ...]:
        """All tensors in it."""
        return tuple(self._entries)

    def check(self, model: Model) -> None:
        """See that the model's description knows every tensor of the file.

        Raises:
            UsageError: it does not; what it does not know would never be updated, in silence.
        """
        known = {name for tensor in model.tensors for name in _names(tensor)}
        # Constants that old checkpoints carry.
        found = (name for name in self._entries if not name.endswith(".rotary_emb.inv_freq"))
        unknown = [name for name in found if name not in known]
        if unknown:
            raise UsageError(
                f"{self.path}: {len(unknown)} tensors are not in the description of "
                f"{model.name!r} and would not be updated: {', '.join(unknown[:3])}"
            )

    def whole(self, name: str) -> Array:
        """A view of one tensor as the file has it.

        Raises:
            UsageError: there is none of this name.
        """
        found = self._entries.get(name)
        if found is None:
            raise UsageError(f"{self.path}: no tensor {name!r} among its {len(self._entries)}")
        dtype, shape, start = found
        raw = self._data[start : start + nbytes_of(shape, dtype)]
        return raw.view(numpy_dtype(dtype)).reshape(shape)

    def read(self, tensor: Tensor, box: Box) -> Array:
        """Copy a slice of a tensor; the experts of a stacked one are put together.

        Raises:
            UsageError: it is not there, or of another shape or dtype.
        """
        found = np.empty(box_shape(box), numpy_dtype(tensor.dtype))
        inner = tuple(slice(*pair) for pair in box)
        for name, into, shape, cut in _files(tensor, box, inner):
            values = self.whole(name)
            if values.shape != shape or values.dtype != found.dtype:
                raise UsageError(
                    f"{self.path}: {name} is {values.dtype}{list(values.shape)}, the model wants "
                    f"{tensor.dtype}{list(shape)}"
                )
            found[into] = values[cut]
        return found


def _names(tensor: Tensor) -> Iterator[str]:
    """Names in the file."""
    if "*" not in tensor.name:
        yield tensor.name
        return
    for expert in range(tensor.shape[0]):
        yield tensor.name.replace("*", str(expert))


def _files(
    tensor: Tensor, box: Box, inner: tuple[slice, ...]
) -> Iterator[tuple[str, Any, tuple[int, ...], tuple[slice, ...]]]:
    """(name in the file, where it goes, its whole shape, what of it) for each entry read."""
    if "*" not in tensor.name:
        yield tensor.name, ..., tensor.shape, inner
        return
    start, stop = box[0]
    for expert in range(start, stop):
        name = tensor.name.replace("*", str(expert))
        yield name, expert - start, tensor.shape[1:], inner[1:]


def write_safetensors(path: str | PathLike[str], tensors: Iterable[tuple[Tensor, Array]]) -> int:
    """Write tensors, stacked experts one by one; return the bytes of the file."""
    header: dict[str, object] = {}
    arrays: list[Array] = []
    at = 0
    for tensor, values in tensors:
        stacked = "*" in tensor.name
        for k, one in enumerate(values if stacked else [values]):
            name = tensor.name.replace("*", str(k))
            shape = list(one.shape)
            nbytes = nbytes_of(one.shape, tensor.dtype)
            span = [at, at + nbytes]
            header[name] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": shape,
                "data_offsets": span,
            }
            at += nbytes
            arrays.append(np.ascontiguousarray(one))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with Path(path).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for one in arrays:
            file.write(one.view(np.uint8).reshape(-1).data)
    return 8 + len(text) + at

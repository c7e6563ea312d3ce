"""Weights in safetensors files: read slices without loading the file.

`expected_region` says what a rollout worker must hold, straight from the checkpoint.

The format: eight bytes of length, a JSON header {name: {dtype, shape, data_offsets}}, raw values.
Nothing of it is executed; every number is checked against the file. The package safetensors (0.8.0)
reads no fp8 as numpy arrays, so the format is read here and compared with the package in the tests.
"""

from __future__ import annotations

import hashlib
import json
import struct
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tep import UsageError
from tep.apps.rl.compute import numpy_dtype, quantise
from tep.apps.rl.metadata import (
    SCALINGS,
    Box,
    DType,
    RolloutMeta,
    Tensor,
    box_shape,
    joined_axis,
    nbytes_of,
)
from tep.apps.rl.models import Model

if TYPE_CHECKING:
    Array = npt.NDArray[Any]

__all__ = ["Checkpoint", "expected_digest", "expected_region"]


_DTYPES: Final[dict[str, DType]] = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F8_E4M3": "fp8"}
_HEADER_MAX: Final = 100 << 20
"""Longest header that readers of the format accept. Source: safetensors' own limit, quoted."""
_INDEX: Final = "model.safetensors.index.json"
"""Source: the name that transformers writes and reads; its key weight_map too."""


class _File:
    """One file, mapped.

    Raises:
        UsageError: it is no such file, truncated, or its header contradicts it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
            if not 2 <= length <= min(size - 8, _HEADER_MAX):
                raise UsageError(f"{path}: {size} bytes are no safetensors file")
            header = _read_json(path, file.read(length), "its header")
        self._data = np.memmap(self.path, np.uint8, "r", 8 + length)
        self.entries: dict[str, tuple[DType, tuple[int, ...], int]] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                self.entries[name] = self._entry(name, entry)

    def _entry(self, name: str, entry: Any) -> tuple[DType, tuple[int, ...], int]:
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

    def whole(self, name: str) -> Array:
        """A view of one tensor."""
        dtype, shape, start = self.entries[name]
        raw = self._data[start : start + nbytes_of(shape, dtype)]
        return raw.view(numpy_dtype(dtype)).reshape(shape)


class Checkpoint:
    """A model's safetensors files, mapped and read slice by slice.

    Args:
        path: of the file, of the index of several (model.safetensors.index.json), or of the folder
            that has either.

    Raises:
        UsageError: a file is no such file or truncated, its header contradicts it, or the index
            does not say what the files hold.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = _found(Path(path))
        self._files: dict[str, _File] = {}
        if self.path.suffix != ".json":
            file = _File(self.path)
            self._files = dict.fromkeys(file.entries, file)
            return
        index = _read_json(self.path, self.path.read_bytes(), "the index").get("weight_map")
        names = index if isinstance(index, dict) else {}
        if not names or not all(_is_name(name) for name in names.values()):
            raise UsageError(f"{self.path}: no weight_map from tensors to names of files beside it")
        for name in dict.fromkeys(names.values()):
            where = self.path.with_name(name)
            if not where.is_file():
                raise UsageError(f"{self.path}: {name} is not beside it")
            file = _File(where)
            mine = {tensor for tensor, of in names.items() if of == name}
            if mine != set(file.entries):
                odd = sorted(mine ^ set(file.entries))
                raise UsageError(f"{self.path}: index and {name} differ in what it has: {odd[:3]}")
            self._files |= dict.fromkeys(file.entries, file)

    def names(self) -> tuple[str, ...]:
        """All tensors in it."""
        return tuple(self._files)

    def check(self, model: Model) -> None:
        """See that the model's description knows every tensor of the file.

        Raises:
            UsageError: it does not; what it does not know would never be updated, in silence.
        """
        known = {name for tensor in model.tensors for name in _names(tensor)}
        # Constants that old checkpoints carry.
        found = (name for name in self._files if not name.endswith(".rotary_emb.inv_freq"))
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
        file = self._files.get(name)
        if file is None:
            raise UsageError(f"{self.path}: no tensor {name!r} among its {len(self._files)}")
        return file.whole(name)

    def read(self, tensor: Tensor, box: Box) -> Array:
        """Copy a slice of a tensor; the experts of a stacked one are put together.

        Raises:
            UsageError: it is not there, or of another shape or dtype.
        """
        found = np.empty(box_shape(box), numpy_dtype(tensor.dtype))
        stacked = "*" in tensor.name
        names = _names(tensor)[slice(*box[0])] if stacked else [tensor.name]
        shape, inner = (tensor.shape[1:], box[1:]) if stacked else (tensor.shape, box)
        for name, into in zip(names, found if stacked else [found]):
            values = self.whole(name)
            if values.shape != shape or values.dtype != found.dtype:
                raise UsageError(
                    f"{self.path}: {name} is {values.dtype}{list(values.shape)}, the model wants "
                    f"{tensor.dtype}{list(shape)}"
                )
            into[...] = values[tuple(slice(*pair) for pair in inner)]
        return found


def _found(path: Path) -> Path:
    """The file to begin with: in a folder, the index or the only file.

    Raises:
        UsageError: a folder has neither.
    """
    if not path.is_dir():
        return path
    if (path / _INDEX).is_file():
        return path / _INDEX
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        raise UsageError(f"{path}: no {_INDEX}, and {len(files)} files *.safetensors; 1 is wanted")
    return files[0]


def _is_name(name: object) -> bool:
    """Whether it names a file, and no path out of the folder."""
    return isinstance(name, str) and name not in {"", ".", ".."} and Path(name).name == name


def _read_json(path: Path, data: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: {what} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path}: {what} is no JSON object")
    return found


def _names(tensor: Tensor) -> list[str]:
    """Names in the file: of a stacked tensor, one for each expert."""
    if "*" not in tensor.name:
        return [tensor.name]
    return [tensor.name.replace("*", str(expert)) for expert in range(tensor.shape[0])]


def expected_region(
    model: Model, checkpoint: Checkpoint, meta: RolloutMeta
) -> npt.NDArray[np.uint8]:
    """Read, join and quantise a worker's share of a checkpoint; gaps are zero."""
    tensors = {tensor.name: tensor for tensor in model.tensors}
    region = np.zeros(meta.nbytes, np.uint8)
    for shard in meta.shards:
        parts = [checkpoint.read(tensors[part.name], part.box) for part in shard.parts]
        axis = joined_axis(parts[0].ndim)
        if shard.dtype in SCALINGS:
            made = zip(*(quantise(part, shard.dtype) for part in parts))
            arrays = [np.concatenate(mine, axis) for mine in made]
        else:
            arrays = [np.concatenate(parts, axis).astype(numpy_dtype(shard.dtype))]
        for offset, array in zip(shard.offsets, arrays):
            region[offset : offset + array.nbytes] = array.view(np.uint8).reshape(-1)
    return region


def expected_digest(model: Model, checkpoint: Checkpoint, meta: RolloutMeta) -> str:
    """SHA-256 of expected_region()."""
    return hashlib.sha256(expected_region(model, checkpoint, meta).data).hexdigest()

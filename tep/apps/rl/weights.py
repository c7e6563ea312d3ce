"""Weights in safetensors files, one or several with an index: read slices without loading the file.

`expected_region` says what a rollout worker must hold, straight from the checkpoint.
"""

from __future__ import annotations

import hashlib
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
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
)
from tep.apps.rl.models import Model
from tep.base.distribution import need

if TYPE_CHECKING:
    Array = npt.NDArray[Any]

__all__ = ["Checkpoint", "expected_digest", "expected_region"]


_DTYPES: Final[dict[str, DType]] = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
_INDEX: Final = "model.safetensors.index.json"
"""Source: the name that transformers writes and reads; its key weight_map too."""


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
        self._files: dict[str, Any] = {}
        if self.path.suffix != ".json":
            file = _open(self.path)
            self._files = dict.fromkeys(file.keys(), file)
            return
        names = _weight_map(self.path)
        if not names or not all(_is_name(name) for name in names.values()):
            raise UsageError(f"{self.path}: no weight_map from tensors to names of files beside it")
        for name in dict.fromkeys(names.values()):
            where = self.path.with_name(name)
            if not where.is_file():
                raise UsageError(f"{self.path}: {name} is not beside it")
            file = _open(where)
            mine = {tensor for tensor, of in names.items() if of == name}
            if odd := sorted(mine ^ set(file.keys())):
                raise UsageError(f"{self.path}: index and {name} differ in what it has: {odd[:3]}")
            self._files |= dict.fromkeys(mine, file)

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
            file = self._files.get(name)
            if file is None:
                raise UsageError(f"{self.path}: no tensor {name!r} among its {len(self._files)}")
            values = file.get_slice(name)
            dtype, extents = values.get_dtype(), values.get_shape()
            if (_DTYPES.get(dtype), extents) != (tensor.dtype, list(shape)):
                raise UsageError(
                    f"{self.path}: {name} is {dtype}{extents}, the model wants "
                    f"{tensor.dtype}{list(shape)}"
                )
            into[...] = values[tuple(slice(*pair) for pair in inner)]
        return found


def _open(path: Path) -> Any:  # a file of the package's
    """Open a file, mapped.

    Raises:
        UsageError: it is no such file, truncated, or its header contradicts it.
    """
    package = need("safetensors", "rl", "a checkpoint")
    try:
        return package.safe_open(path, "numpy")
    except (OSError, package.SafetensorError) as error:
        raise UsageError(f"{path}: no safetensors file: {error}") from error


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


def _weight_map(path: Path) -> dict[str, Any]:
    """Return which file has each tensor, as the index says; {} if it does not."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]).get("weight_map")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: no index of safetensors files: {error}") from error
    return found if isinstance(found, dict) else {}


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

"""A torch of a few lines, for machines that have none: what tep asks of tensors. Not a test."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

__all__ = ["TORCHES", "get_torch"]

TORCHES = ["stand-in", "torch"]

_NUMPY = {"uint8": np.uint8, "int16": np.int16, "float32": np.float32, "bfloat16": np.uint16}


class Tensor:
    """A numpy array behind torch's names; bfloat16 are bits that numpy() refuses to give, as there.

    As there, too, one that requires a gradient has to be detached first.
    """

    def __init__(self, array, dtype, requires_grad=False):
        self.array = array
        self.dtype = dtype
        self.requires_grad = requires_grad
        self.ndim, self.shape = array.ndim, array.shape

    def detach(self):
        return Tensor(self.array, self.dtype)

    def cpu(self):
        return self

    def contiguous(self):
        return Tensor(np.ascontiguousarray(self.array), self.dtype, self.requires_grad)

    def reshape(self, *shape):
        return Tensor(self.array.reshape(*shape), self.dtype, self.requires_grad)

    def view(self, dtype):
        return Tensor(self.array.view(_NUMPY[dtype]), dtype, self.requires_grad)

    def __getitem__(self, index):
        return Tensor(self.array[index], self.dtype, self.requires_grad)

    def numpy(self):
        if self.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        if self.dtype == "bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.array

    def element_size(self):
        return self.array.itemsize

    def data_ptr(self):
        return self.array.ctypes.data


Tensor.__module__ = "torch"


def _tensor(values, dtype, requires_grad=False):
    array = np.array(values, np.float32)
    if dtype == "bfloat16":  # cut off, which is exact for the small integers of a test
        array = (array.view(np.uint32) >> 16).astype(np.uint16)
    return Tensor(array, dtype, requires_grad)


_STAND_IN = SimpleNamespace(
    Tensor=Tensor,
    tensor=_tensor,
    from_numpy=lambda array: Tensor(array, str(array.dtype)),
    **{dtype: dtype for dtype in _NUMPY},
)


def get_torch(kind, monkeypatch):
    """The stand-in, put in torch's place, or torch itself; skip where it is not installed."""
    if kind == "torch":
        return pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "torch", _STAND_IN)
    return _STAND_IN

"""Views by numpy's rules: of bytes (`mr[a:b]`), and of an array's first axis (`mr.axis0[a:b]`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from tep.base.checks import check_int, shown, unpicklable
from tep.base.errors import BadRequest

__all__ = ["Axis0", "check_slice"]

V = TypeVar("V")


def check_slice(what: str, part: object, length: int, of: str = "bytes") -> tuple[int, int]:
    """Return (start, stop) of a part of `length` things, by numpy's rules: clipped, -1 is the last.

    Raises:
        BadRequest: not a slice of integers, or one with a step.
    """
    if not isinstance(part, slice):
        hint = "; axis0[k] is one entry of the array's first axis" if of == "bytes" else ""
        raise BadRequest(f"{what}[{shown(part)}]: a view is a range of {of}, e.g. [0:4096]{hint}")
    if part.step not in {None, 1}:
        raise BadRequest(
            f"{what}[{part.start}:{part.stop}:{part.step}]: a view has no step; "
            "tep.Pages(indices, stride=...) selects pages"
        )
    try:
        start, stop, _ = part.indices(length)
    except TypeError as error:
        raise BadRequest(f"{what}[{part.start}:{part.stop}]: {error}") from None
    return start, max(start, stop)


class Axis0(Generic[V]):
    """A region or descriptor by the first axis of the array that was registered.

    `axis0[a:b]` is a view of these entries, and its own `axis0` counts the same entries;
    `axis0[k]` is a view of one entry, and counts bytes. len() is the length of the axis.

    Args:
        whole: the region or descriptor.
        name: its name in errors.
        nbytes: its length.
        stride: bytes of one entry.
        view: makes a view of bytes start..stop with a stride.
    """

    __slots__ = ("_length", "_name", "_stride", "_view", "_whole")

    def __init__(
        self, whole: V, name: str, nbytes: int, stride: int, view: Callable[[int, int, int], V]
    ) -> None:
        self._whole = whole
        self._name = f"{name}.axis0"
        self._length = nbytes // stride
        self._stride = stride
        self._view = view

    __reduce__ = unpicklable("send what it selects of a descriptor, `desc.axis0[a:b].to_bytes()`")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, which: int | slice) -> V:
        """Return a view of one entry, or of a slice of them.

        Raises:
            IndexError: there is no such entry.
            BadRequest: neither an integer nor a slice of integers without a step.
        """
        stride, length = self._stride, self._length
        if isinstance(which, slice):
            start, stop = check_slice(self._name, which, length, "entries")
            return self._view(start * stride, stop * stride, stride)
        k = check_int(f"{self._name}: index", which)
        if not -length <= k < length:
            raise IndexError(f"{self._name}[{k}]: there are {length} entries of {stride} bytes")
        k %= length
        return self._view(k * stride, (k + 1) * stride, 1)

    def __iter__(self) -> Iterator[V]:
        return (self[k] for k in range(len(self)))

    def __repr__(self) -> str:
        return f"Axis0({len(self)} entries of {self._stride} bytes of {self._whole!r})"

"""The memory layout of vLLM's KV tensors, in the terms of KvBlocks. Shapes only, no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tep import UsageError

__all__ = ["axes_of", "views_of"]


def views_of(
    array: Any, *, nblocks: int, heads: int, tokens: int, what: str
) -> list[tuple[str, Any, str]]:
    """List the parts of one layer's tensor: (suffix of the name, view, axes).

    K and V are one part if a dimension of the block holds both, and two if they lie apart.

    Args:
        array: a layer's tensor, e.g. [2, nblocks, tokens, heads, elements].
        nblocks: number of blocks of this rank's cache.
        heads: number of heads in this rank's cache.
        tokens: tokens of a block.
        what: the tensor's name in errors.

    Raises:
        UsageError: a layout that is not known.
    """
    shape = tuple(int(n) for n in array.shape)
    if len(shape) >= 3 and shape[0] == 2 and shape[1] == nblocks:
        return [
            (f".{k}", array[k], axes_of(shape[1:], nblocks, heads, tokens, what)) for k in (0, 1)
        ]
    if len(shape) == 5 and shape[0] == nblocks and shape[1] == 2:
        rest = (shape[0], *shape[2:])
        return [(f".{k}", array[:, k], axes_of(rest, nblocks, heads, tokens, what)) for k in (0, 1)]
    return [("", array, axes_of(shape, nblocks, heads, tokens, what))]


def axes_of(shape: Sequence[int], nblocks: int, heads: int, tokens: int, what: str) -> str:
    """Return the axes of KvBlocks.add for [blocks, (heads, tokens in either order,) elements]."""
    inner = tuple(shape[1:-1])
    if len(shape) >= 2 and shape[0] == nblocks:
        if not inner:
            return "bd"
        if inner == (tokens,) and heads == 1:
            return "btd"
        if inner == (heads, tokens):
            return "bhtd"
        if inner == (tokens, heads):
            return "bthd"
    raise UsageError(
        f"{what}: a KV tensor of shape {tuple(shape)}, with {nblocks} blocks of {tokens} tokens, "
        f"{heads} heads; known are [2,] blocks, [2,] heads and tokens in either order, elements"
    )

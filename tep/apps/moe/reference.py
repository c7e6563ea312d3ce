"""The dense reference: the same layer on one rank, in loops; what the distributed one must equal.

It knows nothing of copies, blocks and places. Bytes are compared, not numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tep.apps.moe.config import Format
from tep.apps.moe.numerics import F32, Bytes, as_rows, from_f32, to_f32

__all__ = ["Expert", "dense_layer", "dense_layer_by_node"]

Expert = Callable[[int, Any, F32 | None], Any]
"""(expert, x[n, hidden], scales[n, s] or None) -> results[n, hidden] of the combine format."""


def dense_layer(
    x: Any,
    x_scale: F32 | None,
    indices: npt.NDArray[np.integer],
    weights: F32,
    expert: Expert,
    *,
    hidden: int,
    combine_format: Format,
    alive: Callable[[int], bool] = lambda _: True,
) -> Bytes:
    """Send each token through its experts, one by one, and sum in the order of its choices.

    Args:
        x: [n, hidden], as of AllToAll.dispatch; so are the next three.
        x_scale: f32[n, num_scales] or None.
        indices: int[n, topk].
        weights: f32[n, topk].
        expert: what an expert does; row by row, so that grouping cannot change a result.
        hidden: elements of a result.
        combine_format: of a result.
        alive: whether an expert answers; the choices of others add nothing.

    Returns:
        u8[n, hidden * bytes of the format].
    """
    total = np.zeros((len(x), hidden), np.float32)
    for token in range(len(x)):
        scale = None if x_scale is None else x_scale[token : token + 1]
        for choice, chosen in enumerate(indices[token].tolist()):
            if chosen >= 0 and alive(chosen):
                result = expert(chosen, x[token : token + 1], scale)
                rows = as_rows(result, hidden, combine_format.nbytes, "results")
                value = to_f32(rows, combine_format).reshape(hidden)
                total[token] += np.float32(weights[token, choice]) * value
    return from_f32(total, combine_format)


def dense_layer_by_node(
    x: Any,
    x_scale: F32 | None,
    indices: npt.NDArray[np.integer],
    weights: F32,
    expert: Expert,
    *,
    hidden: int,
    combine_format: Format,
    node: int,
    local_experts: int,
    node_size: int,
) -> Bytes:
    """The same layer where other nodes add up what they send back: AllToAll(sums="node").

    Args:
        x: as of dense_layer; so are the next six.
        x_scale: as there.
        indices: as there.
        weights: as there.
        expert: as there.
        hidden: as there.
        combine_format: as there.
        node: of the rank whose tokens these are.
        local_experts: of a rank.
        node_size: ranks of a node.
    """

    def result(token: int, number: int) -> F32:
        scale = None if x_scale is None else x_scale[token : token + 1]
        rows = as_rows(
            expert(number, x[token : token + 1], scale), hidden, combine_format.nbytes, "results"
        )
        return to_f32(rows, combine_format).reshape(hidden)

    def rounded(value: F32) -> F32:
        return to_f32(from_f32(value[None], combine_format), combine_format).reshape(hidden)

    total = np.zeros((len(x), hidden), np.float32)
    for token in range(len(x)):
        chosen = {
            int(e): np.float32(w) for e, w in zip(indices[token], weights[token], strict=True)
        }
        chosen.pop(-1, None)
        for number, weight in chosen.items():
            if number // (local_experts * node_size) == node:
                total[token] += weight * result(token, number)
        by_node: dict[int, dict[int, F32]] = {}
        for number in sorted(chosen):
            rank = number // local_experts
            if rank // node_size != node:
                ranks = by_node.setdefault(rank // node_size, {})
                ranks.setdefault(rank, np.zeros(hidden, np.float32))
                ranks[rank] += chosen[number] * result(token, number)
        for ranks in by_node.values():  # ascending, and so are the ranks
            there = np.zeros(hidden, np.float32)
            for partial in ranks.values():
                there += rounded(partial)
            total[token] += rounded(there)
    return from_f32(total, combine_format)

"""The part of each weight that a tensor parallel rank reads, for engines with layers like vLLM's.

SGLang's are descended from vLLM's, and read the same. A rank asks only for its boxes; the first
version that is loaded proves that its layers read nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from tep import UsageError
from tep.apps.rl import Box, whole
from tep.integrations.weights.ranks import Param, Want, Weight, as_sent, named_tensors, wire_form

__all__ = ["Shards"]

_JOINED: Final = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""The names of fused layers and their sources, for models that have no such table themselves."""


class Shards:
    """The model of one rank, and its part of each weight.

    Args:
        model: its modules are called as in the checkpoint, but for fused ones.
        whole: ask for all of each weight.
    """

    def __init__(self, model: Any, *, whole: bool = False) -> None:
        self._model, self._whole = model, whole
        self._proven = whole  # then nothing is left out
        self._layers = dict(model.named_modules())
        self._joined = {
            source: (name, k)
            for name, sources in (getattr(model, "packed_modules_mapping", None) or _JOINED).items()
            for k, source in enumerate(sources)
        }

    def wants(self, param: Param) -> Want:
        """Say what the layers read of a parameter, named as in the checkpoint."""
        if self._whole:
            return as_sent(param)
        dtype, shape = wire_form(param)
        owner, _, leaf = param.name.rpartition(".")
        layer, k = self._layers.get(owner), 0
        if layer is None:
            above, _, source = owner.rpartition(".")
            name, k = self._joined.get(source, ("", 0))
            layer = self._layers.get(f"{above}.{name}")
        elif len(getattr(layer, "output_partition_sizes", ())) > 1:
            layer = None  # the checkpoint has joined it, too
        return Want(dtype, _shard_of(layer, leaf, k, shape))

    def wholes(self, weights: Iterable[Weight], device: Any) -> Iterator[tuple[str, Any]]:
        """Name and tensor of each weight, in its whole shape: the engine cuts its part out."""
        import torch  # who has a model has it

        for weight, (name, tensor) in zip(weights, named_tensors(weights, device)):
            if tuple(tensor.shape) == weight.param.shape:
                yield name, tensor
                continue
            empty = torch.empty(weight.param.shape, dtype=tensor.dtype, device=device)
            if not self._proven:
                empty[...] = float("nan")  # no trainer's weight is one
            empty[tuple(slice(*pair) for pair in weight.box)] = tensor
            yield name, empty

    def prove(self) -> None:
        """See that the model read nothing but what had arrived, once; and wait until it has read.

        Raises:
            UsageError: it did, and has values that are no weights.
        """
        import torch

        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the memory is written again after this
        if not self._proven:
            odd = [
                name
                for name, one in self._model.named_parameters()
                if one.element_size() > 1 and torch.isnan(one).any()
            ]
            if odd:
                raise UsageError(f"{odd[:3]} read more than their shard; set shards=False")
            self._proven = True


def _shard_of(layer: Any, leaf: str, k: int, shape: tuple[int, ...]) -> Box:
    """The box that a tensor parallel layer reads of its source k; all, if that is not certain.

    It is certain if the layer loads the parameter itself, without quantisation, and the parameter
    has the shape that the layers of all ranks make together.
    """
    if layer is None or "Unquantized" not in type(getattr(layer, "quant_method", None)).__name__:
        return whole(shape)
    loader = getattr(getattr(layer, leaf, None), "weight_loader", None)
    owner: Any = getattr(loader, "__self__", None)
    if owner is not layer:
        return whole(shape)
    if hasattr(layer, "shard_indices"):
        rows = layer.shard_indices
        spans = [(rows.org_vocab_start_index, rows.org_vocab_end_index)]
        extents = [layer.org_vocab_size]
    else:
        tp_rank, tp_size = _place_of(layer)
        sizes = getattr(layer, "output_partition_sizes", [layer.output_size])
        ranks, rank = tp_size, tp_rank
        if layer.output_size != sum(sizes) * ranks:
            ranks, rank = 1, 0
        elif k:  # a head of keys and values may be on several ranks
            copies = getattr(layer, "num_kv_head_replicas", 1)
            ranks, rank = ranks // copies, rank // copies
        wide = getattr(layer, "input_size_per_partition", layer.input_size)
        column = tp_rank * wide if wide < layer.input_size else 0
        spans = [(rank * sizes[k], (rank + 1) * sizes[k]), (column, column + wide)]
        extents = [ranks * sizes[k], layer.input_size]
    spans, extents = spans[: len(shape)], extents[: len(shape)]
    if shape[: len(extents)] != tuple(extents):
        return whole(shape)
    return (*spans, *whole(shape[len(spans) :]))


def _place_of(layer: Any) -> tuple[int, int]:
    """Rank and number of ranks among which a layer is divided."""
    if hasattr(layer, "tp_size"):
        return layer.tp_rank, layer.tp_size  # vLLM's
    group = getattr(layer, "tp_group", None)  # SGLang's; without one it is not divided
    return (group.rank_in_group, group.world_size) if group is not None else (0, 1)

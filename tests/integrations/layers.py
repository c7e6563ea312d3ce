"""The weights of a decoder layer, and a comparison of ranks that load all, or what they ask for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tep.integrations.weights.ranks import Param
from tep.integrations.weights.shards import Shards

RANKS, WORDS, HIDDEN = 4, 100, 16
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
SHAPES = {
    "embed.weight": (WORDS, HIDDEN),
    "lm_head.weight": (WORDS, HIDDEN),
    **{f"attn.{k}_proj.weight": (n, HIDDEN) for k, n in (("q", 32), ("k", 16), ("v", 16))},
    **{f"attn.{k}_proj.bias": (n,) for k, n in (("q", 32), ("k", 16), ("v", 16))},
    "attn.o_proj.weight": (HIDDEN, 32),
    "attn.o_proj.bias": (HIDDEN,),
    "mlp.gate_proj.weight": (48, HIDDEN),
    "mlp.up_proj.weight": (48, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, 48),
    "mlp.wide.weight": (64, HIDDEN),
    "mlp.wide.bias": (64,),
    "mlp.router.weight": (8, HIDDEN),
    "norm.weight": (HIDDEN,),
}


class Model(nn.Module):
    """The layers of one rank, which load a checkpoint by their own loaders."""

    def load_weights(self, weights) -> None:
        """Load as models of vLLM and SGLang do."""
        joined = {one: (name, k) for name, many in PACKED.items() for k, one in enumerate(many)}
        for name, tensor in weights:
            *above, source, leaf = name.split(".")
            fused, k = joined.get(source, (source, None))
            param = getattr(self.get_submodule(".".join([*above, fused])), leaf)
            if not hasattr(param, "weight_loader"):
                param.data.copy_(tensor)
            elif k is None:
                param.weight_loader(param, tensor)
            else:
                param.weight_loader(param, tensor, "qkv"[k] if fused == "qkv_proj" else k)


def fill(model: Model, room, embedding) -> Model:
    """Make the layers from the module `room` of an engine, full of zeros."""
    attn, mlp = nn.Module(), nn.Module()
    model.embed = embedding.VocabParallelEmbedding(WORDS, HIDDEN)
    model.lm_head = embedding.ParallelLMHead(WORDS, HIDDEN)
    attn.qkv_proj = room.QKVParallelLinear(HIDDEN, 8, 4, 2, bias=True)
    attn.o_proj = room.RowParallelLinear(32, HIDDEN, bias=True)
    mlp.gate_up_proj = room.MergedColumnParallelLinear(HIDDEN, [48, 48], bias=False)
    mlp.down_proj = room.RowParallelLinear(48, HIDDEN, bias=False)
    mlp.wide = room.ColumnParallelLinear(HIDDEN, 64, bias=True)
    mlp.router = room.ReplicatedLinear(HIDDEN, 8, bias=False)
    model.attn, model.mlp, model.norm = attn, mlp, nn.LayerNorm(HIDDEN, bias=False)
    for param in model.parameters():
        param.data.zero_()
    return model


def drawn() -> dict[str, torch.Tensor]:
    """A checkpoint."""
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def compare(model_of: Callable[[int], Model]) -> dict[str, object]:
    """Load all of a checkpoint, and what is asked for with NaN around it; count what is equal."""
    weights = drawn()
    padding = 2 * (128 - WORDS) * HIDDEN  # rows of the vocabulary that are no word's
    asked, held, same = 0, -padding, 0
    for rank in range(RANKS):
        whole, part, arrived = model_of(rank), model_of(rank), {}
        whole.load_weights(weights.items())
        shards = Shards(part)
        for name, tensor in weights.items():
            want = shards.wants(Param(name, "float32", tuple(tensor.shape), 4))
            box = tuple(slice(*pair) for pair in want.box)
            arrived[name] = torch.full_like(tensor, float("nan"))
            arrived[name][box] = tensor[box]
            asked += tensor[box].numel()
        part.load_weights(arrived.items())
        for one, other in zip(whole.parameters(), part.parameters()):
            same += int(torch.equal(one, other))
            held += one.numel()
    parameters = RANKS * len(list(whole.parameters()))
    return {
        "ok": same == parameters and asked == held,
        "parameters that are as if all had been loaded": f"{same} of {parameters}",
        "elements asked for": asked,
        "elements that the ranks hold": held,
    }

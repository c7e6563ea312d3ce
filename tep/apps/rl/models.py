"""A model: its tensors in training, the fused ones in inference, the usual ways to shard both.

Rule 1: the layouts here are some ways to fill `TrainMeta` and `RolloutMeta`; the schedule takes any
other as well. Rule 2: shards of quantised parameters begin at multiples of the block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from tep import UsageError
from tep.apps.rl.metadata import (
    ALIGN_BYTES,
    SCALINGS,
    Box,
    DType,
    MeshGroup,
    RolloutMeta,
    SourceShard,
    TargetShard,
    Tensor,
    TrainMeta,
    box_size,
    extents_of,
    whole,
)

__all__ = [
    "PUBLISHED", "Fused", "InferLayout", "Model", "TrainLayout", "cut", "lay_out",
    "load_model", "model_from_config", "rollout_metas", "target_shards", "train_metas",
]  # fmt: skip


Split = Literal["rows", "columns", "none"]
"""The cut of a parameter by tensor parallelism: output rows, input columns, or none."""


@dataclass(frozen=True, slots=True)
class Fused:
    """One parameter of the inference engine.

    Attributes:
        sources: tensors joined in it, in order.
        split: how tensor parallelism cuts it.
        units: for each source, how many pieces it can be cut into (heads); with fewer pieces than
            ranks several ranks hold the same piece. 0: rows as they come.
        expert: placed by expert parallelism and not cut by tensor parallelism.
    """

    name: str
    sources: tuple[str, ...]
    dtype: DType
    split: Split = "none"
    units: tuple[int, ...] = ()
    expert: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """One model, on both sides.

    Attributes:
        source: where its shapes are from, for people.
        layers: number of transformer layers.
        tensors: in training, in layer order.
        fused: in inference, in layer order.
    """

    name: str
    source: str
    layers: int
    tensors: tuple[Tensor, ...]
    fused: tuple[Fused, ...]

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    def quantised_as(self, dtype: DType) -> Model:
        """The same model with another dtype for what inference has in fp8, e.g. "bf16"."""
        fused = tuple(
            replace(one, dtype=dtype) if one.dtype in SCALINGS else one for one in self.fused
        )
        return replace(self, fused=fused)


PUBLISHED: Final[Mapping[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("published.json").read_text(encoding="utf-8")
)
"""Models by the names that `tep rl` takes: `source`, and `config`, the keys of a config.json that
say shapes."""


def load_model(name: str | PathLike[str]) -> Model:
    """Return a published model by its name, or read a config.json by its path.

    Raises:
        UsageError: neither; or the file does not describe a decoder that this room knows.
    """
    known = PUBLISHED.get(str(name))
    if known is not None:
        return model_from_config(name=str(name), **known)
    path = Path(name)
    if not path.is_file():
        raise UsageError(
            f"model {str(name)!r} is neither a file nor one of: {', '.join(PUBLISHED)}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path}: a config.json is an object, not a {type(config).__name__}")
    return model_from_config(config, name=path.stem, source=str(path))


def model_from_config(config: Mapping[str, object], *, name: str, source: str) -> Model:
    """Derive all tensors from a config.json.

    Understood are decoders with grouped-query or multi-head latent attention and dense or MoE
    layers: the Llama, Mistral, Mixtral, Qwen2, Qwen3, DeepSeek-V2/V3 and Kimi-K2 families. The
    language model of a config with `text_config` is taken.

    Raises:
        UsageError: a key is missing or no number; names it.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = text
    return _Builder(config, name, source).build()


class _Builder:
    """Walks the layers of one config."""

    def __init__(self, config: Mapping[str, object], name: str, source: str) -> None:
        self._config = config
        self._name = name
        self._source = source
        self._tensors: list[Tensor] = []
        self._fused: list[Fused] = []
        self._hidden = self._int("hidden_size")
        self._heads = self._int("num_attention_heads")
        self._layers = self._int("num_hidden_layers")
        self._type = str(config.get("model_type", ""))
        self._mixtral = self._type == "mixtral"

    def _int(self, *keys: str, default: int | None = None) -> int:
        """Return the value of the first of these keys that is there."""
        for key in keys:
            value = self._config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UsageError(f"{self._name}: {key}={value!r} is no number of 0 or more")
            return value
        if default is None:
            raise UsageError(
                f"{self._name}: the config has no {' and no '.join(keys)}; "
                f"model_type is {self._config.get('model_type')!r}"
            )
        return default

    def _flag(self, key: str, *, default: bool) -> bool:
        return bool(self._config.get(key, default))

    def build(self) -> Model:
        vocab = self._int("vocab_size")
        self._one("model.embed_tokens.weight", (vocab, self._hidden), -1, split="rows")
        for layer in range(self._layers):
            prefix = f"model.layers.{layer}"
            self._one(f"{prefix}.input_layernorm.weight", (self._hidden,), layer)
            if self._config.get("kv_lora_rank") is not None:
                self._latent_attention(f"{prefix}.self_attn", layer)
            else:
                self._attention(f"{prefix}.self_attn", layer)
            self._one(f"{prefix}.post_attention_layernorm.weight", (self._hidden,), layer)
            if self._is_moe(layer):
                self._moe(f"{prefix}.{'block_sparse_moe' if self._mixtral else 'mlp'}", layer)
            else:
                width = self._int("intermediate_size")
                self._gated(f"{prefix}.mlp", width, layer)
        self._one("model.norm.weight", (self._hidden,), self._layers)
        if not self._flag("tie_word_embeddings", default=False):
            self._one("lm_head.weight", (vocab, self._hidden), self._layers, split="rows")
        tensors, fused = tuple(self._tensors), tuple(self._fused)
        return Model(self._name, self._source, self._layers, tensors, fused)

    # ------------------------------------------------------------------ layers

    def _latent_attention(self, at: str, layer: int) -> None:
        kv_rank, rope = self._int("kv_lora_rank"), self._int("qk_rope_head_dim")
        nope, value = self._int("qk_nope_head_dim"), self._int("v_head_dim")
        heads, hidden = self._heads, self._hidden
        q_rank = self._int("q_lora_rank", default=0)
        kv_a = self._tensor(f"{at}.kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden), layer)
        if q_rank:
            q_a = self._tensor(f"{at}.q_a_proj.weight", (q_rank, hidden), layer)
            self._fuse(f"{at}.fused_qkv_a_proj.weight", (q_a, kv_a), "fp8")
            self._one(f"{at}.q_a_layernorm.weight", (q_rank,), layer)
            q_name, q_in = "q_b_proj", q_rank
        else:
            self._fuse(kv_a, (kv_a,), "fp8")
            q_name, q_in = "q_proj", hidden
        shape = (heads * (nope + rope), q_in)
        self._one(f"{at}.{q_name}.weight", shape, layer, "fp8", "rows", heads)
        self._one(f"{at}.kv_a_layernorm.weight", (kv_rank,), layer)
        shape = (heads * (nope + value), kv_rank)
        self._one(f"{at}.kv_b_proj.weight", shape, layer, "fp8", "rows", heads)
        self._one(f"{at}.o_proj.weight", (hidden, heads * value), layer, "fp8", "columns", heads)

    def _attention(self, at: str, layer: int) -> None:
        heads, hidden = self._heads, self._hidden
        kv_heads = self._int("num_key_value_heads", default=heads)
        dim = self._int("head_dim", default=hidden // heads)
        units = (heads, kv_heads, kv_heads)
        wide = dict(zip("qkv", (heads * dim, kv_heads * dim, kv_heads * dim)))
        names = tuple(
            self._tensor(f"{at}.{k}_proj.weight", (rows, hidden), layer) for k, rows in wide.items()
        )
        self._fuse(f"{at}.qkv_proj.weight", names, "fp8", "rows", units)
        if self._flag("attention_bias", default=self._type.startswith("qwen2")):
            names = tuple(
                self._tensor(f"{at}.{k}_proj.bias", (rows,), layer) for k, rows in wide.items()
            )
            self._fuse(f"{at}.qkv_proj.bias", names, "bf16", "rows", units)
            if not self._type.startswith("qwen2"):
                self._one(f"{at}.o_proj.bias", (hidden,), layer)
        if self._type.startswith("qwen3"):
            for which in ("q_norm", "k_norm"):
                self._one(f"{at}.{which}.weight", (dim,), layer)
        self._one(f"{at}.o_proj.weight", (hidden, heads * dim), layer, "fp8", "columns", heads)

    def _is_moe(self, layer: int) -> bool:
        if not self._experts():
            return False
        dense = self._config.get("mlp_only_layers") or ()
        if isinstance(dense, list | tuple) and layer in dense:
            return False
        step = self._int("decoder_sparse_step", "moe_layer_freq", default=1)
        first = self._int("first_k_dense_replace", default=0)
        if "decoder_sparse_step" in self._config:
            return (layer + 1) % max(1, step) == 0
        return layer >= first and layer % max(1, step) == 0

    def _experts(self) -> int:
        return self._int("n_routed_experts", "num_experts", "num_local_experts", default=0)

    def _moe(self, at: str, layer: int) -> None:
        experts, hidden = self._experts(), self._hidden
        width = self._int("moe_intermediate_size", "intermediate_size")
        self._one(f"{at}.gate.weight", (experts, hidden), layer)
        if self._config.get("topk_method") == "noaux_tc":
            bias = self._tensor(f"{at}.gate.e_score_correction_bias", (experts,), layer, "fp32")
            self._fuse(bias, (bias,), "fp32")
        shared = self._int("n_shared_experts", default=0) * width
        shared = self._int("shared_expert_intermediate_size", default=shared)
        if shared and self._type == "qwen2_moe":
            self._gated(f"{at}.shared_expert", shared, layer)
            self._one(f"{at}.shared_expert_gate.weight", (1, hidden), layer)
        elif shared:
            self._gated(f"{at}.shared_experts", shared, layer)
        names = ("w1", "w3", "w2") if self._mixtral else ("gate_proj", "up_proj", "down_proj")
        wide, narrow = (experts, width, hidden), (experts, hidden, width)
        gate, up, down = (
            self._tensor(f"{at}.experts.*.{which}.weight", shape, layer, expert=True)
            for which, shape in zip(names, (wide, wide, narrow))
        )
        self._fuse(f"{at}.experts.w13_weight", (gate, up), "fp8", expert=True)
        self._fuse(f"{at}.experts.w2_weight", (down,), "fp8", expert=True)

    def _gated(self, at: str, width: int, layer: int) -> None:
        gate, up = (
            self._tensor(f"{at}.{which}_proj.weight", (width, self._hidden), layer)
            for which in ("gate", "up")
        )
        self._fuse(f"{at}.gate_up_proj.weight", (gate, up), "fp8", "rows", (0, 0))
        self._one(f"{at}.down_proj.weight", (self._hidden, width), layer, "fp8", "columns", 0)

    # ------------------------------------------------------------------ one tensor

    def _tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        layer: int,
        dtype: DType = "bf16",
        *,
        expert: bool = False,
    ) -> str:
        self._tensors.append(Tensor(name, shape, dtype, layer, expert))
        return name

    def _fuse(
        self,
        name: str,
        sources: tuple[str, ...],
        dtype: DType,
        split: Split = "none",
        units: tuple[int, ...] = (),
        *,
        expert: bool = False,
    ) -> None:
        self._fused.append(Fused(name, sources, dtype, split, units, expert))

    def _one(
        self,
        name: str,
        shape: tuple[int, ...],
        layer: int,
        dtype: DType = "bf16",
        split: Split = "none",
        units: int = 0,
    ) -> None:
        """A parameter that is the same on both sides but for its dtype."""
        self._fuse(name, (self._tensor(name, shape, layer),), dtype, split, (units,))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainLayout:
    """The sharding of a model in training; the number of ranks is the product.

    Experts are split over `ep`, and each part over fsdp x tp along its first axis with enough
    entries. Other tensors are cut by `tp` (rows or columns) and then over fsdp x ep along axis 0.
    Every replica holds the same. Rank order: stage, replica, fsdp, tp, ep; the last runs fastest.

    Attributes:
        fsdp: shards of each parameter.
        pp: pipeline stages, contiguous layers each.
        ep, tp: expert and tensor parallelism.
        replicas: copies of everything.
    """

    fsdp: int
    pp: int = 1
    ep: int = 1
    tp: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes below 1."""
        _check_sizes(self)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.fsdp * self.pp * self.ep * self.tp * self.replicas

    def ranks(self) -> npt.NDArray[np.int64]:
        """All ranks, by stage, replica, fsdp, tp and ep."""
        sizes = (self.pp, self.replicas, self.fsdp, self.tp, self.ep)
        return np.arange(self.world).reshape(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferLayout:
    """The sharding of a model in the inference engine; the number of workers is ep x replicas.

    Attributes:
        ep: workers of one replica; experts are split over them.
        tp: tensor parallelism of all else; divides ep. 1: every worker holds all of it, as with
            data-parallel attention.
        replicas: copies of the whole.
    """

    ep: int
    tp: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes below 1, and a tp that does not divide ep."""
        _check_sizes(self)
        if self.ep % self.tp:
            raise UsageError(f"InferLayout: tp={self.tp} does not divide ep={self.ep}")

    @property
    def world(self) -> int:
        """Number of workers."""
        return self.ep * self.replicas


def _check_sizes(layout: TrainLayout | InferLayout) -> None:
    for name, value in asdict(layout).items():
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"{type(layout).__name__}: {name}={value!r}; 1 or more")


def cut(extent: int, pieces: int, index: int, unit: int = 1) -> tuple[int, int]:
    """Piece `index` of `pieces` near-equal ones, which begin at multiples of `unit`."""
    units = -(-extent // unit)
    start, stop = units * index // pieces * unit, units * (index + 1) // pieces * unit
    return min(start, extent), min(stop, extent)


# ---------------------------------------------------------------------- training


def train_metas(model: Model, layout: TrainLayout, nics: int = 1) -> tuple[TrainMeta, ...]:
    """Compute what every training rank holds, and the mesh groups: experts first, then all else."""
    groups = tuple(_mesh_groups(model, layout))
    splits = {source: fused.split for fused in model.fused for source in fused.sources}
    shards: list[list[SourceShard]] = [[] for _ in range(layout.world)]
    for tensor in model.tensors:
        stage = _stage(tensor.layer, model.layers, layout.pp)
        for ranks, box in _boxes(tensor, layout, stage, splits.get(tensor.name, "none")):
            if box_size(box):
                shard = SourceShard(tensor.name, box)
                for rank in ranks:
                    shards[rank].append(shard)
    dtypes = {tensor.name: tensor.dtype for tensor in model.tensors}
    return tuple(
        TrainMeta(rank, nics, tuple(mine), dtypes, groups) for rank, mine in enumerate(shards)
    )


def _stage(layer: int, layers: int, pp: int) -> int:
    """Pipeline stage of a layer: the embedding is in the first, the head in the last."""
    clipped = min(max(layer, 0), layers - 1)
    return next(k for k in range(pp) if clipped < layers * (k + 1) // pp)


def _mesh_groups(model: Model, layout: TrainLayout) -> Iterator[MeshGroup]:
    experts = tuple(tensor.name for tensor in model.tensors if tensor.expert)
    dense = tuple(tensor.name for tensor in model.tensors if not tensor.expert)
    ranks = layout.ranks()
    if experts:
        meshes = np.moveaxis(ranks, -1, 1).reshape(layout.pp * layout.ep, -1)
        yield MeshGroup("experts", experts, tuple(map(tuple, meshes.tolist())))
    yield MeshGroup("dense", dense, tuple(map(tuple, ranks.reshape(layout.pp, -1).tolist())))


def _boxes(
    tensor: Tensor, layout: TrainLayout, stage: int, split: Split
) -> Iterator[tuple[list[int], Box]]:
    """The boxes of a tensor, and the ranks that hold each: one of every replica."""
    ranks = layout.ranks()[stage]
    if tensor.expert:  # not cut by tensor parallelism
        outer, axis = layout.ep, 0
        ranks = np.moveaxis(ranks, -1, 1).reshape(layout.replicas, outer, -1)
    else:
        outer, axis = layout.tp, {"rows": 0, "columns": 1}.get(split, -1)
        ranks = np.moveaxis(ranks, -2, 1).reshape(layout.replicas, outer, -1)
    inner = ranks.shape[-1]
    for k in range(outer):
        area = list(whole(tensor.shape))
        if 0 <= axis < len(area):
            area[axis] = cut(tensor.shape[axis], outer, k)
        start, stop = area[0]
        along = 1 if tensor.expert and stop - start < inner else 0
        start, stop = area[along]
        for j in range(inner):
            low, high = cut(stop - start, inner, j)
            box = (*area[:along], (start + low, start + high), *area[along + 1 :])
            yield ranks[:, k, j].tolist(), box


# ---------------------------------------------------------------------- inference


def rollout_metas(model: Model, layout: InferLayout, nics: int = 1) -> tuple[RolloutMeta, ...]:
    """Compute what every inference worker holds; worker k is named f"rollout{k}"."""
    held = [target_shards(model, layout, index) for index in range(layout.ep)]
    return tuple(
        RolloutMeta(f"rollout{k}", nics, *held[k % layout.ep]) for k in range(layout.world)
    )


def target_shards(
    model: Model, layout: InferLayout, index: int
) -> tuple[tuple[TargetShard, ...], int]:
    """Lay out what worker `index` of a replica holds, one after another; return its bytes too.

    Block scales stand right behind their weights, so that both are one write.
    """
    shapes = {tensor.name: tensor.shape for tensor in model.tensors}
    parts = ((fused, _parts(fused, layout, index, shapes)) for fused in model.fused)
    return lay_out((fused.name, fused.dtype, mine) for fused, mine in parts if mine)


def lay_out(
    targets: Iterable[tuple[str, DType, tuple[SourceShard, ...]]], *, apart: bool = False
) -> tuple[tuple[TargetShard, ...], int]:
    """Give targets their offsets, one after another, and say how many bytes that makes.

    Args:
        targets: name, dtype and parts of each.
        apart: each has memory of its own: no row of a schedule may cover two of them.
    """
    found, at = [], 0
    gap = ALIGN_BYTES if apart else 0
    for name, dtype, parts in targets:
        offsets = []
        for _, nbytes in extents_of(parts, dtype):
            offsets.append(at)
            at += _aligned(nbytes) + gap
        found.append(TargetShard(name, dtype, parts, tuple(offsets)))
    return tuple(found), at


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _parts(
    fused: Fused, layout: InferLayout, index: int, shapes: dict[str, tuple[int, ...]]
) -> tuple[SourceShard, ...]:
    found = []
    for k, name in enumerate(fused.sources):
        box = list(whole(shapes[name]))
        if fused.expert:
            box[0] = cut(box[0][1], layout.ep, index)
        elif fused.split != "none" and layout.tp > 1:
            axis = 0 if fused.split == "rows" else 1
            units = fused.units[k] if k < len(fused.units) else 0
            box[axis] = _slice(fused, box[axis][1], layout.tp, index % layout.tp, units)
        if box_size(tuple(box)):
            found.append(_shard(name, tuple(box)))
    return tuple(found)


def _slice(fused: Fused, extent: int, tp: int, index: int, units: int) -> tuple[int, int]:
    rows, columns, _ = SCALINGS.get(fused.dtype, (1, 1, 0))
    unit = (rows if fused.split == "rows" else columns) or 1
    if not units:
        return cut(extent, tp, index, unit)
    if tp > units:
        if tp % units:
            raise UsageError(f"{fused.name}: tp={tp} is no multiple of its {units} heads")
        index, tp = index * units // tp, units
    start, stop = (units * k // tp * (extent // units) for k in (index, index + 1))
    if start % unit or (stop % unit and stop != extent):
        raise UsageError(
            f"{fused.name}: tp={tp} cuts at {start} and {stop}, not at multiples of the "
            f"{unit} of a quantisation block; choose another tp"
        )
    return start, stop


@cache
def _shard(name: str, box: Box) -> SourceShard:
    """One object for all ranks that hold the same."""
    return SourceShard(name, box)

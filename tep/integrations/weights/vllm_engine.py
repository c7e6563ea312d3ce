"""vLLM's weight transfer (0.32 or later) over tep, by the name "tep"; see `register`.

The weights of a version arrive beside the model, which goes on serving. Only `finish_weight_update`
touches the model, in one call between two steps, when every rank of every worker has the version.
A rank asks only for what its layers read of a weight, as far as vLLM's own tensor parallel layers
say it; the first version that is loaded proves that they read nothing else.
"""

from __future__ import annotations

import functools
import secrets
import sys
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from tep import TepError, UsageError
from tep.apps.rl import Box, whole
from tep.integrations.weights import NAME as PLUGIN
from tep.integrations.weights.member import Fabric, Meeting, Member
from tep.integrations.weights.ranks import (
    Param,
    Want,
    Wants,
    Weight,
    as_sent,
    named_tensors,
    wire_form,
)

__all__ = [
    "ShardedSource", "TepInitInfo", "TepTrainerInitInfo", "TepTrainerWeightTransferEngine",
    "TepUpdateInfo", "TepWeightTransferEngine",
]  # fmt: skip


@dataclass
class TepInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM's
    """The trainer's word to a worker: where the hub is, and over which backend weights come.

    `shards`: a worker asks only for what it reads of each weight.
    """

    host: str
    port: int
    token: str = field(repr=False)
    backend: str = "local"
    options: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 300.0
    shards: bool = True


@dataclass
class TepUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM's
    """Which version is meant; `cancel` ends an update that some workers have begun."""

    version: int
    cancel: bool = False


@dataclass
class TepTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM's
    """The terms on which a training rank takes part.

    Attributes:
        world: training ranks; with more than one, host, port and token are the same on all.
        host, port, token: where rank 0 listens; port 0 and an empty token: rank 0 chooses.
        backend, options: of the engines, on both sides.
        timeout_s: of an update, and of each wait.
        shards: each worker asks only for what it reads of each weight; False: for all of each.
    """

    backend: ClassVar[str] = PLUGIN

    world: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    token: str = field(default="", repr=False)
    fabric: str = "local"
    options: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 300.0
    shards: bool = True


class TepWeightTransferEngine(
    WeightTransferEngine[TepInitInfo, TepUpdateInfo],  # type: ignore[misc]  # vLLM's
):
    """The worker's side: one a rank."""

    init_info_cls = TepInitInfo
    update_info_cls = TepUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self.version: int | None = None
        self._member: Member | None = None
        self._voted: int | None = None
        self._timeout_s = 300.0
        self._refusal: Any = None
        self._proven = False

    def init_transfer_engine(self, init_info: TepInitInfo) -> None:
        self.shutdown()
        fabric = Fabric(init_info.backend, init_info.options, timeout_s=init_info.timeout_s)
        self._timeout_s = init_info.timeout_s
        self._proven = not init_info.shards  # whole weights leave nothing unread
        self._member = Member(f"vllm-{uuid.uuid4().hex[:12]}", fabric)
        try:
            meeting = Meeting(init_info.host, init_info.port, init_info.token)
            wants = _shard_wants(self.model) if init_info.shards else as_sent
            self._member.receive_from(meeting, wants)
        except TepError:
            self.shutdown()
            raise

    def start_weight_update(self) -> None:
        self._here()
        self._voted = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own waits for the device after this; nothing has been sent there yet.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: TepUpdateInfo) -> None:
        """Say whether all of a version is here; an error keeps every rank on the old one."""
        if update_info.cancel:
            raise UsageError(f"the update to version {update_info.version} was cancelled")
        self._here().whole(update_info.version, self._timeout_s)
        self._voted = update_info.version

    def finish_weight_update(self) -> None:
        """Load the version into the model."""
        if self._voted is None:
            raise UsageError("no version was received; update_weights comes before this")
        version, self._voted = self._voted, None
        with self._here().read(version) as weights:
            self._load(version, weights)
        self.version = version

    def _load(self, version: int, weights: list[Weight]) -> None:
        from vllm.model_executor.model_loader.reload import (  # heavy, and not for trainers
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        self.version = None
        self._serve_again()
        try:
            initialize_layerwise_reload(self.model)
            self.model.load_weights(self._wholes(weights))
            finalize_layerwise_reload(self.model, self.model_config)
            self._prove()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()  # the memory is written again after this
        except BaseException as error:
            # Some layers have the new version: no token may come from this model now.
            text = f"loading version {version} failed ({error}); update the weights again"
            self._refusal = self.model.register_forward_pre_hook(_refuse(text))
            raise

    def _wholes(self, weights: list[Weight]) -> Iterator[tuple[str, Any]]:
        """Name and tensor of each weight, in its whole shape: vLLM cuts this rank's part out."""
        for weight, (name, tensor) in zip(weights, named_tensors(weights, self.device)):
            if tuple(tensor.shape) == weight.param.shape:
                yield name, tensor
                continue
            empty = torch.empty(weight.param.shape, dtype=tensor.dtype, device=self.device)
            if not self._proven:
                empty[...] = float("nan")  # no trainer's weight is one
            empty[tuple(slice(*pair) for pair in weight.box)] = tensor
            yield name, empty

    def _prove(self) -> None:
        """See that the model read nothing but what had arrived."""
        if not self._proven:
            odd = [
                name
                for name, one in self.model.named_parameters()
                if one.element_size() > 1 and torch.isnan(one).any()
            ]
            if odd:
                raise UsageError(f"{odd[:3]} read more than their shard; set shards=False")
            self._proven = True

    def _serve_again(self) -> None:
        if self._refusal is not None:
            self._refusal.remove()
            self._refusal = None

    def _here(self) -> Member:
        if self._member is None:
            raise UsageError("init_weight_transfer_engine comes first")
        return self._member

    def shutdown(self) -> None:
        if self._member is not None:
            self._member.close()
            self._member = None


def _shard_wants(model: Any) -> Wants:
    """Say what this rank's layers read of each parameter, named as in the checkpoint."""
    layers = dict(model.named_modules())
    joined = {
        source: (name, k)
        for name, sources in getattr(model, "packed_modules_mapping", {}).items()
        for k, source in enumerate(sources)
    }

    def wants(param: Param) -> Want:
        dtype, shape = wire_form(param)
        owner, _, leaf = param.name.rpartition(".")
        layer, k = layers.get(owner), 0
        if layer is None:
            above, _, source = owner.rpartition(".")
            name, k = joined.get(source, ("", 0))
            layer = layers.get(f"{above}.{name}")
        elif len(getattr(layer, "output_partition_sizes", ())) > 1:
            layer = None  # the checkpoint has joined it, too
        return Want(dtype, _shard_of(layer, leaf, k, shape))

    return wants


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
        ranks, rank, sizes = layer.tp_size, layer.tp_rank, layer.output_partition_sizes
        if layer.output_size != sum(sizes) * ranks:
            ranks, rank = 1, 0
        elif k:  # a head of keys and values may be on several ranks
            copies = getattr(layer, "num_kv_head_replicas", 1)
            ranks, rank = ranks // copies, rank // copies
        wide = getattr(layer, "input_size_per_partition", layer.input_size)
        column = layer.tp_rank * wide if wide < layer.input_size else 0
        spans = [(rank * sizes[k], (rank + 1) * sizes[k]), (column, column + wide)]
        extents = [ranks * sizes[k], layer.input_size]
    spans, extents = spans[: len(shape)], extents[: len(shape)]
    if shape[: len(extents)] != tuple(extents):
        return whole(shape)
    return (*spans, *whole(shape[len(spans) :]))


def _refuse(text: str) -> Any:
    def hook(*_: object) -> None:
        raise UsageError(text)

    return hook


class ShardedSource(WeightSource):  # type: ignore[misc]  # vLLM's
    """A module whose DTensors are sent as they are sharded, without a gather."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    @functools.cached_property  # vLLM 0.33 insists; 0.32 has a method, which only others call
    def metadata(self) -> list[Any]:
        raise UsageError("tep asks the tensors themselves; another engine needs a ModuleSource")

    def __iter__(self) -> Any:  # vLLM 0.32 iterates a source
        yield from self._module.named_parameters()

    iter_full = __iter__  # vLLM 0.33 calls this


class TepTrainerWeightTransferEngine(
    TrainerWeightTransferEngine[TepTrainerInitInfo],  # type: ignore[misc]  # vLLM's
):
    """The trainer's side: one a training rank."""

    init_info_cls = TepTrainerInitInfo

    def __init__(self, info: TepTrainerInitInfo, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self.rank = info.rank  # vLLM 0.33 has it as an argument, 0.32 has not
        fabric = Fabric(info.fabric, info.options, info.host, info.port, info.timeout_s)
        self._info = info
        self._version = 0
        self._pushed: int | None = None
        self._member = Member(f"trainer-{info.rank}-{uuid.uuid4().hex[:12]}", fabric)

    @classmethod
    def trainer_init(
        cls, init_info: TepTrainerInitInfo, *, client: Any, source: Any = None
    ) -> Self:
        if source is None:
            raise UsageError("a source of weights is needed: ModuleSource, or ShardedSource")
        if init_info.world > 1 and not (init_info.port and init_info.token):
            raise UsageError("with several training ranks, host, port and token are given to all")
        self = cls(init_info, client, source)
        try:
            self._come_together()
        except BaseException:
            self.shutdown()
            raise
        return self

    def _come_together(self) -> None:
        info = self._info
        if not self.is_sender:
            meeting = Meeting(info.host, info.port, info.token)
            self._member.follow(meeting, info.rank, info.world)
            return
        self._member.meet(info.token or secrets.token_hex(16))
        meeting = self._member.lead(info.world)
        told = TepInitInfo(*meeting, info.fabric, dict(info.options), info.timeout_s, info.shards)
        self.client.init_weight_transfer_engine(asdict(told))

    def send_weights(self) -> None:
        """Bring all workers to the weights of now: `push_weights`, then `commit_weights`."""
        self.push_weights()
        self.commit_weights()

    def push_weights(self) -> None:
        """Write a version beside the models, which go on serving; on every training rank."""
        self._version += 1
        self._pushed = None
        assert self.source is not None
        # vLLM 0.33 asks a source for its whole tensors, 0.32 iterates it.
        found = self.source.iter_full() if hasattr(self.source, "iter_full") else self.source
        weights = ((name, tensor) for name, tensor in found if tensor is not None)
        self._member.send(weights, self._version)
        self._pushed = self._version

    def commit_weights(self, weight_version: str | None = None) -> None:
        """Have all workers load what was pushed; pause them around this call.

        Raises:
            Exception: the client's; the workers then have the old version, or, if the error came
                from `finish_weight_update`, refuse to compute until the next update.
        """
        if self._pushed is None:
            raise UsageError("nothing was pushed, or it was committed already")
        version, self._pushed = self._pushed, None
        if not self.is_sender:
            return
        self.client.start_weight_update()
        try:
            self.client.update_weights({"version": version})
        except BaseException:
            self._cancel(version)
            raise
        self.client.finish_weight_update(weight_version or str(version))

    def _cancel(self, version: int) -> None:
        """End the update at the workers that have begun it, so that they can begin another."""
        try:
            self.client.update_weights({"version": version, "cancel": True})
        except Exception as error:  # noqa: BLE001  # each worker answers a cancel with an error
            sys.stderr.write(f"tep: the update to version {version} was cancelled: {error}\n")

    def shutdown(self) -> None:
        self._member.close()

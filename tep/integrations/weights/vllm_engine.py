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
from tep.integrations.weights import NAME as PLUGIN
from tep.integrations.weights.member import Fabric, Meeting, Member
from tep.integrations.weights.ranks import Weight
from tep.integrations.weights.shards import Shards

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
        fabric, options: backend of the engines on both sides, and its options.
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
        self._cancelled = False
        self._timeout_s = 300.0
        self._refusal: Any = None
        self._shards = Shards(model)

    def init_transfer_engine(self, init_info: TepInitInfo) -> None:
        self.shutdown()
        fabric = Fabric(init_info.backend, init_info.options, timeout_s=init_info.timeout_s)
        self._timeout_s = init_info.timeout_s
        self._shards = Shards(self.model, whole=not init_info.shards)
        self._member = Member(f"vllm-{uuid.uuid4().hex[:12]}", fabric)
        try:
            meeting = Meeting(init_info.host, init_info.port, init_info.token)
            self._member.receive_from(meeting, self._shards.wants)
        except TepError:
            self.shutdown()
            raise

    def start_weight_update(self) -> None:
        self._here()
        self._voted, self._cancelled = None, False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own waits for the device after this; nothing has been sent there yet.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: TepUpdateInfo) -> None:
        """Say whether all of a version is here; an error keeps every rank on the old one.

        A cancel is no error: after the first error vLLM's executor leaves the other ranks' answers
        where they are, and the next call reads them as its own.
        """
        if update_info.cancel:
            self._voted, self._cancelled = None, True
            return
        self._here().whole(update_info.version, self._timeout_s)
        self._voted = update_info.version

    def finish_weight_update(self) -> None:
        """Load the version into the model, unless the update was cancelled."""
        if self._cancelled:
            return
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
            self.model.load_weights(self._shards.wholes(weights, self.device))
            finalize_layerwise_reload(self.model, self.model_config)
            self._shards.prove()
        except BaseException as error:
            # Some layers have the new version: no token may come from this model now.
            text = f"loading version {version} failed ({error}); update the weights again"
            self._refusal = self.model.register_forward_pre_hook(_refuse(text))
            raise

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
            self.client.finish_weight_update()
        except Exception as error:  # noqa: BLE001  # the first one is raised
            sys.stderr.write(f"tep: version {version} could not be cancelled: {error}\n")

    def shutdown(self) -> None:
        self._member.close()

"""TepConnector: vLLM's connector class. Every method calls one of the two halves, or translates.

Only this module imports vLLM (0.32 or later) and torch; vLLM loads it by
`kv_connector_module_path`.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.model_executor.models.utils import extract_layer_index

from tep import TransferEngine, UsageError
from tep.apps.kvcache import KvBlocks
from tep.compat.engines import open_engine
from tep.integrations.vllm.scheduler import Scheduler
from tep.integrations.vllm.terms import Orders, Report, Step, Terms, views_of
from tep.integrations.vllm.worker import Worker

__all__ = ["TepConnector"]

logger = logging.getLogger(__name__)


@dataclass
class TepHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM's
    """One worker's engine, for its scheduler."""

    address: bytes


@dataclass
class TepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM's
    """Scheduler -> workers, with each step."""

    orders: Orders


@dataclass
class TepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM's
    """Workers -> scheduler: results that vLLM's own have no field for."""

    report: Report

    def aggregate(self, other: TepReport) -> TepReport:
        return TepReport(self.report.aggregate(other.report))


class TepConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM's
    """The connector that moves KV blocks between prefill and decode instances by tep.

    Options, in `kv_connector_extra_config`: `backend` ("auto"), `backend_options` (that backend's),
    `name` (the instance's: keep it over restarts; default: vLLM's engine_id), and those of `Terms`.
    """

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        for what in (
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        ):
            if getattr(parallel, what, 1) > 1:
                raise UsageError(f"TepConnector: {what}={getattr(parallel, what)} is not supported")
        config = vllm_config.kv_transfer_config
        self._extra = dict(config.kv_connector_extra_config)
        terms = {one.name for one in fields(Terms)}
        unknown = self._extra.keys() - terms - {"backend", "backend_options", "name"}
        if unknown:
            raise UsageError(f"TepConnector: unknown options {sorted(unknown)}; there are {terms}")
        given = {name: value for name, value in self._extra.items() if name in terms}
        try:
            self._terms = msgspec.convert(given, Terms, strict=False)
        except msgspec.ValidationError as error:
            raise UsageError(f"TepConnector: {error}") from error
        self._name = str(self._extra.get("name") or config.engine_id)
        groups = kv_cache_config.kv_cache_groups
        for group in groups:
            if not hasattr(group.kv_cache_spec, "block_size") or "Mamba" in repr(
                type(group.kv_cache_spec)
            ):
                raise UsageError(
                    f"TepConnector: {type(group.kv_cache_spec).__name__} has no blocks of tokens"
                )
        self._scheduler = Scheduler(
            [group.kv_cache_spec.block_size for group in groups],
            self._terms,
            token=secrets.token_hex(),
        )
        self._worker: Worker | None = None
        self._engine: TransferEngine | None = None
        self._layers: dict[str, int] = {}
        self._events: deque[tuple[torch.cuda.Event, int, list[Step]]] = deque()
        self._report = Report()

    # ------------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open an engine beside the cache's device, and add every tensor to it."""
        rank, tp = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        device = next(iter(kv_caches.values())).device
        self._engine = open_engine(
            str(self._extra.get("backend", "auto")),
            device=None if device.type == "cpu" else str(device),
            name=f"{self._name}/{rank}",
            **dict(self._extra.get("backend_options", {})),
        )
        model = self._vllm_config.model_config
        blocks = KvBlocks(self._engine, tp=tp, rank=rank)
        for number, group in enumerate(self._kv_cache_config.kv_cache_groups):
            for name in group.layer_names:
                spec = group.kv_cache_spec
                spec = getattr(spec, "kv_cache_specs", {}).get(name, spec)
                self._layers[name] = extract_layer_index(name)
                for suffix, view, axes in views_of(
                    kv_caches[name],
                    nblocks=self._kv_cache_config.num_blocks,
                    heads=spec.num_kv_heads,
                    tokens=spec.block_size,
                    what=name,
                ):
                    blocks.add(
                        name + suffix,
                        self._layers[name],
                        view,
                        axes,
                        heads=1 if model.use_mla else model.get_total_num_kv_heads(),
                        group=number,
                    )
        self._worker = Worker(blocks, self._terms)
        logger.info("TepConnector: %s", self._engine.explain())

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self._worker is None:
            return None
        return TepHandshake(self._worker.address)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Wait until nothing reads the blocks of preempted requests.

        It returns when the fabric has ended every row in flight; until then new contents of the
        blocks would be sent as the preempted request's.

        Raises:
            WaitTimeout: a NIC still reads blocks after `load_s`; this worker cannot go on.
        """
        if self._worker is not None:
            self._worker.stop_all(kv_connector_metadata.orders)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.obey(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: loads were begun with the step's metadata."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs only when its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Note a layer that was computed, or submitted to the GPU."""
        worker = self._worker
        if worker is None or not worker.steps:
            return
        layer = self._layers[layer_name]
        if kv_layer.device.type == "cpu":
            worker.layer_saved(layer)
        else:
            event = torch.cuda.Event()
            event.record()
            self._events.append((event, layer, worker.steps))

    def wait_for_save(self) -> None:
        """Send the layers whose kernels have ended; the others follow, and keep their blocks."""
        while self._worker is not None and self._events and self._events[0][0].query():
            _, layer, steps = self._events.popleft()
            self._worker.layer_saved(layer, steps)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        self.wait_for_save()
        report = self._report = self._worker.poll()
        return KVConnectorTransferResults(report.sent, report.received, report.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the incomplete blocks of the loads that were just reported."""
        several = len(self._kv_cache_config.kv_cache_groups) > 1
        return set() if several else self._report.bad

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        rest = self._report.rest()
        return None if rest is None else TepReport(rest)

    def shutdown(self) -> None:
        """Close the engine, if this is a worker's."""
        engine, self._engine, self._worker = self._engine, None, None
        if engine is not None:
            engine.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return True: layers are sent one by one, so their hooks must run."""
        return True

    # ------------------------------------------------------------------ scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        found = [metadata[key] for key in sorted(metadata)]
        self._scheduler.ranks = tuple(one.address for one in found)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the pool in which blocks in doubt are kept out of use."""
        self._scheduler.pool = gpu_block_pool

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def on_new_request(self, request: Any) -> None:
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return TepMetadata(self._scheduler.orders(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        report = meta.report if isinstance(meta, TepReport) else None
        self._scheduler.reported(report, connector_output.finished_recving or ())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note a request that has ended, if there is one group."""
        return self._scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self._scheduler.pending

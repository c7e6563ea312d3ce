"""A tensor transport of Ray on tep: only this module and `cluster` know Ray.

The receiver reads the sender's tensors by one-sided reads; an aborted transfer is cancelled, so Ray
kills no actor because of one. Written against Ray 2.60, whose interface is marked alpha.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.exceptions import RayDirectTransportError
from ray.experimental import register_tensor_transport
from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    FetchRequest,
    TensorTransportManager,
    TensorTransportMetadata,
)

from tep import TepError, UsageError, WaitTimeout
from tep.compat.engines import engine_of
from tep.integrations.ray.pulling import Pull, Puller

__all__ = ["NAME", "TepFetch", "TepMetadata", "TepTransport", "register"]

NAME = "TEP"


def register() -> None:
    """Register the transport "TEP" with Ray.

    Call it before a class of actors names it, in the process that makes the actors.
    """
    try:
        register_tensor_transport(NAME, ["cuda", "cpu"], TepTransport, torch.Tensor)
    except ValueError as error:
        if "already registered" not in str(error):
            raise


@dataclass(eq=False)
class TepMetadata(TensorTransportMetadata):  # type: ignore[misc]  # Ray is not typed here
    """The metadata for a receiver: a descriptor of each tensor; b"" for one without elements."""

    descs: tuple[bytes, ...] = ()


@dataclass(eq=False)
class TepFetch(FetchRequest):  # type: ignore[misc]  # Ray is not typed here
    """A transfer in progress, or None: there was nothing to move."""

    pull: Pull | None = field(default=None)


class TepTransport(TensorTransportManager):  # type: ignore[misc]  # Ray is not typed here
    """Moves tensors between actors, and from actors to a driver.

    The engine is opened when it is first needed: TEP_RAY_BACKEND names its backend (default
    "auto"), TEP_RAY_OPTIONS its options as JSON. All processes need backends that reach each other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._puller: Puller | None = None
        self._able: set[str] = set()

    def tensor_transport_backend(self) -> str:
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def puller(self, device: str = "cpu") -> Puller:
        """Return this process's Puller; if it is opened now, with an engine beside this device."""
        with self._lock:
            if self._puller is None:
                options = {"device": device} if device.startswith("cuda") else {}
                self._puller = Puller(engine_of("TEP_RAY", **options))
            return self._puller

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        name = actor._actor_id.hex()
        if name not in self._able:
            call = actor.__ray_call__.options(concurrency_group="_ray_system")
            if not ray.get(call.remote(_opens)):
                return False
            self._able.add(name)
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> TepMetadata:
        tensors = [_checked(tensor, rdt_object[0]) for tensor in rdt_object]
        for device in {str(tensor.device) for tensor in tensors if tensor.is_cuda}:
            torch.cuda.synchronize(device)  # kernels that write them may still run
        descs: list[bytes] = []
        if tensors:
            puller = self.puller(str(tensors[0].device))
            pieces = [(t.data_ptr(), t.numel() * t.element_size(), _bytes(t)) for t in tensors]
            descs = puller.offer(obj_id, pieces)
        return TepMetadata(
            tensor_meta=[(tensor.shape, tensor.dtype) for tensor in tensors],
            tensor_device=tensors[0].device.type if tensors else None,
            descs=tuple(descs),
        )

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata:
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        fetch = self.fetch_multiple_tensors(
            obj_id, tensor_transport_metadata, communicator_metadata, target_buffers
        )
        return self.wait_fetch_complete(fetch)

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> TepFetch:
        meta = tensor_transport_metadata
        assert isinstance(meta, TepMetadata), meta
        tensors = list(target_buffers or [])
        if not tensors:
            for shape, dtype in meta.tensor_meta:
                tensors.append(torch.empty(shape, dtype=dtype, device=meta.tensor_device))
        pieces = [(d, _bytes(t)) for d, t in zip(meta.descs, tensors, strict=True) if d]
        if not pieces:
            return TepFetch(obj_id=obj_id, tensors=tensors)
        try:
            pull = self.puller(str(tensors[0].device)).pull(obj_id, pieces)
        except TepError as error:
            raise _failed(obj_id, error) from error
        return TepFetch(obj_id=obj_id, tensors=tensors, pull=pull)

    def wait_fetch_complete(self, fetch_request: FetchRequest, timeout: float = -1) -> list[Any]:
        assert isinstance(fetch_request, TepFetch), fetch_request
        if fetch_request.pull is not None:
            try:
                fetch_request.pull.wait(math.inf if timeout < 0 else timeout)
            except WaitTimeout:
                raise
            except TepError as error:
                raise _failed(fetch_request.obj_id, error) from error
        return list(fetch_request.tensors)

    def send_multiple_tensors(
        self,
        tensors: list[Any],
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        raise UsageError("the transport TEP is one-sided: receivers read, nobody sends")

    def garbage_collect(
        self, obj_id: str, tensor_transport_meta: TensorTransportMetadata, tensors: list[Any]
    ) -> None:
        if self._puller is not None:
            self._puller.withdraw(obj_id)

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        self.puller().abort(obj_id)


def _opens(_actor: Any) -> bool:
    """Return True if an engine opens in an actor; run there."""
    from ray.experimental.rdt.util import get_tensor_transport_manager

    try:
        get_tensor_transport_manager(NAME).puller()
    except TepError:
        return False
    return True


def _checked(tensor: Any, first: Any) -> Any:
    if tensor.device.type != first.device.type:
        raise ValueError(
            f"tensors of one object are on {first.device} and {tensor.device}; one kind of device "
            "is needed"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} is not contiguous; use contiguous()"
        )
    return tensor.detach()


def _bytes(tensor: Any) -> Any:
    """View a tensor's elements as a row of bytes, in the same memory."""
    return tensor.detach().view(-1).view(torch.uint8)


def _failed(obj_id: str, error: TepError) -> RayDirectTransportError:
    notes: Sequence[str] = getattr(error, "__notes__", ())
    text = "\n".join([f"{type(error).__name__}: {error}", *notes])
    return RayDirectTransportError(f"the transfer of object {obj_id} over tep failed: {text}")

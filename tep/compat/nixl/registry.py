"""The registry of an agent: its backends, its memory, metadata of others, descriptor lists.

Rule: the lock guards everything; a thread that holds it calls no verb that waits for the engine's
thread.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from tep import (
    Access,
    BadDescriptor,
    BusyError,
    MrHandle,
    NetAddr,
    TepError,
    TransferEngine,
    UsageError,
)
from tep.compat.nixl import bindings as nixlBind
from tep.compat.nixl.bindings import DEFAULT_COMM_PORT, nixl_mem_t
from tep.compat.nixl.channel import Channel, Channels
from tep.compat.nixl.listener import Listener
from tep.compat.nixl.transfers import Side
from tep.compat.nixl.wire import (
    Body,
    Forget,
    Give,
    Load,
    Metadata,
    Region,
    Remote,
    encode,
    find_regions,
)

__all__ = ["MEMS", "PARAMS", "PLUGINS", "Registry", "raw_of", "text_of"]

logger = logging.getLogger("tep.compat.nixl")

PLUGINS = ("UCX", "LIBFABRIC", "TEP")
"""Names by which programs ask for a network backend; all stand for the agent's one engine."""

PARAMS: Final = {"ucx_devices": "", "num_workers": "1", "ucx_error_handling_mode": "peer"}
"""Parameters of NIXL's UCX, without effect: tep's options come from TEP_NIXL_OPTIONS."""

MEMS: Final = ("DRAM_SEG", "VRAM_SEG")

_ACCESS: Final = Access.SOURCE_AND_TARGET | Access.READABLE

_NOTHING: Final = np.zeros(1, np.uint8)

_LOST_S = 30.0
"""Silence after which an agent is lost, seconds; a process that loads a model is silent long."""


class Registry:
    """The half of an agent that transfers nothing; the lock guards everything."""

    _listener: Listener

    def __init__(self, name: str, engine: TransferEngine, channels: Channels) -> None:
        self.name, self.engine, self.channels = name, engine, channels
        self.backends: dict[str, int] = {}
        self.plugin_list = list(PLUGINS)
        self.nixl_mems = {
            "DRAM": nixlBind.DRAM_SEG, "VRAM": nixlBind.VRAM_SEG, "FILE": nixlBind.FILE_SEG,
            "BLOCK": nixlBind.BLK_SEG, "OBJ": nixlBind.OBJ_SEG, "cpu": nixlBind.DRAM_SEG,
            "cuda": nixlBind.VRAM_SEG,
        }  # fmt: skip
        self.lock = channels.lock
        self._regions: dict[tuple[int, int, int, int], list[tuple[Region, MrHandle]]] = {}
        self.remotes: dict[str, Remote] = {}

    def _forget(self, remote: Remote) -> None:
        """Fail the requests to a removed agent; called under the lock."""

    # ------------------------------------------------------------------ backends

    def get_plugin_list(self) -> list[str]:
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        return list(MEMS) if backend in PLUGINS else []

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        """Return the parameters of NIXL's UCX, which have no effect here."""
        return dict(PARAMS) if backend in PLUGINS else {}

    def get_backend_mem_types(self, backend: str) -> list[str]:
        return self.get_plugin_mem_types(backend) if backend in self.backends else []

    def get_backend_params(self, backend: str) -> dict[str, str]:
        """Return no parameters; see get_plugin_params."""
        return {}

    def create_backend(self, backend: str, initParams: dict[str, str] = {}) -> None:
        """Add one more name of the engine."""
        if backend in self.backends:
            raise nixlBind.nixlInvalidParamError(f"backend {backend!r} exists already")
        if backend not in PLUGINS:
            raise nixlBind.nixlNotFoundError(f"backend {backend!r}; there are {PLUGINS}")
        self.backends[backend] = 1 + len(self.backends)

    def _check_backends(self, backends: Sequence[str]) -> None:
        for backend in backends:
            self.backends[backend]  # NIXL raises KeyError, too

    # ------------------------------------------------------------------ memory

    def register_memory(
        self,
        reg_list: Any,
        mem_type: str | None = None,
        backends: list[str] = [],
    ) -> nixlBind.nixlRegDList:
        descs: nixlBind.nixlRegDList | None = self.get_reg_descs(reg_list, mem_type)
        self._check_backends(backends)
        if descs is None:
            raise TypeError(f"register_memory: {reg_list!r} is no memory")
        mem, made = descs.getType(), []
        if mem not in {nixlBind.DRAM_SEG, nixlBind.VRAM_SEG}:
            raise nixlBind.nixlNotSupportedError(f"memory of kind {mem.name}")
        try:
            for start, nbytes, device, _ in descs:
                place = "cpu" if mem == nixlBind.DRAM_SEG else f"cuda:{device}"
                memory = (start, nbytes, place) if nbytes else _NOTHING  # rows in it have no bytes
                mr, desc = self.engine.reg_mr(memory, access=_ACCESS)
                made.append((Region(int(mem), start, nbytes, device, desc.to_bytes()), mr))
        except TepError as error:
            for _, mr in made:
                self.engine.deregister(mr)
            raise nixlBind.nixlBackendError(str(error)) from error
        with self.lock:
            for entry in made:
                self._keep(entry)
        return descs

    def _keep(self, entry: tuple[Region, MrHandle]) -> None:
        """Add a region; under the lock."""
        self._regions.setdefault(entry[0].key, []).append(entry)

    def _held(self) -> list[tuple[Region, MrHandle]]:
        with self.lock:
            return [entry for same in self._regions.values() for entry in same]

    def deregister_memory(
        self,
        dereg_list: nixlBind.nixlRegDList,
        backends: list[str] = [],
    ) -> None:
        self._check_backends(backends)
        mem = int(dereg_list.getType())
        for start, nbytes, device, *_ in dereg_list:
            key = mem, start, nbytes, device
            with self.lock:
                if key not in self._regions:
                    raise nixlBind.nixlNotFoundError(f"{nbytes} bytes at {start:#x}")
                found = self._regions[key].pop()
                if not self._regions[key]:
                    del self._regions[key]
            try:
                self.engine.deregister(found[1])
            except BusyError as error:
                with self.lock:
                    self._keep(found)
                raise nixlBind.nixlBackendError(str(error)) from error

    def query_memory(
        self, reg_list: Any, backend: str, mem_type: str | None = None
    ) -> list[dict[str, str] | None]:
        """Raise NIXL's error: it is for storage, which is not supported."""
        if backend not in self.backends:
            raise ValueError(f"Backend '{backend}' not found. Available: {list(self.backends)}")
        raise nixlBind.nixlNotSupportedError("query_memory is for storage")

    # ------------------------------------------------------------------ agents

    def get_agent_metadata(self) -> bytes:
        """Return the metadata by which a peer reaches this agent and its memory."""
        return encode(self._metadata())

    def _metadata(self) -> Metadata:
        regions = tuple(region for region, _ in self._held())
        return Metadata(self.name, self.channels.raw, regions, False)

    def get_partial_agent_metadata(
        self,
        descs: nixlBind.nixlRegDList,
        inc_conn_info: bool = False,
        backends: list[str] = [],
    ) -> bytes:
        """Return the same for some of the memory."""
        self._check_backends(backends)
        known = [region for region, _ in self._held()]
        rows = descs.rows()
        where = find_regions(known, int(descs.getType()), rows)
        exact = [
            k >= 0 and (known[k].start, known[k].nbytes) == (row[0], row[1])
            for k, row in zip(where.tolist(), rows.tolist(), strict=True)
        ]
        if not all(exact):
            raise nixlBind.nixlNotFoundError(f"{descs!r}: not registered like this")
        addr = self.channels.raw if inc_conn_info else b""
        regions = tuple(known[k] for k in where.tolist())
        return encode(Metadata(self.name, addr, regions, True))

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Add an agent, or more of its memory; return its name as bytes, like NIXL."""
        try:
            found = Remote.read(metadata)
            if found.name == self.name:
                raise nixlBind.nixlInvalidParamError("this agent's own metadata, or its name")
            with self.lock:
                remote = self.remotes.get(found.name)
                addr = NetAddr.from_bytes(found.addr).by_address() if found.addr else None
                if remote is None or (addr is not None and remote.addr not in {None, addr}):
                    remote = Remote(found.name)  # another incarnation
                remote.learn(found)
                self.remotes[found.name] = remote
                if addr is not None:
                    self.channels.introduce(found.name, addr)
        except BadDescriptor as error:
            raise nixlBind.nixlMismatchError(str(error)) from error
        if addr is not None:
            # Refused if there are no control messages, or the agent is watched already.
            with contextlib.suppress(UsageError, BusyError):
                self.engine.watch_peer(addr, every_s=1.0, lost_after_s=_LOST_S)
        return found.name.encode()

    def remove_remote_agent(self, agent: str | bytes) -> None:
        """Forget an agent; its open transfers fail."""
        self.forget(text_of(agent))

    def forget(self, name: str) -> bool:
        """Forget an agent, same as remove_remote_agent; return whether it was known."""
        with self.lock:
            remote = self.remotes.pop(name, None)
            if remote is not None:
                self._forget(remote)
                self.channels.forget(remote.name)
            return remote is not None

    def check_remote_metadata(
        self, agent: str | bytes, descs: nixlBind.nixlXferDList | None = None
    ) -> bool:
        """Return True if an agent is known, with the given memory."""
        with self.lock:
            remote = self.remotes.get(text_of(agent))
            if remote is None or remote.addr is None:
                return False
            regions = [region for region, _ in remote.regions]
        if descs is None:
            return True
        return bool((find_regions(regions, int(descs.getType()), descs.rows()) >= 0).all())

    def make_connection(self, remote_agent: str | bytes, backends: list[str] = []) -> None:
        self._check_backends(backends)
        self.engine.add_peer_group([self._addr(self._remote(remote_agent))])

    def _remote(self, agent: str | bytes) -> Remote:
        with self.lock:
            remote = self.remotes.get(text_of(agent))
            if remote is None and text_of(agent) == self.name:
                remote = Remote(self.name)
                remote.learn(self._metadata())
        if remote is None:
            raise nixlBind.nixlNotFoundError(f"agent {text_of(agent)!r} is not known")
        return remote

    @staticmethod
    def _addr(remote: Remote) -> NetAddr:
        if remote.addr is None:
            raise nixlBind.nixlNotFoundError(f"{remote.name!r}: no connection info in its metadata")
        return remote.addr

    def _channel(self, remote: Remote) -> Channel:
        return self.channels.to(remote.name, self._addr(remote))

    # ------------------------------------------------------------------ metadata over sockets

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Send this agent's metadata to an agent that listens there."""
        self._call(ip_addr, port, Load(self.get_agent_metadata()))

    def send_partial_agent_metadata(
        self,
        descs: nixlBind.nixlRegDList,
        inc_conn_info: bool = False,
        backends: list[str] = [],
        ip_addr: str = "",
        port: int = DEFAULT_COMM_PORT,
        label: str = "",
    ) -> None:
        """Send the metadata of some memory, likewise."""
        call = Load(self.get_partial_agent_metadata(descs, inc_conn_info, backends))
        self._call(ip_addr, port, call)

    def fetch_remote_metadata(
        self,
        remote_agent: str,
        ip_addr: str = "",
        port: int = DEFAULT_COMM_PORT,
        label: str = "",
    ) -> None:
        """Ask the agent that listens there for its metadata, and add it when it comes."""
        self._call(ip_addr, port, Give())

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Ask the agent that listens there to forget this one."""
        self._call(ip_addr, port, Forget(self.name))

    def meet(self, ip_addr: str, port: int) -> str:
        """Add the agent that listens there, and return its name. Not part of NIXL's interface.

        Raises:
            OSError, TepError: nobody answers there.
        """
        return self.add_remote_agent(self._listener.ask(ip_addr, port, Give())).decode()

    def itself(self) -> Remote:
        """Return this agent as others know it. Not part of NIXL's interface."""
        return self._remote(self.name)

    def _call(self, host: str, port: int, call: Body) -> None:
        if not host:
            raise nixlBind.nixlInvalidParamError("an address is needed: tep has no metadata server")
        self._listener.call(host, port, call, self.add_remote_agent)

    def _called(self, call: Body) -> bytes:
        match call:
            case Load():
                self.add_remote_agent(call.metadata)
            case Forget():
                self.remove_remote_agent(call.name)
            case Give():
                return self.get_agent_metadata()
        return b""

    def prep_mem_view(
        self,
        dlist: nixlBind.nixlXferDList | nixlBind.nixlRemoteDList,
        *,
        backends: list[str] | None = None,
    ) -> int:
        """Raise NIXL's error: kernels cannot start transfers of tep."""
        raise nixlBind.nixlNotSupportedError("memory views of kernels")

    def get_remote_descs(self, descs: Any, mem_type: str | None = None) -> Any:
        """Raise NIXL's error: only memory views take such lists."""
        raise nixlBind.nixlNotSupportedError("memory views of kernels")

    def release_mem_view(self, mvh: int) -> None:
        """Raise NIXL's error; see prep_mem_view."""
        raise nixlBind.nixlNotSupportedError("memory views of kernels")

    # ------------------------------------------------------------------ descriptors

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> Any:
        """Make a transfer list of tuples, tensors or an array of three columns; None: neither."""
        return self._descs(descs, mem_type, nixlBind.nixlXferDList, nixlBind.nixlRegDList)

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> Any:
        """Make a registration list, likewise."""
        return self._descs(descs, mem_type, nixlBind.nixlRegDList, nixlBind.nixlXferDList)

    def _descs(self, descs: Any, mem_type: str | None, kind: Any, other: Any) -> Any:
        if isinstance(descs, kind):
            return descs
        if isinstance(descs, other):
            logger.error("%s given in place of %s", other.__name__, kind.__name__)
            return None
        torch = sys.modules.get("torch")
        tensors = [descs] if torch and isinstance(descs, torch.Tensor) else descs
        if torch and len(tensors) and isinstance(tensors[0], torch.Tensor):
            return self._tensors(tensors, kind)
        if isinstance(descs, np.ndarray):
            fits = descs.ndim == 2 and descs.shape[1] == 3
        else:
            fits = isinstance(descs[0], tuple) and len(descs[0]) == kind._WIDTH
        if mem_type is None or not fits:
            need = "a memory type" if mem_type is None else f"rows of {kind._WIDTH}"
            logger.error("descriptors of type %s need %s", type(descs).__name__, need)
            return None
        return kind(self.nixl_mems[mem_type], descs)

    @staticmethod
    def _tensors(tensors: Any, kind: Any) -> Any:
        devices = {tensor.get_device() for tensor in tensors}
        if len(devices) != 1 or not all(tensor.is_contiguous() for tensor in tensors):
            logger.error("tensors have to be contiguous, and on one device")
            return None
        device = devices.pop()
        rows = [(t.data_ptr(), t.numel() * t.element_size(), max(device, 0)) for t in tensors]
        mem = nixlBind.DRAM_SEG if device == -1 else nixlBind.VRAM_SEG
        return kind(mem, [(*row, *kind._rest()) for row in rows])

    def get_serialized_descs(self, descs: Any) -> bytes:
        return pickle.dumps(descs)

    def deserialize_descs(self, serialized_descs: bytes) -> Any:
        """Unpickle a list from a trusted peer, like NIXL."""
        return pickle.loads(serialized_descs)

    def _side(self, remote: Remote | None, mem: nixl_mem_t, rows: nixlBind.Rows) -> Side:
        """Find the region of each row."""
        with self.lock:
            held = self._held() if remote is None else list(remote.regions)
        where = find_regions([region for region, _ in held], int(mem), rows)
        if (where < 0).any():
            start, nbytes, device = rows[int(np.argmax(where < 0))].tolist()
            whose = "here" if remote is None else f"by agent {remote.name!r}"
            raise nixlBind.nixlNotFoundError(
                f"{nbytes} bytes at {start:#x} of device {device} are not registered {whose}"
            )
        return Side(remote, rows, where, held)


def text_of(name: str | bytes) -> str:
    """Return an agent's name as text; programs pass the bytes that add_remote_agent returned."""
    return name if isinstance(name, str) else name.decode()


def raw_of(message: str | bytes) -> bytes:
    """Return a notification as bytes."""
    return message.encode() if isinstance(message, str) else bytes(message)

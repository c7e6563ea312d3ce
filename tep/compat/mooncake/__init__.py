"""Mooncake's Python TransferEngine on tep, over an agent of tep.compat.nixl.

Unmodified programs: `python -m tep.compat.mooncake -- COMMAND`. TEP_NIXL_BACKEND names the backend,
TEP_NIXL_OPTIONS its options. Engines meet by P2PHANDSHAKE, at `HOST:get_rpc_port()`; there is no
metadata server. Memory of a GPU needs its location, "cuda:N". Errors are logged, and -1, as there.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partialmethod
from typing import Any, Final

import numpy as np

from tep import TepError
from tep.compat.nixl import bindings, nixl_agent, nixl_agent_config, nixl_xfer_handle

__all__ = ["TransferEngine", "TransferNotify", "TransferOpcode"]

logger = logging.getLogger("tep.compat.mooncake")

_FAULTS: Final = (bindings.Error, TepError, OSError, ValueError, TypeError, LookupError)
_WAIT_S: Final = 30.0
_BYTES_PER_S: Final = 1 << 30
_MEMS: Final = ("DRAM", "VRAM")


class TransferOpcode(IntEnum):
    """The direction of a transfer."""

    Read = 0
    Write = 1


_Opcode = TransferOpcode


@dataclass
class TransferNotify:
    """A notification."""

    name: str = ""
    msg: str = ""


class TransferEngine:
    """An engine with Mooncake's calls; they return 0, or -1 after a line in the log."""

    TransferOpcode = TransferOpcode
    _agent: nixl_agent

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # of the agents, by HOST:PORT
        self._owned: dict[int, Any] = {}  # registered, by address
        self._managed: dict[int, Any] = {}
        self._open: dict[int, nixl_xfer_handle] = {}
        self._numbers = itertools.count(1)
        self._limit_s = max(5.0, float(os.environ.get("MC_TRANSFER_TIMEOUT", _WAIT_S)))

    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str
    ) -> int:
        """Open the engine; the backend is tep's choice, whatever the protocol."""
        if metadata_server != "P2PHANDSHAKE":
            logger.error("metadata server %r: tep knows P2PHANDSHAKE only", metadata_server)
            return -1

        def start() -> None:
            config = nixl_agent_config(enable_listen_thread=True, listen_port=0)
            self._agent = nixl_agent(f"{local_hostname} {uuid.uuid4().hex[:12]}", config)

        return _tried(start)

    def get_rpc_port(self) -> int:
        """Return the port at which other engines find this one."""
        return int(self._agent.listen_port or 0)

    def close(self) -> None:
        """Close the engine. Not part of Mooncake's interface."""
        self._agent.close()

    # ------------------------------------------------------------------ memory

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Register memory, for transfers from here and from other engines."""

        def register() -> None:
            device = location.partition(":")[2] if location.startswith("cuda") else ""
            rows = [(buffer_addr, capacity, int(device or 0), "")]
            self._owned[buffer_addr] = self._agent.register_memory(rows, _MEMS[bool(device)])

        return _tried(register)

    def unregister_memory(self, buffer_addr: int) -> int:
        found = self._owned.pop(buffer_addr, None)
        if found is None:
            logger.error("no memory was registered at %#x", buffer_addr)
            return -1
        return _tried(lambda: self._agent.deregister_memory(found))

    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        pairs = zip(buffer_addresses, capacities, strict=True)
        return min([self.register_memory(*pair, location) for pair in pairs], default=0)

    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        return min([self.unregister_memory(one) for one in buffer_addresses], default=0)

    def allocate_managed_buffer(self, length: int) -> int:
        """Allocate and register memory; return its address, or 0."""
        memory = np.zeros(length, np.uint8)
        self._managed[memory.ctypes.data] = memory
        return 0 if self.register_memory(memory.ctypes.data, length) else int(memory.ctypes.data)

    def free_managed_buffer(self, buffer_addr: int, length: int) -> int:
        """Give such memory back."""
        status = self.unregister_memory(buffer_addr)
        self._managed.pop(buffer_addr, None)
        return status

    def write_bytes_to_buffer(self, dest_address: int, src: bytes, length: int) -> int:
        """Copy bytes to an address of this process."""
        ctypes.memmove(dest_address, src, length)
        return 0

    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes:
        """Copy bytes from an address of this process."""
        return ctypes.string_at(source_address, length)

    def get_first_buffer_address(self, segment_name: str) -> int:
        """Return the address of an engine's first memory, 0 if there is none."""
        found: list[int] = []
        _tried(lambda: found.extend(r.start for r, _ in self._remote(segment_name, True).regions))
        return found[0] if found else 0

    # ------------------------------------------------------------------ transfers

    def _remote(self, target: str, again: bool = False) -> Any:  # one caller
        """Return what is known of an engine; ask it if that is nothing, or if it may be old."""
        if again or target not in self._names:
            host, _, port = target.rpartition(":")
            if int(port) == self.get_rpc_port():
                return self._agent.itself()
            self._names[target] = self._agent.meet(host, int(port))
        return self._agent.remotes[self._names[target]]

    def _descs(self, addresses: Sequence[int], lengths: Sequence[int], mem: str) -> Any:
        rows = np.array([addresses, lengths, np.zeros(len(lengths))], np.int64).T
        return self._agent.get_xfer_descs(np.ascontiguousarray(rows), mem)

    def _begin(
        self,
        target: str,
        buffers: Sequence[int],
        peers: Sequence[int],
        lengths: Sequence[int],
        opcode: _Opcode,
        notify: TransferNotify | None = None,
    ) -> nixl_xfer_handle:
        told = b"" if notify is None else json.dumps([notify.name, notify.msg]).encode()
        name, op = self._remote(target).name, opcode.name.upper()
        for again, here, there in itertools.product((False, True), _MEMS, _MEMS):
            sides = self._descs(buffers, lengths, here), self._descs(peers, lengths, there)
            try:
                if again:  # it may have registered more since
                    name = self._remote(target, again).name
                handle = self._agent.initialize_xfer(op, *sides, name, told)
            except bindings.nixlNotFoundError:
                continue
            self._agent.transfer(handle)
            return handle
        raise bindings.nixlNotFoundError(f"memory that is not registered, here or at {target}")

    def _limit(self, lengths: Sequence[int]) -> float:
        return self._limit_s + sum(lengths) / _BYTES_PER_S

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Move several pieces, and wait for the end."""

        def move() -> None:
            if not buffers:
                return
            places = target_hostname, buffers, peer_buffer_addresses, lengths
            handle = self._begin(*places, opcode, notify)
            if self._agent.wait(handle, self._limit(lengths)) != "DONE":
                handle.release()
                raise TimeoutError(f"{sum(lengths)} bytes to or from {target_hostname}")

        return _tried(move)

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        places = [buffer], [peer_buffer_address], [length]
        return self.batch_transfer_sync(target_hostname, *places, opcode, notify)

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: _Opcode,
        transport_hint: str = "",
    ) -> int:
        """Begin to move several pieces; return the batch's number, 0 after an error."""
        number = next(self._numbers)

        def begin() -> None:
            places = target_hostname, buffers, peer_buffer_addresses, lengths
            self._open[number] = self._begin(*places, opcode)

        return 0 if _tried(begin) else number

    transfer_sync_write = partialmethod(transfer_sync, opcode=TransferOpcode.Write)
    transfer_sync_read = partialmethod(transfer_sync, opcode=TransferOpcode.Read)
    batch_transfer_sync_write = partialmethod(batch_transfer_sync, opcode=TransferOpcode.Write)
    batch_transfer_sync_read = partialmethod(batch_transfer_sync, opcode=TransferOpcode.Read)
    batch_transfer_async_write = partialmethod(batch_transfer_async, opcode=TransferOpcode.Write)
    batch_transfer_async_read = partialmethod(batch_transfer_async, opcode=TransferOpcode.Read)

    def transfer_submit_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Begin to write one piece; return its number, 0 after an error."""
        places = [buffer], [peer_buffer_address], [length]
        return self.batch_transfer_async(target_hostname, *places, TransferOpcode.Write)

    def transfer_check_status(self, batch_id: int) -> int:
        """Return 1 if a batch has ended, 0 if it is under way, -1 if it failed."""
        states: list[str] = []
        if _tried(lambda: states.append(self._agent.check_xfer_state(self._open[batch_id]))):
            self._open.pop(batch_id, None)
            return -1
        if states == ["DONE"]:
            del self._open[batch_id]
        return int(states == ["DONE"])

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Wait for the end of several batches."""

        def wait() -> None:
            for number in batch_ids:
                if self._agent.wait(self._open.pop(number), self._limit_s) != "DONE":
                    raise TimeoutError(f"batch {number}")

        return _tried(wait)

    def get_notifies(self) -> list[TransferNotify]:
        found = self._agent.get_new_notifs().values()
        return [TransferNotify(*json.loads(one)) for messages in found for one in messages]

    def send_probe(self, peer_server_name: str) -> int:
        """Ask whether an engine answers."""
        return _tried(lambda: self._remote(peer_server_name, True))


def _tried(work: Callable[[], object]) -> int:
    """Do something; an error is logged, and -1."""
    try:
        work()
    except _FAULTS as error:
        logger.warning("%s: %s", type(error).__name__, error)
        return -1
    return 0

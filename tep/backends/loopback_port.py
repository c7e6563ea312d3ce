"""The receiving half of a loopback NIC, which peers' threads touch, and the hub where it is found.

Rule 1: a sender's thread moves the bytes, holding the target's lock, so that nothing lands after
revoke() or shut() has returned. Rule 2: all else that crosses threads is one append to a deque, and
a call of the target's waker. Nothing here is posted, queued or completed.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from tep.backends import forks
from tep.backends.base import COMPLETION, Batch, Column, Kind, ReadBatch, ReadRow, Row, Status
from tep.backends.columns import Rows, pick
from tep.backends.handing import ReceivePool, Unread
from tep.backends.hostcopy import HostRegion, Offsets, copy_rows, offsets_within
from tep.backends.shuffle import Entry
from tep.base.errors import BadDescriptor

__all__ = ["NAME_BYTES_MAX", "NICS_MAX", "Hub", "Port", "check_address", "engine_of"]

NICS_MAX: Final = 64
NAME_BYTES_MAX: Final = 200

# An address: 0, 4 bytes b"LOOP"; 4, u64 the hub; 12, u64 epoch; 20, u16 NIC; 22, the engine's name
# in UTF-8. Integers are little-endian.
_ADDRESS: Final = struct.Struct("<4sQQH")
_MAGIC: Final = b"LOOP"

# Plain ints: to store an IntEnum costs numpy three times as much.
_OK: Final = int(Status.OK)
_IMM: Final = int(Kind.IMM)
_RECV: Final = int(Kind.RECV)


class Port:
    """What the peers of one NIC may reach.

    Attributes:
        address: in this incarnation.
        alive: False once the NIC is shut; written under the lock.
        waker: what to call when something has arrived.
        arrived: completions for the NIC's owner; peers append, the owner takes.
    """

    def __init__(self, hub: Hub, name: str, nic: int, epoch: int) -> None:
        self.name = name
        self.nic = nic
        self.epoch = epoch
        self.address = hub.address(name, nic, epoch)
        self.alive = True
        self.waker: Callable[[], None] = wake_nobody
        self.arrived: deque[Entry] = deque()
        self._hub = hub
        self._lock = threading.Lock()
        self._targets: dict[int, HostRegion] = {}
        self._readable: dict[int, HostRegion] = {}
        self._pool = ReceivePool()
        self._starved: dict[Port, None] = {}  # senders that found no free buffer
        self._sources: dict[bytes, int] = {}
        self._fenced: set[bytes] = set()
        self._unread = Unread(self.arrived.append)
        hub.attach(self)

    # --- on the senders' threads

    def carry_row(self, row: Row | ReadRow, peer: bytes) -> Status:
        """Write one row here, then hand over its immediate; or copy what a row reads.

        The memory at the peer's end has been checked.
        """
        with self._lock:
            if not self.alive or peer in self._fenced:
                return Status.UNREACHABLE
            if isinstance(row, ReadRow):
                region, there = self._readable.get(row.rkey), row.remote
            else:
                region, there = self._targets.get(row.rkey), row.dst
            if region is None and row.nbytes == 0:  # the immediate after a read (C9)
                region = self._readable.get(row.rkey)
            if region is None:
                return Status.REMOTE_KEY
            offset = there - region.base
            if not region.holds(offset, row.nbytes):
                return Status.REMOTE_RANGE
            if isinstance(row, ReadRow):
                ctypes.memmove(row.local, region.origin + offset, row.nbytes)
                return Status.OK
            ctypes.memmove(region.origin + offset, row.src, row.nbytes)
            if row.imm is None:
                return Status.OK
            # Within the lock: what is fenced out afterwards has been counted before.
            self._hand_over(row.imm, 1, peer)
        self.waker()
        return Status.OK

    def carry_rows(
        self, batch: Batch, rows: Rows, nrows: int, mine: HostRegion, here: Offsets, peer: bytes
    ) -> bool:
        """As carry_row() for rows of one length and key; False: one cannot be, none was carried.

        `mine` is the region at the peer's end, and `here` where in it each row is.
        """
        rkey, nbytes = batch.rkey, batch.nbytes
        assert isinstance(rkey, int)
        assert isinstance(nbytes, int)
        reads = isinstance(batch, ReadBatch)
        with self._lock:
            region = (self._readable if reads else self._targets).get(rkey)
            if region is None or peer in self._fenced:
                return False
            there = offsets_within(pick(batch.dst, rows), region.base, nbytes, region.nbytes)
            if there is None:
                return False
            if reads:
                copy_rows(region, there, mine, here, nbytes, nrows)
            else:
                copy_rows(mine, here, region, there, nbytes, nrows)
            if batch.imm is None:
                return True
            self._hand_over(pick(batch.imm, rows), nrows, peer)
        self.waker()
        return True

    def announce(self, imms: Column, count: int, sender: bytes = b"") -> None:
        """Hand over immediates whose bytes are here."""
        with self._lock:
            self._hand_over(imms, count, sender)
        self.waker()

    def _hand_over(self, imms: Column, count: int, sender: bytes) -> None:
        number = self._sources.setdefault(sender, len(self._sources))
        if isinstance(imms, int):
            self.arrived.append((_IMM, _OK, count, imms, 0, number, 0))
            return
        entries = np.zeros(count, COMPLETION)
        entries["kind"] = _IMM
        entries["count"] = 1
        entries["imm"] = imms
        entries["ctx"] = number
        self.arrived.append(entries)

    def take_control_in(self, payload: bytes, sender: bytes) -> Status:
        """Keep a control message for this NIC's engine."""
        with self._lock:
            if not self.alive:
                return Status.UNREACHABLE
            self._unread.add(payload, sender)
        self.waker()
        return Status.OK

    def take_message(self, payload: bytes, sender: Port) -> Status | None:
        """Put a message into a free buffer; None = there is none, the sender is woken then."""
        with self._lock:
            if not self.alive:
                return Status.UNREACHABLE
            if self._pool.never_fits(len(payload)):
                return Status.LENGTH
            found = self._pool.take(len(payload), sender.address)
            if found is None:
                self._starved[sender] = None
                return None
            slot, buffer = found
            buffer[: len(payload)] = payload
        self.arrived.append((_RECV, _OK, 1, 0, 0, slot, len(payload)))
        self.waker()
        return Status.OK

    # --- on the owner's thread

    def grant(self, rkey: int, region: HostRegion, *, readable: bool) -> None:
        """Let peers write to a region, where it is `writable`, and read it."""
        with self._lock:
            if region.writable:
                self._targets[rkey] = region
            if readable:
                self._readable[rkey] = region

    def revoke(self, rkey: int) -> None:
        """Let nobody write there any more, or read; what is being copied is finished first."""
        with self._lock:
            self._targets.pop(rkey, None)
            self._readable.pop(rkey, None)

    def source(self, number: int) -> bytes:
        """The address that a number in an immediate's entry stands for."""
        with self._lock:
            return list(self._sources)[number]

    def take_control(self, slot: int) -> tuple[bytes, bytes]:
        """A control message, and who sent it; once."""
        with self._lock:
            return self._unread.take(slot)

    def fence(self, sender: bytes) -> None:
        """Take no rows of one NIC any more; what it is writing now is finished first."""
        with self._lock:
            self._fenced.add(sender)

    def unfence(self, sender: bytes) -> None:
        """Take rows of a NIC again."""
        with self._lock:
            self._fenced.discard(sender)

    def add_buffers(self, nbytes: int, count: int) -> None:
        """Make the pool larger."""
        with self._lock:
            self._pool.add(nbytes, count)
        self._wake_starved()

    def view(self, slot: int) -> memoryview:
        """The message in a buffer."""
        return self._pool.view(slot)

    def message_from(self, slot: int) -> bytes:
        """The address of the NIC that sent it."""
        return self._pool.sender(slot)

    def give_back(self, slot: int) -> None:
        """Use a buffer again."""
        with self._lock:
            self._pool.give_back(slot)
        self._wake_starved()

    def shut(self) -> None:
        """Be unreachable from now on."""
        with self._lock:
            self.alive = False
            self._targets.clear()
            self._readable.clear()
        self._hub.detach(self)
        self._wake_starved()  # they have to learn that we are gone

    def orphan(self) -> None:
        """Be shut in a forked child. A thread that is not here may hold the lock: a new one."""
        self._lock = threading.Lock()
        self.alive = False
        self._targets.clear()
        self._readable.clear()
        self.arrived.clear()
        self.waker = wake_nobody

    def _wake_starved(self) -> None:
        with self._lock:
            starved, self._starved = self._starved, {}
        for sender in starved:
            sender.waker()


class Hub:
    """Where ports find each other by address: the cables of one process.

    It holds them weakly: a port lives as long as its engine, or a peer that has met it.

    Args:
        token: which hub an address belongs to, 64 bits; None = random, so that the addresses of
            other processes are strangers here.
    """

    def __init__(self, token: int | None = None) -> None:
        self._token = int.from_bytes(os.urandom(8), "little") if token is None else token
        self._epochs = itertools.count(1)
        self._by_address: weakref.WeakValueDictionary[bytes, Port] = weakref.WeakValueDictionary()
        self._latest: weakref.WeakValueDictionary[tuple[str, int], Port]
        self._latest = weakref.WeakValueDictionary()
        forks.hold(self)

    def next_epoch(self) -> int:
        """Number the next incarnation: larger than all before it on this hub."""
        return next(self._epochs)

    def address(self, name: str, nic: int, epoch: int) -> bytes:
        """Write down where a port is."""
        return _ADDRESS.pack(_MAGIC, self._token, epoch, nic) + name.encode()

    def attach(self, port: Port) -> None:
        """Make a port findable."""
        self._by_address[port.address] = port
        self._latest[port.name, port.nic] = port

    def detach(self, port: Port) -> None:
        """Forget a port; rows to it end UNREACHABLE, or STALE_PEER once its name is back."""
        self._by_address.pop(port.address, None)
        if self._latest.get((port.name, port.nic)) is port:
            del self._latest[port.name, port.nic]

    def find(self, address: bytes) -> Port | Status:
        """Return the port at an address, or why there is none."""
        found = self._by_address.get(address)
        if found is not None:
            return found
        _, token, epoch, nic = _ADDRESS.unpack_from(address)
        later = self._latest.get((address[_ADDRESS.size :].decode(), nic))
        if token == self._token and later is not None and later.epoch > epoch:
            return Status.STALE_PEER
        return Status.UNREACHABLE

    def orphan(self) -> None:
        """In a forked child: shut all ports, touching nothing that the parent's threads held."""
        for port in list(self._by_address.values()):
            port.orphan()
        self._by_address.clear()
        self._latest.clear()
        self._token ^= os.getpid() << 32  # the child's own ports are strangers to the parent's


def wake_nobody() -> None:
    """Wake nobody: the waker until one is set."""


def engine_of(address: bytes) -> bytes:
    """Return what the addresses of all NICs of one engine share: all of it but the NIC's number."""
    nic_at, nic_end = _ADDRESS.size - 2, _ADDRESS.size
    return address if len(address) < nic_end else address[:nic_at] + address[nic_end:]


def check_address(address: bytes) -> None:
    """Raise BadDescriptor for bytes that cannot be a loopback address."""
    if len(address) < _ADDRESS.size or address[:4] != _MAGIC:
        raise BadDescriptor(
            f"{address[:16]!r}... ({len(address)} bytes) is not a loopback address; is the peer's "
            "engine on another backend?"
        )
    try:
        name = address[_ADDRESS.size :].decode()
    except UnicodeDecodeError as error:
        raise BadDescriptor(f"loopback address: its name is not UTF-8: {error}") from error
    nic = _ADDRESS.unpack_from(address)[3]
    if nic >= NICS_MAX or not 1 <= len(name.encode()) <= NAME_BYTES_MAX:
        raise BadDescriptor(f"loopback address: NIC {nic} of {name!r} cannot be")

"""The queues of an EFA device as it maps them, and the entries that it reads and writes.

Requests of a batch are a few numpy assignments in a staging array, one copy into the mapped queue,
a store fence and one doorbell for each `max_batch` entries. Nothing here knows whose rows they are.

Rule 1: every store of an entry comes before the fence, the fence before the doorbell, and another
fence between that doorbell and the next entry: else the device may see more than `max_batch` of
them between two doorbells (rdma-core: mmio_wc_start at each start and after each batch). Rule 2: no
more requests are out than the queues hold, and the completion queue holds all of both: the device
looks at none of this. Rule 3: an entry's phase bit is looked at before the rest of it. Rule 4:
nothing is read from a work queue. On a device it is memory of the NIC, mapped for writing.

Source of the entries: providers/efa/efa_io_defs.h of rdma-core 64 (tx_wqe, rx_desc, cdesc_common,
tx_cdesc, rx_cdesc), written anew; tests/abi compares offsets and sizes with that header's. All
numbers are little-endian. Immediates too: libefa swaps them on their way to and from ibv_wr_*,
which take them in network byte order.

    work queue entry, 64 bytes (on some devices 128, whose second half a write leaves alone)
    offset  size  field     content
    0       2     req_id    comes back in the completion
    2       1     ctrl1     operation, bit 4 has an immediate, bit 7 always
    3       1     ctrl2     bit 0 phase; bits 2 and 3, first and last, always; bit 4 completion
    4       2     dest_qp   queue pair number there
    6       2     length    buffers: 1
    8       4     imm
    12      2     ah        number of the address handle
    14      2     hints     0
    16      4     qkey      of the queue pair there
    20      12              0
    32      16    remote    of a write: length, rkey, address
    48      16    local     of a write: length, lkey, address; of a message they stand at 32

A read looks as a write without an immediate.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import partial
from struct import Struct
from typing import Final

import numpy as np
import numpy.typing as npt

from tep.backends.base import Column
from tep.backends.common import new_fence, nothing
from tep.backends.efa.device import Nic, Place
from tep.backends.ffi.ibverbs import layout
from tep.base.errors import BackendUnavailable

__all__ = [
    "ALWAYS_1", "ALWAYS_2", "ARM", "COMPLETION_ENTRY", "HAS_IMM", "KINDS", "LKEY_MASK",
    "OP_READ", "OP_SEND", "OP_WRITE", "RX_ALWAYS", "RX_ENTRY", "TX_ENTRY", "Columns", "Entries",
    "Numbers", "fences",
]  # fmt: skip

TX_ENTRY: Final = layout(
    64,
    "req_id <u2 0, ctrl1 u1 2, ctrl2 u1 3, dest_qp <u2 4, length <u2 6, imm <u4 8, ah <u2 12, "
    "qkey <u4 16, remote_length <u4 32, rkey <u4 36, remote_addr <u8 40, local_length <u4 48, "
    "lkey <u4 52, local_addr <u8 56, send_length <u4 32, send_lkey <u4 36, send_addr <u8 40",
)
OP_SEND: Final = 0
OP_READ: Final = 1
OP_WRITE: Final = 2
HAS_IMM: Final = 1 << 4
ALWAYS_1: Final = 1 << 7
"""ctrl1: this is a meta descriptor."""
ALWAYS_2: Final = 1 << 2 | 1 << 3 | 1 << 4
"""ctrl2: first and last of its request, which is to end in a completion."""
LKEY_MASK: Final = (1 << 24) - 1

RX_ENTRY: Final = layout(16, "addr <u8 0, req_id <u2 8, length <u2 10, lkey_ctrl <u4 12")
RX_ALWAYS: Final = 1 << 30 | 1 << 31
"""lkey_ctrl: first and last descriptor of its request."""

COMPLETION_ENTRY: Final = layout(
    16,
    "req_id <u2 0, status u1 2, flags u1 3, qp <u2 4, length <u2 6, ah <u2 8, src_qp <u2 10, "
    "imm <u4 12",
)
"""flags: bit 0 phase, bits 1 and 2 the queue (1 send, 2 receive), bit 3 has an immediate, bits 4 to
6 the operation, bit 7 unsolicited. From `length` on only of receives; entries of 32 bytes go on."""

KINDS: Final = layout(16, "kind <u2 2")
"""A completion's status and flags as one number: status, flags << 8."""

ARM: Final = 1 << 31
"""The completion queue's doorbell: wake me; bits 29 and 30 count, the low 16 are the consumer's.
Source: efa_io_regs_defs.h."""


Numbers = npt.NDArray[np.integer]
Entries = npt.NDArray[np.void]
Imms = Column | None
Ends = tuple[Place, int, int, int]
"""The ends of a batch of rows: the peer's place, local key, remote key; and the operation."""


_ONE: Final = Struct("<HBBHHIHHI12xIIQIIQ")
_PHASE: Final = 1
_READ_MAX: Final = 2048
_RUN_MIN: Final = 32  # entries of one kind that are worth being taken by themselves
_WINDOW_MIN: Final = 64

_TAKEN = ctypes.c_int()
"""A lock that nobody waits for."""

Fence = Callable[[], object]


def fences(nic: Nic) -> tuple[Fence, Fence, str]:
    """The fence between entries and doorbell, that between a phase bit and its entry, and the name.

    x86-64. The send queue is mapped write-combining: its stores wait in buffers of the core. A
    locked instruction empties these before it is done (Intel SDM 3A 12.3.1, AMD APM 2 7.4.2), as
    the `sfence` of rdma-core does. pthread_spin_trylock of libc is one `lock cmpxchg`, on a lock of
    ours that is always taken. Loads are never reordered with loads, so that reading needs none.

    aarch64. Every fence of libc, and a lock, is `dmb ish` or less, which orders nothing for
    a device outside of the inner shareable domain. rdma-core uses `dsb st`, and executes it at the
    start of each posting session: ibv_wr_start and ibv_wr_abort, a session without requests, is
    that fence, and changes nothing. Between loads the fence of tep.backends.common suffices:
    completions are in ordinary memory of this host. Not verified, for want of a machine.
    """
    machine = platform.machine()
    if machine == "x86_64":
        libc = ctypes.CDLL(None)
        # int pthread_spin_trylock(pthread_spinlock_t *lock);
        trylock = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(
            ctypes.cast(libc.pthread_spin_trylock, ctypes.c_void_p).value or 0
        )
        at = ctypes.addressof(_TAKEN)
        trylock(at)  # taken from now on
        return partial(trylock, at), nothing, "pthread_spin_trylock"
    if machine == "aarch64":
        start, abort = nic.session_calls()

        def session() -> object:
            start(nic.qp)
            return abort(nic.qp)

        return session, new_fence(), "an empty posting session"
    raise BackendUnavailable(f"no store fence is known for {machine}")


class Columns:
    """The mapped queues of one NIC.

    Attributes:
        batch_max: entries between two doorbells; `device_batch_max` is the device's own limit.
        more: the last poll stopped before the first entry that is not there yet.
        kind: status and flags of all entries of the last poll, as in KINDS; None = several kinds.
    """

    def __init__(self, nic: Nic) -> None:
        send, receive = nic.work_queues()
        done = nic.completion_queue()
        _check(send.entry_size, (64, 128), "entries of the send queue", "bytes")
        _check(receive.entry_size, (16,), "entries of the receive queue", "bytes")
        _check(done.entry_size, (16, 32), "completions", "bytes")
        for name, one in (("send", send), ("receive", receive), ("completion", done)):
            if not one.buffer or one.num_entries & (one.num_entries - 1) or not one.num_entries:
                raise BackendUnavailable(
                    f"the {name} queue has {one.num_entries} entries at {one.buffer}"
                )
        if done.num_entries < send.num_entries + receive.num_entries:
            raise BackendUnavailable(
                f"{done.num_entries} completions cannot hold those of {send.num_entries} and "
                f"{receive.num_entries} requests"
            )
        self._nic = nic
        self.more = False
        self.kind: int | None = None
        self._fence, self._load_fence, fence = fences(nic)
        most = max(1, min(send.max_batch or send.num_entries, send.num_entries))
        self.batch_max = self.device_batch_max = most
        self.name = f"at most {self.batch_max} entries a doorbell, fence {fence}"
        self._map_send(send.buffer, send.entry_size, send.num_entries, send.doorbell)
        self._map_receive(receive.buffer, receive.num_entries, receive.doorbell)
        self._map_completions(done.buffer, done.entry_size, done.num_entries, done.doorbell)

    def _map_send(self, buffer: int, width: int, size: int, bell: int) -> None:
        self._width, self._mask = width, size - 1
        self._ring = _mapped(buffer, width * size)
        self._bell = _register(bell)
        self._pc = 0
        stage = np.zeros(size * width, np.uint8)
        self._stage = memoryview(stage)  # type: ignore[arg-type]  # numpy has the buffer protocol
        rows = np.ndarray(size, TX_ENTRY, stage.data, strides=(width,))
        rows["length"] = 1
        self._rows = rows
        names = ("req_id", "local_addr", "remote_addr", "imm", "ctrl2")
        self._ids, self._src, self._dst, self._imms, self._ctrl2 = (rows[name] for name in names)
        self._lengths = rows["local_length"], rows["remote_length"]
        self._same: tuple[object, ...] = ()
        self._same_rows = 0
        self._phased = (-1, 0)  # the phase that the first rows of the stage have
        self._lone = bytearray(width)

    def _map_receive(self, buffer: int, size: int, bell: int) -> None:
        ring = _mapped(buffer, size * RX_ENTRY.itemsize)
        self._rx = np.frombuffer(ring, np.uint64).reshape(-1, 2)
        self._rx_ids = bytearray(b"\xff\xff" * size)  # of the entries there; none at first
        self._rx_bell = _register(bell)
        self._rx_pc = 0

    def _map_completions(self, buffer: int, width: int, size: int, bell: int | None) -> None:
        ring = _mapped(buffer, width * size)
        self._cq = np.ndarray(size, COMPLETION_ENTRY, ring, strides=(width,))
        self._cq_kinds = np.ndarray(size, KINDS, ring, strides=(width,))["kind"]
        self._window = _WINDOW_MIN
        self._cq_bytes = ring
        self._cq_width, self._cq_size = width, size
        self._cc = 0
        self._cq_bell = _register(bell) if bell else None
        if self._cq_bell is not None:
            self._nic.ask_wake = self._ask_wake
        else:
            self._nic.wait_fds = ()  # nobody would tell the device what was read

    def lay_out(self, address: int, nbytes: int, buffers: int, lkey: int) -> None:
        """Say where messages are received: buffers of `nbytes` side by side; i has the id i."""
        rows = np.zeros(buffers, RX_ENTRY)
        self._receives = rows.view(np.uint64).reshape(-1, 2)
        rows["addr"] = address + nbytes * np.arange(buffers)
        rows["req_id"] = np.arange(buffers)
        rows["length"] = nbytes
        rows["lkey_ctrl"] = RX_ALWAYS | (lkey & LKEY_MASK)

    # --- posting

    def write(
        self, n: int, ids: Numbers, ends: Ends, src: Column, dst: Column, nbytes: Column, imm: Imms
    ) -> None:
        """Post n writes to one peer, or reads; columns are ints or have n rows."""
        each = nbytes if type(nbytes) is int else None
        one_imm = imm if type(imm) is int else imm is None
        same = (ends, each, one_imm)
        if same != self._same or n > self._same_rows:
            self._fill(n, ends, nbytes, imm)
            self._same, self._same_rows = same, n
        elif each is None:
            for column in self._lengths:
                column[:n] = nbytes
        self._ids[:n] = ids
        self._src[:n] = src
        self._dst[:n] = dst
        if imm is not None and type(imm) is not int:
            self._imms[:n] = imm
        self._copy(n)

    def _fill(self, n: int, ends: Ends, nbytes: Column, imm: Imms) -> None:
        """The columns that stay as they are from one batch to the next."""
        rows, (place, lkey, rkey, op) = self._rows, ends
        rows["ctrl1"][:n] = ALWAYS_1 | op | (0 if imm is None else HAS_IMM)
        rows["dest_qp"][:n], rows["ah"][:n], rows["qkey"][:n] = place.qpn, place.ahn, place.qkey
        rows["lkey"][:n], rows["rkey"][:n] = lkey & LKEY_MASK, rkey
        rows["imm"][:n] = 0 if imm is None else imm
        for column in self._lengths:
            column[:n] = nbytes

    def _copy(self, n: int) -> None:
        """Copy the first n staged entries into the queue, doorbell by doorbell."""
        width, size, ring, stage = self._width, self._mask + 1, self._ring, self._stage
        fence, bell, most = self._fence, self._bell, self.batch_max
        pc = self._pc
        at = pc & self._mask
        split = size - at  # entries up to the end of the ring
        phase = pc >> self._mask.bit_length() & _PHASE
        if split >= n:
            known, upto = self._phased
            if known != phase or upto < n:
                self._ctrl2[:n] = ALWAYS_2 | phase
                self._phased = phase, n
        else:
            self._ctrl2[:split] = ALWAYS_2 | phase
            self._ctrl2[split:n] = ALWAYS_2 | (phase ^ _PHASE)
            self._phased = -1, 0
        # Whole batches up to the end of the ring, which are nearly all, in half the time.
        here, step, last = at * width, most * width, pc
        for first in range(0, min(n, split) // most * step, step):
            start = here + first
            fence()
            ring[start : start + step] = stage[first : first + step]
            fence()
            last += most
            bell[0] = last & 0xFFFF
        done = last - pc
        at = at + done & self._mask
        while done < n:
            k = min(n - done, most)
            first, room = done * width, (size - at) * width
            nbytes = k * width
            fence()
            if nbytes > room:
                ring[at * width :] = stage[first : first + room]
                ring[: nbytes - room] = stage[first + room : first + nbytes]
            else:
                start = at * width
                ring[start : start + nbytes] = stage[first : first + nbytes]
            done += k
            at = at + k & self._mask
            fence()
            bell[0] = pc + done & 0xFFFF
        self._pc = pc + n

    def write_one(
        self, number: int, ends: Ends, src: int, dst: int, nbytes: int, imm: int | None
    ) -> None:
        place, lkey, rkey, op = ends
        ctrl1 = ALWAYS_1 | op | (0 if imm is None else HAS_IMM)
        key = lkey & LKEY_MASK
        self._put(number, ctrl1, place, imm or 0, nbytes, rkey, dst, nbytes, key, src)

    def send(self, number: int, place: Place, address: int, nbytes: int, lkey: int) -> None:
        key = lkey & LKEY_MASK
        self._put(number, ALWAYS_1 | OP_SEND, place, 0, nbytes, key, address, 0, 0, 0)

    def _put(self, number: int, ctrl1: int, place: Place, imm: int, *buffers: int) -> None:
        pc, width = self._pc, self._width
        ctrl2 = ALWAYS_2 | pc >> self._mask.bit_length() & _PHASE
        _, ahn, qpn, qkey = place
        _ONE.pack_into(self._lone, 0, number, ctrl1, ctrl2, qpn, 1, imm, ahn, 0, qkey, *buffers)
        at = (pc & self._mask) * width
        self._fence()
        self._ring[at : at + width] = self._lone
        self._pc = pc = pc + 1
        self._fence()
        self._bell[0] = pc & 0xFFFF

    def receive(self, ids: bytearray) -> None:
        """Post receive buffers, named by u16.

        They come back in the order in which they were posted, and there are as many as entries: so
        what is to be written most often stands there, from one turn of the ring ago.
        """
        known, done, pc = self._rx_ids, 0, self._rx_pc
        while done < len(ids):
            at = 2 * pc % len(known)
            some = ids[done : done + len(known) - at]  # up to the end of the ring
            places = slice(at, at + len(some))
            if known[places] != some:
                known[places] = some
                rows = self._rx[places.start >> 1 : places.stop >> 1]
                self._receives.take(np.frombuffer(some, np.uint16), axis=0, out=rows, mode="clip")
            done += len(some)
            pc += len(some) >> 1
        self._rx_pc = pc
        self._fence()
        self._rx_bell[0] = pc & 0xFFFF

    # --- polling

    def poll(self, room: int) -> Entries:
        """Return completions, as they lie in the queue; looked at before anything is posted."""
        size, cc, kinds = self._cq_size, self._cc, self._cq_kinds
        at = cc & (size - 1)
        old = cc >> (size.bit_length() - 1) & _PHASE  # the phase bit is 1 in the first turn
        self.kind = kind = kinds.item(at)
        if kind >> 8 & _PHASE == old:
            self.more = False
            return self._cq[:0]
        flags, width = self._cq_bytes, self._cq_width
        where = at * width + 3
        n, most = 1, min(room, size - at, _READ_MAX)
        if most > 1 and flags[where + width] & _PHASE != old:
            # How many have the status and flags of the first, phase bit included. Bytes are
            # searched in half the time that argmax() takes.
            window = min(most, self._window)
            n = (kinds[at : at + window] != kind).tobytes().find(1)
            while n < 0 and window < most:
                window = min(most, 4 * window)
                n = (kinds[at : at + window] != kind).tobytes().find(1)
            if n < 0:
                n = most
            self._window = max(_WINDOW_MIN, n + 1)  # as many again, and the one that ends them
            if n < _RUN_MIN and n < most and flags[where + n * width] & _PHASE != old:
                self.kind = None
                n = self._new(where, most, old)
        self.more = n == most or flags[where + n * width] & _PHASE != old
        self._load_fence()
        self._cc = cc + n
        return self._cq[at : at + n]

    def _new(self, where: int, most: int, old: int) -> int:
        """Count the new entries before the first that is not new."""
        flags, width = self._cq_bytes, self._cq_width
        # The device writes them in order: entry n - 1 is new, that at `unknown`, if any, is not.
        n, unknown = 2, most
        while n < unknown:
            probe = min(2 * n, (n + unknown) // 2) if unknown == most else (n + unknown) // 2
            if flags[where + probe * width] & _PHASE != old:
                n = probe + 1
            else:
                unknown = probe
        return n

    def _ask_wake(self) -> None:
        """Tell the device how far the queue was read, and to wake us at the next completion."""
        assert self._cq_bell is not None
        number = self._nic.events & 3
        self._cq_bell[0] = ARM | number << 29 | (self._cc & 0xFFFF)


def _check(found: int, known: tuple[int, ...], what: str, unit: str) -> None:
    if found not in known:
        raise BackendUnavailable(f"{what} have {found} {unit}; known are {known}")


def _mapped(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _register(address: int) -> memoryview:
    """A register of 32 bits, written by `[0] = value`.

    A memoryview stores and does no more. The setter of c_uint32.value loads the old value first,
    since it serves bit fields too: a read of the device, for which the core waits.
    """
    return _mapped(address, 4).cast("I")

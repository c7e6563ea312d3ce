"""The local backend: processes of one host, memory to memory, without any library or NIC.

Bytes move by process_vm_writev and process_vm_readv (a lone short row through the peer's
/proc/PID/mem), or by plain copies into memory of alloc_shared() and out of it; immediates and
messages through rings in shared memory; a sleeping peer is woken by an eventfd. The rooms:
`channel` (addresses, the socket, what wakes a NIC), `memory` (what is shared, and in which order it
is written), `copying`, `outbound` (the way to one peer), `sender` and `port`, the two halves of a
NIC. All of a NIC belongs to one thread at a time.

Trust. Any user of the host can connect: without the address's token it is one of at
most 64 callers, each for a second. Who has the token can write to what is registered as a target,
and read what is readable, if the kernel lets it touch this process; memory of alloc_shared() is
handed out by the same rule (the same user, or root). A process id that is used again gets no byte,
and gives none: /proc/PID/mem stays with the memory it was opened on, and each copy by id begins at
an address that only the right process has mapped (`memory.Witness`); what remains is the chance,
below one in a billion, that another process has mapped that address. A peer with the token can
spoil its own words and the port's: that ends its connection, or the others', and never the engine.

Nothing of it has a name in the file system: what a killed process held, the kernel frees. Several
NICs of one engine are parallel lanes and no faster: one thread at a time copies for all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import re
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from tep.backends.base import (
    COMPLETION_BYTES,
    Access,
    CallersTurn,
    Completions,
    DomainCaps,
    DomainKey,
    Kind,
    Opened,
    ReadBatch,
    Status,
    WriteBatch,
    hand_out,
    put_completion,
)
from tep.backends.common import (
    HostRegion,
    ReceivePool,
    all_or_none,
    check_memory,
    closed,
    identity,
    meaning,
    new_fence,
    nothing,
    orphan_at_fork,
    put_imms,
    says,
)
from tep.backends.ffi.libc import libc
from tep.backends.local.channel import (
    CONTROL_BYTES_MAX,
    Address,
    Watches,
    engine_of,
    host_digest,
    why,
)
from tep.backends.local.copying import can_reach
from tep.backends.local.memory import EVENTS, MESSAGE_BYTES_MAX, NONSENSE, LaneReader, alloc_shared
from tep.backends.local.port import ASLEEP, Inbound, Port
from tep.backends.local.sender import Sender
from tep.base.errors import BackendUnavailable, UsageError
from tep.memory.source import Memory

__all__ = ["LocalDomain", "alloc_shared", "open_domains", "probe", "restriction"]

_LOOKS: Final = 16
"""One poll in so many looks at the sockets: it costs 0.4 us (measured)."""

_HALF: Final = EVENTS // 2  # see LaneReader.wanted()
_IMM_MASK: Final = 2**32 - 1
_SCALAR_MAX: Final = 8  # events up to which a loop is cheaper than numpy's first microseconds
_IMM, _RECV = int(Kind.IMM), int(Kind.RECV)
_OK: Final = int(Status.OK)


class LocalDomain:
    """One NIC; `tep.backends.base.Domain` describes the methods.

    Attributes:
        sender, port: its two halves.
    """

    def __init__(self, address: Address, caps: DomainCaps) -> None:
        self.caps = caps
        self.address = address.to_bytes()
        self._open = True
        self._watches = Watches()
        self._fence = new_fence()
        shared = self._watches, self._fence
        self.sender = Sender(self.address, caps, *shared)
        try:
            self.port = Port(address, *shared, self.sender.unread.add)
        except BackendUnavailable:
            self._let_go()
            raise
        self._words = self.port.words
        self._asleep = self._rung = False
        self._refused = False
        self._polls = 0
        self._lkey = 0
        self._waker: Callable[[], None] = nothing
        self._pool = ReceivePool()
        halves = self.sender, self.port, self._watches
        self._finalize = weakref.finalize(self, _let_go, caps.nic, *halves)
        orphan_at_fork(self)

    # --- memory and peers

    def register(self, memory: Memory, access: Access) -> DomainKey:
        self._check_open()
        check_memory(self.caps, memory, access)
        port, readable = self.port, access.readable
        region = HostRegion(memory, memory.ptr, writable=access.target)
        shown = region.writable or readable
        rkey = port.grant(region, readable=readable) if shown else port.new_key()
        self._lkey += 2
        lkey = self._lkey + 1
        self.sender.writes.regions[lkey] = region
        if access.sink:
            self.sender.reads.regions[lkey] = region
        return DomainKey(lkey=lkey, rkey=rkey, base=memory.ptr)

    def deregister(self, key: DomainKey) -> None:
        if self._open:
            self.sender.writes.regions.pop(key.lkey, None)
            self.sender.reads.regions.pop(key.lkey, None)
            self.port.withdraw(key.rkey, self.caps.peer_timeout_s)

    def connect(self, peer: bytes) -> int:
        self._check_open()
        return self.sender.connect(peer)

    # --- posting

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        self._begin()
        return self.sender.post(batch, start, stop) or self._refuse()

    def post_read(self, batch: ReadBatch, start: int, stop: int) -> int:
        self._begin()
        return self.sender.post_read(batch, start, stop) or self._refuse()

    def _begin(self) -> None:
        if not self._open:
            self._check_open()
        if self._asleep:  # what is carried out now is news; and a quick answer need not ring
            self._awake()
            self._waker()

    def post_send(self, peer: int, payload: bytes, ctx: int) -> bool:
        self._check_open()
        return self.sender.post_send(peer, payload, ctx) or self._refuse()

    def post_control(self, peer: int, payload: bytes, ctx: int) -> bool:
        self._check_open()
        return self.sender.post_control(peer, payload, ctx) or self._refuse()

    def take_control(self, slot: int) -> tuple[bytes, bytes]:
        return self.sender.unread.take(slot)

    engine_of = staticmethod(engine_of)

    def _refuse(self) -> bool:
        """Nothing was taken: wake the owner once there may be room."""
        self._refused = True
        if self.sender.done or self.sender.runnable():
            self._waker()  # polling is what makes room here
        return False

    def post_recvs(self, nbytes: int, count: int) -> None:
        self._check_open()
        self._pool.add(nbytes, count)
        self._feed()

    def recv_view(self, slot: int) -> memoryview:
        return self._pool.view(slot)

    def recv_source(self, slot: int) -> bytes:
        return self._pool.sender(slot)

    def recv_done(self, slot: int) -> None:
        self._pool.give_back(slot)
        self._feed()

    def _feed(self) -> None:
        """There is a receive buffer again: look at who waited for one."""
        if self._open and self.port.starved:
            self.port.ready.update(self.port.starved)
            self.port.starved.clear()
            self._waker()

    # --- completions

    def poll(self, out: Completions) -> int:
        at = 0
        if self._open:
            woken = self._asleep
            if woken:
                self._awake()
            self._polls += 1
            sender, port = self.sender, self.port
            if sender.active or sender.lost:  # of a peer to whom nothing waits
                if sender.go_on() and not sender.done:
                    self._waker()  # part of a row has moved: no completion tells of the work
            else:
                sender.helping = sender.least
            if sender.done:
                at = self._hand_out(out)
            try:
                if port.scan():
                    sender.small_helpings()
                    at = self._collect(out, at)
            except MemoryError:  # the next poll goes on
                if not at:
                    raise
            idle = woken and not at  # what woke us was a socket or a timer, or nothing did
            if idle:
                self._rung = False
            if idle or self._polls % _LOOKS == 0 or (sender.active and sender.asking):
                self._watches.look()
                if port.callers:
                    port.hang_up_on_silent()
        elif self.sender.done:
            at = self._hand_out(out)
        if at and self._refused:
            self._refused = False
            self._waker()
        return at

    def _hand_out(self, out: Completions) -> int:
        at, rows, reads = hand_out(self.sender.done, out, 0)
        self.sender.writes.open -= rows
        self.sender.reads.open -= reads
        return at

    def _collect(self, out: Completions, at: int) -> int:
        """Take what peers wrote: immediates, then messages."""
        port, room = self.port, len(out)
        for inbound in list(port.ready):
            if at == room:
                break
            lane = inbound.lane
            if lane is not None:
                before, n = at, lane.tail - lane.head
                if n <= _SCALAR_MAX and n <= room - at:
                    for k in range(at, at + n):
                        word = lane.take_event()
                        count, imm = word >> 32, word & _IMM_MASK
                        put_completion(out, k * COMPLETION_BYTES, _IMM, _OK, count, imm, 0, 0, 0)
                    at += n
                else:
                    try:
                        at = self._take_burst(lane, min(n, room - at), out, at)
                    except MemoryError:  # nothing was taken: it stays ready
                        continue
                if lane.mhead != lane.mtail:
                    at, is_short = self._take_messages(inbound, out, at)
                    n = _HALF
                    if is_short:  # of memory: it stays ready
                        continue
                if n >= _HALF and at != before and lane.wanted():
                    _ring(inbound.bell)
                if at == room and (lane.head != lane.tail or lane.mhead != lane.mtail):
                    break
            del port.ready[inbound]
            if inbound.gone:
                port.drop(inbound)
        return at

    def _take_burst(self, lane: LaneReader, n: int, out: Completions, at: int) -> int:
        put_imms(out[at : at + n], *lane.take_events(n))
        return at + n

    def _take_messages(self, inbound: Inbound, out: Completions, at: int) -> tuple[int, bool]:
        """Take messages, as far as they go; say too whether memory was short for the next one."""
        lane = inbound.lane
        assert lane is not None
        room = len(out)
        while at < room and (nbytes := lane.next_message()) is not None:
            if nbytes == NONSENSE:
                lane.mhead = lane.mtail
                self.port.part(inbound)
                break
            try:
                found = self._pool.take(nbytes, inbound.sender)
            except MemoryError:
                return at, True
            if found is not None:
                slot, buffer = found
                put_completion(out, at * COMPLETION_BYTES, _RECV, _OK, 1, 0, 0, slot, nbytes)
                try:
                    lane.take_message(nbytes, buffer, _OK)
                except MemoryError:
                    self._pool.give_back(slot)
                    return at, True
                at += 1
            elif self._pool.never_fits(nbytes):
                lane.take_message(nbytes, None, int(Status.LENGTH))
                if lane.wanted():
                    _ring(inbound.bell)
            else:
                if not inbound.gone:
                    self.port.starved[inbound] = None
                break
        return at, False

    def status_text(self, status: int) -> str:
        failed = status in {Status.PROVIDER, Status.UNREACHABLE}
        return says(self.sender.why if failed else "", _STATUS_TEXT.get(status, ""))

    # --- sleeping

    def forget(self, peer: int) -> None:
        """Nothing is kept of a peer that could be given back."""

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker

    def wakeup_fd(self) -> int | None:
        return self._watches.epoll.fileno() if self._open else None

    def arm(self) -> bool:
        sender, port = self.sender, self.port
        if not self._open:
            return not sender.done
        if self._rung:  # a ring that nobody takes back would wake the next sleeper
            self._rung = False
            self._watches.look()
        if sender.done or port.ready:
            return False
        self._words[ASLEEP] = 1
        self._fence()
        if port.unseen() or sender.runnable():
            self._words[ASLEEP] = 0
            return False
        self._asleep = True
        return True

    def _awake(self) -> None:
        """Let nobody ring, and note whether somebody did."""
        self._asleep = False
        if self._words[ASLEEP]:
            self._words[ASLEEP] = 0
        else:
            self._rung = True

    # --- ends

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._finalize.detach()
        try:
            self.sender.close()
            self.port.close(self.caps.peer_timeout_s)
        finally:
            self._let_go()
            self._waker()

    def die(self) -> None:
        """Vanish as a killed process does: no completion is handed out, nobody is told."""
        if not self._open:
            return
        self._open = False
        self._finalize.detach()
        self.sender.abandon()
        self.sender.done.clear()
        self.port.abandon()
        self._let_go()

    orphan = die  # in a forked child the NIC is the parent's

    def _let_go(self) -> None:
        self.sender.writes.regions.clear()
        self.sender.reads.regions.clear()
        self._watches.close()

    def _check_open(self) -> None:
        if not self._open:
            raise closed(self.caps.nic)


_STATUS_TEXT: Final = meaning(
    LOCAL_KEY="the memory here was deregistered, or the row reaches beyond it, or is read into "
    "memory that reads may not write",
    UNREACHABLE="the peer is gone, or in another network namespace (container)",
    PROVIDER="the kernel does not let this process reach the peer's memory: run both as one "
    "user, in one pid namespace, with kernel.yama.ptrace_scope 0, or 1 and allow_tracer left on at "
    "the peer (containers: --cap-add=SYS_PTRACE); or register memory of tep.alloc_shared(), which "
    "needs no more than the same user, or root",
)


def _ring(bell: int) -> None:
    with contextlib.suppress(OSError):  # rung 2**64 times: it is ringing still
        os.eventfd_write(bell, 1)


def _let_go(nic: str, sender: Sender, port: Port, watches: Watches) -> None:
    """The net under close(); what is given here holds no reference to the NIC."""
    sender.abandon()
    port.abandon()
    watches.close()
    warnings.warn(f"{nic} was dropped without close()", ResourceWarning, stacklevel=2)


_PR_SET_PTRACER: Final = 0x59616D61  # <linux/prctl.h>
_PR_SET_PTRACER_ANY: Final = 2**64 - 1  # (unsigned long) -1


def allow_any_tracer() -> bool:
    """Let other processes of this user write here although Yama restricts them; False: refused.

    Yama's scope 1 (Ubuntu's default) lets a process reach only its children, unless the target
    has named it; of peers that come and go, only "any" can be named.
    """
    # int prctl(int option, ... /* unsigned long arg2, arg3, arg4, arg5 */);      <sys/prctl.h>
    prctl = libc().prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    prctl.restype = ctypes.c_int
    return bool(prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0) == 0)


_NICS_MAX: Final = 64
_SQ_DEPTH: Final = 4096  # and as many reads besides
_PEER_TIMEOUT_S: Final = 2.0
"""The kernel tells of a death at once; this is room for a poll that comes late."""

_CHILDREN_ONLY, _TRACERS_ONLY = 1, 2  # of kernel.yama.ptrace_scope; 3 = nobody
_CAP_SYS_PTRACE: Final = 19  # linux/capability.h
_OPENED_TO_TRACERS: Final = (
    "opening an engine lets every process of this user read and write this process's memory until "
    "it exits (PR_SET_PTRACER_ANY); open with allow_tracer=False to keep Yama's limit: peers then "
    "reach tep.alloc_shared() memory only"
)

_log = logging.getLogger("tep")


def open_domains(
    nics: int = 1,
    *,
    name: str | None = None,
    allow_tracer: bool = True,
) -> Opened:
    """Open the NICs of one engine.

    Args:
        nics: how many lanes, 1 to 64.
        name: of the engine, for reports; the same name in a later process replaces the former.
        allow_tracer: where Yama restricts writes into other processes to children (Ubuntu's
            default), name "any process of this user" as an exception, for the rest of this
            process's life; it is logged once. False: peers then reach alloc_shared() memory only.

    Raises:
        UsageError: an impossible number or name.
        BackendUnavailable: the kernel refuses memory, sockets or descriptors.
    """
    name, epoch = identity("local", name, None)
    if not 1 <= nics <= _NICS_MAX:
        raise UsageError(f"local: nics={nics}; 1 to {_NICS_MAX} are possible")
    if allow_tracer and _yama_scope() == _CHILDREN_ONLY:
        _open_to_tracers()
    host = os.getpid(), epoch, host_digest()
    domains = all_or_none(
        LocalDomain(
            Address(nic, *host, os.urandom(16)),
            _caps(f"{name}/{nic}"),
        )
        for nic in range(nics)
    )
    restricted = restriction(allow_tracer=allow_tracer)
    if restricted and allow_tracer:
        _warn_once(restricted)
    return Opened(domains, epoch, name, CallersTurn(), about=restricted)


def _caps(nic: str) -> DomainCaps:
    return DomainCaps(
        backend="local",
        nic=nic,
        link_bps=0,
        sq_depth=_SQ_DEPTH,
        max_write_bytes=1 << 40,
        max_msg_bytes=MESSAGE_BYTES_MAX,
        ordered=True,
        peer_timeout_s=_PEER_TIMEOUT_S,
        control_bytes=CONTROL_BYTES_MAX,
        reads=_SQ_DEPTH,
    )


def _yama_scope() -> int:
    """kernel.yama.ptrace_scope, or 0 where there is no Yama."""
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return 0


def _may_trace() -> bool:
    """Tell whether this process has CAP_SYS_PTRACE."""
    try:
        found = re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return found is not None and bool(int(found[1], 16) >> _CAP_SYS_PTRACE & 1)


@functools.cache  # once is enough: it holds for the process
def _open_to_tracers() -> None:
    if allow_any_tracer():
        _warn_once(_OPENED_TO_TRACERS)


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning("local: %s", text)


def restriction(*, allow_tracer: bool = True) -> str:
    """Say why other processes reach memory of alloc_shared() only, here; "" = they reach all of it.

    A peer may be restricted where this process is not; then the errors of rows to it say so.
    """
    mark = np.frombuffer(os.urandom(8), np.uint8)
    code = can_reach(os.getpid(), int(mark.ctypes.data), ctypes.string_at(mark.ctypes.data, 8))
    scope = _yama_scope()
    if code:
        reason = f"process_vm_readv says {why(code)} (a seccomp filter, as containers have)"
    elif scope == _CHILDREN_ONLY and not allow_tracer:
        reason = f"kernel.yama.ptrace_scope is {scope} and allow_tracer=False"
    elif scope > _TRACERS_ONLY or (scope == _TRACERS_ONLY and not _may_trace()):
        reason = f"kernel.yama.ptrace_scope is {scope}"
    else:
        return ""
    return f"other processes reach memory of tep.alloc_shared() only, by rows and reads: {reason}"


def probe() -> str:
    """Say what is here: whether the kernel lets processes write into each other."""
    restricted = restriction()
    if restricted:
        return restricted
    scope = _yama_scope()
    tracers = f": {_OPENED_TO_TRACERS}" if scope == _CHILDREN_ONLY else ""
    calls = "process_vm_writev, process_vm_readv"
    return f"{calls} and shared memory; kernel.yama.ptrace_scope {scope}{tracers}"

"""The objects of one NIC: fabric, domain, queue, addresses, endpoints and regions; opened, and
closed in order.

Each call of libfabric that may fail passes through `check` here, with the NIC's name. Nothing here
knows a batch, a peer's state or a message.

Rule 1: close order is regions, endpoints, address vector, queue, domain, fabric; any other is
refused by libfabric (-16), and closing twice aborts the process. Rule 2: after a fork the child
calls nothing of what it inherited: closing there would cut the parent's connections.

Of memory. Rule 3: it stays held, and its registration open, while a row in flight reads from it.
Rule 4: a key is never given twice, not even by a later incarnation at the same address. Rule 5: on
a device, what peers may read is registered once for us and once for them, so that the owner can end
what peers do while its own rows are in flight: libfabric must not lose a registration that such a
row was posted with, since it may post the row again.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, addressof, byref, c_int, c_size_t, c_uint64, c_void_p, cast
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from tep.backends.base import SHORT, Access, Column, DomainKey, Status
from tep.backends.common import bounds, keep_at_fork, orphan_at_fork
from tep.backends.ffi import libfabric as fi
from tep.backends.ffi.libc import libc
from tep.backends.ffi.load import check
from tep.base.errors import FabricError
from tep.memory.source import DmabufExport, Memory, exported

__all__ = ["CqError", "Endpoint", "Nic", "Option", "Region", "Regions", "mr_attr"]

_NAME_BYTES_MAX: Final = 512


class CqError(NamedTuple):
    """A failed operation, as fi_cq_readerr tells of it; its context is 0 if it has none."""

    context: int
    prov_errno: int
    text: str


Option = tuple[int, bool, bool]
"""FI_OPT_... of an endpoint, its value, and whether a provider that does not know it is an error.

It is set before the endpoint is enabled.
"""


class _Handle:
    """One object of libfabric."""

    __slots__ = ("__weakref__", "_close", "address", "kind", "lost", "what")

    def __init__(self, out: c_void_p, kind: Any) -> None:
        assert out.value
        self.address = out.value
        self.kind = kind
        self.what = kind.__name__.removeprefix("fid_")
        self.lost = False  # with its NIC, so that closing it may fail
        self._close = fi.op(self._base_ops(), "close")

    def contents(self) -> Any:
        """The mirror of the object."""
        return cast(self.address, POINTER(self.kind)).contents

    def _base_ops(self) -> Any:
        ops = cast(self.address, POINTER(fi.C.fid)).contents.ops
        return cast(ops, POINTER(fi.C.fi_ops)).contents

    def bind(self, other: _Handle, flags: int) -> None:
        rc = fi.op(self._base_ops(), "bind")(self.address, other.address, flags)
        check(rc, f"fi_ep_bind({self.what}, {other.what})")

    def control(self, command: int, argument: object) -> int:
        return fi.op(self._base_ops(), "control")(self.address, command, argument)

    def close(self) -> None:
        """Close once; a second time does nothing."""
        address, self.address = self.address, 0
        rc = self._close(address) if address else 0
        if not self.lost:
            check(rc, f"fi_close({self.what})")

    def forget(self) -> None:
        """Drop the object without a call: it belongs to the process that forked this one."""
        self.address = 0


class Endpoint:
    """An enabled endpoint and its hot calls.

    Attributes:
        address: of the object, the first argument of `send`; 0 = it is closed.
        ready: the same for the other calls, whose arguments are all made by fi.ready().
        writemsg, readmsg: hold the interpreter's lock, unless the NIC is software.
        send, recv: messages. send drops it, recv holds it.
    """

    def __init__(self, nic: Nic, handle: _Handle) -> None:
        self._nic = nic
        self._handle = handle
        self.address = handle.address
        self.ready = fi.ready(handle.address)
        ep = handle.contents()
        # Bound after fi_enable, which may swap the tables.
        rma, msg = ep.rma.contents, ep.msg.contents
        hold = not nic.software
        self.writemsg = fi.op(rma, "writemsg", hold_gil=hold, readied=True)
        self.readmsg = fi.op(rma, "readmsg", hold_gil=hold, readied=True)
        self.send = fi.op(msg, "send")
        self.recv = fi.op(msg, "recv", hold_gil=True)

    def name(self) -> bytes:
        """The endpoint's address, in the provider's format."""
        size = c_size_t(_NAME_BYTES_MAX)
        raw = ctypes.create_string_buffer(_NAME_BYTES_MAX)
        getname = fi.op(self._handle.contents().cm.contents, "getname")
        check(getname(self.address, raw, byref(size)), "fi_getname", nic=self._nic.name)
        return raw.raw[: size.value]

    def option(self, option: int) -> bool | None:
        """Read a boolean option; None where this provider does not know it."""
        value, size = ctypes.c_bool(False), c_size_t(1)
        getopt = fi.op(self._handle.contents().ops.contents, "getopt")
        rc = getopt(self.address, fi.FI_OPT_ENDPOINT, option, byref(value), byref(size))
        return value.value if rc == 0 else None

    def close(self) -> None:
        """Close; operations in flight may still surface in the queue during this call."""
        self.address = 0
        self._nic._drop(self._handle)


class Nic:
    """Fabric, domain, completion queue and address vector of one NIC.

    Args:
        info: what to open, an entry of getinfo(); this object owns it and gives it back.
        software: a write or read is a system call, or is copied inside the call: whoever posts
            drops the interpreter's lock meanwhile, so that the user's own thread can have it. Else
            endpoints need a queue for errors that belong to no operation.

    Attributes:
        cq: address of the queue, the first argument of cq_read.
        cq_read: drops the interpreter's lock: a spinning worker that held it would add 5 ms to
            every lock-dropping call of the user's own thread (measured).
        closed: whether it was closed, or belongs to the parent of this process.
        failure: what libfabric said when it lost this NIC; "" = it lives.
        wait_fds: one that becomes readable when the queue may have news; () where this provider has
            none.
    """

    def __init__(
        self,
        lib: fi.Libfabric,
        info: fi.Info,
        name: str,
        *,
        cq_entries: int,
        software: bool,
    ) -> None:
        self.software = software
        self.lib = lib
        self.strerror = lib.strerror
        self.info = info
        self.name = name
        self._open: list[_Handle] = []  # in order of opening
        self._endpoints: list[_Handle] = []
        self._regions: weakref.WeakSet[_Handle] = weakref.WeakSet()
        self.wait_fds: tuple[int, ...] = ()
        self.closed = False
        self.failure = ""
        orphan_at_fork(self)
        try:
            self._open_all(cq_entries)
        except BaseException:
            self.close()
            raise

    def _open_all(self, cq_entries: int) -> None:
        out = c_void_p()
        self._check(self.lib.fabric(self.info, byref(out)), "fi_fabric")
        self._fabric = _Handle(out, fi.C.fid_fabric)
        self._open.append(self._fabric)
        fabric_ops = self._fabric.contents().ops.contents
        self._eq: _Handle | None = None
        if not self.software:
            eq_attr = byref(fi.C.fi_eq_attr(wait_obj=fi.FI_WAIT_NONE))
            self._eq = self._new(self._fabric, fabric_ops, "eq_open", eq_attr, fi.C.fid_eq)
            self._eq_readerr = fi.op(self._eq.contents().ops.contents, "readerr")
        self._domain = self._new(self._fabric, fabric_ops, "domain", self.info, fi.C.fid_domain)
        self._domain_ops = self._domain.contents().ops.contents
        self._open_queue(cq_entries)
        av_attr = byref(fi.C.fi_av_attr(type=fi.FI_AV_TABLE))
        self._av = self._new(self._domain, self._domain_ops, "av_open", av_attr, fi.C.fid_av)
        av_ops = self._av.contents().ops.contents
        self._insert, self._remove = fi.op(av_ops, "insert"), fi.op(av_ops, "remove")
        self._regattr = fi.op(self._domain.contents().mr.contents, "regattr")
        self._trywait = fi.op(fabric_ops, "trywait") if self.wait_fds else None
        self._fids = (c_void_p * 1)(self.cq)

    def _open_queue(self, entries: int) -> None:
        out = c_void_p()
        cq_open = fi.op(self._domain_ops, "cq_open")
        attr = fi.C.fi_cq_attr(size=entries, format=fi.FI_CQ_FORMAT_DATA)
        attr.wait_obj = fi.FI_WAIT_FD
        rc = cq_open(self._domain.address, byref(attr), byref(out), None)
        if rc == -fi.FI_ENOSYS:  # the provider has no descriptor to sleep on
            attr.wait_obj = fi.FI_WAIT_NONE
            rc = cq_open(self._domain.address, byref(attr), byref(out), None)
        self._check(rc, "fi_cq_open")
        self._cq_handle = cq = _Handle(out, fi.C.fid_cq)
        self._open.append(cq)
        self.cq = cq.address
        ops = cq.contents().ops.contents
        self.cq_read = fi.op(ops, "read")
        self._readerr = fi.op(ops, "readerr")
        self._cq_strerror = fi.op(ops, "strerror") if fi.has_op(ops, "strerror") else None
        if attr.wait_obj == fi.FI_WAIT_FD:
            fd = c_int(-1)
            self._check(cq.control(fi.FI_GETWAIT, byref(fd)), "fi_control(FI_GETWAIT)")
            self.wait_fds = (fd.value,)

    def _new(self, parent: _Handle, ops: Any, name: str, attr: Any, kind: Any) -> _Handle:
        """Open an object of a parent: fi_NAME(parent, attr, &object, NULL)."""
        out = c_void_p()
        self._check(fi.op(ops, name)(parent.address, attr, byref(out), None), f"fi_{name}")
        handle = _Handle(out, kind)
        (self._endpoints if kind is fi.C.fid_ep else self._open).append(handle)
        return handle

    def _check(self, rc: int, what: str) -> int:
        return check(
            rc,
            what,
            describe=self.lib.strerror,
            nic=self.name,
            FI_PROVIDER=os.environ.get("FI_PROVIDER", ""),
        )

    # --- endpoints and peers

    def open_endpoint(self, options: tuple[Option, ...] = ()) -> Endpoint:
        """Open an endpoint bound to this NIC's queues and address vector, and enable it."""
        domain, ops = self._domain, self._domain_ops
        handle = self._new(domain, ops, "endpoint", self.info, fi.C.fid_ep)
        try:
            handle.bind(self._cq_handle, fi.FI_TRANSMIT | fi.FI_RECV)
            handle.bind(self._av, 0)
            if self._eq is not None:
                handle.bind(self._eq, 0)
            for option, value, needed in options:
                setopt = fi.op(handle.contents().ops.contents, "setopt")
                rc = setopt(
                    handle.address, fi.FI_OPT_ENDPOINT, option, byref(ctypes.c_bool(value)), 1
                )
                if needed or rc != -fi.FI_ENOPROTOOPT:
                    self._check(rc, f"fi_setopt({option}, {value})")
            self._check(handle.control(fi.FI_ENABLE, None), "fi_enable")
            return Endpoint(self, handle)
        except BaseException:
            self._drop(handle)
            raise

    def release_port(self) -> None:
        """Let the endpoints opened from now on choose their ports: the main one has its own."""
        info = self.info.contents
        if info.src_addr and info.addr_format in (
            fi.FI_SOCKADDR,
            fi.FI_SOCKADDR_IN,
            fi.FI_SOCKADDR_IN6,
        ):
            ctypes.memset(info.src_addr + 2, 0, 2)  # sockaddr_in and sockaddr_in6 have it there

    def _drop(self, handle: _Handle) -> None:
        if handle in self._endpoints:
            self._endpoints.remove(handle)
        handle.close()

    def insert(self, raw: bytes) -> int:
        """Add a peer's address, whose format has been checked; return its number."""
        number = c_uint64(fi.FI_ADDR_UNSPEC)
        rc = self._insert(self._av.address, raw, 1, byref(number), 0, None)
        # It returns how many it took. A failed one leaves FI_ADDR_UNSPEC, and to post to that is a
        # segmentation fault on tcp.
        if rc != 1 or number.value == fi.FI_ADDR_UNSPEC:
            self._check(min(rc, 0) or -22, f"fi_av_insert({raw.hex()})")
        return number.value

    def remove(self, number: int) -> None:
        """Forget a peer's address. A provider that refuses keeps it, which harms nothing."""
        self._remove(self._av.address, byref(c_uint64(number)), 1, 0)

    # --- memory

    def register(self, attr: ctypes.Structure, flags: int) -> _Handle:
        """Register memory; the handle is closed by who asked for it."""
        out = c_void_p()
        rc = self._regattr(self._domain.address, byref(attr), flags, byref(out))
        self._check(rc, "fi_mr_regattr")
        handle = _Handle(out, fi.C.fid_mr)
        self._regions.add(handle)
        return handle

    # --- completions

    def trywait(self) -> bool:
        """Tell whether it is safe to sleep on wait_fds; False = read the queue first."""
        assert self._trywait is not None
        return self._trywait(self._fabric.address, self._fids, 1) == 0

    def read_error(self) -> CqError | None:
        """Take one error off the queue, once cq_read has said -FI_EAVAIL.

        None = there was none, or it cannot be read, and the NIC is lost.
        """
        entry = fi.C.fi_cq_err_entry(src_addr=fi.FI_ADDR_UNSPEC)
        rc = self._readerr(self.cq, byref(entry), 0)
        if rc <= 0:
            if rc not in (0, -fi.FI_EAGAIN):
                self.lose("fi_cq_readerr", rc)
            return None
        words = self.lib.strerror(entry.err)
        # Without an endpoint some look for the words where nothing is any more, and crash.
        if self._cq_strerror is not None and self._endpoints:
            own: Any = self._cq_strerror(self.cq, entry.prov_errno, entry.err_data, None, 0)
            if own:
                words += f"; provider: {own.decode(errors='replace')}"
        text = f"{words} (err={entry.err} prov_errno={entry.prov_errno})"
        context = entry.op_context or 0
        return CqError(context, entry.prov_errno, text)

    def read_event(self) -> str:
        """Take one error off the event queue, in words; "" = there is none."""
        if self._eq is None or self.closed:
            return ""
        entry = fi.C.fi_eq_err_entry()
        if self._eq_readerr(self._eq.address, byref(entry), 0) <= 0:
            return ""
        return f"{self.lib.strerror(entry.err)} (err={entry.err} prov_errno={entry.prov_errno})"

    # --- ends

    def lose(self, what: str, rc: int) -> None:
        """A call has failed in a way that leaves nothing of this NIC, unless it may pass."""
        if -rc in SHORT:
            return
        self.failure = self.failure or f"{what}: {self.lib.strerror(-rc)} ({rc})"
        for handle in (*self._open, *self._endpoints, *self._regions):
            handle.lost = True

    def close(self) -> None:
        """Close regions, endpoints, address vector, queues, domain, fabric. Idempotent."""
        keep_at_fork(self)
        self.closed = True
        for region in list(self._regions):
            region.close()
        while self._endpoints:
            self._endpoints.pop().close()
        while self._open:
            self._open[-1].close()
            self._open.pop()
        if self.info is not None:
            self.lib.freeinfo(self.info)
            self.info = None

    def orphan(self) -> None:
        """In a forked child: forget everything, call nothing."""
        self.closed = True
        for handle in (*self._open, *self._endpoints, *self._regions):
            handle.forget()
        self._open.clear()
        self._endpoints.clear()
        self.info = None


_COUNTER_BITS: Final = 24
_LOCAL: Final = 1 << 62  # tells a region's local key from its remote one, so that a mix-up fails


@dataclass(slots=True, eq=False)
class Region:
    """One registered region.

    Attributes:
        handles: its registrations; where there are two, the second is what peers may do.
        desc: what a row passes as its memory descriptor; 0 where the provider wants none.
        target, sink: whether peers, or our own reads, may write here.
        open: tickets that read from it.
        start, end: addresses of its first byte, and behind its last.
    """

    handles: Sequence[Any]
    memory: Memory
    key: DomainKey
    desc: int
    target: bool
    sink: bool = False
    open: int = 0
    start: int = field(init=False)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.memory.ptr
        self.end = self.start + self.memory.nbytes

    def holds(self, src: Column, nbytes: Column) -> bool:
        first, end = bounds(src, nbytes)
        return self.start <= first and end <= self.end

    def close(self) -> None:
        for handle in self.handles:
            handle.close()


class Regions:
    """All regions of one NIC.

    Args:
        dmabuf: makes a dma-buf of device memory; None = the provider finds the pages by CUDA.

    Attributes:
        by_lkey: the regions that rows may use.
        by_rkey, readable: those that peers may write, or read.
        dying: those that were given back while rows in flight read from them.
    """

    def __init__(self, nic: Nic, dmabuf: DmabufExport | None) -> None:
        self._nic = nic
        self._dmabuf = dmabuf
        attr = nic.info.contents.domain_attr.contents
        mode: int = attr.mr_mode
        self._virtual = bool(mode & fi.FI_MR_VIRT_ADDR)
        self._own_keys = not mode & fi.FI_MR_PROV_KEY
        self._key_bits = min(8 * int(attr.mr_key_size), 63)  # keys travel as msgpack integers
        # A random start, so that a key of an earlier incarnation at this address opens nothing.
        self._salt = int.from_bytes(os.urandom(8), "little")
        self._numbers = itertools.count(1)
        self.by_lkey: dict[int, Region] = {}
        self.by_rkey: dict[int, Region] = {}
        self.readable: dict[int, Region] = {}
        self.dying: list[Region] = []

    def add(self, memory: Memory, access: Access) -> Region:
        """Register memory; FabricError if the provider refuses, or it is not mapped."""
        if memory.owner is None and memory.kind == "cpu":
            # Software providers take anything, and crash once a row arrives.
            _check_mapped(memory, self._nic.name)
        number = (self._salt << _COUNTER_BITS | next(self._numbers)) & ((1 << 63) - 1)
        handles = []
        with contextlib.ExitStack() as stack:
            dmabuf = None
            if self._dmabuf is not None and memory.kind != "cpu":
                dmabuf = stack.enter_context(exported(self._dmabuf, memory))
            for rights in self._rights(access):
                attr, flags, kept = mr_attr(memory, rights, dmabuf=dmabuf)
                if self._own_keys:
                    attr.requested_key = number & ((1 << self._key_bits) - 1)
                handles.append(self._nic.register(attr, flags))
                del kept
        rkey = int(handles[-1].contents().key)
        key = DomainKey(number ^ _LOCAL, rkey, memory.ptr if self._virtual else 0)
        desc = int(handles[0].contents().mem_desc or 0)
        region = Region(handles, memory, key, desc, access.target, access.sink)
        self.by_lkey[key.lkey] = region
        if region.target:
            self.by_rkey[key.rkey] = region
        if access.readable:
            self.readable[key.rkey] = region
        return region

    def _rights(self, access: Access) -> tuple[int, ...]:
        """List the rights of each registration of some memory: ours first, peers' last.

        FI_SEND is not among it: on the fabric `efa` it opens memory for peers to read.
        """
        ours = fi.FI_WRITE
        theirs = fi.FI_REMOTE_WRITE if access.target else 0
        if self._nic.software:
            # Reads end in buffers of the NIC's own. An empty row with an immediate may come under
            # a key that is to be read: what may be written the owner says by its leases.
            if access.readable:
                theirs |= fi.FI_REMOTE_READ | fi.FI_REMOTE_WRITE
            return (ours | theirs,)
        ours |= fi.FI_READ if access.sink else 0
        if access.readable:
            return ours, theirs | fi.FI_REMOTE_READ
        return (ours | theirs,)

    def remove(self, key: DomainKey) -> None:
        """Forget a key; the registration ends when the last row that reads from it is back."""
        region = self.by_lkey.pop(key.lkey, None)
        if region is None:
            return
        self.by_rkey.pop(key.rkey, None)
        self.readable.pop(key.rkey, None)
        if region.open:
            self.dying.append(region)
        else:
            region.close()

    def cut(self, key: DomainKey, reads_at: Callable[[Region], list[bool]]) -> None:
        """End at once what peers of a device may read, and what reads of ours write.

        The device ends such rows by itself. `reads_at` is the one of Slots.
        """
        region = self.by_lkey.get(key.lkey)
        if region is None:
            return
        if len(region.handles) > 1:
            region.handles[-1].close()
        if region.open and all(reads_at(region)):
            region.close()

    def bury(self) -> None:
        """End the registrations whose last row has come back."""
        for region in self.dying:
            if not region.open:
                region.close()
        self.dying[:] = [region for region in self.dying if region.open]

    def range_of(self, rkey: int, *, reads: bool) -> tuple[int, int]:
        """The range that a key opens to peers' reads, or writes: (base, nbytes); nbytes 0 = none.

        (1, 0) = peers may only read there: an empty row with an immediate may still come (C9).
        """
        region = (self.readable if reads else self.by_rkey).get(rkey)
        if region is not None:
            return region.key.base, region.memory.nbytes
        return (1, 0) if rkey in self.readable else (0, 0)

    def close(self) -> None:
        for region in (*self.by_lkey.values(), *self.dying):
            region.close()
        self.by_lkey.clear()
        self.by_rkey.clear()
        self.readable.clear()
        self.dying.clear()


def mr_attr(
    memory: Memory, rights: int, *, dmabuf: tuple[int, int] | None = None
) -> tuple[Structure, int, object]:
    """Describe memory for fi_mr_regattr.

    Args:
        memory: host memory, or "cuda:N".
        rights: FI_WRITE and so on; no more than is done, since FI_RECV or FI_READ asks the NIC for
            write access, which memory that is mapped read-only refuses.
        dmabuf: (fd, offset) of memory that is exported so.

    Returns:
        The attributes, the flags, and what must live until the call has returned.
    """
    attr = fi.C.fi_mr_attr(iov_count=1, access=rights)
    kind, _, index = memory.device.partition(":")
    if kind == "cuda":
        attr.iface = fi.FI_HMEM_CUDA
        attr.device.cuda = int(index)
    if dmabuf is not None:
        fd, offset = dmabuf
        # The address by which peers call the first byte is base_addr + offset (fi_mr(3)).
        place = fi.C.fi_mr_dmabuf(fd, offset, memory.nbytes, memory.ptr - offset)
        attr.mr_iov = addressof(place)  # since 1.20 this place is a union with `dmabuf`
        return attr, fi.FI_MR_DMABUF, place
    where = fi.C.iovec(memory.ptr, memory.nbytes)
    attr.mr_iov = addressof(where)
    return attr, 0, where


def _check_mapped(memory: Memory, nic: str) -> None:
    """Raise FabricError unless every page of a raw range is mapped in this process."""
    # int mincore(void *addr, size_t length, unsigned char *vec);
    mincore = libc().mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    page = mmap.PAGESIZE
    step = 1 << 30
    pages = ctypes.create_string_buffer(step // page)
    start, end = memory.ptr // page * page, memory.ptr + memory.nbytes
    for at in range(start, end, step):
        if mincore(at, min(step, end - at), pages) != 0:
            raise FabricError(
                f"{nic}: {memory.nbytes} bytes at {memory.ptr:#x} are not all mapped in this "
                f"process: {os.strerror(ctypes.get_errno())}",
                code=Status.LOCAL_KEY.name,
            )

"""TransferEngine: the paper's verbs. Turns each into a checked job or a command.

One engine is one device's NICs (the paper's DomainGroup), its regions, its peers and its
immediates. The worker does the rest; nothing here posts or polls.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Literal, Self, overload

from tep.api import EngineOptions, Pages, Routing, ScatterDst, Sender
from tep.backends import open_device
from tep.backends.base import Access, Domain
from tep.checks import (
    INT64_MAX,
    U64_MAX,
    check_flag,
    check_int,
    check_kind,
    check_seconds,
    check_text,
    shown,
    unpicklable,
)
from tep.control.leases import Grant, grant_lease
from tep.control.membership import PeerEvent, PeerWatch
from tep.control.messages import REASON_MAX
from tep.core.imm import check_imm
from tep.core.path import Link
from tep.core.peers import PeerGroup
from tep.core.read_requests import (
    check_sink,
    paged_read_job,
    pair_of,
    single_read_job,
)
from tep.core.region import MrHandle, Remote, check_source, register
from tep.core.requests import (
    DEFAULT,
    ImmArg,
    barrier_job,
    paged_job,
    scatter_job,
    single_job,
    slices_of,
)
from tep.core.stats import EngineStats
from tep.core.transfer import Expectation, Message, Notice, Removal, Transfer
from tep.drivers import Driver
from tep.engine.machine import Machine
from tep.engine.prepared import (
    Prepared,
    PreparedBarrier,
    PreparedPages,
    PreparedSingle,
    PreparedSlices,
)
from tep.engine.regions import keep_or_free
from tep.engine.report import engine_stats, explain
from tep.errors import BackendUnavailable, BadRequest, BusyError, CallbackError, UsageError
from tep.memory import Buffer, Memory, adapt, copied
from tep.topology import Topology, detect
from tep.trace import Trace
from tep.tracing import record
from tep.turning import driver_for
from tep.watch import Watcher
from tep.wire import MrDesc, NetAddr, Target

__all__ = ["TransferEngine"]


TRACE_EVENTS_MAX: Final = 200_000
"""Spans and marks of a trace, unless its user says otherwise: some 100 MB."""

POOL_BUFFERS_MAX: Final = 2**20
POOL_BYTES_MAX: Final = 2**34
"""Of one submit_recvs on one NIC; each buffer costs memory and a call of the NIC's."""


_KNOWN: Final = int(Access.SOURCE_AND_TARGET | Access.READABLE | Access.SINK)
_READS: Final = int(Access.READABLE | Access.SINK)


class TransferEngine:
    """One-sided writes with immediates over all NICs of one device.

    No order is promised between any two operations. Any thread may call any method, except that
    the inline driver's engines belong to one. Use it as a context manager, or close() it.

    Args:
        domains: its NICs, in order.
        driver: what turns it.
        name, epoch: its identity: a restarted engine of the same name and a later epoch replaces
            the former.
        options: limits and defaults.

    Attributes:
        driver: what turns it.
    """

    def __init__(
        self,
        domains: Sequence[Domain],
        *,
        driver: Driver,
        name: str,
        epoch: int,
        options: EngineOptions = EngineOptions(),
    ) -> None:
        check_kind("TransferEngine: options", options, EngineOptions)
        name = check_text("TransferEngine: name", name)
        epoch = check_int("TransferEngine: epoch", epoch, 0, U64_MAX)
        machine = self._machine = Machine(domains, driver, name, epoch, options)
        self.driver = driver
        self._domains = machine.domains
        self._worker = machine.worker
        self._peers = machine.peers
        driver.start(machine)

    @classmethod
    def open(
        cls,
        backend: str,
        *,
        device: str | None = None,
        driver: Driver | None = None,
        options: EngineOptions = EngineOptions(),
        **backend_options: object,
    ) -> Self:
        """Open the NICs of a backend and an engine over them.

        Args:
            backend: a name of `tep info`, e.g. "loopback" or "auto".
            device: "cuda:N" takes the NICs and the cores beside that GPU, as `detect_topology`
                finds them, and registers its memory by dma-buf; None = what the backend takes.
            driver: None = what the backend asks for, else one worker thread.
            options: limits and defaults.
            **backend_options: the backend's own, e.g. nics=2.

        Raises:
            UsageError: unknown backend or option.
            BackendUnavailable: it cannot run here; says what was tried, and what would bring it.
        """
        opened = open_device(backend, device, backend_options)
        name, epoch = opened.name, opened.epoch
        try:
            chosen = driver or driver_for(opened)
            engine = cls(opened.domains, driver=chosen, name=name, epoch=epoch, options=options)
            engine._machine.about = opened.about
            if opened.cpus and driver is None:
                engine._machine.about += f"; worker on CPUs {', '.join(map(str, opened.cpus))}"
            engine._worker.watch.pin = opened.pin
            opens = f"open, {len(opened.domains)} NICs on {backend}"
            engine._worker.journal.decided(opens, engine.explain)
            return engine
        except OSError as error:
            for domain in opened.domains:
                domain.close()
            raise BackendUnavailable(
                f"{name}: the NICs are open, and what turns the engine cannot start",
                (("a thread and its descriptors (limits: ulimit -n, -u)", str(error)),),
            ) from error

    @staticmethod
    def detect_topology() -> Topology:
        """Which GPU of this machine is beside which NICs and cores; see `tep info --topology`."""
        return detect()

    def close(self) -> None:
        """End everything: every open handle settles, NICs and memory are let go. Idempotent."""
        self._machine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    __reduce__ = unpicklable(
        "it has NICs of this process; open another there, and send main_address.to_bytes()"
    )

    def __repr__(self) -> str:
        machine = self._machine
        regions, peers = len(machine.regions), len(machine.peers.links)
        state = "closed" if machine.closed else f"{regions} regions, {peers} peers"
        return f"{type(self).__name__}({machine.address}; {state})"

    # ------------------------------------------------------------------ identity and memory

    @property
    def name(self) -> str:
        """How reports and peers call it."""
        return self._machine.name

    @property
    def wait_timeout_s(self) -> float:
        """What wait() uses when no timeout is given, seconds."""
        return self._machine.wait_timeout_s

    @property
    def callback_errors(self) -> deque[CallbackError]:
        """The last 100 exceptions that users' callbacks raised."""
        return self._machine.callback_errors

    @property
    def main_address(self) -> NetAddr:
        """This engine's address, for its peers; it travels as bytes in anything."""
        return self._machine.address

    def reg_mr(
        self, buffer: Buffer, *, access: Access = Access.SOURCE_AND_TARGET
    ) -> tuple[MrHandle, MrDesc]:
        """Register memory with every NIC.

        Args:
            buffer: what `tep.memory.adapt` takes: arrays, buffers, mmap, DLPack, CUDA arrays,
                (pointer, nbytes, device).
            access: Access.SOURCE for memory that peers may not write; with `| Access.READABLE` they
                may read it. Access.SINK is memory that reads of this engine bring bytes to.

        Returns:
            The handle, for use as a source here, and the descriptor, for the peers. The engine
            holds the memory until `deregister`.

        Raises:
            BadRequest: not registrable; read-only memory as a target; a device that a NIC cannot
                reach.
            UsageError: rights to read, where the NICs have no reads.
            FabricError: a NIC refused.
        """
        self._machine.check_open("reg_mr")
        check_kind("reg_mr: access", access, Access)
        memory = adapt(buffer)
        access = self._check_access(memory, access)
        keys = self.driver.call(lambda: register(self._domains, memory, access))
        number = self._machine.new_region_number()
        desc = MrDesc(
            self._machine.address,
            number,
            memory.nbytes,
            memory.device,
            access.target,
            tuple(key.rkey for key in keys),
            tuple(key.base for key in keys),
            access.readable,
            memory.stride,
        )
        handle = MrHandle(self._machine, memory, access, keys, desc)
        self._machine.regions[number] = handle
        return handle, desc

    def deregister(self, mr: MrHandle) -> None:
        """Give a region back: no NIC knows it afterwards, and the engine lets go of the memory.

        Where a NIC that is down may still touch it, or on libfabric a writer whose lease ended in
        quarantine, the engine holds it until close(), and `mr.quarantined` goes on to say so.

        Raises:
            BusyError: transfers still use it, a lease of it is not over, or the engine would
                have to hold memory that it was given as a bare pointer.
            ClosedError: it was given back before.
        """
        machine = self._machine
        machine.check_open("deregister")
        check_source(mr, machine, "deregister")
        if mr.root is not mr:
            raise BadRequest(f"deregister: {mr!r} is a view; give the region itself")

        def forget() -> None:
            self._worker.take_all_commands()
            check_source(
                mr, self._machine, "deregister"
            )  # again: another thread may have been here
            if mr.inflight:
                raise BusyError(
                    f"deregister: region {mr.desc.region} is in use by {mr.inflight} transfers "
                    "in flight; wait for them, or cancel them"
                )
            free = keep_or_free(machine, mr)
            mr.closed = True
            for domain, key in zip(self._domains, mr.keys, strict=True) if free else ():
                domain.deregister(key)
            del machine.regions[mr.desc.region]
            self._peers.forget_source(mr)

        self.driver.call(forget)

    def lease(
        self,
        mr: MrHandle,
        peer: NetAddr,
        *,
        for_s: float,
        offset: int = 0,
        nbytes: int = -1,
        access: Access = Access.TARGET,
        fence: bool = True,
    ) -> Grant:
        """Let a peer write to bytes of a region for a time, by a Lease in place of an MrDesc.

        With `access=Access.READABLE` it may read them instead, or do both. A read whose bytes come
        after the end of its lease fails at the reader: they may be new contents.

        A lease is over when it has run out or was revoked *and* nobody can use it any more: wait
        for `grant.over`. Until then the region cannot be deregistered. nbytes=-1: to the region's
        end. A silent holder is fenced off until it speaks; with fence=False, or where NICs cannot
        fence (`caps.imm_source` False), its lease ends in quarantine.

        Raises:
            BadRequest: no such bytes or time, or a right that the region does not give.
            BusyError: some of the bytes are in quarantine.
            UsageError: this backend has no control messages.
        """
        self._machine.check_open("lease")
        self._machine.check_control(
            "lease", "register a region that you deregister to end all writing"
        )
        check_source(mr, self._machine, "lease")
        link = self._peers.link(peer, "lease")
        start = check_int("lease: offset", offset, 0, mr.memory.nbytes)
        nbytes = check_int("lease: nbytes", nbytes)
        nbytes = mr.memory.nbytes - start if nbytes == -1 else nbytes
        if nbytes < 1 or start + nbytes > mr.memory.nbytes:
            text = f"lease: bytes {start} .. {start + nbytes} are outside {mr!r}, or none"
            raise BadRequest(text)
        view = mr if nbytes == mr.memory.nbytes else mr[start : start + nbytes]
        fence = check_flag("lease: fence", fence)
        check_kind("lease: access", access, Access)
        return grant_lease(
            self._machine, self._worker.leases, view, link, for_s, access, fence=fence
        )

    # ------------------------------------------------------------------ writes

    def submit_single_write(
        self,
        nbytes: int,
        src: tuple[MrHandle, int],
        dst: tuple[Target, int],
        imm: int | None = None,
        *,
        routing: Routing = DEFAULT,
        on_done: Callable[[Transfer], object] | None = None,
    ) -> Transfer:
        """Write `nbytes` contiguous bytes from (region, offset) to (descriptor, offset).

        Long ones are cut into shards over all NICs.
        The receiver counts `tep.count_imms(tep.Single(nbytes, routing), nlocal, nremote)`
        immediates.
        """
        try:
            mr, _ = src
            target, offset = dst
        except (TypeError, ValueError):
            raise _no_pair("submit_single_write", src, dst, "offset") from None
        if type(mr) is not MrHandle or mr.owner is not self._machine or mr.closed:
            check_source(mr, self._machine, "submit_single_write")
        remote = self._peers.resolve(target, "submit_single_write")
        job = single_job(nbytes, src, remote, offset, imm, routing, len(self._domains))
        return self._machine.submit(job, on_done)

    def submit_paged_writes(
        self,
        page_bytes: int,
        src: tuple[MrHandle, Pages],
        dst: tuple[Target, Pages],
        imm: ImmArg = None,
        *,
        routing: Routing = DEFAULT,
        on_done: Callable[[Transfer], object] | None = None,
    ) -> Transfer:
        """Write page k of the source list to page k of the target list, for all k.

        Args:
            page_bytes: length of each page.
            src: region and pages.
            dst: descriptor and pages; they must not overlap.
            imm: one immediate for every page, or an array with one for each, or None.
            routing: `domain` pins to one NIC.
            on_done: called with the transfer once it settles.

        Returns:
            A transfer. The receiver counts one immediate a page.
        """
        try:
            mr, _ = src
            target, pages = dst
        except (TypeError, ValueError):
            raise _no_pair("submit_paged_writes", src, dst, "pages") from None
        check_source(mr, self._machine, "submit_paged_writes")
        remote = self._peers.resolve(target, "submit_paged_writes")
        job = paged_job(page_bytes, src, (remote, pages), imm, routing, len(self._domains))
        return self._machine.submit(job, on_done)

    def add_peer_group(self, peers: Sequence[NetAddr]) -> PeerGroup:
        """Resolve and connect peers in advance, for submit_scatter and submit_barrier.

        Raises:
            FabricError: a NIC cannot connect to a peer now; a later call may succeed.
        """
        self._machine.check_open("add_peer_group")
        links = tuple(self._peers.link(peer, "add_peer_group") for peer in peers)

        def connect() -> None:
            for link in links:
                for domain in range(len(self._domains)):
                    for nic in range(len(link.addr.domains)):
                        link.peer(domain, nic)

        self._machine.run(connect)
        return PeerGroup(self._peers, links)

    def submit_scatter(
        self,
        src: MrHandle,
        dsts: Sequence[ScatterDst],
        imm: int | None = None,
        *,
        group: PeerGroup | None = None,
        routing: Routing = DEFAULT,
        on_done: Callable[[Transfer], object] | None = None,
    ) -> Transfer:
        """Write a different slice of one region to each target.

        Each target counts `tep.count_imms(tep.Scatter(nbytes, routing), nlocal, nremote)`
        immediates.
        """
        check_source(src, self._machine, "submit_scatter")
        slices = slices_of(dsts)
        targets = self._peers.targets(slices.descs, group, "submit_scatter")
        job = scatter_job(src, slices, targets, imm, routing, len(self._domains))
        return self._machine.submit(job, on_done)

    def submit_barrier(
        self,
        dsts: Sequence[Target],
        imm: int,
        *,
        group: PeerGroup | None = None,
        routing: Routing = DEFAULT,
        on_done: Callable[[Transfer], object] | None = None,
    ) -> Transfer:
        """Send one immediate without bytes to each target; each counts one."""
        targets = self._peers.targets(dsts, group, "submit_barrier")
        return self._machine.submit(barrier_job(targets, imm, routing, len(self._domains)), on_done)

    # ------------------------------------------------------------------ reads

    def submit_single_read(
        self,
        nbytes: int,
        src: tuple[Target, int],
        dst: tuple[MrHandle, int],
        imm: int | None = None,
        *,
        routing: Routing = DEFAULT,
        on_done: Callable[[Transfer], object] | None = None,
    ) -> Transfer:
        """Read `nbytes` contiguous bytes from (descriptor, offset) to (region, offset).

        Long ones are cut into shards over all NICs. `ok` means that all bytes are here. With an
        `imm` the owner then gets one immediate (`tep.count_imms(tep.Read())`): its memory was read.
        A read that fails or is cancelled before has told it nothing.
        """
        what = "submit_single_read"
        pair_of(what, src, dst, "offset")
        remote = self._source(src[0], dst[0], what)
        job = single_read_job(nbytes, (remote, src[1]), dst, imm, routing, len(self._domains))
        return self._machine.submit(job, on_done)

    def submit_paged_reads(
        self,
        page_bytes: int,
        src: tuple[Target, Pages],
        dst: tuple[MrHandle, Pages],
        imm: int | None = None,
        *,
        routing: Routing = DEFAULT,
        on_done: Callable[[Transfer], object] | None = None,
    ) -> Transfer:
        """Read page k of the source list to page k of the destination list, for all k.

        Args:
            page_bytes: length of each page.
            src: descriptor and pages; they may be listed twice.
            dst: region and pages; they must not overlap.
            imm: what the owner gets, once, when all pages are back; None: nothing.
            routing: `domain` pins to one NIC.
            on_done: called with the transfer once it settles.
        """
        what = "submit_paged_reads"
        pair_of(what, src, dst, "pages")
        remote = self._source(src[0], dst[0], what)
        job = paged_read_job(page_bytes, (remote, src[1]), dst, imm, routing, len(self._domains))
        return self._machine.submit(job, on_done)

    # ------------------------------------------------------------------ prepared transfers

    def prepare_single_write(
        self,
        nbytes: int,
        src: tuple[MrHandle, int],
        dst: tuple[Target, int],
        *,
        routing: Routing = DEFAULT,
    ) -> Prepared:
        """Check a single write once, to submit it again and again: `prepared.submit(imm=...)`.

        Arguments and errors are those of `submit_single_write`; offsets given to `submit` are added
        to these. Peers, NICs, leases and regions may come and go meanwhile: see Prepared.
        """
        _check_pair("prepare_single_write", src, dst, "offset")
        return PreparedSingle(self._machine, nbytes, src, dst, routing)

    def prepare_paged_writes(
        self,
        page_bytes: int,
        src: tuple[MrHandle, Pages],
        dst: tuple[Target, Pages],
        *,
        routing: Routing = DEFAULT,
    ) -> Prepared:
        """Check a paged write once, and lay out its columns: `submit(imm, src_offset=...)` posts.

        Arguments and errors are those of `submit_paged_writes`. The layers of a KV cache are one
        prepared list at moving offsets; `pages=slice(a, b)` submits a part of the list.
        """
        _check_pair("prepare_paged_writes", src, dst, "pages")
        return PreparedPages(self._machine, page_bytes, src, dst, routing)

    def prepare_scatter(
        self,
        src: MrHandle,
        dsts: Sequence[ScatterDst],
        *,
        group: PeerGroup | None = None,
        routing: Routing = DEFAULT,
    ) -> Prepared:
        """Check a scatter once; offsets given to `submit` are added to those of every slice."""
        check_source(src, self._machine, "prepare_scatter")
        return PreparedSlices(self._machine, src, slices_of(dsts), group, routing)

    def prepare_barrier(
        self,
        dsts: Sequence[Target],
        *,
        group: PeerGroup | None = None,
        routing: Routing = DEFAULT,
    ) -> Prepared:
        """Check a barrier once: `submit(imm)` sends it."""
        return PreparedBarrier(self._machine, dsts, group, routing)

    # ------------------------------------------------------------------ messages

    def submit_send(
        self, peer: NetAddr, payload: Buffer, *, on_done: Callable[[Message], object] | None = None
    ) -> Message:
        """Send a small message to a peer's receive pool.

        The payload, a buffer, array or tensor in CPU memory, is copied: it is free at once.

        Raises:
            BadRequest: not bytes, or longer than the NIC's messages may be.
            BusyError: too many rows and messages wait already.
        """
        self._machine.check_open("submit_send")
        link = self._peers.link(peer, "submit_send")
        content = copied("submit_send", payload)
        limit = self._domains[0].caps.max_msg_bytes
        if len(content) > limit:
            raise BadRequest(
                f"submit_send: {len(content)} bytes, a message has {limit} at the most; use a write"
            )
        reserved = self._machine.reserve("submit_send", 1)
        message = Message(self._machine, content, link, self.driver.now_s(), reserved)
        self._machine.enqueue(self._worker.send, message, on_done)
        return message

    @overload
    def submit_recvs(
        self,
        nbytes: int,
        count: int,
        callback: Callable[[memoryview, Sender], object],
        *,
        with_sender: Literal[True],
    ) -> None: ...
    @overload
    def submit_recvs(
        self, nbytes: int, count: int, callback: Callable[[memoryview], object]
    ) -> None: ...
    def submit_recvs(
        self,
        nbytes: int,
        count: int,
        callback: Callable[..., object],
        *,
        with_sender: bool = False,
    ) -> None:
        """Open a rotating pool of `count` receive buffers of `nbytes` each on every NIC.

        A buffer leaves the pool while the callback runs, and goes back then: copy what must stay.
        Without a free buffer a sender waits; a message longer than `nbytes` fails there: LENGTH.
        One call opens at most 2**20 buffers and 16 GiB a NIC. Another call with the same callback
        adds buffers; an engine has one callback.

        Args:
            nbytes: of a buffer.
            count: of buffers.
            callback: called with the message, as a memoryview, outside the engine's step.
            with_sender: call it with a `tep.Sender` as well: callback(view, sender).

        Raises:
            BadRequest: impossible numbers, or the engine has another callback.
        """
        self._machine.check_open("submit_recvs")
        nbytes = check_int("submit_recvs: nbytes", nbytes, 1, POOL_BYTES_MAX)
        count = check_int("submit_recvs: count", count, 1, POOL_BUFFERS_MAX)
        if nbytes * count > POOL_BYTES_MAX:
            raise BadRequest(
                f"submit_recvs: nbytes={nbytes} count={count} are {nbytes * count} bytes a NIC, "
                f"more than {POOL_BYTES_MAX}; open a smaller pool"
            )

        wanted = callback, check_flag("submit_recvs: with_sender", with_sender)

        def post() -> None:
            former = self._worker.receive
            if former is not None and former != wanted:
                raise BadRequest(
                    f"submit_recvs: messages go to {shown(former[0])} already, with_sender="
                    f"{former[1]}; have one callback tell them apart, or open another engine"
                )
            self._worker.receive = wanted
            for domain in itertools.compress(self._domains, self._worker.group.alive):
                domain.post_recvs(nbytes, count)

        self._machine.run(post)

    # ------------------------------------------------------------------ immediates

    def expect_imm_count(
        self,
        imm: int,
        count: int,
        *,
        sender: NetAddr | None = None,
        on_done: Callable[[Expectation], object] | None = None,
    ) -> Expectation:
        """Wait for `count` arrivals of one immediate, whether they came before or come later.

        Reaching it uses `count` arrivals up; more of them stay for the next expectation of the same
        immediate, which stands in line behind this one.

        With a `sender` that is lost, restarted or removed it fails with PEER_LOST; counts stay.
        `watch_peer` it: who only receives learns of no death. Arrivals of others count as well.
        """
        machine, table = self._machine, self._worker.imms
        if machine.closed:
            machine.check_open("expect_imm_count")
        imm = check_imm(imm)
        if type(count) is not int or not 0 <= count <= INT64_MAX:
            count = check_int("expect_imm_count: count", count, 0, INT64_MAX)
        table.refuse_claimed(imm)
        link = None if sender is None else self._peers.link(sender, "expect_imm_count")
        expectation = Expectation(machine, table, imm, count, link, self.driver.now_s())
        machine.enqueue(self._worker.expect, expectation, on_done)
        return expectation

    def fail(
        self,
        peer: NetAddr,
        imm: int,
        reason: str,
        *,
        on_done: Callable[[Notice], object] | None = None,
    ) -> Notice:
        """Tell a peer that what it expects under an immediate will not come.

        Every expectation of it that waits there fails with PEER_FAILED and the reason, or else the
        next one that is stated. Counts stay. It is repeated until the peer's engine has it.

        Raises:
            BadRequest: not an immediate, or too long a reason.
            UsageError: this backend has no control messages.
        """
        self._machine.check_open("fail")
        self._machine.check_control("fail", "send a message of your own (submit_send)")
        reason = check_text("fail: reason", reason, REASON_MAX)
        link = self._peers.link(peer, "fail")
        notice = Notice(self._machine, check_imm(imm), reason, link, self.driver.now_s())
        self._machine.enqueue(self._worker.tell, notice, on_done)
        return notice

    def on_imm(self, imms: range, callback: Callable[[int, int], object]) -> None:
        """Claim immediates: `callback(imm, count)` gets each arrival, and none of them is counted.

        Raises:
            BadRequest: not a range with step 1, or one of them is claimed, expected or counted.
        """
        self._machine.check_open("on_imm")
        self._machine.after_commands(lambda: self._worker.imms.claim(imms, callback))

    def remove_imm(self, imm: int) -> int:
        """Forget an immediate's count, or the claim that starts with it; return what was left.

        Raises:
            BusyError: an expectation waits for it.
        """
        self._machine.check_open("remove_imm")
        value = check_imm(imm)
        self._worker.failures.broken.pop(value, None)
        return self._machine.after_commands(lambda: self._worker.imms.remove(value))

    def alloc_uvm_watcher(self, callback: Callable[[int, int], object]) -> Watcher:
        """Allocate a 64-bit word; `callback(old, new)` after it changed.

        Values in between may be missed. Where the engine was opened with device="cuda:N", kernels
        write it at `watcher.device_ptr`.
        """
        self._machine.check_open("alloc_uvm_watcher")
        page = self._worker.watch
        watcher = Watcher(page, self.driver.call(lambda: page.allocate(callback)), self.driver.kick)
        self.driver.kick()
        return watcher

    # ------------------------------------------------------------------ peers that come and go

    def watch_peer(
        self, peer: NetAddr, *, every_s: float = 1.0, lost_after_s: float = 5.0
    ) -> PeerWatch:
        """Ask a peer's engine again and again whether it is there, over each of its NICs.

        No application is involved over there. A peer that dies is known to be lost after
        `lost_after_s` and at most one `every_s`; time in which this engine was held up itself does
        not count. What is found is in the watch, is told to `on_peer`, and ends the expectations
        that name it as their `sender`. That it has restarted shows where another incarnation
        answers at its address (verbs, tcp on the same port), or when its new address is met here.

        Args:
            peer: its address.
            every_s: between two questions.
            lost_after_s: without an answer for so long it is lost; twice `every_s` or more;
                infinite: it never is, which leaves `round_trip_s`.

        Raises:
            UsageError: this backend has no control messages.
            BadRequest: times that contradict each other.
            BusyError: this peer is watched already.
        """
        self._machine.check_open("watch_peer")
        self._machine.check_control(
            "watch_peer",
            "ask the peer by messages of your own (submit_send), rely on what transfers reveal "
            "(on_peer)",
        )
        every_s = check_seconds("watch_peer: every_s", every_s, 1e-9)
        lost_after_s = check_seconds("watch_peer: lost_after_s", lost_after_s, never=True)
        if lost_after_s < 2 * every_s:
            raise BadRequest(
                f"watch_peer: every_s={every_s} lost_after_s={lost_after_s}; a peer must be asked "
                "twice, at the least, before it is lost"
            )
        link = self._peers.link(peer, "watch_peer")
        found = self.driver.call(lambda: self._machine.life.watch(link, every_s, lost_after_s))
        if found is None:
            raise BusyError(f"watch_peer: {peer.name} is watched already; close that watch first")
        self.driver.kick()
        return found

    def on_peer(self, callback: Callable[[PeerEvent], object]) -> None:
        """Have callback(event) called for each change of a peer, once a change, from now on.

        A peer is lost or back, or has restarted; one of its NICs is lost or back. Without a watch
        this is what transfers reveal. Callbacks run like those of handles: outside the step, on
        the thread that turns the engine.
        """
        self._machine.check_open("on_peer")
        self._machine.life.callbacks = (*self._machine.life.callbacks, callback)

    def remove_peer(self, peer: NetAddr) -> Removal:
        """Let go of a peer, and of all that is remembered of it.

        Requests to it are refused at once. Those that were submitted before end as they would
        have; when the last has ended, the removal settles, and the peer can be met anew. It is for
        peers that have left: of one that goes on writing to this engine, no failover can be judged
        any more. An unknown peer is removed already. A request that another thread is submitting
        at this very moment may still go out; it ends as it would have.
        """
        self._machine.check_open("remove_peer")
        if not isinstance(peer, NetAddr):
            raise BadRequest(f"remove_peer: {type(peer).__name__} is not a NetAddr")
        link = self._peers.leave(peer) or Link(peer, self._domains)
        removal = Removal(self._machine, link, self.driver.now_s())
        self._machine.enqueue(self._machine.life.leave, removal, None)
        return removal

    # ------------------------------------------------------------------ reports

    def stall_report(self) -> str:
        """Say what all that is open waits for: which peer, NIC, counter, how many, since when."""
        return self._machine.stall_report()

    def stats(self) -> EngineStats:
        """What this engine has done; see EngineStats."""
        return engine_stats(self._machine)

    def trace(self, *, events_max: int = TRACE_EVENTS_MAX) -> Trace:
        """Record what this engine does, until `stop()` of the result; use that by `with`.

        Transfers, rows on each NIC, immediates, faults and steps, for `Trace.write` (Perfetto),
        `summary` and `draw`. What is in flight when it begins is not recorded as a batch.

        Args:
            events_max: how many spans and marks are kept; later ones are only counted.

        Raises:
            UsageError: it is traced already.
        """
        self._machine.check_open("trace")
        events_max = check_int("trace: events_max", events_max, 1, INT64_MAX)
        trace = Trace("host", events_max)
        trace.stops.append(record(self._machine, trace))
        return trace

    def explain(self, peer: NetAddr | MrDesc | None = None) -> str:
        """Say which NICs, paths and shards are in use here, or towards one peer."""
        addr = peer.addr if isinstance(peer, MrDesc) else peer
        if addr is not None:
            check_kind("explain: peer", addr, NetAddr)
        return explain(self._machine, addr)

    # ------------------------------------------------------------------ inside

    def _source(self, src: Target, dst: MrHandle, what: str) -> Remote:
        self._check_reads(what)
        check_sink(dst, self._machine, what)
        return self._peers.resolve_readable(src, what)

    def _check_reads(self, what: str) -> None:
        for domain in self._domains:
            if not domain.caps.reads:
                raise UsageError(
                    f"{what}: NIC {domain.caps.nic} of backend {domain.caps.backend!r} has no "
                    f"reads: {domain.caps.no_reads}; have the owner write instead"
                )

    def _check_access(self, memory: Memory, access: Access) -> Access:
        bits = int(access)  # of flags each operation takes 1 us
        if not bits or bits & ~_KNOWN:
            raise BadRequest(f"reg_mr: access={access!r} is no right, or one that nobody knows")
        if memory.readonly and access.sink:
            raise BadRequest(
                f"reg_mr: {memory.nbytes} bytes of read-only memory cannot be a target; "
                "register with access=Access.SOURCE"
            )
        if bits & _READS:
            self._check_reads(f"reg_mr: access={access!r}")
        return access


def _check_pair(verb: str, src: object, dst: object, second: str) -> None:
    """Raise BadRequest unless source and target are two things each."""
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in (src, dst)):
        raise _no_pair(verb, src, dst, second)


def _no_pair(verb: str, src: object, dst: object, second: str) -> BadRequest:
    """What is said where source or target is not two things."""
    return BadRequest(
        f"{verb}: src={shown(src)} dst={shown(dst)}; src is (MrHandle, {second}), dst is "
        f"(MrDesc or Lease, {second})"
    )

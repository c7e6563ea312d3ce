"""TransferEngine: the paper's verbs. Turns each into a checked job or a command.

One engine is one device's NICs (the paper's DomainGroup), its regions, its peers and its
immediates. The worker does the rest; nothing here posts or polls.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Self

from tep.backends import open_device
from tep.backends.base import Access, Domain
from tep.base.api import EngineOptions, Pages, Routing, ScatterDst
from tep.base.checks import (
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
from tep.base.errors import BackendUnavailable, BadRequest, BusyError, CallbackError, UsageError
from tep.base.wire import MrDesc, NetAddr
from tep.control.membership import PeerEvent, PeerWatch
from tep.core.handles import Expectation, Message, Removal, Transfer
from tep.core.imm import check_imm
from tep.core.path import Link
from tep.core.regions import MrHandle, PeerGroup, Remote, check_source, register
from tep.core.requests import (
    DEFAULT,
    ImmArg,
    barrier_job,
    check_pair,
    check_sink,
    no_pair,
    paged_job,
    paged_read_job,
    scatter_job,
    single_job,
    single_read_job,
    slices_of,
)
from tep.core.stats import EngineStats
from tep.drivers.threads import Driver
from tep.drivers.turning import driver_for
from tep.engine.machine import Machine, engine_stats, explain
from tep.engine.prepared import (
    Prepared,
    prepared_barrier,
    prepared_pages,
    prepared_scatter,
)
from tep.memory.source import Buffer, Memory, adapt, copied
from tep.memory.watch import Watcher
from tep.observe.trace import Trace
from tep.observe.tracing import record

__all__ = ["TransferEngine"]


TRACE_EVENTS_MAX: Final = 200_000
"""Spans and marks of a trace, unless its user says otherwise: some 100 MB."""

POOL_BUFFERS_MAX: Final = 2**20
POOL_BYTES_MAX: Final = 2**34
"""The limit of one submit_recvs on one NIC; each buffer costs memory and a call of the NIC's."""


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
            device: "cuda:N" takes the NICs and the cores beside that GPU, and registers its memory
                by dma-buf; None = what the backend takes.
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

    def close(self) -> None:
        """End everything: every open handle settles, NICs and memory are let go. Idempotent."""
        self._machine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
        """The name that reports and peers use."""
        return self._machine.name

    @property
    def wait_timeout_s(self) -> float:
        """The time-out of wait() where none is given, seconds."""
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
            buffer: what `tep.memory.source.adapt` takes: arrays, buffers, mmap, DLPack, CUDA
                arrays, (pointer, nbytes, device).
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
        number = next(self._machine.region_numbers)
        desc = MrDesc(
            self._machine.address,
            number,
            memory.nbytes,
            memory.device,
            access.target,
            tuple(key.rkey for key in keys),
            tuple(key.base for key in keys),
            access.readable,
        )
        handle = MrHandle(self._machine, memory, access, keys, desc)
        self._machine.regions[number] = handle
        return handle, desc

    def deregister(self, mr: MrHandle) -> None:
        """Give a region back: no NIC knows it afterwards, and the engine lets go of the memory.

        Nothing that peers send later lands in it. Where a NIC that is down may still touch it the
        engine holds it until close(), and `mr.quarantined` goes on to say so. On libfabric and
        EFA a row that is just being received goes on landing.

        Raises:
            BusyError: transfers still use it, or the engine would have to hold memory that it was
                given as a bare pointer.
            ClosedError: it was given back before.
        """
        machine = self._machine
        machine.check_open("deregister")
        check_source(mr, machine, "deregister")

        def forget() -> None:
            self._worker.take_all_commands()
            check_source(mr, machine, "deregister")  # again: another thread may have been here
            if mr.inflight:
                raise BusyError(
                    f"deregister: region {mr.desc.region} is in use by {mr.inflight} transfers "
                    "in flight; wait for them, or cancel them"
                )
            free = machine.keep_or_free(mr)
            mr.closed = True
            for domain, key in zip(self._domains, mr.keys, strict=True) if free else ():
                domain.deregister(key)
            del machine.regions[mr.desc.region]
            self._peers.forget_source(mr)

        self.driver.call(forget)

    # ------------------------------------------------------------------ writes

    def submit_single_write(
        self,
        nbytes: int,
        src: tuple[MrHandle, int],
        dst: tuple[MrDesc, int],
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
            raise no_pair("submit_single_write", src, dst, "offset") from None
        if type(mr) is not MrHandle or mr.owner is not self._machine or mr.closed:
            check_source(mr, self._machine, "submit_single_write")
        remote = self._peers.resolve(target, "submit_single_write")
        job = single_job(nbytes, src, remote, offset, imm, routing, len(self._domains))
        return self._machine.submit(job, on_done)

    def submit_paged_writes(
        self,
        page_bytes: int,
        src: tuple[MrHandle, Pages],
        dst: tuple[MrDesc, Pages],
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
            imm: one immediate for every page, or an array with one for each, or None. The receiver
                counts one a page.
            routing: `domain` pins to one NIC.
            on_done: called with the transfer once it settles.
        """
        try:
            mr, _ = src
            target, pages = dst
        except (TypeError, ValueError):
            raise no_pair("submit_paged_writes", src, dst, "pages") from None
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
        dsts: Sequence[MrDesc],
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
        src: tuple[MrDesc, int],
        dst: tuple[MrHandle, int],
        imm: int | None = None,
        *,
        routing: Routing = DEFAULT,
        on_done: Callable[[Transfer], object] | None = None,
    ) -> Transfer:
        """Read `nbytes` contiguous bytes from (descriptor, offset) to (region, offset).

        Long ones are cut into shards over all NICs. `ok` means that all bytes are here. With an
        `imm` the owner then gets one immediate: its memory was read.
        A read that fails or is cancelled before has told it nothing.
        """
        what = "submit_single_read"
        check_pair(what, src, dst, "offset", reads=True)
        remote = self._source(src[0], dst[0], what)
        job = single_read_job(nbytes, (remote, src[1]), dst, imm, routing, len(self._domains))
        return self._machine.submit(job, on_done)

    def submit_paged_reads(
        self,
        page_bytes: int,
        src: tuple[MrDesc, Pages],
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
        check_pair(what, src, dst, "pages", reads=True)
        remote = self._source(src[0], dst[0], what)
        job = paged_read_job(page_bytes, (remote, src[1]), dst, imm, routing, len(self._domains))
        return self._machine.submit(job, on_done)

    # ------------------------------------------------------------------ prepared transfers

    def prepare_paged_writes(
        self,
        page_bytes: int,
        src: tuple[MrHandle, Pages],
        dst: tuple[MrDesc, Pages],
        *,
        routing: Routing = DEFAULT,
    ) -> Prepared:
        """Check a paged write once, and lay out its columns: `submit(imm, src_offset=...)` posts.

        Arguments and errors are those of `submit_paged_writes`. The layers of a KV cache are one
        prepared list at moving offsets.
        """
        check_pair("prepare_paged_writes", src, dst, "pages")
        return prepared_pages(self._machine, page_bytes, src, dst, routing)

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
        return prepared_scatter(self._machine, src, slices_of(dsts), group, routing)

    def prepare_barrier(
        self,
        dsts: Sequence[MrDesc],
        *,
        group: PeerGroup | None = None,
        routing: Routing = DEFAULT,
    ) -> Prepared:
        """Check a barrier once: `submit(imm)` sends it."""
        return prepared_barrier(self._machine, dsts, group, routing)

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

        It fails with PEER_FAILED when a sender says that a request with this immediate failed or
        was cancelled, and with PEER_LOST when the `sender` that it names is lost, restarted or
        removed; `watch_peer` it, since a receiver learns of no death by itself. Either burns the
        immediate: what arrived or arrives of it counts for nobody, and later expectations of it
        fail at once. Take a fresh immediate, or see `remove_imm`.
        """
        machine, table = self._machine, self._worker.imms
        if machine.closed:
            machine.check_open("expect_imm_count")
        imm = check_imm(imm)
        if type(count) is not int or not 0 <= count <= INT64_MAX:
            count = check_int("expect_imm_count: count", count, 0, INT64_MAX)
        table.refuse_claimed(imm)
        link = None if sender is None else self._peers.link(sender, "expect_imm_count")
        if link is not None:
            link.barred = False
        expectation = Expectation(machine, table, imm, count, link, self.driver.now_s())
        machine.enqueue(self._worker.expect, expectation, on_done)
        return expectation

    def on_imm(self, imms: range, callback: Callable[[int, int], object]) -> None:
        """Claim immediates: `callback(imm, count)` gets each arrival, and none of them is counted.

        Raises:
            BadRequest: not a range with step 1, or one of them is claimed, expected or counted.
        """
        self._machine.check_open("on_imm")
        self._machine.after_commands(lambda: self._worker.imms.claim(imms, callback))

    def remove_imm(self, imm: int) -> int:
        """Forget an immediate: its count, the claim that starts with it, and that it is burnt.

        For whoever knows that nothing of it is on its way. A burnt one is to be removed at both
        ends before it is used again. Returns the count that was left.

        Raises:
            BusyError: an expectation waits for it.
        """
        self._machine.check_open("remove_imm")
        value = check_imm(imm)
        return self._machine.after_commands(lambda: self._worker.remove_imm(value))

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
        if not self._worker.channel.able:
            raise UsageError(
                f"watch_peer: the backend {self.main_address.backend!r} has no control messages "
                "between engines; ask the peer by messages of your own (submit_send), or rely on "
                "what transfers reveal (on_peer)"
            )
        every_s = check_seconds("watch_peer: every_s", every_s, 1e-9)
        lost_after_s = check_seconds("watch_peer: lost_after_s", lost_after_s, never=True)
        if lost_after_s < 2 * every_s:
            raise BadRequest(
                f"watch_peer: every_s={every_s} lost_after_s={lost_after_s}; a peer must be asked "
                "twice, at the least, before it is lost"
            )
        link = self._peers.link(peer, "watch_peer")
        found = self.driver.call(lambda: self._worker.members.watch(link, every_s, lost_after_s))
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
        members = self._worker.members
        members.callbacks = (*members.callbacks, callback)

    def remove_peer(self, peer: NetAddr) -> Removal:
        """Let go of a peer, and of all that is remembered of it.

        Requests to it are refused at once. Those that were submitted before end as they would
        have; when the last has ended, the removal settles, and the peer can be met anew.

        Nothing that it has sent, or goes on sending, lands here once the removal has settled, where
        NICs can fence (`caps.imm_source`); else `removal.unfenced` says why it may. It stays fenced
        off until it is named here for rows again: by a write, a read, a `sender=`. Messages do not
        count, so that both sides can agree first that its old writes are over. Of a peer that was
        removed in the middle of its writes no failover can be judged any more.

        A request that another thread is submitting at this very moment may still go out; it ends
        as it would have.
        """
        self._machine.check_open("remove_peer")
        if not isinstance(peer, NetAddr):
            raise BadRequest(f"remove_peer: {type(peer).__name__} is not a NetAddr")
        link = self._peers.leave(peer) or Link(peer, self._domains)
        removal = Removal(self._machine, link, self.driver.now_s())
        self._machine.enqueue(self._worker.members.leave, removal, None)
        return removal

    # ------------------------------------------------------------------ reports

    def stall_report(self) -> str:
        """Say what all that is open waits for: which peer, NIC, counter, how many, since when."""
        return self._machine.stall_report()

    def stats(self) -> EngineStats:
        """Return the engine's counts; see EngineStats."""
        return engine_stats(self._machine)

    def trace(self, *, events_max: int = TRACE_EVENTS_MAX) -> Trace:
        """Record what this engine does, until `stop()` of the result; use that by `with`.

        Transfers, rows on each NIC, immediates, faults and steps, for `Trace.write` (Perfetto),
        `table` and `plot`. What is in flight when it begins is not recorded as a batch.

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

    def _source(self, src: MrDesc, dst: MrHandle, what: str) -> Remote:
        self._check_reads(what)
        check_sink(dst, self._machine, what)
        return self._peers.resolve(src, what, reads=True)

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

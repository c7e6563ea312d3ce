"""TransferEngine: the paper's verbs. Turns each into a checked job or a command.

One engine is one device's NICs (the paper's DomainGroup), its regions, its peers and its
immediates. The worker does the rest; nothing here posts or polls.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Self

from tep.api import EngineOptions, Pages, Routing, ScatterDst
from tep.backends import open_backend
from tep.backends.base import Access, Domain
from tep.checks import INT64_MAX, U64_MAX, check_flag, check_int, check_kind, check_text, shown
from tep.control.leases import Grant, grant_lease
from tep.control.notes import REASON_MAX
from tep.core.imm import check_imm
from tep.core.members import EngineMembers
from tep.core.peers import PeerGroup
from tep.core.quarantine import keep_or_free
from tep.core.region import MrHandle, check_source, register
from tep.core.report import engine_stats, explain
from tep.core.requests import (
    DEFAULT,
    ImmArg,
    Job,
    barrier_job,
    longest_row,
    paged_job,
    scatter_job,
    single_job,
    slices_of,
)
from tep.core.stats import EngineStats
from tep.core.transfer import Expectation, ImmCounter, Message, Notice, Transfer
from tep.errors import BackendUnavailable, BadRequest, BusyError
from tep.memory import Buffer, adapt
from tep.turning import driver_for
from tep.watch import Watcher
from tep.wire import MrDesc, NetAddr, Target

if TYPE_CHECKING:
    from tep.drivers import Driver

__all__ = ["ImmCounter", "PeerGroup", "TransferEngine"]


POOL_BUFFERS_MAX: Final = 2**20
POOL_BYTES_MAX: Final = 2**34
"""Of one submit_recvs on one NIC; each buffer costs memory and a call of the NIC's."""


class TransferEngine(EngineMembers):
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
        name: how reports and peers call it.
        driver: what turns it.
        wait_timeout_s: what wait() uses when no timeout is given.
        callback_errors: the last 100 exceptions that users' callbacks raised.
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
        super().__init__(domains, driver=driver, name=name, epoch=epoch, options=options)
        self._peers.holds, self._worker.leases.book = self._worker.holds, self._peers
        self._region_ids = itertools.count(1)
        self._row_bytes_max = min(domain.caps.max_write_bytes for domain in domains)
        driver.start(self)

    @classmethod
    def open(
        cls,
        backend: str,
        *,
        driver: Driver | None = None,
        options: EngineOptions = EngineOptions(),
        **backend_options: object,
    ) -> Self:
        """Open the NICs of a backend and an engine over them.

        Args:
            backend: a name of `tep info`, e.g. "loopback".
            driver: None = what the backend asks for, else one worker thread.
            options: limits and defaults.
            **backend_options: the backend's own, e.g. nics=2.

        Raises:
            UsageError: unknown backend or option.
            BackendUnavailable: it cannot run here; says what was tried, and what would bring it.
        """
        opened = open_backend(backend, **backend_options)
        name, epoch = opened.name, opened.epoch
        try:
            chosen = driver or driver_for(opened)
            return cls(opened.domains, driver=chosen, name=name, epoch=epoch, options=options)
        except OSError as error:
            for domain in opened.domains:
                domain.close()
            raise BackendUnavailable(
                f"{name}: the NICs are open, and what turns the engine cannot start",
                (("a thread and its descriptors (limits: ulimit -n, -u)", str(error)),),
            ) from error

    # ------------------------------------------------------------------ identity and memory

    @property
    def main_address(self) -> NetAddr:
        """This engine's address, for its peers; it travels as bytes in anything."""
        return self._address

    def reg_mr(
        self, buffer: Buffer, *, access: Access = Access.SOURCE_AND_TARGET
    ) -> tuple[MrHandle, MrDesc]:
        """Register memory with every NIC.

        Args:
            buffer: what `tep.memory.adapt` takes: arrays, buffers, mmap, DLPack, CUDA arrays,
                (pointer, nbytes, device).
            access: Access.SOURCE for memory that peers may not write.

        Returns:
            The handle, for use as a source here, and the descriptor, for the peers. The engine
            holds the memory until `deregister`.

        Raises:
            BadRequest: not registrable; read-only memory as a target; a device that a NIC cannot
                reach.
            FabricError: a NIC refused.
        """
        self._check_open("reg_mr")
        check_kind("reg_mr: access", access, Access)
        memory = adapt(buffer)
        if memory.readonly and access is not Access.SOURCE:
            raise BadRequest(
                f"reg_mr: {memory.nbytes} bytes of read-only memory cannot be a target; "
                "register with access=Access.SOURCE"
            )
        keys = self.driver.call(lambda: register(self._domains, memory, access))
        number = next(self._region_ids)
        desc = MrDesc(
            self._address,
            number,
            memory.nbytes,
            memory.device,
            access is Access.SOURCE_AND_TARGET,
            tuple(key.rkey for key in keys),
            tuple(key.base for key in keys),
        )
        handle = MrHandle(self, memory, access, keys, desc)
        self._regions[number] = handle
        return handle, desc

    def deregister(self, mr: MrHandle) -> None:
        """Give a region back: no NIC knows it afterwards, and the engine lets go of the memory.

        Where a NIC that is down may still touch it, or on libfabric a writer whose lease ended in
        quarantine, the engine holds it until close(), and `mr.quarantined` goes on to say so.

        Raises:
            BusyError: transfers still read from it, a lease of it is not over, or the engine would
                have to hold memory that it was given as a bare pointer.
            ClosedError: it was given back before.
        """
        self._check_open("deregister")
        check_source(mr, self, "deregister")

        def forget() -> None:
            self._worker.take_all_commands()
            check_source(mr, self, "deregister")  # again: another thread may have been here
            if mr.inflight:
                raise BusyError(
                    f"deregister: region {mr.desc.region} is the source of {mr.inflight} transfers "
                    "in flight; wait for them, or cancel them"
                )
            keep_or_free(self, mr)
            mr.closed = True
            for domain, key in zip(self._domains, mr.keys, strict=True):
                domain.deregister(key)
            del self._regions[mr.desc.region]
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
        fence: bool = True,
    ) -> Grant:
        """Let a peer write to bytes of a region for a time, by a Lease in place of an MrDesc.

        A lease is over when it has run out or was revoked *and* nobody can write any more: wait for
        `grant.over`. Until then the region cannot be deregistered. nbytes=-1: to the region's end.
        A silent writer is fenced off until it speaks; with fence=False, or where NICs cannot fence
        (`caps.imm_source` False), its lease ends in quarantine.

        Raises:
            BadRequest: no such bytes or time, or a region that peers may not write.
            BusyError: some of the bytes are in quarantine.
            UsageError: this backend has no notes.
        """
        self._check_open("lease")
        self._check_notes("lease", "register a region that you deregister to end all writing")
        check_source(mr, self, "lease")
        link = self._peers.link(peer, "lease")
        start = check_int("lease: offset", offset, 0, mr.memory.nbytes)
        nbytes = check_int("lease: nbytes", nbytes)
        nbytes = mr.memory.nbytes - start if nbytes == -1 else nbytes
        fence = check_flag("lease: fence", fence)
        return grant_lease(self, mr, link, for_s, (start, nbytes), fence=fence)

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
        check_source(mr, self, "submit_single_write")
        remote = self._peers.resolve(target, "submit_single_write")
        job = single_job(nbytes, src, remote, offset, imm, routing, len(self._domains))
        return self._submit(job, on_done)

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
        check_source(mr, self, "submit_paged_writes")
        remote = self._peers.resolve(target, "submit_paged_writes")
        job = paged_job(page_bytes, src, (remote, pages), imm, routing, len(self._domains))
        return self._submit(job, on_done)

    def add_peer_group(self, peers: Sequence[NetAddr]) -> PeerGroup:
        """Resolve and connect peers in advance, for submit_scatter and submit_barrier."""
        self._check_open("add_peer_group")
        links = tuple(self._peers.link(peer, "add_peer_group") for peer in peers)

        def connect() -> None:
            for link in links:
                for domain in range(len(self._domains)):
                    for nic in range(len(link.addr.domains)):
                        link.peer(domain, nic)

        self.driver.call(connect)
        self.driver.kick()
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
        check_source(src, self, "submit_scatter")
        slices = slices_of(dsts)
        targets = self._peers.targets(slices.descs, group, "submit_scatter")
        job = scatter_job(src, slices, targets, imm, routing, len(self._domains))
        return self._submit(job, on_done)

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
        return self._submit(barrier_job(targets, imm, routing, len(self._domains)), on_done)

    # ------------------------------------------------------------------ messages

    def submit_send(
        self, peer: NetAddr, payload: bytes, *, on_done: Callable[[Message], object] | None = None
    ) -> Message:
        """Send a small message to a peer's receive pool.

        The payload is copied: the buffer is free at once.

        Raises:
            BadRequest: not bytes, or longer than the NIC's messages may be.
            BusyError: too many rows and messages wait already.
        """
        self._check_open("submit_send")
        link = self._peers.link(peer, "submit_send")
        try:
            copied = bytes(memoryview(payload))  # bytes() alone would make 5 zeros of the number 5
        except TypeError as error:
            raise BadRequest(f"submit_send: the payload is no bytes: {error}") from error
        limit = self._domains[0].caps.max_msg_bytes
        if len(copied) > limit:
            raise BadRequest(
                f"submit_send: {len(copied)} bytes, a message has {limit} at the most; use a write"
            )
        self._reserve("submit_send", 1)
        message = Message(self, copied, link, self.driver.now_s())
        self._enqueue(self._worker.send, message, on_done)
        return message

    def submit_recvs(
        self, nbytes: int, count: int, callback: Callable[[memoryview], object]
    ) -> None:
        """Open a rotating pool of `count` receive buffers of `nbytes` each on every NIC.

        A buffer leaves the pool while the callback runs, and goes back then: copy what must stay.
        Without a free buffer a sender waits; a message longer than `nbytes` fails there: LENGTH.
        One call opens at most 2**20 buffers and 16 GiB a NIC.
        """
        self._check_open("submit_recvs")
        nbytes = check_int("submit_recvs: nbytes", nbytes, 1, POOL_BYTES_MAX)
        count = check_int("submit_recvs: count", count, 1, POOL_BUFFERS_MAX)
        if nbytes * count > POOL_BYTES_MAX:
            raise BadRequest(
                f"submit_recvs: nbytes={nbytes} count={count} are {nbytes * count} bytes a NIC, "
                f"more than {POOL_BYTES_MAX}; open a smaller pool"
            )

        def post() -> None:
            self._worker.receive = callback
            for domain in itertools.compress(self._domains, self._worker.group.alive):
                domain.post_recvs(nbytes, count)

        self.driver.call(post)
        self.driver.kick()

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
        self._check_open("expect_imm_count")
        imm = check_imm(imm)
        count = check_int("expect_imm_count: count", count, 0, INT64_MAX)
        table = self._worker.imms
        table.refuse_claimed(imm)
        link = None if sender is None else self._peers.link(sender, "expect_imm_count")
        expectation = Expectation(self, table, imm, count, link, self.driver.now_s())
        command = self._worker.expect if link is None else self._life.expect
        self._enqueue(command, expectation, on_done)
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
            UsageError: this backend has no notes.
        """
        self._check_open("fail")
        self._check_notes("fail", "send a message of your own (submit_send)")
        reason = check_text("fail: reason", reason, REASON_MAX)
        link = self._peers.link(peer, "fail")
        notice = Notice(self, check_imm(imm), reason, link, self.driver.now_s())
        self._enqueue(self._worker.tell, notice, on_done)
        return notice

    def imm_counter(self, imm: int) -> ImmCounter:
        """A pollable view of one immediate's count."""
        take = self._worker.imms.take
        return ImmCounter(
            self._worker.imms,
            lambda value, count: self._after_commands(lambda: take(value, count)),
            check_imm(imm),
        )

    def on_imm(self, imms: range, callback: Callable[[int, int], object]) -> None:
        """Claim immediates: `callback(imm, count)` gets each arrival, and none of them is counted.

        Raises:
            BadRequest: not a range with step 1, or one of them is claimed, expected or counted.
        """
        self._check_open("on_imm")
        self._after_commands(lambda: self._worker.imms.claim(imms, callback))

    def remove_imm(self, imm: int) -> int:
        """Forget an immediate's count, or the claim that starts with it; return what was left.

        Raises:
            BusyError: an expectation waits for it.
        """
        self._check_open("remove_imm")
        value = check_imm(imm)
        self._worker.notices.broken.pop(value, None)
        return self._after_commands(lambda: self._worker.imms.remove(value))

    def alloc_uvm_watcher(self, callback: Callable[[int, int], object]) -> Watcher:
        """Allocate a 64-bit word; `callback(old, new)` after it changed.

        Values in between may be missed.
        """
        self._check_open("alloc_uvm_watcher")
        page = self._worker.watch
        watcher = Watcher(page, self.driver.call(lambda: page.allocate(callback)), self.driver.kick)
        self.driver.kick()
        return watcher

    # ------------------------------------------------------------------ reports

    def stats(self) -> EngineStats:
        """What this engine has done; see EngineStats."""
        return engine_stats(self)

    def explain(self, peer: NetAddr | MrDesc | None = None) -> str:
        """Say which NICs, paths and shards are in use here, or towards one peer."""
        addr = peer.addr if isinstance(peer, MrDesc) else peer
        if addr is not None:
            check_kind("explain: peer", addr, NetAddr)
        return explain(self, addr)

    # ------------------------------------------------------------------ inside

    def _submit(self, job: Job, on_done: Callable[[Transfer], object] | None) -> Transfer:
        if self._closed:
            self._check_open(f"submit ({job.kind})")
        limit = self._row_bytes_max
        if job.longest > limit and (longest := longest_row(job, len(self._domains))) > limit:
            raise BadRequest(
                f"{job.kind}: rows of {longest} bytes, but a NIC here takes {limit} at the most"
            )
        self._reserve(job.kind, job.n)
        transfer = Transfer(self, job, job.n, len(self._domains), self.driver.now_s())
        self._enqueue(self._worker.start, transfer, on_done)
        return transfer


def _no_pair(verb: str, src: object, dst: object, second: str) -> BadRequest:
    """What is said where source or target is not two things."""
    return BadRequest(
        f"{verb}: src={shown(src)} dst={shown(dst)}; src is (MrHandle, {second}), dst is "
        f"(MrDesc or Lease, {second})"
    )

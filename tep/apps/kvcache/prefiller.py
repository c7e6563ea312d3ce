"""The prefiller: takes dispatches, computes, writes the cache layer by layer, confirms every end.

Rule 1: pages are given back only when no NIC reads them. Rule 2: `Ended` is sent only when no row
of the attempt is under way, and none will be. Rule 3: an attempt that has ended stays known until
its decoder says that it is over: a dispatch may come after its cancel.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import numpy as np

from tep import BadDescriptor, MrDesc, NetAddr, TepError, TransferEngine, UsageError
from tep.apps.kvcache.heartbeat import Pulse
from tep.apps.kvcache.job import Held, Job, Peer, PrefillerStats, Watch, watch_engine
from tep.apps.kvcache.layout import KvLayout, head_slices, match_ranks
from tep.apps.kvcache.messages import (
    Beat,
    Cancel,
    Dispatch,
    Ended,
    Hello,
    Message,
    Refuse,
    Welcome,
)
from tep.apps.kvcache.model import Model, PrefillWork, Request, cut_chunks
from tep.apps.kvcache.options import SideOptions
from tep.apps.kvcache.pool import PagePool
from tep.apps.kvcache.post import Post
from tep.apps.kvcache.routing import PrefillerCard
from tep.apps.kvcache.sender import Lane, Target, make_routes

__all__ = ["Prefiller"]

_KEY_LOST: Final = "LOCAL_KEY"  # the seam's name for it, as errors say it
_CANCELLED: Final = "cancelled"
_ORPHANED: Final = "orphaned"

_log = logging.getLogger("tep.kvcache")


class Prefiller:
    """One prefill instance; made inside a running event loop.

    Args:
        name: of the instance; unique.
        engines: one a rank.
        layout: of the model.
        model: computes.
        side: sizes, times and memory.
        chunk_tokens: tokens of one step of a chunked prefill.
        turns: prompts computed at a time.
        watch: allocates watched words.
        pool: of the pages; None: a plain one.

    Attributes:
        name, memory, pool, stats: as they say.
        tails: the tail slots.
    """

    def __init__(
        self,
        name: str,
        engines: Sequence[TransferEngine],
        layout: KvLayout,
        model: Model,
        side: SideOptions,
        *,
        chunk_tokens: int,
        turns: int = 1,
        watch: Watch = watch_engine,
        pool: PagePool | None = None,
    ) -> None:
        cut_chunks(1, chunk_tokens, layout.page_tokens)  # raises what it would raise later
        self.name = name
        self.memory = side.memory(engines, layout)
        self.pool = pool or PagePool(side.npages)
        self.tails = PagePool(side.tail_slots)
        self.stats = PrefillerStats()
        self._model = model
        self._layout = layout
        self._chunk_tokens = chunk_tokens
        self._watch = watch
        self._epoch = engines[0].main_address.epoch
        self._turn = asyncio.Semaphore(turns)
        self._peers: dict[str, Peer] = {}
        self._jobs: set[Job] = set()
        self._leaving = self._closed = False
        self._healthy = asyncio.Event()
        self._healthy.set()
        self._quiet = asyncio.Event()
        self._post = Post(
            engines[0],
            self._on_message,
            buffers=side.buffers,
            message_bytes=side.message_bytes,
            pause_s=side.patience.beat_s,
        )
        self._sends = side.patience.sends
        self._pulse = Pulse(side.patience, self._beat, self._on_silent)

    @property
    def card(self) -> PrefillerCard:
        """For schedulers and decoders."""
        return PrefillerCard(self.name, self._epoch, self.memory.engines[0].main_address)

    @property
    def njobs(self) -> int:
        """Attempts that have not ended."""
        return len(self._jobs)

    async def leave(self) -> None:
        """Take nothing more on, and return when everything under way has ended."""
        self._leaving = True
        while self.njobs:
            self._quiet.clear()
            await self._quiet.wait()
        await self._post.drained()
        self.close()

    def close(self) -> None:
        """Stop at once, as if it died: what is under way is not waited for. Idempotent."""
        self._closed = True
        self._pulse.close()
        if self._post.loop.is_closed():
            return  # and with it all tasks
        for job in self._jobs:
            if job.task is not None:
                job.task.cancel()

    # ------------------------------------------------------------------ messages

    def _on_message(self, message: Message) -> None:
        if self._closed:
            return
        if isinstance(message, Hello):
            self._on_hello(message)
            return
        peer = self._peers.get(message.sender)
        if peer is None or peer.epoch != message.epoch:
            return  # of an incarnation that has been replaced, or of nobody who said hello
        self._pulse.heard(peer.name)
        match message:
            case Dispatch():
                self._on_dispatch(peer, message)
            case Cancel():
                self._on_cancel(peer, message.serial)
            case Beat():
                self._forget_before(peer, message.oldest)
            case _:
                pass  # what prefillers send, and none is meant to get

    def _on_hello(self, hello: Hello) -> None:
        known = self._peers.get(hello.sender)
        if known is not None and known.epoch > hello.epoch:
            return
        try:
            addr = NetAddr.from_bytes(hello.addr)
        except BadDescriptor:
            self.stats.refused += 1
            return
        try:
            target = self._read(hello)
        except UsageError as error:
            self.stats.refused += 1
            self._post.send(addr, Refuse(self.name, self._epoch, str(error)))
            return
        if known is None or known.epoch < hello.epoch:
            if known is not None:
                self._abandon(known)
            self._peers[hello.sender] = Peer(hello.sender, hello.epoch, addr, target)
        else:
            known.target = target
        self._post.send(addr, Welcome(self.name, self._epoch, self.memory.tp))

    def _read(self, hello: Hello) -> Target:
        if hello.fingerprint != self._layout.fingerprint:
            self._layout.check_same(
                hello.layout, f"prefiller {self.name}", f"decoder {hello.sender}"
            )
            raise UsageError(
                f"decoder {hello.sender}: its fingerprint {hello.fingerprint.hex()[:16]} is not "
                f"that of the layout it sent: {hello.layout.describe()}"
            )
        if hello.tail_bytes < self.memory.tail_bytes:
            raise UsageError(
                f"decoder {hello.sender}: tail slots of {hello.tail_bytes} bytes, prefiller "
                f"{self.name} sends {self.memory.tail_bytes}"
            )
        kv = tuple(tuple(MrDesc.from_bytes(data) for data in row) for row in hello.kv)
        target = Target(
            hello.layout, hello.npages, hello.tail_bytes, kv, MrDesc.from_bytes(hello.tail)
        )
        if not kv or any(len(row) != len(self._layout.buffers) for row in kv):
            raise BadDescriptor(
                f"decoder {hello.sender}: {[len(row) for row in kv]} descriptors for its ranks, "
                f"the layout has {len(self._layout.buffers)} buffers"
            )
        head_slices(self._layout, self.memory.tp, target.tp)
        return target

    def _on_dispatch(self, peer: Peer, order: Dispatch) -> None:
        serial = order.serial
        if serial in peer.jobs or serial in peer.over or serial < peer.oldest:
            return
        if self._leaving:
            self.stats.refused += 1
            self._end(peer, serial, False, f"prefiller {self.name} is leaving")
            return
        self.stats.dispatched += 1
        job = peer.jobs[serial] = Job(peer, order)
        self._jobs.add(job)
        self._pulse.watch(peer.name)
        job.task = asyncio.get_running_loop().create_task(
            self._run(job), name=f"{self.name}: {order.request} #{serial}"
        )

    def _on_cancel(self, peer: Peer, serial: int) -> None:
        job = peer.jobs.get(serial)
        if job is not None:
            job.stop(_CANCELLED)
        else:
            # It has ended, or its dispatch has not come yet and must find the door shut.
            self._end(peer, serial, peer.over.get(serial, False), "")

    def _forget_before(self, peer: Peer, oldest: int) -> None:
        if oldest > peer.oldest:
            peer.oldest = oldest
            for serial in [serial for serial in peer.over if serial < oldest]:
                del peer.over[serial]

    def _beat(self, name: str) -> None:
        peer = self._peers[name]
        self._post.send(peer.addr, Beat(self.name, self._epoch, 0), topic=name)

    def _on_silent(self, name: str) -> None:
        self._abandon(self._peers[name])

    def _abandon(self, peer: Peer) -> None:
        for job in tuple(peer.jobs.values()):
            job.stop(_ORPHANED)

    def _end(self, peer: Peer, serial: int, unsure: bool, reason: str) -> None:
        peer.over[serial] = unsure
        ended = Ended(self.name, self._epoch, serial, unsure, reason)
        # Nobody asks for an end that he does not know of: it must not get lost.
        self._post.send(peer.addr, ended, tries=self._sends, topic=(peer.name, peer.epoch, serial))

    # ------------------------------------------------------------------ one attempt

    async def _run(self, job: Job) -> None:
        """Compute, wait for the writes, give everything back, and say so where it is asked for."""
        held = Held(self.pool, self.tails)
        job.computing = True
        try:
            async with self._turn:
                await self._healthy.wait()
                if not job.why:
                    await self._compute(job, held)
        except asyncio.CancelledError:
            if self._closed or not job.why:
                raise
        except Exception as error:  # noqa: BLE001  # of the user's model; its decoder must hear it
            job.computing = False  # or the stop would cancel this very task
            job.stop(f"{type(error).__name__}: {error}")
        finally:
            job.computing = False
        if job.lanes:
            await job.idle.wait()
        held.free()
        self._settle(job)

    async def _compute(self, job: Job, held: Held) -> None:
        order, target = job.order, job.peer.target
        request = _request_of(order)
        chunks = cut_chunks(order.ntokens, self._chunk_tokens, self._layout.page_tokens)
        pages = await held.take_pages(self._layout.npages(order.ntokens))
        slot = await held.take_slot()
        matched = match_ranks(head_slices(self._layout, self.memory.tp, target.tp), order.seed)
        dst_pages = np.frombuffer(order.pages, "<u4").astype(np.int64)
        sent = len(pages) - order.first_page
        if len(dst_pages) != sent:
            raise BadDescriptor(
                f"dispatch of {order.request!r}: {len(dst_pages)} pages for {sent} that are missing"
            )
        routes = make_routes(
            self.memory, target, matched, chunks, pages, dst_pages, order.first_page
        )
        job.busy_lanes = job.watched_lanes = self.memory.tp
        job.lanes = [
            Lane(
                engine,
                mine,
                layers=self._layout.layers,
                nchunks=len(chunks),
                imm=order.imm,
                on_seen=job.lane_seen,
                on_idle=job.lane_idle,
                on_trouble=job.stop,
            )
            for engine, mine in zip(self.memory.engines, routes, strict=True)
        ]
        job.lanes[0].expect_tail()
        for engine, lane in zip(self.memory.engines, job.lanes, strict=True):
            job.words.append(self._watch(engine, lane.on_word))

        def advance(done: int) -> None:
            if not job.why:
                for word in job.words:
                    word.store(done)

        work = PrefillWork(request, chunks, self.memory, pages, slot, advance, self._layout.layers)
        tail = await self._model.prefill(work)
        if work.done != self._layout.layers * len(chunks):
            raise UsageError(
                f"the model ended after {work.done} of {self._layout.layers} layers x "
                f"{len(chunks)} chunks"
            )
        self._send_tail(job, slot, tail)

    def _send_tail(self, job: Job, slot: int, tail: bytes | None) -> None:
        memory, target = self.memory, job.peer.target
        if tail is not None:
            if len(tail) > memory.tail_bytes:
                raise UsageError(f"a tail of {len(tail)} bytes, a slot has {memory.tail_bytes}")
            memory.tail(slot)[: len(tail)] = np.frombuffer(tail, np.uint8)
        dst = (target.tail, job.order.tail_slot * target.tail_bytes)
        src = (memory.tails.mr, slot * memory.tail_bytes)
        job.lanes[0].send_tail(memory.tail_bytes, src, dst)

    def _settle(self, job: Job) -> None:
        peer, serial = job.peer, job.order.serial
        del peer.jobs[serial]
        self._jobs.remove(job)
        unsure = any(lane.failed for lane in job.lanes)
        stats = self.stats
        for lane in job.lanes:
            stats.writes += lane.writes
            stats.rows += lane.rows
            stats.nbytes += lane.nbytes
        if not job.why:
            stats.finished += 1
            peer.over[serial] = unsure
        else:
            stats.cancelled += job.why == _CANCELLED
            stats.orphaned += job.why == _ORPHANED
            stats.failed += job.why not in {_CANCELLED, _ORPHANED}
            self._end(peer, serial, unsure, "" if job.why == _CANCELLED else job.why)
        if _KEY_LOST in job.why:
            self._healthy.clear()
        if not (self._healthy.is_set() or any(other.lanes for other in self._jobs)):
            self._renew()
        if not peer.jobs and self._peers[peer.name] is peer:
            self._pulse.leave(peer.name)
        self._quiet.set()

    def _renew(self) -> None:
        """A NIC here has lost its registrations: register anew, now that nothing is under way."""
        try:
            self.memory.renew()
        except TepError as error:
            _log.warning("%s cannot register its memory again: %s", self.name, error)
            return
        self._healthy.set()
        self.stats.renewed += 1


def _request_of(order: Dispatch) -> Request:
    ids = np.frombuffer(order.input_ids, "<i4").astype(np.int32) if order.input_ids else None
    return Request(order.request, order.ntokens, ids)

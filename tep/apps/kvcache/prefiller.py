"""The prefiller: takes orders, computes, has the cache written layer by layer by its `KvSender`s.

Rule 1: pages are given back only when no NIC reads them: when every send is finished. Rule 2: an
order is taken once; what became of it is said again for as long as its decoder may ask.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tep import NetAddr, TepError, TransferEngine, UsageError
from tep.apps.kvcache.blocks import KvSend, KvSender
from tep.apps.kvcache.instance import Answer, Beat, Instance, Message, Order
from tep.apps.kvcache.memory import SideOptions
from tep.apps.kvcache.model import Model, PrefillWork, Request, cut_chunks
from tep.apps.kvcache.scheduler import PrefillerCard

__all__ = ["Prefiller"]

_ANSWERS_MAX: Final = 4096


@dataclass(slots=True, eq=False)
class _Job:
    """One order: its sends, one a rank, once pages are there; and why it stops, if it does."""

    peer: NetAddr
    order: Order
    task: asyncio.Task[None] | None = None
    computing: bool = False  # whether the task may be cancelled
    sends: list[KvSend] = field(default_factory=list)
    why: str = ""

    @property
    def still(self) -> bool:
        return all(send.finished for send in self.sends)


class Prefiller(Instance):
    """One prefill instance; see Instance."""

    def __init__(
        self, name: str, engines: Sequence[TransferEngine], model: Model, side: SideOptions
    ) -> None:
        cut_chunks(1, model.chunk_tokens, model.layout.page_tokens)  # raises for all prompts alike
        super().__init__(name, engines, model, side)
        self._sides = self.senders = [
            KvSender(one, patience=side.patience) for one in self.memory.blocks
        ]
        self._computing = asyncio.Lock()  # one prompt at a time
        self._answers: OrderedDict[tuple[NetAddr, int], Answer] = OrderedDict()
        self._jobs: set[_Job] = set()
        self._leaving = False

    @property
    def card(self) -> PrefillerCard:
        """The name and the addresses, for schedulers and decoders."""
        return PrefillerCard(self.name, tuple(one.main_address for one in self.memory.engines))

    @property
    def njobs(self) -> int:
        """Orders that have not ended."""
        return len(self._jobs)

    async def leave(self) -> None:
        """Take nothing more on, and return when everything under way has ended."""
        self._leaving = True
        await self._until(lambda: not self._jobs)
        with contextlib.suppress(TimeoutError):  # decoders may not have heard of an end
            async with asyncio.timeout(self._patience.linger_s):
                await self._until(lambda: not self._poll())
        self.close()

    def close(self) -> None:
        """Stop at once, as if it died: nothing that is under way is waited for. Idempotent."""
        super().close()
        if not self._loop.is_closed():
            for job in self._jobs:
                if job.task is not None:
                    job.task.cancel()

    # ------------------------------------------------------------------ messages

    def _take(self, peer: NetAddr, message: Message) -> None:
        match message:
            case Order():
                known = self._answers.get((peer, message.serial))
                self._send(peer, known or self._begin(peer, message))
            case Beat():
                self._send(peer, Beat(), 0)
                for serial in message.serials:
                    known = self._answers.get((peer, serial))
                    if known is not None and known.refusal:
                        self._send(peer, known)
            case _:
                pass  # an answer, which no prefiller is meant to get

    def _begin(self, peer: NetAddr, order: Order) -> Answer:
        try:
            self._check(order)
        except TepError as error:
            return self._remember(peer, Answer(order.serial, str(error)))
        job = _Job(peer, order)
        self._jobs.add(job)
        self._watch(peer)
        name = f"{self.name}: {order.request} #{order.serial}"
        job.task = self._loop.create_task(self._run(job), name=name)
        return self._remember(peer, Answer(order.serial))

    def _check(self, order: Order) -> None:
        """Get to know the caches of the decoder's ranks; an error: the order is refused."""
        if self._leaving:
            raise UsageError(f"prefiller {self.name} is leaving")
        for sender in self.senders:
            for card in order.cards:
                theirs, mine = sender.connect(card).tensors.keys(), sender.blocks.placed.keys()
                if theirs != mine:
                    raise UsageError(
                        f"the decoder's KV cache has other tensors than prefiller {self.name}: it "
                        f"lacks {sorted(mine - theirs)}, and has {sorted(theirs - mine)} besides"
                    )

    def _remember(self, peer: NetAddr, answer: Answer) -> Answer:
        self._answers[peer, answer.serial] = answer
        while len(self._answers) > _ANSWERS_MAX:
            self._answers.popitem(last=False)
        return answer

    def _on_silent(self, peer: NetAddr) -> None:
        for job in [one for one in self._jobs if one.peer == peer and not one.why]:
            self._stop(job, f"{peer.name} was silent for {self._patience.silent_s} s")

    def _beat(self, peer: NetAddr) -> None:
        """Nothing: each beat of a decoder is answered by one."""

    # ------------------------------------------------------------------ one order

    async def _run(self, job: _Job) -> None:
        """Compute, wait for the writes, and give everything back."""
        held = []
        job.computing = True
        try:
            async with self._computing:
                for pool, n in (
                    (self.pool, self._layout.npages(job.order.ntokens)),
                    (self.tails, 1),
                ):
                    held.append((pool, await pool.acquire(n)))
                await self._compute(job, held[0][1].tolist(), int(held[1][1][0]))
        except asyncio.CancelledError:
            if self._closed or not job.why:
                raise
        except Exception as error:  # noqa: BLE001  # of the user's model; its decoder must hear it
            job.computing = False  # or the stop would cancel this very task
            self._stop(job, f"{type(error).__name__}: {error}")
        finally:
            job.computing = False
        await self._until(lambda: job.still)
        for pool, pages in held:
            pool.free(pages)
        self._settle(job)

    async def _compute(self, job: _Job, pages: list[int], slot: int) -> None:
        order, layers = job.order, self._layout.layers
        ids = np.frombuffer(order.input_ids, "<i4").astype(np.int32) if order.input_ids else None
        request = Request(order.request, order.ntokens, ids)
        chunks = cut_chunks(order.ntokens, self._model.chunk_tokens, self._layout.page_tokens)
        for sender in self.senders:
            send = sender.begin(
                order.request, [pages, [slot]], order.tickets, ntokens=order.ntokens
            )
            job.sends.append(send)
            send.on_change(lambda: self._call(self._look, job))
        self._turn_later()

        def advance(done: int) -> None:
            chunk, layer = divmod(done - 1, layers)
            for send in job.sends:
                send.layer_done(layer, chunks[chunk].stop)

        work = PrefillWork(
            request, chunks, self.memory, np.array(pages, np.int64), slot, advance, layers
        )
        tail = await self._model.prefill(work)
        if work.done != layers * len(chunks):
            raise UsageError(
                f"the model ended after {work.done} of {layers} layers x {len(chunks)} chunks"
            )
        if tail is not None:
            if len(tail) > self.memory.tail_bytes:
                raise UsageError(
                    f"a tail of {len(tail)} bytes, a slot has {self.memory.tail_bytes}"
                )
            self.memory.tail(slot)[: len(tail)] = np.frombuffer(tail, np.uint8)
        job.sends[0].layer_done(layers)

    def _look(self, job: _Job) -> None:
        """A send has changed."""
        bad = next((one for one in job.sends if one.state in {"failed", "free"}), None)
        if bad is not None and not job.why:
            self._stop(job, bad.reason)
        self._changed.set()

    def _stop(self, job: _Job, why: str) -> None:
        """Send nothing more. The first reason stays."""
        if job.why:
            return
        job.why = why
        if not job.sends:
            self._send(job.peer, self._remember(job.peer, Answer(job.order.serial, why)))
        for send in job.sends:
            send.cancel(why)
        if job.computing and job.task is not None:
            job.task.cancel()

    def _settle(self, job: _Job) -> None:
        self._jobs.remove(job)
        if not any(other.peer == job.peer for other in self._jobs):
            self._heard.pop(job.peer, None)
        self._changed.set()

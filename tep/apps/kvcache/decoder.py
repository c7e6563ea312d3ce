"""The decoder: gets pages, expects them, orders a prefill, decodes; and cleans up after what fails.

Rule 1: the cache of a request is complete when every rank's `KvLoad` is done, and for no other
reason. Rule 2: pages that a prefiller was told of are used again only when each load is finished:
done, or free. Rule 3: a retry never waits for Rule 2.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tep import FabricError, NetAddr, TepError, TransferEngine
from tep.apps import KVCACHE
from tep.apps.kvcache.blocks import KvLoad, KvReceiver
from tep.apps.kvcache.instance import Answer, Beat, Instance, Message, Order
from tep.apps.kvcache.memory import PageIndices, SideOptions
from tep.apps.kvcache.model import Completion, DecodeWork, Model, Request
from tep.apps.kvcache.scheduler import PrefillerCard

__all__ = ["Decoder"]

_SERIALS_MAX = 512  # in one beat


@dataclass(slots=True, eq=False)
class _Attempt:
    """One order, from its pages to their end.

    Attributes:
        order: the message; its serial is this decoder's number of the attempt, and of the note.
        loads: one a rank.
        ended: "" when the cache is complete, else why it will not be.
        taken: whether the prefiller has it.
    """

    card: PrefillerCard
    order: Order
    pages: PageIndices
    slot: PageIndices
    loads: list[KvLoad]
    ended: asyncio.Future[str]
    taken: bool = False


class Decoder(Instance):
    """One decode instance; see Instance."""

    def __init__(
        self, name: str, engines: Sequence[TransferEngine], model: Model, side: SideOptions
    ) -> None:
        super().__init__(name, engines, model, side)
        self._sides = self.receivers = [
            KvReceiver(one, imms=KVCACHE, patience=side.patience) for one in self.memory.blocks
        ]
        self._open: dict[int, _Attempt] = {}
        self._dead: dict[str, int] = {}  # prefillers, and the epochs that are certain to be dead
        self._busy = 0
        self._cards = tuple(one.card() for one in self.memory.blocks)

    async def settled(self) -> None:
        """Return when the pages of every failed attempt are free."""
        await self._until(lambda: not any(one.ended.done() for one in self._open.values()))

    async def drained(self) -> None:
        """Return when no request is under way, and every end is settled."""
        await self._until(lambda: not (self._busy or self._open))

    def close(self) -> None:
        """Stop at once, as if it died: what waits here fails. Idempotent."""
        super().close()
        if self._loop.is_closed():
            return  # and with it all that waited
        self.pool.close()
        self.tails.close()
        for attempt in self._open.values():
            if not attempt.ended.done():
                attempt.ended.set_result(f"decoder {self.name} was closed")

    def fenced(self, prefiller: str, epoch: int) -> None:
        """An incarnation is certain to be dead, e.g. its process ended: none of its writes lands.

        `epoch` is its first rank's; all incarnations before it are dead, too.
        """
        self._dead[prefiller] = max(epoch, self._dead.get(prefiller, epoch))
        for attempt in tuple(self._open.values()):
            card = attempt.card
            if card.name == prefiller and card.epoch <= epoch:
                self._fail(attempt, f"prefiller {prefiller} is dead")
                for receiver in self.receivers:
                    for addr in card.addrs:
                        receiver.fenced(addr.name, addr.epoch)

    # ------------------------------------------------------------------ one request

    async def generate(
        self,
        request: Request,
        prefiller: PrefillerCard,
        cached: Callable[[], object] = lambda: None,
    ) -> Completion:
        """Have a prompt computed by a prefiller, and decode it here.

        It does not raise for anything that goes wrong before the model decodes: the completion has
        the reason. Cancelling the task cancels the request. `cached` is called once its cache is
        here.
        """
        start_s = self._loop.time()
        self._busy += 1
        try:
            try:
                attempt = await self._attempt(request, prefiller)
            except TepError as error:
                return Completion(request.name, None, str(error))
            cached()
            ttft_s = self._loop.time() - start_s
            return Completion(
                request.name,
                await self._decode(request, attempt),
                prefiller=prefiller.name,
                ttft_s=ttft_s,
                pages_sent=self._layout.npages(request.ntokens),
            )
        finally:
            self._busy -= 1
            self._changed.set()

    async def _attempt(self, request: Request, card: PrefillerCard) -> _Attempt:
        """Return a complete attempt, its pages held; or clean up behind the scenes and raise."""
        attempt = self._order(request, card, *await self._room(request, card))
        try:
            self._send(card.addr, attempt.order, attempt.order.serial)
            self._watch(card.addr)
            await asyncio.wait((attempt.ended,))
        except BaseException:
            if attempt.ended.done() and not attempt.ended.result():  # it was complete just now
                self._give_back(attempt)
            self._fail(attempt, "given up")
            raise
        if reason := attempt.ended.result():
            raise FabricError(reason)
        return attempt

    async def _room(self, request: Request, card: PrefillerCard) -> tuple[PageIndices, PageIndices]:
        """Get a tail slot and pages; or raise, and keep nothing."""
        total = self._layout.npages(request.ntokens + request.max_tokens)
        with contextlib.ExitStack() as undo:
            try:
                async with asyncio.timeout(self._patience.request_s):
                    slot = await self.tails.acquire(1)
                    undo.callback(self.tails.free, slot)
                    pages = await self.pool.acquire(total)
                    undo.callback(self.pool.free, pages)
            except TimeoutError:
                raise FabricError(self._no_room(total)) from None
            if card.epoch <= self._dead.get(card.name, -1):
                raise FabricError(f"prefiller {card.name} is dead")  # it was picked before
            undo.pop_all()
        return slot, pages

    def _no_room(self, wanted: int) -> str:
        pool, tails = self.pool, self.tails
        return (
            f"no room on {self.name} within {self._patience.request_s} s: {wanted} pages wanted, "
            f"{pool.nfree} of {pool.npages} free; {tails.nfree} of {tails.npages} tail slots free"
        )

    def _order(
        self,
        request: Request,
        card: PrefillerCard,
        slot: PageIndices,
        pages: PageIndices,
    ) -> _Attempt:
        """Expect the pages on every rank, the tail on the first, and make out the order."""
        for other in tuple(self._open.values()):
            if other.card.name == card.name and other.card.epoch < card.epoch:
                self.fenced(card.name, other.card.epoch)  # a later incarnation runs
        wanted = pages[: self._layout.npages(request.ntokens)].tolist()
        loads = [
            receiver.expect(request.name, [wanted, [] if rank else slot.tolist()])
            for rank, receiver in enumerate(self.receivers)
        ]
        ids = request.input_ids
        order = Order(
            next(self._numbers),
            self._cards,
            request.name,
            tuple(load.ticket for load in loads),
            request.ntokens,
            b"" if ids is None else np.ascontiguousarray(ids, "<i4").tobytes(),
        )
        attempt = _Attempt(card, order, pages, slot, loads, self._loop.create_future())
        self._open[order.serial] = attempt
        for load in loads:
            load.on_change(lambda: self._call(self._look, attempt))
        return attempt

    async def _decode(self, request: Request, attempt: _Attempt) -> tuple[int, ...]:
        try:
            work = DecodeWork(request, self.memory, attempt.pages, int(attempt.slot[0]))
            return tuple(await self._model.decode(work))
        finally:
            self._give_back(attempt)

    def _give_back(self, attempt: _Attempt) -> None:
        self.pool.free(attempt.pages)
        self.tails.free(attempt.slot)

    # ------------------------------------------------------------------ ends

    def _look(self, attempt: _Attempt) -> None:
        """A load has changed."""
        if attempt.order.serial not in self._open or self._closed:
            return
        if not attempt.ended.done():
            bad = next((one for one in attempt.loads if one.state in {"failed", "free"}), None)
            if bad is not None:
                self._fail(attempt, bad.reason)
                return
            if all(one.ok for one in attempt.loads):
                attempt.ended.set_result("")
                self._forget(attempt)
                return
        if attempt.ended.done() and all(one.finished for one in attempt.loads):
            self._give_back(attempt)
            self._forget(attempt)

    def _fail(self, attempt: _Attempt, reason: str) -> None:
        """Take back the right to write, and tell who waits; a first verdict stays."""
        if attempt.ended.done():
            return
        attempt.ended.set_result(reason)
        for load in attempt.loads:
            load.cancel(reason)
        self._look(attempt)

    def _forget(self, attempt: _Attempt) -> None:
        del self._open[attempt.order.serial]
        if not self._with(attempt.card.addr):
            self._heard.pop(attempt.card.addr, None)
        self._changed.set()

    def _with(self, prefiller: NetAddr) -> list[_Attempt]:
        return [one for one in self._open.values() if one.card.addr == prefiller]

    # ------------------------------------------------------------------ messages and time

    def _take(self, peer: NetAddr, message: Message) -> None:
        if not isinstance(message, Answer):
            return
        attempt = self._open.get(message.serial)
        if attempt is None or attempt.card.addr != peer:
            return
        attempt.taken = True
        if message.refusal:
            self._fail(attempt, message.refusal)

    def _beat(self, peer: NetAddr) -> None:
        """Send a beat, and orders again that nobody has taken."""
        mine = [one for one in self._with(peer) if not one.ended.done()]
        for attempt in mine:
            if not attempt.taken:
                self._send(peer, attempt.order, attempt.order.serial)
        serials = [one.order.serial for one in mine if one.taken]
        self._send(peer, Beat(tuple(serials[:_SERIALS_MAX])), 0)

    def _on_silent(self, peer: NetAddr) -> None:
        for attempt in self._with(peer):
            self._fail(attempt, f"silent for {self._patience.silent_s} s")

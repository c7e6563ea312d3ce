"""The decoder: gets pages, expects them, orders a prefill, decodes; and cleans up after what fails.

Rule 1: the cache of a request is complete when every rank's `KvLoad` is done, and for no other
reason. Rule 2: pages that a prefiller was told of are used again only when each load is finished:
done, or free. Rule 3: a retry never waits for Rule 2.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tep import FabricError, NetAddr, TepError, TransferEngine
from tep.apps.immediates import KVCACHE
from tep.apps.kvcache.blocks import KvLoad, KvReceiver
from tep.apps.kvcache.layout import KvLayout
from tep.apps.kvcache.memory import KvMemory, PageIndices, PagePool, PrefixCache, SideOptions
from tep.apps.kvcache.messages import Answer, Beat, Mail, Message, Order, Pulse
from tep.apps.kvcache.model import Completion, DecodeWork, Model, Request, page_keys
from tep.apps.kvcache.scheduler import PrefillerCard, Router

__all__ = ["Decoder", "DecoderStats"]

_KEY_LOST = "REMOTE_KEY"  # the seam's name for it, as errors say it

_SERIALS_MAX = 512  # in one beat


@dataclass(slots=True)
class DecoderStats:
    """Counts of a decoder.

    Attributes:
        dispatched: attempts.
        completed: those of them whose cache came whole.
        unclean: those that ended otherwise.
        silent: times that a prefiller fell silent.
        fenced: attempts that ended because their prefiller was certain to be dead.
        reused_pages: pages of prefixes that did not travel.
        renewed: times that the memory was registered anew, because a NIC had lost it.
    """

    dispatched: int = 0
    completed: int = 0
    unclean: int = 0
    silent: int = 0
    fenced: int = 0
    reused_pages: int = 0
    renewed: int = 0


@dataclass(slots=True, eq=False)
class _Attempt:
    """One order, from its pages to their end.

    Attributes:
        serial: of this decoder's attempts.
        request, card: the prompt, and the prefiller.
        fresh, held: pages it brought, and those of a known prefix.
        slot: of its tail.
        number: of its order among the notes.
        ended: "" when the cache is complete, else why it will not be.
        loads: one a rank.
        order: the message.
        taken: whether the prefiller has it.
    """

    serial: int
    request: Request
    card: PrefillerCard
    fresh: PageIndices
    held: PageIndices
    slot: PageIndices
    number: int
    ended: asyncio.Future[str]
    loads: list[KvLoad] = field(default_factory=list)
    order: Order | None = None
    taken: bool = False


class Decoder:
    """One decode instance; made inside a running event loop.

    Args:
        name: of the instance; unique.
        engines: one a rank.
        layout: of the model.
        model: decodes.
        side: sizes, times and memory.
        attempts_max: prefillers tried for one request.
        prefix_pages: pages kept at the most for prompts that begin alike; 0 = none.
        imms: the immediates to use.

    Attributes:
        name, memory, pool, stats: of this instance.
        tails: the tail slots.
        prefixes: pages of past prompts, or None.
        receivers: one a rank.
    """

    def __init__(
        self,
        name: str,
        engines: Sequence[TransferEngine],
        layout: KvLayout,
        model: Model,
        side: SideOptions,
        *,
        attempts_max: int = 3,
        prefix_pages: int = 0,
        imms: range = KVCACHE,
    ) -> None:
        self.name = name
        self.memory = KvMemory(engines, layout, side)
        self.pool = PagePool(side.npages)
        self.prefixes = PrefixCache(self.pool, prefix_pages) if prefix_pages else None
        self.tails = PagePool(side.tail_slots)
        self.stats = DecoderStats()
        self.receivers = [
            KvReceiver(one, imms=imms, patience=side.patience) for one in self.memory.blocks
        ]
        self._model, self._layout, self._patience = model, layout, side.patience
        self._attempts_max = attempts_max
        self._serial = 0
        self._open: dict[int, _Attempt] = {}
        self._dead: dict[str, int] = {}  # prefillers, and the epochs that are certain to be dead
        self._busy = 0
        self._quiet = asyncio.Event()
        self._closed = asyncio.get_running_loop().create_future()
        self._mail = Mail(self.memory.blocks[0], self._on_message)
        self._cards = self._describe()
        self._pulse = Pulse(
            side.patience, beat=self._beat, on_silent=self._on_silent, turn=self._poll
        )

    @property
    def addr(self) -> NetAddr:
        """The address of the first rank."""
        return self.memory.engines[0].main_address

    @property
    def nopen(self) -> int:
        """Attempts that have not ended, with those whose pages may still be written."""
        return len(self._open)

    async def settled(self) -> None:
        """Return when the pages of every failed attempt are free."""
        await self._until(lambda: not any(one.ended.done() for one in self._open.values()))

    async def drained(self) -> None:
        """Return when no request is under way, and every end is settled."""
        await self._until(lambda: not (self._busy or self._open))

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._quiet.clear()
            await self._quiet.wait()

    def close(self) -> None:
        """Stop at once, as if it died: what waits here fails. Idempotent."""
        if self._mail.loop.is_closed():
            return  # and with it all that waited
        if not self._closed.done():
            self._closed.set_result(None)
        self._pulse.close()
        self.pool.close()
        self.tails.close()
        for attempt in self._open.values():
            if not attempt.ended.done():
                attempt.ended.set_result(f"decoder {self.name} was closed")

    def fenced(self, prefiller: str, epoch: int) -> None:
        """An incarnation is certain to be dead, e.g. its process ended: none of its writes lands.

        Args:
            prefiller: its name.
            epoch: of its first rank: it, and all before it.
        """
        self._dead[prefiller] = max(epoch, self._dead.get(prefiller, epoch))
        for attempt in tuple(self._open.values()):
            card = attempt.card
            if card.name == prefiller and card.epoch <= epoch:
                self.stats.fenced += 1
                self._fail(attempt, f"prefiller {prefiller} is dead")
                for receiver in self.receivers:
                    for addr in card.addrs:
                        receiver.fenced(addr.name, addr.epoch)

    # ------------------------------------------------------------------ one request

    async def generate(self, request: Request, router: Router) -> Completion:
        """Have a prompt computed somewhere, and decode it here.

        It does not raise for anything that goes wrong on the way: the completion has the reasons.
        Cancelling the task cancels the request.
        """
        self._busy += 1
        try:
            return await self._see_through(request, router)
        finally:
            self._busy -= 1
            self._quiet.set()

    async def _see_through(self, request: Request, router: Router) -> Completion:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        keys = page_keys(request, self._layout) if self.prefixes is not None else []
        tried: list[str] = []
        reasons: list[str] = []
        while len(reasons) < self._attempts_max and not self._closed.done():
            try:
                lease = await router.lease(request, tried)
            except TepError as error:
                reasons.append(str(error))
                break
            tried.append(lease.card.name)
            try:
                attempt = await self._attempt(request, lease.card, keys)
            except TepError as error:
                lease.end(str(error))
                reasons.append(f"{lease.card.name}: {error}")
                continue
            except BaseException:
                lease.end("")
                raise
            lease.end("")
            ttft_s = loop.time() - start_s
            tokens = await self._decode(request, attempt, keys)
            return Completion(
                request.name,
                tokens,
                attempts=len(tried),
                prefiller=tried[-1],
                ttft_s=ttft_s,
                pages_sent=self._layout.npages(request.ntokens) - len(attempt.held),
            )
        if self._closed.done():
            reasons.append(f"decoder {self.name} was closed")
        return Completion(request.name, None, "; ".join(reasons), attempts=len(tried))

    async def _attempt(
        self, request: Request, card: PrefillerCard, keys: Sequence[bytes]
    ) -> _Attempt:
        """Return a complete attempt, its pages held; or clean up behind the scenes and raise."""
        attempt = await self._open_attempt(request, card, keys)
        try:
            self._order(attempt)
            await asyncio.wait((attempt.ended,))
        except BaseException:
            if attempt.ended.done() and not attempt.ended.result():  # it was complete just now
                self.pool.free(np.concatenate([attempt.held, attempt.fresh]))
                self.tails.free(attempt.slot)
            self._fail(attempt, "given up")
            raise
        if reason := attempt.ended.result():
            raise FabricError(reason)
        return attempt

    async def _open_attempt(
        self, request: Request, card: PrefillerCard, keys: Sequence[bytes]
    ) -> _Attempt:
        """Get everything that an attempt needs, or raise and keep nothing."""
        layout = self._layout
        total = layout.npages(request.ntokens + request.max_tokens)
        with contextlib.ExitStack() as undo:
            try:
                async with asyncio.timeout(self._patience.request_s):
                    slot = await self.tails.acquire(1)
                    undo.callback(self.tails.free, slot)
                    full = keys[: request.ntokens // layout.page_tokens]
                    held, fresh = await self._acquire(total, full)
                    undo.callback(self.pool.free, np.concatenate([held, fresh]))
            except TimeoutError:
                raise FabricError(self._no_room(total)) from None
            if card.epoch <= self._dead.get(card.name, -1):
                raise FabricError(f"prefiller {card.name} is dead")  # the lease is from before
            undo.pop_all()
        for other in tuple(self._open.values()):
            if other.card.name == card.name and other.card.epoch < card.epoch:
                self.fenced(card.name, other.card.epoch)  # a later incarnation runs
        self._serial += 1
        ended = self._mail.loop.create_future()
        number = self._mail.number()
        attempt = _Attempt(self._serial, request, card, fresh, held, slot, number, ended)
        self._open[attempt.serial] = attempt
        return attempt

    def _no_room(self, wanted: int) -> str:
        pool, tails = self.pool, self.tails
        return (
            f"no room on {self.name} within {self._patience.request_s} s: {wanted} pages wanted, "
            f"{pool.nfree} of {pool.npages} free; {tails.nfree} of {tails.npages} tail slots free"
        )

    async def _acquire(self, total: int, keys: Sequence[bytes]) -> tuple[PageIndices, PageIndices]:
        """Pages of a known prefix, and fresh ones, together `total`.

        Who waits for pages holds none meanwhile: others may need just these.
        """
        held = self._find(keys)
        fresh = self.pool.take(total - len(held))
        if fresh is None:
            self.pool.free(held)
            fresh = await self.pool.acquire(total)
            held = self._find(keys)
            self.pool.free(fresh[: len(held)])
            fresh = fresh[len(held) :]
        return held, fresh

    def _find(self, keys: Sequence[bytes]) -> PageIndices:
        return np.zeros(0, np.int64) if self.prefixes is None else self.prefixes.find(keys)

    def _order(self, attempt: _Attempt) -> None:
        """Expect the pages on every rank, the tail on the first, and order them."""
        request, reused = attempt.request, len(attempt.held)
        fresh = attempt.fresh[: self._layout.npages(request.ntokens) - reused].tolist()
        for rank, receiver in enumerate(self.receivers):
            load = receiver.expect(request.name, [fresh, [] if rank else attempt.slot.tolist()])
            attempt.loads.append(load)
            load.on_change(lambda: self._mail.call(self._look, attempt))
        ids = request.input_ids
        attempt.order = Order(
            attempt.serial,
            self.name,
            self._layout,
            self._cards,
            request.name,
            tuple(load.ticket for load in attempt.loads),
            request.ntokens,
            b"" if ids is None else np.ascontiguousarray(ids, "<i4").tobytes(),
        )
        self.stats.dispatched += 1
        self.stats.reused_pages += reused
        self._mail.send(attempt.card.addr, attempt.order, attempt.number)
        self._pulse.watch(attempt.card.addr)

    async def _decode(
        self, request: Request, attempt: _Attempt, keys: Sequence[bytes]
    ) -> tuple[int, ...]:
        pages = np.concatenate([attempt.held, attempt.fresh])
        slot = int(attempt.slot[0])
        try:
            work = DecodeWork(request, self.memory, pages, slot, len(attempt.held))
            tokens = tuple(await self._model.decode(work))
            if self.prefixes is not None:
                full = request.ntokens // self._layout.page_tokens
                self.prefixes.keep(keys[:full], pages[:full])
            return tokens
        finally:
            self.pool.free(pages)
            self.tails.free(attempt.slot)

    # ------------------------------------------------------------------ ends

    def _look(self, attempt: _Attempt) -> None:
        """A load has changed."""
        if attempt.serial not in self._open or self._closed.done():
            return
        if not attempt.ended.done():
            bad = next((one for one in attempt.loads if one.state in {"failed", "free"}), None)
            if bad is not None:
                self._fail(attempt, bad.reason)
                return
            if all(one.ok for one in attempt.loads):
                self.stats.completed += 1
                attempt.ended.set_result("")
                self._forget(attempt)
                return
        if attempt.ended.done() and all(one.finished for one in attempt.loads):
            self.pool.free(attempt.fresh)
            self.tails.free(attempt.slot)
            self._forget(attempt)

    def _fail(self, attempt: _Attempt, reason: str) -> None:
        """Take back the right to write, and tell who waits; a first verdict stays."""
        if attempt.ended.done():
            return
        attempt.ended.set_result(reason)
        self.stats.unclean += 1
        self.pool.free(attempt.held)  # nobody was told to write there
        for load in attempt.loads:
            load.cancel(reason)
        order = attempt.order
        if _KEY_LOST in reason and order is not None and order.cards == self._cards:
            self._renew()
        self._look(attempt)

    def _forget(self, attempt: _Attempt) -> None:
        del self._open[attempt.serial]
        if not self._with(attempt.card.addr):
            self._pulse.leave(attempt.card.addr)
        self._quiet.set()

    def _with(self, prefiller: NetAddr) -> list[_Attempt]:
        return [one for one in self._open.values() if one.card.addr == prefiller]

    def _renew(self) -> None:
        """A NIC here has lost its registrations: register anew, for orders from here on.

        Writes under the old keys fail from here on; their attempts are tried again.
        """
        if self.memory.renew(self.name):
            self.stats.renewed += 1
            self._cards = self._describe()

    def _describe(self) -> tuple[bytes, ...]:
        return tuple(one.card() for one in self.memory.blocks)

    # ------------------------------------------------------------------ messages and time

    def _on_message(self, peer: NetAddr, message: Message) -> None:
        if self._closed.done():
            return
        self._pulse.heard(peer)
        if not isinstance(message, Answer):
            return
        attempt = self._open.get(message.serial)
        if attempt is None or attempt.card.addr != peer:
            return
        if message.state == "taken":
            attempt.taken = True
        else:
            self._fail(attempt, message.reason)

    def _beat(self, peer: NetAddr) -> None:
        """Send a beat, and orders again that nobody has taken."""
        mine = [one for one in self._with(peer) if not one.ended.done()]
        for attempt in mine:
            if not attempt.taken and attempt.order is not None:
                self._mail.send(peer, attempt.order, attempt.number)
        serials = [one.serial for one in mine if one.taken]
        self._mail.send(peer, Beat(tuple(serials[:_SERIALS_MAX])), 0)

    def _on_silent(self, peer: NetAddr) -> None:
        self.stats.silent += 1
        for attempt in self._with(peer):
            self._fail(attempt, f"silent for {self._patience.silent_s} s")

    def _poll(self) -> bool:
        for receiver in self.receivers:
            receiver.poll()
        return bool(self._open)

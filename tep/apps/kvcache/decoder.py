"""The decoder: allocates pages and an immediate, dispatches, counts, decodes; cleans up after ends.

Rule 1: the cache of a request is complete when every rank has counted what was agreed, and for no
other reason. Rule 2: pages that a prefiller was told of are used again only when they were counted
complete, or the prefiller has confirmed the end, or it is certain to be dead; until then they are
in quarantine, and so is the immediate; after an error a while longer, since what failed may still
land. Rule 3: a retry never waits for Rule 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections.abc import Sequence

import numpy as np

from tep import Expectation, FabricError, NetAddr, TepError, TransferEngine
from tep.apps.immediates import KVCACHE
from tep.apps.kvcache.attempt import Attempt, DecoderStats
from tep.apps.kvcache.immediates import ImmSpace
from tep.apps.kvcache.layout import KvLayout, rows_per_page
from tep.apps.kvcache.messages import (
    Beat,
    Cancel,
    Dispatch,
    Ended,
    Message,
    Refuse,
    Welcome,
)
from tep.apps.kvcache.model import Completion, DecodeWork, Model, Request, page_keys
from tep.apps.kvcache.options import SideOptions
from tep.apps.kvcache.pool import PageIndices, PagePool, PrefixCache
from tep.apps.kvcache.post import Post
from tep.apps.kvcache.routing import PrefillerCard, Router
from tep.apps.kvcache.sessions import Session, Sessions, make_hello

__all__ = ["Decoder"]

_KEY_LOST = "REMOTE_KEY"  # the seam's name for it, as errors say it

_log = logging.getLogger("tep.kvcache")


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
        pool: of the pages; None: a plain one.

    Attributes:
        name, memory, pool, stats: as they say.
        tails: the tail slots.
        imms: the immediates.
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
        pool: PagePool | None = None,
    ) -> None:
        self.name = name
        self.memory = side.memory(engines, layout)
        self.pool = pool or PagePool(side.npages)
        self.prefixes = PrefixCache(self.pool, prefix_pages) if prefix_pages else None
        self.tails = PagePool(side.tail_slots)
        self.imms = ImmSpace(imms)
        self.stats = DecoderStats()
        self._model = model
        self._layout = layout
        self._patience = side.patience
        self._attempts_max = attempts_max
        self._epoch = engines[0].main_address.epoch
        self._serial = 0
        self._open: dict[int, Attempt] = {}
        self._fenced: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy = 0
        self._quiet = asyncio.Event()
        self._closed = asyncio.get_running_loop().create_future()
        self._post = Post(
            engines[0],
            self._on_message,
            buffers=side.buffers,
            message_bytes=side.message_bytes,
            pause_s=side.patience.beat_s,
        )
        self._sessions = Sessions(
            make_hello(name, self.memory),
            self._post,
            side.patience,
            oldest=self._oldest,
            on_silent=self._on_silent,
            on_replaced=self._on_replaced,
        )

    @property
    def addr(self) -> NetAddr:
        """Of the first rank."""
        return self.memory.engines[0].main_address

    @property
    def nopen(self) -> int:
        """Attempts that have not ended, with those whose end is not confirmed."""
        return len(self._open)

    async def settled(self) -> None:
        """Return when every end is confirmed, or settled by a fence."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    async def drained(self) -> None:
        """Return when no request is under way, and every end is settled."""
        while self._busy or self._tasks:
            self._quiet.clear()
            await self._quiet.wait()

    def close(self) -> None:
        """Stop at once, as if it died: what waits here fails. Idempotent."""
        if self._post.loop.is_closed():
            return  # and with it all that waited
        if not self._closed.done():
            self._closed.set_result(None)
        self._sessions.close()
        self.pool.close()
        self.tails.close()
        for attempt in self._open.values():
            attempt.fail(f"decoder {self.name} was closed")
        for task in self._tasks:
            task.cancel()

    def fenced(self, prefiller: str, epoch: int) -> None:
        """An incarnation is certain to be dead, e.g. its process ended: none of its writes lands.

        Args:
            prefiller: its name.
            epoch: it, and all before it.
        """
        self._fenced[prefiller] = max(epoch, self._fenced.get(prefiller, epoch))
        self._sessions.end(prefiller, epoch)
        for attempt in tuple(self._open.values()):
            card = attempt.session.card
            if card.name == prefiller and card.epoch <= epoch and not attempt.confirmed.done():
                self.stats.fenced += 1
                attempt.confirm()
                attempt.fail(f"prefiller {prefiller} is dead")

    # ------------------------------------------------------------------ one request

    async def generate(self, request: Request, router: Router) -> Completion:
        """Have a prompt computed somewhere, and decode it here.

        It does not raise for what goes wrong on the way: the completion has the reasons. Cancelling
        the task cancels the request.
        """
        self._busy += 1
        try:
            return await self._see_through(request, router)
        finally:
            self._busy -= 1
            self._quiet.set()

    async def _see_through(self, request: Request, router: Router) -> Completion:
        start_s = asyncio.get_running_loop().time()
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
                lease.close(str(error))
                reasons.append(f"{lease.card.name}: {error}")
                continue
            except BaseException:
                lease.close()
                raise
            lease.close()
            ttft_s = asyncio.get_running_loop().time() - start_s
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
    ) -> Attempt:
        """Return a complete attempt, its pages held; or clean up behind the scenes and raise."""
        attempt = await self._open_attempt(request, card, keys)
        try:
            self._dispatch(request, attempt)
            await asyncio.wait((attempt.ended,), timeout=self._patience.request_s)
        except BaseException:
            self._end_unclean(attempt)
            raise
        if not attempt.ended.done():
            told = ", ".join(one.describe() for one in attempt.expectations)
            attempt.fail(f"not complete after {self._patience.request_s} s: {told}")
        reason = attempt.ended.result()
        if reason:
            self._end_unclean(attempt)
            raise FabricError(reason)
        self.stats.completed += 1
        self._forget(attempt)
        self.imms.end(attempt.imm)
        return attempt

    async def _open_attempt(
        self, request: Request, card: PrefillerCard, keys: Sequence[bytes]
    ) -> Attempt:
        """Get everything that an attempt needs, or raise and keep nothing."""
        layout, loop = self._layout, asyncio.get_running_loop()
        npages = layout.npages(request.ntokens)
        total = layout.npages(request.ntokens + request.max_tokens)
        with contextlib.ExitStack() as undo:
            try:
                async with asyncio.timeout(self._patience.request_s):
                    slot = await self.tails.acquire(1)
                    undo.callback(self.tails.free, slot)
                    full = keys[: request.ntokens // layout.page_tokens]
                    held, fresh = await self._acquire(total, full)
                    undo.callback(self.pool.free, np.concatenate([held, fresh]))
                    imm = await self.imms.acquire(self._patience.beat_s)
                    undo.callback(self.imms.end, imm)
            except TimeoutError:
                raise FabricError(self._no_room(total)) from None
            session = await self._sessions.get(card)
            if session.card.epoch <= self._fenced.get(card.name, -1):
                # The lease is from before, and its fence will not come again.
                raise FabricError(f"prefiller {card.name} is dead")
            undo.pop_all()
        self._serial += 1
        attempt = Attempt(
            self._serial,
            session,
            imm,
            fresh,
            held,
            slot,
            loop.create_future(),
            loop.create_future(),
            self.stats.renewed,
        )
        tp, src_tp = self.memory.tp, session.welcome.result()
        sent = npages - len(held)
        attempt.counts = tuple(
            sent * rows_per_page(layout, src_tp, tp, rank) + (rank == 0) for rank in range(tp)
        )
        self._open[attempt.serial] = attempt
        self._sessions.watch(session)
        return attempt

    def _no_room(self, wanted: int) -> str:
        pool, tails = self.pool, self.tails
        return (
            f"no room on {self.name} within {self._patience.request_s} s: {wanted} pages wanted, "
            f"{pool.nfree} of {pool.npages} free, {pool.nquarantined} in quarantine; "
            f"{tails.nfree} of {tails.npages} tail slots free, {tails.nquarantined} in quarantine"
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

    def _dispatch(self, request: Request, attempt: Attempt) -> None:
        loop = asyncio.get_running_loop()
        attempt.ranks_left = self.memory.tp

        def tell(expectation: Expectation) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._rank_done, attempt, expectation)

        for engine, count in zip(self.memory.engines, attempt.counts, strict=True):
            attempt.expectations.append(engine.expect_imm_count(attempt.imm, count, on_done=tell))
        npages = self._layout.npages(request.ntokens)
        first = len(attempt.held)
        ids = request.input_ids
        order = Dispatch(
            self.name,
            self._epoch,
            attempt.serial,
            request.name,
            attempt.imm,
            attempt.fresh[: npages - first].astype("<u4").tobytes(),
            first,
            int(attempt.slot[0]),
            request.ntokens,
            b"" if ids is None else np.ascontiguousarray(ids, "<i4").tobytes(),
            zlib.crc32(request.name.encode()),
        )
        self.stats.dispatched += 1
        self.stats.reused_pages += first
        self._post.send(
            attempt.session.card.addr,
            order,
            on_lost=lambda why: attempt.fail(f"the dispatch was lost: {why}"),
            tries=self._patience.sends,
        )

    def _rank_done(self, attempt: Attempt, expectation: Expectation) -> None:
        if not expectation.ok:
            attempt.fail(f"the count ended early: {expectation.error}")
            return
        attempt.ranks_left -= 1
        if attempt.ranks_left == 0 and not attempt.ended.done():
            attempt.ended.set_result("")

    async def _decode(
        self, request: Request, attempt: Attempt, keys: Sequence[bytes]
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

    # ------------------------------------------------------------------ unclean ends

    def _end_unclean(self, attempt: Attempt) -> None:
        """Put everything in quarantine, and have the end confirmed in the background."""
        self.stats.unclean += 1
        self.pool.free(attempt.held)  # nobody was told to write there
        self.pool.quarantine(attempt.fresh)
        self.tails.quarantine(attempt.slot)
        for expectation in attempt.expectations:
            expectation.cancel()
        if self._closed.done():
            return
        task = asyncio.get_running_loop().create_task(
            self._settle(attempt), name=f"{self.name}: end of #{attempt.serial}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    async def _settle(self, attempt: Attempt) -> None:
        pause_s = self._patience.cancel_s
        while not attempt.confirmed.done():
            cancel = Cancel(self.name, self._epoch, attempt.serial)
            self._post.send(attempt.session.card.addr, cancel, topic=attempt.serial)
            await asyncio.wait((attempt.confirmed,), timeout=pause_s)
            pause_s = min(2 * pause_s, 16 * self._patience.cancel_s)
        if attempt.unsure:
            await asyncio.sleep(self._patience.linger_s)
        for expectation in attempt.expectations:
            with contextlib.suppress(TepError):
                await expectation
        self.imms.burn(attempt.imm)
        self.pool.release(attempt.fresh)
        self.tails.release(attempt.slot)
        self._forget(attempt)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._quiet.set()

    def _forget(self, attempt: Attempt) -> None:
        del self._open[attempt.serial]
        if not any(other.session is attempt.session for other in self._open.values()):
            self._sessions.rest(attempt.session)

    # ------------------------------------------------------------------ messages

    def _on_message(self, message: Message) -> None:
        if self._closed.done():
            return
        match message:
            case Ended():
                self._on_ended(message)
            case Welcome() | Refuse() | Beat():
                self._sessions.take(message)
            case _:
                pass  # what decoders send, and none is meant to get

    def _on_ended(self, message: Ended) -> None:
        attempt = self._open.get(message.serial)
        if attempt is None or attempt.session.card.name != message.sender:
            return
        if attempt.session.card.epoch != message.epoch:
            return  # of another incarnation, which knows nothing of it
        if _KEY_LOST in message.reason and attempt.keys == self.stats.renewed:
            self._renew()
        if not attempt.confirmed.done():
            self.stats.confirmed += 1
        attempt.unsure = message.unsure
        attempt.confirm()
        attempt.fail(message.reason or "the prefiller ended it")

    def _renew(self) -> None:
        """A NIC here has lost its registrations: register anew, and say hello to all again.

        Writes under the old keys fail from here on; their attempts are tried again.
        """
        try:
            self.memory.renew()
        except TepError as error:
            _log.warning("%s cannot register its memory again: %s", self.name, error)
            return
        self.stats.renewed += 1
        self._sessions.renew(make_hello(self.name, self.memory))

    def _oldest(self, prefiller: str) -> int:
        mine = (
            serial
            for serial, attempt in self._open.items()
            if attempt.session.card.name == prefiller
        )
        return min(mine, default=self._serial + 1)

    def _on_replaced(self, card: PrefillerCard) -> None:
        self.fenced(card.name, card.epoch)  # a later incarnation runs: the earlier does not

    def _on_silent(self, session: Session) -> None:
        self.stats.silent += 1
        for attempt in tuple(self._open.values()):
            if attempt.session is session:
                attempt.fail(f"silent for {self._patience.silent_s} s")

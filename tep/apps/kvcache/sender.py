"""One attempt's writes from one rank: layer by layer, as its watched word advances; then the tail.

Rule 1: a layer is written when the word says that it is done, and not before. Rule 2: whoever has
asked for the end hears of it only when no row is with a NIC any more. Rule 3: this is the one room
that the engine's thread and the loop's thread share; a lock guards every field that both touch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import RLock

import numpy as np

from tep import MrDesc, MrHandle, Pages, Prepared, Routing, TepError, Transfer, TransferEngine
from tep.apps.kvcache.layout import HeadSlice, KvLayout, RankShape
from tep.apps.kvcache.memory import KvMemory
from tep.apps.kvcache.model import Chunk
from tep.apps.kvcache.pool import PageIndices

__all__ = ["Lane", "Route", "Target", "make_routes"]

_WHOLE = Routing(num_shards=1)
"""The tail is one row, so that it counts as one immediate whatever its length."""

PagePair = tuple[Pages, Pages]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a decoder's cache is.

    Attributes:
        layout, npages, tail_bytes: of its memory.
        kv: its descriptors, one a buffer, for each rank.
        tail: descriptor of its tail slots.
    """

    layout: KvLayout
    npages: int
    tail_bytes: int
    kv: tuple[tuple[MrDesc, ...], ...]
    tail: MrDesc

    @property
    def tp(self) -> int:
        """Ranks."""
        return len(self.kv)


@dataclass(frozen=True, slots=True)
class Route:
    """One run of heads of one buffer, from one rank here to one rank there.

    Attributes:
        mr, desc: both regions.
        nbytes: of one write.
        first_layer, layers: of the model, that the buffer holds.
        src_layer_bytes, dst_layer_bytes: from one layer to the next.
        chunks: for each chunk, its page lists in the first layer; None where nothing is to be sent.
    """

    mr: MrHandle
    desc: MrDesc
    nbytes: int
    first_layer: int
    layers: int
    src_layer_bytes: int
    dst_layer_bytes: int
    chunks: tuple[PagePair | None, ...]


def make_routes(
    memory: KvMemory,
    target: Target,
    matched: Sequence[tuple[int, HeadSlice]],
    chunks: Sequence[Chunk],
    src_pages: PageIndices,
    dst_pages: PageIndices,
    first_page: int,
) -> list[list[Route]]:
    """Work out all writes of an attempt, for each rank here.

    Args:
        memory: of this side.
        target: of the other.
        matched: of match_ranks().
        chunks: of the prompt.
        src_pages: one for each page of the prompt.
        dst_pages: one for each page of the prompt from `first_page` on.
        first_page: pages before it are not sent.
    """
    found: list[list[Route]] = [[] for _ in range(memory.tp)]
    for src_rank, piece in matched:
        buffer = memory.layout.buffers[piece.buffer]
        here = memory.shapes[src_rank]
        there = RankShape(target.layout, target.tp, piece.dst_rank)
        head_bytes = here.head_bytes(buffer)
        sides = (
            (here.page_bytes(buffer), piece.src_head * head_bytes, memory.npages),
            (there.page_bytes(buffer), piece.dst_head * head_bytes, target.npages),
        )
        pairs: list[PagePair | None] = []
        for chunk in chunks:
            first, stop = max(chunk.first_page, first_page), chunk.last_page + 1
            if first >= stop:
                pairs.append(None)
                continue
            lists = (src_pages[first:stop], dst_pages[first - first_page : stop - first_page])
            source, sink = (
                Pages(_on_planes(pages, buffer.planes, npages), stride=stride, offset=offset)
                for pages, (stride, offset, npages) in zip(lists, sides, strict=True)
            )
            assert sink.distinct, "a page was given twice"
            pairs.append((source, sink))
        found[src_rank].append(
            Route(
                memory.kv[src_rank][piece.buffer].mr,
                target.kv[piece.dst_rank][piece.buffer],
                piece.heads * head_bytes,
                buffer.first_layer,
                buffer.layers,
                here.layer_bytes(buffer, memory.npages),
                there.layer_bytes(buffer, target.npages),
                tuple(pairs),
            )
        )
    return found


def _on_planes(pages: PageIndices, planes: int, npages: int) -> PageIndices:
    if planes == 1:
        return pages
    return np.concatenate([pages + plane * npages for plane in range(planes)])


class Lane:
    """The writes of one rank for one attempt.

    Args:
        engine: of the rank.
        routes: what it has to write.
        layers: of the model.
        nchunks: of the prompt.
        imm: what every write carries.
        on_seen: called on the loop's thread, once: the word has said all that it has to say.
        on_idle: called on the loop's thread, once: all was sent, or stop() was called, and no row
            is under way any more.
        on_trouble: called on the loop's thread with the reason when a write fails.

    Attributes:
        writes, rows, nbytes: transfers that have ended, the rows and the bytes they had.
        failed: why, if a write failed: then what has landed of it is not known; else "".
    """

    def __init__(
        self,
        engine: TransferEngine,
        routes: Sequence[Route],
        *,
        layers: int,
        nchunks: int,
        imm: int,
        on_seen: Callable[[], object],
        on_idle: Callable[[], object],
        on_trouble: Callable[[str], object],
    ) -> None:
        self._engine = engine
        self._routes = routes
        self._prepared: dict[int, tuple[int, Prepared]] = {}  # for each route, of its last chunk
        self._layers = layers
        self._steps_left = layers * nchunks
        self._imm = imm
        self._tail_due = False
        self._open: set[Transfer] = set()
        self._under_way = 0
        self._stopped = self._idle = False
        self._on_seen, self._on_idle, self._on_trouble = on_seen, on_idle, on_trouble
        self._loop = asyncio.get_running_loop()
        self._lock = RLock()
        self.writes = self.rows = self.nbytes = 0
        self.failed = ""

    def expect_tail(self) -> None:
        """This lane will write the tail: it is not done before."""
        self._tail_due = True

    def on_word(self, old: int, new: int) -> None:
        """The watched word went from old to new: send every layer in between."""
        with self._lock:
            for step in range(old, new):
                if self._stopped:
                    return
                self._steps_left -= 1
                self._send_layer(*divmod(step, self._layers))
            if self._steps_left == 0:
                self._tell(self._on_seen)
            self._check_idle()

    def send_tail(self, nbytes: int, src: tuple[MrHandle, int], dst: tuple[MrDesc, int]) -> None:
        """Write the tail, once."""
        with self._lock:
            if self._stopped or not self._tail_due:
                return
            self._tail_due = False
            write = self._engine.submit_single_write
            submit = partial(write, routing=_WHOLE, on_done=self._settle)
            self._submit(submit, nbytes, src, dst, self._imm)
            self._check_idle()

    def stop(self) -> None:
        """Send nothing more, and take back what no NIC has. Idempotent."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            for transfer in tuple(self._open):
                transfer.cancel()
            self._check_idle()

    def _send_layer(self, chunk: int, layer: int) -> None:
        for number, route in enumerate(self._routes):
            at = layer - route.first_layer
            if route.chunks[chunk] is not None and 0 <= at < route.layers:
                self._submit(self._send_pages, number, chunk, at)

    def _send_pages(self, number: int, chunk: int, layer: int) -> Transfer:
        """Write one layer of a route's buffer: all layers of a chunk are one prepared transfer."""
        route = self._routes[number]
        of_chunk, prepared = self._prepared.get(number, (-1, None))
        if prepared is None or of_chunk != chunk:
            pages = route.chunks[chunk]
            assert pages is not None
            prepared = self._engine.prepare_paged_writes(
                route.nbytes, (route.mr, pages[0]), (route.desc, pages[1])
            )
            self._prepared[number] = chunk, prepared
        return prepared.submit(
            self._imm,
            src_offset=layer * route.src_layer_bytes,
            dst_offset=layer * route.dst_layer_bytes,
            on_done=self._settle,
        )

    def _submit(self, submit: Callable[..., Transfer], *args: object) -> None:
        self._under_way += 1
        try:
            transfer = submit(*args)
        except TepError as error:
            self._under_way -= 1
            self._trouble(f"{type(error).__name__}: {error}")
            return
        if not transfer.finished:
            self._open.add(transfer)

    def _settle(self, transfer: Transfer) -> None:
        with self._lock:
            self._open.discard(transfer)
            self._under_way -= 1
            self.writes += 1
            self.rows += transfer.rows
            self.nbytes += transfer.job.total
            if transfer.error is not None and not transfer.cancelled:
                self._trouble(str(transfer.error))
            self._check_idle()

    def _trouble(self, reason: str) -> None:
        if not self.failed:
            self.failed = reason
            self._tell(self._on_trouble, reason)

    def _check_idle(self) -> None:
        over = self._stopped or not (self._steps_left or self._tail_due)
        if over and not self._under_way and not self._idle:
            self._idle = True
            self._tell(self._on_idle)

    def _tell(self, callback: Callable[..., object], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

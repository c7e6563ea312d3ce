"""A model whose every byte is known: it fills pages by a formula, and decodes by checking them.

The bytes of a page are a function of its key (the request's tokens up to the page's end), the
buffer, layer, plane and head. So a page in the wrong place, of another request, of another layer,
early, late or torn shows. `CheckedPool` paints free pages, so that a write after the free shows.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from tep.apps.kvcache.blocks.receiver import ImmSpace
from tep.apps.kvcache.decoder import Decoder
from tep.apps.kvcache.layout import KvBuffer, KvLayout
from tep.apps.kvcache.memory import KvMemory, PageIndices, PagePool
from tep.apps.kvcache.model import DecodeWork, PrefillWork, Request
from tep.apps.kvcache.prefiller import Prefiller
from tep.apps.kvcache.simulate import Member, World
from tests.support.planted import check_is_of_product

_PAINT = 0xA5

LAYOUT = KvLayout("m", 4, (KvBuffer("kv", 3, 2, 8, planes=2),))


def page_keys(request: Request, page_tokens: int) -> list[bytes]:
    """A key for each page of a prompt that names all tokens up to its end; 16 bytes each."""
    assert request.input_ids is not None
    data, keys, before = np.ascontiguousarray(request.input_ids, "<i4").tobytes(), [], b""
    for start in range(0, len(data), 4 * page_tokens):
        text = before + data[start : start + 4 * page_tokens]
        before = hashlib.blake2b(text, digest_size=16).digest()
        keys.append(before)
    return keys


def head_bytes_of(key: bytes, buffer: KvBuffer, place: tuple[int, int, int], nbytes: int) -> bytes:
    """The bytes of one head of one page.

    Args:
        key: of the page.
        buffer: whose.
        place: layer of the buffer, plane, head of the model.
        nbytes: how long.
    """
    text = key + buffer.name.encode() + struct.pack("<3I", *place)
    return hashlib.shake_128(text).digest(nbytes)


def tail_bytes_of(request: Request, nbytes: int) -> bytes:
    """The bytes of the tail of a request."""
    return hashlib.shake_128(b"tail of " + request.name.encode()).digest(nbytes)


class CheckedModel:
    """Fills and checks pages; takes as long as it is told.

    Args:
        layer_s: seconds that one layer of a chunk of so many tokens takes, from a function.
        decode_s: seconds that a decode takes.
        layout: of its cache.

    Attributes:
        layout, chunk_tokens: of its cache, and of a step: two pages.
        violations: what was not as it has to be, in words.
        checked: pages checked, over all ranks, layers and planes.
    """

    def __init__(
        self,
        layer_s: Callable[[int], float] = lambda _: 0.0,
        decode_s: float = 0.0,
        layout: KvLayout = LAYOUT,
    ) -> None:
        self._layer_s = layer_s
        self._decode_s = decode_s
        self.layout, self.chunk_tokens = layout, 2 * layout.page_tokens
        self.violations: list[str] = []
        self.checked = 0

    async def prefill(self, work: PrefillWork) -> bytes:
        """Fill layer by layer."""
        memory, request = work.memory, work.request
        per = self.layout.page_tokens
        keys = page_keys(request, per)
        for chunk in work.chunks:
            for layer in range(work.layers):
                await asyncio.sleep(self._layer_s(chunk.stop - chunk.start))
                for page in range(chunk.start // per, -(-chunk.stop // per)):
                    fill_page(memory, layer, keys[page], int(work.pages[page]))
                work.layer_done()
        return tail_bytes_of(request, memory.tail_bytes)

    async def decode(self, work: DecodeWork) -> Sequence[int]:
        """Check every page and the tail; the token says how many pages were right."""
        await asyncio.sleep(self._decode_s)
        memory, request = work.memory, work.request
        good = 0
        for page, key in enumerate(page_keys(request, self.layout.page_tokens)):
            wrong = page_flaw(memory, key, int(work.pages[page]))
            if wrong:
                self.violations.append(f"{request.name}: page {page} of the prompt: {wrong}")
            good += not wrong
        self.checked += good
        if bytes(memory.tail(work.tail_slot)) != tail_bytes_of(request, memory.tail_bytes):
            self.violations.append(f"{request.name}: the tail is not its own")
        return [good]


def fill_page(memory: KvMemory, layer: int, key: bytes, page: int) -> None:
    """Write one page of one of the model's layers: all buffers, planes, heads and ranks."""
    for rank, shape in enumerate(memory.shapes):
        for index, buffer in enumerate(memory.layout.buffers):
            at = layer - buffer.first_layer
            if not 0 <= at < buffer.layers:
                continue
            for plane in range(buffer.planes):
                view = memory.pages(rank, index)[at, plane, page]
                for row, head in zip(view, shape.heads(buffer), strict=True):
                    text = head_bytes_of(key, buffer, (at, plane, head), len(row))
                    row[:] = np.frombuffer(text, np.uint8)


def page_flaw(memory: KvMemory, key: bytes, page: int) -> str:
    """Say where a page is not what it should be, or ""."""
    for rank, shape in enumerate(memory.shapes):
        for index, buffer in enumerate(memory.layout.buffers):
            for at in range(buffer.layers):
                for plane in range(buffer.planes):
                    view = memory.pages(rank, index)[at, plane, page]
                    for row, head in zip(view, shape.heads(buffer), strict=True):
                        if bytes(row) != head_bytes_of(key, buffer, (at, plane, head), len(row)):
                            return (
                                f"rank {rank}, buffer {buffer.name!r}, layer {at}, plane {plane}, "
                                f"head {head}, cache page {page}: not the bytes of this request"
                            )
    return ""


class FreePaint:
    """Paints the free pages of a cache, and looks at the paint when they are handed out again.

    Args:
        pool: whose pages; all of them are free.
        memory: of these pages.

    Attributes:
        violations: pages that were written while they were free, in words.
    """

    def __init__(self, pool: PagePool, memory: KvMemory) -> None:
        self.violations: list[str] = []
        self._memory = memory
        self.on_free(np.arange(memory.npages))
        pop, free = pool._pop, pool.free

        def take(n: int) -> PageIndices:
            found = pop(n)
            self.on_take(found)
            return found

        def give_back(pages: PageIndices) -> None:
            self.on_free(pages)
            free(pages)

        pool._pop, pool.free = take, give_back

    def on_free(self, pages: PageIndices) -> None:
        """Paint pages."""
        for _, view in self._views():
            view[:, :, pages] = _PAINT

    def on_take(self, pages: PageIndices) -> None:
        """Look whether the paint is whole."""
        for where, view in self._views():
            touched = (view[:, :, pages] != _PAINT).any(axis=(0, 1, 3, 4))
            self.violations += [
                f"{where}: page {page} was written while it was free"
                for page in pages[touched].tolist()
            ]

    def look(self, pages: PageIndices) -> None:
        """Look at pages that are free."""
        self.on_take(pages)

    def _views(self) -> list[tuple[str, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]]:
        memory = self._memory
        return [
            (f"{engine.name}, buffer {index}", memory.pages(rank, index))
            for rank, engine in enumerate(memory.engines)
            for index in range(len(memory.layout.buffers))
        ]


class PaintedWorld(World):
    """A world whose free pages are painted, and whose loop hides no error.

    Args:
        imms: immediates of each decoder; None: as many as there are.

    Attributes:
        violations: errors of the event loop's callbacks, in words.
    """

    def __init__(self, *args: Any, imms: range | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self._imms = imms
        self._paints: dict[int, FreePaint] = {}
        self.violations: list[str] = []

    def paint(self, member: Member) -> FreePaint:
        """The paint of an incarnation."""
        return self._paints[id(member)]

    def enrol(self, side: Prefiller | Decoder) -> None:
        """Paint the pages of an instance, too."""
        super().enrol(side)
        if isinstance(side, Decoder) and self._imms is not None:
            for receiver in side.receivers:
                receiver.imms = ImmSpace(self._imms)
        self._paints[id(self.members[side.name])] = FreePaint(side.pool, side.memory)

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine, and note what callbacks of the loop raise."""
        raised: list[BaseException] = []

        def note(_: Any, context: dict[str, Any]) -> None:
            self.violations.append(f"{context.get('message')}: {context.get('exception')!r}")
            raised.extend(filter(None, [context.get("exception")]))

        async def whole() -> Any:
            asyncio.get_running_loop().set_exception_handler(note)
            return await main

        try:
            return super().run(whole())
        finally:
            for error in raised:
                check_is_of_product(error)

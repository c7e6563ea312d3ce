"""A toy model with a paged cache: each token that it says depends on every byte of its cache.

So decoding from moved pages can be compared, token by token, with decoding where the prompt was
computed. As in a transformer each layer writes keys and values of new tokens, and reads those of
all tokens before. Where a transformer weighs them, and a wrong page may weigh nothing, this sums
hashes of them with their positions. All is in 32-bit integers: no grouping changes a result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tep.apps.kvcache.layout import KvBuffer, KvLayout
from tep.apps.kvcache.memory import KvMemory, PageIndices
from tep.apps.kvcache.model import DecodeWork, PrefillWork

__all__ = ["ToyCache", "ToyModel"]

Words = npt.NDArray[np.uint32]


class ToyCache:
    """The pages of one sequence in order, their heads spread over the ranks.

    `views` has of each rank its heads, and u32[layers, 2, npages, heads, page_tokens, head_dim].
    """

    def __init__(self, views: Sequence[tuple[range, Words]], pages: PageIndices) -> None:
        self._views, self._pages = views, pages

    def write(self, layer: int, start: int, words: Words) -> None:
        """Put u32[n, 2, heads, head_dim] at tokens start .. start + n."""
        for heads, view in self._views:
            page, slot = self._places(start, start + len(words), view)
            view[layer, :, page, :, slot] = words[:, :, heads.start : heads.stop]

    def read(self, layer: int, stop: int) -> Words:
        """Keys and values of tokens 0 .. stop."""
        nheads = max(heads.stop for heads, _ in self._views)
        found = np.empty((stop, 2, nheads, self._views[0][1].shape[-1]), np.uint32)
        for heads, view in self._views:
            page, slot = self._places(0, stop, view)
            found[:, :, heads.start : heads.stop] = view[layer, :, page, :, slot]
        return found

    def _places(self, start: int, stop: int, view: Words) -> tuple[PageIndices, PageIndices]:
        page, slot = np.divmod(np.arange(start, stop), view.shape[4])
        return self._pages[page], slot


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyModel:
    """The model; a `Model` for prefillers and decoders.

    Attributes:
        layers, heads, head_dim, vocab: its sizes.
        page_tokens, chunk_tokens: of its cache, and of a chunked prefill.
        seed: models of different seeds say different tokens.
        layer_s: seconds that a prefill rests after each layer.
    """

    layers: int = 4
    heads: int = 4
    head_dim: int = 8
    vocab: int = 256
    page_tokens: int = 8
    chunk_tokens: int = 16
    seed: int = 0
    layer_s: float = 0.0

    @property
    def layout(self) -> KvLayout:
        """The layout of its cache: K and V as two planes of one buffer."""
        buffer = KvBuffer("kv", self.layers, self.heads, 4 * self.head_dim, planes=2)
        return KvLayout(f"toy-{self.seed}", self.page_tokens, (buffer,), dtype="uint32")

    @property
    def tail_bytes(self) -> int:
        """The tail holds the last token's state."""
        return 4 * 2 * self.heads * self.head_dim

    def compute(
        self, tokens: npt.NDArray[np.int32], start: int, cache: ToyCache
    ) -> Iterator[Words]:
        """Compute tokens start .. start + n layer by layer.

        Yields:
            u32[2, heads, head_dim]: state of the last token, each time that a layer is in `cache`.
        """
        lanes = np.arange(2 * self.heads * self.head_dim).reshape(2, self.heads, self.head_dim)
        seed = _mix(np.full(1, self.seed & 0xFFFFFFFF, np.uint32))
        salt = lanes.astype(np.uint32) + seed
        state = _mix(_by_token(tokens) * np.uint32(0x9E3779B1) + salt)
        stop = start + len(tokens)
        for layer in range(self.layers):
            cache.write(layer, start, _mix(state + salt))
            hashes = _mix(cache.read(layer, stop) + _by_token(np.arange(stop)))
            state = _mix(state + np.cumsum(hashes, axis=0, dtype=np.uint32)[start:])
            yield state[-1]

    def generate(self, state: Words, start: int, count: int, cache: ToyCache) -> list[int]:
        """Tokens, one after the other, from the state behind `start` tokens on."""
        found: list[int] = []
        while True:
            found.append(int(_mix(state).sum(dtype=np.uint32)) % self.vocab)
            if len(found) == count:
                return found
            last = np.array(found[-1:], np.int32)
            *_, state = self.compute(last, start + len(found) - 1, cache)

    def alone(self, tokens: npt.NDArray[np.int32], count: int) -> list[int]:
        """Prefill and decode in one place: what disaggregation must reproduce."""
        cache = self.plain_cache(len(tokens) + count)
        *_, state = self.compute(tokens, 0, cache)
        return self.generate(state, len(tokens), count, cache)

    def plain_cache(self, ntokens: int) -> ToyCache:
        """A cache of its own, in one place."""
        shape = (self.layers, 2, 1, self.heads, ntokens, self.head_dim)
        return ToyCache([(range(self.heads), np.zeros(shape, np.uint32))], np.zeros(1, np.int64))

    # ------------------------------------------------------------------ as a Model

    async def prefill(self, work: PrefillWork) -> bytes:
        """Compute a prompt into its pages; the tail is the state behind it."""
        ids = work.request.input_ids
        assert ids is not None, "this model looks at its tokens"
        cache, tail = self._paged(work.memory, work.pages), b""
        for chunk in work.chunks:
            for state in self.compute(ids[chunk.start : chunk.stop], chunk.start, cache):
                work.layer_done()
                tail = state.tobytes()
                await asyncio.sleep(self.layer_s)  # beats and cancels get their turn
        return tail

    async def decode(self, work: DecodeWork) -> Sequence[int]:
        """Generate from the pages that have come, and from the tail's state."""
        cache = self._paged(work.memory, work.pages)
        tail = work.memory.tail(work.tail_slot)[: self.tail_bytes].copy()
        state = tail.view(np.uint32).reshape(2, self.heads, self.head_dim)
        request = work.request
        await asyncio.sleep(0)
        return self.generate(state, request.ntokens, request.max_tokens, cache)

    def _paged(self, memory: KvMemory, pages: PageIndices) -> ToyCache:
        dims, views = (self.page_tokens, self.head_dim), []
        for rank, shape in enumerate(memory.shapes):
            view = memory.pages(rank, 0)
            words = view.view(np.uint32).reshape(*view.shape[:4], *dims)
            views.append((shape.heads(memory.layout.buffers[0]), words))
        return ToyCache(views, pages)


def _by_token(numbers: npt.NDArray[np.integer]) -> Words:
    return numbers.astype(np.uint32).reshape(-1, 1, 1, 1)


def _mix(words: Words) -> Words:
    """Hash each word, one to one. Source: fmix32, the end of MurmurHash3, by A. Appleby; quoted."""
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return words ^ (words >> np.uint32(16))

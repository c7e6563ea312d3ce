"""A small real transformer in numpy, with a paged cache: so that decoding from moved pages can be
compared, token by token, with decoding where the prompt was computed.

Grouped-query attention, rotary positions, RMS norms, a gated MLP; float32; weights drawn from a
seed. It generates noise, always the same. The watched word advances after each layer's attention.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tep.apps.kvcache.layout import KvBuffer, KvLayout
from tep.apps.kvcache.memory import KvMemory, PageIndices
from tep.apps.kvcache.model import DecodeWork, PrefillWork, cut_chunks

__all__ = ["Cache", "PagedCache", "PlainCache", "TinyConfig", "TinyTransformer"]

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig:
    """Sizes of the model. The defaults make about 100 thousand weights."""

    layers: int = 4
    width: int = 64
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 8
    hidden: int = 128
    vocab: int = 256
    page_tokens: int = 8
    chunk_tokens: int = 16
    seed: int = 0

    @property
    def layout(self) -> KvLayout:
        """The layout of its cache: K and V as two planes of one buffer."""
        buffer = KvBuffer("kv", self.layers, self.kv_heads, 4 * self.head_dim, planes=2)
        return KvLayout(f"tiny-{self.seed}", self.page_tokens, (buffer,), dtype="float32")

    @property
    def tail_bytes(self) -> int:
        """The tail holds the last token's logits."""
        return 4 * self.vocab


class Cache(Protocol):
    """Keys and values of one sequence."""

    def write(self, layer: int, start: int, keys: Floats, values: Floats) -> None:
        """Put f32[n, kv_heads, head_dim] at tokens start .. start + n."""

    def read(self, layer: int, stop: int) -> tuple[Floats, Floats]:
        """Keys and values of tokens 0 .. stop: f32[stop, kv_heads, head_dim] each."""


class PlainCache:
    """A cache in one piece, for the run without pages."""

    def __init__(self, config: TinyConfig, tokens: int) -> None:
        shape = (config.layers, 2, tokens, config.kv_heads, config.head_dim)
        self._kv = np.zeros(shape, np.float32)

    def write(self, layer: int, start: int, keys: Floats, values: Floats) -> None:
        self._kv[layer, 0, start : start + len(keys)] = keys
        self._kv[layer, 1, start : start + len(values)] = values

    def read(self, layer: int, stop: int) -> tuple[Floats, Floats]:
        return self._kv[layer, 0, :stop], self._kv[layer, 1, :stop]


class PagedCache:
    """A cache in pages of an instance's memory, its heads spread over the ranks.

    Args:
        config: of the model.
        memory: of the instance.
        pages: of the sequence, in order.
    """

    def __init__(self, config: TinyConfig, memory: KvMemory, pages: PageIndices) -> None:
        self._page_tokens = config.page_tokens
        self._pages = pages
        dims = (config.page_tokens, config.head_dim)
        self._kv = []
        for rank, shape in enumerate(memory.shapes):
            heads = shape.heads(memory.layout.buffers[0])
            view = memory.pages(rank, 0)
            self._kv.append((heads, view.view(np.float32).reshape(*view.shape[:4], *dims)))

    def write(self, layer: int, start: int, keys: Floats, values: Floats) -> None:
        tokens = np.arange(start, start + len(keys))
        pages, slots = self._pages[tokens // self._page_tokens], tokens % self._page_tokens
        for heads, kv in self._kv:
            for row, head in enumerate(heads):
                kv[layer, 0, pages, row, slots] = keys[:, head]
                kv[layer, 1, pages, row, slots] = values[:, head]

    def read(self, layer: int, stop: int) -> tuple[Floats, Floats]:
        tokens = np.arange(stop)
        pages, slots = self._pages[tokens // self._page_tokens], tokens % self._page_tokens
        count = max(heads.stop for heads, _ in self._kv)
        dim = self._kv[0][1].shape[-1]
        found = np.empty((2, stop, count, dim), np.float32)
        for heads, kv in self._kv:
            for row, head in enumerate(heads):
                for plane in (0, 1):
                    found[plane, :, head] = kv[layer, plane, pages, row, slots]
        return found[0], found[1]


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer."""

    query: Floats
    key: Floats
    value: Floats
    out: Floats
    gate: Floats
    up: Floats
    down: Floats


@dataclass(slots=True)
class TinyTransformer:
    """The model; a `Model` for prefillers and decoders.

    Attributes:
        config: its sizes.
        layer_s: seconds that a prefill rests after each layer.
    """

    config: TinyConfig = field(default_factory=TinyConfig)
    layer_s: float = 0.0
    _embed: Floats = field(init=False)
    _unembed: Floats = field(init=False)
    _layers: list[_Layer] = field(init=False)

    def __post_init__(self) -> None:
        """Draw the weights."""
        c = self.config
        dice = np.random.default_rng(c.seed)

        def draw(rows: int, columns: int) -> Floats:
            found: Floats = dice.standard_normal((rows, columns), np.float32)
            return found / np.float32(rows**0.5)

        # Small, and not the same matrix as at the end: what is generated depends on the whole
        # context and not on the last token alone, so that one wrong page shows.
        self._embed = dice.standard_normal((c.vocab, c.width), np.float32) * np.float32(0.3)
        self._unembed = draw(c.width, c.vocab)
        inner, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        shapes = (
            (c.width, inner),
            (c.width, kv),
            (c.width, kv),
            (inner, c.width),
            (c.width, c.hidden),
            (c.width, c.hidden),
            (c.hidden, c.width),
        )
        self._layers = [_Layer(*(draw(*shape) for shape in shapes)) for _ in range(c.layers)]

    # ------------------------------------------------------------------ computing

    def attend(self, layer: int, x: Floats, start: int, cache: Cache) -> Floats:
        """The attention half of one layer, for tokens start .. start + len(x): f32[n, width]."""
        c, w = self.config, self._layers[layer]
        n = len(x)
        h = _norm(x)
        positions = np.arange(start, start + n)
        queries = _rotate((h @ w.query).reshape(n, c.heads, c.head_dim), positions)
        keys = _rotate((h @ w.key).reshape(n, c.kv_heads, c.head_dim), positions)
        values = (h @ w.value).reshape(n, c.kv_heads, c.head_dim)
        cache.write(layer, start, keys, values)
        keys, values = cache.read(layer, start + n)
        group = c.heads // c.kv_heads
        q = queries.reshape(n, c.kv_heads, group, c.head_dim)
        scores = np.einsum("nkgd,tkd->kgnt", q, keys) / np.float32(c.head_dim**0.5)
        ahead = np.arange(start + n) > positions[:, None]
        scores = np.where(ahead, np.float32(-1e30), scores)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed = np.einsum("kgnt,tkd->nkgd", scores, values).reshape(n, c.heads * c.head_dim)
        found: Floats = x + mixed @ w.out
        return found

    def feed(self, layer: int, x: Floats) -> Floats:
        """The other half of one layer."""
        w = self._layers[layer]
        h = _norm(x)
        gate = h @ w.gate
        found: Floats = x + (gate / (1 + np.exp(-gate)) * (h @ w.up)) @ w.down
        return found

    def embed(self, tokens: npt.NDArray[np.int32]) -> Floats:
        """f32[n, width]."""
        found: Floats = self._embed[tokens % self.config.vocab]
        return found

    def logits(self, x: Floats) -> Floats:
        """The logits of the last token: f32[vocab]."""
        found: Floats = _norm(x[-1:])[0] @ self._unembed
        return found

    def forward(
        self,
        tokens: npt.NDArray[np.int32],
        start: int,
        cache: Cache,
        after_attention: Callable[[], object] = lambda: None,
    ) -> Floats:
        """All layers for tokens start .. start + n; the logits behind the last."""
        x = self.embed(tokens)
        for layer in range(self.config.layers):
            x = self.attend(layer, x, start, cache)
            after_attention()
            x = self.feed(layer, x)
        return self.logits(x)

    def generate(self, logits: Floats, start: int, count: int, cache: Cache) -> list[int]:
        """The likeliest tokens, one after the other, from the logits behind `start` tokens on."""
        found: list[int] = []
        while True:
            found.append(int(logits.argmax()))
            if len(found) == count:
                return found
            logits = self.forward(np.array(found[-1:], np.int32), start + len(found) - 1, cache)

    def alone(self, tokens: npt.NDArray[np.int32], count: int) -> list[int]:
        """Prefill and decode in one place, without pages: what disaggregation must reproduce."""
        cache = PlainCache(self.config, len(tokens) + count)
        logits = np.zeros(0, np.float32)
        for chunk in cut_chunks(len(tokens), self.config.chunk_tokens, self.config.page_tokens):
            logits = self.forward(tokens[chunk.start : chunk.stop], chunk.start, cache)
        return self.generate(logits, len(tokens), count, cache)

    # ------------------------------------------------------------------ as a Model

    async def prefill(self, work: PrefillWork) -> bytes:
        """Compute a prompt into its pages; the tail is the logits behind it."""
        ids = work.request.input_ids
        assert ids is not None, "this model looks at its tokens"
        cache = PagedCache(self.config, work.memory, work.pages)
        x = np.zeros((0, self.config.width), np.float32)
        for chunk in work.chunks:
            x = self.embed(ids[chunk.start : chunk.stop])
            for layer in range(self.config.layers):
                x = self.attend(layer, x, chunk.start, cache)
                work.layer_done()
                x = self.feed(layer, x)
                await asyncio.sleep(self.layer_s)  # beats and cancels get their turn
        return self.logits(x).tobytes()

    async def decode(self, work: DecodeWork) -> Sequence[int]:
        """Generate from the pages that have come, and from the tail's logits."""
        cache = PagedCache(self.config, work.memory, work.pages)
        tail = work.memory.tail(work.tail_slot)[: self.config.tail_bytes]
        logits = tail.view(np.float32).copy()
        request = work.request
        await asyncio.sleep(0)
        return self.generate(logits, request.ntokens, request.max_tokens, cache)


def _norm(x: Floats) -> Floats:
    found: Floats = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(1e-6))
    return found


def _rotate(x: Floats, positions: npt.NDArray[np.int64]) -> Floats:
    """Turn pairs of elements by angles that grow with the position."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-np.arange(half) / half)
    angles = positions[:, None, None] * rates
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

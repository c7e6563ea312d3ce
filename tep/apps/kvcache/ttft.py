"""How long until the first token: what layer-wise transfer adds to a prefill, in closed form.

The pipeline is modelled, four numbers of it are fitted. A layer's pages leave when its attention
output is there; the wire takes one layer after the other; a layer's transfer takes a start and a
time for each page; the first token comes when the last layer of the last chunk, and the tail, have
landed. What the published figures show beyond that is fitted: see PUBLISHED.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tep import UsageError
from tep.apps.kvcache.layout import KvBuffer, KvLayout
from tep.apps.kvcache.model import Chunk, cut_chunks

__all__ = ["PUBLISHED", "QWEN3_235B", "Prediction", "TtftModel"]

QWEN3_235B: Final = KvLayout("Qwen3-235B", 128, (KvBuffer("kv", 94, 4, 256, planes=2),))
"""94 layers, 4 KV heads of 128 bf16 elements, K and V pages of 128 tokens: 32 KiB a head's page.

Source: arXiv 2510.27656 v2, Table 3 (94 layers, page 32 kB = 128 tokens, TP4) and the model's
public configuration (heads, head size); quoted. 16,384 tokens are 1,024 such pages over 4 ranks.
"""

LayerTimes = float | Sequence[float] | Callable[[int, int], float] | None


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model says of one prompt. Times in seconds.

    Attributes:
        ntokens: its length.
        chunks: its steps.
        layer_compute_s: one layer of each chunk.
        layer_transfer_s: one layer of each chunk, from its submission to its last page.
        pages: pages of one layer of each chunk, over all ranks.
        ttft_same_node_s: compute alone.
        ttft_s: disaggregated.
        exposed_s: of `ttft_s`, what came after the last layer's compute.
    """

    ntokens: int
    chunks: tuple[Chunk, ...]
    layer_compute_s: tuple[float, ...]
    layer_transfer_s: tuple[float, ...]
    pages: tuple[int, ...]
    ttft_same_node_s: float
    ttft_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftModel:
    """Times of one model on one machine and network.

    Attributes:
        layout: gives layers, page size and pages.
        chunk_tokens: of one step of a chunked prefill.
        layer_s, token_s, pair_s: compute of one layer of a chunk of n tokens that begins at s:
            layer_s + token_s * n + pair_s * n * (s + n / 2); used where no times are given.
        start_s: of a layer's transfer, whatever its size.
        page_s: of each of its pages, all ranks together; the wire is busy for it.
        setup_s: what disaggregation costs a request once: scheduling, dispatch, the hand-over.
        drag: by what part of the wire time of a layer's pages its compute takes longer.
    """

    layout: KvLayout
    chunk_tokens: int
    layer_s: float
    token_s: float
    pair_s: float
    start_s: float
    page_s: float
    setup_s: float
    drag: float

    def layer_compute_s(self, start: int, ntokens: int) -> float:
        """Compute of one layer of a chunk of `ntokens` tokens behind `start` others."""
        pairs = ntokens * (start + ntokens / 2)
        return self.layer_s + self.token_s * ntokens + self.pair_s * pairs

    def layer_transfer_s(self, npages: int) -> float:
        """Transfer of one layer's pages of one chunk, counted over all ranks."""
        return self.start_s + npages * self.page_s

    def pages_of(self, ntokens: int) -> int:
        """Pages that `ntokens` tokens make in one layer, over all planes and heads."""
        rows = sum(buffer.planes * buffer.heads for buffer in self.layout.buffers)
        return self.layout.npages(ntokens) * rows

    def predict(self, ntokens: int, layer_compute_s: LayerTimes = None) -> Prediction:
        """Predict the time to the first token of one prompt.

        Args:
            ntokens: its length, 1 or more.
            layer_compute_s: compute time of one layer, seconds: one number = of the *last* chunk,
                as the published table gives it (earlier chunks have less context: their attention
                is taken off by `pair_s`); a sequence = of each chunk; a function of (tokens before
                the chunk, tokens of the chunk); None = this model's own.

        Raises:
            UsageError: no tokens, or times for another number of chunks.
        """
        if ntokens < 1:
            raise UsageError(f"predict: ntokens={ntokens}; one at the least")
        chunks = cut_chunks(ntokens, self.chunk_tokens, self.layout.page_tokens)
        compute = self._times(chunks, layer_compute_s)
        pages = tuple(self.pages_of(chunk.stop - chunk.start) for chunk in chunks)
        layers = self.layout.layers
        computed_s = wire_free_s = landed_s = 0.0
        for layer_s, npages in zip(compute, pages, strict=True):
            wire_s = npages * self.page_s
            for _ in range(layers):
                computed_s += layer_s + self.drag * wire_s
                wire_free_s = max(computed_s, wire_free_s) + wire_s
                landed_s = wire_free_s + self.start_s
        return Prediction(
            ntokens,
            chunks,
            compute,
            tuple(self.layer_transfer_s(npages) for npages in pages),
            pages,
            layers * sum(compute),
            self.setup_s + landed_s,
            landed_s - computed_s,
        )

    def _times(self, chunks: Sequence[Chunk], given: LayerTimes) -> tuple[float, ...]:
        if given is None:
            given = self.layer_compute_s
        if callable(given):
            found = tuple(given(chunk.start, chunk.stop - chunk.start) for chunk in chunks)
        elif isinstance(given, Sequence):
            found = tuple(float(value) for value in given)
        else:
            last = self.layer_compute_s(chunks[-1].start, chunks[-1].stop - chunks[-1].start)
            found = tuple(
                float(given) - last + self.layer_compute_s(c.start, c.stop - c.start)
                for c in chunks
            )
        if len(found) != len(chunks) or min(found) <= 0:
            raise UsageError(
                f"predict: layer times {found} for {len(chunks)} chunks; one positive number each"
            )
        return found


PUBLISHED: Final = TtftModel(
    layout=QWEN3_235B,
    chunk_tokens=16384,
    layer_s=208.75e-6,
    token_s=0.47612e-6,
    pair_s=13.312e-12,
    start_s=340.7e-6,
    page_s=1.2288e-6,
    setup_s=32.6e-3,
    drag=0.517,
)
"""Qwen3-235B on H200 with TP4, EFA 2 x 200 Gb/s a GPU. Source of all: arXiv 2510.27656 v2, Table 3.

Quoted: the layout and the chunk. Fitted, by least squares of relative errors over the four rows
4,096, 8,192, 32,768 and 131,072 tokens:

- layer_s, token_s, pair_s to the layer compute times; worst error 0.6 %. The time a pair is what
  attention costs: 2 matrix products x 2 x 16 query heads x 128 a rank are 8.2 kFLOP, 0.6 PFLOP/s.
- start_s, page_s to the layer transfer times; worst error 1.9 %. 1.229 us for 32 KiB are 213 Gb/s,
  which is one 200 Gb/s NIC's rate, while the same paper's paged writes reach 360 Gb/s: why is not
  known. So these two are this deployment's and no NIC's; for others see `simulate`.
- setup_s, drag to the disaggregated TTFT; worst error 1.4 % of it. The table does not say where
  the 46 to 321 ms over the same node come from; one last layer's transfer is 2 ms. A constant and a
  part that grows with the bytes moved explain it; that the latter is compute slowed by transfers is
  our reading, guessed.

With four rows and two parameters each, lengths within 4,096 .. 131,072 are interpolated; below, the
constant 32.6 ms is all that matters and rests on one row.
"""

"""The time to the first token: layer-wise transfer added to a prefill, in closed form.

The pipeline is modelled: a layer's pages leave when its attention output is there, the wire takes
one layer after the other, a transfer takes a start and a time for each page, and the first token
comes when the last layer of the last chunk, and the tail, have landed. The constants of a model and
a machine are fitted to measured rows: see `fit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tep import UsageError
from tep.apps.kvcache.layout import KvBuffer, KvLayout
from tep.apps.kvcache.model import Chunk, cut_chunks

__all__ = [
    "PUBLISHED", "PUBLISHED_ROWS", "QWEN3_235B", "Measured", "Prediction", "TtftModel", "fit",
]  # fmt: skip

QWEN3_235B: Final = KvLayout("Qwen3-235B", 128, (KvBuffer("kv", 94, 4, 256, planes=2),))
"""94 layers, 4 KV heads of 128 bf16 elements, K and V pages of 128 tokens: 32 KiB a head's page.

Source: arXiv 2510.27656 v2, Table 3 (94 layers, page 32 kB = 128 tokens, TP4) and the model's
public configuration (heads, head size); quoted. 16,384 tokens are 1,024 such pages over 4 ranks.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One prompt on a real cluster; times in seconds.

    Attributes:
        ntokens: its length.
        ttft_same_node_s, ttft_s: time to the first token, without and with disaggregation.
        layer_compute_s: one layer of its last chunk.
        layer_transfer_s: one layer of its first chunk, from its submission to its last page.
    """

    ntokens: int
    ttft_same_node_s: float
    ttft_s: float
    layer_compute_s: float
    layer_transfer_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The model's times of one prompt, in seconds.

    Attributes:
        ntokens: its length.
        chunks: its steps.
        layer_compute_s: one layer of each chunk.
        layer_transfer_s: one layer of each chunk, from its submission to its last page.
        pages: pages of one layer of each chunk, over all ranks.
        ttft_same_node_s: compute alone.
        ttft_s: disaggregated.
        exposed_s: of `ttft_s`, what the wire took after the last layer's compute.
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
        step_s: what disaggregation adds to each step of a chunked prefill.
        hand_over_s: what it adds once, for each page of a layer of the largest chunk.
    """

    layout: KvLayout
    chunk_tokens: int
    layer_s: float
    token_s: float
    pair_s: float
    start_s: float
    page_s: float
    step_s: float
    hand_over_s: float

    def layer_compute_s(self, start: int, ntokens: int) -> float:
        """Compute of one layer of a chunk of `ntokens` tokens behind `start` others."""
        pairs = ntokens * (start + ntokens / 2)
        return self.layer_s + self.token_s * ntokens + self.pair_s * pairs

    def layer_transfer_s(self, npages: int) -> float:
        """Transfer of one layer's pages of one chunk, counted over all ranks."""
        return self.start_s + npages * self.page_s

    def pages_of(self, ntokens: int) -> int:
        """Pages that `ntokens` tokens make in one layer, over all planes and heads."""
        return _pages_of(self.layout, ntokens)

    def added_s(self, chunks: Sequence[Chunk]) -> float:
        """The time that disaggregation adds to a prompt beside the transfer of its layers."""
        largest = max(self.pages_of(chunk.stop - chunk.start) for chunk in chunks)
        return len(chunks) * self.step_s + largest * self.hand_over_s

    def predict(self, ntokens: int, layer_compute_s: float | None = None) -> Prediction:
        """Predict the time to the first token of one prompt.

        Args:
            ntokens: its length, 1 or more.
            layer_compute_s: compute time of one layer of the *last* chunk, seconds, as in the
                published table (earlier chunks have less context: their attention is taken off by
                `pair_s`); None = this model's own.

        Raises:
            UsageError: no tokens, or a time that cannot be.
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
                computed_s += layer_s
                wire_free_s = max(computed_s, wire_free_s) + wire_s
                landed_s = wire_free_s + self.start_s
        return Prediction(
            ntokens,
            chunks,
            compute,
            tuple(self.layer_transfer_s(npages) for npages in pages),
            pages,
            layers * sum(compute),
            self.added_s(chunks) + landed_s,
            landed_s - computed_s,
        )

    def _times(self, chunks: Sequence[Chunk], last_s: float | None) -> tuple[float, ...]:
        own = [self.layer_compute_s(chunk.start, chunk.stop - chunk.start) for chunk in chunks]
        found = tuple(own if last_s is None else (last_s - own[-1] + each for each in own))
        if min(found) <= 0:
            raise UsageError(f"predict: layer times {found}; one positive number each")
        return found


def fit(layout: KvLayout, chunk_tokens: int, rows: Sequence[Measured]) -> TtftModel:
    """Calibrate a model on measured prompts: least squares of relative errors.

    Compute is fitted to the layers' times and the same node's TTFT, transfer to the layers' times,
    and what is added to the difference of both TTFTs, less the last layer's transfer.

    Args:
        layout: of the model that was measured.
        chunk_tokens: of one step of its chunked prefill.
        rows: three prompts or more, of different lengths, one of them longer than a chunk.

    Raises:
        UsageError: the rows do not determine the constants.
    """
    compute, transfer, added = [], [], []
    for row in rows:
        chunks = cut_chunks(row.ntokens, chunk_tokens, layout.page_tokens)
        sizes = [(chunk.start, chunk.stop - chunk.start) for chunk in chunks]
        terms = np.array([(1.0, n, n * (start + n / 2)) for start, n in sizes])
        compute.append((terms[-1], row.layer_compute_s))
        compute.append((terms.sum(axis=0) * layout.layers, row.ttft_same_node_s))
        pages = max(_pages_of(layout, n) for _, n in sizes)
        transfer.append(((1.0, pages), row.layer_transfer_s))
        rest_s = row.ttft_s - row.ttft_same_node_s - row.layer_transfer_s
        added.append(((len(chunks), pages), rest_s))
    layer_s, token_s, pair_s = _solve("compute", compute)
    start_s, page_s = _solve("transfer", transfer)
    step_s, hand_over_s = _solve("what is added", added)
    return TtftModel(
        layout=layout,
        chunk_tokens=chunk_tokens,
        layer_s=layer_s,
        token_s=token_s,
        pair_s=pair_s,
        start_s=start_s,
        page_s=page_s,
        step_s=step_s,
        hand_over_s=hand_over_s,
    )


def _pages_of(layout: KvLayout, ntokens: int) -> int:
    rows = sum(buffer.planes * buffer.heads for buffer in layout.buffers)
    return layout.npages(ntokens) * rows


def _solve(what: str, equations: Sequence[tuple[Sequence[float], float]]) -> list[float]:
    """Unknowns that make each equation's relative error small."""
    goals = np.array([goal for _, goal in equations])
    if not equations or goals.min() <= 0:
        raise UsageError(f"fit: {what}: no positive times in {goals.tolist()}")
    terms = np.array([terms for terms, _ in equations]) / goals[:, None]
    scale = np.abs(terms).max(axis=0)  # tokens and pairs of tokens are far apart
    found, _, rank, _ = np.linalg.lstsq(terms / scale, np.ones(len(goals)), rcond=1e-9)
    if rank < len(scale):
        raise UsageError(
            f"fit: {what} has {len(scale)} unknowns, and the rows determine {rank} of them; "
            "measure other lengths too"
        )
    return [float(value) for value in found / scale]


PUBLISHED_ROWS: Final = tuple(
    Measured(
        ntokens=ntokens,
        ttft_same_node_s=same_ms / 1e3,
        ttft_s=apart_ms / 1e3,
        layer_compute_s=compute_ms / 1e3,
        layer_transfer_s=transfer_ms / 1e3,
    )
    for ntokens, same_ms, apart_ms, compute_ms, transfer_ms in (
        (4096, 214, 260, 2.267, 0.661),
        (8192, 433, 501, 4.578, 0.952),
        (32768, 2179, 2317, 13.295, 1.606),
        (131072, 16735, 17056, 34.895, 1.609),
    )
)
"""Qwen3-235B on H200 with TP4, EFA 2 x 200 Gb/s a GPU, chunks of 16,384 tokens; quoted.

Source: arXiv 2510.27656 v2, Table 3.
"""

PUBLISHED: Final = fit(QWEN3_235B, 16384, PUBLISHED_ROWS)
"""Calibrated on the published rows. What the constants come out as, and what they mean:

- layer_s 0.20 ms, token_s 0.48 us, pair_s 13 ps; worst error 1 %. The time a pair is attention: two
  matrix products x 2 x 16 query heads x 128 a rank are 8.2 kFLOP, at 0.6 PFLOP/s.
- start_s 0.34 ms, page_s 1.23 us; worst error 2 %. 32 KiB in that time are 213 Gb/s, one 200 Gb/s
  NIC's rate, while the same paper's paged writes reach 360 Gb/s: why is not known. So these two are
  this deployment's and no NIC's; for others see `simulate`.
- step_s 29 ms, hand_over_s 73 us a page. The table does not say where the 46 to 321 ms over the
  same node come from; the last layer's transfer is 2 ms. A part for each step and a part
  for the size of a step reproduce them within 11 ms; that they are what they are called here is
  our reading, guessed.

Lengths within 4,096 .. 131,072 are interpolated. Below, step_s is most of what is added, and rests
on few rows.
"""

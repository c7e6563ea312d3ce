"""The times of one model on one machine that a simulated cluster takes as they are: compute, and
what disaggregation costs beside the transfer. `simulate` puts them into a cluster of engines.

What a constant is: quoted from a source; fitted to the two rows `FITTED_ROWS` of the published
table; or guessed. The other rows are predicted, none of their numbers is used here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from tep import UsageError
from tep.apps import HBM_BYTES_S
from tep.apps.kvcache.layout import KvBuffer, KvLayout
from tep.apps.kvcache.model import Chunk, cut_chunks

__all__ = [
    "FITTED_ROWS", "OVERHEAD", "PUBLISHED", "PUBLISHED_ROWS", "QWEN3_235B", "Measured",
    "Overhead", "TtftModel", "fit", "kind_of",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftModel:
    """Compute times of one model on one machine.

    Attributes:
        layout: gives layers, page size and pages.
        chunk_tokens: of one step of a chunked prefill.
        layer_s, token_s, pair_s: compute of one layer of a chunk of n tokens that begins at s:
            layer_s + token_s * n + pair_s * n * (s + n / 2).
    """

    layout: KvLayout
    chunk_tokens: int
    layer_s: float
    token_s: float
    pair_s: float

    def layer_compute_s(self, start: int, ntokens: int) -> float:
        """Compute of one layer of a chunk of `ntokens` tokens behind `start` others."""
        pairs = ntokens * (start + ntokens / 2)
        return self.layer_s + self.token_s * ntokens + self.pair_s * pairs

    def chunk_layer_s(self, chunk: Chunk) -> float:
        """Compute of one layer of a chunk."""
        return self.layer_compute_s(chunk.start, chunk.stop - chunk.start)

    def chunks(self, ntokens: int) -> tuple[Chunk, ...]:
        """The steps of a prompt.

        Raises:
            UsageError: it has no tokens.
        """
        if ntokens < 1:
            raise UsageError(f"a prompt of {ntokens} tokens; one at the least")
        return cut_chunks(ntokens, self.chunk_tokens, self.layout.page_tokens)

    def compute_s(self, ntokens: int) -> float:
        """Compute of a whole prompt: the time to the first token on one node."""
        return self.layout.layers * sum(map(self.chunk_layer_s, self.chunks(ntokens)))

    def last_pages(self, ntokens: int) -> int:
        """Pages of one layer of a prompt's last chunk, over all planes and heads."""
        last = self.chunks(ntokens)[-1]
        rows = sum(buffer.planes * buffer.heads for buffer in self.layout.buffers)
        return self.layout.npages(last.stop - last.start) * rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """The time that disaggregation takes on hosts and GPUs; the network's is simulated.

    Attributes:
        start_s: of each layer of each chunk: the GPU changes the watched word, the host sees it and
            submits the layer's pages. The next layer waits meanwhile.
        hand_over_s: once, for each page of a layer of the last chunk, before the decoder begins.
        pass_s, pass_token_s: the decoder's own pass for the last token; more for each token before.
        hop_s: from a client by the scheduler to the decoder.
        first_contact_s: the first transfer between two peers, if they never met.
    """

    start_s: float = 0.0
    hand_over_s: float = 0.0
    pass_s: float = 0.0
    pass_token_s: float = 0.0
    hop_s: float = 0.0
    first_contact_s: float = 0.0

    def doubts(self, factor: float) -> Iterator[tuple[str, Overhead]]:
        """Yield both ends of what is guessed, all of it times; see tep.sim.doubts."""
        for end, times in (("slow", factor), ("fast", 1 / factor)):
            pass_s = max(0.0, self.pass_s + (times - 1) * _SUMS_S)
            yield end, replace(self, hop_s=self.hop_s * times, pass_s=pass_s)

    def before_token_s(self, model: TtftModel, ntokens: int) -> float:
        """The time from a complete cache to the first token."""
        handed_s = self.hand_over_s * model.last_pages(ntokens)
        return handed_s + self.pass_s + self.pass_token_s * ntokens


def fit(
    layout: KvLayout, chunk_tokens: int, rows: Sequence[Measured], known: Overhead = Overhead()
) -> tuple[TtftModel, Overhead]:
    """Calibrate on measured prompts, by least squares of relative errors.

    Compute is fitted to the layers' times and the same node's TTFT; `start_s` is the part of the
    layers' transfers that does not grow with their pages; `hand_over_s` meets what is left of the
    difference of both TTFTs. All else is taken from `known`.

    Args:
        layout: of the model that was measured.
        chunk_tokens: of one step of its chunked prefill.
        rows: two prompts or more, of different lengths, one of them longer than a chunk.
        known: the numbers that are not fitted.

    Raises:
        UsageError: the rows do not determine the constants.
    """
    compute, transfer, rest = [], [], []
    shape = TtftModel(layout=layout, chunk_tokens=chunk_tokens, layer_s=0, token_s=0, pair_s=0)
    for row in rows:
        sizes = [(one.start, one.stop - one.start) for one in shape.chunks(row.ntokens)]
        terms = np.array([(1.0, n, n * (start + n / 2)) for start, n in sizes])
        compute.append((terms[-1], row.layer_compute_s))
        compute.append((terms.sum(axis=0) * layout.layers, row.ttft_same_node_s))
        transfer.append(((1.0, shape.last_pages(row.ntokens)), row.layer_transfer_s))
    layer_s, token_s, pair_s = _solve("compute", compute)
    model = replace(shape, layer_s=layer_s, token_s=token_s, pair_s=pair_s)
    start_s, _ = _solve("transfer", transfer)
    found = replace(known, start_s=start_s, hand_over_s=0.0)
    for row in rows:
        starts_s = start_s * layout.layers * len(model.chunks(row.ntokens))
        named_s = starts_s + found.hop_s + found.before_token_s(model, row.ntokens)
        left_s = row.ttft_s - row.ttft_same_node_s - named_s
        rest.append(((model.last_pages(row.ntokens),), left_s))
    (hand_over_s,) = _solve("what is added", rest)
    return model, replace(found, hand_over_s=hand_over_s)


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

FITTED_ROWS: Final = PUBLISHED_ROWS[1:3]
"""The rows that numbers are fitted to; the other two are predicted."""


def kind_of(ntokens: int, *, cold: bool = False) -> Literal["fitted", "predicted", "extrapolated"]:
    """Say how the time of a prompt is made: extrapolated beyond the lengths that are published."""
    lengths = [row.ntokens for row in PUBLISHED_ROWS]
    if cold or not lengths[0] <= ntokens <= lengths[-1]:
        return "extrapolated"
    return "fitted" if ntokens in [row.ntokens for row in FITTED_ROWS] else "predicted"


_RANK_WEIGHTS_BYTES: Final = 22e9 * 2 / 4  # 22 G active parameters, bf16, TP4: quoted, model card
_RANK_TOKEN_BYTES: Final = 94 * 2 * 256  # a token's K and V of the one head of a rank
_SUMS_S: Final = 2 * 94 * 15e-6  # guessed: sums over four ranks, two in a layer

_KNOWN: Final = Overhead(
    pass_s=_RANK_WEIGHTS_BYTES / HBM_BYTES_S + _SUMS_S,
    pass_token_s=_RANK_TOKEN_BYTES / HBM_BYTES_S,
    hop_s=0.5e-3,  # guessed
    # Quoted: 26 ms, first submit to a peer over EFA without a warm-up; Mooncake's
    # docs/source/design/transfer-engine/efa_transport.md, commit 3b5a59413.
    first_contact_s=26e-3,
)

_FITTED: Final = fit(QWEN3_235B, 16384, FITTED_ROWS, _KNOWN)
PUBLISHED: Final = _FITTED[0]
OVERHEAD: Final = _FITTED[1]
"""Calibrated on two published rows. Five numbers are fitted to them:

- layer_s 0.15 ms, token_s 0.49 us, pair_s 13 ps. The time a pair is attention: two matrix products
  x 2 x 16 query heads x 128 a rank are 8.2 kFLOP, at 0.65 PFLOP/s.
- start_s 0.30 ms: 28 ms a chunk of 94 layers, if the next layer waits for it. That it waits is our
  reading. The published transfers also grow by 1.28 us a page, where an engine takes 0.90; why is
  not known, and nothing of it is used: it hides behind compute.
- hand_over_s 70 us a page of the last chunk: 18 to 72 ms. The table does not say where this part
  comes from; the name is ours. The decoder's pass, by a roofline, is 5 to 7 ms.
"""

"""The kernels' work on payload, in numpy: stage copies, order arrivals, stage and sum results.

The only code that reads or writes tokens. No waiting and no engine here; times are the callers'.
No library for bf16 or fp8 is needed: fp8 is only carried, and bf16 is the upper half of an f32.
Rule: sums run over a token's choices in the order 0 .. R-1, in f32, one rounding at the end; so the
result is the same on every fabric, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tep import BadRequest
from tep.apps.moe.config import (
    HEADER_BYTES,
    NOWHERE,
    ROUTE_HEAD_BYTES,
    Arrivals,
    Batch,
    Format,
    Ints,
    Layout,
    MoeConfig,
    Routes,
)

__all__ = [
    "F32", "Bytes", "Payload", "Received", "as_rows", "from_f32", "like", "to_f32",
    "weighted_sum",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """The rows that a dispatch brought to this rank, by expert, each expert's padded with zeros.

    Attributes:
        x: [rows, hidden], in the sender's type; None where no bytes are moved.
        scales: f32[rows, num_scales], or None.
        counts: i64[L], tokens of each expert.
        starts: i64[L + 1], first row of each expert; the last is `rows`.
        sources, tokens, experts: i64[rows], rank, token there, and expert; -1 in padding.
        weights: f32[rows], weight of each copy at its sender; 0 in padding.
    """

    x: Any
    scales: F32 | None
    counts: Ints
    starts: Ints
    sources: Ints
    tokens: Ints
    experts: Ints
    weights: F32


class Payload:
    """The arena of one rank, as its kernels see it.

    Args:
        config, rank: of the all-to-all.
        arena: u8[layout.nbytes], or None where no bytes are moved: then nothing is done here.
    """

    def __init__(self, config: MoeConfig, rank: int, arena: Bytes | None) -> None:
        self.config = config
        self.layout = Layout.of(config)
        self.rank = rank
        self.arena = arena

    def _part(self, start: int, copies: int, stride: int) -> Bytes:
        assert self.arena is not None
        return self.arena[start : start + copies * stride].reshape(-1, stride)

    def _slots(self) -> Bytes:
        """Own copies, private areas and shared area: one array of slots."""
        config = self.config
        areas = config.world * config.private_tokens + config.shared_copies_max
        return self._part(0, config.sent_copies_max + areas, self.layout.stride)

    def results_in(self) -> Bytes:
        """Results of own copies, in sending order; u8[copies, stride]."""
        layout = self.layout
        return self._part(layout.results_in, self.config.sent_copies_max, layout.result_stride)

    # ------------------------------------------------------------------ dispatch

    def check(self, x: Any, x_scale: Any, indices: Any) -> tuple[Bytes, Bytes | None] | None:
        """View a caller's tokens as bytes; BadRequest: their shapes do not fit."""
        config = self.config
        if self.arena is None:
            return None
        rows = as_rows(x, config.hidden, config.dispatch_format.nbytes, "x")
        scales = None
        if config.scales:
            if x_scale is None:
                raise BadRequest(f"x_scale is None; f32[n, {config.scales}] is expected")
            scales = as_rows(x_scale, config.scales, 4, "x_scale")
        elif x_scale is not None:
            raise BadRequest("x_scale: this all-to-all has no scales (num_scales=0)")
        for what, found in (("indices", indices), ("x_scale", scales)):
            if found is not None and len(found) != len(rows):
                raise BadRequest(f"{len(rows)} tokens, but {len(found)} rows of {what}")
        return rows, scales

    def write_route(self, turn: int, counts: Ints) -> None:
        """Write the own counts where they are sent from."""
        if self.arena is None:
            return
        layout = self.layout
        row = self.arena[layout.routes_out :][: layout.route_bytes].view(np.uint32)
        row[0], row[1] = turn, self.rank
        row[ROUTE_HEAD_BYTES // 4 :] = counts

    def read_route(self, turn: int, source: int) -> Ints:
        """Read a rank's counts, once their immediate is counted."""
        assert self.arena is not None
        layout = self.layout
        row = self.arena[layout.routes_in + source * layout.route_bytes :]
        row = row[: layout.route_bytes].view(np.uint32)
        # The immediate vouches for the whole row, and the last turn's was read long ago.
        assert int(row[0]) == turn, f"route of turn {row[0]}, not {turn}"
        assert int(row[1]) == source, f"route of rank {row[1]}, not {source}"
        return row[ROUTE_HEAD_BYTES // 4 :].astype(np.int64)

    def stage(self, turn: int, batch: Batch, given: tuple[Bytes, Bytes | None], w: F32) -> None:
        """Put every own copy with its header into its slot, in sending order."""
        config, (rows, scales) = self.config, given
        slots = self._slots()[: len(batch.tokens)]
        slots[:, : config.x_bytes] = rows[batch.tokens]
        if scales is not None:
            at = config.scales_at
            slots[:, at : at + 4 * config.scales] = scales[batch.tokens]
        head = np.empty((len(slots), HEADER_BYTES // 4), np.uint32)
        head[:, 0] = turn
        head[:, 1] = batch.tokens
        head[:, 2] = batch.experts
        head[:, 3] = w[batch.tokens, batch.slots].view(np.uint32)
        slots[:, config.header_at :] = head.view(np.uint8)

    def gather(self, turn: int, routes: Routes, arrivals: Arrivals, sample: Any) -> Received:
        """Bring what came in order: by expert, padded."""
        config, at = self.config, arrivals.row
        rows = int(arrivals.starts[-1])
        sources, tokens, experts = (np.full(rows, NOWHERE, np.int64) for _ in range(3))
        weights = np.zeros(rows, np.float32)
        x, scales = None, None
        if self.arena is not None:
            found = np.zeros((rows, self.layout.stride), np.uint8)
            found[at] = self._slots()[self.where(routes, arrivals)]
            head = found[:, config.header_at :].view(np.uint32)
            # An immediate vouches for the bytes of its row: what is here must be of this turn.
            assert (head[at, 0] == turn).all(), f"tokens not of turn {turn}"
            sources[at], tokens[at], experts[at] = arrivals.source, head[at, 1], head[at, 2]
            weights[at] = head.view(np.float32)[at, 3]
            x = like(found[:, : config.x_bytes], sample, config.dispatch_format)
            if config.scales:
                part = found[:, config.scales_at : config.scales_at + 4 * config.scales]
                scales = np.ascontiguousarray(part).view(np.float32)
        return Received(
            x=x,
            scales=scales,
            counts=arrivals.counts,
            starts=arrivals.starts,
            sources=sources,
            tokens=tokens,
            experts=experts,
            weights=weights,
        )

    def where(self, routes: Routes, arrivals: Arrivals) -> Ints:
        """Slot of each copy that came: own, private or shared."""
        config, rank = self.config, self.rank
        source, index, _, _, _ = arrivals
        limit, private = routes.private[source, rank], config.sent_copies_max
        shared = private + config.world * config.private_tokens
        late = shared + routes.shared_at[source, rank] + index - limit
        found = np.where(index < limit, private + source * config.private_tokens + index, late)
        where: Ints = np.where(source == rank, routes.starts[rank, rank] + index, found)
        return where

    # ------------------------------------------------------------------ combine

    def check_results(self, results: Any, arrivals: Arrivals) -> Bytes | None:
        """View a caller's results as bytes; BadRequest: other rows than were received."""
        if self.arena is None:
            return None
        config, expected = self.config, int(arrivals.starts[-1])
        rows = as_rows(results, config.hidden, config.combine_format.nbytes, "results")
        if len(rows) != expected:
            raise BadRequest(f"results: {len(rows)} rows, but {expected} were received")
        return rows

    def stage_results(self, routes: Routes, arrivals: Arrivals, results: Bytes) -> None:
        """Put results in the order in which their copies came, by source; the own ones in place."""
        config, layout = self.config, self.layout
        source, index, row, _, _ = arrivals
        out = self._part(layout.results_out, config.received_copies_max, layout.result_stride)
        away = np.flatnonzero(source != self.rank)
        width = results.shape[1]
        place = routes.result_starts(self.rank)[source[away]] + index[away]
        out[place, :width] = results[row[away]]
        own = np.flatnonzero(source == self.rank)
        place = routes.starts[self.rank, self.rank] + index[own]
        self.results_in()[place, :width] = results[row[own]]

    def sum(self, place: Ints, weights: F32, sample: Any) -> Any:
        """Sum each own token's results; a choice whose place is NOWHERE adds nothing."""
        if self.arena is None:
            return None
        config, fmt = self.config, self.config.combine_format
        total = weighted_sum(self.results_in(), place, weights, fmt, config.hidden)
        return like(from_f32(total, fmt), sample, fmt)


# ---------------------------------------------------------------------- numerics


Bytes = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

_BLOCK: Final = 512  # tokens summed at a time: what is gathered stays in the cache


def as_rows(values: Any, width: int, nbytes: int, what: str) -> Bytes:
    """View a [n, width] array or CPU tensor of `nbytes`-wide elements as u8[n, width * nbytes].

    Raises:
        BadRequest: another shape or element size.
    """
    is_torch = type(values).__module__.partition(".")[0] == "torch"
    array: Any = values.detach().contiguous() if is_torch else np.ascontiguousarray(values)
    element_bytes = array.element_size() if is_torch else array.itemsize
    if array.ndim != 2 or array.shape[1] != width or element_bytes != nbytes:
        raise BadRequest(
            f"{what}: {array.dtype} of shape {tuple(array.shape)}; [n, {width}] of {nbytes} bytes "
            "each"
        )
    if is_torch:
        torch = __import__("torch")  # only for whoever has it already
        array = array.view(torch.uint8).numpy()
    found: Bytes = array.view(np.uint8).reshape(len(array), width * nbytes)
    return found


def like(rows: Bytes, sample: Any, fmt: Format) -> Any:
    """Give u8 rows the element type of `sample` if it fits the format; else f32, u16 or u8."""
    if type(sample).__module__.partition(".")[0] == "torch":
        torch = __import__("torch")
        found = torch.from_numpy(np.ascontiguousarray(rows))
        return found.view(sample.dtype) if sample.element_size() == fmt.nbytes else found
    dtype = getattr(sample, "dtype", None)
    if not (isinstance(dtype, np.dtype) and dtype.itemsize == fmt.nbytes):
        dtype = fmt.dtype
    return np.ascontiguousarray(rows).view(dtype)


def to_f32(rows: Bytes, fmt: Format) -> F32:
    """Read bf16 or fp32 rows of bytes as f32."""
    if fmt is Format.FP32:
        return np.ascontiguousarray(rows).view(np.float32)
    assert fmt is Format.BF16, fmt
    bits = np.ascontiguousarray(rows).view(np.uint16).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)


def from_f32(values: F32, fmt: Format) -> Bytes:
    """Write f32 as rows of bytes; bf16 by rounding to nearest, ties to even; NaN stays NaN."""
    values = np.ascontiguousarray(values, np.float32)
    if fmt is Format.FP32:
        return values.view(np.uint8).reshape(len(values), 4 * values.shape[1])
    assert fmt is Format.BF16, fmt
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = (bits[nan] >> np.uint32(16)) | np.uint32(0x40)
    return rounded.astype(np.uint16).view(np.uint8).reshape(len(values), 2 * values.shape[1])


def weighted_sum(results: Bytes, place: Ints, weights: F32, fmt: Format, width: int) -> F32:
    """Sum each token's results, weighted, in the order of its choices; return f32[n, width].

    The results are u8[copies, stride] in sending order. `place`, i64[n, R], is the position of
    each choice in them, or NOWHERE, which adds nothing; weights are f32[n, R].
    """
    out = np.zeros((len(place), width), np.float32)
    nbytes = width * fmt.nbytes
    for begin in range(0, len(place), _BLOCK):
        part = slice(begin, begin + _BLOCK)
        for choice in range(place.shape[1]):
            where = place[part, choice]
            used = np.flatnonzero(where != NOWHERE)
            if not len(used):
                continue
            values = to_f32(results[where[used], :nbytes], fmt)
            out[begin + used] += weights[part, choice][used, None] * values
    return out

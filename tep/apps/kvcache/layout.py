"""The shape of a KV cache: the whole model's, and each rank's part of it in memory.

Pure: no engine, no memory, no time.

One buffer of one rank is `u8[layers, planes, npages, heads, page_tokens, token_bytes]`. Heads stand
before the tokens of a page, so that neighbouring heads are one run of bytes: one long write takes
them all. Planes let one page list cover K and V.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import msgspec

from tep import UsageError

__all__ = ["KvBuffer", "KvLayout", "RankShape", "held_heads"]


class KvBuffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of the cache, as the whole model sees it.

    Attributes:
        name: for people, and part of the fingerprint.
        layers: how many layers it holds.
        heads: KV heads of the model; 1 for a compressed (MLA) cache.
        token_bytes: of one token, one head and one plane.
        planes: pages of one layer and index: 2 where K and V are pages of their own.
        first_layer: the model's layer that is this buffer's layer 0.
    """

    name: str
    layers: int
    heads: int
    token_bytes: int
    planes: int = 1
    first_layer: int = 0

    def covers(self, layer: int) -> bool:
        """Whether the model's layer is in it."""
        return self.first_layer <= layer < self.first_layer + self.layers


class KvLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cache of one model; peers must agree in every field. Parallelism is not part of it.

    Attributes:
        model: its name.
        page_tokens: tokens of one page.
        buffers: its tensors.
        kind: "gqa" shares the heads out over ranks; "mla" keeps the whole cache on each rank.
        dtype: of the elements.
    """

    model: str
    page_tokens: int
    buffers: tuple[KvBuffer, ...]
    kind: Literal["gqa", "mla"] = "gqa"
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        """Refuse what cannot be: UsageError with the values."""
        if self.page_tokens < 1 or not self.buffers:
            raise UsageError(
                f"KvLayout {self.model!r}: page_tokens={self.page_tokens} and "
                f"{len(self.buffers)} buffers; one of each at the least"
            )
        for buffer in self.buffers:
            sizes = (buffer.layers, buffer.heads, buffer.token_bytes, buffer.planes)
            if min(sizes) < 1 or buffer.first_layer < 0:
                raise UsageError(f"KvLayout {self.model!r}: a size below 1 in {buffer}")
            if self.kind == "mla" and buffer.heads != 1:
                raise UsageError(
                    f"KvLayout {self.model!r}: buffer {buffer.name!r} has {buffer.heads} heads; "
                    "an MLA cache has one, on every rank"
                )

    @property
    def layers(self) -> int:
        """Layers of the model: one more than the last that any buffer holds."""
        return max(buffer.first_layer + buffer.layers for buffer in self.buffers)

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that are equal for equal layouts only; peers compare them first."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()

    def describe(self) -> str:
        """One line for people."""
        parts = [
            f"{b.name}[layers {b.first_layer}..{b.first_layer + b.layers - 1}, {b.planes} planes, "
            f"{b.heads} heads, {b.token_bytes} B a token]"
            for b in self.buffers
        ]
        return (
            f"{self.model} ({self.kind}, {self.dtype}, {self.page_tokens} tokens a page): "
            + ", ".join(parts)
        )

    def check_same(self, other: KvLayout, mine: str, theirs: str) -> None:
        """Raise with both in the message, unless `other` is the same layout."""
        if self.fingerprint != other.fingerprint:
            raise UsageError(
                f"{theirs} has another KV cache than {mine}:\n"
                f"  {mine}: {self.describe()}\n  {theirs}: {other.describe()}"
            )

    def npages(self, ntokens: int) -> int:
        """Pages that `ntokens` tokens need."""
        return -(-ntokens // self.page_tokens)


@dataclass(frozen=True, slots=True)
class RankShape:
    """The part of a cache that one rank of a tensor-parallel instance holds.

    Attributes:
        layout: of the model.
        tp: ranks of the instance.
        rank: this one, 0 <= rank < tp.
    """

    layout: KvLayout
    tp: int
    rank: int

    def heads(self, buffer: KvBuffer) -> range:
        """The model's heads that are here."""
        return _heads_of(self.layout, buffer, self.tp, self.rank)

    def page_bytes(self, buffer: KvBuffer) -> int:
        """One page of one plane and layer."""
        return len(self.heads(buffer)) * self.head_bytes(buffer)

    def head_bytes(self, buffer: KvBuffer) -> int:
        """One head of one page."""
        return self.layout.page_tokens * buffer.token_bytes

    def layer_bytes(self, buffer: KvBuffer, npages: int) -> int:
        """One layer of a cache of `npages` pages."""
        return buffer.planes * npages * self.page_bytes(buffer)

    def nbytes(self, buffer: KvBuffer, npages: int) -> int:
        """The whole buffer."""
        return buffer.layers * self.layer_bytes(buffer, npages)


def _heads_of(layout: KvLayout, buffer: KvBuffer, tp: int, rank: int) -> range:
    if layout.kind == "mla":
        return range(1)
    return held_heads(buffer.heads, tp, rank, f"{layout.model}, buffer {buffer.name!r}")


def held_heads(heads: int, tp: int, rank: int, what: str) -> range:
    """Which heads of a model one of `tp` ranks holds; more ranks than heads hold copies.

    Raises:
        UsageError: the heads cannot be shared out evenly; `what` says whose they are.
    """
    if tp <= heads:
        if heads % tp:
            raise UsageError(f"{what}: {heads} heads cannot be shared out evenly over {tp} ranks")
        share = heads // tp
        return range(rank * share, (rank + 1) * share)
    if tp % heads:
        raise UsageError(f"{what}: {tp} ranks cannot hold equal copies of {heads} heads")
    head = rank * heads // tp
    return range(head, head + 1)

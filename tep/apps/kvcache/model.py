"""The model that a user writes for this cache, and its arguments: callbacks of an inference engine.

Types only; `toy` holds a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tep import UsageError
from tep.apps.kvcache.layout import KvLayout
from tep.apps.kvcache.memory import KvMemory, PageIndices

__all__ = ["Chunk", "Completion", "DecodeWork", "Model", "PrefillWork", "Request", "cut_chunks"]

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt.

    Attributes:
        name: unique among the requests in flight.
        ntokens: length of the prompt.
        input_ids: i32[ntokens], or None where the model does not look at them.
        max_tokens: how many tokens are wanted.
    """

    name: str
    ntokens: int
    input_ids: Tokens | None = None
    max_tokens: int = 1

    def __post_init__(self) -> None:
        """Refuse a prompt without tokens, or with another number of them than it says."""
        ids = self.input_ids
        if self.ntokens < 1 or (ids is not None and ids.shape != (self.ntokens,)):
            shape = None if ids is None else ids.shape
            raise UsageError(f"Request {self.name!r}: ntokens={self.ntokens}, ids of shape {shape}")


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a request.

    Attributes:
        request: its name.
        tokens: what was generated; None if it failed.
        reason: why it failed; "" if it did not.
        attempts: how often it was tried.
        prefiller: whose pages were used, "" if none.
        ttft_s: from submission to the cache being complete; NaN if it never was.
        pages_sent: pages that travelled.
    """

    request: str
    tokens: tuple[int, ...] | None
    reason: str = ""
    attempts: int = 1
    prefiller: str = ""
    ttft_s: float = float("nan")
    pages_sent: int = 0

    @property
    def ok(self) -> bool:
        """Whether it was completed."""
        return self.tokens is not None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One step of a chunked prefill: tokens start..stop of the prompt."""

    start: int
    stop: int


def cut_chunks(ntokens: int, chunk_tokens: int, page_tokens: int) -> tuple[Chunk, ...]:
    """Cut a prompt in steps of at most chunk_tokens.

    Raises:
        UsageError: a chunk would end in the middle of a page.
    """
    if chunk_tokens < 1 or chunk_tokens % page_tokens:
        raise UsageError(
            f"chunk_tokens={chunk_tokens} is no multiple of page_tokens={page_tokens}: a page "
            "would be sent before it is full"
        )
    starts = range(0, ntokens, chunk_tokens)
    return tuple(Chunk(start, min(start + chunk_tokens, ntokens)) for start in starts)


@dataclass(slots=True)
class PrefillWork:
    """The argument of a model's prefill.

    Attributes:
        request: the prompt.
        chunks: the steps to compute, in order.
        memory: of this instance.
        pages: one for each page of the prompt.
        tail_slot: where a tail written in place belongs.
        advance: called with the number of layers done so far, over all chunks.
        layers: of the model.
        done: layers done so far.
    """

    request: Request
    chunks: tuple[Chunk, ...]
    memory: KvMemory
    pages: PageIndices
    tail_slot: int
    advance: Callable[[int], object]
    layers: int
    done: int = 0

    def layer_done(self) -> None:
        """The next layer of the present chunk is in memory, on all ranks: it may be sent.

        On a GPU the kernel behind the attention's output projection would add one to each rank's
        watched word; this does the same from the host.
        """
        self.done += 1
        assert self.done <= self.layers * len(self.chunks), "more layers than there are"
        self.advance(self.done)


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """The argument of a model's decode: the whole cache of a prompt, complete.

    Attributes:
        request: the prompt.
        memory: of this instance.
        pages: one for each page of the prompt, then spare ones for what is generated.
        tail_slot: where the tail lies.
    """

    request: Request
    memory: KvMemory
    pages: PageIndices
    tail_slot: int


class Model(Protocol):
    """A model, or one half of it: a prefiller uses `prefill`, a decoder `decode`."""

    @property
    def layout(self) -> KvLayout:
        """The layout of its cache."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one step of a chunked prefill: whole pages."""

    async def prefill(self, work: PrefillWork) -> bytes | None:
        """Fill work.pages layer by layer, calling work.layer_done() after each layer of each chunk.

        It writes to no page any more once it has returned or has been cancelled.

        Returns:
            The tail (logits, hidden states), or None if it is in its slot already.
        """

    async def decode(self, work: DecodeWork) -> Sequence[int]:
        """Generate from a complete cache; the pages are given back when this returns."""

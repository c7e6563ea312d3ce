"""The connector's terms: its options, and the data between its halves and between instances.

Orders go from the scheduler to every worker with each step; each worker answers with a Report.
Both are pickled by vLLM. Workers of a decoder and of a prefiller exchange notes of their KV caches,
in MessagePack, strict. Notes may be lost, repeated and overtake each other: a Want is repeated
until it is answered, and an answer gives the current state.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from tep import BadDescriptor, NetAddr, TepError, UsageError

__all__ = [
    "Asked", "Blocks", "Kind", "Load", "Orders", "Report", "Source", "Step", "Terms",
    "Told", "Want", "axes_of", "decode", "digest_of", "encode", "views_of",
]  # fmt: skip

Blocks = tuple[tuple[int, ...], ...]
"""Ids of blocks, for each group of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The options of `kv_connector_extra_config`.

    Attributes:
        lease_s: time that a prefiller keeps finished blocks after a decoder's last message.
        load_s: limit of one load, from its start to its last byte.
        beat_s: interval between repeats of unanswered messages, and between heartbeats.
        lost_after_s: silence after which a peer is lost.
        doubt_s: time from the failure of a load until it is reported although a write may still
            arrive; its blocks are kept out of use then.
        checksums: a prefiller has each load checked, see KvSender; a load that differs fails.
    """

    lease_s: float = 30.0
    load_s: float = 120.0
    beat_s: float = 0.5
    lost_after_s: float = 5.0
    doubt_s: float = 5.0
    checksums: bool = False

    def __post_init__(self) -> None:
        times = (self.lease_s, self.load_s, self.beat_s, self.lost_after_s, self.doubt_s)
        if min(times) <= 0 or self.lost_after_s < 2 * self.beat_s or self.lease_s <= self.beat_s:
            raise UsageError(
                f"{self}: times are positive, lost_after_s is at least 2 beat_s, and lease_s is "
                "longer than beat_s"
            )


_SHOWN = 200
"""Characters of an error about a request's parameters."""

Key = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"\A[ -~]+\Z")]


class Asked(msgspec.Struct, frozen=True):
    """The fields of a request's kv_transfer_params["tep"], unverified; other fields are ignored.

    `ranks` are the NetAddr of each of the prefiller's ranks, in base64, `ntokens` and `digest` are
    of the prompt, once it is computed.
    """

    key: Key
    ranks: Annotated[
        tuple[Annotated[str, Meta(max_length=1 << 15, pattern=r"\A[+-9A-Za-z]+={0,2}\Z")], ...],
        Meta(max_length=1024),
    ] = ()
    ntokens: Annotated[int, Meta(ge=0)] | None = None
    digest: Annotated[str, Meta(max_length=64)] | None = None

    @classmethod
    def read(cls, params: object) -> Asked:
        try:
            return msgspec.convert(params, cls, strict=True)
        except (msgspec.ValidationError, RecursionError) as error:
            raise UsageError(f"kv_transfer_params['tep']: {str(error)[:_SHOWN]}") from error

    def source(self) -> Source:
        try:
            raw = tuple(base64.b64decode(one, validate=True) for one in self.ranks)
            for one in raw:
                NetAddr.from_bytes(one)
        except (binascii.Error, TepError) as error:
            text = f"kv_transfer_params['tep']['ranks'] are no addresses: {str(error)[:_SHOWN]}"
            raise UsageError(text) from error
        if not raw:
            raise UsageError("kv_transfer_params['tep'] has no ranks; pass on the prefiller's")
        return Source(self.key, raw, self.ntokens is None)


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a request's blocks: the unique key, and a NetAddr of each prefiller's rank.

    Where `early` is True the prefill may not have begun: a prefiller that does not know the key is
    asked again. Otherwise an unknown key has expired.
    """

    key: str
    ranks: tuple[bytes, ...]
    early: bool = False

    def params(self, prompt: Sequence[int], lease_s: float) -> dict[str, object]:
        """Return a prefiller's answer once it has computed the prompt; JSON."""
        return {
            "key": self.key,
            "ranks": [base64.b64encode(one).decode() for one in self.ranks],
            "ntokens": len(prompt),
            "digest": digest_of(prompt),
            "lease_s": lease_s,
        }


def digest_of(prompt: Iterable[int]) -> str:
    """Compute a digest of a prompt's tokens: another prompt's blocks would give a wrong answer."""
    return hashlib.sha256(np.array(list(prompt), "<i8").tobytes()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Load:
    """Order to a decoder: load a request's blocks."""

    request: str
    source: Source
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Step:
    """Order to a prefiller: the state of a request, being computed or, as a hold, computed.

    Blocks and `ntokens` are those of the whole prompt; the KV of the first `upto` tokens is
    complete after this step.
    """

    request: str
    key: str
    blocks: Blocks
    ntokens: int
    upto: int


@dataclass(slots=True)
class Orders:
    """The orders of one step.

    Attributes:
        holds: requests that are computed: keep their blocks for the decoder.
        keeps: sources of requests that wait for blocks here: the prefiller should keep them.
        drops: sources that are not wanted any more.
        ends: aborted requests: stop their transfers, and report when none is in flight; with
            their keys at a prefiller.
        stops: preempted requests, whose blocks vLLM is about to reuse: stop before this step.
    """

    loads: list[Load] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    holds: list[Step] = field(default_factory=list)
    keeps: list[Source] = field(default_factory=list)
    drops: list[Source] = field(default_factory=list)
    ends: dict[str, str] = field(default_factory=dict)
    stops: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Report:
    """The report of one worker's step, or of several workers.

    Attributes:
        sent: requests whose blocks no transfer reads any more.
        received: requests whose loads have ended, successfully or not.
        bad: their incomplete blocks.
        failed: requests whose loaded blocks must not be used.
        doubt: for each rank, requests in `failed` whose blocks a write may still change.
        certain: for each rank, requests that were in doubt and are not any more.
        gone: keys that a prefiller does not have any more.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    doubt: dict[int, set[str]] = field(default_factory=dict)
    certain: dict[int, set[str]] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)

    def rest(self) -> Report | None:
        """Return what vLLM's own results have no fields for; None: there is nothing."""
        if self.doubt or self.certain or self.gone:
            return Report(doubt=self.doubt, certain=self.certain, gone=self.gone)
        return None

    def aggregate(self, other: Report) -> Report:
        whole = Report(
            self.sent | other.sent,
            self.received | other.received,
            self.bad | other.bad,
            self.failed | other.failed,
            gone=self.gone | other.gone,
        )
        for one in (self, other):
            for mine, whose in ((whole.doubt, one.doubt), (whole.certain, one.certain)):
                for rank, requests in whose.items():
                    mine[rank] = mine.get(rank, set()) | requests
        return whole


# ------------------------------------------------------------------ notes between workers

Kind = Literal["load", "keep", "drop"]


class Want(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Decoder -> prefiller, about the blocks of one key; the answer has the same number.

    "load": write them for this ticket. "keep": keep them, a load will come. "drop": they are not
    wanted any more. `card` describes the cache of the decoder, once it was asked for.
    """

    number: Annotated[int, Meta(ge=0)]
    key: Annotated[str, Meta(max_length=256)]
    kind: Kind
    early: bool
    card: bytes = b""
    ticket: bytes = b""


class Told(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Prefiller -> decoder: the answer.

    "taken": the load was begun. "kept": the blocks are here, or will be. "gone": they are not, for
    this reason. "card": ask again, with the card. `process` is `loads.mark_here` of the prefiller.
    """

    number: Annotated[int, Meta(ge=0)]
    key: Annotated[str, Meta(max_length=256)]
    state: Literal["taken", "kept", "gone", "card"]
    reason: Annotated[str, Meta(max_length=4096)] = ""
    process: Annotated[str, Meta(max_length=256)] = ""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Want | Told] = msgspec.msgpack.Decoder(Want | Told, strict=True)


def encode(note: Want | Told) -> bytes:
    """Encode a note."""
    return _ENCODER.encode(note)


def decode(raw: bytes) -> Want | Told:
    """Decode a note; BadDescriptor if the bytes are none."""
    try:
        return _DECODER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadDescriptor(f"{len(raw)} bytes are no note of the connector: {error}") from error


# ------------------------------------------------------------------ vLLM's KV tensors


def views_of(
    array: Any, *, nblocks: int, heads: int, tokens: int, what: str
) -> list[tuple[str, Any, str]]:
    """List the parts of one layer's tensor: (suffix of the name, view, axes).

    K and V are one part if a dimension of the block holds both, and two if they lie apart. Numbers
    of blocks and heads are those of this rank's cache; `what` names the tensor in errors.

    Raises:
        UsageError: a layout that is not known.
    """
    shape = tuple(int(n) for n in array.shape)
    if len(shape) >= 3 and shape[0] == 2 and shape[1] == nblocks:
        return [
            (f".{k}", array[k], axes_of(shape[1:], nblocks, heads, tokens, what)) for k in (0, 1)
        ]
    if len(shape) == 5 and shape[0] == nblocks and shape[1] == 2:
        rest = (shape[0], *shape[2:])
        return [(f".{k}", array[:, k], axes_of(rest, nblocks, heads, tokens, what)) for k in (0, 1)]
    return [("", array, axes_of(shape, nblocks, heads, tokens, what))]


def axes_of(shape: Sequence[int], nblocks: int, heads: int, tokens: int, what: str) -> str:
    """Return the axes of KvBlocks.add for [blocks, (heads, tokens in either order,) elements]."""
    inner = tuple(shape[1:-1])
    if len(shape) >= 2 and shape[0] == nblocks:
        if not inner:
            return "bd"
        if inner == (tokens,) and heads == 1:
            return "btd"
        if inner == (heads, tokens):
            return "bhtd"
        if inner == (tokens, heads):
            return "bthd"
    raise UsageError(
        f"{what}: a KV tensor of shape {tuple(shape)}, with {nblocks} blocks of {tokens} tokens, "
        f"{heads} heads; known are [2,] blocks, [2,] heads and tokens in either order, elements"
    )

"""What the scheduler's half and the workers' half of the connector tell each other. Data only.

Orders go from the scheduler to every worker with each step; each worker answers with a Report.
Both are pickled by vLLM.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from tep import NetAddr, TepError, UsageError

__all__ = [
    "Asked", "Blocks", "Hold", "Load", "Orders", "Report", "Source", "Step", "Terms", "digest_of",
]  # fmt: skip

Blocks = tuple[tuple[int, ...], ...]
"""For each group of layers, ids of blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How long to wait, in seconds; each is an option of `kv_connector_extra_config`.

    Attributes:
        lease_s: a prefiller keeps finished blocks for so long after the last word of a decoder.
        load_s: for one load, from its start to its last byte.
        beat_s: between repeats of what was not answered, and between two signs of life.
        lost_after_s: a peer that says nothing for so long is lost; twice beat_s or more.
        doubt_s: from the failure of a load until it is reported although a write may still land;
            its blocks are kept out of use then.
    """

    lease_s: float = 30.0
    load_s: float = 120.0
    beat_s: float = 0.5
    lost_after_s: float = 5.0
    doubt_s: float = 5.0

    def __post_init__(self) -> None:
        """Refuse times that contradict each other."""
        times = (self.lease_s, self.load_s, self.beat_s, self.lost_after_s, self.doubt_s)
        if min(times) <= 0 or self.lost_after_s < 2 * self.beat_s or self.lease_s <= self.beat_s:
            raise UsageError(
                f"{self}: times are positive, lost_after_s is at least 2 beat_s, and lease_s is "
                "longer than beat_s"
            )


_SHOWN = 200
"""Characters of a message about what a request brought."""

Key = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"\A[ -~]+\Z")]
"""Of a transfer: printable ASCII."""


class Asked(msgspec.Struct, frozen=True):
    """What a request brings as kv_transfer_params["tep"]: a stranger's claims. Others are ignored.

    Attributes:
        key: of the transfer.
        ranks: NetAddr of each of the prefiller's ranks, in base64.
        ntokens: of the prompt, once it is computed.
        digest: of the prompt.
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
        """Take it from the value of "tep" in kv_transfer_params.

        Raises:
            UsageError: it is not what a prefiller returned, or a router makes up.
        """
        try:
            return msgspec.convert(params, cls, strict=True)
        except (msgspec.ValidationError, RecursionError) as error:
            raise UsageError(f"kv_transfer_params['tep']: {str(error)[:_SHOWN]}") from error

    def source(self) -> Source:
        """Where the blocks are said to be.

        Raises:
            UsageError: no addresses.
        """
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
    """Where a request's blocks come from, as the request says.

    Attributes:
        key: of the transfer; unique.
        ranks: NetAddr of each of the prefiller's ranks, as bytes.
        early: the prefill may not have begun: a prefiller that does not know the key has to be
            asked again. Otherwise not to know it means that it has expired.
    """

    key: str
    ranks: tuple[bytes, ...]
    early: bool = False

    def params(self, prompt: Sequence[int], lease_s: float) -> dict[str, object]:
        """What a prefiller returns once it has computed the prompt; JSON."""
        return {
            "key": self.key,
            "ranks": [base64.b64encode(one).decode() for one in self.ranks],
            "ntokens": len(prompt),
            "digest": digest_of(prompt),
            "lease_s": lease_s,
        }


def digest_of(prompt: Iterable[int]) -> str:
    """A digest of a prompt's tokens: blocks of another prompt would give its answer."""
    return hashlib.sha256(np.array(list(prompt), "<i8").tobytes()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Load:
    """Decoder: have a request's blocks written here."""

    request: str
    source: Source
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Step:
    """Prefiller: what is known after this step of a request that is being computed.

    Attributes:
        request, key: whose.
        blocks: of the whole prompt.
        ntokens: of the prompt.
        upto: tokens whose KV this step completes.
    """

    request: str
    key: str
    blocks: Blocks
    ntokens: int
    upto: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Prefiller: a request is computed; keep its blocks for the decoder."""

    request: str
    key: str
    blocks: Blocks
    ntokens: int


@dataclass(slots=True)
class Orders:
    """One step's.

    Attributes:
        loads, steps, holds: see there.
        keeps: sources of requests that wait for blocks here: the prefiller should keep them.
        drops: sources that are not wanted any more.
        ends: requests that were aborted: stop their transfers, and report when nothing is under
            way; with their keys where they are the prefiller's.
        stops: requests whose blocks are about to be taken away: stop before this step.
    """

    loads: list[Load] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)
    keeps: list[Source] = field(default_factory=list)
    drops: list[Source] = field(default_factory=list)
    ends: dict[str, str] = field(default_factory=dict)
    stops: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Report:
    """One worker's step, or several workers' together.

    Attributes:
        sent: requests whose blocks no transfer reads any more.
        received: requests whose loads have ended, well or not.
        bad: blocks of those that are not whole.
        failed: requests of which nothing that was loaded may be used.
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

    def aggregate(self, other: Report) -> Report:
        """What two workers have to say together."""
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

"""The scheduler's half of the connector, without vLLM: decides which blocks to load, keep or free.

vLLM's connector interface calls its methods, with vLLM's objects: a `Request` (only
these attributes are read) and a SchedulerOutput. Rule: a request's blocks are vLLM's unless this
half keeps them; it says so once, and releases them once.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from tep import UsageError
from tep.integrations.vllm.terms import (
    Asked,
    Blocks,
    Load,
    Orders,
    Report,
    Source,
    Step,
    Terms,
    digest_of,
)

__all__ = ["Request", "Scheduler"]

logger = logging.getLogger(__name__)
_COMPUTED = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
_REFUSED_MAX = 256
_NULL_BLOCK = 0
"""vLLM's placeholder for blocks outside a sliding window."""


class Request(Protocol):
    """The attributes of vLLM's Request that are read."""

    request_id: str
    prompt_token_ids: Sequence[int] | None
    kv_transfer_params: dict[str, Any] | None
    num_computed_tokens: int
    status: Any


class _Prefill:
    """A request that is computed here for a decoder."""

    def __init__(self, key: str, ntokens: int) -> None:
        self.key, self.ntokens = key, ntokens
        self.blocks: list[list[int]] = []


class Scheduler:
    """The state of transfers in one instance's scheduler.

    Args:
        block_tokens: tokens of a block of each group of layers.
        token: secret from which the keys are made; another one after each start.

    Attributes:
        ranks: addresses of this instance's ranks.
        doubt: blocks that may still be written, by the worker's rank and the request.
        pool: vLLM's pool of blocks, in which blocks in doubt get one more user; None before it is
            made.
        refused: number of sources that were not used, by reason; at most 256 reasons.
    """

    def __init__(
        self, block_tokens: Sequence[int], terms: Terms = Terms(), *, token: str = ""
    ) -> None:
        self._block_tokens, self._terms, self._token = tuple(block_tokens), terms, token
        self.ranks: tuple[bytes, ...] = ()
        self.pool: Any = None
        self.refused: dict[str, int] = {}
        self._sources: dict[str, Source] = {}  # sources of requests that have no blocks yet
        self._matched: dict[str, int] = {}
        self._loading: dict[str, Blocks] = {}
        self._prefills: dict[str, _Prefill] = {}
        self.doubt: dict[tuple[int, str], tuple[int, ...]] = {}
        self._orders = Orders()
        self._serial = 0

    # ------------------------------------------------------------------ decoder

    def arrived(self, request: Request) -> None:
        """Read the transfer parameters of a new request."""
        params = _params(request)
        if not params.get("do_remote_prefill"):
            return
        try:
            asked = Asked.read(params.get("tep"))
            source = asked.source()
            prompt = request.prompt_token_ids
            if prompt is None:
                raise UsageError("the prompt has no tokens (embeddings?)")
            if asked.digest not in {None, digest_of(prompt)}:
                self._orders.drops.append(source)
                raise UsageError("the prefiller computed another prompt; the router mixes them up")
        except UsageError as error:
            self._say(request, "is computed here", str(error))
            params["do_remote_prefill"] = False
            return
        self._sources[request.request_id] = source

    def matched(self, request: Request, ncomputed: int) -> tuple[int, bool]:
        """Return the number of tokens to load beyond `ncomputed`, and True if there are any."""
        prompt = request.prompt_token_ids
        if request.request_id not in self._sources or prompt is None:
            return 0, False
        self._matched[request.request_id] = ncomputed
        count = len(prompt) - ncomputed
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Request, blocks: Sequence[Sequence[int]], nexternal: int) -> None:
        """Order the load of `nexternal` tokens into the request's new blocks."""
        name, params = request.request_id, _params(request)
        if params.get("do_remote_decode") and name not in self._prefills:
            self._prefills[name] = self._prefill(request, params)
        source = self._sources.pop(name, None)
        ncomputed = self._matched.pop(name, 0)
        if source is None:
            return
        params["do_remote_prefill"] = False  # load it once only
        if nexternal <= 0:
            self._orders.drops.append(source)
            return
        mine = tuple(
            tuple(b for b in ids[ncomputed // n : -(-(ncomputed + nexternal) // n)] if b)
            for ids, n in zip(blocks, self._block_tokens, strict=True)
        )
        self._loading[name] = mine
        self._orders.loads.append(Load(name, source, mine))

    def _say(self, request: Request, what: str, why: str) -> None:
        logger.error("request %s %s: %s", request.request_id, what, why)
        self._count(why)

    def _count(self, why: str) -> None:
        if why in self.refused or len(self.refused) < _REFUSED_MAX:
            self.refused[why] = self.refused.get(why, 0) + 1

    # ------------------------------------------------------------------ prefiller

    def _prefill(self, request: Request, params: Mapping[str, Any]) -> _Prefill:
        key = self._new_key()
        if "tep" in params:
            try:
                key = Asked.read(params["tep"]).key
            except UsageError as error:
                self._say(request, "gets a key from here", str(error))
        return _Prefill(key, len(request.prompt_token_ids or ()))

    def _new_key(self) -> str:
        """Make an unguessable key: a peer that knows it may load the blocks, or drop them."""
        self._serial += 1
        secret = hashlib.blake2b(self._token.encode(), digest_size=32).digest()
        serial = str(self._serial).encode()
        return f"{self._serial}/{hashlib.blake2b(serial, key=secret, digest_size=12).hexdigest()}"

    def _needed(self, ntokens: int) -> list[int]:
        return [-(-ntokens // n) for n in self._block_tokens]

    def _step(self, name: str, upto: int) -> None:
        prefill = self._prefills[name]
        need = self._needed(prefill.ntokens)
        whole = all(len(ids) >= n for ids, n in zip(prefill.blocks, need, strict=True))
        if whole and len(need) == 1:  # with more groups, windows move while it is computed
            blocks = tuple(tuple(ids[:n]) for ids, n in zip(prefill.blocks, need, strict=True))
            ntokens = prefill.ntokens
            order = Step(name, prefill.key, blocks, ntokens, min(upto, ntokens))
            self._orders.steps.append(order)

    def _look_at(self, scheduled: Any) -> None:
        """Follow the blocks of requests that are being computed for decoders."""
        counts = scheduled.num_scheduled_tokens
        for new in scheduled.scheduled_new_reqs:
            if new.req_id in self._prefills:
                self._prefills[new.req_id].blocks = [list(ids) for ids in new.block_ids]
                self._step(new.req_id, new.num_computed_tokens + counts[new.req_id])
        cached = scheduled.scheduled_cached_reqs
        for name, fresh, ncomputed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            prefill = self._prefills.get(name)
            if prefill is None:
                continue
            if name in cached.resumed_req_ids:
                prefill.blocks = [list(ids) for ids in fresh or ()]
            elif fresh is not None:
                for ids, more in zip(prefill.blocks, fresh, strict=True):
                    ids.extend(more)
            self._step(name, ncomputed + counts[name])
        for name in scheduled.preempted_req_ids or ():
            if name in self._prefills:
                self._orders.stops.add(name)

    def finished(
        self, request: Request, blocks: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request; return whether its blocks are kept, and the parameters for its client."""
        name = request.request_id
        source = self._sources.pop(name, None)
        self._matched.pop(name, None)
        if source is not None:  # it never got blocks
            self._orders.drops.append(source)
        if name in self._loading:
            self._orders.ends[name] = ""
        prefill = self._prefills.pop(name, None)
        if prefill is None:
            return False, None
        prompt = request.prompt_token_ids or ()
        computed = request.num_computed_tokens >= len(prompt)
        if request.status.name not in _COMPUTED or not computed or not any(blocks):
            self._orders.ends[name] = prefill.key
            return True, None
        need = self._needed(len(prompt))
        held = tuple(
            tuple(b for b in ids[:n] if b != _NULL_BLOCK)
            for ids, n in zip(blocks, need, strict=True)
        )
        self._orders.holds.append(Step(name, prefill.key, held, len(prompt), len(prompt)))
        where = Source(prefill.key, self.ranks)
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "tep": where.params(prompt, self._terms.lease_s),
        }

    # ------------------------------------------------------------------ workers

    def orders(self, scheduled: Any) -> Orders:
        self._look_at(scheduled)
        orders, self._orders = self._orders, Orders()
        orders.keeps = list(self._sources.values())
        return orders

    @property
    def pending(self) -> bool:
        """True if there are orders that no step has taken yet."""
        waiting = self._orders
        return bool(waiting.drops or waiting.ends or waiting.holds or waiting.loads)

    def reported(self, report: Report | None, received: Iterable[str]) -> None:
        """Take the workers' report, and the loads that have ended at all of them."""
        if report is not None:
            for rank, requests in report.doubt.items():
                for name in requests:
                    blocks = tuple(b for group in self._loading.get(name, ()) for b in group)
                    self.doubt[rank, name] = blocks
                    if self.pool is not None:
                        self.pool.touch([self.pool.blocks[block] for block in blocks])
            for rank, requests in report.certain.items():
                for name in requests:
                    blocks = self.doubt.pop((rank, name), ())
                    if self.pool is not None:
                        self.pool.free_blocks([self.pool.blocks[block] for block in blocks])
            if report.gone:
                self._forget(report.gone)
        for name in received:
            self._loading.pop(name, None)

    def _forget(self, gone: set[str]) -> None:
        """Compute requests here whose source has expired."""
        for name in [n for n, source in self._sources.items() if source.key in gone]:
            key = self._sources.pop(name).key
            why = "the prefiller does not have it any more"
            logger.warning("request %s is computed here: %s: %s", name, key, why)
            self._count(why)


def _params(request: Request) -> dict[str, Any]:
    """Return a request's transfer parameters, {} if its client sent no dict."""
    params = request.kv_transfer_params
    return params if isinstance(params, dict) else {}

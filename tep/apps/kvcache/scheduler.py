"""The scheduler: picks prefiller and decoder for each try at a request. No membership, no world.

Whoever joins is picked from the next try on, who leaves is not picked any more; nobody else has to
be told. It holds no pages and moves no bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from tep import NetAddr, UsageError, WaitTimeout
from tep.apps.kvcache.model import Completion, Request

__all__ = ["DecodeSide", "PrefillerCard", "Scheduler"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PrefillerCard:
    """The name of a prefiller and the addresses of its engines, one a rank."""

    name: str
    addrs: tuple[NetAddr, ...]

    @property
    def addr(self) -> NetAddr:
        """The address of the first rank, which messages go to."""
        return self.addrs[0]

    @property
    def epoch(self) -> int:
        """The number of this incarnation: its first rank's."""
        return self.addr.epoch


class DecodeSide(Protocol):
    """A decoder, or a stand-in for one in another process."""

    @property
    def name(self) -> str:
        """Unique among the decoders."""

    async def generate(
        self, request: Request, prefiller: PrefillerCard, cached: Callable[[], object]
    ) -> Completion:
        """See Decoder.generate."""

    def fenced(self, prefiller: str, epoch: int) -> None:
        """See Decoder.fenced."""


@dataclass(slots=True)
class _Place(Generic[T]):
    """A prefiller or decoder that has joined.

    `load` is a prefiller's tokens to compute, or a decoder's requests. A prefiller is blamed when a
    try with it failed though the decoder was there; `blamed_s` is the last time.
    """

    name: str
    what: T
    load: int = 0
    blamed_s: float = float("-inf")

    def add(self, load: int) -> None:
        self.load += load


class Scheduler:
    """Requests in, completions out.

    Prefillers are picked by the tokens they have to compute, decoders by the requests they have.
    Those that this request has failed with come last, and before them, for `cool_s`, the prefillers
    that any request has failed with.

    Args:
        wait_s: how long a request waits for somebody to join.
        cool_s: how long a failure counts.
        attempts_max: tries at one request.
    """

    def __init__(
        self, *, wait_s: float = 30.0, cool_s: float = 10.0, attempts_max: int = 6
    ) -> None:
        self._wait_s = wait_s
        self._cool_s = cool_s
        self._attempts_max = attempts_max
        self._prefillers: dict[str, _Place[PrefillerCard]] = {}
        self._decoders: dict[str, _Place[DecodeSide]] = {}
        self._joined = asyncio.Event()

    @property
    def prefillers(self) -> list[str]:
        """Names of those that have joined."""
        return list(self._prefillers)

    @property
    def decoders(self) -> list[str]:
        """Names of those that have joined."""
        return list(self._decoders)

    def join_prefiller(self, card: PrefillerCard) -> None:
        """Send work to a prefiller from now on; a later incarnation takes the place of a former."""
        known = self._prefillers.get(card.name)
        if known is not None and known.what.epoch > card.epoch:
            raise UsageError(
                f"prefiller {card.name!r} has joined in epoch {known.what.epoch} already, this is "
                f"epoch {card.epoch}"
            )
        self._prefillers[card.name] = _Place(card.name, card)
        self._joined.set()

    def leave_prefiller(self, name: str) -> None:
        """Send it no more work; what it has goes on. Idempotent."""
        self._prefillers.pop(name, None)

    def join_decoder(self, decoder: DecodeSide) -> None:
        """Give requests to a decoder from now on."""
        self._decoders[decoder.name] = _Place(decoder.name, decoder)
        self._joined.set()

    def leave_decoder(self, name: str) -> None:
        """Give it no more requests; what it has goes on. Idempotent."""
        self._decoders.pop(name, None)

    def fenced(self, name: str, epoch: int) -> None:
        """A prefiller's incarnation is certain to be dead: every decoder may clean up after it."""
        known = self._prefillers.get(name)
        if known is not None and known.what.epoch <= epoch:
            del self._prefillers[name]
        for place in tuple(self._decoders.values()):
            place.what.fenced(name, epoch)

    async def submit(self, request: Request) -> Completion:
        """See a request through, elsewhere if the first try fails; failures are no errors.

        Returns:
            How it ended; a failure has the reasons of all tries.
        """
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        tried: set[str] = set()
        reasons: list[str] = []
        while len(reasons) < self._attempts_max:
            try:
                decoder = await self._pick("decoder", self._decoders, tried)
                prefiller = await self._pick("prefiller", self._prefillers, tried)
            except WaitTimeout as error:
                reasons.append(str(error))
                break
            waited_s = loop.time() - start_s
            with contextlib.ExitStack() as leased, contextlib.ExitStack() as busy:
                for stack, place, load in (
                    (leased, prefiller, request.ntokens),
                    (busy, decoder, 1),
                ):
                    place.add(load)
                    stack.callback(place.add, -load)
                done = await decoder.what.generate(request, prefiller.what, leased.close)
            if done.ok:
                attempts = 1 + len(reasons)
                return replace(done, attempts=attempts, ttft_s=waited_s + done.ttft_s)
            if decoder.name in self._decoders:
                prefiller.blamed_s = loop.time()
            tried |= {decoder.name, prefiller.name}
            reasons.append(f"{prefiller.name} for {decoder.name}: {done.reason}")
        return Completion(request.name, None, "; ".join(reasons), attempts=len(reasons))

    async def _pick(
        self, what: str, places: dict[str, _Place[T]], tried: Collection[str]
    ) -> _Place[T]:
        """Pick who has the least to do; wait for somebody to join if there is nobody."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._wait_s
        while not places:
            self._joined.clear()
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._joined.wait()
            except TimeoutError:
                raise WaitTimeout(f"no {what} has joined within {self._wait_s} s") from None
        cooled_s = loop.time() - self._cool_s
        return min(places.values(), key=lambda p: (p.name in tried, p.blamed_s > cooled_s, p.load))

"""The scheduler: picks a decoder and prefillers for each request. No membership, no world.

Whoever joins is picked from the next request on, who leaves is not picked any more; nobody else has
to be told. It holds no pages and moves no bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from tep import NetAddr, UsageError, WaitTimeout
from tep.apps.kvcache.model import Completion, Request

__all__ = ["DecodeSide", "Lease", "PrefillerCard", "Router", "Scheduler"]


@dataclass(frozen=True, slots=True)
class PrefillerCard:
    """The name and addresses of a prefiller, for schedulers and decoders.

    Attributes:
        name: of the instance.
        addrs: of its engines, one a rank.
    """

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


@dataclass(frozen=True, slots=True)
class Lease:
    """The use of one prefiller for one attempt.

    Attributes:
        card: which prefiller.
        end: called once the attempt is over, with the reason why it did not work, else "".
    """

    card: PrefillerCard
    end: Callable[[str], object]


class Router(Protocol):
    """Picks prefillers: a scheduler."""

    async def lease(self, request: Request, exclude: Collection[str]) -> Lease:
        """Pick one; of those in `exclude` only if there is no other.

        Raises:
            TepError: there is none.
        """


class DecodeSide(Protocol):
    """A decoder, or a stand-in for one in another process."""

    @property
    def name(self) -> str:
        """Unique among the decoders."""

    async def generate(self, request: Request, router: Router) -> Completion:
        """See Decoder.generate."""

    def fenced(self, prefiller: str, epoch: int) -> None:
        """See Decoder.fenced."""


@dataclass(slots=True)
class _Place:
    """A prefiller that has joined."""

    card: PrefillerCard
    load: int = 0  # tokens leased
    blamed_s: float = float("-inf")


class Scheduler:
    """Requests in, completions out.

    Prefillers are picked by the tokens they have to compute, decoders by the requests they have;
    one that an attempt has failed at comes last for `cool_s`.

    Args:
        wait_s: how long a request waits for somebody to join.
        cool_s: how long a failure counts.
        attempts_max: decoders tried for one request.
    """

    def __init__(
        self, *, wait_s: float = 30.0, cool_s: float = 10.0, attempts_max: int = 3
    ) -> None:
        self._wait_s = wait_s
        self._cool_s = cool_s
        self._attempts_max = attempts_max
        self._places: dict[str, _Place] = {}
        self._decoders: dict[str, DecodeSide] = {}
        self._loads: dict[str, int] = {}
        self._joined = asyncio.Event()

    @property
    def prefillers(self) -> list[str]:
        """Names of those that have joined."""
        return list(self._places)

    @property
    def decoders(self) -> list[str]:
        """Names of those that have joined."""
        return list(self._decoders)

    def join_prefiller(self, card: PrefillerCard) -> None:
        """Send work to a prefiller from now on; a later incarnation takes the place of a former."""
        known = self._places.get(card.name)
        if known is not None and known.card.epoch > card.epoch:
            raise UsageError(
                f"prefiller {card.name!r} has joined in epoch {known.card.epoch} already, this is "
                f"epoch {card.epoch}"
            )
        self._places[card.name] = _Place(card)
        self._wake()

    def leave_prefiller(self, name: str) -> None:
        """Send it no more work; what it has goes on. Idempotent."""
        self._places.pop(name, None)

    def join_decoder(self, decoder: DecodeSide) -> None:
        """Give requests to a decoder from now on."""
        self._decoders[decoder.name] = decoder
        self._loads[decoder.name] = 0
        self._wake()

    def leave_decoder(self, name: str) -> None:
        """Give it no more requests; what it has goes on. Idempotent."""
        self._decoders.pop(name, None)

    def fenced(self, name: str, epoch: int) -> None:
        """A prefiller's incarnation is certain to be dead: every decoder may clean up after it."""
        known = self._places.get(name)
        if known is not None and known.card.epoch <= epoch:
            del self._places[name]
        for decoder in tuple(self._decoders.values()):
            decoder.fenced(name, epoch)

    async def submit(self, request: Request) -> Completion:
        """See a request through, on another decoder if the first cannot; failures are no errors.

        Returns:
            How it ended; a failure has the reasons of all decoders.
        """
        tried: list[DecodeSide] = []
        reasons: list[str] = []
        while len(tried) < self._attempts_max:
            try:
                decoder = await self._pick_decoder(tried)
            except WaitTimeout as error:
                reasons.append(str(error))
                break
            tried.append(decoder)
            self._loads[decoder.name] += 1
            try:
                done = await decoder.generate(request, self)
            finally:
                self._loads[decoder.name] -= 1
            if done.ok:
                return done
            reasons.append(f"on {decoder.name}: {done.reason}")
        return Completion(request.name, None, "; ".join(reasons), attempts=len(tried))

    async def lease(self, request: Request, exclude: Collection[str]) -> Lease:
        """Pick the prefiller with the least to do; see Router."""
        await self._somebody(self._places)
        now_s = asyncio.get_running_loop().time()
        place = min(
            self._places.values(),
            key=lambda p: (p.card.name in exclude, now_s - p.blamed_s < self._cool_s, p.load),
        )
        place.load += request.ntokens

        def end(failure: str) -> None:
            place.load -= request.ntokens
            if failure:
                place.blamed_s = asyncio.get_running_loop().time()

        return Lease(place.card, end)

    async def _pick_decoder(self, tried: Collection[DecodeSide]) -> DecodeSide:
        await self._somebody(self._decoders)
        left = [one for one in self._decoders.values() if one not in tried]
        if not left:
            raise WaitTimeout(f"no other decoder than {', '.join(one.name for one in tried)}")
        return min(left, key=lambda one: self._loads[one.name])

    async def _somebody(self, where: Collection[str]) -> None:
        deadline_s = asyncio.get_running_loop().time() + self._wait_s
        while not where:
            self._joined.clear()
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._joined.wait()
            except TimeoutError:
                what = "decoder" if where is self._decoders else "prefiller"
                raise WaitTimeout(f"no {what} has joined within {self._wait_s} s") from None

    def _wake(self) -> None:
        self._joined.set()

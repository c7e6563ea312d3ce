"""Rows that land later than their bytes took: jitter, tails of sprayed paths, losses. Draws only.

Rule 1: every draw is a hash of (seed, row), so that one more row shifts no other's. Rule 2: where
rows are ordered, none lands before one that was posted to the same NIC before it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tep.base.hashing import below_array, draw_array, stream_key
from tep.sim.profile import Profile
from tep.sim.queues import Ints, Rate
from tep.sim.streams import Stream

__all__ = ["InOrder", "Late"]

_PACKET_BYTES: Final = 4096
_PPM: Final = 1e-6


class Late:
    """The delays of the rows that the NICs of one machine send.

    Args:
        profile: of the machine.
        seed: of the draws.
    """

    def __init__(self, profile: Profile, seed: int) -> None:
        self._profile = profile
        self._key = stream_key(seed, Stream.TIMING)
        self._wire = Rate(profile.wire_bps)

    def extra_ps(self, numbers: Ints, nbytes: Ints) -> Ints | int:
        """How much later each row lands.

        A lost packet costs its row the time until it is missed, and the bytes from there on once
        more; where the packet stands is drawn. Of several losses in a row one is counted.
        """
        profile = self._profile
        extra: Ints | int = 0
        if profile.jitter_ps:
            extra = below_array(self._bits(numbers, 0), profile.jitter_ps)
        if profile.tail_ppm:
            share = profile.tail_ppm * _PPM
            drawn = self._fractions(numbers, 1)
            late = -profile.tail_ps * np.log(np.minimum(drawn, share) / share)
            extra = extra + late.astype(np.int64)
        if profile.loss_ppm:
            packets = np.maximum(1, -(-nbytes // _PACKET_BYTES))
            hit = self._fractions(numbers, 2) < 1 - (1 - profile.loss_ppm * _PPM) ** packets
            again = (nbytes * self._fractions(numbers, 3)).astype(np.int64)
            extra = extra + np.where(hit, profile.retry_ps + self._wire.ps(again), 0)
        return extra

    def _bits(self, numbers: Ints, index: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return draw_array(self._key, index, numbers.view(np.uint64))

    def _fractions(self, numbers: Ints, index: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Even between 0 and 1, 0 left out."""
        return (self._bits(numbers, index).astype(np.float64) + 1) / 2.0**64


class InOrder:
    """The latest landing of each pair, where rows are ordered: a late one holds up others."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], int] = {}

    def settle(self, source: Ints, target: Ints, numbers: Ints, landed: Ints) -> Ints:
        """Landings where none overtakes: rows of one pair of NICs in the order of their numbers."""
        order = np.lexsort((numbers, target, source))
        pairs = list(zip(source[order].tolist(), target[order].tolist(), strict=True))
        found = landed.copy()
        before, last = None, 0
        for place, pair in zip(order.tolist(), pairs, strict=True):
            last = max(int(landed[place]), last if pair == before else self._last.get(pair, 0))
            found[place], before = last, pair
        return found

    def keep(self, source: Ints, target: Ints, landed: Ints) -> None:
        """These rows have landed."""
        for pair, time_ps in zip(
            zip(source.tolist(), target.tolist(), strict=True), landed.tolist(), strict=True
        ):
            self._last[pair] = max(self._last.get(pair, 0), time_ps)

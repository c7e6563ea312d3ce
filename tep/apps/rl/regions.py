"""Where a rollout worker's weights lie: one region, or one for each parameter. Records only."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple, Self

import msgspec

from tep import BadDescriptor, MrDesc

__all__ = ["Regions"]


class Regions(NamedTuple):
    """The offsets of a RolloutMeta, and the memory behind them.

    Attributes:
        starts: offset at which each region begins; ascending, the first is 0.
        descs: of each region.
    """

    starts: tuple[int, ...]
    descs: tuple[MrDesc, ...]

    def at(self, offset: int) -> tuple[MrDesc, int]:
        """The region behind an offset, and the byte in it."""
        k = bisect_right(self.starts, offset) - 1
        return self.descs[k], offset - self.starts[k]

    def to_bytes(self) -> bytes:
        """Encode; `from_bytes` is the inverse."""
        return msgspec.msgpack.encode((self.starts, [desc.to_bytes() for desc in self.descs]))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decode strictly.

        Raises:
            BadDescriptor: these bytes are no regions.
        """
        try:
            starts, descs = msgspec.msgpack.decode(data, type=tuple[tuple[int, ...], list[bytes]])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadDescriptor(f"Regions: {error}") from error
        if len(starts) != len(descs) or starts[:1] != (0,) or sorted(set(starts)) != list(starts):
            raise BadDescriptor(f"Regions: {len(descs)} regions that begin at {starts[:4]}")
        return cls(starts, tuple(MrDesc.from_bytes(desc) for desc in descs))

"""Which entry of a port's address table to use: a ranking that can be printed. Pure.

Entry 0 is usually RoCE v1 or link-local, so an index that is fixed at 0 fails across routers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from tep.backends.ffi.ibverbs_structs import ENUMS
from tep.backends.verbs.address import gid_text, is_link_local, is_mapped

__all__ = ["GidChoice", "GidSeen", "rank_gids"]

_V2: Final = ENUMS["IBV_GID_TYPE_ROCE_V2"]


class GidSeen(NamedTuple):
    """Entry number `entry` of the table; `gid_type` as the library numbers it."""

    entry: int
    gid: bytes
    gid_type: int


class GidChoice(NamedTuple):
    """An entry with its place in the ranking; `rank` 0 is best."""

    rank: int
    seen: GidSeen
    why: str

    def __str__(self) -> str:
        return f"GID {self.seen.entry} {gid_text(self.seen.gid)}: {self.why} (rank {self.rank})"


def rank_gids(table: Sequence[GidSeen]) -> list[GidChoice]:
    """Sort the entries of an Ethernet port, best first; equal ranks by index.

    RoCE v2 with a routable IPv4 address is what every network of this kind carries; then routable
    IPv6, then link-local ones, which stay within a subnet; RoCE v1 is never routed.
    """
    return sorted(map(_rank, table), key=lambda choice: (choice.rank, choice.seen.entry))


def _rank(seen: GidSeen) -> GidChoice:
    local = is_link_local(seen.gid)
    family = "IPv4" if is_mapped(seen.gid) else "IPv6"
    reach = "link-local" if local else "routable"
    if seen.gid_type == _V2:
        rank = 2 * local + (family == "IPv6")
        return GidChoice(rank, seen, f"RoCE v2, {reach} {family}")
    return GidChoice(4 + local, seen, f"RoCE v1, {reach} {family}; never routed")

"""The striping planner, pure: (shape, local NICs, remote NICs, cursor) -> who carries what.

Rule 1: how many immediates reach a target depends on the shape and the two NIC counts alone, never
on the NICs alive today. Rule 2: shards tile the request exactly. Rule 3: a share names the local
and the remote NIC together, so that no row can be posted with another NIC's keys.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Final, NamedTuple

from tep.base.api import Barrier, Paged, Routing, Scatter, Shape, Single
from tep.base.checks import check_int, shown
from tep.base.errors import BadRequest

__all__ = [
    "ROW_BYTES_MAX", "SHARD_BYTES_MIN", "Plan", "Share", "count_imms", "is_one_row", "lanes",
    "plan_paged", "plan_row", "plan_single", "plan_targets",
]  # fmt: skip

SHARD_BYTES_MIN: Final = 8192
"""A single write is cut only into shards of this size or more.

Source: fabric-lib rounds shards up to 8192 B.
"""

ROW_BYTES_MAX: Final = 1 << 30
"""No row is longer: longer shards become several rows, each with its own immediate, because an
immediate vouches for the bytes of its own row only. A constant and not a NIC's limit, so that both
sides count alike. Source: EFA's max_rdma_size is 1 GiB (quoted from its device limits); ConnectX-7
takes 2 GiB.
"""

_SHARD_ALIGN: Final = 4096
_NICS_MAX: Final = 64


class Share(NamedTuple):
    """One piece of a request, NIC to NIC: rows (paged, targets) or bytes (single) start..stop."""

    domain: int
    remote: int
    start: int
    stop: int


class Plan(NamedTuple):
    """The shares of one request, in order of `start`; they tile it.

    Attributes:
        imms: immediates that each target counts, if the request carries one.
        cursor: the lane where the next request starts.
    """

    shares: tuple[Share, ...]
    imms: int
    cursor: int


def lanes(nlocal: int, nremote: int) -> int:
    """Return the number of (local, remote) NIC pairs of a request: the least common multiple.

    With it every local NIC and every remote NIC carries the same share, also where the counts
    differ; lane k joins local NIC k % nlocal with remote NIC k % nremote.
    """
    if not (1 <= nlocal <= _NICS_MAX and 1 <= nremote <= _NICS_MAX):
        raise BadRequest(f"nlocal={nlocal} nremote={nremote}; NIC counts are 1 to {_NICS_MAX}")
    return math.lcm(nlocal, nremote)


def _lane_numbers(nlocal: int, nremote: int, cursor: int, domain: int | None) -> range:
    """List the lanes in their order of use, from the cursor on; a pinned NIC has only its own.

    The lanes behind the last one are the first ones again, by other numbers.
    """
    count = lanes(nlocal, nremote)
    if domain is None:
        return range(cursor, cursor + count)
    if not 0 <= domain < nlocal:
        raise BadRequest(f"routing.domain={domain}, but this engine has NICs 0 to {nlocal - 1}")
    first = domain + nlocal * cursor
    return range(first, first + count, nlocal)


def _shards(nbytes: int, nlanes: int, num_shards: int | None) -> int:
    if num_shards is None:
        return max(1, min(nlanes, nbytes // SHARD_BYTES_MIN))
    if not 1 <= num_shards <= nlanes:
        raise BadRequest(
            f"routing.num_shards={num_shards}, but the NICs of both sides make {nlanes} lanes"
        )
    return num_shards


def _rows(shard: Share) -> list[Share]:
    """Cut one shard into rows of at most ROW_BYTES_MAX; an empty shard stays one empty row."""
    if shard.stop - shard.start <= ROW_BYTES_MAX:
        return [shard]
    starts = range(shard.start, shard.stop, ROW_BYTES_MAX)
    return [shard._replace(start=at, stop=min(at + ROW_BYTES_MAX, shard.stop)) for at in starts]


def _cuts(nbytes: int, nshards: int) -> list[int]:
    """Boundaries of shards as equal as alignment allows; short requests leave empty shards."""
    pages = -(-nbytes // _SHARD_ALIGN)
    if pages >= nshards:
        return [*(pages * k // nshards * _SHARD_ALIGN for k in range(nshards)), nbytes]
    return [nbytes * k // nshards for k in range(nshards + 1)]


@lru_cache(maxsize=4096)
def plan_single(
    nbytes: int, nlocal: int, nremote: int, cursor: int, routing: Routing = Routing()
) -> Plan:
    """Cut one contiguous write into shards, one a lane, and shards beyond ROW_BYTES_MAX into rows.

    The plan is in bytes, and each row carries an immediate, an empty one as well. `cursor` is the
    lane of the first shard.

    Raises:
        BadRequest: more shards than lanes, or a NIC that is not there.
    """
    order = _lane_numbers(nlocal, nremote, cursor, routing.domain)
    nshards = _shards(nbytes, len(order), routing.num_shards)
    cuts = _cuts(nbytes, nshards)
    shards = (
        Share(lane % nlocal, lane % nremote, cuts[k], cuts[k + 1])
        for k, lane in enumerate(order[:nshards])
    )
    rows = tuple(row for shard in shards for row in _rows(shard))
    return Plan(rows, len(rows), (cursor + nshards) % lanes(nlocal, nremote))


def is_one_row(nbytes: int) -> bool:
    """Whether a write without routing is too short to be cut, however many NICs there are."""
    return nbytes < 2 * SHARD_BYTES_MIN


@lru_cache(maxsize=4096)
def plan_row(nlocal: int, nremote: int, cursor: int) -> tuple[tuple[int, int], int]:
    """Plan one row without routing: return its lane, and where the next one starts.

    The objects of plan_single would cost a short write a microsecond.
    """
    count = lanes(nlocal, nremote)
    cursor %= count
    return (cursor % nlocal, cursor % nremote), (cursor + 1) % count


@lru_cache(maxsize=4096)
def plan_paged(
    npages: int,
    nlocal: int,
    nremote: int,
    cursor: int,
    domain: int | None = None,
    weights: tuple[int, ...] = (),
) -> Plan:
    """Share the pages of one request, 1 or more, out over the lanes, from the cursor on.

    Pages stay whole, and each lane gets one run of neighbouring list entries. With fewer pages than
    lanes some lanes get none; the cursor moves on only past those that did. `domain` pins to one
    local NIC. `weights` are the shares of lanes by number; 0: none, unless no lane has one; () =
    all lanes are equal. They change no number of immediates: each page has one.

    Source: fabric-lib `submit_paged_transfer_request`; differs in allowing unequal NIC counts.
    """
    order = _lane_numbers(nlocal, nremote, cursor, domain)
    nlanes, count = min(len(order), npages), lanes(nlocal, nremote)
    weighed = [(lane, weights[lane % count]) for lane in order if weights and weights[lane % count]]
    used = (weighed or [(lane, 1) for lane in order])[:nlanes]
    ends = [0, *itertools.accumulate(weight for _, weight in used)]
    cuts = [npages * end // ends[-1] for end in ends]
    shares = tuple(
        Share(lane % nlocal, lane % nremote, start, stop)
        for (lane, _), start, stop in zip(used, cuts, cuts[1:], strict=False)
        if start < stop
    )
    return Plan(shares, npages, (cursor + nlanes) % count)


def plan_targets(
    nremotes: tuple[int, ...], nlocal: int, cursor: int, domain: int | None = None
) -> list[Share]:
    """Give each target of a scatter or barrier one lane, target 0 the one at the cursor.

    A lane gets one run of neighbouring targets. Lanes in turn would be worse: in an all-to-all
    every GPU of a node walks the same list of peers, so all of them would choose the same NIC of
    each peer, and leave its other NICs idle. `nremotes` has the NIC count of each target.

    Source: fabric-lib cuts the peers in ranges of ceil(peers / NICs), one NIC each.
    """
    if domain is not None and not 0 <= domain < nlocal:
        raise BadRequest(f"routing.domain={domain}, but this engine has NICs 0 to {nlocal - 1}")
    n, nlanes = len(nremotes), math.lcm(nlocal, *set(nremotes))
    stride = 1 if domain is None else nlocal
    first = cursor if domain is None else domain + nlocal * cursor
    runs = min(n, nlanes // stride)
    found = []
    for k, nremote in enumerate(nremotes):
        lane = first + stride * (k * runs // n)
        found.append(Share(lane % nlocal, lane % nremote, k, k + 1))
    return found


def count_imms(shape: Shape, nlocal: int = 1, nremote: int = 1) -> int:
    """Count the immediates that one request makes at each target; feed it to `expect_imm_count`.

    Args:
        shape: Single, Paged, Scatter or Barrier.
        nlocal: NICs of the sender.
        nremote: NICs of the receiver.

    Returns:
        Paged: one a page. Single, and scatter by bytes: one a row, which is one a shard up to 1 GiB
            each.
        Scatter by peers, Barrier: one. A read with an immediate makes one, once all rows are back.

    Raises:
        BadRequest: as for the request itself.
    """
    nlocal = check_int("count_imms: nlocal", nlocal, 1, _NICS_MAX)
    nremote = check_int("count_imms: nremote", nremote, 1, _NICS_MAX)
    match shape:
        case Paged(npages):
            return npages
        case Single(nbytes, routing):
            return plan_single(nbytes, nlocal, nremote, 0, routing).imms
        case Scatter(nbytes, routing):
            return (
                plan_single(nbytes, nlocal, nremote, 0, routing).imms
                if routing.scatter_by == "bytes"
                else 1
            )
        case Barrier():
            return 1
        case _:
            raise BadRequest(
                f"count_imms: shape={shown(shape)} is no Single, Paged, Scatter or Barrier"
            )

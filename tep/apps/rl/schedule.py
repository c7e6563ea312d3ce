"""The schedule, computed once from both sides' metadata: pure, whatever the shardings are.

Rule 1: every byte of every target is written exactly once. Rule 2: within a task each sender gets
one stretch of the receivers' bytes laid end to end, so that senders carry equal shares and a
receiver hears from as few of them as possible. Rule 3: what is not aligned, not held or held twice
in part is refused here, before anybody allocates. Rule 4: a task has its place in the staging ring
before it begins, so the watermark holds by construction.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tep import UsageError
from tep.apps.rl.metadata import (
    ALIGN_BYTES,
    ROW,
    SCALINGS,
    Box,
    DType,
    Gather,
    GatherPiece,
    MeshGroup,
    Out,
    OutPart,
    RolloutMeta,
    Rows,
    Scaling,
    Schedule,
    SourceShard,
    Task,
    TrainMeta,
    are_disjoint,
    box_bytes,
    box_shape,
    box_size,
    extents_of,
    intersect,
    item_bytes,
    joined_axis,
    local_shape,
    scale_shape,
)
from tep.base.units import GiB, KiB, MiB

__all__ = [
    "PIECE_BYTES_MIN", "ROW_BYTES_MAX", "WATERMARK_BYTES", "Piece", "are_in_order", "coalesce",
    "deal_out", "make_schedule", "pieces_of", "ring_layout", "runs_of",
]  # fmt: skip


WATERMARK_BYTES: Final = 16 * GiB
"""Temporary memory of a training rank. The paper's limit is not published; guessed: a fifth of an
80 GB device whose optimiser state is offloaded."""


def make_schedule(
    trains: Sequence[TrainMeta],
    rollouts: Sequence[RolloutMeta],
    *,
    watermark_bytes: int = WATERMARK_BYTES,
    bundle_bytes: int = 0,
    group_order: Sequence[str] | None = None,
) -> Schedule:
    """Compute the routing table of an update.

    Args:
        trains: metadata of all training ranks, in rank order.
        rollouts: metadata of the rollout workers.
        watermark_bytes: temporary memory that no training rank exceeds.
        bundle_bytes: neighbouring parameters share a task as long as it needs no more staging than
            this; 0: one parameter, one task.
        group_order: names of the mesh groups in the order wanted; None: as the ranks give them.

    Raises:
        UsageError: a target's bytes are held by no training rank or by some in part; shards of a
            quantised parameter that do not begin at a block; a task beyond the watermark.
    """
    _check_ranks(trains)
    held = _Held(trains, group_order)
    contents = _contents(rollouts)
    loads = np.zeros(len(trains))
    drafts: list[_Draft] = []
    for group in range(len(held.groups)):
        units = _units(held, contents, group)
        for members, mine in units.items():
            drafts += _bundles(held, group, members, mine, bundle_bytes)
    drafts.sort(key=lambda draft: (draft.task.group, draft.order))
    tables = [_rows(draft, loads) for draft in drafts]
    for k, table in enumerate(tables):
        table["task"] = k
    tasks = _placed([draft.task for draft in drafts], len(trains), watermark_bytes)
    rows = np.concatenate(tables) if tables else np.zeros(0, ROW)
    names = tuple(rollout.name for rollout in rollouts)
    groups = tuple(group.name for group in held.groups)
    return Schedule(len(trains), names, groups, tasks, rows, watermark_bytes)


def _check_ranks(trains: Sequence[TrainMeta]) -> None:
    ranks = [meta.rank for meta in trains]
    if ranks != list(range(len(trains))) or not trains:
        raise UsageError(f"training ranks must be 0 to n-1 in order, not {ranks[:8]}")
    odd = [meta.rank for meta in trains if meta.groups != trains[0].groups]
    if odd:
        raise UsageError(f"rank {odd[0]} has other mesh groups than rank 0")


# ---------------------------------------------------------------------- what is held


class _Source(NamedTuple):
    """A tensor as one sub-mesh has it after unsharding."""

    box: Box
    pieces: tuple[tuple[Box, tuple[int, ...]], ...]
    in_order: bool


class _Held:
    """All sources, by sub-mesh."""

    def __init__(self, trains: Sequence[TrainMeta], order: Sequence[str] | None) -> None:
        self.groups = _ordered(trains[0].groups, order)
        self.dtypes = {name: dtype for meta in trains for name, dtype in meta.dtypes.items()}
        self.group_of = {name: k for k, group in enumerate(self.groups) for name in group.tensors}
        # By number: a tuple of a hundred ranks as a key costs its hash at every look.
        mesh_of = [
            {rank: k for k, mesh in enumerate(group.submeshes) for rank in mesh}
            for group in self.groups
        ]
        boxes: dict[str, dict[int, dict[Box, list[int]]]] = {}
        for meta in trains:
            for name, box in meta.shards:
                group = self.group_of.get(name, -1)
                mesh = mesh_of[group].get(meta.rank) if group >= 0 else None
                if mesh is None:
                    raise UsageError(f"rank {meta.rank} holds {name}, which no mesh group unshards")
                boxes.setdefault(name, {}).setdefault(mesh, {}).setdefault(box, []).append(
                    meta.rank
                )
        self.sources = {
            name: {
                self.groups[self.group_of[name]].submeshes[k]: _source(name, found)
                for k, found in meshes.items()
            }
            for name, meshes in boxes.items()
        }


def _ordered(groups: tuple[MeshGroup, ...], order: Sequence[str] | None) -> tuple[MeshGroup, ...]:
    if order is None:
        return groups
    by_name = {group.name: group for group in groups}
    if sorted(by_name) != sorted(order):
        raise UsageError(f"group_order={list(order)}, but the groups are {sorted(by_name)}")
    return tuple(by_name[name] for name in order)


def _source(name: str, found: Mapping[Box, Sequence[int]]) -> _Source:
    boxes = sorted(found)
    outer = tuple(
        (min(low for low, _ in axis), max(high for _, high in axis)) for axis in zip(*boxes)
    )
    if sum(map(box_size, boxes)) != box_size(outer) or not are_disjoint(boxes):
        raise UsageError(f"{name}: the shards {boxes[:4]} of one sub-mesh do not tile a box")
    pieces = tuple((box, tuple(found[box])) for box in boxes)
    return _Source(outer, pieces, are_in_order(outer, boxes))


# ---------------------------------------------------------------------- what is wanted


@dataclass(slots=True)
class _Content:
    """Parts that some receivers hold alike, and where at each of them."""

    dtype: DType
    parts: tuple[SourceShard, ...]
    receivers: list[int] = field(default_factory=list)
    offsets: list[tuple[int, ...]] = field(default_factory=list)


def _contents(rollouts: Sequence[RolloutMeta]) -> dict[str, list[_Content]]:
    """By target name, in the order in which the targets are first seen."""
    found: dict[str, dict[tuple[object, ...], _Content]] = {}
    for receiver, meta in enumerate(rollouts):
        for name, dtype, parts, offsets in meta.shards:
            same = found.setdefault(name, {})
            content = same.get((dtype, parts))
            if content is None:
                content = same[dtype, parts] = _Content(dtype, parts)
            content.receivers.append(receiver)
            content.offsets.append(offsets)
    return {name: list(same.values()) for name, same in found.items()}


class _Unit(NamedTuple):
    """One target parameter in one sub-mesh: the pieces made there, and who gets each."""

    order: int
    target: str
    pieces: tuple[tuple[Piece, _Content], ...]


def _units(
    held: _Held, contents: Mapping[str, list[_Content]], group: int
) -> dict[tuple[int, ...], list[_Unit]]:
    found: dict[tuple[int, ...], list[_Unit]] = {}
    turn = 0
    for order, (target, wanted) in enumerate(contents.items()):
        groups = {
            held.group_of.get(part.name, -1): part.name
            for content in wanted
            for part in content.parts
        }
        if -1 in groups:
            raise UsageError(f"{target} needs {groups[-1]}, which no training rank holds")
        if len(groups) != 1:
            raise UsageError(
                f"{target} joins {' and '.join(groups.values())}, which are of different mesh "
                "groups; put them into one"
            )
        if group not in groups:
            continue
        made: dict[tuple[int, ...], list[tuple[Piece, _Content]]] = {}
        for content in wanted:
            for mesh, boxes in _sharers(held, target, content, turn).items():
                for piece in pieces_of(target, content.dtype, content.parts, boxes):
                    made.setdefault(mesh, []).append((piece, content))
            turn += 1
        for mesh, pieces in made.items():
            found.setdefault(mesh, []).append(_Unit(order, target, tuple(pieces)))
    return found


def _sharers(
    held: _Held, target: str, content: _Content, turn: int
) -> dict[tuple[int, ...], list[Box | None]]:
    """Which sub-mesh makes which slice of each part; alike ones take turns."""
    found: dict[tuple[int, ...], list[Box | None]] = {}
    for k, part in enumerate(content.parts):
        slices: dict[Box, list[tuple[int, ...]]] = {}
        for mesh, source in held.sources.get(part.name, {}).items():
            common = intersect(part.box, source.box)
            if common is not None:
                slices.setdefault(common, []).append(mesh)
        covered = sum(map(box_size, slices))
        if covered != box_size(part.box) or not are_disjoint(slices):
            raise UsageError(
                f"{target}: of {part.name}{list(part.box)} the sub-meshes hold {covered} of "
                f"{box_size(part.box)} elements, or overlap in part: {sorted(slices)[:4]}"
            )
        for common, meshes in slices.items():
            mesh = meshes[turn % len(meshes)]
            boxes = found.setdefault(mesh, [None] * len(content.parts))
            boxes[k] = common
    return found


# ---------------------------------------------------------------------- tasks


@dataclass(slots=True)
class _Draft:
    """A task before it has a number and a place; its order in its group, and who gets its outs."""

    task: Task
    order: int
    contents: tuple[tuple[Piece, _Content], ...]


def _bundles(
    held: _Held, group: int, members: tuple[int, ...], units: Sequence[_Unit], limit: int
) -> Iterator[_Draft]:
    waiting: list[_Unit] = []
    size = 0
    for unit in units:
        mine = _need(held, members, unit)
        if waiting and size + mine > limit:
            yield _draft(held, group, members, waiting)
            waiting, size = [], 0
        waiting.append(unit)
        size += mine
    if waiting:
        yield _draft(held, group, members, waiting)


def _sources_of(units: Sequence[_Unit]) -> list[str]:
    """Names of the tensors that units need, each once, in order."""
    names = {
        content.parts[k].name: None
        for unit in units
        for piece, content in unit.pieces
        for k, _ in piece.parts
    }
    return list(names)


def _need(held: _Held, members: tuple[int, ...], unit: _Unit) -> int:
    """Bytes of staging, but for padding."""
    gathered = 0
    for name in _sources_of([unit]):
        source = held.sources[name][members]
        gathered += box_bytes(source.box, held.dtypes[name]) * (1 if source.in_order else 2)
    return gathered + sum(nbytes for piece, _ in unit.pieces for nbytes, _ in piece.spread)


def _draft(held: _Held, group: int, members: tuple[int, ...], units: Sequence[_Unit]) -> _Draft:
    at, gather_bytes = 0, 0
    gathers = []
    names = _sources_of(units)
    for name in names:
        source, dtype = held.sources[name][members], held.dtypes[name]
        pieces = []
        for box, holders in source.pieces:
            pieces.append(GatherPiece(box, at, holders))
            at += box_bytes(box, dtype)
        at = _aligned(at)
        whole = pieces[0].offset
        if not source.in_order:
            whole, at = at, _aligned(at + box_bytes(source.box, dtype))
        gathers.append(Gather(name, dtype, source.box, tuple(pieces), whole))
        gather_bytes += box_bytes(source.box, dtype)
    where = {name: k for k, name in enumerate(names)}
    outs = []
    contents = [pair for unit in units for pair in unit.pieces]
    for piece, content in contents:
        parts = tuple(OutPart(where[content.parts[k].name], box) for k, box in piece.parts)
        places = []
        for nbytes, _ in piece.spread:
            places.append((at, nbytes))
            at = _aligned(at + nbytes)
        outs.append(Out(piece.target, piece.dtype, parts, tuple(places)))
    made = (tuple(gathers), tuple(outs), gather_bytes, at)
    task = Task(0, units[0].target, group, members, *made, (), ())
    return _Draft(task, units[0].order, tuple(contents))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _placed(tasks: Sequence[Task], ranks: int, watermark: int) -> tuple[Task, ...]:
    """Give tasks their numbers, and their places in each member's staging."""
    mine: list[list[int]] = [[] for _ in range(ranks)]
    for k, task in enumerate(tasks):
        for rank in task.members:
            mine[rank].append(k)
    places: list[dict[int, tuple[int, int]]] = []
    for numbers in mine:
        offsets, after = ring_layout(tuple(tasks[k].nbytes for k in numbers), watermark)
        places.append(dict(zip(numbers, zip(offsets, after))))
    return tuple(
        task._replace(
            number=k,
            staging=tuple(places[rank][k][0] for rank in task.members),
            after=tuple(places[rank][k][1] for rank in task.members),
        )
        for k, task in enumerate(tasks)
    )


# ---------------------------------------------------------------------- rows


def _rows(draft: _Draft, loads: Floats) -> Rows:
    """All writes of one task: every receiver's rows, shared out to the members.

    The bytes of this task are added to `loads`, the bytes that each rank has been given so far.
    """
    tables: list[Rows] = []
    for out, (piece, content) in zip(draft.task.outs, draft.contents):
        tables += (
            _table(content.receivers, offsets, src, runs)
            for (src, _), (_, runs), offsets in zip(out.places, piece.spread, zip(*content.offsets))
        )
    line = coalesce(np.concatenate(tables))
    members = np.array(draft.task.members)
    table, given = deal_out(line, loads[members])
    loads[members] += given
    table["sender"] = members[table["sender"]]
    return table[np.lexsort((table["src"], table["receiver"], table["sender"]))]


def _table(receivers: Sequence[int], offsets: Sequence[int], src: int, runs: Runs) -> Rows:
    """Rows of one packed piece to all who hold it."""
    starts, nbytes = runs
    table = np.zeros((len(receivers), len(starts)), ROW)
    table["receiver"] = np.array(receivers)[:, None]
    table["dst"] = np.array(offsets)[:, None] + starts
    table["src"] = src + np.arange(len(starts)) * nbytes
    table["nbytes"] = nbytes
    return table.ravel()


Runs = tuple[npt.NDArray[np.int64], int]
"""Byte offsets in the target of equally long contiguous runs, and their bytes. In the packed piece
they lie one behind the other."""


class Piece(NamedTuple):
    """A slice of one target, packed.

    Attributes:
        parts: (number of the part, box in its source tensor), joined in this order.
        spread: bytes of its values and where they go; and of its scales, if dtype is quantised.
    """

    target: str
    dtype: DType
    parts: tuple[tuple[int, Box], ...]
    spread: tuple[tuple[int, Runs], ...]


def pieces_of(
    target: str, dtype: DType, parts: tuple[SourceShard, ...], boxes: Sequence[Box | None]
) -> Iterator[Piece]:
    """Make pieces of what a sub-mesh has of each part (None: nothing).

    UsageError: the parts do not fit together, or a quantised target is cut within a block.
    """
    shape = local_shape(parts)
    inner = [_inside(part.box, box) for part, box in zip(parts, boxes)]
    scaling = SCALINGS.get(dtype)
    if scaling:
        if len(shape) < 2:
            raise UsageError(f"{target}: a vector cannot be quantised in blocks")
        for part, box in zip(parts, boxes):
            _check_blocks(target, part, box, scaling)
    axis = joined_axis(len(shape))
    item = item_bytes(dtype)
    edges = np.cumsum([0, *(box_shape(part.box)[axis] for part in parts)]).tolist()
    if scaling:
        _, (scale_whole, _) = extents_of(parts, dtype)
        heights = (scale_shape(box_shape(part.box), dtype)[axis] for part in parts)
        scale_edges = np.cumsum([0, *heights]).tolist()
    for first, last, box in _joined(inner, edges, axis):
        chosen = tuple((k, found) for k in range(first, last) if (found := boxes[k]) is not None)
        spread = [(box_size(box) * item, runs_of(shape, box, item))]
        if scaling:
            low = scale_edges[first] + (box[axis][0] - edges[first]) // scaling.rows
            high = scale_edges[last - 1] - (edges[last - 1] - box[axis][1]) // scaling.rows
            start, stop = box[-1]
            wide = scaling.columns or max(stop, 1)  # all columns: one block
            scale_box = (*box[:-2], (low, high), (start // wide, -(-stop // wide)))
            runs = runs_of(scale_whole, scale_box, scaling.item)
            spread.append((box_size(scale_box) * scaling.item, runs))
        yield Piece(target, dtype, chosen, tuple(spread))


def _inside(part: Box, box: Box | None) -> Box | None:
    """A slice in coordinates of its part."""
    if box is None:
        return None
    return tuple((low - start, high - start) for (low, high), (start, _) in zip(box, part))


def _joined(
    inner: Sequence[Box | None], edges: Sequence[int], axis: int
) -> Iterator[tuple[int, int, Box]]:
    """(first part, behind the last, box in the joined target) of each piece."""
    full = [
        box is not None and box[axis] == (0, edges[k + 1] - edges[k]) for k, box in enumerate(inner)
    ]
    rest = {(*box[:axis], *box[axis + 1 :]) if box else None for box in inner}
    if all(full) and len(rest) == 1:
        box = inner[0]
        assert box is not None
        yield 0, len(inner), (*box[:axis], (0, edges[-1]), *box[axis + 1 :])
        return
    for k, found in enumerate(inner):
        if found is not None:
            low, high = found[axis]
            moved = (edges[k] + low, edges[k] + high)
            yield k, k + 1, (*found[:axis], moved, *found[axis + 1 :])


def _check_blocks(target: str, part: SourceShard, box: Box | None, scaling: Scaling) -> None:
    if box is None:
        return
    for block, (start, stop), (part_start, part_stop) in zip(scaling[:2], box[-2:], part.box[-2:]):
        if not block and (start, stop) != (part_start, part_stop):
            raise UsageError(
                f"{target}: {part.name}{list(part.box)} is cut at {list(box)}; a scale of this "
                "target needs whole rows in one sub-mesh"
            )
        if block and (start % block or part_start % block or (stop % block and stop != part_stop)):
            raise UsageError(
                f"{target}: {part.name}{list(part.box)} is cut at {list(box)}, not at multiples of "
                f"the {block} of a quantisation block"
            )


def are_in_order(whole: Box, boxes: Sequence[Box]) -> bool:
    """Whether packed boxes that tile a whole are that whole in C order, one behind the other: they
    are cut in one axis, with nothing but ones before it.
    """
    shape = box_shape(whole)
    lead = next((k for k, extent in enumerate(shape) if extent != 1), 0)
    tail = whole[lead + 1 :]
    return all(box[lead + 1 :] == tail for box in boxes)


def runs_of(shape: tuple[int, ...], box: Box, item: int) -> Runs:
    """Byte offsets of the contiguous runs of a box in an array in C order, and their bytes."""
    axis = len(shape) - 1
    while axis > 0 and box[axis] == (0, shape[axis]):
        axis -= 1
    strides = [math.prod(shape[k + 1 :]) * item for k in range(len(shape))]
    start, stop = box[axis]
    offsets = np.array([start * strides[axis]], np.int64)
    for k in reversed(range(axis)):
        low, high = box[k]
        steps = np.arange(low, high, dtype=np.int64) * strides[k]
        offsets = (steps[:, None] + offsets).ravel()
    return offsets, (stop - start) * strides[axis]


PIECE_BYTES_MIN: Final = 64 * KiB
"""Less than this is not shared by two senders. Source: a NIC is near its line rate from 64 KiB on
(arXiv 2510.27656, Table 2, paged writes; quoted)."""

ROW_BYTES_MAX: Final = 256 * MiB
"""Longer rows are cut: below the 1 GiB that one row of the engine may have, and fine enough for
turns."""

_PAGE: Final = 4096

Floats = npt.NDArray[np.float64]


def coalesce(rows: Rows) -> Rows:
    """Sort rows by receiver and source, and join those that adjoin at both ends."""
    rows = rows[np.lexsort((rows["src"], rows["receiver"]))]
    before, behind = rows[:-1], rows[1:]
    joins = (
        (before["receiver"] == behind["receiver"])
        & (before["src"] + before["nbytes"] == behind["src"])
        & (before["dst"] + before["nbytes"] == behind["dst"])
    )
    heads = np.flatnonzero(np.concatenate(([True], ~joins)))
    found = rows[heads].copy()
    found["nbytes"] = np.add.reduceat(rows["nbytes"], heads)
    return found


def deal_out(line: Rows, loads: Floats) -> tuple[Rows, Floats]:
    """Cut a line of rows in stretches, one for each sender that is wanted.

    Returns the rows, cut where stretches end, with `sender` an index into `loads` (the bytes that
    each sender has been given before); and the bytes that each is given now.
    """
    ends = np.cumsum(line["nbytes"])
    total = int(ends[-1])
    wanted = min(len(loads), max(1, total // PIECE_BYTES_MIN))
    chosen = np.argsort(loads, kind="stable")[:wanted]
    # In rank order neighbours on the line are neighbours in rank, as they were in the task before.
    chosen = np.sort(chosen) if wanted == len(loads) else chosen
    cuts = _snapped(np.arange(1, wanted) / wanted * total, ends, total / wanted)
    rows = _split(line, ends, np.concatenate((cuts, _long_rows(line, ends))))
    starts = np.cumsum(rows["nbytes"]) - rows["nbytes"]
    rows["sender"] = chosen[np.searchsorted(cuts, starts, side="right")]
    given = np.zeros(len(loads))
    np.add.at(given, rows["sender"], rows["nbytes"])
    return rows, given


def _snapped(cuts: Floats, ends: npt.NDArray[np.int64], mean: float) -> npt.NDArray[np.int64]:
    """Move cuts to a row's end where one is near, else to a page of its row."""
    at = np.searchsorted(ends, cuts)
    at = np.minimum(at, len(ends) - 1)
    starts = np.concatenate(([0], ends[:-1]))
    near_start = cuts - starts[at] < mean / 16
    near_end = ends[at] - cuts < mean / 16
    paged = starts[at] + np.round((cuts - starts[at]) / _PAGE).astype(np.int64) * _PAGE
    moved = np.where(near_end, ends[at], np.where(near_start, starts[at], paged))
    found: npt.NDArray[np.int64] = np.minimum(np.maximum.accumulate(moved), ends[-1])
    return found


def _long_rows(line: Rows, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    long = np.flatnonzero(line["nbytes"] > ROW_BYTES_MAX)
    found = [
        np.arange(ends[k] - line["nbytes"][k] + ROW_BYTES_MAX, ends[k], ROW_BYTES_MAX) for k in long
    ]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _split(line: Rows, ends: npt.NDArray[np.int64], cuts: npt.NDArray[np.int64]) -> Rows:
    """Cut rows at positions of the line."""
    starts = ends - line["nbytes"]
    edges = np.unique(np.concatenate((starts, cuts)))
    edges = edges[edges < ends[-1]]
    origin = np.searchsorted(starts, edges, side="right") - 1
    rows = np.zeros(len(edges), ROW)
    into = edges - starts[origin]
    rows["receiver"] = line["receiver"][origin]
    rows["src"] = line["src"][origin] + into
    rows["dst"] = line["dst"][origin] + into
    rows["nbytes"] = np.diff(np.concatenate((edges, ends[-1:])))
    return rows


@lru_cache(maxsize=1024)
def ring_layout(sizes: tuple[int, ...], capacity: int) -> tuple[Sequence[int], Sequence[int]]:
    """Place allocations one behind the other in a ring; each stays contiguous.

    Args:
        sizes: bytes of each allocation, in order of use.
        capacity: bytes of the ring.

    Returns:
        offsets: of each allocation. after: the largest number of an earlier allocation that must
        have ended, with all before it, before this one may be used; -1: none.

    Raises:
        UsageError: one is larger than the ring.
    """
    offsets, after = [], []
    live: deque[tuple[int, int, int]] = deque()
    head, latest = 0, -1
    for k, size in enumerate(sizes):
        if size > capacity:
            raise UsageError(
                f"task {k} needs {size / GiB:.2f} GiB of temporary memory, but the watermark is "
                f"{capacity / GiB:.2f} GiB; raise watermark_bytes (tep rl plan: --watermark-gib, "
                "tep rl run: --watermark-mib), or shard the tensor more finely"
            )
        start = head if head + size <= capacity else 0
        stop = start + size
        if start < head:
            # A new lap begins at 0, where the last lap's first allocation lies. All that is older
            # than that one must have ended, too.
            while live[0][1]:
                latest = live.popleft()[0]
        # From here on the live ones lie in the ring in the order of their numbers.
        while live and live[0][1] < stop and start < live[0][2]:
            latest = live.popleft()[0]
        if size:
            live.append((k, start, stop))
        offsets.append(start)
        after.append(latest)
        head = stop
    return offsets, after

"""The schedule, computed once from both sides' metadata: pure, whatever the shardings are.

Rule 1: every byte of every target is written exactly once. Rule 2: within a task each sender gets
one stretch of the receivers' bytes laid end to end, so that senders carry equal shares and a
receiver hears from as few of them as possible. Rule 3: what is not aligned, not held or held twice
in part is refused here, before anybody allocates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from tep import UsageError
from tep.apps.rl.lines import coalesce, deal_out
from tep.apps.rl.metadata import (
    ALIGN_BYTES,
    Box,
    DType,
    MeshGroup,
    RolloutMeta,
    SourceShard,
    TrainMeta,
    box_bytes,
    box_size,
    intersect,
)
from tep.apps.rl.pieces import Piece, are_in_order, pieces_of
from tep.apps.rl.ring import ring_layout
from tep.apps.rl.routes import ROW, Gather, GatherPiece, Out, OutPart, Rows, Schedule, Task
from tep.base.units import GiB

__all__ = ["WATERMARK_BYTES", "make_schedule"]

WATERMARK_BYTES: Final = 16 * GiB
"""Temporary memory of a training rank. The paper's limit is not published; guessed: a fifth of an
80 GB device whose optimiser state is offloaded."""


def make_schedule(
    trains: Sequence[TrainMeta],
    rollouts: Sequence[RolloutMeta],
    *,
    watermark_bytes: int = WATERMARK_BYTES,
    bundle_bytes: int = 0,
    speeds: Sequence[float] | None = None,
    group_order: Sequence[str] | None = None,
) -> Schedule:
    """Compute the routing table of an update.

    Args:
        trains: metadata of all training ranks, in rank order.
        rollouts: metadata of the rollout workers.
        watermark_bytes: temporary memory that no training rank exceeds.
        bundle_bytes: neighbouring parameters share a task as long as it needs no more staging than
            this; 0: one parameter, one task.
        speeds: relative speed of each training rank's NICs; None: all are equal.
        group_order: names of the mesh groups in the order wanted; None: as the ranks give them.

    Raises:
        UsageError: a target's bytes are held by no training rank or by some in part; shards of a
            quantised parameter that do not begin at a block; a task beyond the watermark.
    """
    _check_ranks(trains)
    held = _Held(trains, group_order)
    contents = _contents(rollouts)
    loads = _Loads(np.zeros(len(trains)), np.asarray(speeds or [1.0] * len(trains), float))
    drafts: list[_Draft] = []
    for group in range(len(held.groups)):
        units = _units(held, contents, group)
        for members, mine in units.items():
            drafts += _bundles(held, group, members, mine, bundle_bytes)
    drafts.sort(key=lambda draft: (draft.group, draft.order))
    tables = [_rows(draft, loads) for draft in drafts]
    for k, table in enumerate(tables):
        table["task"] = k
    tasks = _tasks(drafts, len(trains), watermark_bytes)
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
    if sum(map(box_size, boxes)) != box_size(outer) or not _disjoint(boxes):
        raise UsageError(f"{name}: the shards {boxes[:4]} of one sub-mesh do not tile a box")
    pieces = tuple((box, tuple(found[box])) for box in boxes)
    return _Source(outer, pieces, are_in_order(outer, boxes))


def _disjoint(boxes: Sequence[Box]) -> bool:
    """Whether sorted boxes share no element; quick where they differ in one axis only."""
    axes = [k for k, axis in enumerate(zip(*boxes)) if any(pair != axis[0] for pair in axis)]
    if len(axes) <= 1:
        spans = [box[axes[0]] for box in boxes] if axes else [(0, 1)] * len(boxes)
        return all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    return not any(intersect(a, b) for k, a in enumerate(boxes) for b in boxes[k + 1 :])


# ---------------------------------------------------------------------- what is wanted


@dataclass(slots=True)
class _Content:
    """What some receivers hold alike: parts, and where at each of them."""

    dtype: DType
    parts: tuple[SourceShard, ...]
    receivers: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    scale_offsets: list[int] = field(default_factory=list)


def _contents(rollouts: Sequence[RolloutMeta]) -> dict[str, list[_Content]]:
    """By target name, in the order in which the targets are first seen."""
    found: dict[str, dict[tuple[object, ...], _Content]] = {}
    for receiver, meta in enumerate(rollouts):
        for name, dtype, parts, offset, scale_offset in meta.shards:
            same = found.setdefault(name, {})
            content = same.get((dtype, parts))
            if content is None:
                content = same[dtype, parts] = _Content(dtype, parts)
            content.receivers.append(receiver)
            content.offsets.append(offset)
            content.scale_offsets.append(scale_offset)
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
        if covered != box_size(part.box) or not _disjoint(sorted(slices)):
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
    """A task before it has a number and a place."""

    group: int
    order: int
    members: tuple[int, ...]
    name: str
    gathers: tuple[Gather, ...]
    outs: tuple[Out, ...]
    contents: tuple[tuple[Piece, _Content], ...]
    gather_bytes: int
    nbytes: int


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
    return gathered + sum(piece.nbytes + piece.scale_nbytes for piece, _ in unit.pieces)


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
        offset, at = at, _aligned(at + piece.nbytes)
        scale_offset = -1
        if piece.scale_nbytes:
            scale_offset, at = at, _aligned(at + piece.scale_nbytes)
        outs.append(
            Out(
                piece.target,
                piece.dtype,
                parts,
                offset,
                piece.nbytes,
                scale_offset,
                piece.scale_nbytes,
            )
        )
    return _Draft(
        group,
        units[0].order,
        members,
        units[0].target,
        tuple(gathers),
        tuple(outs),
        tuple(contents),
        gather_bytes,
        at,
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _tasks(drafts: Sequence[_Draft], ranks: int, watermark: int) -> tuple[Task, ...]:
    mine: list[list[int]] = [[] for _ in range(ranks)]
    for k, draft in enumerate(drafts):
        for rank in draft.members:
            mine[rank].append(k)
    places: list[dict[int, tuple[int, int]]] = []
    for numbers in mine:
        offsets, after = ring_layout(tuple(drafts[k].nbytes for k in numbers), watermark)
        places.append(dict(zip(numbers, zip(offsets, after))))
    return tuple(
        Task(
            k,
            draft.name,
            draft.group,
            draft.members,
            draft.gathers,
            draft.outs,
            draft.gather_bytes,
            draft.nbytes,
            tuple(places[rank][k][0] for rank in draft.members),
            tuple(places[rank][k][1] for rank in draft.members),
        )
        for k, draft in enumerate(drafts)
    )


# ---------------------------------------------------------------------- rows


@dataclass(slots=True)
class _Loads:
    """Bytes that each rank has been given so far, and how fast it is."""

    nbytes: np.ndarray[tuple[int], np.dtype[np.float64]]
    speeds: np.ndarray[tuple[int], np.dtype[np.float64]]


def _rows(draft: _Draft, loads: _Loads) -> Rows:
    """All writes of one task: every receiver's rows, shared out to the members."""
    tables = []
    for out, (piece, content) in zip(draft.outs, draft.contents):
        tables.append(_table(content.receivers, content.offsets, out.offset, piece.runs))
        if out.scale_offset >= 0:
            tables.append(
                _table(content.receivers, content.scale_offsets, out.scale_offset, piece.scale_runs)
            )
    line = coalesce(np.concatenate(tables))
    members = np.array(draft.members)
    table, given = deal_out(line, loads.nbytes[members], loads.speeds[members])
    loads.nbytes[members] += given
    table["sender"] = members[table["sender"]]
    return table[np.lexsort((table["src"], table["receiver"], table["sender"]))]


def _table(
    receivers: Sequence[int],
    offsets: Sequence[int],
    src: int,
    runs: tuple[np.ndarray[tuple[int], np.dtype[np.int64]], int],
) -> Rows:
    """Rows of one packed piece to all who hold it."""
    starts, nbytes = runs
    table = np.zeros((len(receivers), len(starts)), ROW)
    table["receiver"] = np.array(receivers)[:, None]
    table["dst"] = np.array(offsets)[:, None] + starts
    table["src"] = src + np.arange(len(starts)) * nbytes
    table["nbytes"] = nbytes
    return table.ravel()

"""The weight-update schedule over arbitrary shardings of both sides: bytes, balance, incast."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tep.apps.rl.compute import load_shards, make_outs, needed_outs, numpy_dtype, unshard
from tep.apps.rl.metadata import (
    MeshGroup,
    RolloutMeta,
    Schedule,
    SourceShard,
    TargetShard,
    TrainMeta,
    box_size,
    extents_of,
    whole,
)
from tep.apps.rl.models import (
    InferLayout,
    TrainLayout,
    model_from_config,
    rollout_metas,
    train_metas,
)
from tep.apps.rl.schedule import PIECE_BYTES_MIN, make_schedule, ring_layout
from tests.unit.apps.rl_reference import reference_region

MiB = 1 << 20


def share(n):
    """So many examples for each hundred of the profile's: those that build models cost more."""
    return settings(max_examples=max(10, settings.default.max_examples * n // 100))


def _grid(draw, shape, unit):
    """Cut a tensor into a grid of boxes, at arbitrary multiples of `unit` in each dimension."""
    axes = []
    for extent in shape:
        inner = list(range(unit, extent, unit))
        cuts = sorted(draw(st.sets(st.sampled_from(inner), max_size=2))) if inner else []
        axes.append(list(itertools.pairwise([0, *cuts, extent])))
    return list(itertools.product(*axes))


@st.composite
def worlds(draw):
    """Tensors, an arbitrary owner for each training box, arbitrary boxes at the receivers."""
    ranks = draw(st.integers(1, 5))
    receivers = draw(st.integers(1, 4))
    cuts = draw(st.integers(1, ranks))
    meshes = tuple(tuple(range(ranks * k // cuts, ranks * (k + 1) // cuts)) for k in range(cuts))
    held = [[] for _ in range(ranks)]
    wanted = [[] for _ in range(receivers)]
    dtypes = {}
    for k in range(draw(st.integers(1, 3))):
        quantised = draw(st.booleans())
        shape, unit = draw(_shapes(quantised))
        names = (f"t{k}", f"u{k}")[: draw(st.integers(1, 2))]  # two are joined in their targets
        for name in names:
            dtypes[name] = "bf16" if quantised else "fp32"
            _hold(draw, held, meshes, name, shape, unit)
        kinds = ["fp8", "fp8_ue8m0", "fp8_channel"][: 3 if cuts == 1 else 2]
        dtype = draw(st.sampled_from(kinds)) if quantised else "fp32"
        for receiver in range(receivers):
            for n, box in enumerate(_grid(draw, shape, unit)):
                if draw(st.booleans()):
                    parts = tuple(SourceShard(name, box) for name in names)
                    wanted[receiver].append((f"t{k}.{n}", dtype, parts))
    group = MeshGroup("all", tuple(dtypes), meshes)
    trains = [TrainMeta(r, 1, tuple(held[r]), dtypes, (group,)) for r in range(ranks)]
    rollouts = [_laid_out(draw, f"r{k}", mine) for k, mine in enumerate(wanted)]
    return trains, rollouts


def _hold(draw, held, meshes, name, shape, unit):
    """Deal a tensor out: a box to each sub-mesh, cut again within it, some pieces held twice."""
    # A sub-mesh unshards one box of a tensor; with more boxes than sub-meshes all hold it all.
    boxes = _grid(draw, shape, unit)
    boxes = boxes if len(boxes) <= len(meshes) else [whole(shape)] * len(meshes)
    for mesh, box in zip(draw(st.permutations(meshes)), boxes):
        axis = draw(st.integers(0, len(shape) - 1))
        low, high = box[axis]
        edges = draw(st.lists(st.integers(low, high), max_size=3))
        for a, b in itertools.pairwise([low, *sorted(edges), high]):
            part = (*box[:axis], (a, b), *box[axis + 1 :])
            if a < b:
                owners = draw(st.sets(st.sampled_from(mesh), min_size=1, max_size=2))
                for rank in sorted(owners):
                    held[rank].append(SourceShard(name, part))


@st.composite
def _shapes(draw, quantised):
    if quantised:
        edges = st.sampled_from([1, 128, 200, 256, 300])
        lead = draw(st.lists(st.integers(1, 3), max_size=1))
        return (*lead, draw(edges), draw(edges)), 128
    return tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))), 1


def _laid_out(draw, name, wanted):
    """Place a receiver's targets with gaps of any size between them, in any order."""
    at, shards = 0, []
    for target, dtype, parts in draw(st.permutations(wanted)):
        at += draw(st.sampled_from([0, 0, 16, 4096]))
        offsets = []
        for _, nbytes in extents_of(parts, dtype):
            if offsets:
                at = -(-(at + draw(st.sampled_from([0, 16]))) // 4) * 4
            offsets.append(at)
            at += nbytes
        shards.append(TargetShard(target, dtype, parts, tuple(offsets)))
    return RolloutMeta(name, 1, tuple(shards), max(at, 1))


def _whole_tensors(trains, seed=3):
    """Random values for every tensor, found from the shards."""
    rng = np.random.default_rng(seed)
    extents, dtypes = {}, trains[0].dtypes
    for meta in trains:
        for name, box in meta.shards:
            seen = extents.setdefault(name, [0] * len(box))
            extents[name] = [max(a, stop) for a, (_, stop) in zip(seen, box)]
    return {
        name: rng.standard_normal(shape).astype(numpy_dtype(dtypes[name]))
        for name, shape in extents.items()
    }


def _slices(box):
    return tuple(slice(*pair) for pair in box)


def _execute(schedule, trains, rollouts, tensors):
    """Do what the ranks would do, in one process, and count how often each byte is written."""
    regions = [np.zeros(meta.nbytes, np.uint8) for meta in rollouts]
    writes = [np.zeros(meta.nbytes, np.uint8) for meta in rollouts]
    shards = [
        {(name, box): tensors[name][_slices(box)] for name, box in meta.shards} for meta in trains
    ]
    for task in schedule.tasks:
        staging = {rank: np.full(task.nbytes, 0xEE, np.uint8) for rank in task.members}
        for rank in task.members:
            load_shards(task, rank, shards[rank], staging[rank])
        for gather in task.gathers:
            for piece in gather.pieces:
                nbytes = box_size(piece.box) * numpy_dtype(gather.dtype).itemsize
                span = slice(piece.offset, piece.offset + nbytes)
                for rank in task.members:
                    sender = piece.sender_to(rank)
                    if sender is not None:
                        staging[rank][span] = staging[sender][span]
        for rank in task.members:
            rows = schedule.rows_of(task.number, rank)
            make_outs(task, needed_outs(task, rows), unshard(task, staging[rank]), staging[rank])
            for row in rows:
                src, dst, n = int(row["src"]), int(row["dst"]), int(row["nbytes"])
                regions[row["receiver"]][dst : dst + n] = staging[rank][src : src + n]
                writes[row["receiver"]][dst : dst + n] += 1
    return regions, writes


@share(20)
@given(worlds(), st.sampled_from([0, 1 * MiB]))
def test_every_target_byte_is_written_once_from_the_right_source(world, bundle):
    """A byte written twice, never or from elsewhere is a model that answers nonsense, in silence:
    for arbitrary shardings on both sides the regions equal an independent reference.
    """
    trains, rollouts = world
    schedule = make_schedule(trains, rollouts, watermark_bytes=64 * MiB, bundle_bytes=bundle)
    tensors = _whole_tensors(trains)

    regions, writes = _execute(schedule, trains, rollouts, tensors)

    for meta, region, count in zip(rollouts, regions, writes):
        expected, owned = reference_region(meta, tensors)
        assert (owned == count).all()
        assert (expected == region).all()


@share(10)
@given(worlds())
def test_a_schedule_survives_bytes_and_is_the_same_every_time(world):
    """Ranks that work by different tables write over each other."""
    trains, rollouts = world

    first = make_schedule(trains, rollouts, watermark_bytes=64 * MiB)
    again = make_schedule(trains, rollouts, watermark_bytes=64 * MiB)

    assert first.digest() == again.digest()
    assert first.digest() == Schedule.from_bytes(first.to_bytes()).digest()


CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "intermediate_size": 768,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_experts": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
}
LAYOUTS = st.builds(
    TrainLayout,
    fsdp=st.integers(1, 4),
    pp=st.integers(1, 2),
    ep=st.sampled_from([1, 2, 3]),
    tp=st.sampled_from([1, 2]),
    replicas=st.integers(1, 2),
)
INFERS = st.builds(
    lambda ep, tp, replicas: InferLayout(ep=ep, tp=tp if ep % tp == 0 else 1, replicas=replicas),
    st.sampled_from([1, 2, 4, 5, 8]),
    st.sampled_from([1, 2]),
    st.integers(1, 3),
)


@pytest.mark.slow
@share(8)
@given(LAYOUTS, INFERS)
def test_usual_layouts_are_balanced_without_incast(train, infer):
    """One rank that sends twice its share doubles the update; one receiver that hears from all
    senders at once loses its NIC to congestion: shares within a sub-mesh are even, and within a
    task a receiver hears from at most two senders more than its part of the bytes asks for.
    """
    model = model_from_config(CONFIG, name="small", source="this test")
    rollouts = rollout_metas(model, infer)
    schedule = make_schedule(train_metas(model, train), rollouts, watermark_bytes=64 * MiB)
    received = schedule.received_bytes()
    largest = 0
    for task in schedule.tasks:
        rows = schedule.rows[schedule.rows["task"] == task.number]
        total = int(rows["nbytes"].sum())
        senders = min(len(task.members), max(1, total // PIECE_BYTES_MIN))
        sent = Counter()
        for row in rows:
            sent[int(row["sender"])] += int(row["nbytes"])
        share = total / senders
        largest = max(largest, share)
        assert max(sent.values()) <= share * 1.125 + 4096
        for receiver in np.unique(rows["receiver"]):
            mine = rows[rows["receiver"] == receiver]
            heard = len(np.unique(mine["sender"]))
            assert heard <= mine["nbytes"].sum() / share + 2

    for members in {task.members for task in schedule.tasks if task.group == 0}:
        loads = schedule.sent_bytes()[list(members)]
        assert loads.max() - loads.min() <= 4 * largest
    # Padding aside, a receiver is written exactly what it holds.
    for meta, nbytes in zip(rollouts, received):
        assert meta.nbytes - 16 * 2 * len(meta.shards) <= nbytes <= meta.nbytes


@pytest.mark.slow
@share(8)
@given(LAYOUTS, INFERS, st.sampled_from(["fp8", "fp8", "bf16", "fp8_channel", "fp8_ue8m0"]))
def test_usual_layouts_arrive_byte_for_byte(train, infer, dtype):
    """The layouts that people use, fused projections, experts and replicas included, land as the
    reference says, in each dtype that inference may have.
    """
    model = model_from_config(
        CONFIG
        | {
            "num_hidden_layers": 2,
            "hidden_size": 128,
            "moe_intermediate_size": 128,
            "num_experts": 6,
            "vocab_size": 128,
        },
        name="small",
        source="this test",
    ).quantised_as(dtype)
    trains, rollouts = train_metas(model, train), rollout_metas(model, infer)
    schedule = make_schedule(
        trains, rollouts[: infer.ep + 1], watermark_bytes=64 * MiB, bundle_bytes=MiB
    )
    tensors = _whole_tensors(trains)

    regions, writes = _execute(schedule, trains, rollouts[: infer.ep + 1], tensors)

    for meta, region, count in zip(rollouts, regions, writes):
        expected, owned = reference_region(meta, tensors)
        assert (owned == count).all()
        assert (expected == region).all()


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(100, 300))
def test_what_may_live_at_once_never_shares_memory(sizes, capacity):
    """Two tasks in one place of the staging area would mix two parameters: an allocation may begin
    only when every earlier one that overlaps it has ended.
    """
    offsets, after = ring_layout(tuple(sizes), capacity)

    for k, (start, size) in enumerate(zip(offsets, sizes)):
        assert 0 <= start
        assert start + size <= capacity
        assert -1 <= after[k] < k
        for j in range(after[k] + 1, k):
            assert offsets[j] + sizes[j] <= start or start + size <= offsets[j]

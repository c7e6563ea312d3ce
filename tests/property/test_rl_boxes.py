"""Boxes of DTensor's and FSDP's shards, and updates from them into parameters of their own."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tep
from tep.apps import rl
from tep.apps.rl.compute import numpy_dtype, numpy_dtypes, quantise
from tests.unit.apps.rl_reference import reference_region

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


def chunk(array, pieces, axis):
    """Cut as torch.chunk does, with empty pieces at the end."""
    step = -(-array.shape[axis] // pieces)
    return [np.take(array, range(*slice(k * step, (k + 1) * step).indices(array.shape[axis])), axis)
            for k in range(pieces)]  # fmt: skip


def cut(array, box):
    return array[tuple(slice(*pair) for pair in box)]


@given(SHAPES, MESHES, st.data())
def test_a_dtensors_box_is_what_torch_puts_there(shape, sizes, data):
    """A box that is off by one row is a model that slowly rots."""
    axes = [data.draw(st.integers(-1, len(shape) - 1)) for _ in sizes]
    values = np.arange(math.prod(shape)).reshape(shape)
    for places in itertools.product(*map(range, sizes)):
        local = values
        for size, place, axis in zip(sizes, places, axes):
            local = chunk(local, size, axis)[place] if axis >= 0 else local
        mesh = [rl.Placed(*one) for one in zip(sizes, places, axes)]

        assert np.array_equal(local, cut(values, rl.placed_box(shape, mesh)))


@given(st.integers(1, 40), st.integers(1, 4), st.integers(2, 4))
def test_fsdp_shards_what_tp_has_sharded(extent, fsdp, tp):
    """The dimensions of such a mesh apply from right to left; the other way is another row."""
    values = np.arange(extent)
    for data, tensor in itertools.product(range(fsdp), range(tp)):
        local = chunk(chunk(values, tp, 0)[tensor], fsdp, 0)[data]
        mesh = [rl.Placed(fsdp, data, 0, tp), rl.Placed(tp, tensor, 0)]

        assert np.array_equal(local, cut(values, rl.placed_box((extent,), mesh)))


def test_what_is_no_box_is_refused():
    """Several stretches taken for one would overwrite what lies between them."""
    with pytest.raises(tep.UsageError, match="several stretches"):
        rl.placed_box((8, 8), [rl.Placed(2, 0, 0, 4), rl.Placed(2, 0, 0)])
    with pytest.raises(tep.UsageError, match=r"axis 2 of a tensor of shape \[8, 8\]"):
        rl.placed_box((8, 8), [rl.Placed(2, 0, 2)])


class How(SimpleNamespace):
    """A placement as torch has them."""

    def is_partial(self):
        return hasattr(self, "reduce_op")


def dtensor(local, placements, shape=(6, 4), where=(1, 0)):
    mesh = SimpleNamespace(shape=(2, 2), get_coordinate=lambda: where)
    return SimpleNamespace(
        shape=shape, placements=placements, device_mesh=mesh, to_local=lambda: local
    )


def test_a_dtensor_is_asked_for_its_box():
    """A tensor that is taken for a whole one would be written over by its neighbours' shards."""
    shard, replicate = How(dim=0), How()
    local = np.zeros((3, 4))

    assert ((6, 4), ((3, 6), (0, 4))) == rl.shard_of(dtensor(local, (shard, replicate)))[:2]
    assert ((3, 4), ((0, 3), (0, 4))) == rl.shard_of(local)[:2]
    assert ((0, 0), (0, 0)) == rl.shard_of(dtensor(local, (shard, shard), where=None))[1]
    assert ((3, 6), (0, 2)) == rl.shard_of(dtensor(local[:, :2], (shard, How(dim=-1 + 2))))[1]
    with pytest.raises(tep.UsageError, match="partial sum"):
        rl.shard_of(dtensor(local, (How(reduce_op="sum"), replicate)))
    with pytest.raises(tep.UsageError, match=r"local values have the shape \[3, 4\]"):
        rl.shard_of(dtensor(local, (shard, How(dim=1))))


def stretch(wide, start, stop):
    """The boxes of elements start to stop of a matrix: a part of a row, whole rows, a part."""
    first, last = -(-start // wide), stop // wide
    if first > last:
        return [((last, first), (start - last * wide, stop - last * wide))]
    boxes = [
        ((first - 1, first), (start - (first - 1) * wide, wide)),
        ((first, last), (0, wide)),
        ((last, last + 1), (0, stop - last * wide)),
    ]
    return [box for box in boxes if all(a < b for a, b in box)]


@st.composite
def jobs(draw):
    """Tensors on a mesh or cut anywhere, and what each of two workers wants of them."""
    ranks = draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    tensors, held, wanted = {}, [{} for _ in range(ranks)], [[], []]
    for k in range(draw(st.integers(1, 3))):
        name, dtype = f"t{k}", draw(st.sampled_from(["bf16", "fp8", "fp8_channel", "fp8_ue8m0"]))
        shape = (draw(st.integers(1, 300)), draw(st.sampled_from([1, 7, 130])))
        tensors[name] = rng.standard_normal(shape, np.float32).astype(numpy_dtype("bf16"))
        axis, flat = draw(st.integers(-1, 1)), draw(st.booleans())
        step = -(-math.prod(shape) // ranks)
        for rank in range(ranks):
            if flat:
                edges = (min(step * r, math.prod(shape)) for r in (rank, rank + 1))
                held[rank][name] = stretch(shape[1], *edges)
            else:
                box = rl.placed_box(shape, [rl.Placed(ranks, rank, axis)])
                held[rank][name] = [box] if all(a < b for a, b in box) else []
        for mine in wanted:
            edges = [0, *(edge for edge in (128, 256) if edge < shape[0]), shape[0]]
            rows = draw(st.sampled_from(list(itertools.combinations(edges, 2))))
            box = (rows, (0, shape[1]))
            mine.append((name, dtype, (rl.SourceShard(name, box),)))
    return tensors, held, wanted


def memory_of(meta):
    """Memory for each parameter, as an inference engine has allocated it, and the bytes of it."""
    found = {}
    for shard in meta.shards:
        shape = tuple(stop - start for start, stop in shard.parts[0].box)
        if len(shard.offsets) == 1:
            found[shard.name] = np.zeros(shape, np.uint16)
            continue
        _, scales = quantise(np.zeros(shape, np.float32), shard.dtype)
        found[shard.name] = np.zeros(shape, np.uint8), np.zeros_like(scales)
        assert numpy_dtypes(shard.dtype)[1] == scales.dtype
    return found


@pytest.mark.slow
@settings(max_examples=max(8, settings.default.max_examples // 12))
@given(jobs())
def test_shards_of_any_kind_arrive_in_parameters_of_their_own(job):
    """Whoever has no arena gets each parameter where it is: every byte, no byte beside it."""
    tensors, held, wanted = job
    joined = [([part.name], dtype != "bf16") for mine in wanted for _, dtype, (part,) in mine]
    groups = rl.mesh_groups(held, joined)
    dtypes = dict.fromkeys(tensors, "bf16")
    metas = [rl.RolloutMeta(f"r{k}", 1, *rl.lay_out(w, apart=True)) for k, w in enumerate(wanted)]
    memory = {meta.name: memory_of(meta) for meta in metas}
    with tep.sim.Cluster(nodes=len(held) + len(metas), nics=1, seed=1) as cluster:
        trains = []
        for rank, mine in enumerate(held):
            shards = tuple(rl.SourceShard(name, box) for name in mine for box in mine[name])
            values = {tuple(shard): cut(tensors[shard.name], shard.box).copy() for shard in shards}
            meta = rl.TrainMeta(rank, 1, shards, dtypes, groups)
            trains.append(rl.TrainingWorker(cluster.engines[rank], meta, values))
        actors = [
            rl.RolloutWorker(cluster.engines[len(held) + k], meta, memory[meta.name])
            for k, meta in enumerate(metas)
        ]
        controller = rl.Controller(trains, actors, watermark_bytes=1 << 20)
        report = cluster.run(controller.update(1))
        assert report.ok, report.error + report.table()
        for meta, actor in zip(metas, actors):
            region, _ = reference_region(meta, tensors)
            for offset, (array, nbytes) in actor._memory.items():
                assert region[offset : offset + nbytes].tobytes() == array.tobytes(), offset
            with pytest.raises(tep.UsageError, match="region of its own"):
                _ = actor.region
            actor.close()


def test_layout_and_memory_must_fit():
    """A parameter that is left out would keep its first version for ever."""
    parts = (rl.SourceShard("a", ((0, 128), (0, 128))),)
    meta = rl.RolloutMeta("r", 1, *rl.lay_out([("a", "fp8", parts)], apart=True))
    values, scales = np.zeros((128, 128), np.uint8), np.zeros(1, np.float32)
    with tep.sim.Cluster(nodes=1, nics=1, seed=1) as cluster:
        for memory, message in [
            ({"b": values}, r"different parameters: \['a', 'b'\]"),
            ({"a": values}, "1 pieces of memory where 2"),
            ({"a": (values, scales.repeat(2))}, "has 8 bytes, the layout needs 4"),
        ]:
            with pytest.raises(tep.UsageError, match=message):
                rl.RolloutWorker(cluster.engines[0], meta, memory)
        assert rl.RolloutWorker(cluster.engines[0], meta, {"a": (values, scales)}).serving is None

"""The pure parts of weight updates: models, layouts, quantisation, immediates, errors."""

from __future__ import annotations

import json
import math
import sys
import tracemalloc
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

import tep
from tep.apps.rl import study
from tep.apps.rl.compute import (
    as_array,
    check_finite,
    load_shards,
    make_outs,
    needed_outs,
    numpy_dtype,
    quantise,
    unshard,
)
from tep.apps.rl.metadata import (
    ROW,
    MeshGroup,
    RolloutMeta,
    Schedule,
    SourceShard,
    TargetShard,
    TrainMeta,
    box_shape,
    whole,
)
from tep.apps.rl.models import (
    PUBLISHED,
    InferLayout,
    TrainLayout,
    lay_out,
    load_model,
    model_from_config,
    rollout_metas,
    train_metas,
)
from tep.apps.rl.ports import Kind, PeerResult, UpdateReport, make_imm, stage_span
from tep.apps.rl.predict import DENSE_MS, OPERATIONS, StageTimes
from tep.apps.rl.rollout import RolloutWorker
from tep.apps.rl.schedule import make_schedule
from tests.support.tensors import TORCHES, get_torch

MiB = 1 << 20


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # As their publishers state them: 1 T, 671 B, 235 B.
        ("kimi-k2", 1.03e12),
        ("deepseek-v3", 671e9),
        ("qwen3-235b", 235e9),
    ],
)
def test_published_models_have_their_published_size(name, parameters):
    """A forgotten projection would make every prediction too good."""
    assert load_model(name).parameters == pytest.approx(parameters, rel=0.005)


def test_every_tensor_of_a_model_reaches_inference():
    """A tensor that nobody fuses is never updated, and the model slowly rots."""
    for name in PUBLISHED:
        model = load_model(name)
        used = [source for fused in model.fused for source in fused.sources]
        assert sorted(tensor.name for tensor in model.tensors) == sorted(used)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "no hidden_size"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers='four'"),
        ({"vocab_size": None, "model_type": "bert"}, "no vocab_size; model_type is 'bert'"),
    ],
)
def test_a_config_that_lacks_a_shape_is_refused_by_name(change, message):
    """A guessed shape is a schedule for another model."""
    config = dict(PUBLISHED["qwen3-235b"]["config"]) | change

    with pytest.raises(tep.UsageError, match=message):
        model_from_config(config, name="x", source="test")


def test_a_config_file_and_its_text_config_are_read(tmp_path):
    """Users have a config.json, often of a multimodal wrapper."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"text_config": dict(PUBLISHED["kimi-k2"]["config"])}))

    assert load_model("kimi-k2").parameters == load_model(path).parameters
    with pytest.raises(tep.UsageError, match="neither a file nor one of: kimi-k2"):
        load_model("kimi-k3")


def test_tensor_parallel_slices_that_split_a_block_are_refused():
    """A scale that belongs half to one rank and half to another is wrong on both."""
    model = model_from_config(PUBLISHED["qwen3-235b"]["config"], name="q", source="test")

    with pytest.raises(tep.UsageError, match="is no multiple of its 4 heads"):
        rollout_metas(model, InferLayout(ep=6, tp=6))
    small = dict(PUBLISHED["qwen3-235b"]["config"]) | {"head_dim": 64, "num_hidden_layers": 1}
    model = model_from_config(small, name="q", source="test")
    with pytest.raises(tep.UsageError, match="not at multiples of the 128"):
        rollout_metas(model, InferLayout(ep=4, tp=4))


def test_layouts_that_do_not_divide_are_refused():
    """Ranks that belong to no mesh would wait for ever."""
    with pytest.raises(tep.UsageError, match="tp=3 does not divide ep=4"):
        InferLayout(ep=4, tp=3)
    with pytest.raises(tep.UsageError, match="fsdp=0"):
        TrainLayout(fsdp=0)
    with pytest.raises(tep.UsageError, match="no multiple of"):
        study.train_layout(10, pp=3)
    _, train, infer = study.KIMI_K2
    assert train == study.train_layout(256)
    assert infer == study.infer_layout(128)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 12, 64, 96, 100, 256])
def test_any_number_of_ranks_gets_a_layout(world):
    """`--train 100` must not be an error because 100 is not a power of two."""
    assert world == study.train_layout(world).world
    assert world == study.infer_layout(world).world


def _one(parts, dtype="bf16", held=None, name="t", groups=None):
    box = whole((4, 6))
    groups = groups or (MeshGroup("all", ("t", "u"), ((0,),)),)
    held = held or (SourceShard("t", box), SourceShard("u", box))
    trains = [TrainMeta(0, 1, held, {"t": "bf16", "u": "bf16"}, groups)]
    shard = TargetShard(name, dtype, parts, (0, 4096) if dtype == "fp8" else (0,))
    return trains, [RolloutMeta("r0", 1, (shard,), 8192)]


def test_metadata_that_does_not_fit_is_refused_before_anything_moves():
    """Found later it is a hang, or a model with holes."""
    part = SourceShard("t", whole((4, 6)))
    cases = [
        (_one((SourceShard("x", whole((4, 6))),)), "needs x, which no training rank holds"),
        (_one((SourceShard("t", whole((5, 6))),)), "hold 24 of 30 elements"),
        (_one((part, SourceShard("u", whole((4, 5))))), "cannot be joined along axis 0"),
        (_one((SourceShard("t", ((1, 4), (0, 6))),), "fp8"), "not at multiples of the 128"),
        (
            _one((part,), held=(SourceShard("t", ((0, 2), (0, 6))), SourceShard("v", part.box))),
            "rank 0 holds v, which no mesh group unshards",
        ),
        (
            _one(
                (part, SourceShard("u", part.box)),
                groups=(MeshGroup("a", ("t",), ((0,),)), MeshGroup("b", ("u",), ((0,),))),
            ),
            "of different mesh groups",
        ),
    ]
    for (trains, rollouts), message in cases:
        with pytest.raises(tep.UsageError, match=message):
            make_schedule(trains, rollouts, watermark_bytes=MiB)
    trains, rollouts = _one((part,))
    with pytest.raises(tep.UsageError, match="the watermark is .* raise watermark_bytes"):
        make_schedule(trains, rollouts, watermark_bytes=64)
    with pytest.raises(tep.UsageError, match="group_order"):
        make_schedule(trains, rollouts, watermark_bytes=MiB, group_order=["experts"])


def test_bytes_that_are_no_schedule_are_refused():
    """A controller of another release must not be half understood."""
    with pytest.raises(tep.BadDescriptor, match="Schedule"):
        Schedule.from_bytes(b"not a schedule")
    trains, rollouts = _one((SourceShard("t", whole((4, 6))),))
    data = make_schedule(trains, rollouts, watermark_bytes=MiB).to_bytes()
    with pytest.raises(tep.BadDescriptor, match="Schedule"):
        Schedule.from_bytes(data[:-3])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"sender": 1}, "rows name sender 1, there are 1"),
        ({"sender": -1}, "rows name sender -1"),
        ({"receiver": 1}, "rows name receiver 1, there are 1"),
        ({"task": 7}, "rows name task 7, there are 1"),
        ({"nbytes": -1}, "negative, or too many"),
        ({"nbytes": 2**63 - 1}, "negative, or too many"),
        ({"ranks": 0}, "there are 0"),
        ({"ranks": 1 << 40}, "ranks=1099511627776 is outside"),
    ],
)
def test_a_schedule_whose_ranks_do_not_exist_is_refused(change, why):
    """Its sums raised IndexError, wherever they were asked for first."""
    trains, rollouts = _one((SourceShard("t", whole((4, 6))),))
    made = make_schedule(trains, rollouts, watermark_bytes=MiB)
    fields = msgspec.msgpack.decode(made.to_bytes())
    rows = made.rows.copy()
    for name, value in change.items():
        if name == "ranks":
            fields[1] = value
        else:
            rows[name] = value
    fields[5] = rows.tobytes()
    with pytest.raises(tep.BadDescriptor, match=why):
        Schedule.from_bytes(msgspec.msgpack.encode(fields))
    assert Schedule.from_bytes(made.to_bytes()).digest() == made.digest()


def test_quantised_blocks_keep_their_own_scale():
    """One outlier must not cost the precision of the whole matrix; zeros must stay zeros."""
    values = np.full((200, 260), 0.01, np.float32)
    values[0, 0], values[130:, 130:] = 1000.0, 0.0

    fp8, scales = quantise(values.astype(numpy_dtype("bf16")))
    back = fp8.astype(np.float32) * np.repeat(np.repeat(scales, 128, 0), 128, 1)[:200, :260]

    assert (2, 3) == scales.shape
    assert back[0, 0] == pytest.approx(1000.0, rel=0.01)
    assert back[0, 200] == pytest.approx(0.01, rel=0.04)
    assert (back[130:, 130:] == 0).all()


@pytest.mark.parametrize("dtype", ["fp8", "fp8_channel", "fp8_ue8m0"])
@pytest.mark.parametrize("size", [1e-45, 1e-41, 1e-38, 1e-3, 1.0, 3e38])
def test_quantised_values_are_near_at_any_size(dtype, size):
    """A scale that rounds down makes values beyond 448, and those are NaN in silence."""
    values = (np.linspace(-1, 1, 256 * 256).reshape(256, 256) * size).astype(np.float32)
    fp8, scales = quantise(values, dtype)
    wide = np.exp2(scales.astype(np.float32) - 127) if dtype == "fp8_ue8m0" else scales
    each = np.repeat(np.repeat(wide, 256 // wide.shape[0], 0), 256 // wide.shape[1], 1)
    back = fp8.astype(np.float64) * each

    # e4m3 has three bits behind the point, and steps of 2**-9 below its normal numbers.
    assert (np.abs(back - values) <= np.maximum(np.abs(values) / 16, each * 2.0**-10)).all()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_no_number_is_refused_by_name(dtype, bad):
    """One such weight makes a model that answers nonsense, and a block of fp8 that is all zero."""
    values = np.ones((300, 300), numpy_dtype(dtype))
    check_finite(values, "w")
    values[170, 299] = bad

    with pytest.raises(tep.UsageError, match=r"w: 1 of 90000 values.*\[170, 299\]"):
        check_finite(values, "w")


@pytest.mark.parametrize(
    ("value", "target", "message"),
    [
        (np.inf, "fp8", "t: 1 of 16384"),
        (1e30, "fp16", "out as fp16: 1 of 16384"),
        (1e30, "bf16", ""),
    ],
)
def test_an_update_with_such_a_weight_fails(value, target, message):
    """Also where the weight is too large for the target's dtype only."""
    shape = (128, 128)
    parts = (SourceShard("t", whole(shape)),)
    groups = (MeshGroup("all", ("t",), ((0,),)),)
    trains = [TrainMeta(0, 1, parts, {"t": "fp32"}, groups)]
    rollouts = [RolloutMeta("r", 1, *lay_out([("out", target, parts)]))]
    schedule = make_schedule(trains, rollouts, watermark_bytes=MiB)
    values = np.ones(shape, np.float32)
    values[5, 6] = value

    def run():
        (task,) = schedule.tasks
        staging = np.zeros(task.nbytes, np.uint8)
        load_shards(task, 0, {tuple(parts[0]): values}, staging)
        make_outs(task, task.outs, unshard(task, staging), staging)

    if not message:
        run()
        return
    with pytest.raises(tep.UsageError, match=message):
        run()


@pytest.mark.parametrize("axis", [0, 1])
def test_a_task_needs_no_memory_beside_its_staging(axis):
    """Temporary arrays that nobody counts are what runs a device out of memory under a watermark:
    whichever way the shards are cut, unsharding and quantising stay within the task's staging.
    """
    shape = (2048, 1024)
    cuts = ((0, shape[axis] // 2), (shape[axis] // 2, shape[axis]))
    boxes = [tuple(cut if k == axis else (0, shape[k]) for k in range(2)) for cut in cuts]
    parts = (SourceShard("t", whole(shape)), SourceShard("u", whole(shape)))
    groups = (MeshGroup("all", ("t", "u"), ((0,),)),)
    held = tuple(SourceShard(name, box) for name in "tu" for box in boxes)
    trains = [TrainMeta(0, 1, held, {"t": "bf16", "u": "bf16"}, groups)]
    target = TargetShard("tu", "fp8", parts, (0, 2 * math.prod(shape)))
    rollouts = [RolloutMeta("r0", 1, (target,), 3 * math.prod(shape))]
    schedule = make_schedule(trains, rollouts, watermark_bytes=64 * MiB)
    (task,) = schedule.tasks
    staging = np.zeros(task.nbytes, np.uint8)
    shards = {(s.name, s.box): np.ones(box_shape(s.box), numpy_dtype("bf16")) for s in held}
    outs = needed_outs(task, schedule.rows)

    tracemalloc.start()
    load_shards(task, 0, shards, staging)
    make_outs(task, outs, unshard(task, staging), staging)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert task.gather_bytes == 4 * math.prod(shape)
    assert peak < task.gather_bytes / 4
    assert task.nbytes <= schedule.watermark_bytes


@pytest.mark.parametrize(("ranks", "receivers"), [(1, 3), (4, 4), (3, 8), (8, 3)])
def test_each_rollout_worker_is_told_by_one_rank_that_all_are_through(ranks, receivers):
    """One that nobody tells never serves; two that tell one release it for the next update."""
    names = tuple(f"rollout{k}" for k in range(receivers))
    schedule = Schedule(ranks, names, (), (), np.zeros(0, ROW), 0)
    told = [name for rank in range(ranks) for name in names[schedule.finishes(rank)]]

    assert sorted(told) == sorted(names)


def test_immediates_of_kinds_attempts_and_tasks_never_meet():
    """An immediate of an aborted update that counts in the next one releases it early."""
    seen = {
        make_imm(kind, attempt, number)
        for kind in Kind
        for attempt in (0, 1, 4095)
        for number in (0, 1, 65535)
    }

    assert len(Kind) * 9 == len(seen)
    assert max(seen) < 2**32
    with pytest.raises(tep.UsageError, match="65536 tasks"):
        make_imm(Kind.READY, 1, 65536)


SMALL = {
    "model_type": "mixtral",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_local_experts": 2,
    "num_attention_heads": 2,
    "vocab_size": 4,
}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        # As the weight files of these families name them.
        ({}, "model.layers.0.block_sparse_moe.experts.*.w3.weight"),
        (
            {"model_type": "qwen2_moe"} | {"shared_expert_intermediate_size": 16},
            "model.layers.0.mlp.shared_expert_gate.weight",
        ),
        ({"model_type": "qwen2_moe"}, "model.layers.0.self_attn.k_proj.bias"),
        (
            {"model_type": "llama", "num_local_experts": 0, "attention_bias": True},
            "model.layers.0.self_attn.o_proj.bias",
        ),
        ({"model_type": "qwen3_moe"}, "model.layers.0.self_attn.q_norm.weight"),
    ],
)
def test_families_name_their_tensors_in_their_own_way(change, name):
    """A name that is not in the file ends a run; one that is missing here is never updated."""
    model = model_from_config(SMALL | change, name="x", source="test")

    assert name in {tensor.name for tensor in model.tensors}


@pytest.fixture(params=TORCHES)
def torch(request, monkeypatch):
    return get_torch(request.param, monkeypatch)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_torch_tensors_are_shards_too(torch, dtype):
    """Trainers have tensors; a copy of a terabyte to make arrays of them is no answer."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = torch.tensor(values.tolist(), dtype=getattr(torch, dtype), requires_grad=True)

    found = as_array(tensor, "w")

    assert (values == found.astype(np.float32)).all()
    assert found.ctypes.data == tensor.data_ptr()
    with pytest.raises(tep.UsageError, match="w: a weight is a numpy array or a torch tensor, not"):
        as_array([1.0], "w")


def test_without_torch_a_shard_is_an_array(monkeypatch):
    """An ImportError would send whoever passes a list to install torch."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(tep.UsageError, match="w: a weight is a numpy array or a torch tensor, not"):
        as_array([1.0], "w")


def test_writes_overlap_in_a_trace_as_transfers_do():
    """Perfetto drops a bar that begins within another, and of two writes it would show one."""
    trace = tep.Trace("host")
    trace.spans += [
        stage_span("rank 0", "make", "w", 5.0, 5.5),
        stage_span("rank 0", "write", "v", 5.0, 5.5),
        stage_span("rank 0", "write", "w", 5.25, 6.0),
    ]

    assert ["X", "b", "e", "b", "e"] == [e["ph"] for e in trace.events() if e["ph"] != "M"]


def test_training_metas_hold_every_element_once_per_replica():
    """A tensor that two ranks hold in part, or that no rank holds, cannot be unsharded."""
    model = model_from_config(
        dict(PUBLISHED["kimi-k2"]["config"]) | {"num_hidden_layers": 3}, name="k", source="test"
    )
    sizes = dict.fromkeys((tensor.name for tensor in model.tensors), 0)
    for meta in train_metas(model, TrainLayout(fsdp=3, pp=2, ep=4, replicas=2)):
        for name, box in meta.shards:
            sizes[name] += math.prod(stop - start for start, stop in box)

    assert {t.name: 2 * math.prod(t.shape) for t in model.tensors} == sizes


def test_the_outcome_of_a_peer_is_found_by_its_name():
    """Names come out of messages: an equal one is another object."""
    peers = (PeerResult("rollout0", "updated"), PeerResult("rollout1", "lost"))
    report = UpdateReport(1, 1, True, "", 1.0, peers)

    assert ["updated", "lost", ""] == [report.outcome(f"rollout{k}") for k in range(3)]


def test_a_rollout_worker_that_closes_gives_its_regions_back():
    """The engine stays open: its memory would stay registered with every model that was served."""
    with tep.TransferEngine.open("loopback") as engine:
        regions = [engine.reg_mr(np.zeros(64, np.uint8))[0] for _ in range(2)]
        engine.deregister(regions[0])
        worker = SimpleNamespace(_mrs=regions, engine=engine)
        for _ in range(2):
            RolloutWorker.close(worker)

        assert [True, True] == [mr.closed for mr in regions]


@pytest.mark.parametrize("bundle_bytes", [600, 1024])
def test_parameters_share_a_task_as_long_as_its_staging_allows(bundle_bytes):
    """A task that needs more is refused at the watermark, or leaves no room for a second one."""
    model = model_from_config(SMALL, name="small", source="test")
    metas = train_metas(model, TrainLayout(fsdp=2)), rollout_metas(model, InferLayout(ep=1))
    alone = make_schedule(*metas).tasks
    shared = make_schedule(*metas, bundle_bytes=bundle_bytes).tasks
    largest = max(task.nbytes for task in alone)

    assert len(shared) < len(alone)
    assert max(task.nbytes for task in shared) <= max(bundle_bytes, largest)


def test_rates_of_published_totals_give_these_totals_again():
    """Rates for other bytes than those that were measured make every prediction wrong."""
    for rule in ("roofline", "bytes"):
        found, sums = StageTimes.of(PUBLISHED_TASKS, rule), dict.fromkeys(OPERATIONS, 0.0)
        for task in PUBLISHED_TASKS.tasks:
            expert = PUBLISHED_TASKS.groups[task.group] == "experts"
            each = found.seconds(task, 5 / len(task.members) / 2, expert=expert)
            for name, seconds in each.items():
                sums[name] += seconds * len(task.members) * 1e3 / 4
        assert {name: one.total_ms for name, one in OPERATIONS.items()} == pytest.approx(sums)


def test_dense_tensors_take_what_the_published_phases_leave_them():
    """The rest is the experts'. A rank that gathered all of them would wait for NICs that do not
    exist.
    """
    found = StageTimes.of(PUBLISHED_TASKS)
    dense, experts = (
        found.seconds(task, 0.0, expert=expert)
        for task, expert in zip(PUBLISHED_TASKS.tasks, (False, True), strict=True)
    )
    twice = found.seconds(PUBLISHED_TASKS.tasks[1]._replace(gather_bytes=0), 0.0, expert=True)

    assert DENSE_MS * 4 / 2 == pytest.approx(sum(dense.values()) * 1e3)
    assert 63e9 * (experts["load"] - twice["load"]) == pytest.approx(300e6 / 4)
    assert 450e9 * (experts["unshard"] - twice["unshard"]) == pytest.approx(300e6 / 4)


class _Task(NamedTuple):
    group: int
    gather_bytes: int
    members: tuple[int, ...]
    gathers: tuple[int, ...]


PUBLISHED_TASKS = SimpleNamespace(
    groups=("dense", "experts"),
    tasks=[_Task(0, 100_000_000, (0, 1), (1,)), _Task(1, 300_000_000, (0, 1, 2, 3), (1, 2))],
    ranks=4,
    rows=np.zeros(5),
)

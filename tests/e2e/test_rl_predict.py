"""Predictions on the timing fabric: the published total, and that each cause has its effect."""

from __future__ import annotations

import dataclasses
import resource

import msgspec
import pytest

from tep.apps.rl import study
from tep.apps.rl.models import PUBLISHED, InferLayout, TrainLayout, load_model, model_from_config
from tep.apps.rl.predict import DENSE_MS, OPERATIONS, TOTAL_MS, StageTimes, predict
from tep.sim import load_profile
from tests.unit.apps.rl_worlds import Timed, World, make_cluster

GIB = 1 << 30
MIB = 1 << 20


@pytest.mark.long
def test_kimi_k2_takes_what_was_published():
    """The claim of the whole system: 256 -> 128 GPUs, all parameters, within 10 % of 1,233 ms, with
    compute times given and network times predicted, and cheap enough for a laptop. (The notebook
    on weight updates asserts the total, too, and runs always.)
    """
    deployment = study.Deployment(
        model=load_model("kimi-k2"), train=study.train_layout(256), infer=study.infer_layout(128)
    )

    found = deployment.predict()

    assert found.total_ms == pytest.approx(TOTAL_MS, rel=0.1)
    given = {name: operation.total_ms for name, operation in OPERATIONS.items()}
    assert given == pytest.approx(found.stages)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 4 * GIB
    assert found.peak_bytes <= deployment.watermark_bytes


@pytest.mark.long
@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-235b"])
def test_other_models_are_within_their_interval_and_beyond_the_wire(name):
    """A model faster than the wire is a wrong description, and bytes are the least it takes."""
    deployment = study.Deployment(
        model=load_model(name), train=study.train_layout(256), infer=study.infer_layout(128)
    )
    schedule = deployment.schedule()

    found = deployment.predict(schedule)
    least = dataclasses.replace(deployment, attribution="bytes").predict(schedule)

    line_ms = schedule.received_bytes().max() * 8 / 377.4e9 * 1e3
    assert max(line_ms, least.compute_ms) < least.total_ms < found.total_ms < 2 * TOTAL_MS
    assert sum(found.stages.values()) + found.wait_ms == pytest.approx(found.total_ms)


FREE = StageTimes({}, {}, 0.0)


def small(**changes):
    config = dict(PUBLISHED["qwen3-235b"]["config"]) | {"num_hidden_layers": 6}
    base = study.Deployment(
        model=model_from_config(config, name="small", source="this test"),
        train=TrainLayout(fsdp=2, pp=2, ep=4),
        infer=InferLayout(ep=4, replicas=2),
        watermark_bytes=6 * GIB,
    )
    return dataclasses.replace(base, **changes)


def test_without_compute_the_receivers_nics_are_the_limit():
    """A prediction faster than the wire is a bug; one far slower is a bad schedule."""
    schedule = small().schedule()
    line_ms = schedule.received_bytes().max() * 8 / 377.4e9 * 1e3

    found = predict(schedule, FREE)

    assert line_ms < found.total_ms < 1.1 * line_ms
    assert "receiving" in found.links[0].name


def test_submitting_costs_each_rank_its_own_writes():
    """With a task for each parameter one rank may write to all workers while others write nothing.
    If all of them were charged what the busiest submits, the prediction would grow with ranks.
    """
    schedule = small(bundle_bytes=0).schedule()
    each_s = 1e-6

    found = predict(schedule, StageTimes({}, {}, each_s))

    mean_ms = 1e3 * each_s * len(schedule.rows) / schedule.ranks
    assert found.stages["submit"] == pytest.approx(mean_ms)


def test_the_same_seed_predicts_the_same():
    """A figure that cannot be repeated cannot be checked."""
    schedule = small().schedule()

    first, again = (
        predict(schedule, FREE, profile="efa_2x200", seed=3, spans=True) for _ in range(2)
    )

    assert first.spans == again.spans
    assert first.total_ms == again.total_ms


def test_other_ways_are_slower_by_what_their_busy_link_carries():
    """The comparison names the link; its bytes over its rate must be the time."""
    deployment = small()
    ours = predict(deployment.schedule(), FREE)

    own, *others = study.comparison(deployment, ours)

    assert 1 == own["factor"]
    assert len(others) == 2
    for row in others:
        copied_ms = 2 * row["GB over it"] / 4.8
        wire_ms = row["GB over it"] * 8 / 377.4 * 1e3
        assert row["ms"] == pytest.approx(wire_ms + copied_ms, rel=0.01)
        assert row["factor"] > 1


def test_a_tight_watermark_stalls_the_pipeline():
    """The limit on memory must bind: a rank that ignores it runs out."""
    times = study.published_times()
    wide = small(watermark_bytes=12 * GIB).schedule()
    tight = small(watermark_bytes=2600 * MIB).schedule()

    found, stalled = predict(wide, times), predict(tight, times, spans=True)

    assert stalled.peak_bytes <= 2600 * MIB
    assert found.total_ms < stalled.total_ms
    assert any(span.track == "watermark" for span in stalled.spans)


def test_a_mesh_group_that_drains_the_one_before_begins_when_its_writes_have_ended():
    """Ours must differ from the published system only by its waits: each rank waits for its own
    writes, so that a finished stage does not wait for the other one.
    """
    schedule = small(group_order=("dense", "experts")).schedule()
    writers = {
        (f"{schedule.groups[task.group]} {k}", task.name): task.members
        for group in range(len(schedule.groups))
        for k, members in enumerate(_meshes(schedule, group))
        for task in schedule.tasks
        if task.group == group and task.members == members
    }
    gaps, begins = {}, {}
    for drains in (False, True):
        found = predict(schedule, FREE, spans=True, drains=drains)
        ended_s, begun_s = [0.0] * schedule.ranks, [float("inf")] * schedule.ranks
        for span in found.spans:
            for rank in writers[span.engine, span.name] if span.track == "write" else ():
                if span.engine.startswith("dense"):
                    ended_s[rank] = max(ended_s[rank], span.stop_s)
                else:
                    begun_s[rank] = min(begun_s[rank], span.start_s)
        gaps[drains] = [
            min(begun_s[rank] - ended_s[rank] for rank in members)
            for members in _meshes(schedule, 1)
        ]
        begins[drains] = {round(begun, 9) for begun in begun_s}
        assert drains == any(span.track == "drain" for span in found.spans)

    assert max(gaps[False]) < 0
    assert gaps[True] == pytest.approx([0.0] * len(gaps[True]), abs=1e-9)
    assert len(begins[True]) > 1


def test_an_interval_varies_all_that_is_guessed_of_an_update():
    """A prediction whose largest guess is left out of its interval is surer than anybody is."""
    machine = load_profile("efa_4x100")
    numbers = {
        field: msgspec.structs.replace(number, confidence="quoted")
        for field, number in machine.numbers.items()
    }
    known = dataclasses.replace(machine, numbers=numbers)

    slow, fast, dense = dict(small(profile=known, watermark_bytes=16 * GIB).doubts(2)).values()
    chosen = dict(small(profile=known, watermark_bytes=6 * GIB).doubts(2))

    assert known == slow.profile == fast.profile, "which has no guesses"
    assert (8 * GIB, DENSE_MS / 2, "roofline") == (
        slow.watermark_bytes,
        slow.dense_ms,
        slow.attribution,
    )
    assert (32 * GIB, "bytes") == (fast.watermark_bytes, fast.attribution)
    assert (2 * DENSE_MS, "roofline") == (dense.dense_ms, dense.attribution)
    assert {6 * GIB} == {one.watermark_bytes for one in chosen.values()}


def _meshes(schedule, group):
    return list(dict.fromkeys(t.members for t in schedule.tasks if t.group == group))


def test_the_prediction_agrees_with_the_workers_themselves():
    """The full-scale model is a short cut; at small scale the workers' own code, on the same fabric
    with the same compute, must take the same time.
    """
    config = dict(PUBLISHED["qwen3-235b"]["config"]) | {
        "num_hidden_layers": 2,
        "hidden_size": 512,
        "num_experts": 8,
        "moe_intermediate_size": 512,
        "vocab_size": 512,
        "num_attention_heads": 8,
    }
    train, infer = TrainLayout(fsdp=1, ep=4), InferLayout(ep=2)
    rates = {"load": 20e9, "make": 5e9}
    with make_cluster(train, infer, profile="cx7_400") as cluster:
        options = {"config": config, "nics": (1, 1), "watermark_bytes": 64 * MIB}
        world = World(cluster, train, infer, compute=Timed(rates), **options)
        assert cluster.run(world.update(1)).ok
        world.check()
        start_us = cluster.now_us
        report = cluster.run(world.update(2))
        measured_ms = (cluster.now_us - start_us) / 1e3
        schedule = world.controller.schedule
    assert report.ok

    times = StageTimes({"load": 1 / rates["load"], "quantise": 1 / rates["make"]}, {}, 0.0)
    found = predict(schedule, times)

    assert found.total_ms == pytest.approx(measured_ms, rel=0.25)

"""The systems on machines that somebody has changed: other numbers, networks and halves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tep.apps.kvcache.simulate import Load, Plant, simulate
from tep.apps.moe.predict import Workload, predict
from tep.apps.rl import study
from tep.apps.rl.models import PUBLISHED, InferLayout, TrainLayout, model_from_config
from tep.apps.rl.predict import predict as predict_update
from tep.base.units import GiB
from tep.sim.profile import load_profile

CX7 = load_profile("cx7_400")


def uplink(times: int) -> dict[str, int]:
    """A spine that carries a part of what eight GPUs send."""
    return {"uplink_bps": 8 * CX7.wire_bps // times}


def dispatch_us(machine=CX7, **workload) -> float:
    workload = {"ep": 32, "nic": "cx7", "turns": 1} | workload
    return predict(Workload(**workload), machine=machine).dispatch_us


@pytest.mark.parametrize(
    ("changed", "least", "most"),
    [
        ({"wire_bps": CX7.wire_bps // 2}, 1.5, 2),
        ({"leaf_nodes": 8}, 0.999, 1.001),
        ({"leaf_nodes": 8, **uplink(4)}, 3, 4),
        ({"leaf_nodes": 8, "spine_ps": 5_000_000}, 1.01, 1.2),
        ({"rails": True, "host_gpus": 8}, 0.999, 1.001),
        ({"rails": True, "host_gpus": 8, "uplink_bps": CX7.wire_bps}, 2.5, 4),  # 7 of 8 cross
    ],
)
def test_changes_of_a_profile_cost_what_they_take(changed, least, most) -> None:
    """A spine that is no limit must cost nothing, and one of a quarter at most four times."""
    assert least <= dispatch_us(replace(CX7, **changed)) / dispatch_us() <= most


def test_a_slow_nic_holds_up_a_step() -> None:
    """Who asks for it decides by it whether to take a host out."""
    assert 2 < dispatch_us(slow_nic=4.0) / dispatch_us() < 5


def test_a_faster_half_helps_where_the_other_half_is_not_the_limit() -> None:
    """8 rollout workers receive what 16 training ranks send: their NICs are the limit."""
    config = dict(PUBLISHED["qwen3-235b"]["config"]) | {"num_hidden_layers": 12}
    schedule = study.Deployment(
        model=model_from_config(config, name="an eighth of qwen3-235b", source="its config.json"),
        train=TrainLayout(fsdp=2, pp=2, ep=4),
        infer=InferLayout(ep=4, replicas=2),
        watermark_bytes=6 * GiB,
    ).schedule()
    times = study.published_times("bytes")  # the least compute: the network shows all it may
    whole = load_profile("cx8_800")

    def update_ms(train, rollout) -> float:
        found = predict_update(schedule, times, profile=train, rollout_profile=rollout)
        return found.total_ms

    before, rollouts = update_ms(CX7, CX7), update_ms(CX7, whole)
    assert update_ms(whole, whole) <= rollouts < 0.8 * before
    assert update_ms(whole, CX7) == pytest.approx(before, rel=0.01)


@pytest.mark.parametrize("names", [("efa_4x100", "efa_2x200"), ("cx8_800", "cx7_400")])
def test_systems_run_on_two_kinds_of_machines(names) -> None:
    """Immediates are counted by the NICs of both sides: who counts by its own waits for ever."""
    one, other = map(load_profile, names)
    workload = Workload(ep=16, tokens=16, turns=1, nic="cx7" if one.ordered else "efa")
    mixed = predict(workload, machine=[one] * 8 + [other] * 8)
    whole = [predict(workload, machine=machine) for machine in (one, other)]
    plant = Plant(prefillers=1, decoders=1, profile=one, decode_profile=other)
    cluster = simulate(plant, Load(rate=4.0, duration_s=0.5, ntokens=(2048,)))

    assert min(found.dispatch_us for found in whole) < mixed.dispatch_us
    assert mixed.combine_us < 1.3 * max(found.combine_us for found in whole)
    assert cluster.completions
    assert [] == cluster.failed

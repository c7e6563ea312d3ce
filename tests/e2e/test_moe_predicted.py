"""Predicted latencies beside the published points, which tests/e2e/test_reproduce.py holds: their
shape between the points, what was fitted, what it costs.
"""

from __future__ import annotations

import itertools
import json

import pytest
from typer.testing import CliRunner

from tep.apps.moe import trial
from tep.apps.moe.kernels import gpu_numbers, load_gpu
from tep.apps.moe.predict import Workload, draw_indices, predict
from tep.apps.moe.trial import dense
from tep.cli import app
from tep.sim.clock import FabricEnv

LONG = pytest.mark.long


@pytest.mark.long
@pytest.mark.parametrize(("nic", "least", "most"), [("efa", 0.15, 0.5), ("cx7", -0.05, 0.1)])
def test_small_private_buffers_cost_efa_more(nic, least, most) -> None:
    """At a size Figure 11 does not show: EFA pays for late routes, ConnectX-7 hardly."""
    small, large = (
        predict(Workload(ep=32, nic=nic, private_tokens=private)).dispatch_us for private in (8, 64)
    )

    assert least < small / large - 1 < most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nic", "name", "values"),
    [
        ("cx7", "ep", (8, 16, 32)),
        ("efa", "tokens", (32, 64, 128)),
        pytest.param("cx7", "tokens", (16, 32, 64, 128, 256), marks=LONG),
        pytest.param("efa", "ep", (8, 16, 32, 64, 128), marks=LONG),
    ],
)
def test_between_the_published_sizes_nothing_jumps(nic, name, values) -> None:
    """The checked sizes are not the only ones: more ranks, or more tokens, never take less time."""
    found = [predict(Workload(**({"nic": nic, "ep": 16, "turns": 1} | {name: v}))) for v in values]
    for half in ("dispatch_us", "combine_us"):
        times = [getattr(one, half) for one in found]
        assert sorted(times) == times, half


def test_few_numbers_are_fitted() -> None:
    """With a free number for each row anything can be met, and nothing is predicted."""
    numbers = [
        (section, key, number["confidence"])
        for section, table in gpu_numbers().items()
        for key, number in table.items()
    ]

    assert 5 == sum(confidence == "fitted" for _, _, confidence in numbers)
    assert {"gpu", "proxy", "proxy_cx7", "proxy_efa"} == {section for section, _, _ in numbers}


def test_stages_of_the_published_step_add_up() -> None:
    """The kernel times are quoted whole; what is left for fixed work must not be negative."""
    gpu = load_gpu("cx7")

    assert gpu.launch_s() > 0
    for half in ("dispatch", "combine"):
        assert gpu.send_rest_s(half, 0.0) >= gpu.push_hidden
        assert gpu.receive_launch_s(half) > 0


def test_same_seed_same_prediction() -> None:
    """A prediction that moves by itself cannot be compared with another."""
    workload = Workload(ep=16, nic="efa", turns=1, skew=0.5)

    assert predict(workload) == predict(workload)
    assert predict(workload) != predict(Workload(ep=16, nic="efa", turns=1, skew=0.5, seed=1))


@pytest.mark.slow
def test_skew_costs_and_more_nics_pay() -> None:
    """The two knobs that a planner turns first must turn the right way."""
    even = predict(Workload(ep=16, turns=1))
    skewed = predict(Workload(ep=16, turns=1, skew=0.7))

    # The median rank gets fewer tokens than before; the step waits for the one that gets most.
    assert even.p99_us[0] < skewed.p99_us[0]
    assert even.dispatch_us > predict(Workload(ep=16, turns=1, nics=2)).dispatch_us


@pytest.mark.slow
def test_one_slow_nic_holds_up_everybody() -> None:
    """All wait for the slowest: with 16 ranks one NIC of half the speed doubles the step."""
    even, slow = (predict(Workload(ep=16, turns=2, slow_nic=times)) for times in (1.0, 2.0))

    assert 1.5 * even.p99_us[1] < slow.p99_us[1] < 2.5 * even.p99_us[1]
    assert slow.combine_us > 1.2 * even.combine_us


def test_parts_add_up_to_the_latency() -> None:
    """A breakdown that leaves something out explains the wrong thing."""
    found = predict(Workload(ep=16, turns=1))

    assert found.dispatch_us == pytest.approx(sum(found.dispatch_parts.values()), rel=0.02)
    assert found.combine_us == pytest.approx(sum(found.combine_parts.values()), rel=0.02)


def test_the_command_prints_what_is_predicted() -> None:
    """The command line is where most people will meet the model."""
    small = ["moe", "--ep", "4", "--gpus", "2", "--nic", "efa", "--turns", "1"]
    plain = CliRunner().invoke(app, small)
    document = json.loads(CliRunner().invoke(app, [*small, "--json"]).stdout)

    assert 0 == plain.exit_code, plain.output
    assert f"{document['dispatch']['p50_us']:.1f}" in plain.stdout
    assert {"send kernel", "proxy", "first byte", "NIC", "receive kernel"} == set(
        document["combine"]["parts_us"]
    )
    assert "predicted" == document["kind"]
    for half in ("dispatch", "combine"):
        low, high = document[half]["interval_us"]
        assert low < document[half]["p50_us"] < high
    without = json.loads(CliRunner().invoke(app, [*small, "--guessed", "1", "--json"]).stdout)
    assert 2 * [without["combine"]["p50_us"]] == without["combine"]["interval_us"]


def test_the_command_says_what_was_fitted_to_the_published_point() -> None:
    """An error of nothing at a point that was fitted to looks like a success."""
    kinds = []
    for asked in (
        "--ep 16 --turns 1",
        "--ep 16 --turns 1 --nic efa_2x200",
        "--ep 16 --turns 1 --topk 4",
        "--ep 8 --prefill",
        "--ep 4 --nic cx8_800 --turns 1",
    ):
        words = ["moe", *asked.split(), "--guessed", "1", "--json"]
        kinds.append(json.loads(CliRunner().invoke(app, words).stdout)["kind"])

    assert ["fitted", "predicted", "predicted", "fitted", "extrapolated"] == kinds


def test_the_command_compares_and_checks() -> None:
    """A researcher asks first how other schemes do, and whether the results are right."""
    small = ["moe", "--ep", "4", "--gpus", "2", "--turns", "1", "--compare", "--json"]
    rows = json.loads(CliRunner().invoke(app, small).stdout)
    checked = CliRunner().invoke(app, ["moe", "--check", "3", "--seed", "5", "--json"])

    assert {"per-token writes", "padded, dense"} < {row["name"] for row in rows}
    for row, half in itertools.product(rows, ("dispatch", "combine")):
        low, high = row[f"{half}_interval_us"]
        assert low <= row[f"{half}_us"] <= high > low, row
    assert {"predicted"} == {row["kind"] for row in rows}
    assert {"layers": 3, "seed": 5, "wrong": 0} == json.loads(checked.stdout)


def test_the_command_says_which_layer_is_wrong(monkeypatch) -> None:
    """A mismatch without the seed that shows it again is a rumour."""
    monkeypatch.setattr(trial, "dense", lambda *a: dense(*a) ^ 1)
    found = CliRunner().invoke(app, ["moe", "--check", "3", "--seed", "5"])

    assert 1 == found.exit_code
    assert "seed 5: Trial(num_experts=" in found.output


def test_drawn_choices_keep_nothing_of_the_other_experts() -> None:
    """A view of all experts' order is held by each rank: 8 MiB of a prefill step."""
    for skew in (0.0, 1.0):
        chosen = draw_indices(Workload(ep=8, tokens=16, skew=skew))(0, 0)

        assert (16, 8) == chosen.shape
        assert chosen.base is None


def test_a_row_costs_few_events() -> None:
    """Sweeps of hundreds of configurations are what the simulator is for; events are what it costs.

    A rank of EP16 with 8 on its node sends 15 routes, 8 bursts, 8 results and 30 barriers.
    """
    events = 0
    with pytest.MonkeyPatch.context() as patch:
        call_at = FabricEnv.call_at

        def counted(self, *args):
            nonlocal events
            events += 1
            return call_at(self, *args)

        patch.setattr(FabricEnv, "call_at", counted)
        predict(Workload(ep=16, turns=1))

    assert events < 3 * 16 * (15 + 8 + 8 + 30)

"""The cost of large simulations in counts that a machine's load does not change: events, passes.

`python -m tests.bench.bench_scale` prints seconds and memory of the full sizes.
"""

from __future__ import annotations

import cProfile
import json
import subprocess
import sys

import pytest

from tep.apps.kvcache.simulate import Load, Plant, simulate
from tep.apps.moe import proxy
from tep.apps.moe.config import Routes
from tep.apps.moe.predict import Workload
from tep.apps.moe.predict import predict as predict_moe
from tep.apps.rl import study
from tep.apps.rl.models import load_model
from tep.apps.rl.predict import StageTimes, predict
from tep.base.errors import UsageError
from tests.bench.bench_scale import alltoall, counted, moe_step, select


def kvcache(seconds: int) -> str:
    plant = Plant(prefillers=1, decoders=1)
    return str(simulate(plant, Load(rate=2.0, duration_s=seconds, ntokens=(8192,))))


def weights(infers: int) -> str:
    """Predict an update with stage times of its own schedule; the published ones cost ten times."""
    train, infer = study.train_layout(2 * infers), study.infer_layout(infers)
    model = load_model("qwen3-235b")
    schedule = study.Deployment(model=model, train=train, infer=infer).schedule()
    return str(predict(schedule, StageTimes.of(schedule)))


@pytest.mark.parametrize(
    ("work", "size", "events", "passes", "calls"),
    [
        (moe_step, 16, 2103, 52, 326_815),
        (alltoall, 64, 2694, 6, 611_816),
        (weights, 4, 13_290, 560, 1_934_525),
        (kvcache, 1, 14_167, 475, 1_503_407),
    ],
)
def test_no_more_events_than_when_this_was_written(work, size, events, passes, calls) -> None:
    """Large clusters stay affordable only while a row, or a page, costs no event of its own,
    and an event costs no more calls than it does.
    """
    profile = cProfile.Profile()
    with profile:
        _, seen_events, seen_passes = counted(lambda: work(size))
    seen_calls = sum(entry.callcount for entry in profile.getstats())

    assert seen_events <= 1.05 * events
    assert seen_passes <= 1.05 * passes
    assert seen_calls <= 1.05 * calls


def test_a_table_of_all_pairs_of_ranks_is_made_once_for_all_ranks(monkeypatch) -> None:
    """One at each rank takes memory as the third power of their number: 1.4 GiB at 256."""
    made = []

    def routes(*args: object) -> Routes:
        made.append(args)
        return Routes(*args)

    monkeypatch.setattr(proxy, "Routes", routes)
    found = predict_moe(Workload(ep=8, turns=3))

    assert found.dispatch_us > 0
    assert 0 < len(made) <= 2 * 3  # once in a turn, of warm-up too, and not once at each rank


def test_the_command_measures_a_run_and_names_what_it_does_not_know() -> None:
    """A table of scale that nobody can make any more proves nothing."""
    words = ["-m", "tests.bench.bench_scale", "--json", "--only", "of 64 RANKS"]
    found = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, timeout=300
    )
    (run,) = json.loads(found.stdout)["runs"]

    assert "all-to-all of 64 ranks" == run["what"]
    assert run["events"] <= 1.05 * 2694
    assert run["cpu_s"] > 0
    assert run["memory_gib"] > 0
    with pytest.raises(UsageError, match="no run is called 'of 65 ranks'; there are: KvCache"):
        select(["of 65 ranks"])

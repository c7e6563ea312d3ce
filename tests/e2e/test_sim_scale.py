"""What large simulations cost, by counts that no load of a machine moves: events, and passes.

`python tests/bench/bench_scale.py` prints seconds and memory of the full sizes.
"""

from __future__ import annotations

from functools import partial

import pytest

from tep.apps.kvcache.simulate import Load, Plant, simulate
from tep.apps.moe.predict import Workload, predict
from tep.reproduce.whatif import Machine, effects
from tep.sim.clock import FabricEnv
from tep.sim.profile import load_profile
from tep.sim.timing import TimingFabric
from tests.bench.bench_scale import alltoall


def moe() -> None:
    predict(Workload(ep=16, turns=1))


def rl() -> None:
    machine = Machine(profile=load_profile("cx7_400"))
    effects(machine, machine, ["rl"])


def kvcache() -> None:
    plant = Plant(prefillers=1, decoders=1)
    simulate(plant, Load(rate=2.0, duration_s=2.0, ntokens=(8192,)))


@pytest.mark.parametrize(
    ("work", "events", "passes"),
    [
        (moe, 2576, 52),
        (partial(alltoall, 64), 5795, 7),
        (rl, 2 * 5486, 2 * 65),
        (kvcache, 14_886, 0),
    ],
    ids=["moe", "alltoall", "rl", "kvcache"],
)
def test_no_more_events_than_when_this_was_written(work, events, passes, monkeypatch) -> None:
    """A thousand engines stay affordable only while a row, or a page, costs no event of its own."""
    counted = {"call_at": 0, "_settle": 0}

    def count(owner: type, name: str) -> None:
        inner = getattr(owner, name)

        def outer(*args: object) -> object:
            counted[name] += 1
            return inner(*args)

        monkeypatch.setattr(owner, name, outer)

    count(FabricEnv, "call_at")
    count(TimingFabric, "_settle")
    work()

    assert counted["call_at"] <= 1.05 * events
    assert counted["_settle"] <= 1.05 * passes

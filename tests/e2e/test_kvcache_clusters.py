"""Whole simulated clusters: a day of comings and goings, and a large one under load."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from tep.apps.kvcache.blocks import Patience
from tep.apps.kvcache.layout import KvBuffer, KvLayout
from tep.apps.kvcache.prefiller import Prefiller
from tep.apps.kvcache.simulate import EVENTS, Load, Plant, Scenario, World, simulate
from tep.apps.kvcache.ttft import PUBLISHED
from tep.sim import Chaos

DAY_S = 86_400.0
LAYER_S = 20.0  # of a day: changes shall meet requests under way


def draw_day(seed: int, requests: int, changes: int) -> Scenario:
    """Draw a day on which members come and go; a request takes minutes."""
    dice = random.Random(f"kvcache day {seed}")
    patience = Patience(
        beat_s=LAYER_S,
        silent_s=4.5 * LAYER_S,
        cancel_s=LAYER_S,
        request_s=90 * LAYER_S,
    )
    plant = Plant(
        prefillers=4,
        decoders=4,
        prefill_tp=2,
        decode_tp=1,
        chaos=Chaos.draw(seed),
        layer_s=LAYER_S,
        npages=64,
        attempts_max=12,  # a request may meet many that die, on a day when everybody does
        patience=patience,
    )
    load = Load(
        rate=requests / DAY_S, duration_s=DAY_S, ntokens=range(1, 25), max_tokens=4, seed=seed
    )
    kinds = ("join", "join", *EVENTS[2:])
    events = sorted((dice.uniform(0, DAY_S), dice.choice(kinds)) for _ in range(changes))
    return Scenario(plant=plant, load=load, events=tuple(events))


@pytest.mark.slow
def test_a_day_of_200_joins_and_departures_loses_nothing() -> None:
    """Scaling is the daily life of a cluster; each change that loses a request is an outage."""
    day = draw_day(3, 250, 200)
    report, violations = day.run()

    assert [] == violations
    assert len(report.completions) > 200
    assert all(done.ok for done in report.completions)
    assert 200 == day.happened.total()
    assert min(day.happened.values()) >= 4
    assert report.simulated_s > 86_000
    assert sum(done.pages_sent for done in report.completions) > 400
    assert any(done.attempts > 1 for done in report.completions)


def test_an_hour_in_which_single_nics_die_loses_nothing() -> None:
    """A NIC that dies must cost neither a byte nor its member: other NICs carry its pages."""
    deaths = tuple((30.0 + 110.0 * k, "NIC death") for k in range(32))
    day = draw_day(11, 60, 0)
    load = replace(day.load, rate=60 / 3600.0, duration_s=3600.0)
    hour = replace(day, load=load, events=deaths, happened=Counter())
    report, violations = hour.run()

    assert [] == violations
    assert len(report.completions) > 40
    assert all(done.ok for done in report.completions)
    assert hour.happened["NIC death of a prefiller"] >= 5
    assert hour.happened["NIC death of a decoder"] >= 4


@pytest.mark.slow
def test_engines_without_requests_cost_next_to_nothing() -> None:
    """A cluster costs CPU by its pages; with 200 engines it must not cost more than with 48.

    The bound is loose, for machines that do other things as well: tests/bench/bench_scale.py
    measures.
    """
    plant = Plant(prefillers=25, decoders=25)
    report = simulate(plant, Load(rate=20, duration_s=0.12, ntokens=(8192,), max_tokens=1))

    assert 200 == report.engines
    assert [] == report.failed
    requests = len(report.completions)
    assert requests > 1
    assert (94 * 4 + 1) * requests == report.writes
    assert (94 * 64 * 4 + 1) * requests * 2 - requests == report.rows
    assert report.cpu_s / report.writes < 1e-2
    assert report.rss_bytes < 1 << 30


def test_a_crash_under_load_costs_time_and_no_request() -> None:
    """When a prefiller dies, its requests must be computed again elsewhere.

    Eight layers compute for as long as the model's 94, and have fewer pages to simulate.
    """
    times = 94 / 8
    eight = replace(
        PUBLISHED,
        layout=KvLayout("eight layers", 128, (KvBuffer("kv", 8, 4, 256, planes=2),)),
        layer_s=times * PUBLISHED.layer_s,
        token_s=times * PUBLISHED.token_s,
        pair_s=times * PUBLISHED.pair_s,
    )
    plant = Plant(prefillers=3, decoders=2, prefill_tp=1, decode_tp=1, model=eight)
    load = Load(rate=8, duration_s=1.6, ntokens=(4096,), max_tokens=1)

    def strike(world: World) -> None:
        busy = [side.name for side in world.alive(Prefiller) if side.njobs]
        world.crash(busy[0])

    calm = simulate(plant, load)
    struck = simulate(plant, load, [(1.5, strike)])

    assert [] == calm.failed
    assert [] == struck.failed
    assert len(calm.completions) == len(struck.completions)
    assert 1 == max(done.attempts for done in calm.completions)
    assert 2 == max(done.attempts for done in struck.completions)
    noticed_s = plant.patience.silent_s - plant.patience.beat_s  # its last beat may be this old
    assert struck.ttft_s(1.0) > calm.ttft_s(1.0) + noticed_s

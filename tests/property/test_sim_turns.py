"""Turns that the simulated driver leaves out: nothing else may be different."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tep import Pages, ScatterDst
from tep.apps.kvcache.simulate import Load, Plant, simulate
from tep.engine.machine import Machine
from tep.sim import Cluster, run
from tep.sim.row_log import RowLog
from tests.support.inside import worker_of
from tests.world.oracle import Outcome, replay

_ROOM = 1 << 20
_PROFILES = "cx7_400", "efa_2x200", "efa_4x100", "efa_2x200_congested"


@dataclass(frozen=True)
class Request:
    """One request of one of three engines, some time after the start."""

    after_ns: int
    source: int
    rows: int
    nbytes: int
    scatter: bool


requests = st.lists(
    st.builds(
        Request,
        after_ns=st.integers(0, 4_000),
        source=st.integers(0, 2),
        rows=st.integers(1, 12),
        nbytes=st.sampled_from([1, 64, 4096, 65536]),
        scatter=st.booleans(),
    ),
    min_size=2,
    max_size=16,
)


def _story(
    profile: str, wanted: list[Request], *, row_log: bool = True
) -> tuple[list[str], list[tuple[int, int]], int]:
    """Record every row, the end of each request and of its immediates, and all turns."""
    ends: list[tuple[int, int]] = []
    with Cluster(3, profile=profile, row_log=row_log) as cluster:
        regions = [engine.reg_mr(np.zeros(_ROOM, np.uint8)) for engine in cluster.engines]

        async def one(index: int, asked: Request) -> None:
            await asyncio.sleep(asked.after_ns / 1e9)
            engine, (mr, _) = cluster.engines[asked.source], regions[asked.source]
            others = [k for k in range(3) if k != asked.source]
            got = []
            if asked.scatter:
                dsts = [
                    ScatterDst(asked.nbytes, 0, (regions[others[k % 2]][1], k * asked.nbytes))
                    for k in range(asked.rows)
                ]
                got = [
                    cluster.engines[peer].expect_imm_count(index, len(range(k, asked.rows, 2)))
                    for k, peer in enumerate(others[: asked.rows])
                ]
                sent = engine.submit_scatter(mr, dsts, index)
            else:
                peer, where = others[0], Pages(np.arange(asked.rows))
                to = (regions[peer][1], where)
                got = [cluster.engines[peer].expect_imm_count(index, asked.rows)]
                sent = engine.submit_paged_writes(asked.nbytes, (mr, where), to, imm=index)
            for handle in (*got, sent):
                await handle
                ends.append((index, cluster.env.now))

        async def main() -> None:
            await asyncio.gather(*(one(index, asked) for index, asked in enumerate(wanted)))

        run(main(), cluster.env)
        turns = sum(worker_of(engine).steps for engine in cluster.engines)
        records = cluster.row_log.records() if row_log else ()
        return [str(record) for record in records], ends, turns


@settings(max_examples=25)
@given(st.sampled_from(_PROFILES), requests)
def test_turns_left_out_change_no_time(profile: str, wanted: list[Request]) -> None:
    """An engine that is not turned where a turn would find nothing must meet every row, and end
    every request, at the very picosecond at which it does if no turn is left out.
    """
    rows, ends, turns = _story(profile, wanted)
    at_rest, Machine.at_rest = Machine.at_rest, lambda _: False
    try:
        all_rows, all_ends, all_turns = _story(profile, wanted)
    finally:
        Machine.at_rest = at_rest

    assert all_rows == rows
    assert all_ends == ends
    assert turns < all_turns


def _scenarios(seeds: range) -> list[tuple[Outcome, str]]:
    logs = [RowLog() for _ in seeds]
    outcomes = [replay(seed, row_log=log) for seed, log in zip(seeds, logs, strict=True)]
    return [(outcome, log.digest()) for outcome, log in zip(outcomes, logs, strict=True)]


def test_turns_left_out_change_no_drawn_run(monkeypatch) -> None:
    """On the chaos fabric each turn is a draw, and events of one instant are shuffled: a place that
    is given to the wrong kick, or a run that ends too early, makes another run of the seed.
    """
    found = _scenarios(range(40))
    monkeypatch.setattr(Machine, "at_rest", lambda _: False)

    assert _scenarios(range(40)) == found


@settings(max_examples=5)
@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([0.0, 0.002]), st.integers(0, 99))
def test_immediates_counted_early_change_no_time(
    prefillers: int, decoders: int, gather_s: float, seed: int
) -> None:
    """On the flow fabric a turn that would only raise a count is left out: each request must end
    when it ends with every such turn.
    """
    plant = Plant(prefillers=prefillers, decoders=decoders, ack_gather_s=gather_s, npages=64)
    load = Load(rate=20.0, duration_s=0.15, ntokens=(100, 1000), seed=seed)
    count_early, answers = Machine.count_early, list[bool]()

    def noted(machine: Machine, imm: int, count: int) -> bool:
        answers.append(count_early(machine, imm, count))
        return answers[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "count_early", noted)
        early = simulate(plant, load)
        patch.setattr(Machine, "count_early", lambda *_: False)
        turned = simulate(plant, load)

    assert (turned.completions, turned.simulated_s) == (early.completions, early.simulated_s)
    assert not early.rows or {True, False} == set(answers)

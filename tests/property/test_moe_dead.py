"""A rank dies at any moment: its peers get an error that names it, or go on without it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tep
from tep.apps.moe.trial import Trial, Wrong, run_ranks, run_turn
from tep.sim import KillNic

VICTIM = 1

# As in test_moe_layer.py: an example is a whole cluster's life.
FEW = settings(max_examples=max(5, settings().max_examples // 12))


def run_with_death(trial: Trial, at_us: float) -> list[tuple[int, int, object]]:
    """(rank, step, what came of it) of the survivors; the victim's NICs and its program end."""
    seen: list[tuple[int, int, object]] = []
    tasks: dict[int, asyncio.Task[None]] = {}

    async def work(alltoall) -> None:
        tasks[alltoall.rank] = asyncio.current_task()
        while alltoall.step < trial.turns:
            step, found = alltoall.step, None
            try:
                found = await run_turn(trial, alltoall, step)
            except tep.FabricError as error:
                found = error
            if alltoall.rank != VICTIM:
                seen.append((alltoall.rank, step, found))
            elif found is not None:
                return

    with trial.cluster() as cluster:
        for nic in range(trial.nics):
            cluster.at(at_us, KillNic(cluster.engines[VICTIM].name, nic))
        cluster.at(at_us, lambda: VICTIM in tasks and tasks[VICTIM].cancel())
        cluster.run(run_ranks(trial, cluster.engines, work))
    return seen


def trials(mode: str) -> st.SearchStrategy[Trial]:
    shapes = [{}, {"node_size": 2}, {"world": 6, "node_size": 2}]
    return st.builds(
        lambda shape, seed: Trial(**shape, seed=seed, turns=4, on_dead=mode, timeout_s=1.0),
        st.sampled_from(shapes),
        st.integers(0, 2**32 - 1),
    )


moments = st.floats(0, 60, allow_nan=False).map(lambda us: round(us, 2))


@FEW
@given(trials("error"), moments)
def test_survivors_get_an_error_that_names_the_dead_and_the_next_step_works(trial, at_us) -> None:
    """A hang, or an error that names nobody, ends a job of a thousand ranks for one of them."""
    seen = run_with_death(trial, at_us)
    failed = [found for _, _, found in seen if isinstance(found, tep.FabricError)]

    assert [] == [found for _, _, found in seen if isinstance(found, Wrong)]
    assert {"DEAD_RANK"} >= {error.code for error in failed}
    assert all(f"dead: rank {VICTIM} " in str(error) for error in failed)
    # Each survivor hears of it once, whenever that is.
    for rank in {rank for rank, _, found in seen if isinstance(found, tep.FabricError)}:
        assert 1 == sum(r == rank and f is not None for r, _, f in seen)
    last = {rank: found for rank, step, found in seen if step == trial.turns - 1}
    assert len(last) == trial.world - 1 or failed


@FEW
@given(trials("mask"), moments)
def test_survivors_go_on_without_the_dead(trial, at_us) -> None:
    """Masked means: no error, and in no output a byte that the dense layer without it lacks."""
    seen = run_with_death(trial, at_us)

    assert [] == [found for _, _, found in seen if found is not None]
    steps = {(rank, step) for rank, step, _ in seen}
    ranks = [rank for rank in range(trial.world) if rank != VICTIM]
    assert steps == {(rank, step) for rank in ranks for step in range(trial.turns)}


@pytest.mark.parametrize("mode", ["error", "mask"])
def test_a_nic_that_dies_is_not_a_rank_that_dies(mode) -> None:
    """With a NIC left the rank lives; the turn is lost, or repeated, and nobody is called dead."""
    trial = Trial(seed=3, turns=4, on_dead=mode, timeout_s=1.0)
    codes: list[str] = []
    alive: list[bool] = []

    async def work(alltoall) -> None:
        while alltoall.step < trial.turns:
            try:
                assert await run_turn(trial, alltoall, alltoall.step) is None
            except (tep.FabricError, tep.WaitTimeout) as error:
                codes.append(getattr(error, "code", ""))
        alive.append(bool(alltoall.alive.all()))

    with trial.cluster() as cluster:
        cluster.at(4.0, KillNic(cluster.engines[VICTIM].name, 0))
        cluster.run(run_ranks(trial, cluster.engines, work))

    assert [True] * trial.world == alive
    assert "DEAD_RANK" not in codes
    assert mode == "error" or codes == []


def test_a_silent_rank_ends_in_a_time_out_and_is_named() -> None:
    """A rank whose program hangs answers no call; the others must not wait for ever."""
    trial = Trial(seed=1, turns=2, timeout_s=0.01)
    said: dict[int, str] = {}
    over = asyncio.Event()

    async def work(alltoall) -> None:
        if alltoall.rank == VICTIM:
            await over.wait()
            return
        try:
            await run_turn(trial, alltoall, 0)
        except tep.FabricError as error:
            said[alltoall.rank] = str(error)
        if len(said) == trial.world - 1:
            over.set()

    with trial.cluster() as cluster:
        cluster.run(run_ranks(trial, cluster.engines, work))

    assert {0, 2, 3} == set(said)
    assert all(f"dead: rank {VICTIM} " in text for text in said.values())

"""A rank dies at any moment: the others get an error that names it, and go on as a new group."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tep
from tep.apps import moe
from tep.apps.moe.trial import Trial, Wrong, run_ranks, run_turn
from tep.sim import KillNic

VICTIM = 1

# As in test_moe_layer.py: an example is a whole cluster's life.
FEW = settings(max_examples=max(5, settings().max_examples // 12))


async def play(trial: Trial, alltoall: moe.AllToAll) -> Wrong | tep.TepError | None:
    """All turns of a rank, until one fails or is wrong."""
    for turn in range(trial.turns):
        try:
            found = await run_turn(trial, alltoall, turn)
        except (tep.FabricError, tep.WaitTimeout) as error:
            return error
        if found is not None:
            return found
    return None


async def go_on(cluster: tep.sim.Cluster, trial: Trial, ranks: list[int]) -> list[object]:
    """Run a layer on these ranks alone; return what came of each."""
    world = len(ranks)
    trial = replace(
        trial, world=world, num_experts=2 * world, node_size=1, imm_base=trial.imm_base + (1 << 28)
    )

    async def one(rank: int, group: moe.Group) -> object:
        async with moe.AllToAll(cluster.engines[rank], group, **trial.shape) as alltoall:
            return await play(trial, alltoall)

    return await asyncio.gather(*map(one, ranks, moe.local_groups(world)))


def trials() -> st.SearchStrategy[Trial]:
    shapes = [{}, {"node_size": 2}, {"world": 6, "num_experts": 12, "node_size": 2}]
    return st.builds(
        lambda shape, seed: Trial(**shape, seed=seed, turns=4, timeout_s=1.0),
        st.sampled_from(shapes),
        st.integers(0, 2**32 - 1),
    )


moments = st.floats(0, 60, allow_nan=False).map(lambda us: round(us, 2))


@pytest.mark.slow
@FEW
@given(trials(), moments)
def test_survivors_get_an_error_that_names_the_dead_and_a_new_group_works(trial, at_us) -> None:
    """A hang, or an error that names nobody, ends a job of a thousand ranks for one of them."""
    seen: dict[int, object] = {}
    ended_s: list[float] = []
    tasks: dict[int, asyncio.Task[None]] = {}
    others = [rank for rank in range(trial.world) if rank != VICTIM]

    async def work(alltoall) -> None:
        tasks[alltoall.rank] = asyncio.current_task()
        seen[alltoall.rank] = await play(trial, alltoall)
        if seen[alltoall.rank] is not None:
            ended_s.append(asyncio.get_running_loop().time())
            with pytest.raises(type(seen[alltoall.rank]), match="dead or silent: rank 1 "):
                await alltoall.dispatch_recv()  # as every later call

    async def main(cluster) -> list[object]:
        await run_ranks(trial, cluster.engines, work)
        return await go_on(cluster, trial, others)

    with trial.cluster() as cluster:
        for nic in range(trial.nics):
            cluster.at(at_us, KillNic(cluster.engines[VICTIM].name, nic))
        cluster.at(at_us, lambda: VICTIM in tasks and tasks[VICTIM].cancel())
        after = cluster.run(main(cluster))

    failed = [seen[rank] for rank in others if seen[rank] is not None]
    assert [] == [error for error in failed if getattr(error, "code", "") != "DEAD_RANK"]
    assert all(f"dead or silent: rank {VICTIM} " in str(error) for error in failed)
    assert all(error.peer == cluster.engines[VICTIM].name for error in failed)
    # One wait; then the roll is called, while NICs give up on what they have for the dead.
    assert max(ended_s, default=0) < 3 * trial.timeout_s, ended_s
    assert [None] * len(others) == after


def test_nothing_is_written_to_memory_that_was_given_back() -> None:
    """Whoever uses the arena for something else would find late tokens in it."""
    trial = Trial(seed=3, timeout_s=1.0)
    mine: dict[int, moe.AllToAll] = {}

    async def work(alltoall) -> None:
        mine[alltoall.rank] = alltoall
        if alltoall.rank != VICTIM:
            assert "DEAD_RANK" == (await play(trial, alltoall)).code

    async def late(cluster) -> None:
        await run_ranks(trial, cluster.engines, work)
        assert all(one._mr.closed for one in mine.values())
        arena = mine[2]._payload.arena
        arena[:] = 7
        mr, _ = cluster.engines[0].reg_mr(arena.copy() + 1)
        with pytest.raises(tep.FabricError):
            await cluster.engines[0].submit_single_write(64, (mr, 0), (mine[2]._desc, 0))
        assert (arena == 7).all()

    with trial.cluster() as cluster:
        cluster.run(late(cluster))


def test_a_nic_that_dies_is_not_a_rank_that_dies() -> None:
    """With a NIC left the rank lives: nobody is called dead, and the same ranks can go on."""
    trial = Trial(seed=3, turns=4, timeout_s=1.0)
    codes: list[str] = []

    async def work(alltoall) -> None:
        error = await play(trial, alltoall)
        codes.append(getattr(error, "code", ""))

    async def main(cluster) -> list[object]:
        await run_ranks(trial, cluster.engines, work)
        return await go_on(cluster, trial, list(range(trial.world)))

    with trial.cluster() as cluster:
        cluster.at(4.0, KillNic(cluster.engines[VICTIM].name, 0))
        after = cluster.run(main(cluster))

    assert "DEAD_RANK" not in codes
    assert [None] * trial.world == after


def test_a_silent_rank_ends_in_a_time_out_and_is_named() -> None:
    """A rank whose program hangs does not say that it has ended; the others must not wait on."""
    trial = Trial(seed=1, turns=2, timeout_s=0.01)
    said: dict[int, str] = {}
    over = asyncio.Event()

    async def work(alltoall) -> None:
        if alltoall.rank == VICTIM:
            await over.wait()
            said[VICTIM] = (await play(trial, alltoall)).code
            return
        said[alltoall.rank] = str(await play(trial, alltoall))
        if len(said) == trial.world - 1:
            over.set()

    with trial.cluster() as cluster:
        cluster.run(run_ranks(trial, cluster.engines, work))

    assert "ENDED" == said.pop(VICTIM)  # it wakes up too late, and is told so
    assert {0, 2, 3} == set(said)
    assert all(f"dead or silent: rank {VICTIM} " in text for text in said.values())

"""Weight updates on the chaos fabric: every byte, several versions, deaths, joins and restarts."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

import tep
from tep.apps.rl.compute import Compute
from tep.apps.rl.ports import Kind, Regions, make_imm
from tep.apps.rl.rollout import RolloutWorker
from tep.apps.rl.training import TrainingWorker
from tests.unit.apps.rl_worlds import InferLayout, Timed, TrainLayout, World, make_cluster


def some(first, *others):
    """Make parameters of tests; the first, or the first few, run always."""
    return [*first, *(pytest.param(other, marks=pytest.mark.long) for other in others)]


TRAIN = TrainLayout(fsdp=2, ep=2)
INFER = InferLayout(ep=2, replicas=2)


@pytest.mark.parametrize("seed", some([0, 1], 2, 3, 4))
def test_two_updates_land_byte_for_byte(seed):
    """Weights that differ in one byte from what was trained poison every rollout after them."""
    with make_cluster(TRAIN, INFER, seed=seed) as cluster:
        world = World(cluster, TRAIN, INFER)

        async def main():
            for version in (1, 2):
                report = await world.update(version)
                assert report.ok, report.table()
                assert {"updated"} == {p.outcome for p in report.peers if "rank" not in p.name}
                world.check()
                assert {version} == {actor.serving for actor in world.actors.values()}
            return report

        report = cluster.run(main())

    assert not report.rerouted
    assert max(r.peak_bytes for r in report.trains) <= 1 << 20


def _clean_us(seed, **options):
    """Return the time of an undisturbed first update, simulated microseconds."""
    with make_cluster(TRAIN, INFER, seed=seed, spare=1, **options) as cluster:
        world = World(cluster, TRAIN, INFER)
        assert cluster.run(world.update(1)).ok
        return cluster.now_us


@pytest.mark.parametrize("seed", some([0], 1, 2))
def test_a_slow_rank_is_not_written_over(seed):
    """A fast peer's next shard in memory that a slow rank still reads mixes two parameters; and no
    mesh group begins before all ranks have gathered the one before.
    """
    with make_cluster(TRAIN, INFER, seed=seed) as cluster:
        world = World(cluster, TRAIN, INFER, watermark_bytes=220_000, bundle_bytes=0)
        world.workers[seed].compute = Timed({"make": 2e9, "load": 2e9})
        report = cluster.run(world.update(1))

    assert report.ok, report.table()
    world.check()
    everybody = [span for r in report.trains for span in r.spans]
    experts = [s.stop_s for s in everybody if s.track == "gather" and "experts.w" in s.name]
    dense = [s.start_s for s in everybody if s.track == "load" and "experts.w" not in s.name]
    assert max(experts) <= min(dense)


@pytest.mark.parametrize("fraction", some([0.05, 0.6, 0.98], 0.3, 0.9))
def test_a_rollout_worker_that_dies_takes_nobody_with_it(fraction):
    """One preempted inference node must not cost an update: the others get the version, the report
    names the dead one, and after its restart the next update reaches it again.
    """
    at_us = _clean_us(3) * fraction
    with make_cluster(TRAIN, INFER, seed=3, spare=1) as cluster:
        world = World(cluster, TRAIN, INFER)
        dead = TRAIN.world + 1
        cluster.at(at_us, lambda: cluster.restart(dead))

        async def main():
            report = await world.update(1)
            assert report.ok, report.error
            assert "lost" == report.outcome("rollout1"), report.table()
            alive = {"rollout0", "rollout2", "rollout3"}
            assert {"updated"} == {report.outcome(name) for name in alive}
            world.check(alive)
            reborn = RolloutWorker(cluster.engines[dead], world.rollouts[1])
            world.actors["rollout1"] = reborn
            assert reborn.serving is None
            world.controller.add(reborn)
            report = await world.update(2)
            assert report.ok, report.table()
            assert report.rerouted
            assert {"updated"} == {report.outcome(name) for name in world.actors}
            world.check()

        cluster.run(main())


@pytest.mark.parametrize("fraction", some([0.3, 0.9], 0.05, 0.6))
def test_a_training_rank_that_fails_ends_the_update_everywhere(fraction):
    """A half-written model that is served is worse than none: nobody serves anything, no survivor
    hangs, and the next update, with the rank restarted, lands byte for byte.
    """
    at_us = _clean_us(4) * fraction
    with make_cluster(TRAIN, INFER, seed=4, spare=1) as cluster:
        world = World(cluster, TRAIN, INFER)
        cluster.at(at_us, lambda: cluster.restart(2))

        async def main():
            report = await world.update(1)
            assert not report.ok
            assert "training rank" in report.error
            assert {"aborted"} == {p.outcome for p in report.peers}, report.table()
            assert {None} == {actor.serving for actor in world.actors.values()}
            for actor in world.actors.values():
                with pytest.raises(tep.UsageError, match="no whole version"):
                    actor.weights()
            assert "closed" in (await world.update(2)).error
            again = TrainingWorker(cluster.engines[2], world.trains[2], world.shards[2])
            world.controller.replace(2, again)
            report = await world.update(3)
            assert report.ok, report.table()
            world.check()
            assert {3} == {actor.serving for actor in world.actors.values()}

        cluster.run(main())


@pytest.mark.parametrize("node", [1, TRAIN.world + 1])
def test_a_silent_death_is_an_end_too(node):
    """A machine that loses power says nothing: its NICs are gone, its process answers nobody. The
    update ends all the same, as it does for a crash that is noticed.
    """
    at_us = _clean_us(6) * 0.5
    with make_cluster(TRAIN, INFER, seed=6) as cluster:
        world = World(cluster, TRAIN, INFER)

        def die():
            for nic in range(2):
                cluster.kill_nic(node, nic)

        cluster.at(at_us, die)
        report = cluster.run(world.update(1))

    if node < TRAIN.world:
        assert not report.ok
        assert {None} == {actor.serving for actor in world.actors.values()}
    else:
        assert report.ok, report.error
        assert "lost" == report.outcome("rollout1"), report.table()
        world.check({"rollout0", "rollout2", "rollout3"})


def test_workers_join_and_leave_between_and_during_updates():
    """A fleet that scales up and down must not need the trainer to start again."""
    with make_cluster(TRAIN, INFER, seed=5, spare=1) as cluster:
        world = World(cluster, TRAIN, INFER)
        meta = dataclasses.replace(world.rollouts[0], name="late")
        late = RolloutWorker(cluster.engines[TRAIN.world + INFER.world], meta)

        async def main():
            first = asyncio.create_task(world.update(1))
            await asyncio.sleep(1e-6)
            world.controller.add(late)
            report = await first
            assert report.ok
            assert "" == report.outcome("late")
            assert late.serving is None
            world.actors["late"] = late
            report = await world.update(2)
            assert "updated" == report.outcome("late"), report.table()
            world.check()
            world.controller.remove("rollout2")
            report = await world.update(3)
            assert "" == report.outcome("rollout2")
            assert 2 == world.actors["rollout2"].serving
            world.check(["rollout0", "rollout1", "rollout3", "late"])

        cluster.run(main())


@pytest.mark.parametrize("seed", some([0, 3], 1, 2))
def test_a_dead_nic_costs_an_update_at_the_most(seed):
    """A NIC that dies during an update may fail it, but never mixes versions, and the next one goes
    over the NICs that are left, once each rank has met the dead one.
    """
    at_us = _clean_us(seed) * 0.5
    with make_cluster(TRAIN, INFER, seed=seed) as cluster:
        world = World(cluster, TRAIN, INFER)
        cluster.at(at_us, lambda: cluster.kill_nic(seed, 1))

        async def main():
            report = await world.update(1)
            served = {name: actor.serving for name, actor in world.actors.items()}
            world.check([name for name, version in served.items() if version == 1])
            assert report.ok == (1 in served.values())
            for name in world.actors:
                if name not in world.controller.rollouts:
                    world.controller.add(world.actors[name])
            report = await world.update(2, tries=4)
            assert report.ok, report.error + report.table()
            world.check([n for n, actor in world.actors.items() if actor.serving == 2])
            assert {2} == {actor.serving for actor in world.actors.values()}

        cluster.run(main())


def test_the_watermark_holds_and_stages_overlap():
    """Without the limit a rank runs out of memory; without overlap the network idles while it
    computes.
    """
    with make_cluster(TRAIN, INFER, profile="cx7_400", seed=1) as cluster:
        world = World(
            cluster,
            TRAIN,
            INFER,
            nics=(1, 1),
            compute=Timed({"load": 5e9, "make": 5e9}),
            watermark_bytes=400_000,
        )
        report = cluster.run(world.update(1))

    assert report.ok, report.table()
    world.check()
    spans = report.trains[0].spans
    assert max(r.peak_bytes for r in report.trains) <= 400_000
    by_stage = {}
    for span in spans:
        by_stage.setdefault(span.track, []).append(span)
    for stage, other in (
        ("make", "load"),
        ("make", "write"),
        ("load", "write"),
        ("make", "gather"),
    ):
        assert any(
            a.start_s < b.stop_s and b.start_s < a.stop_s and a.name != b.name
            for a in by_stage[stage]
            for b in by_stage[other]
        ), (stage, other)
    assert report.elapsed_s < sum(span.stop_s - span.start_s for span in spans)
    everybody = [span for r in report.trains for span in r.spans]
    writes = [span.stop_s for span in everybody if span.track == "write"]
    last = [span.stop_s for span in everybody if span.name == "barrier 2"]
    assert len(report.trains) == len(last)
    assert max(writes) <= min(last)


def _pair():
    """One rollout worker, and an engine that plays a training rank."""
    cluster = make_cluster(TrainLayout(fsdp=1), InferLayout(ep=1), seed=2)
    world = World(cluster, TrainLayout(fsdp=1), InferLayout(ep=1))
    return cluster, cluster.engines[0], world.actors["rollout0"]


def test_a_version_needs_both_counts():
    """Ranks that say they are through, while a row is still on its way, must not release it."""
    cluster, rank, actor = _pair()
    with cluster:

        async def main():
            (desc,) = Regions.from_bytes(await actor.begin(1, 7, 2)).descs
            mr, _ = rank.reg_mr(np.ones(64, np.uint8))
            await rank.submit_barrier([desc], make_imm(Kind.FINISH, 1))
            await rank.submit_single_write(64, (mr, 0), (desc, 0), make_imm(Kind.DATA, 1))
            await asyncio.sleep(1e-3)
            assert actor.serving is None
            await rank.submit_single_write(64, (mr, 0), (desc, 64), make_imm(Kind.DATA, 1))
            assert 7 == await actor.finished(1.0)
            with actor.lease() as version:
                assert 7 == version
                begin = asyncio.create_task(actor.begin(2, 8, 1))
                await asyncio.sleep(1e-3)
                assert not begin.done()
                assert 7 == actor.serving
                with pytest.raises(tep.UsageError, match="try again later"), actor.lease():
                    pass
            await begin
            assert actor.serving is None

        cluster.run(main())


def test_staging_has_new_keys_after_an_update_that_failed():
    """A dead rank's last shard that arrives late must not land among the next update's; and the
    routing is not computed again for it.
    """
    with make_cluster(TRAIN, INFER, seed=4, spare=1) as cluster:
        world = World(cluster, TRAIN, INFER, timeout_s=1.0)
        world.workers[1].compute = Timed({"make": 1.0})
        stranger = cluster.engines[-1]

        async def main():
            report = await world.update(1)
            assert "training ranks not through in 1.0 s" in report.error, report.table()
            old = [worker.mr.desc for worker in world.workers]
            schedule = world.controller.schedule
            world.workers[1].compute = Compute()
            assert (await world.update(2)).ok
            mr, _ = stranger.reg_mr(np.ones(64, np.uint8))
            for desc in old:
                with pytest.raises(tep.FabricError, match="REMOTE_KEY"):
                    await stranger.submit_single_write(64, (mr, 0), (desc, 0))
            assert schedule is world.controller.schedule

        cluster.run(main())
        world.check()


def test_an_update_that_was_given_up_twice_still_drains():
    """A controller in a hurry gives up on the update and then on its end. What the NICs hold must
    come back nevertheless, or the rank refuses every update from then on.
    """
    with make_cluster(TRAIN, INFER, seed=4) as cluster:
        world = World(cluster, TRAIN, INFER, timeout_s=2e-5)

        async def main():
            assert not (await world.update(1)).ok
            world.controller.timeout_s = 1.0
            for name in world.actors:
                if name not in world.controller.rollouts:
                    world.controller.add(world.actors[name])
            report = await world.update(2)
            assert report.ok, report.error + report.table()
            assert {2} == {actor.serving for actor in world.actors.values()}

        cluster.run(main())
        world.check()


def test_after_an_abort_old_keys_are_refused():
    """A dead rank's last write that arrives late must not land in the next version."""
    cluster, rank, actor = _pair()
    with cluster:

        async def main():
            (desc,) = Regions.from_bytes(await actor.begin(1, 7, 2)).descs
            mr, _ = rank.reg_mr(np.ones(64, np.uint8))
            await actor.abort()
            with pytest.raises(tep.FabricError, match="REMOTE_KEY"):
                await rank.submit_single_write(64, (mr, 0), (desc, 0), make_imm(Kind.DATA, 1))
            assert not actor.region.any()

        cluster.run(main())

"""tep.integrations.weights without its frameworks: senders, receivers, hub on simulated NICs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

import tep
from tep.apps.rl import Placed, placed_box
from tep.integrations.weights import hub
from tep.integrations.weights.hub import Hub
from tep.integrations.weights.member import Fabric, Member
from tep.integrations.weights.ranks import (
    Param,
    Want,
    WeightReceiver,
    WeightSender,
    piece_of,
    wire_form,
)

BF16 = np.dtype(ml_dtypes.bfloat16)


def weights_of(version, rows=6):
    """Every value of a version is that version, so that a mixture shows."""
    return {
        "a.weight": np.full((rows, 5), version, BF16),
        "b.bias": np.full(7, version, np.float32),
        "steps": np.full((2, 3), version, np.int64),
        "scalar": np.array(version, np.float32),
        "none": np.zeros((0, 4), np.float32),
    }


class World:
    """Training ranks and rollout ranks of one cluster, with the hub at rank 0."""

    def __init__(self, cluster, ranks, wants=(None, None)):
        self.cluster = cluster
        self.senders = [WeightSender(cluster.engines[k], k, ranks) for k in range(ranks)]
        self.hub = Hub(self.senders, timeout_s=5.0)
        self.receivers = [
            WeightReceiver(cluster.engines[ranks + k], f"r{k}", *([want] if want else []))
            for k, want in enumerate(wants)
        ]

    async def join(self):
        for receiver in self.receivers:
            await self.hub.welcome(receiver.name, receiver)

    async def send(self, version, weights):
        """All ranks send; rank 0's hub brings it over."""
        for rank, sender in enumerate(self.senders):
            mine = weights[rank] if isinstance(weights, list) else weights
            sender.load(mine.items() if isinstance(mine, dict) else mine)
        sending = [asyncio.ensure_future(one.send(version, 60.0)) for one in self.senders]
        try:
            return await self.hub.update(version)
        finally:
            await asyncio.gather(*sending, return_exceptions=True)


def world_of(ranks=2, wants=(None, None), **options):
    cluster = tep.sim.Cluster(nodes=ranks + len(wants), nics=1, seed=3, **options)
    return cluster, World(cluster, ranks, wants)


def check(weights, version, rows=6):
    """Check that the loaded weights equal the sent ones."""
    expected = weights_of(version, rows)
    assert list(expected) == [weight.param.name for weight in weights]
    for weight in weights:
        assert expected[weight.param.name].tobytes() == weight.values.tobytes(), weight.param


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_versions_arrive_whole_and_shapes_may_change(ranks):
    """Shares of ranks, dtypes that no NIC knows, scalars, parameters without elements."""
    cluster, world = world_of(ranks)
    with cluster:

        async def main():
            await world.join()
            for version, rows in [(1, 6), (2, 6), (3, 1), (4, 9)]:
                await world.send(version, weights_of(version, rows))
                for receiver in world.receivers:
                    assert version == await receiver.whole(None, 1.0)
                    with receiver.read(version) as weights:
                        check(weights, version, rows)
                with pytest.raises(tep.WaitTimeout, match=r"version \(any\)"):
                    await receiver.whole(None, 0.01)  # it was waited for

        cluster.run(main())


def test_a_worker_under_load_never_sees_two_versions():
    """Readers hold a version as long as they like; the next one waits for them, at any time."""
    cluster, world = world_of(2)
    seen = []
    with cluster:

        async def serve(receiver):
            while True:
                await asyncio.sleep(3e-6)
                version = receiver.serving
                try:
                    with receiver.read(version) as weights:
                        check(weights, version)
                        await asyncio.sleep(20e-6)
                        check(weights, version)
                    seen.append(version)
                except tep.UsageError:  # none is whole
                    seen.append(None)

        async def main():
            await world.join()
            serving = [asyncio.ensure_future(serve(one)) for one in world.receivers]
            for version in range(1, 6):
                await world.send(version, weights_of(version))
                await asyncio.sleep(100e-6)
            for one in serving:
                one.cancel()
            ended = await asyncio.gather(*serving, return_exceptions=True)
            assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended

        cluster.run(main())
    assert {1, 2, 3, 4, 5} <= set(seen)


class Shard:
    """One of two ranks' part of a DTensor that is cut along an axis, as piece_of asks one."""

    def __init__(self, values, rank, axis=0):
        self.box = placed_box(values.shape, [Placed(2, rank, axis)])
        self.values, self.shape, self.dtype = values, values.shape, values.dtype
        self.placements = (type("S", (), {"dim": axis, "is_partial": lambda _: False})(),)
        place = type("M", (), {"shape": (2,), "get_coordinate": lambda _: (rank,)})
        self.device_mesh = place()

    def to_local(self):
        return self.values[tuple(slice(*side) for side in self.box)]


def test_boxes_of_dtensors_and_what_each_rollout_rank_wants():
    """Each rollout rank gets its slice only, quantised as it asks, straight from the shards."""
    values = np.random.default_rng(1).standard_normal((256, 256), np.float32).astype(BF16)

    def left(param):
        return Want("bf16", ((0, 256), (0, 100)))

    def block(param):
        return Want("fp8", ((128, 256), (0, 256)))

    cluster, world = world_of(2, (left, block))
    with cluster:

        async def main():
            await world.join()
            await world.send(1, [[("w", Shard(values, rank))] for rank in range(2)])

        cluster.run(main())
        with world.receivers[0].read(1) as (weight,):
            assert values[:, :100].tobytes() == weight.values.tobytes()
        with world.receivers[1].read(1) as (weight,):
            assert ((1, 2), (128, 256)) == (weight.scales.shape, weight.values.shape)
            back = weight.values.astype(np.float32) * np.repeat(weight.scales, 128, 1)
            assert np.abs(back - values[128:].astype(np.float32)).max() < 0.2


@pytest.mark.parametrize("bad", ["infinite", "twice", "differs", "dead"])
def test_an_update_that_fails_is_given_out_by_nobody(bad):
    """Half of a version, or a version on half of the ranks, must not be loaded anywhere."""
    cluster, world = world_of(2)
    with cluster:

        async def main():
            await world.join()
            await world.send(1, weights_of(1))
            broken = [weights_of(2), weights_of(2)]
            message = "UPDATE_FAILED"
            if bad == "infinite":
                broken[0]["a.weight"][1, 1] = np.inf
                message = "a.weight: 1 of 15 values are infinite"
            elif bad == "twice":
                broken = [("x", np.ones(1)), ("x", np.ones(1))]
                with pytest.raises(tep.UsageError, match="'x' twice"):
                    world.senders[0].load(broken)
                return
            elif bad == "differs":
                broken[1]["b.bias"] = np.ones(8, np.float32)
                message = r"rank 1 has Param\(name='b.bias'"
            else:
                cluster.restart(3)  # its engine is gone
                message = "r1"
            with pytest.raises(tep.FabricError, match=message):
                await world.send(2, broken)
            for receiver in world.receivers[: 1 if bad == "dead" else 2]:
                with pytest.raises(tep.FabricError, match="version 2 failed"):
                    await receiver.whole(2, 1.0)
                with pytest.raises(tep.UsageError, match="not given out"), receiver.read(2):
                    pass
            if bad == "dead":
                world.receivers[1] = WeightReceiver(cluster.engines[3], "r1")
                await world.join()
            await world.send(3, weights_of(3))
            for receiver in world.receivers:
                with receiver.read(3) as weights:
                    check(weights, 3)

        cluster.run(main())


def test_a_plan_that_failed_on_its_way_is_made_anew(monkeypatch):
    """The weights have not changed since, and the newcomer has described itself: both count as
    known only once all of the plan is there.
    """
    made, right = [], hub.mesh_groups

    def groups(*args):
        made.append(len(world.hub.rollouts))
        if len(made) == 2:
            raise tep.UsageError("no groups")
        return right(*args)

    monkeypatch.setattr(hub, "mesh_groups", groups)
    cluster, world = world_of(2)
    first, second = world.receivers
    with cluster:

        async def main():
            await world.hub.welcome("r0", first)
            await world.send(1, weights_of(1))
            await world.hub.welcome("r1", second)
            with pytest.raises(tep.FabricError, match="no groups"):
                await world.send(2, weights_of(2))
            for version in (3, 4):
                await world.send(version, weights_of(version))
                for receiver in world.receivers:
                    with receiver.read(version) as weights:
                        check(weights, version)

        cluster.run(main())
    assert [1, 2, 2] == made


def test_weights_may_be_cut_anew():
    """The rollout ranks hear of the same weights as before; who sends what is planned anew."""
    cluster, world = world_of(2)
    with cluster:

        async def main():
            await world.join()
            for version, axis in [(1, 0), (2, 1), (3, 0)]:
                values = np.full((6, 8), version, np.float32)
                shards = [{"w": Shard(values, rank, axis)} for rank in range(2)]
                await world.send(version, shards)
                for receiver in world.receivers:
                    with receiver.read(version) as (weight,):
                        assert (values == weight.values).all()

        cluster.run(main())


def test_wants_that_do_not_fit_are_refused():
    """Integers turned into floats in silence, or a box beyond the parameter."""
    for want, message in [
        (Want("bf16", ((0, 9), (0, 5))), r"bf16 of \[\(0, 9\), \(0, 5\)\]"),
        (Want("u8", ((0, 6), (0, 5))), r"travels as bf16\[6, 5\]; wanted is u8"),
    ]:
        cluster, world = world_of(1, (lambda _, want=want: want,))
        with cluster:

            async def main(world=world):
                await world.join()
                await world.send(1, {"a": np.ones((6, 5), BF16)})

            with pytest.raises(tep.FabricError, match=message):
                cluster.run(main())


def test_how_parameters_travel():
    """A dtype that no NIC knows travels as bytes; a scalar as a vector of one."""
    assert ("u8", (48,)) == wire_form(Param("x", "int64", (2, 3), 8))
    assert ("bf16", (1,)) == wire_form(Param("x", "bfloat16", (), 2))
    param, box, values = piece_of("x", np.arange(6, dtype=np.int16).reshape(3, 2), 1, 2)
    assert (Param("x", "int16", (3, 2), 2), ((6, 12),)) == (param, box)
    assert b"\x03\0\x04\0\x05\0" == values.tobytes()
    with pytest.raises(tep.UsageError, match="x: a weight is a numpy array or a torch tensor"):
        piece_of("x", np.float32(3), 0, 1)


@pytest.mark.slow
def test_nothing_of_the_frameworks_is_imported():
    """Without vLLM, verl and torch, all other modules must be importable and testable."""
    code = (
        "import sys, pkgutil, importlib, tep.integrations.weights as room\n"
        "for one in pkgutil.iter_modules(room.__path__):\n"
        "    if not one.name.endswith('_engine'):\n"
        "        importlib.import_module(f'{room.__name__}.{one.name}')\n"
        "assert not {'vllm', 'verl', 'nemo_rl', 'ray', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (0, "") == (done.returncode, done.stderr)


def test_members_meet_and_send_over_threads():
    """The blocking interface for frameworks; hub, two training ranks and a rollout meet by TCP."""
    fabric = Fabric(timeout_s=60.0)
    zero, one, rollout = (Member(f"weights-{k}", fabric) for k in range(3))
    try:
        meeting = zero.lead(2)
        one.follow(meeting, 1, 2)
        rollout.receive_from(meeting)
        for version in (1, 2):
            other = threading.Thread(target=one.send, args=(weights_of(version).items(), version))
            other.start()
            report = zero.send(weights_of(version).items(), version)
            other.join()
            assert report is not None
            assert version == rollout.whole(None, 10.0)
            with rollout.read(version) as weights:
                check(weights, version)
        zero.close()
        with pytest.raises(tep.FabricError, match="hung up"):
            rollout.whole(3, 10.0)
        with pytest.raises(tep.FabricError, match="hung up"):
            one.send(weights_of(3).items(), 3)
    finally:
        for member in (one, rollout):
            member.close()


def test_a_training_rank_that_does_not_come_is_the_error_at_once(monkeypatch):
    """Rank 0 went on waiting for its own part of an update that nobody would make any more."""
    ended = []

    async def waits(*_):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    monkeypatch.setattr(WeightSender, "send", waits)
    first = Member("first", Fabric("loopback", timeout_s=0.5))
    try:
        first.lead(2)
        with pytest.raises(tep.FabricError, match="rank 1 of 2 has not come to the hub"):
            first.sending(1).result(60)
        assert [True] == ended
    finally:
        first.close()


def test_a_stranger_is_not_taken_in():
    """Without the token nobody may say which weights are to be served."""
    zero, rollout = Member("weights-s0", Fabric()), Member("weights-s1", Fabric(timeout_s=5.0))
    try:
        meeting = zero.lead(1)
        with pytest.raises(tep.TepError, match="did not take it"):
            rollout.receive_from(meeting._replace(token=meeting.token[1:]))
    finally:
        zero.close()
        rollout.close()

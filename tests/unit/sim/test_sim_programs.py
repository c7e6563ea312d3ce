"""Programs of nodes: they end with a crash and start again; the dead reach nobody."""

from __future__ import annotations

import asyncio

import pytest

import tep
from tep.base.errors import ClosedError, UsageError
from tep.sim import Chaos, Cluster, Incarnation

US = 1e-6


def test_a_crash_ends_a_program_and_starts_it_again_with_its_disk() -> None:
    """A recovery path that is never entered is never tested."""
    lives: list[Incarnation] = []
    said: list[str] = []

    async def boots(me: Incarnation) -> int:
        lives.append(me)
        me.disk["boots"] = bytes([me.disk.get("boots", b"\0")[0] + 1])
        me.after(3, lambda: said.append(f"timer of {me.epoch}"))
        try:
            await asyncio.gather(asyncio.sleep(10 * US), me.receive())
        except asyncio.CancelledError:
            me.disk["boots"] = b"\xff"  # too late: the node has crashed
            with pytest.raises(ClosedError, match="b crashed in its epoch 1"):
                me.send("a", b"")
            with pytest.raises(ClosedError):
                me.engine.reg_mr(bytearray(8))
            raise
        return me.disk["boots"][0]

    async def main() -> int:
        end = cluster.spawn("b", boots)
        await asyncio.sleep(2 * US)
        cluster.restart("b")
        cluster.datagrams.send("a", "b", b"go on")
        found = await end
        cluster.restart("b")  # it has ended: it does not start again
        await asyncio.sleep(2 * US)
        return found

    with Cluster(chaos=Chaos.calm()) as cluster:
        assert 2 == cluster.run(main())
        assert [(1, False), (2, False)] == [(me.epoch, me.alive) for me in lives]
        assert ["timer of 2"] == said
        cluster.restart("b")  # after the run: nothing is left to start


def test_faults_of_a_swarm_crash_programs_as_well() -> None:
    """Restart among the faults, as a drawn case has it, is what users' protocols meet."""
    epochs: list[int] = []

    async def program(me: Incarnation) -> None:
        epochs.append(me.epoch)
        await asyncio.sleep(8 * US)

    async def main() -> None:
        await cluster.spawn(0, program)

    with Cluster(chaos=Chaos.calm()) as cluster:
        cluster.at(1, tep.sim.Restart("a"))
        cluster.at(2, tep.sim.Restart("a"))
        cluster.run(main())
        assert [1, 2, 3] == epochs
        assert 10 <= cluster.now_us < 11


def test_what_a_program_raises_is_heard() -> None:
    """A program that failed while nobody waited for it would look like one that hangs."""

    async def fails(me: Incarnation) -> None:
        await asyncio.sleep(1 * US)
        assert me.name == "c", "not on this node"

    async def nobody_waits() -> None:
        cluster.spawn("b", fails)
        while True:  # noqa: ASYNC110  # a wait that only the failure can end
            await asyncio.sleep(US)

    async def one_waits() -> str:
        try:
            await cluster.spawn("b", fails)
        except AssertionError as error:
            return str(error)
        return ""

    with Cluster(chaos=Chaos.calm()) as cluster:
        with pytest.raises(AssertionError, match="not on this node"):
            cluster.run(nobody_waits())
        assert "not on this node" in cluster.run(one_waits())


def test_what_cannot_be_spawned_is_refused() -> None:
    """A coroutine cannot start twice, and outside of a run nothing would turn it."""

    async def program(me: Incarnation) -> None:
        """Nothing."""

    async def main() -> None:
        with pytest.raises(UsageError, match="no node 'z'"):
            cluster.spawn("z", program)
        coroutine = asyncio.sleep(0)
        with pytest.raises(UsageError, match="called again after a crash"):
            cluster.spawn("a", coroutine)  # type: ignore[arg-type]  # the mistake this is about
        coroutine.close()
        with pytest.raises(UsageError, match="after: us=-1 is outside"):
            (await _me(cluster)).after(-1, print)

    with Cluster(chaos=Chaos.calm()) as cluster:
        with pytest.raises(UsageError, match="only inside of the coroutine"):
            cluster.spawn("a", program)
        cluster.run(main())


async def _me(cluster: Cluster) -> Incarnation:
    async def program(me: Incarnation) -> Incarnation:
        return me

    return await cluster.spawn("a", program)

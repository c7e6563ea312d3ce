"""Pull blocks from another node and keep them on disk: a protocol that outlives crashes of both.

The receiver asks for one block at a time, by datagram. Each try has memory of its own, registered
anew at both ends, and a number of its own, which is also its immediate; what a late row of an older
try does hurts nobody. It ends in an error where nothing comes any more: a NIC may be gone for good.
Three wrong versions stand at the end: find what is wrong with them before you read why.

    tep sim --protocol puller.py:first_guess --faults order --runs 200 --must-survive --shrink
"""

from __future__ import annotations

import asyncio
import contextlib

import tep

BLOCKS = [bytes([65 + k]) * 20_000 for k in range(3)]
SIZE = len(BLOCKS[0])
PATIENCE_S = 0.6  # longer than the slowest error of the fabrics it is tested on
TRIES = 30  # in one life


async def pull(cluster: tep.sim.Cluster, bug: str = "") -> None:
    """Node b pulls all blocks from node a."""
    nics = [len(engine.main_address.domains) for engine in cluster.engines]
    count = 1 if bug == "first" else tep.count_imms(tep.Single(SIZE), *nics)

    async def serve(me: tep.sim.Incarnation) -> None:
        served: set[tuple[int, ...]] = set()
        while True:
            _, asked = await me.receive()
            block, number = asked[0], asked[1]
            desc = tep.MrDesc.from_bytes(asked[2:])
            which = (block,) if bug == "third" else (desc.addr.epoch, number)
            if which in served and bug != "second":
                continue
            served.add(which)
            mr, _ = me.engine.reg_mr(BLOCKS[block], access=tep.Access.SOURCE)
            with contextlib.suppress(tep.StaleEpoch):  # asked before a crash: b will ask again
                me.engine.submit_single_write(SIZE, (mr, 0), (desc, 0), imm=number)

    async def keep(me: tep.sim.Incarnation) -> None:
        number = 0
        while len(me.disk) < len(BLOCKS):
            number += 1
            if number > TRIES:
                raise tep.FabricError(
                    f"{TRIES} tries brought {len(me.disk)} blocks", code="UNREACHABLE"
                )
            memory = bytearray(SIZE)
            mr, desc = me.engine.reg_mr(memory)
            me.send("a", bytes([len(me.disk), number]) + desc.to_bytes())
            got = me.engine.expect_imm_count(number, count)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await got
            except TimeoutError:
                got.cancel()
            except tep.FabricError:
                await asyncio.sleep(PATIENCE_S)  # links and paths take time to come back
            else:
                me.disk[f"{len(me.disk)}"] = bytes(memory)
            me.engine.deregister(mr)
        assert list(me.disk.values()) == BLOCKS, "a torn block was kept"

    cluster.spawn("a", serve)
    await cluster.spawn("b", keep)


async def first_guess(cluster: tep.sim.Cluster) -> None:
    """Wrong: it waits for one immediate, but there is one for each shard, one a lane."""
    await pull(cluster, "first")


async def second_guess(cluster: tep.sim.Cluster) -> None:
    """Wrong: a datagram that arrives twice is answered twice, so a shard may be counted twice."""
    await pull(cluster, "second")


async def third_guess(cluster: tep.sim.Cluster) -> None:
    """Wrong: no block is served twice, also not to one who lost it in a crash, or in a failure."""
    await pull(cluster, "third")

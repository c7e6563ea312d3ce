"""A question of one's own: is a ring as good as all at once, for an all-gather over eight nodes?

On a published machine, and on one whose network is ten times as far. Written from
docs/howto/questions.md alone.
"""

import asyncio
from dataclasses import replace

import numpy as np

import tep

KiB = 2**10


async def prepare(cluster, share):
    nodes = cluster.engines
    regions = [node.reg_mr(np.zeros(len(nodes) * share, np.uint8)) for node in nodes]
    count = tep.count_imms(tep.Single(share), *[len(nodes[0].main_address.domains)] * 2)
    return nodes, regions, count


async def at_once(cluster, share):
    nodes, regions, count = await prepare(cluster, share)
    n = len(nodes)
    waits = [node.expect_imm_count(1, count * (n - 1)) for node in nodes]
    for step in range(1, n):
        for k in range(n):
            source, target = regions[k][0], regions[(k + step) % n][1]
            nodes[k].submit_single_write(share, (source, k * share), (target, k * share), imm=1)
    await asyncio.gather(*waits)


async def ring(cluster, share):
    nodes, regions, count = await prepare(cluster, share)
    n = len(nodes)

    async def one(k):
        for step in range(n):
            owner = (k - step) % n
            if step:
                await nodes[k].expect_imm_count(owner, count)
            if step < n - 1:
                source, target = regions[k][0], regions[(k + 1) % n][1]
                at = owner * share
                nodes[k].submit_single_write(share, (source, at), (target, at), imm=owner)

    await asyncio.gather(*map(one, range(n)))


near = tep.sim.load_profile("efa_4x100")
far = replace(near, name="far", latency_ps=10 * near.latency_ps)
programs = {
    f"{name}, {share // KiB} KiB": lambda cluster, program=program, share=share: program(
        cluster, share
    )
    for share in (16 * KiB, 4096 * KiB)
    for name, program in (("at once", at_once), ("ring", ring))
}
found = tep.sim.compare(programs, [near, far], nodes=8)
print(found)
found.write("all_gather.csv")
found.plot().figure.savefig("all_gather.png")

"""A protocol of one's own: a ring of slots. A producer writes items, a consumer gives slots back.

`one_too_far` has a mistake: it is one slot ahead of what the ring has. Written from
docs/howto/protocol.md alone.
"""

import asyncio

import tep

SLOTS, SIZE, ITEMS = 4, 64, 12
ITEM, CREDIT = 1, 1001


async def ring(cluster: tep.sim.Cluster, ahead: int = SLOTS) -> None:
    producer, consumer = cluster.engines
    items = b"".join(bytes([k + 1]) * SIZE for k in range(ITEMS))
    slots = bytearray(SLOTS * SIZE)
    items_mr, items_desc = producer.reg_mr(bytearray(items))
    _, slots_desc = consumer.reg_mr(slots)
    nics = len(producer.main_address.domains), len(consumer.main_address.domains)
    count = tep.count_imms(tep.Single(SIZE), *nics)

    async def produce() -> None:
        for k in range(ITEMS):
            if k >= ahead:
                await producer.expect_imm_count(CREDIT + k - ahead, 1)
            source, target = (items_mr, k * SIZE), (slots_desc, k % SLOTS * SIZE)
            producer.submit_single_write(SIZE, source, target, imm=ITEM + k)

    async def consume() -> None:
        for k in range(ITEMS):
            await consumer.expect_imm_count(ITEM + k, count)
            await asyncio.sleep(1e-6)  # the work on it
            at = k % SLOTS * SIZE
            assert slots[at : at + SIZE] == bytes([k + 1]) * SIZE, f"item {k} is torn"
            consumer.submit_barrier([items_desc], imm=CREDIT + k)

    await asyncio.gather(produce(), consume())


async def one_too_far(cluster: tep.sim.Cluster) -> None:
    await ring(cluster, SLOTS + 1)

"""Ten classic mistakes of one-sided protocols, each a program of a few lines that hunts find.

docs/howto/mistakes.md shows them. `FOUND_UNDER` says which faults bring each one to light.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import tep

A, B = b"\1" * 1024, b"\2" * 1024


def couple(cluster, nbytes=2048):
    """Register a source at the first of two nodes, and a target at the second."""
    writer, reader = cluster.engines
    source, target = bytearray(A + B)[:nbytes], bytearray(nbytes)
    mr, _ = writer.reg_mr(source, access=tep.Access.SOURCE)
    _, desc = reader.reg_mr(target)
    return writer, reader, source, mr, target, desc


async def order_assumed(cluster) -> None:
    """The immediate of the second write says nothing of the first."""
    writer, reader, _, mr, target, desc = couple(cluster)
    writer.submit_single_write(1024, (mr, 0), (desc, 0))
    writer.submit_scatter(mr, [tep.ScatterDst(1024, 1024, (desc, 1024))], 7)
    await reader.expect_imm_count(7, 1)
    assert target[:1024] == A, "the second write was there before the first"


async def flag_before_data(cluster) -> None:
    """A byte that the reader polls can arrive before the bytes that it stands for."""
    writer, _, _, mr, target, desc = couple(cluster)
    writer.submit_single_write(2048, (mr, 0), (desc, 0))
    for _ in range(1000):
        await asyncio.sleep(20e-9)
        if target[-1]:
            break
    assert target == A + B, "the last byte was there before the others"


async def count_too_small(cluster) -> None:
    """Eight pages make eight immediates; who waits for seven reads one page too early."""
    writer, reader, source, mr, target, desc = couple(cluster)
    pages = tep.Pages(range(8))
    writer.submit_paged_writes(256, (mr, pages), (desc, pages), imm=7)
    await reader.expect_imm_count(7, 7)
    assert target == source, "a page was missing"


async def source_reused(cluster) -> None:
    """A source is read until its transfer has ended, not until it was submitted."""
    writer, _, source, mr, target, desc = couple(cluster, 1024)
    sent = writer.submit_single_write(1024, (mr, 0), (desc, 0))
    source[:] = B
    await sent
    assert target == A, "the next bytes went out in place of these"


async def stale_descriptor(cluster) -> None:
    """A region that was given back has no descriptor any more, whatever a peer remembers."""
    writer, reader, _, mr, _, desc = couple(cluster)
    buffer = bytearray(1024)
    region, desc = reader.reg_mr(buffer)
    await writer.submit_single_write(1024, (mr, 0), (desc, 0))
    reader.deregister(region)
    reader.reg_mr(bytearray(1024))  # the next buffer, of which the writer was not told
    await writer.submit_single_write(1024, (mr, 0), (desc, 0))


async def immediate_of_two_rounds(cluster) -> None:
    """An immediate that two rounds share counts for either: ABA."""
    writer, reader, _, mr, target, desc = couple(cluster)
    for start in (0, 1024):
        writer.submit_scatter(mr, [tep.ScatterDst(1024, start, (desc, start))], 7)
    await reader.expect_imm_count(7, 1)
    assert target[:1024] == A, "round 2 was counted for round 1"


async def retry_counted_twice(cluster) -> None:
    """A write that is only late counts, and its repetition counts once more."""
    writer, reader, source, mr, target, desc = couple(cluster)
    got = reader.expect_imm_count(7, 2)
    for start in (0, 1024):
        part = [tep.ScatterDst(1024, start, (desc, start))]
        sent = writer.submit_scatter(mr, part, 7)
        await asyncio.sleep(0.8e-6)
        if not sent.finished:
            writer.submit_scatter(mr, part, 7)
        if got.finished:
            break
    await got
    assert target == source, "one half was counted twice, and the other is not there"


async def ack_lost(cluster) -> None:
    """A datagram that is sent once may never arrive."""

    async def server(me: tep.sim.Incarnation) -> None:
        client, asked = await me.receive()
        me.send(client, b"done: " + asked)

    async def client(me: tep.sim.Incarnation) -> None:
        me.send("a", b"job 1")
        assert await me.receive() == ("a", b"done: job 1")

    cluster.spawn("a", server)
    await cluster.spawn("b", client)


async def restart_unnoticed(cluster) -> None:
    """A peer that is back has none of what was written to it before."""
    memory, desc = bytearray(), None

    async def keeper(me: tep.sim.Incarnation) -> None:
        nonlocal memory, desc
        memory = bytearray(2048)
        _, desc = me.engine.reg_mr(memory)
        await asyncio.sleep(1)

    writer, _, source, mr, _, _ = couple(cluster)
    cluster.spawn("b", keeper)
    for start in range(0, 2048, 256):
        while True:
            await asyncio.sleep(0.2e-6)
            try:
                await writer.submit_single_write(256, (mr, start), (desc, start))
                break
            except (tep.FabricError, tep.StaleEpoch):
                continue  # to whoever is there by then
    assert memory == source, "it restarted, and the first pages were not sent again"


async def two_writers(cluster) -> None:
    """Two writers of the same bytes leave a mixture, even if each write is complete."""
    first, second, reader = cluster.engines
    target = bytearray(1024)
    _, desc = reader.reg_mr(target)
    for engine, what in ((first, A), (second, B)):
        mr, _ = engine.reg_mr(what, access=tep.Access.SOURCE)
        engine.submit_scatter(mr, [tep.ScatterDst(1024, 0, (desc, 0))], 7)
    await reader.expect_imm_count(7, 2)
    assert target in (A, B), "half of it is the first writer's, half the second's"


FOUND_UNDER: dict[Callable[[tep.sim.Cluster], Awaitable[None]], str] = {
    order_assumed: "order",
    flag_before_data: "order",
    count_too_small: "order",
    source_reused: "order",
    stale_descriptor: "none",
    immediate_of_two_rounds: "order",
    retry_counted_twice: "order",
    ack_lost: "control",
    restart_unnoticed: "restarts",
    two_writers: "order",
}

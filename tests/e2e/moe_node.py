"""One rank of a small MoE layer in its own process. Not a test: test_moe_processes.py starts it.

    moe_node.py BACKEND RANK WORLD TURNS PORT LISTENER_FD [PORT LISTENER_FD]

With a second port the last rank kills itself in its second turn, and the others meet there again.

The experts are two matrix products over small integers, which f32 holds exactly: so a row's result
does not depend on which rows stand beside it, and outputs can be compared byte by byte.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

import numpy as np

import tep
from tep import rendezvous
from tep.apps import moe
from tep.apps.moe.payload import from_f32
from tep.apps.moe.trial import dense_layer

HIDDEN, INNER, TOPK, LOCAL, TOKENS = 512, 64, 3, 2, 24


def open_engine(backend, rank):
    name, _, provider = backend.partition(":")
    options = {"name": f"r{rank}"}
    if name == "libfabric":
        nics = ["127.0.0.1", "127.0.0.2"] if provider == "tcp" else 2
        options |= {"provider": provider, "nics": nics}
    elif name == "efa":
        options["nics"] = 2
    return tep.TransferEngine.open(name, **options)


class Layer:
    """Experts with integer weights."""

    def __init__(self, experts):
        rng = np.random.default_rng(7)
        self.up = rng.integers(-2, 3, (experts, HIDDEN, INNER)).astype(np.float32)
        self.down = rng.integers(-2, 3, (experts, INNER, HIDDEN)).astype(np.float32)

    def expert(self, number, x, scales):
        values = x.view(np.int8).astype(np.float32) * scales[:, :1]
        inner = np.minimum(np.maximum(values @ self.up[number], 0), 255)
        result = from_f32(inner @ self.down[number], moe.Format.BF16)
        return np.ascontiguousarray(result).view(np.uint16)


def tokens(rank, turn, experts):
    rng = np.random.default_rng([rank, turn])
    n = int(rng.integers(0, TOKENS + 1)) if turn else TOKENS
    x = rng.integers(-3, 4, (n, HIDDEN)).astype(np.int8).view(np.uint8)
    scales = rng.integers(1, 3, (n, 4)).astype(np.float32)
    order = [rng.permutation(experts)[:TOPK] for _ in range(n)]
    indices = np.array(order, np.int64).reshape(n, TOPK)
    return x, scales, indices, rng.random((n, TOPK), np.float32)


async def turn_of(alltoall, turn, dies):
    """Run one turn and compare it; a rank that `dies` kills itself before it sends results."""
    rank, experts = alltoall.rank, alltoall.config.num_experts
    layer = Layer(experts)
    x, scales, indices, weights = tokens(rank, turn, experts)
    got = await alltoall.dispatch(x, scales, indices, weights)
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    results = np.zeros((len(got.x), HIDDEN), np.uint16)
    for k in range(LOCAL):
        rows = slice(int(got.starts[k]), int(got.starts[k] + got.counts[k]))
        results[rows] = layer.expert(LOCAL * rank + k, got.x[rows], got.scales[rows])
    out = await alltoall.combine(results)
    shape = {"hidden": HIDDEN, "combine_format": moe.Format.BF16}
    expected = dense_layer(x, scales, indices, weights, layer.expert, **shape)
    assert expected.tobytes() == out.tobytes(), f"rank {rank} turn {turn}"


async def run(engine, rank, world, turns, meeting, dies=-1, **options):
    """All turns on all ranks; after the first a rank dies, if one is to."""
    port, fd = meeting
    listener = socket.socket(fileno=fd) if fd >= 0 else None
    place = rendezvous.Place(rank=rank, size=world, port=port, token=f"moe-{port}")
    ranks = await rendezvous.join_async(place, listener=listener)
    group = moe.Group(rank=rank, world=world, exchange=ranks.all_gather)
    shape = {"num_experts": LOCAL * world, "topk": TOPK, "hidden": HIDDEN, "max_tokens": TOKENS}
    try:
        async with moe.AllToAll(
            engine, group, private_tokens=5, expert_padding=4, **shape, **options
        ) as alltoall:
            for turn in range(turns):
                await turn_of(alltoall, turn, turn and rank == dies)
        await ranks.barrier()
    finally:
        await ranks.close()


async def run_on(engine, rank, world, turns, meetings):
    """The last rank dies; the others see who it was, and go on without it."""
    try:
        await run(engine, rank, world, turns, meetings[0], dies=world - 1, timeout_s=10.0)
    except tep.FabricError as error:
        sys.stdout.write(f"{error.code} {error.peer}\n")
    await run(engine, rank, world - 1, turns, meetings[1], imm_base=0x9000_0000)


def main(argv):
    backend, *numbers = argv
    rank, world, turns, *ports = map(int, numbers)
    meetings = list(zip(ports[::2], ports[1::2], strict=True))
    with open_engine(backend, rank) as engine:
        if len(meetings) == 1:
            asyncio.run(run(engine, rank, world, turns, meetings[0]))
        else:
            asyncio.run(run_on(engine, rank, world, turns, meetings))
    sys.stdout.write(f"ok rank={rank}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""One rank of a small MoE layer in its own process. Not a test: test_moe_processes.py starts it.

    moe_node.py BACKEND RANK WORLD PORT LISTENER_FD TURNS

The experts are two matrix products over small integers, which f32 holds exactly: so a row's result
does not depend on which rows stand beside it, and outputs can be compared byte by byte.
"""

from __future__ import annotations

import asyncio
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


async def run(backend, rank, world, place, listener, turns):
    experts = LOCAL * world
    layer = Layer(experts)
    meeting = await rendezvous.join_async(place, listener=listener)
    with open_engine(backend, rank) as engine:
        group = moe.Group(rank=rank, world=world, exchange=meeting.all_gather)
        shape = {"num_experts": experts, "topk": TOPK, "hidden": HIDDEN, "max_tokens": TOKENS}
        alltoall = moe.AllToAll(engine, group, private_tokens=5, expert_padding=4, **shape)
        async with alltoall:
            for turn in range(turns):
                x, scales, indices, weights = tokens(rank, turn, experts)
                got = await alltoall.dispatch(x, scales, indices, weights)
                results = np.zeros((len(got.x), HIDDEN), np.uint16)
                for k in range(LOCAL):
                    rows = slice(int(got.starts[k]), int(got.starts[k] + got.counts[k]))
                    results[rows] = layer.expert(LOCAL * rank + k, got.x[rows], got.scales[rows])
                out = await alltoall.combine(results)
                expected = dense_layer(
                    x,
                    scales,
                    indices,
                    weights,
                    layer.expert,
                    hidden=HIDDEN,
                    combine_format=moe.Format.BF16,
                )
                assert expected.tobytes() == out.tobytes(), f"rank {rank} turn {turn}"
        await meeting.barrier()
    await meeting.close()
    sys.stdout.write(f"ok rank={rank}\n")


def main(argv):
    backend, rank, world, port, fd, turns = argv
    listener = socket.socket(fileno=int(fd)) if int(fd) >= 0 else None
    job = f"moe-{port}"
    place = rendezvous.Place(rank=int(rank), size=int(world), port=int(port), token=job)
    asyncio.run(run(backend, int(rank), int(world), place, listener, int(turns)))


if __name__ == "__main__":
    main(sys.argv[1:])

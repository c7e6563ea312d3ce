"""The multi-GPU tax: what a step loses when compute and communication take turns as whole kernels.

Idea of Iris: tiles are sent from within the kernel as soon as they are computed, and used as soon
as they arrive, in place of compute, barrier, collective, barrier, compute.

Measures: a matrix product whose result all ranks need, then work on that result. bulk: all tiles,
a launch, a scatter of the whole block, a barrier, a launch, the work. tiles: each tile goes to
all peers when it is ready, and worked on when it is here; one kernel, so one launch. The difference
is the tax; what of it the launches are is shown, the rest is that nobody sends while it computes
and that all wait for the slowest rank. Leaves out: what sending from a kernel takes from its
compute units, caches (Iris counts their loss as well), and NVLink: peers are reached by NICs. Times
of tiles and launches are guesses.

    python notebooks/examples/multi_gpu_tax.py [--ranks N] [--tiles N]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys

import tep

LAUNCH_S = 5e-6
TILE_S, USE_S = 4e-6, 0.5e-6  # to compute one; to work on one that has come
TILE_BYTES = 128 * 128 * 2
UNEVEN = 0.3  # a tile takes up to so much longer, drawn for each rank and tile
BLOCK_IMM, READY_IMM, TILE_IMM = 1, 2, 3


class Step:
    """One step on all ranks of a cluster."""

    def __init__(self, cluster: tep.sim.Cluster, tiles: int, launch_s: float) -> None:
        self.engines, self.tiles, self.launch_s = cluster.engines, tiles, launch_s
        self.ranks = len(cluster.engines)
        memory = (1 << 40, 1 << 32, "cpu")
        self.regions = [engine.reg_mr(memory) for engine in self.engines]
        rng = random.Random(1)
        self.tile_s = [
            [TILE_S * (1 + UNEVEN * rng.random()) for _ in range(tiles)] for _ in range(self.ranks)
        ]

    def peers(self, rank: int) -> list[int]:
        return [(rank + k) % self.ranks for k in range(1, self.ranks)]

    def scatter(self, rank: int, nbytes: int, at: int, imm: int) -> None:
        """The same bytes to every peer."""
        dsts = [tep.ScatterDst(nbytes, at, (self.regions[p][1], at)) for p in self.peers(rank)]
        self.engines[rank].submit_scatter(self.regions[rank][0], dsts, imm)

    async def bulk(self, rank: int) -> None:
        """Compute, send, barrier, use."""
        engine, others = self.engines[rank], self.ranks - 1
        await asyncio.sleep(self.launch_s + sum(self.tile_s[rank]))
        await asyncio.sleep(self.launch_s)
        nbytes = self.tiles * TILE_BYTES
        got = engine.expect_imm_count(BLOCK_IMM, others)
        self.scatter(rank, nbytes, rank * nbytes, BLOCK_IMM)
        await got
        ready = engine.expect_imm_count(READY_IMM, others)
        engine.submit_barrier([self.regions[p][1] for p in self.peers(rank)], READY_IMM)
        await ready
        await asyncio.sleep(self.launch_s + self.ranks * self.tiles * USE_S)

    async def fine(self, rank: int) -> None:
        """Send each tile at once; use what has come while the next one is computed."""
        engine, others = self.engines[rank], self.ranks - 1
        used = asyncio.Event()
        await asyncio.sleep(self.launch_s)

        async def produce() -> None:
            for tile, seconds in enumerate(self.tile_s[rank]):
                await asyncio.sleep(seconds)
                self.scatter(rank, TILE_BYTES, (rank * self.tiles + tile) * TILE_BYTES, TILE_IMM)
            # The compute units are shared: tiles are used when this rank has made its own.
            used.set()

        async def use() -> None:
            await used.wait()
            for _ in range(self.tiles):
                await engine.expect_imm_count(TILE_IMM, others)
                await asyncio.sleep(others * USE_S)
            await asyncio.sleep(self.tiles * USE_S)  # its own

        await asyncio.gather(produce(), use())


def run(way: str, ranks: int, tiles: int, launch_s: float = LAUNCH_S) -> float:
    """Microseconds until the last rank is done."""
    with tep.sim.Cluster(ranks, profile="cx7_400", move_bytes=False) as cluster:
        step = Step(cluster, tiles, launch_s)

        async def main() -> None:
            await asyncio.gather(*(getattr(step, way)(rank) for rank in range(ranks)))

        cluster.run(main())
        return cluster.now_us


def measure(ranks: int = 16, tiles: int = 64) -> dict[str, float]:
    """Microseconds of both ways, and the parts of the difference."""
    bulk, fine = run("bulk", ranks, tiles), run("fine", ranks, tiles)
    # The launches of either way, each against the same way without them.
    launches = bulk - run("bulk", ranks, tiles, 0.0) - fine + run("fine", ranks, tiles, 0.0)
    return {
        "bulk": bulk,
        "tiles": fine,
        "tax": bulk - fine,
        "of it launches": launches,
        "of it taking turns": bulk - fine - launches,
    }


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--tiles", type=int, default=64, help="of each rank")
    args = parser.parse_args(argv)
    print(f"{args.ranks} ranks, {args.tiles} tiles of {TILE_BYTES // 1024} KiB each, cx7_400")
    for name, us in measure(args.ranks, args.tiles).items():
        print(f"{name:24}{us:10.1f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The multi-GPU tax: what a step loses when compute and communication take turns as whole kernels.

Idea of Iris: within one host, tiles are sent from the kernel that computes them as soon as they are
there, in place of a product, a barrier, a collective, a barrier.

Measures: a matrix product whose result all 8 GPUs of a host need (GEMM and all-scatter), by inner
dimension. bulk: a launch, all waves of tiles, a launch, a write of the whole block to each peer, a
barrier. tiles: one launch; each wave of tiles goes to all peers when it is there. Published: up to
1.79 times as fast as PyTorch and RCCL (arXiv 2511.12500, abstract); 10 to 20 % end to end, where
it is a part of a layer (arXiv 2511.02168, abstract). Leaves out: what sending takes from
compute units, caches. Guessed: 600 Tflop/s, 304 tiles of 128 x 128 at a time, waves that differ by
up to 10 %, 350 GB/s and 1 us from GPU to GPUs, 6 us a launch.

    python notebooks/examples/multi_gpu_tax.py [--rows N]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import sys

import tep
from tep.sim import Profile, load_profile

GPUS, TILE, UNITS = 8, 128, 304
FLOPS, LAUNCH_S, UNEVEN = 600e12, 6e-6, 0.1
COLUMNS = 4608  # of each GPU's part of the result
INNER = (1024, 2048, 4096, 8192, 16384, 32768)
BLOCK_IMM, READY_IMM = 1, 2
PUBLISHED = 1.79
US = 10**6  # picoseconds


def links() -> Profile:
    """The links of one GPU to all others of its host, as one NIC: a store is its own post."""
    return dataclasses.replace(
        load_profile("cx7_400"),
        name="links",
        step_delay_ps=US // 10,
        post_first_ps=0,
        post_next_ps=0,
        link_bps=2_800 * 10**9,
        wire_bps=2_800 * 10**9,
        dma_bps=5_600 * 10**9,
        op_ps=0,
        fill_bytes=0,
        latency_ps=US,
        receive_ps=0,
        ack_ps=US,
    )


class Step:
    """One step on all GPUs of a host."""

    def __init__(self, cluster: tep.sim.Cluster, rows: int, inner: int) -> None:
        self.engines = cluster.engines
        self.regions = [engine.reg_mr((1 << 40, 1 << 36, "cpu")) for engine in self.engines]
        tiles = -(-rows // TILE) * (COLUMNS // TILE)
        self.waves = -(-tiles // UNITS)
        self.wave_bytes = rows * COLUMNS * 2 // self.waves
        rng, wave_s = random.Random(1), 2 * rows * COLUMNS * inner / FLOPS / self.waves
        self.wave_s = [
            [wave_s * (1 + UNEVEN * rng.random()) for _ in range(self.waves)] for _ in range(GPUS)
        ]

    def scatter(self, gpu: int, nbytes: int, imm: int) -> None:
        """The same bytes to every peer."""
        peers = [(gpu + k) % GPUS for k in range(1, GPUS)]
        dsts = [tep.ScatterDst(nbytes, 0, (self.regions[p][1], 0)) for p in peers]
        self.engines[gpu].submit_scatter(self.regions[gpu][0], dsts, imm)

    async def bulk(self, gpu: int) -> None:
        """Compute, send, barrier."""
        engine = self.engines[gpu]
        await asyncio.sleep(LAUNCH_S + sum(self.wave_s[gpu]) + LAUNCH_S)
        got = engine.expect_imm_count(BLOCK_IMM, GPUS - 1)
        self.scatter(gpu, self.waves * self.wave_bytes, BLOCK_IMM)
        await got
        ready = engine.expect_imm_count(READY_IMM, GPUS - 1)
        self.scatter(gpu, 8, READY_IMM)
        await ready

    async def tiles(self, gpu: int) -> None:
        """Send each wave at once."""
        got = self.engines[gpu].expect_imm_count(BLOCK_IMM, (GPUS - 1) * self.waves)
        await asyncio.sleep(LAUNCH_S)
        for seconds in self.wave_s[gpu]:
            await asyncio.sleep(seconds)
            self.scatter(gpu, self.wave_bytes, BLOCK_IMM)
        await got


def run(way: str, rows: int, inner: int) -> float:
    """Microseconds until the last GPU has all."""
    with tep.sim.Cluster(GPUS, profile=links(), move_bytes=False) as cluster:
        step = Step(cluster, rows, inner)

        async def main() -> None:
            await asyncio.gather(*(getattr(step, way)(gpu) for gpu in range(GPUS)))

        cluster.run(main())
        return cluster.now_us


def measure(rows: int = 8192) -> dict[int, tuple[float, float]]:
    """Inner dimension -> microseconds of whole kernels in turn, and of tiles."""
    return {inner: (run("bulk", rows, inner), run("tiles", rows, inner)) for inner in INNER}


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8192)
    args = parser.parse_args(argv)
    print(f"{args.rows} x {COLUMNS} on each of {GPUS} GPUs of a host")
    print(f"{'inner':>8}{'bulk us':>10}{'tiles us':>10}{'tax':>8}{'times':>8}")
    found = measure(args.rows)
    for inner, (bulk, tiles) in found.items():
        print(f"{inner:8}{bulk:10.0f}{tiles:10.0f}{1 - tiles / bulk:8.0%}{bulk / tiles:8.2f}")
    most = max(bulk / tiles for bulk, tiles in found.values())
    print(f"up to {most:.2f} times as fast; published: up to {PUBLISHED}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

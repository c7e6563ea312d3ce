"""All-gather among 1,024 ranks by one-sided writes: three algorithms on one engine.

Idea of NCCLX: collectives as zero-copy one-sided writes, driven by the host, for 100k GPUs.

Measures: time until the last rank has all blocks, beside what latency and bandwidth alone would
take. Leaves out: reductions (they need a kernel), NVLink, the fabric's upper switches, failures.

direct: each rank writes its block to each other rank, in one scatter. doubling: in step k each rank
exchanges all that it has with rank ^ 2**k. ring: each rank passes on to the next rank what came
from the one before; it is left out above 64 ranks, where it takes ranks**2 writes.

    python notebooks/examples/collectives_1024_ranks.py [--ranks N] [--kib N]
        [--way direct --way doubling]
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import tep

RING_RANKS_MAX = 64


async def direct(engine, mr, descs, rank: int, nbytes: int) -> None:
    """One scatter; ranks start with different peers, or all would write to rank 0 first."""
    ranks = len(descs)
    at = rank * nbytes
    others = [(rank + k) % ranks for k in range(1, ranks)]
    got = engine.expect_imm_count(1, ranks - 1)
    sent = engine.submit_scatter(
        mr, [tep.ScatterDst(nbytes, at, (descs[p], at)) for p in others], 1
    )
    await got
    await sent


async def doubling(engine, mr, descs, rank: int, nbytes: int) -> None:
    """log2(ranks) steps; the immediate says which step it was."""
    step, have = 1, 1
    while have < len(descs):
        at = rank // have * have * nbytes  # the first block of those that this rank has
        got = engine.expect_imm_count(step, 1)
        sent = engine.submit_single_write(
            have * nbytes, (mr, at), (descs[rank ^ have], at), imm=step
        )
        await got
        await sent
        step, have = step + 1, 2 * have


async def ring(engine, mr, descs, rank: int, nbytes: int) -> None:
    """Every step passes one block on; all counts are of one immediate, in order of the steps."""
    ranks = len(descs)
    sent = []
    for step in range(ranks - 1):
        at = (rank - step) % ranks * nbytes
        right = descs[(rank + 1) % ranks]
        sent.append(engine.submit_single_write(nbytes, (mr, at), (right, at), imm=1 + step))
        await engine.expect_imm_count(1 + step, 1)
    await asyncio.gather(*sent)


WAYS = {"direct": direct, "doubling": doubling, "ring": ring}


def gather(
    way: str, ranks: int, nbytes: int, profile: str = "cx7_400", check: bool = False
) -> float:
    """Microseconds of one all-gather; with `check`, real bytes, compared at the end."""
    with tep.sim.Cluster(ranks, profile=profile, move_bytes=check) as cluster:
        engines = cluster.engines
        memory = [(1 << 40, ranks * nbytes, "cpu")] * ranks
        if check:
            memory = [bytearray(ranks * nbytes) for _ in range(ranks)]
            for rank, block in enumerate(memory):
                block[rank * nbytes : (rank + 1) * nbytes] = bytes([1 + rank % 255]) * nbytes
        regions = [engine.reg_mr(part) for engine, part in zip(engines, memory, strict=True)]
        descs = [desc for _, desc in regions]
        parts = [
            WAYS[way](engine, regions[k][0], descs, k, nbytes) for k, engine in enumerate(engines)
        ]

        async def main() -> None:
            await asyncio.gather(*parts)

        cluster.run(main())
        if check:
            assert all(block == memory[0] and 0 not in block for block in memory), (
                "bytes are missing"
            )
        return cluster.now_us


def bound(ranks: int, nbytes: int, profile: str = "cx7_400") -> float:
    """Microseconds: one latency, and all blocks of others over one NIC's wire."""
    numbers = tep.sim.load_profile(profile)
    wire_s = (ranks - 1) * nbytes * 8 / (numbers.nics * numbers.wire_bps)
    return numbers.latency_ps / 1e6 + wire_s * 1e6


def measure(
    ranks: int, nbytes: int, ways: list[str] | None = None, profile: str = "cx7_400"
) -> dict[str, float]:
    """Microseconds by algorithm, and the bound."""
    chosen = ways or [way for way in WAYS if way != "ring" or ranks <= RING_RANKS_MAX]
    found = {way: gather(way, ranks, nbytes, profile) for way in chosen}
    return found | {"latency and wire alone": bound(ranks, nbytes, profile)}


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024, help="a power of two")
    parser.add_argument("--kib", type=int, default=16, help="of each rank's block")
    parser.add_argument("--way", action="append", choices=list(WAYS))
    args = parser.parse_args(argv)
    if args.ranks < 2 or args.ranks & (args.ranks - 1):
        parser.error(f"--ranks {args.ranks}: it must be a power of two, 2 or more")
    print(f"all-gather, {args.ranks:,} ranks, {args.kib} KiB each, cx7_400")
    for way, us in measure(args.ranks, args.kib * 1024, args.way).items():
        print(f"{way:24} {us:10.1f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Data parallelism over sequences of very different lengths: who computes what, who sends what.

Idea of Zeppelin: long sequences are split over ranks, short ones stay whole, so that all ranks end
together and only the long ones cost traffic.

Measures: a step's attention and the exchange of K and V that splitting costs, for three ways to
place one drawn batch. whole: each sequence on one rank, the longest first to the least loaded.
split all: each rank holds an equal part of every sequence. split long: a sequence that alone
exceeds a rank's fair share of work is split over as many ranks as bring it below, the rest stays
whole. Leaves out: linear layers, the backward pass, overlap of compute and traffic, NVLink.
A rank's attention speed is a guess: 400 Tflop/s; K and V are 8 heads of 128 in bf16, one layer.

    python notebooks/examples/variable_length_data_parallelism.py [--ranks N] [--sequences N]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import defaultdict

import tep

FLOPS = 400e12
QUERY_WIDTH = 64 * 128  # 64 query heads of 128
KV_TOKEN_BYTES = 2 * 8 * 128 * 2
MIN_TOKENS, MAX_TOKENS = 512, 131072

Part = tuple[int, tuple[int, ...]]  # tokens of a sequence, and the ranks that share it evenly


def draw(count: int, seed: int = 0) -> list[int]:
    """Lengths with a long tail: most are short, few are very long."""
    rng = random.Random(seed)
    return [min(MAX_TOKENS, int(MIN_TOKENS * rng.paretovariate(0.8))) for _ in range(count)]


def work_s(tokens: int) -> float:
    """Seconds of causal attention over a whole sequence on one rank."""
    return 2 * tokens * tokens * QUERY_WIDTH / FLOPS


def whole(lengths: list[int], ranks: int) -> list[Part]:
    """Each sequence on the rank that has the least to do so far."""
    return place(lengths, ranks, lambda _: 1)


def split_all(lengths: list[int], ranks: int) -> list[Part]:
    """Each sequence over all ranks."""
    return [(tokens, tuple(range(ranks))) for tokens in lengths]


def split_long(lengths: list[int], ranks: int) -> list[Part]:
    """Only what exceeds a fair share is split, over the fewest ranks that bring it below."""
    fair = sum(map(work_s, lengths)) / ranks
    return place(lengths, ranks, lambda tokens: min(ranks, -int(-work_s(tokens) // fair)))


def place(lengths: list[int], ranks: int, shares) -> list[Part]:
    """The longest first, each to the least loaded ranks."""
    load = [0.0] * ranks
    parts = []
    for tokens in sorted(lengths, reverse=True):
        count = shares(tokens)
        chosen = tuple(sorted(range(ranks), key=lambda rank: (load[rank], rank))[:count])
        for rank in chosen:
            load[rank] += work_s(tokens) / count
        parts.append((tokens, chosen))
    return parts


def exchange_us(parts: list[Part], ranks: int, profile: str) -> tuple[float, int]:
    """Microseconds until all ranks have K and V of their sequences, and the bytes that were sent.

    Each rank of a split sequence writes its part to the others that share it.
    """
    slices: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for tokens, shared in parts:
        for rank in shared:
            for peer in shared:
                if peer != rank:
                    slices[rank][peer] += tokens * KV_TOKEN_BYTES // len(shared)
    sent = sum(nbytes for peers in slices.values() for nbytes in peers.values())
    if not sent:
        return 0.0, 0
    with tep.sim.Cluster(ranks, profile=profile, move_bytes=False) as cluster:
        engines = cluster.engines
        regions = [engine.reg_mr((1 << 40, 1 << 36, "cpu")) for engine in engines]

        async def one(rank: int) -> None:
            peers = sorted(slices[rank], key=lambda peer: (peer - rank) % ranks)
            dsts = [tep.ScatterDst(slices[rank][p], 0, (regions[p][1], 0)) for p in peers]
            if dsts:
                got = engines[rank].expect_imm_count(1, len(dsts))  # as many write to it
                await engines[rank].submit_scatter(regions[rank][0], dsts, 1)
                await got

        async def main() -> None:
            await asyncio.gather(*map(one, range(ranks)))

        cluster.run(main())
        return cluster.now_us, sent


def measure(ranks: int = 32, sequences: int = 256, seed: int = 0, profile: str = "cx7_400"):
    """Way -> microseconds of the slowest rank's attention, of the exchange, bytes sent."""
    lengths = draw(sequences, seed)
    found = {}
    for way in (whole, split_all, split_long):
        parts = way(lengths, ranks)
        load = [0.0] * ranks
        for tokens, shared in parts:
            for rank in shared:
                load[rank] += work_s(tokens) / len(shared)
        found[way.__name__] = (1e6 * max(load), *exchange_us(parts, ranks, profile))
    return found


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=256)
    args = parser.parse_args(argv)
    lengths = sorted(draw(args.sequences))
    print(
        f"{args.sequences} sequences: median {lengths[len(lengths) // 2]:,}, most {lengths[-1]:,}"
    )
    print(f"{'':12}{'attention us':>14}{'exchange us':>14}{'step us':>12}{'GB sent':>10}")
    for way, (compute, traffic, sent) in measure(args.ranks, args.sequences).items():
        total = compute + traffic
        print(f"{way:12}{compute:14,.0f}{traffic:14,.0f}{total:12,.0f}{sent / 1e9:10.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

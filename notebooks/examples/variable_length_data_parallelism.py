"""Data parallelism over sequences of very different lengths: rings within hosts, rings over hosts.

Idea of Zeppelin: the longest sequences go around a ring of all GPUs, middle ones around a ring
within a host, over NVLink, and short ones stay whole; and what a ring sends from host to host goes
over all NICs of the host, whichever GPU has it.

Measures: one attention layer over one drawn batch, in four ways. all: each sequence goes around all
GPUs, whose hosts are joined by the NIC of one GPU each way. routed: the same, over all NICs of the
host. two levels: rings by length. Zeppelin: both. A step of a ring takes as long as its compute or
its transfer, whichever is longer; transfers between hosts are simulated. Published (arXiv
2509.21841, abstract): 2.80 times as fast in the mean as systems before it. Leaves out: linear
layers and their remapping, the backward pass. Guessed: 400 Tflop/s of attention, 300 GB/s of
NVLink, 10 us to start a step, the lengths; K and V are 8 heads of 128 in bf16.

    python notebooks/examples/variable_length_data_parallelism.py [--hosts N] [--sequences N]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from functools import cache

import tep

GPUS = 8  # of a host, each with its NIC
FLOPS, NVLINK_S, START_S = 400e12, 300e9, 10e-6
QUERY_WIDTH = 64 * 128  # 64 query heads of 128
KV_TOKEN_BYTES = 2 * 8 * 128 * 2
MIN_TOKENS, MAX_TOKENS = 512, 131072
WAYS = {"all": (0, 0), "routed": (0, 1), "two levels": (1, 0), "Zeppelin": (1, 1)}
PUBLISHED = 2.80


def draw(count: int, seed: int = 0) -> list[int]:
    """Lengths with a long tail: most are short, few are very long."""
    rng = random.Random(seed)
    return [min(MAX_TOKENS, int(MIN_TOKENS * rng.paretovariate(0.8))) for _ in range(count)]


def work_s(tokens: int) -> float:
    """Seconds of causal attention over a whole sequence on one GPU."""
    return 2 * tokens * tokens * QUERY_WIDTH / FLOPS


@cache
def hop_s(nbytes: int, *, routed: bool) -> float:
    """Seconds that a block takes from host to host: over one NIC, or a part over each."""
    senders = GPUS if routed else 1
    with tep.sim.Cluster(2 * senders, profile="cx7_400", move_bytes=False) as cluster:
        engines, part = cluster.engines, -(-nbytes // senders)
        memory = (1 << 40, 1 << 40, "cpu")

        async def send(k: int) -> None:
            source, target = engines[k], engines[senders + k]
            mr, desc = source.reg_mr(memory)[0], target.reg_mr(memory)[1]
            got = target.expect_imm_count(1, 1)
            source.submit_single_write(part, (mr, 0), (desc, 0), imm=1)
            await got

        async def main() -> None:
            await asyncio.gather(*map(send, range(senders)))

        cluster.run(main())
        return cluster.now_us / 1e6


def ring_s(tokens: int, ranks: int, *, routed: bool) -> float:
    """Seconds of a sequence that goes around a ring: each GPU passes on K and V of its part."""
    nbytes = tokens // ranks * KV_TOKEN_BYTES
    transfer_s = nbytes / NVLINK_S
    if ranks > GPUS:  # the slowest hop sets the pace
        if routed:  # to the other GPUs of the host, and there to the one that wants it
            transfer_s *= 2
        transfer_s = max(transfer_s, 0.0) + hop_s(max(1, nbytes), routed=routed)
    return ranks * (START_S + max(work_s(tokens) / ranks / ranks, transfer_s))


def place(lengths: list[int], hosts: int, levels: int) -> list[tuple[int, tuple[int, ...]]]:
    """(tokens, GPUs): the longest first; what exceeds a host's fair share goes around all."""
    every, load = tuple(range(hosts * GPUS)), [0.0] * (hosts * GPUS)
    fair = sum(map(work_s, lengths)) / len(every)
    found = []
    for tokens in sorted(lengths, reverse=True):
        mine = every
        if levels and work_s(tokens) <= GPUS * fair:
            rings = [every[h * GPUS : (h + 1) * GPUS] for h in range(hosts)]
            choices = rings if work_s(tokens) > fair else [(gpu,) for gpu in every]
            mine = min(choices, key=lambda gpus: max(load[gpu] for gpu in gpus))
        for gpu in mine:
            load[gpu] += work_s(tokens) / len(mine)
        found.append((tokens, mine))
    return found


def step_s(lengths: list[int], hosts: int, levels: int, routed: int) -> float:
    """Seconds until the last GPU is done: each takes its sequences one after the other."""
    free = [0.0] * (hosts * GPUS)
    for tokens, gpus in place(lengths, hosts, levels):
        begin = max(free[gpu] for gpu in gpus)
        took = work_s(tokens) if len(gpus) == 1 else ring_s(tokens, len(gpus), routed=bool(routed))
        for gpu in gpus:
            free[gpu] = begin + took
    return max(free)


def measure(hosts: int = 4, sequences: int = 256, seed: int = 0) -> dict[str, float]:
    """Way -> milliseconds."""
    lengths = draw(sequences, seed)
    return {name: 1e3 * step_s(lengths, hosts, *how) for name, how in WAYS.items()}


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4, help="of 8 GPUs")
    parser.add_argument("--sequences", type=int, default=256)
    args = parser.parse_args(argv)
    lengths = sorted(draw(args.sequences))
    print(
        f"{args.sequences} sequences: median {lengths[len(lengths) // 2]:,}, most {lengths[-1]:,}"
    )
    fair_ms = 1e3 * sum(map(work_s, lengths)) / args.hosts / GPUS
    print(f"{'compute alone':16}{fair_ms:8.2f} ms")
    found = measure(args.hosts, args.sequences)
    for way, ms in found.items():
        print(f"{way:16}{ms:8.2f} ms")
    times = found["all"] / found["Zeppelin"]
    print(f"Zeppelin is {times:.2f} times as fast as all; published: {PUBLISHED:.2f} in the mean")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Look up the KV of prompts' prefixes in many tiers, fetch what is there, and evict what is old.

Idea of LMCache: KV outlives the GPU's memory; a prompt's longest known prefix is fetched from a
peer's memory, a disk and a remote store, all at once, and only the rest is computed.

Measures: hit rate, time to the first token and requests a second over a drawn trace: users, some
more often than others, ask again and again about a document of their own. Each tier keeps the
chunks that were used last; what it evicts falls to the next one. alone: no cache. memory: the first
tier only. truncated: all tiers, but a long prompt keeps its newest part only, so it begins anew.
Published (arXiv 2510.09665): up to 15 times vLLM's throughput; truncation takes up to half of the
hits. Leaves out: KV in the GPU, decoding. Guessed: the trace, all tiers, the prefill's speed.

    python notebooks/examples/prefix_kv_many_tiers.py [--users N] [--rounds N]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import OrderedDict
from dataclasses import dataclass, field

import tep

PAGE_BYTES = 64 * 1024
CHUNK_TOKENS = 256  # LMCache's default
CHUNK_PAGES = 2 * CHUNK_TOKENS  # 128 KiB a token: Llama-3.1-8B
PREFILL_S = CHUNK_TOKENS / 12_000  # of one chunk
DOCUMENT, ROUND, WINDOW = 40, 2, 50  # chunks: a document, a question and answer, what is kept
WAYS = {"alone": 0, "memory": 1, "all tiers": 3}  # number of tiers


@dataclass
class Tier:
    """Where chunks lie: how many, the delay of a read, bytes a second."""

    room: int
    delay_s: float
    bytes_s: float
    chunks: OrderedDict[int, None] = field(default_factory=OrderedDict)


def tiers(users: int, count: int) -> list[Tier]:
    """Tiers whose rooms are shares of what all users' documents need."""
    half = users * DOCUMENT // 2
    numbers = [(half, 0.0, 50e9), (half, 100e-6, 12e9), (20 * half, 1e-3, 5e9)]
    return [Tier(*row) for row in numbers[:count]]


def put(found: list[Tier], chunk: int) -> None:
    """Keep a chunk in the first tier; what has to leave a tier goes to the next."""
    for tier in found:
        tier.chunks.pop(chunk, None)
    for tier in found:
        tier.chunks[chunk] = None
        if len(tier.chunks) <= tier.room:
            return
        chunk, _ = tier.chunks.popitem(last=False)


def trace(users: int, rounds: int, *, truncated: bool) -> list[list[int]]:
    """Prompts: each is all that was said so far, or, truncated, the newest part of it."""
    turns, prompts, weights = [0] * users, [], [1 / (k + 1) for k in range(users)]
    for user in random.Random(1).choices(range(users), weights, k=users * rounds):
        length = DOCUMENT + turns[user] * ROUND
        first = max(0, length - WINDOW) if truncated else 0
        prompts.append([hash((user, first, part)) for part in range(first, length)])
        turns[user] += 1
    return prompts


class Server:
    """A GPU that prefills what no tier has, and the NICs of the tiers."""

    def __init__(self, engines: list[tep.TransferEngine], found: list[Tier]) -> None:
        self.tiers, (self.engine, *self.owners) = found, engines
        memory = (1 << 40, 1 << 40, "cpu")
        self.mrs = [engine.reg_mr(memory)[0] for engine in self.owners]
        self.desc = self.engine.reg_mr(memory)[1]
        self.asked = self.hits = 0

    async def fetch(self, k: int, count: int) -> None:
        """Read chunks from a tier, each while the one before is on the wire."""
        tier, owner = self.tiers[k], self.owners[k]
        got = self.engine.expect_imm_count(1 + k, count * CHUNK_PAGES)
        await asyncio.sleep(tier.delay_s)
        pages = tep.Pages(range(CHUNK_PAGES))
        for _ in range(count):
            await asyncio.sleep(CHUNK_PAGES * PAGE_BYTES / tier.bytes_s)
            here, there = (self.mrs[k], pages), (self.desc, pages)
            owner.submit_paged_writes(PAGE_BYTES, here, there, imm=1 + k)
        await got

    async def serve(self, prompt: list[int]) -> None:
        """Look the longest prefix up, fetch it, and compute the rest."""
        counts = [0] * len(self.tiers)
        for chunk in prompt:
            where = [k for k, tier in enumerate(self.tiers) if chunk in tier.chunks]
            if not where:
                break
            counts[where[0]] += 1
        known = sum(counts)
        self.asked, self.hits = self.asked + len(prompt), self.hits + known
        await asyncio.gather(*(self.fetch(k, n) for k, n in enumerate(counts) if n))
        await asyncio.sleep((len(prompt) - known) * PREFILL_S)
        for chunk in prompt:
            put(self.tiers, chunk)


def run(users: int, rounds: int, count: int, *, truncated: bool = False):
    """Share of chunks that were found, milliseconds to a first token, requests a second."""
    prompts = trace(users, rounds, truncated=truncated)
    with tep.sim.Cluster(1 + count, profile="cx7_400", move_bytes=False) as cluster:
        server = Server(cluster.engines, tiers(users, count))

        async def serve_all() -> None:
            for prompt in prompts:
                await server.serve(prompt)

        cluster.run(serve_all())
        first_s = cluster.now_us / 1e6 / len(prompts)
        return server.hits / server.asked, 1e3 * first_s, 1 / first_s


def measure(users: int = 6, rounds: int = 5):
    """Way -> share of hits, milliseconds to a first token, requests a second."""
    found = {name: run(users, rounds, n) for name, n in WAYS.items()}
    return found | {"truncated": run(users, rounds, WAYS["all tiers"], truncated=True)}


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    print(f"{'':12}{'hits':>8}{'first token ms':>16}{'requests/s':>12}")
    for way, (hits, first_ms, rate) in (found := measure(args.users, args.rounds)).items():
        print(f"{way:12}{hits:8.1%}{first_ms:16.0f}{rate:12.2f}")
    times = found["all tiers"][2] / found["alone"][2]
    lost = 1 - found["truncated"][0] / found["all tiers"][0]
    print(f"throughput {times:.1f} times; published, up to: 15")
    print(f"truncation takes {lost:.0%} of the hits; published, up to: 50%")
    return 0


if __name__ == "__main__":
    sys.exit(main())

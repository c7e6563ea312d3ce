"""Move layers or KV between a prefill and a decode instance whenever their loads drift apart.

Idea of BanaServe: modules (layers with their weights) and KV of running requests move from the
instance that is overloaded to the other one, when it pays, while tokens go on.

Measures: requests a second of two instances over phases of long prompts, of long answers, and of
both, against instances that stay as they are, as DistServe's. When: once a phase has shown itself,
if the slower instance is over 10 % busier and what is gained in a horizon outweighs the move. What:
layers until both are equally busy; or KV, which moves the attention of so many requests, where the
decoder is the busy one, if that is quicker. A move's duration is simulated: pages are written while
tokens change some of them, which go again, until a round is as long as the one before. Published
(arXiv 2510.13223, abstract): 1.1 to 2.8 times DistServe's throughput. Leaves out: batching, prefix
caches, SLOs, memory. Guessed: the phases, seconds of work a request, the share of attention.

    python notebooks/examples/kv_and_module_migration.py [--phases N]
"""

from __future__ import annotations

import argparse
import sys
from functools import cache

import tep

PAGE_BYTES, TOKENS_PAGE, TOKEN_S = 32 * 1024, 16, 0.02
LAYERS, WEIGHT_BYTES_LAYER, CONTEXT = 80, 400 << 20, 8192
REQUESTS = 64  # running at a decoder
ATTENTION = 0.4  # of a decoder's work, where contexts are long; it moves with the KV
PHASE_S, NOTICE_S, MARGIN = 60.0, 5.0, 1.1
# Seconds of work that a request is for the prefiller, and for the decoder.
PHASES = {"long prompts": (0.050, 0.010), "long answers": (0.010, 0.050), "both": (0.030, 0.030)}
PUBLISHED = (1.1, 2.8)
PAGE_IMM, WEIGHT_IMM = 1, 2


class Migration:
    """One move from an engine to another."""

    def __init__(self, cluster: tep.sim.Cluster) -> None:
        self.cluster, (self.source, self.target) = cluster, cluster.engines
        memory = (1 << 40, 1 << 40, "cpu")
        self.mr, self.desc = self.source.reg_mr(memory)[0], self.target.reg_mr(memory)[1]
        self.rounds = 0

    async def send_pages(self, npages: int) -> None:
        """Write pages and wait until the target has counted them."""
        where = tep.Pages(range(npages))
        got = self.target.expect_imm_count(PAGE_IMM, npages)
        here, there = (self.mr, where), (self.desc, where)
        self.source.submit_paged_writes(PAGE_BYTES, here, there, imm=PAGE_IMM)
        await got
        self.rounds += 1

    async def send_weights(self, layers: int) -> None:
        """One write a layer."""
        nics = len(self.target.main_address.domains)  # a write is a row on each
        rows = tep.count_imms(tep.Single(WEIGHT_BYTES_LAYER), nics, nics)
        got = self.target.expect_imm_count(WEIGHT_IMM, layers * rows)
        for layer in range(layers):
            at = layer * WEIGHT_BYTES_LAYER
            here, there = (self.mr, at), (self.desc, at)
            self.source.submit_single_write(WEIGHT_BYTES_LAYER, here, there, imm=WEIGHT_IMM)
        await got

    async def send_kv(self, layers: int, requests: int) -> float:
        """All pages, and again those that tokens changed meanwhile; seconds of the last round."""
        sent, npages = 0, layers * requests * CONTEXT // TOKENS_PAGE
        while not sent or npages < sent:
            sent, round_us = npages, self.cluster.now_us
            await self.send_pages(npages)
            tokens = 1 + int((self.cluster.now_us - round_us) / 1e6 / TOKEN_S)
            npages = layers * requests * (1 + tokens // TOKENS_PAGE)
        halted_us = self.cluster.now_us
        await self.send_pages(npages)
        return (self.cluster.now_us - halted_us) / 1e6


@cache
def move_s(layers: int, requests: int) -> tuple[float, float]:
    """Seconds of a move, and of the halt in it: layers with weights, or KV of requests alone."""
    with tep.sim.Cluster(2, profile="efa_2x200", move_bytes=False) as cluster:
        migration = Migration(cluster)

        async def move() -> float:
            if layers:
                await migration.send_weights(layers)
                return 0.0
            return await migration.send_kv(LAYERS // 8, requests)  # one GPU's layers of a pipeline

        halt_s = cluster.run(move())
        return cluster.now_us / 1e6, halt_s


def choose(prefill_s: float, decode_s: float) -> tuple[str, float, float]:
    """What to move, seconds of the move, and seconds of work of the slower instance after it."""
    slow, fast = max(prefill_s, decode_s), min(prefill_s, decode_s)
    if slow < MARGIN * fast:
        return "nothing", 0.0, slow
    share = (slow - fast) / 2 / slow
    layers = max(1, round(share * LAYERS))
    options = [("layers", move_s(layers, 0)[0], slow * (1 - layers / LAYERS))]
    if decode_s > prefill_s:
        requests = max(1, round(min(1.0, share / ATTENTION) * REQUESTS))
        options.append(("KV", move_s(0, requests)[0], slow * (1 - ATTENTION * requests / REQUESTS)))
    gains = [
        ((PHASE_S - NOTICE_S - took) / max(after, slow + fast - after), what, took, after)
        for what, took, after in options
    ]
    _, what, took, after = max(gains)
    return what, took, max(after, slow + fast - after)


def measure(phases: int = 6) -> list[tuple[str, str, float, float, float]]:
    """For each phase: its name, what moves, seconds of the move, requests a second, if static."""
    found = []
    for index in range(phases):
        name = list(PHASES)[index % len(PHASES)]
        what, took_s, after_s = choose(*PHASES[name])
        static = 1 / max(PHASES[name])
        before_s = NOTICE_S + took_s if what != "nothing" else PHASE_S
        served = before_s * static + (PHASE_S - before_s) / after_s
        found.append((name, what, took_s, served / PHASE_S, static))
    return found


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--phases", type=int, default=3)
    args = parser.parse_args(argv)
    found = measure(args.phases)
    print(f"{'phase':14}{'moves':>10}{'move s':>8}{'requests/s':>12}{'static':>8}{'times':>7}")
    for name, what, took_s, rate, static in found:
        print(f"{name:14}{what:>10}{took_s:8.2f}{rate:12.1f}{static:8.1f}{rate / static:7.2f}")
    times = sum(rate for *_, rate, _ in found) / sum(static for *_, static in found)
    print(f"{times:.2f} times in all; published: {PUBLISHED[0]} to {PUBLISHED[1]}, by workload")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Move a model's layers and the KV of running requests to another instance, while tokens go on.

Idea of BanaServe: modules (layers with their weights) and KV move between instances when one is
overloaded.

Measures: how long a migration takes, and how long the requests stand still, in three ways. stop:
requests halt, weights and KV go over, requests continue. kv live: weights and KV go over while
tokens are decoded; then those pages go again that were changed meanwhile, until one more round
would not be shorter; then requests halt for the last round. weights there: the same, and the other
instance has the layers' weights already. Leaves out: when to migrate and what, the time to load
weights into kernels, attention split between two instances. Each decoded token changes the last KV
page of each request in each layer that moves; the time of a token is a guess.

    python notebooks/examples/kv_and_module_migration.py [--requests N] [--layers N]
"""

from __future__ import annotations

import argparse
import sys

import tep

PAGE_BYTES = 32 * 1024  # 16 tokens of a layer
TOKENS_PAGE = 16
TOKEN_S = 0.02
WEIGHT_BYTES_LAYER = 400 << 20
COMMIT_IMM, PAGE_IMM, WEIGHT_IMM = 1, 2, 3
WAYS = ("stop", "kv live", "weights there")


class Migration:
    """One migration between the two engines of a cluster."""

    def __init__(self, cluster: tep.sim.Cluster, requests: int, layers: int, context: int) -> None:
        self.cluster, self.layers = cluster, layers
        self.source, self.target = cluster.engines
        memory = (1 << 40, 1 << 40, "cpu")
        self.mr, self.desc = self.source.reg_mr(memory)[0], self.target.reg_mr(memory)[1]
        self.reply, self.back = self.target.reg_mr(memory)[0], self.source.reg_mr(memory)[1]
        self.context, self.requests = context, requests
        self.pages_sent = self.rounds = 0

    def pages(self, first_token: int, end_token: int) -> int:
        """Pages of all layers and requests that hold these tokens."""
        of_one = -(-end_token // TOKENS_PAGE) - first_token // TOKENS_PAGE
        return of_one * self.layers * self.requests

    async def send_pages(self, npages: int) -> None:
        """Write pages and wait until the target has counted them."""
        got = self.target.expect_imm_count(PAGE_IMM, npages)
        where = tep.Pages(range(npages))
        self.source.submit_paged_writes(
            PAGE_BYTES, (self.mr, where), (self.desc, where), imm=PAGE_IMM
        )
        await got
        self.pages_sent += npages
        self.rounds += 1

    async def send_weights(self) -> None:
        """One write a layer."""
        got = self.target.expect_imm_count(WEIGHT_IMM, self.layers)
        for layer in range(self.layers):
            at = layer * WEIGHT_BYTES_LAYER
            self.source.submit_single_write(
                WEIGHT_BYTES_LAYER, (self.mr, at), (self.desc, at), imm=WEIGHT_IMM
            )
        await got

    async def commit(self) -> None:
        """The target says that it has all: the source forgets, and requests go on over there."""
        said = self.source.expect_imm_count(COMMIT_IMM, 1)
        self.target.submit_single_write(8, (self.reply, 0), (self.back, 0), imm=COMMIT_IMM)
        await said

    async def run(self, way: str) -> tuple[float, float]:
        """Seconds of the migration, and of the halt in it."""
        cluster = self.cluster
        started_us = halted_us = cluster.now_us
        tokens = self.context
        if way == "stop":
            await self.send_weights()
            await self.send_pages(self.pages(0, tokens))
        else:
            if way == "kv live":
                await self.send_weights()
            before, sent = 0, 0
            while True:
                # The first round is long, and tokens come meanwhile. They end up in pages that the
                # next round sends; a round of the last page alone cannot get shorter.
                now = self.context + int((cluster.now_us - started_us) / 1e6 / TOKEN_S)
                npages = self.pages(before, now)
                if before and npages >= sent:
                    break
                await self.send_pages(npages)
                # The last page was not full: later tokens go into it, so it has to go again.
                before, sent = now - 1, npages
            halted_us = cluster.now_us
            now = self.context + int((halted_us - started_us) / 1e6 / TOKEN_S)
            await self.send_pages(self.pages(before, now))
        await self.commit()
        return (cluster.now_us - started_us) / 1e6, (cluster.now_us - halted_us) / 1e6


def measure(
    requests: int = 64, layers: int = 8, context: int = 8192, profile: str = "efa_2x200"
) -> dict[str, tuple[float, float, int, int]]:
    """Way -> seconds of the migration, seconds of the halt, pages sent, rounds."""
    found = {}
    for way in WAYS:
        with tep.sim.Cluster(2, profile=profile, move_bytes=False) as cluster:
            migration = Migration(cluster, requests, layers, context)
            times = cluster.run(migration.run(way))
            found[way] = (*times, migration.pages_sent, migration.rounds)
    return found


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8, help="that move")
    args = parser.parse_args(argv)
    print(f"{args.requests} requests of 8,192 tokens, {args.layers} layers, efa_2x200")
    print(f"{'':14}{'migration ms':>14}{'halt ms':>10}{'pages':>10}{'rounds':>8}")
    for way, (total_s, halt_s, pages, rounds) in measure(args.requests, args.layers).items():
        print(f"{way:14}{1e3 * total_s:14.1f}{1e3 * halt_s:10.2f}{pages:10,}{rounds:8}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

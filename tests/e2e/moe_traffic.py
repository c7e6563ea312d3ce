"""The traffic of one MoE decode step, dispatch and combine, by real engines in simulated time.

Scheduled as the paper's host proxy does it: routes to every peer, a first share of tokens into
private buffers, the rest once the routes are in, a barrier, then combine and a barrier. Kernels and
NVLink are left out but for the launch.
"""

from __future__ import annotations

import asyncio
import statistics
from typing import NamedTuple

import numpy as np

import tep
from tep.sim.cluster import Cluster

GPUS, TOKENS, TOPK, EXPERTS = 8, 128, 8, 256  # moe_decode.csv
DISPATCH_BYTES = 7408  # of a token: 7168 fp8 + 56 fp32 scales + 16, fabric-lib's stride
COMBINE_BYTES = 14_336  # 7168 bf16
PRIVATE_TOKENS = 32  # moe_private_buffer.csv: one burst
LAUNCH_S = 15e-6  # launch to first transfer, arXiv 2510.27656 v2, section 6
ROUTE_S = 5e-6  # CPU time for the routes; a guess
ROUTE, DISPATCH, DISPATCHED, COMBINE, COMBINED = range(1, 6)


class Medians(NamedTuple):
    """Over all ranks, microseconds."""

    dispatch: float
    combine: float


class Step:
    """One step of `ranks` ranks on a profile with one NIC."""

    def __init__(self, profile: str, ranks: int, seed: int = 0) -> None:
        self.cluster = Cluster(ranks, profile=profile, seed=seed, move_bytes=False)
        draws = np.random.default_rng(seed)
        per_rank = EXPERTS // ranks
        self.tokens = np.array(
            [
                np.bincount(
                    np.concatenate(
                        [draws.choice(EXPERTS, TOPK, replace=False) for _ in range(TOKENS)]
                    )
                    // per_rank,
                    minlength=ranks,
                )
                for _ in range(ranks)
            ]
        )
        self.regions = [e.reg_mr((1 << 40, 1 << 34, "cpu")) for e in self.cluster.engines]
        self.others = [[(r + k) % ranks for k in range(1, ranks)] for r in range(ranks)]
        self.remote = [[p for p in self.others[r] if p // GPUS != r // GPUS] for r in range(ranks)]
        self.times: list[tuple[float, float]] = []

    def scatter(self, rank: int, imm: int, nbytes: dict[int, int]) -> None:
        if nbytes:
            dsts = [tep.ScatterDst(n, 0, (self.regions[p][1], 0)) for p, n in nbytes.items()]
            self.cluster.engines[rank].submit_scatter(self.regions[rank][0], dsts, imm)

    async def rank(self, r: int) -> None:
        engine, tokens, remote = self.cluster.engines[r], self.tokens, self.remote[r]
        late = [p for p in remote if tokens[p, r] > PRIVATE_TOKENS]
        routes = engine.expect_imm_count(ROUTE, len(self.others[r]))
        got = engine.expect_imm_count(DISPATCH, len(remote) + len(late))
        await asyncio.sleep(LAUNCH_S)
        self.scatter(r, ROUTE, dict.fromkeys(self.others[r], EXPERTS * 4))
        first = {p: min(int(tokens[r, p]), PRIVATE_TOKENS) * DISPATCH_BYTES for p in remote}
        self.scatter(r, DISPATCH, first)
        await routes
        await asyncio.sleep(ROUTE_S)
        rest = {p: int(tokens[r, p]) - PRIVATE_TOKENS for p in remote}
        self.scatter(r, DISPATCH, {p: n * DISPATCH_BYTES for p, n in rest.items() if n > 0})
        await got
        dispatched_us = self.cluster.now_us
        await self.barrier(r, DISPATCHED)
        start_us = self.cluster.now_us
        got = engine.expect_imm_count(COMBINE, len(remote))
        await asyncio.sleep(LAUNCH_S)
        self.scatter(r, COMBINE, {p: int(tokens[p, r]) * COMBINE_BYTES for p in remote})
        await got
        self.times.append((dispatched_us, self.cluster.now_us - start_us))
        await self.barrier(r, COMBINED)

    async def barrier(self, r: int, imm: int) -> None:
        engine = self.cluster.engines[r]
        engine.submit_barrier([self.regions[p][1] for p in self.others[r]], imm)
        await engine.expect_imm_count(imm, len(self.others[r]))

    def run(self) -> Medians:
        async def main() -> None:
            await asyncio.gather(*(self.rank(r) for r in range(len(self.regions))))

        with self.cluster:
            self.cluster.run(main())
        return Medians(*map(statistics.median, zip(*self.times, strict=True)))

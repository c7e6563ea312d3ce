"""CPU of one simulated MoE decode step: 64 ranks without payload bytes, 8 ranks with them.

    python tests/bench/bench_moe.py [--repeat N] [--json]

Medians of process CPU time, one warm-up before. "step" leaves out what is done once: engines,
regions, peers. The machine's clock speed is not corrected for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np

from tep import sim
from tep.apps import moe
from tep.apps.moe.predict import Workload, predict


def ep64(nic: str) -> dict[str, float]:
    """Seconds of CPU: one step with its set-up, and a further step."""
    spent = []
    for turns in (1, 2):
        begin = time.process_time()
        predict(Workload(ep=64, nic=nic, turns=turns))
        spent.append(time.process_time() - begin)
    return {"with set-up": spent[0], "step": spent[1] - spent[0]}


def ep8(node_size: int) -> dict[str, float]:
    """Seconds of CPU of one step of 8 ranks with all bytes, experts left out."""
    world, tokens, topk, experts, hidden = 8, 128, 8, 256, 7168
    link = moe.Nvlink()
    groups = moe.local_groups(world, node_size=node_size, links=link.port)
    spent: list[float] = []

    async def rank(cluster: sim.Cluster, number: int) -> None:
        rng = np.random.default_rng(number)
        x = rng.integers(0, 256, (tokens, hidden)).astype(np.uint8)
        scales = rng.random((tokens, 56), np.float32)
        weights = rng.random((tokens, topk), np.float32)
        alltoall = moe.AllToAll(
            cluster.engines[number],
            groups[number],
            num_experts=experts,
            topk=topk,
            hidden=hidden,
            max_tokens=tokens,
            private_tokens=256,
        )
        async with alltoall:
            for _ in range(3):
                indices = rng.random((tokens, experts)).argpartition(topk, axis=1)[:, :topk]
                begin = time.process_time()
                got = await alltoall.dispatch(x, scales, indices, weights)
                results = np.zeros((int(got.starts[-1]), hidden), np.uint16)
                await alltoall.combine(results)
                if number == 0:
                    spent.append(time.process_time() - begin)

    async def main(cluster: sim.Cluster) -> None:
        await asyncio.gather(*(rank(cluster, number) for number in range(world)))

    with sim.Cluster(world, profile="cx7_400") as cluster:
        cluster.run(main(cluster))
    return {"step": statistics.median(spent[1:])}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    predict(Workload(ep=8, turns=1))
    runs = {
        "EP64 cx7, no bytes": lambda: ep64("cx7"),
        "EP64 efa, no bytes": lambda: ep64("efa"),
        "EP8, all bytes by NIC": lambda: ep8(1),
        "EP8, all bytes by NVLink": lambda: ep8(8),
    }
    found = {}
    for name, run in runs.items():
        seen = [run() for _ in range(options.repeat)]
        found[name] = {key: statistics.median(one[key] for one in seen) for key in seen[0]}
    if options.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return 0
    for name, parts in found.items():
        sys.stdout.write(
            f"{name:26}" + "".join(f"{k}: {v:.2f} s   " for k, v in parts.items()) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

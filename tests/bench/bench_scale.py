"""What the simulator costs at scale: CPU seconds and memory of each large run, each in a process of
its own. `python tests/bench/bench_scale.py [NAME ...]`
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import tep

KIB = 1024


def kvcache() -> str:
    """1,000 engines, one simulated minute, on the flow fabric."""
    from tep.apps.kvcache.simulate import Load, Plant, simulate

    plant = Plant(prefillers=125, decoders=125)
    report = simulate(plant, Load(rate=40.0, duration_s=60.0))
    assert not report.failed
    return f"{report.writes} writes of {report.rows} pages"


def rl(trains: int, infers: int) -> str:
    from tep.apps.rl import study
    from tep.apps.rl.models import load_model

    deployment = study.Deployment(
        model=load_model("kimi-k2"),
        train=study.train_layout(trains),
        infer=study.infer_layout(infers),
    )
    found = deployment.predict()
    return f"{found.total_ms:.0f} ms, {found.rows} writes"


def moe(ep: int) -> str:
    from tep.apps.moe.predict import Workload, predict

    found = predict(Workload(ep=ep, turns=1, experts=max(256, ep)))
    return f"dispatch {found.dispatch_us:.0f} us, combine {found.combine_us:.0f} us"


def alltoall(ranks: int) -> str:
    """Every rank writes 16 KiB to every other, in one scatter each."""
    with tep.sim.Cluster(ranks, profile="cx7_400", move_bytes=False) as cluster:
        engines = cluster.engines
        regions = [engine.reg_mr((1 << 40, 1 << 30, "cpu")) for engine in engines]

        async def one(rank: int) -> None:
            others = [(rank + k) % ranks for k in range(1, ranks)]
            dsts = [tep.ScatterDst(16 * KIB, 0, (regions[p][1], 0)) for p in others]
            got = engines[rank].expect_imm_count(1, ranks - 1)
            engines[rank].submit_scatter(regions[rank][0], dsts, 1)
            await got

        async def main() -> None:
            await asyncio.gather(*map(one, range(ranks)))

        cluster.run(main())
        return f"{cluster.now_us:.0f} us"


RUNS: dict[str, Callable[[], str]] = {
    "KvCache, 1,000 engines, 1 minute": kvcache,
    "RL, Kimi-K2, 256 to 128": lambda: rl(256, 128),
    "RL, Kimi-K2, 4,096 to 2,048": lambda: rl(4096, 2048),
    "MoE EP64, one step": lambda: moe(64),
    "MoE EP256, one step": lambda: moe(256),
    "all-to-all of 256 ranks": lambda: alltoall(256),
    "all-to-all of 1,024 ranks": lambda: alltoall(1024),
}


def main(argv: list[str]) -> int:
    """Run those named, or all."""
    if argv[:1] == ["--one"]:
        started_s = time.process_time()
        said = RUNS[argv[1]]()
        used = resource.getrusage(resource.RUSAGE_SELF)
        found = [said, time.process_time() - started_s, used.ru_maxrss / 2**20]
        sys.stdout.write(json.dumps(found))
        return 0
    sys.stdout.write(f"{'run':36} {'CPU s':>8} {'GiB':>6}  result\n")
    for name in argv or RUNS:
        command = [sys.executable, __file__, "--one", name]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        said, cpu_s, gib = json.loads(run.stdout)
        sys.stdout.write(f"{name:36} {cpu_s:8.2f} {gib:6.2f}  {said}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

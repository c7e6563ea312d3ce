"""Measure large simulations: CPU, memory and counts of each run, each in its own process.

Seconds depend on the machine and its other work. Counts do not: the same code makes as many
events on each machine, so tests check the counts, and this shows both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final

from tep.apps.kvcache.simulate import Load, Plant, simulate
from tep.apps.moe.predict import Workload, predict
from tep.apps.rl import study
from tep.apps.rl.models import load_model
from tep.base.api import ScatterDst
from tep.base.errors import UsageError
from tep.base.units import KiB
from tep.cli.show import emit_json, print_table
from tep.sim import Cluster, FabricEnv, TimingFabric
from tests.bench.figures import machine_of_figures

__all__ = [
    "RUNS",
    "Cost",
    "Run",
    "alltoall",
    "counted",
    "measure",
    "moe_step",
    "scale_costs",
    "select",
]

_LIMIT_S: Final = 3600
_LOOP_ROUNDS: Final = 2_000_000


@dataclass(frozen=True, slots=True)
class Run:
    """One large run.

    Attributes:
        work: makes the run, and returns its result in words.
        aim_s: CPU seconds that it should stay under; None: no aim was set.
        without: a run without the measured part; its cost is subtracted.
    """

    work: Callable[[], str]
    aim_s: float | None = None
    without: Callable[[], str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a run.

    Attributes:
        what: name of the run.
        cpu_s: CPU of the process, without its imports; the median of its rounds.
        aim_s: CPU seconds that it should stay under.
        memory_gib: peak memory of the process.
        events: calls that the simulated clock made.
        passes: computations of the timing fabric.
        loop_ns: CPU nanoseconds of one round of a fixed loop of this Python, measured just before:
            on a machine that is busy or slow it grows as cpu_s does.
        result: the run's result in words.
    """

    what: str
    cpu_s: float
    aim_s: float | None
    memory_gib: float
    events: int
    passes: int
    loop_ns: float
    result: str

    @property
    def reached(self) -> bool | None:
        """True if the aim is reached, or there is none."""
        return None if self.aim_s is None else self.cpu_s <= self.aim_s


def kvcache(rate: float, duration_s: float) -> str:
    """Run 200 engines; 32,768 tokens a request."""
    load = Load(rate=rate, duration_s=duration_s)
    report = simulate(Plant(prefillers=25, decoders=25), load)
    assert not report.failed, report.failed
    return f"{report.writes:,} paged writes of {report.rows:,} pages"


def rl(trains: int, infers: int) -> str:
    """Schedule and predict one weight update of Kimi-K2."""
    deployment = study.Deployment(
        model=load_model("kimi-k2"),
        train=study.train_layout(trains),
        infer=study.infer_layout(infers),
    )
    found = deployment.predict()
    return f"{found.total_ms:,.0f} ms, {len(deployment.schedule().rows):,} writes"


def moe_step(ep: int, turns: int = 1) -> str:
    """Run decode steps on ConnectX-7: dispatch, combine, and their barriers."""
    found = predict(Workload(ep=ep, turns=turns, experts=max(256, ep)))
    return f"dispatch {found.dispatch_us:.0f} us, combine {found.combine_us:.0f} us"


def alltoall(ranks: int) -> str:
    """Run one scatter a rank: every rank writes 16 KiB to every other."""
    with Cluster(ranks, profile="cx7_400", move_bytes=False) as cluster:
        engines = cluster.engines
        regions = [engine.reg_mr((1 << 40, 1 << 30, "cpu")) for engine in engines]

        async def one(rank: int) -> None:
            others = [(rank + k) % ranks for k in range(1, ranks)]
            dsts = [ScatterDst(16 * KiB, 0, (regions[peer][1], 0)) for peer in others]
            got = engines[rank].expect_imm_count(1, ranks - 1)
            engines[rank].submit_scatter(regions[rank][0], dsts, 1)
            await got

        async def main() -> None:
            await asyncio.gather(*map(one, range(ranks)))

        cluster.run(main())
        return f"{cluster.now_us:,.0f} us"


RUNS: Final[dict[str, Run]] = {
    "KvCache, 200 engines, 5 seconds of 4 requests/s": Run(partial(kvcache, 4.0, 5.0)),
    "RL, Kimi-K2, 256 to 128 GPUs": Run(partial(rl, 256, 128), 10.0),
    "RL, Kimi-K2, 4,096 to 2,048 GPUs": Run(partial(rl, 4096, 2048), 600.0),
    "MoE EP64, one more step": Run(partial(moe_step, 64, 2), 0.6, partial(moe_step, 64, 1)),
    "MoE EP64, set-up and one step": Run(partial(moe_step, 64)),
    "MoE EP256, set-up and one step": Run(partial(moe_step, 256)),
    "all-to-all of 64 ranks": Run(partial(alltoall, 64)),
    "all-to-all of 256 ranks": Run(partial(alltoall, 256)),
    "all-to-all of 1,024 ranks": Run(partial(alltoall, 1024)),
}
"""The runs, by name. Aims were set for an idle core of the machine this was written on."""


def counted(work: Callable[[], str]) -> tuple[str, int, int]:
    """Run; return the result, the simulated clock's calls and the timing fabric's passes."""
    counts = {"call_at": 0, "_settle": 0}

    def count(owner: type, name: str) -> Callable[[], None]:
        inner = getattr(owner, name)

        def outer(*args: object) -> object:
            counts[name] += 1
            return inner(*args)

        setattr(owner, name, outer)
        return lambda: setattr(owner, name, inner)

    undo = count(FabricEnv, "call_at"), count(TimingFabric, "_settle")
    try:
        said = work()
    finally:
        for back in undo:
            back()
    return said, counts["call_at"], counts["_settle"]


def measure(name: str, run: Run) -> Cost:
    """Measure a run in this process, with counts, which cost about 1 % of its CPU."""
    loop_ns = _loop_ns()
    off_s, events_off, passes_off = 0.0, 0, 0
    if run.without is not None:
        run.without()  # the first run fills the caches of the process
        started_s = time.process_time()
        _, events_off, passes_off = counted(run.without)
        off_s = time.process_time() - started_s
    started_s = time.process_time()
    said, events, passes = counted(run.work)
    spent_s = time.process_time() - started_s
    return Cost(
        what=name,
        cpu_s=spent_s - off_s,
        aim_s=run.aim_s,
        memory_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        events=events - events_off,
        passes=passes - passes_off,
        loop_ns=loop_ns,
        result=said,
    )


def _loop_ns() -> float:
    started_ns = time.thread_time_ns()
    total = 0
    for k in range(_LOOP_ROUNDS):
        total += k & 7
    return (time.thread_time_ns() - started_ns) / _LOOP_ROUNDS


def scale_costs(names: Sequence[str] = (), rounds: int = 1) -> Iterator[Cost]:
    """Measure runs, each round in its own process; return each run's round with the median CPU.

    Args:
        names: parts of names of RUNS, in any case; none: all runs.
        rounds: number of rounds; if it is even, the dearer middle round is taken.

    Raises:
        UsageError: no run has such a name, or a run failed.
    """
    for name in select(names):
        found = [_in_a_process(name) for _ in range(rounds)]
        yield sorted(found, key=lambda cost: cost.cpu_s)[rounds // 2]


def select(names: Sequence[str]) -> list[str]:
    """Return the runs whose name contains one of these parts; without parts, all.

    Raises:
        UsageError: a part is in no name.
    """
    for part in names:
        if not any(part.lower() in name.lower() for name in RUNS):
            raise UsageError(f"no run is called {part!r}; there are: {'; '.join(RUNS)}")
    parts = [part.lower() for part in names]
    return [name for name in RUNS if not parts or any(part in name.lower() for part in parts)]


def _in_a_process(name: str) -> Cost:
    command = [sys.executable, "-m", "tests.bench.bench_scale", "--one", name]
    done = subprocess.run(  # this module
        command, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    if done.returncode:
        raise UsageError(f"{name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return Cost(**json.loads(done.stdout))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; loop is one round of a fixed Python loop: on a busy machine it grows as CPU does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], help="runs whose name holds this")
    parser.add_argument("--rounds", type=int, default=1, help="of each; the one with median CPU")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=RUNS, help="measure this run in this process, as JSON")
    args = parser.parse_args(argv)
    if args.one:
        sys.stdout.write(json.dumps(asdict(measure(args.one, RUNS[args.one]))))
        return 0
    title = "tests.bench.bench_scale"
    try:
        found = list(scale_costs(args.only, args.rounds))
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if args.json:
        rows = [asdict(cost) | {"reached": cost.reached} for cost in found]
        emit_json({"command": title, "machine": machine_of_figures(), "runs": rows})
        return 0
    table = (
        {
            "what": cost.what,
            "CPU": f"{cost.cpu_s:.2f} s",
            "aim": _scale_aim(cost),
            "memory": f"{cost.memory_gib:.2f} GiB",
            "events": f"{cost.events:,}",
            "passes": f"{cost.passes:,}",
            "loop": f"{cost.loop_ns:.0f} ns",
            "result": cost.result,
        }
        for cost in found
    )
    columns = ("what", "CPU", "aim", "memory", "events", "passes", "loop", "result")
    print_table(f"{title} ({machine_of_figures()})", columns, table)
    return 0


def _scale_aim(cost: Cost) -> str | None:
    if cost.aim_s is None:
        return None
    return f"< {cost.aim_s:g} {'reached' if cost.reached else 'MISSED'}"


if __name__ == "__main__":
    sys.exit(main())

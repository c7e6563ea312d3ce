"""Measure chaos scenarios a second: drawing, engines, fabric and oracle, on one core.

    python tests/bench/bench_chaos.py --batches 9 --runs 200

CPU time of this thread; the median over batches of different seeds, and the extremes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence

from tests.world.oracle import replay


def rate(seeds: range) -> tuple[float, int]:
    """Scenarios a second of CPU time over some seeds, and rows posted in all."""
    start_ns = time.thread_time_ns()
    rows = sum(replay(seed).rows for seed in seeds)
    return len(seeds) * 1e9 / (time.thread_time_ns() - start_ns), rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=9)
    parser.add_argument("--runs", type=int, default=200, help="scenarios a batch")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)

    rate(range(50))  # the first runs import, and fill caches
    starts = range(args.seed, args.seed + args.batches * args.runs, args.runs)
    found = [rate(range(start, start + args.runs)) for start in starts]
    rates = sorted(value for value, _ in found)
    report = {
        "scenarios_per_s": round(statistics.median(rates)),
        "slowest_batch": round(rates[0]),
        "fastest_batch": round(rates[-1]),
        "batches": args.batches,
        "runs": args.runs,
        "rows_per_scenario": round(sum(rows for _, rows in found) / (args.batches * args.runs), 1),
    }
    sys.stdout.write((json.dumps(report) if args.json else _table(report)) + "\n")
    return 0


def _table(report: dict[str, float]) -> str:
    return "\n".join(f"{name:20s} {value}" for name, value in report.items())


if __name__ == "__main__":
    sys.exit(main())

"""The large cluster: 1,000 engines, one simulated minute, 20 requests a second of 32K tokens.

    python tests/bench/bench_kvcache.py --seconds 60

CPU time of this process, and its largest resident memory. The aim is 120 s and 4 GiB for 60 s.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from tep.apps.kvcache.simulate import Load, Plant, simulate


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=125, help="of each kind, TP4")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--profile", default="efa_2x200")
    parser.add_argument("--fabric", choices=("flow", "timing"), default="flow")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)

    plant = Plant(
        prefillers=args.instances,
        decoders=args.instances,
        profile=args.profile,
        fabric=args.fabric,
    )
    load = Load(rate=args.rate, duration_s=args.seconds, ntokens=(args.tokens,), seed=args.seed)
    found = simulate(plant, load)
    report = {
        "engines": found.engines,
        "requests": len(found.completions),
        "failed": len(found.failed),
        "paged_writes": found.writes,
        "pages": found.rows,
        "simulated_s": round(found.simulated_s, 2),
        "cpu_s": round(found.cpu_s, 1),
        "cpu_us_a_write": round(1e6 * found.cpu_s / max(1, found.writes), 1),
        "rss_gib": round(found.rss_bytes / 2**30, 2),
        "ttft_p50_ms": round(1e3 * found.ttft_s(0.5), 1),
        "ttft_p99_ms": round(1e3 * found.ttft_s(0.99), 1),
    }
    lines = "\n".join(f"{name:16s} {value}" for name, value in report.items())
    sys.stdout.write((json.dumps(report) if args.json else lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How soon each planted bug is found: seeds until the first finding, from several starts.

    python -m tests.bench.bench_bugs --starts 5 --only rescue
    python -m tests.bench.bench_bugs --starts 1 --most 300 --without "one NIC"

Median and worst over the starts; a bug that is not found counts as the budget. With --without the
fabric lacks an ability, and the bugs that escape then are listed: what that ability is worth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence

from tep.testing.oracle import Violation, run_scenario
from tep.testing.scenario import Scenario
from tests.gate.planted import BUGS, planted
from tests.gate.test_planted_bugs import WEAKER

START = 100_000


def seeds_to_find(name: str, start: int, most: int, without: str = "") -> int:
    """Play seeds from `start` on under a bug, up to the first finding; most + 1 if there is none.

    `without`: an ability that the fabric lacks.
    """
    weaken = WEAKER[without] if without else lambda scenario: scenario
    with planted(name):
        for n, seed in enumerate(range(start, start + most), 1):
            try:
                run_scenario(weaken(Scenario.draw(seed)))
            except Violation:
                return n
    return most + 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--most", type=int, default=3000, help="seeds a start")
    parser.add_argument("--only", default="", help="part of the name of a bug, or of its file")
    parser.add_argument("--without", default="", choices=["", *WEAKER], metavar="ABILITY")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)

    rows = []
    for name, bug in BUGS.items():
        if args.only in f"{bug.plant.__module__}.{name}":
            starts = range(0, START * args.starts, START)
            found = [seeds_to_find(name, start, args.most, args.without) for start in starts]
            rows.append({"bug": name, "median": statistics.median(found), "worst": max(found)})
            if not args.json:
                told = rows[-1]
                sys.stdout.write(f"{name:36s} {told['median']:6.0f} {told['worst']:6d}\n")
                sys.stdout.flush()
    escaped = [row["bug"] for row in rows if row["worst"] > args.most]
    if args.json:
        sys.stdout.write(json.dumps(rows) + "\n")
    else:
        sys.stdout.write(f"{len(escaped)} of {len(rows)} escape: {', '.join(escaped)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure how soon each planted bug is found: seeds until the first finding, from several starts.

    python -m tests.bench.bench_bugs --starts 5
    python -m tests.bench.bench_bugs --starts 5 --only failover
    python -m tests.bench.bench_bugs --starts 1 --most 200 --escapes

Median and worst over the starts; a bug that is not found counts as --most + 1. The bugs are those
of all gates: engine and fairness, burnt, company, pruning, reads, removals, reopening. With
--escapes the fabric lacks one ability after another, and the number of bugs of the first two gates
that escape then is printed: the worth of that ability.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tests.gate.bugs_burnt import BARRING, BURNT
from tests.gate.bugs_lives import COMPANY
from tests.gate.bugs_reads import READ_BUGS
from tests.gate.bugs_reopening import PRUNING, REOPENING
from tests.gate.planted import BUGS
from tests.gate.registry import Bug, changed
from tests.gate.test_planted_bugs import WEAKER
from tests.world.oracle import run_scenario
from tests.world.scenario import Scenario

START = 100_000


class Hunt(NamedTuple):
    """A bug, the gate that has to find it, and the run of a seed, which raises if it does."""

    gate: str
    bug: Bug
    run: Callable[[int], object]

    @property
    def name(self) -> str:
        return f"{self.gate}: {self.bug.name}"


def engine_hunts(without: str = "") -> Iterator[Hunt]:
    """Bugs that are hunted by scenarios; `without`: an ability that the fabric lacks."""
    weaken = WEAKER[without] if without else lambda scenario: scenario
    for bug in BUGS.values():
        gate = bug.plant.__module__.rpartition("bugs_")[2]
        yield Hunt(gate, bug, lambda seed: run_scenario(weaken(Scenario.draw(seed))))


def all_hunts() -> Iterator[Hunt]:
    yield from engine_hunts()
    more = {
        "burnt": BURNT,
        "company": COMPANY,
        "pruning": PRUNING,
        "reads": READ_BUGS,
        "removals": BARRING,
        "reopening": REOPENING,
    }
    for gate, bugs in more.items():
        for bug in bugs.values():
            yield Hunt(gate, bug, lambda seed: run_scenario(Scenario.draw(seed)))


def seeds_to_find(hunt: Hunt, start: int, most: int) -> int:
    """Play seeds under a bug up to the first finding, and say how many; most + 1 if none is."""
    with changed(hunt.bug.plant()):
        for n, seed in enumerate(range(start, start + most), 1):
            try:
                hunt.run(seed)
            except Exception:  # noqa: BLE001  # whatever a broken engine raises is a finding
                return n
    return most + 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--most", type=int, default=3000, help="seeds a start")
    parser.add_argument("--only", default="", help="part of the name of a bug, or of its gate")
    parser.add_argument("--escapes", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)  # what callbacks of a broken engine raise is a finding

    starts = range(0, START * args.starts, START)
    if args.escapes:
        for ability in ("", *WEAKER):
            hunts = [hunt for hunt in engine_hunts(ability) if args.only in hunt.name]
            missed = [
                hunt.bug.name
                for hunt in hunts
                if all(seeds_to_find(hunt, start, args.most) > args.most for start in starts)
            ]
            what = f"without: {ability}" if ability else "all abilities"
            _tell(f"{what:32s} {len(missed):3d} of {len(hunts)}  {', '.join(missed)}")
        return 0

    rows = []
    for hunt in (hunt for hunt in all_hunts() if args.only in hunt.name):
        found = [seeds_to_find(hunt, start, args.most) for start in starts]
        rows.append({"bug": hunt.name, "median": statistics.median(found), "worst": max(found)})
        if not args.json:
            _tell(f"{hunt.name:44s} {rows[-1]['median']:6.0f} {rows[-1]['worst']:6d}")
    if args.json:
        _tell(json.dumps(rows))
    else:
        medians = [row["median"] for row in rows]
        _tell(f"{len(rows)} bugs: the median bug after {statistics.median(medians):.0f} seeds,")
        _tell(f"the worst start of the worst after {max(row['worst'] for row in rows)}")
    return 0


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

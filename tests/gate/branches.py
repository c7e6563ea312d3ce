"""Report the branches of core, control and engine that no run of the oracle takes.

    python -m tests.gate.branches             compare with branches.txt; status 1: it differs
    python -m tests.gate.branches --write     take out what is taken, add what is new

branches.txt has a line for each branch, under a line with the reason that holds for it. A branch is
named by its function, its text and the text that it leads to, so that other edits keep the name.
Branches inside of what was never reached are not named: only where a run could have turned off.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.world.oracle import replay

if TYPE_CHECKING:
    from coverage import Coverage

SEEDS = 5_000
ROOT = Path(__file__).parents[2]
ROOMS = [str(ROOT / "tep" / name) for name in ("core", "control", "engine")]
LIST = Path(__file__).with_name("branches.txt")
NEW = "= to be explained"
_CHUNK = 500
_TEXT_MAX = 64

Arcs = dict[str, list[tuple[int, int]]]


def _coverage() -> Coverage:
    from coverage import Coverage  # what reads the list does not need it

    return Coverage(branch=True, source=ROOMS, data_file=None, config_file=False)


def _arcs(start: int, stop: int) -> Arcs:
    """Return the arcs that the runs of some seeds took."""
    coverage = _coverage()
    coverage.start()
    try:
        for seed in range(start, stop):
            replay(seed)
    finally:
        coverage.stop()
    data = coverage.get_data()
    return {name: data.arcs(name) or [] for name in data.measured_files()}


def never_taken(seeds: int) -> list[str]:
    """The names of the branches that no seed below this one takes, and of functions not called."""
    coverage = _coverage()
    starts = range(0, seeds, _CHUNK)
    stops = [min(start + _CHUNK, seeds) for start in starts]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for arcs in pool.map(_arcs, starts, stops):
            coverage.get_data().add_arcs(arcs)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        coverage.json_report(outfile=str(report))
        files = json.loads(report.read_text())["files"]
    return [line for name in sorted(files) for line in _of_file(Path(name), files[name])]


def _of_file(path: Path, found: dict[str, Any]) -> list[str]:
    lines = [" ".join(line.split()) for line in path.read_text().splitlines()]
    path = path.resolve().relative_to(ROOT)
    names: Counter[str] = Counter()
    for function, region in found["functions"].items():
        if not function:
            continue  # the module's own lines run at its import
        if not region["executed_lines"]:
            if region["missing_lines"]:
                names[f"{path} {function}: never called"] += 1
            continue
        for here, there in region["missing_branches"]:
            if here in region["executed_lines"]:
                to = "leave" if there < 0 else lines[there - 1][:_TEXT_MAX].rstrip()
                names[f"{path} {function}: {lines[here - 1][:_TEXT_MAX]} -> {to}"] += 1
    return [name if n == 1 else f"{name} ({n} times)" for name, n in names.items()]


def listed() -> dict[str, list[str]]:
    """The lines of branches.txt by their reasons."""
    found: dict[str, list[str]] = {}
    for line in filter(None, LIST.read_text().splitlines() if LIST.exists() else []):
        if line.startswith("= "):
            mine = found.setdefault(line, [])
        else:
            mine.append(line)
    return found


def main() -> int:
    """Compare, and perhaps write; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--write", action="store_true", help="bring branches.txt up to date")
    options = parser.parse_args()
    now, before = never_taken(options.seeds), listed()
    known = {line for lines in before.values() for line in lines}
    new, old = [line for line in now if line not in known], known.difference(now)
    for line in new:
        sys.stdout.write(f"never taken, and not listed: {line}\n")
    for line in sorted(old):
        sys.stdout.write(f"listed, but taken now or gone: {line}\n")
    if options.write:
        after = {why: [line for line in lines if line not in old] for why, lines in before.items()}
        after.setdefault(NEW, []).extend(new)
        parts = ["\n".join([why, *lines]) for why, lines in after.items() if lines]
        LIST.write_text("\n\n".join(parts) + "\n")
    return 1 if new or old else 0


if __name__ == "__main__":
    raise SystemExit(main())

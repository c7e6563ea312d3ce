"""Search many seeds of the engine as it is, a share at a time; a stopped search can be resumed.

    .venv/bin/python scripts/search_seeds.py --seeds 1000000 --workers 2

The state is a file: the commit, the first seed, the number of seeds, and the findings. It is
written after each share, so that Ctrl-C or a crash loses one share a worker. On another commit a
new entry begins, at the seed after the last one: the same seeds would mostly show the same.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the drawn world, which no package has

from tep.testing import Violation  # noqa: E402  # below the path
from tests.world.oracle import replay  # noqa: E402  # below the path

STATE: Final = ROOT / "tests" / "gate" / "searched.json"
SHARE: Final = 500


def search(first: int) -> tuple[int, list[tuple[int, str]], Counter[str], float]:
    """Play one share of seeds; return its first seed, findings, coverage and CPU seconds."""
    logging.disable(logging.CRITICAL)
    start_s = time.process_time()
    found: list[tuple[int, str]] = []
    seen: Counter[str] = Counter()
    for seed in range(first, first + SHARE):
        try:
            seen.update(replay(seed).seen)
        except Violation as violation:
            found.append((seed, str(violation).splitlines()[0]))
    return first, found, seen, time.process_time() - start_s


def commit() -> str:
    """Return the commit that is searched; with a + if files other than the state differ from it."""
    head = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{STATE}")
    return head + "+" * bool(changed)


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    done = subprocess.run(command, check=True, capture_output=True)  # noqa: S603  # git alone
    return done.stdout.decode().strip()


def main(argv: list[str] | None = None) -> int:
    """Search until this commit has enough seeds; return 1 if any broke a promise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--state", type=Path, default=STATE)
    given = parser.parse_args(argv)
    entries: list[dict[str, Any]] = []
    if given.state.exists():
        entries = json.loads(given.state.read_text())
    here = commit()
    if not entries or entries[-1]["commit"] != here:
        first = sum(entries[-1][part] for part in ("first", "seeds")) if entries else 0
        fresh = {"commit": here, "first": first, "seeds": 0, "cpu_s": 0.0}
        entries.append(fresh | {"findings": [], "seen": {}})
    entry = entries[-1]
    starts = range(entry["first"] + entry["seeds"], entry["first"] + given.seeds, SHARE)
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        for _, found, seen, cpu_s in pool.imap(search, starts):
            entry["seeds"] += SHARE
            entry["cpu_s"] = round(entry["cpu_s"] + cpu_s, 1)
            entry["findings"] += found
            entry["seen"] = dict(sorted((Counter(entry["seen"]) + seen).items()))
            new = given.state.with_suffix(".new")
            new.write_text(json.dumps(entries, indent=1) + "\n")
            new.replace(given.state)
            for seed, text in found:
                print(f"seed {seed}: {text}", flush=True)
    print(f"{entry['seeds']} seeds at {here}: {len(entry['findings'])} findings")
    return 1 if entry["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())

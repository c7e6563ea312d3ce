"""Mistakes that a tool makes in core, control and wire: which of them does no test notice?

    pip install cosmic-ray                      # a tool; the project does not need it
    python -m tests.gate.mutants --sample 300   # in a copy of the checkout: it changes its files
    python -m tests.gate.mutants                # all of them: hours

A mistake is one operator, number or condition replaced by another; at each place of the code the
session has one, drawn by --seed. For each, 250 drawn runs are played first, and then the unit and
property tests of `--fast`; the first failure ends it, and so does a time without an end. What
nobody noticed is printed as a list. `mutants.txt` says of those that were looked at why they change
nothing, or which test notices them now.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
MUTATED: Final = ("tep/core", "tep/control", "tep/wire.py")
SEEDS: Final = 250
TIMEOUT_S: Final = 180
TAKEN_FOR_TYPES: Final = "ReplaceBinaryOperator_BitOr"
"""Nearly all of them are in annotations, which nobody evaluates."""

CONFIG: Final = """[cosmic-ray]
module-path = {paths}
timeout = {timeout}
excluded-modules = []
test-command = "{python} -m tests.gate.mutants --notice"
[cosmic-ray.distributor]
name = "local"
"""


def notice() -> int:
    """Play and test the code as it is now; 0: nothing is wrong."""
    from tests.gate.test_planted_bugs import first_found  # the mutated code is imported here

    if first_found(range(SEEDS)) is not None:
        return 1
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:randomly", "-p"]
    command += ["no:cacheprovider", "-m", "not slow and not long and not notebook"]
    command += ["tests/unit", "tests/property"]
    fast = os.environ | {"TEP_PROFILE": "fast"}
    return subprocess.run(command, check=False, cwd=ROOT, env=fast).returncode


def draw(session: Path, sample: int, seed: int) -> int:
    """Leave one mistake at each place, and `sample` of these (0: all); return how many."""
    with sqlite3.connect(session) as found:
        rows = found.execute(
            "select job_id, module_path, start_pos_row, start_pos_col, operator_name"
            " from mutation_specs order by module_path, start_pos_row, start_pos_col, job_id"
        ).fetchall()
        places: dict[tuple[str, int, int], list[str]] = {}
        for job, path, row, column, operator in rows:
            if TAKEN_FOR_TYPES not in operator:
                places.setdefault((path, row, column), []).append(job)
        dice = random.Random(seed)  # no secret
        kept = [dice.choice(sorted(jobs)) for jobs in places.values()]
        if sample:
            kept = dice.sample(kept, min(sample, len(kept)))
        found.execute("create temp table kept (job_id)")
        found.executemany("insert into kept values (?)", [(job,) for job in kept])
        found.execute("delete from mutation_specs where job_id not in kept")
        found.execute("delete from work_items where job_id not in kept")
    return len(kept)


def unnoticed(session: Path) -> list[str]:
    """What no test noticed: the place, and the line as it was and as it became."""
    with sqlite3.connect(session) as found:
        rows = found.execute(
            "select module_path, start_pos_row, definition_name, diff from work_results"
            " join mutation_specs using (job_id) where test_outcome = 'SURVIVED'"
            " order by module_path, start_pos_row"
        ).fetchall()
    texts = []
    for path, row, name, diff in rows:
        lines = [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in _HEADS]
        was, became = (" ".join(x[1:].strip() for x in lines if x[0] == sign) for sign in "-+")
        texts.append(f"{path}:{row} {name}: {was} -> {became}")
    return texts


_HEADS: Final = ("---", "+++")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tool", default="cosmic-ray")
    parser.add_argument("--session", type=Path, default=Path("mutants.sqlite"))
    parser.add_argument("--notice", action="store_true", help="what is done for each mistake")
    given = parser.parse_args()
    if given.notice:
        return notice()
    tool = shutil.which(given.tool)
    if tool is None:
        sys.exit(f"{given.tool} is not installed: pip install cosmic-ray, or --tool PATH")
    config = given.session.with_suffix(".toml")
    config.write_text(
        CONFIG.format(paths=list(MUTATED), timeout=f"{TIMEOUT_S}.0", python=sys.executable)
    )
    if not given.session.exists():  # else it goes on where it was stopped
        subprocess.run([tool, "init", str(config), str(given.session)], check=True)
        draw(given.session, given.sample, given.seed)
    subprocess.run([tool, "exec", str(config), str(given.session)], check=True)
    texts = unnoticed(given.session)
    with sqlite3.connect(given.session) as found:
        (done,) = found.execute("select count(*) from work_results").fetchone()
    for text in texts:
        print(text)  # noqa: T201  # it is a program
    print(f"{done} mistakes, {len(texts)} of them unnoticed")  # noqa: T201  # the same
    return 0


if __name__ == "__main__":
    sys.exit(main())

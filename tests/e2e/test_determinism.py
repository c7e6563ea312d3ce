"""The same seed makes the same run, to the byte: within a process, and in others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tep.sim.row_log import RowLog
from tests.world.oracle import Outcome, replay

SEEDS = range(30)

CODE = """
from tests.e2e.test_determinism import SEEDS, played
for seed in SEEDS:
    print(*played(seed))
"""


def played(seed: int) -> tuple[str, Outcome]:
    """Play a seed: the digest of all that happened, and what the oracle has to say of it."""
    row_log = RowLog()
    outcome = replay(seed, row_log=row_log)
    return row_log.digest(), outcome


def test_same_seed_same_run_in_one_process() -> None:
    """A run that depends on what ran before it cannot be replayed from its seed."""
    first = [played(seed) for seed in SEEDS]
    second = [played(seed) for seed in reversed(SEEDS)][::-1]

    assert first == second
    assert len(SEEDS) == len({digest for digest, _ in first})


def test_same_seed_same_run_under_other_hash_seeds() -> None:
    """A run that follows the order of a set or the hash of a name differs on the next machine."""
    expected = [" ".join(map(str, played(seed))) for seed in SEEDS]
    for hash_seed in ("0", "1", "4242", "random"):
        done = subprocess.run(
            [sys.executable, "-c", CODE],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )

        assert expected == done.stdout.splitlines(), f"PYTHONHASHSEED={hash_seed}"

"""Same seed, same row log: whole engines on the chaos fabric, in one process and in several."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tep
from tep.sim import Cluster, Faults, Restart

ROOT = Path(__file__).resolve().parents[2]


def digest_of(seed: int) -> str:
    """The digest of one scenario with engines, transfers and, in some, a fault."""
    nics = (1 + seed % 4, 1 + seed // 4 % 4)
    with Cluster(nics=nics, seed=seed, row_log=True) as cluster:
        a, b = cluster.engines
        src = (np.arange(6000) * 7 % 251).astype(np.uint8)
        mr, _ = a.reg_mr(src)
        _, desc = b.reg_mr(np.zeros(6000, np.uint8))
        for t_ps, fault in Faults.draw(seed, {"a": nics[0], "b": nics[1]}).events:
            cluster.at(t_ps / 1e6, fault if not isinstance(fault, Restart) else Restart("b"))
        pages = tep.Pages(np.random.default_rng(seed).permutation(12))
        b.expect_imm_count(1, 12)
        a.submit_paged_writes(32, (mr, pages), (desc, pages), imm=1)
        a.submit_single_write(5 + seed % 1000, (mr, 384), (desc, 384), imm=2)
        b.submit_recvs(64, 1, lambda _: None)
        for k in range(3):
            a.submit_send(b.main_address, b"%d" % k)
        cluster.env.run()
        return cluster.row_log.digest()


def digest_of_all() -> str:
    """One digest over thirty scenarios."""
    return hashlib.sha256("".join(map(digest_of, range(30))).encode()).hexdigest()


@pytest.mark.slow
def test_c20_twice_in_one_process() -> None:
    """State that outlives a run, like a counter of a module, would make the second one differ."""
    first = [digest_of(seed) for seed in range(30)]

    assert first == [digest_of(seed) for seed in range(30)]
    assert 30 == len(set(first))


@pytest.mark.slow
def test_c20_under_any_hash_seed() -> None:
    """Sets of objects change their order with PYTHONHASHSEED, and addresses move."""
    expected = digest_of_all()
    for hash_seed in ("0", "1", "12345", "random"):
        found = subprocess.run(
            [sys.executable, __file__],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert expected == found.stdout.strip(), f"PYTHONHASHSEED={hash_seed}"


if __name__ == "__main__":
    sys.stdout.write(digest_of_all())

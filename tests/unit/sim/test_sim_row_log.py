"""The row log: digests, and counting of overtakes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tep.base.errors import UsageError
from tep.sim.faults import Chaos
from tep.sim.row_log import Record, RowLog
from tests.unit.sim.sim_seam import CALM, NS, Seam

GOLDEN = ["371ab081f6fb0c7b", "0af745d189665532", "f67cb825940fd7b6", "a4de1c9186e8d21d"]
PAGES = [(256 * k, 256 * k, 256) for k in range(12)]


def _traced(chaos: Chaos, fill: int = 0) -> RowLog:
    row_log = RowLog()
    seam = Seam(chaos, row_log=row_log)
    seam.a.src[fill] ^= 0xFF if fill else 0
    seam.write(PAGES, 1)
    seam.run()
    return row_log


def test_digest_covers_every_placement_and_completion() -> None:
    """A digest that misses something calls two different runs the same."""
    wild = replace(CALM, reorder_ps=400 * NS, fragments=4)
    row_log = _traced(wild)
    counts = {
        what: sum(r.what == what for r in row_log.records()) for what in ("post", "imm", "done")
    }

    assert {"post": 12, "imm": 12, "done": 12} == counts
    assert 12 * 256 == sum(r.nbytes for r in row_log.records() if r.what == "place")
    assert row_log.digest() == _traced(wild).digest()
    assert row_log.digest() != _traced(replace(wild, seed=1)).digest()
    assert row_log.digest() != _traced(wild, fill=777).digest(), "one byte differs"


def test_golden_digests() -> None:
    """A change that makes the fabric faster must not change a byte of what it does."""
    found = []
    for seed in range(4):
        row_log = RowLog()
        seam = Seam(Chaos.draw(seed), nics=2, row_log=row_log)
        seam.write(PAGES, list(range(12)), nic=0, remote=1)
        seam.write([(3000, 3000, 7), (0, 4000, 0)], 2**32 - 1, nic=1)
        seam.env.call_at(500 * NS + seed * 200 * NS, lambda _, s=seam: s.fabric.kill_nic("b", 1))
        seam.run()
        found.append(row_log.digest()[:16])

    assert GOLDEN == found, "if the fabric is meant to act otherwise, say so in CHANGELOG.md"


def test_overtakes_are_counted_per_pair() -> None:
    """The demo's 'arrived out of order' column is this number."""
    row_log = RowLog()
    for t_ps, node, row in ((1, "b", 3), (2, "b", 1), (3, "b", 2), (4, "b", 4), (2, "c", 9)):
        row_log.add(Record(t_ps, "imm", node, 0, "a", row))
    row_log.add(Record(9, "imm", "c", 0, "z", 5))

    assert (1, 1, 0) == (row_log.overtakes(), row_log.overtakes("b"), row_log.overtakes("c"))
    assert 0 == _traced(CALM).overtakes()
    assert 0 < _traced(replace(CALM, reorder_ps=3000 * NS)).overtakes() < 12


def test_a_trace_that_is_off_says_so() -> None:
    """An empty picture would be taken for an empty run."""
    row_log = RowLog(on=False)
    seam = Seam(row_log=row_log)
    seam.write(PAGES, 1)
    seam.run()

    assert 0 == len(row_log)
    with pytest.raises(UsageError, match="row_log=True"):
        row_log.digest()

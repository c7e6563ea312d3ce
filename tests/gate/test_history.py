"""The tape of a run against a referee that knows no engine; and tapes that must not change."""

from __future__ import annotations

import hashlib

import pytest

from tep.sim.faults import Chaos, Clog, KillNic, Mute
from tep.sim.row_log import Record, RowLog
from tests.unit.sim.sim_seam import NS, Seam
from tests.world.history import judge_history
from tests.world.oracle import replay


def test_the_tapes_of_many_runs_are_clean() -> None:
    """Two judges that share nothing must agree: oracle and referee, over the same seeds."""
    rows = 0
    for seed in range(150):
        row_log = RowLog()
        replay(seed, row_log=row_log)
        assert [] == judge_history(row_log.records()), f"python -m tests.world {seed}"
        rows += sum(record.what == "post" for record in row_log.records())
    assert rows > 1000


def test_a_seed_plays_the_same_run_wherever_its_objects_lie() -> None:
    """Paths in a set are told in the order of their addresses in memory, which no seed repeats."""
    tapes = [RowLog() for _ in range(4)]
    for row_log in tapes:
        replay(581, row_log=row_log)

    assert 1 == len({row_log.digest() for row_log in tapes})


def tape(*what: str) -> list[Record]:
    """A row of 8 bytes, and what happened to it: one record a word."""
    made = {
        "post": Record(0, "post", "a", 0, "b", 1, 1, 0, 8),
        "left": Record(1, "place", "b", 0, "a", 1, 1, 64, 4),
        "right": Record(1, "place", "b", 0, "a", 1, 1, 68, 4),
        "imm": Record(2, "imm", "b", 0, "a", 1, 1, 0, 8, 7),
        "done": Record(3, "done", "a", 0, "b", 1, 1, 0, 8),
        "fail": Record(3, "fail", "a", 0, "b", 1, 1, 0, 8, 7),
        "crash": Record(3, "fault", "a", 0, "crash"),
    }
    return [made[word] for word in what]


@pytest.mark.parametrize(
    ("words", "finding"),
    [
        ("post left right imm done", ""),
        ("post right left left imm done", ""),
        ("post left fail right imm", ""),
        ("post left crash", ""),
        ("post left right imm", "never ended"),
        ("post left right imm done fail", "ended twice: done, fail"),
        ("post left imm right done", "was seen before its bytes"),
        ("post left left imm done", "was seen before its bytes"),
        ("post left right imm imm done", "was seen twice"),
        ("post left right imm done left", "were placed after it was done"),
        ("post left done", "not all of its bytes were placed"),
        ("post post left right imm done", "was posted twice"),
        ("left right imm done", "which nobody posted"),
    ],
)
def test_the_referee_sees_each_foul(words: str, finding: str) -> None:
    """A referee that never whistles would agree with every oracle."""
    wrong = judge_history(tape(*words.split()))

    assert bool(wrong) == bool(finding), wrong
    assert finding in "".join(wrong)


def test_the_referee_counts_what_fired() -> None:
    """An expectation that fires on immediates that never came releases its reader too early."""
    good = tape("post", "left", "right", "imm", "done")

    assert [] == judge_history(good, {("b", 7): 1})
    assert ["2 immediates 0x7 fired at b, 1 came"] == judge_history(good, {("b", 7): 2})


# ---------------------------------------------------------------------- golden tapes


GOLDEN = {
    "order": "86e8cea970f345b0",
    "ordered": "fcc82859c0aac1d5",
    "kill": "d4464d61b95a68f9",
    "links": "a8fabae03470e09f",
    "late": "84a1fbeb43ea7f00",
}
"""First digits of the SHA-256 over twenty tapes each. They change with the fabric's behaviour only:
then, on purpose, and every recorded seed with them. To make them again:

    python -c "from tests.gate.test_history import *; print({n: golden(n) for n in GOLDEN})"
"""


def golden(name: str) -> str:
    """Twenty small runs at the seam, with no engine: one digest."""
    sha = hashlib.sha256()
    for seed in range(20):
        row_log = RowLog()
        chaos = Chaos.draw(
            seed,
            harm=name == "late",
            pause_ps=0,
            dead_after_ps=300 * NS,
            post_fails=0,
            connect_fails=0,
        )
        if name == "ordered":
            chaos = Chaos.draw(seed, ordered=True, pause_ps=0, dead_after_ps=300 * NS)
        seam = Seam(chaos, nics=2, row_log=row_log)
        if name in ("kill", "late"):
            seam.env.call_at(700 * NS, seam.fabric.inflict, KillNic("ab"[seed % 2], 0))
        if name == "links":
            seam.env.call_at(300 * NS, seam.fabric.inflict, Clog("a", 0, 2000 * NS))
            seam.env.call_at(400 * NS, seam.fabric.inflict, Mute("a", 1, 2000 * NS))
        pages = [(256 * k, 256 * k, 200 + k) for k in range(8)]
        seam.write(pages, seed, nic=0)
        seam.write(pages, list(range(8)), nic=1)
        seam.run()
        sha.update(row_log.digest().encode())
    return sha.hexdigest()[:16]


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_tapes(name: str) -> None:
    """A faster simulator must make the same runs, or every seed in a bug report means another."""
    assert GOLDEN[name] == golden(name)

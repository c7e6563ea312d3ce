"""Sweeps: every point once, on any number of processes, with intervals of seeds and of guesses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from typer.testing import CliRunner

from tep.base.errors import UsageError
from tep.cli import app
from tep.sim import load_profile, sweep
from tep.sim.sweeps import Table, doubts, kind_of

GRID = {"size": [2, 3], "name": ["a", "b"]}
MACHINES = "cx7_400", "cx8_800"


@dataclass(frozen=True)
class Pair:
    """A value with a guess in it."""

    size: int

    def doubts(self, factor: float) -> Iterator[tuple[str, Pair]]:
        """Its two ends."""
        yield "slow", Pair(round(self.size * factor))
        yield "fast", Pair(round(self.size / factor))


def guess(pair: Pair, seed: int) -> float:
    """The guess."""
    del seed
    return float(pair.size)


def area(size: int, name: str, seed: int) -> dict[str, float]:
    """A figure of a point; another one for each seed."""
    return {"area": size * size + seed, "ends": float(len(name))}


def latency(profile: Any, seed: int) -> float:
    """The latency of a profile, by name or as it is."""
    return float((load_profile(profile) if isinstance(profile, str) else profile).latency_ps + seed)


def test_every_point_is_a_row_with_its_interval() -> None:
    """A median without its spread is believed to the last digit."""
    table = sweep(area, GRID, seeds=3, processes=1)

    assert [(2, "a"), (2, "b"), (3, "a"), (3, "b")] == [(r["size"], r["name"]) for r in table.rows]
    first = {"size": 2, "name": "a", "area": 5, "area low": 4, "area high": 6}
    assert first | {"ends": 1.0, "ends low": 1.0, "ends high": 1.0, "runs": 3} == table.rows[0]


def test_a_machine_without_guesses_has_the_columns_of_the_others(tmp_path: Path) -> None:
    """A table that has other columns in some rows could neither be printed nor written."""
    usual = load_profile("efa_2x200")
    known = {name: structs.replace(one, confidence="quoted") for name, one in usual.numbers.items()}
    other = replace(usual, name="known", numbers=known)
    table = sweep(latency, {"profile": [usual, other]}, guessed=2, processes=1)
    table.write(tmp_path / "x.csv")

    assert ["value", "value low", "value high", "kind", "runs"] == list(table.rows[1])[1:]
    assert 1 == table.rows[1]["runs"] < table.rows[0]["runs"]


@pytest.mark.slow
def test_two_machines_of_one_name_are_refused() -> None:
    """A row says a machine's name: nobody could tell a variant from its machine."""
    usual = load_profile("efa_2x200")
    late = replace(usual, latency_ps=2 * usual.latency_ps)

    with pytest.raises(UsageError, match=r"efa_2x200, efa_2x200.*name="):
        sweep(latency, {"profile": [usual, late]}, processes=1)
    table = sweep(latency, {"profile": [usual, replace(late, name="late")]}, processes=1)

    assert [("efa_2x200", usual.latency_ps), ("late", late.latency_ps)] == [
        (row["profile"], row["value"]) for row in table.rows
    ]
    assert [0, 1] == list(table.plot().get_xticks())


def test_processes_change_nothing_but_the_time(tmp_path: Path) -> None:
    """A table that depended on the machine it was made on could not be checked on another."""
    seen: list[tuple[int, int]] = []
    two = sweep(area, GRID, seeds=2, processes=2, done=lambda *count: seen.append(count))

    assert sweep(area, GRID, seeds=2, processes=1) == two
    assert [(k, 8) for k in range(9)] == seen


def test_a_sweep_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """A day of runs must not be lost with the terminal that showed them."""
    path, calls = tmp_path / "runs.jsonl", list[int]()

    def counted(size: int, name: str, seed: int) -> float:
        calls.append(seed)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return float(size)

    some = sweep(counted, GRID, processes=1, path=path)
    assert (2, 2) == (len(some.rows), some.missing), "what there is, and a repr that says so"
    with path.open("a") as file:
        file.write('{"run": "cut o')
    again = sweep(counted, GRID, processes=1, path=path)

    assert 2 + 1 + 2 == len(calls)
    assert [2.0, 2.0, 3.0, 3.0] == [row["value"] for row in again.rows]


def test_guessed_numbers_widen_the_interval_and_move_no_median() -> None:
    """What nobody has measured is the largest doubt about most predictions."""
    (row,) = sweep(latency, {"profile": ["efa_2x200"]}, seeds=3, guessed=1.5, processes=1).rows
    profile = load_profile("efa_2x200")

    assert "guessed" == profile.numbers["latency_ps"].confidence
    assert profile.latency_ps + 1 == row["value"]
    assert round(1.5 * profile.latency_ps) + 3 == row["value high"], "and a seed of its own"
    assert round(profile.latency_ps / 1.5) + 4 == row["value low"]
    assert 3 + 2 == row["runs"]


def test_an_end_of_a_machine_is_slow_or_fast_in_all_that_it_varies() -> None:
    """An end of which some numbers are better and some worse is inside the interval."""
    usual = load_profile("efa_2x200")
    ends = dict(doubts(usual, 2))
    slow, fast = ends["slow"], ends["fast"]

    assert ["slow", "fast"] == list(ends)
    assert (2 * usual.latency_ps, usual.dma_bps / 2) == (slow.latency_ps, slow.dma_bps)
    assert (usual.latency_ps / 2, 2 * usual.dma_bps) == (fast.latency_ps, fast.dma_bps)
    assert usual.wire_bps == slow.wire_bps == fast.wire_bps, "what is fitted stays"
    filled, paused = load_profile("cx8_800"), load_profile("cx7_400_ecn")
    assert 2 * filled.fill_bytes == dict(doubts(filled, 2))["slow"].fill_bytes, "a lone write waits"
    for _, end in doubts(paused, 2):
        assert (paused.pause_bytes, paused.ecn_every_ps) == (end.pause_bytes, end.ecn_every_ps)
    contradicted = replace(usual, ack_ps=usual.receive_ps)
    assert usual.receive_ps == dict(doubts(contradicted, 2))["slow"].receive_ps


def test_a_value_may_have_guesses_of_its_own() -> None:
    """What a program guesses beside the machine widens its interval, too."""
    (row,) = sweep(guess, {"pair": [Pair(8)]}, guessed=2, processes=1).rows

    assert (8, 4, 16, 3) == tuple(row[k] for k in ("value", "value low", "value high", "runs"))


def test_a_table_says_what_was_fitted_and_what_is_a_guess() -> None:
    """A figure of a machine that nobody has measured looks like that of a machine that somebody
    has, and one that its rate was fitted to looks like a success.
    """
    names = ["efa_4x100", *MACHINES, "roce_40_ecn", "cx7_400_ecn", "cx7_400_lossy"]
    kinds = [kind_of(load_profile(name)) for name in names]
    (row,) = sweep(latency, {"profile": ["cx8_800"]}, processes=1).rows

    assert ["predicted", "fitted", *4 * ["extrapolated"]] == kinds
    assert "extrapolated" == row["kind"]
    assert "extrapolated" == kind_of(*map(load_profile, MACHINES))


def test_calls_can_be_made_elsewhere() -> None:
    """A sweep on other machines has the rows of one here, in whatever order runs end."""

    def backwards(work: Any, runs: Any, ended: Any) -> None:
        for run in reversed(runs):
            ended(run, work(run))

    assert sweep(area, GRID, seeds=2, calls=backwards) == sweep(area, GRID, seeds=2, processes=1)


def test_a_table_is_written_for_other_programs(tmp_path: Path) -> None:
    """A figure that has to be copied by hand is copied wrongly."""
    table = Table(({"x": 1, "value": 2.5}, {"x": 2, "value": 3.5}))
    table.write(tmp_path / "t.csv")
    table.write(tmp_path / "t.json")

    assert "x,value\n1,2.5\n2,3.5\n" == (tmp_path / "t.csv").read_text().replace("\r", "")
    assert list(table.rows) == json.loads((tmp_path / "t.json").read_text())
    with pytest.raises(UsageError, match=r"\.csv or \.json is asked for"):
        table.write(tmp_path / "t.txt")


@pytest.mark.parametrize(
    ("grid", "more", "why"),
    [
        ({"size": []}, {}, "no point"),
        (GRID, {"seeds": 0}, "seeds"),
        (GRID, {"guessed": 0.5}, "guessed=0.5"),
    ],
)
def test_sweeps_that_cannot_be_are_refused(grid: Any, more: Any, why: str) -> None:
    """An empty table looks like a result."""
    with pytest.raises(UsageError, match=why):
        sweep(area, grid, processes=1, **more)


@pytest.mark.slow
def test_the_command_sweeps_a_function_of_a_file_or_module(tmp_path: Path) -> None:
    """The shell loop that it replaces printed no interval and used one core."""
    mine, out = tmp_path / "mine.py", tmp_path / "t.json"
    mine.write_text("def twice(x, seed):\n    return 2 * x\n")
    words = ["sim", "sweep", f"{mine}:twice", "x=1,2", "--processes", "1", "--json"]
    found = CliRunner().invoke(app, [*words, "--out", str(out)])

    assert 0 == found.exit_code, found.output
    assert [2, 4] == [row["value"] for row in json.loads(found.stdout)]
    assert json.loads(found.stdout) == json.loads(out.read_text())
    for wrong, why in (("x", "NAME=VALUE"), ("=3", "NAME=VALUE")):
        refused = CliRunner().invoke(app, ["sim", "sweep", f"{mine}:twice", wrong])
        assert 2 == refused.exit_code
        assert why in refused.output
    for place in ("none.py:twice", f"{mine}:thrice", "tep:none", "twice"):
        refused = CliRunner().invoke(app, ["sim", "sweep", place, "x=1", "--processes", "1"])
        assert isinstance(refused.exception, UsageError)

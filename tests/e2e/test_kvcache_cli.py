"""`tep kvcache` from the command line: every fabric, both documents, and the exit status."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from tep.apps.kvcache import simulate as scenario
from tep.cli import app


def rows(*args: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["kvcache", *args, "--json"])
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["rows"]
    return found


def test_scenarios_are_checked_and_name_their_seeds() -> None:
    """A failure that nobody can run again is no report."""
    found = rows("--scenarios", "3", "--seed", "4")

    assert [4, 5, 6] == [row["seed"] for row in found]
    assert sum(row["pages checked"] for row in found) > 0
    assert {0} == {row["violations"] for row in found}


def test_a_violation_is_told_and_ends_in_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that fails behind exit status 0 has not been made."""
    right = scenario.Scenario.run

    def wrong(self: scenario.Scenario) -> tuple[Any, list[str]]:
        return right(self)[0], ["r0: other tokens than in one place"]

    monkeypatch.setattr(scenario.Scenario, "run", wrong)

    result = CliRunner().invoke(app, ["kvcache", "--scenarios", "1", "--seed", "7"])

    assert 1 == result.exit_code
    assert "seed 7: r0: other tokens than in one place" in result.output


def test_capacity_runs_say_what_they_cost() -> None:
    """A user who sizes a cluster needs the waiting times, and must know what was simulated."""
    sizes = ("-p", "1", "-d", "1", "--tp", "1", "--seconds", "1", "--rate", "3")
    (found,) = rows("--fabric", "timing", *sizes, "--tokens", "2048", "--seed", "1")

    assert (2, 0) == (found["engines"], found["failed"])
    assert found["requests"] > 0
    assert 0 < found["TTFT p50 ms"] <= found["TTFT p99 ms"]
    assert " to " in found["p50 interval"]
    assert found["pages"] == found["requests"] * (94 * 2 * 16 + 1)


def test_without_requests_nothing_more_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two more runs to doubt what no request has said would only keep the user waiting."""
    runs, right = list[float](), scenario.simulate

    def counted(plant: scenario.Plant, load: scenario.Load) -> scenario.Report:
        runs.append(load.seed)
        return right(plant, load)

    monkeypatch.setattr(scenario, "simulate", counted)
    words = "kvcache --fabric timing --seconds 1 --rate 1e-6"
    found = CliRunner().invoke(app, words.split())

    assert "no request came" in str(found.exception)
    assert [0] == runs


def test_the_first_token_is_predicted_for_any_length() -> None:
    """A table of the published lengths alone could be read off the paper."""
    once = "--guessed", "1"
    found = rows("ttft", "2000", "17000", *once)

    assert [(2000, 1), (17000, 2)] == [(row["tokens"], row["chunks"]) for row in found]
    assert all(row["TTFT disaggregated ms"] > row["TTFT same node ms"] for row in found)
    cold, warm = (rows("ttft", "4096", *more)[0] for more in ((*once, "--cold"), ()))
    low, high = map(float, warm["added interval"].split(" to "))
    assert low < warm["added ms"] < high
    assert ["extrapolated", "predicted"] == [row["kind"] for row in (cold, warm)]
    assert 26 == pytest.approx(cold["added ms"] - warm["added ms"], abs=0.2)


def test_people_read_tables() -> None:
    """Nobody reads JSON in a terminal."""
    result = CliRunner().invoke(app, ["kvcache", "ttft", "4096", "--guessed", "1"])

    assert 0 == result.exit_code
    assert "TTFT disaggregated ms" in result.stdout

"""Every published point that is modelled, simulated, within the tolerance that stands beside it."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from typer.testing import CliRunner

from tep.apps.moe.kernels import gpu_numbers
from tep.base.errors import UsageError
from tep.bench.reproduce import load_table, runs, table_names
from tep.bench.reproduce.tables import NIC_PROFILES, Outcome, Point
from tep.cli import app
from tep.sim.profile import FIELDS, load_profile
from tests.bench.bench_published import key_of, leave_one_out, row_of, write_report

SLOW = {"hosts": "bytes", "kvcache": "ntokens", "moe-decode": "ep", "moe-others": "ep",
        "moe-prefill": "ep", "moe-private": "ep", "rl": ""}  # fmt: skip
"""Tables that take seconds, and the column whose largest sizes are for long runs; LONG: all are."""

LARGE = {"32", "64", "128", "131072"}
LONG = {"hosts", "rl"}


def size_of(table: str, point: Point) -> str:
    """What the column of a slow table says of a point; "" of any other table."""
    return point.keys.get(SLOW.get(table, ""), "")


def cases() -> Iterator[object]:
    for table in table_names():
        held = [point for point in load_table(table).points if point.tolerance is not None]
        for size in sorted({size_of(table, point) for point in held}):
            marks = [pytest.mark.slow] if table in SLOW else []
            if table in LONG or size in LARGE:
                marks.append(pytest.mark.long)
            yield pytest.param(table, size, marks=marks, id=f"{table}-{size}".rstrip("-"))


@pytest.mark.parametrize(("name", "size"), list(cases()))
def test_published_points_are_met(name, size) -> None:
    """Every plan made with the simulator stands on these numbers."""
    table = load_table(name)
    mine = [p for p in table.points if size_of(name, p) == size and p.tolerance is not None]
    outcomes = [Outcome(table, p, runs.reproduce_at(name, **p.keys)) for p in mine]

    assert [] == [(one.point.name, one.error) for one in outcomes if not one.holds]


def test_every_point_is_here_once() -> None:
    """A point lost from a table would be a point that nothing checks."""
    sizes = {name: len(load_table(name).points) for name in table_names()}
    names = [(name, point.name) for name in table_names() for point in load_table(name).points]

    assert {
        "hosts": 8,
        "kvcache": 28,
        "moe-decode": 24,
        "moe-kernels": 12,
        "moe-others": 14,
        "moe-prefill": 26,
        "moe-private": 11,
        "moe-tails": 2,
        "p2p": 12,
        "rl": 13,
        "scatter": 36,
        "uvm": 14,
    } == sizes
    assert len(names) == len(set(names))


def test_what_profiles_call_fitted_is_what_points_were_fitted_by() -> None:
    """A number fitted in silence would make a fitted point look predicted."""
    said = {
        number
        for name in table_names()
        for point in load_table(name).points
        if point.kind == "fitted" and not point.of.startswith(("kv.", "rl."))
        for number in point.of.split()
    }
    numbers = {
        FIELDS[field].path
        for profile in ("cx7_400", "efa_2x200")
        for field, number in load_profile(profile).numbers.items()
        if number.confidence == "fitted"
    }
    numbers |= {
        f"{section}.{key}"
        for section, table in gpu_numbers().items()
        for key, number in table.items()
        if number["confidence"] == "fitted"
    }

    assert numbers == said


def test_free_values_are_counted_and_not_their_names() -> None:
    """A name that stands for a value of each NIC would make a fit look smaller than it is."""
    points = [point for name in table_names() for point in load_table(name).points]
    values = {number for point in points for number in point.numbers}
    kinds = Counter(point.kind for point in points)

    assert 20 == len(values)
    assert {"nic.wire EFA", "nic.wire CX7", "kv.start_s", "cpu.poll EFA"} <= values
    assert (22, 8, 67) == (kinds["given"], kinds["counted"], kinds["predicted"])


def test_an_unknown_table_is_named_with_those_there_are() -> None:
    """A misspelt name must not print an empty report."""
    with pytest.raises(UsageError, match="'p3p' is unknown; there are: hosts, kvcache, "):
        load_table("p3p")


@pytest.mark.long
def test_left_out_points_are_worse_than_fitted_ones() -> None:
    """A fit that were as good without a point would not have been a fit to it."""
    outcomes = [*runs.reproduce("kvcache"), *runs.reproduce("p2p")]
    left_out = leave_one_out(outcomes)
    pairs = [
        (abs(one.error), abs(one.table.error(one.point, left_out[key_of(one)])))
        for one in outcomes
        if one.point.kind == "fitted"
    ]

    assert 22 == len(pairs)
    assert sum(with_it for with_it, _ in pairs) < sum(without for _, without in pairs)
    # 64 KiB on ConnectX-7, with EFA's fill; KvCache's transfers miss their pages' time at any rate.
    assert max(without for _, without in pairs[-12:]) < 11
    assert max(without for _, without in pairs) < 31
    assert {one.simulated for one in outcomes if one.point.kind == "predicted"} == {
        left_out[key_of(one)] for one in outcomes if one.point.kind == "predicted"
    }


def test_every_cell_of_left_out_says_something() -> None:
    """An empty cell beside a fitted point hides whether nobody asked or nothing is left."""
    outcomes = [*runs.reproduce("scatter"), *runs.reproduce("uvm")]
    left_out = leave_one_out(outcomes)
    said = {
        (one.point.name, row_of(one, left_out)["left out"])
        for one in outcomes
        if one.point.kind != "not modelled"
    }

    assert {
        ("enqueue any 64 p50", "nothing left"),
        ("worker_pickup any 64 p50", "nothing left"),
        ("post_all EFA 8 p50", "+0.6 %"),
        ("post_all EFA 16 p50", "+1.7 %"),
        ("post_all EFA 64 p50", "-1.1 %"),
        ("post_all CX7 8 p50", "+12.2 %"),
        ("post_all CX7 16 p50", "+5.1 %"),
        ("post_all CX7 64 p50", "-7.9 %"),
        ("rust p50", "nothing left"),
    } == said


def test_a_prediction_has_an_interval_of_what_is_guessed() -> None:
    """A prediction without one looks as sure as a number that was fitted."""
    outcomes = list(itertools.islice(runs.reproduce("kvcache", guessed=1.5), 8))
    said = {one.point.name: one for one in outcomes}
    added, transfer = said["4096 added"], said["4096 layer_transfer"]

    for one in (added, transfer):
        low, high = one.ends
        assert low < one.simulated < high
    assert added.ends[1] - added.ends[0] > 1, "hop and sums of the decoder's pass are guessed, too"
    assert " to " in added.row()["interval"]
    assert said["4096 pages"].ends is None is said["8192 ttft_same_node"].ends


def test_independent_rows_do_not_make_the_published_tails_of_posting() -> None:
    """The reason that stands beside the tails must be true, or they should be modelled."""
    tables = {point.name: point.published for point in load_table("scatter").points}
    quantiles = ("p50", "p90", "p99", "p999")
    first = np.array([tables[f"first_write any 64 {q}"] for q in quantiles])
    drawn = np.random.default_rng(1).random((20_000, 63))
    rows = np.interp(drawn, (0.5, 0.9, 0.99, 0.999), first / first[0])
    for nic in NIC_PROFILES:
        row_us = tables[f"post_all {nic} 64 p50"] / 63
        errors = {
            ep: np.quantile(rows[:, : ep - 1].sum(axis=1) * row_us, 0.99)
            / tables[f"post_all {nic} {ep} p99"]
            - 1
            for ep in (8, 64)
        }
        assert abs(errors[64]) < 0.10
        assert errors[8] > 0.50


def test_the_published_tails_of_the_host_do_not_make_those_of_the_all_to_all() -> None:
    """The reason that stands beside the all-to-all's tails must be true, too."""
    scatter = {point.name: point.published for point in load_table("scatter").points}
    word = {point.name: point.published for point in load_table("uvm").points}
    medians = {point.name: point.published for point in load_table("moe-decode").points}
    stages = ("enqueue any 64", "worker_pickup any 64", "first_write any 64", "post_all EFA 64")
    most_us = word["rust max"] - word["rust p50"]
    most_us += sum(scatter[f"{stage} p999"] - scatter[f"{stage} p50"] for stage in stages)

    assert 172 == round(2 * most_us)
    missing = [p.published - medians[p.name[:-4]] for p in load_table("moe-tails").points]
    assert [521, 678] == [round(us) for us in missing]


def test_a_report_shows_every_point(tmp_path) -> None:
    """The page that the docs show is made of this."""
    outcomes = list(runs.reproduce("p2p"))
    paths = write_report(outcomes, {}, tmp_path)
    text = paths[0].read_text()

    assert ["report.md", "p2p.png"] == [path.name for path in paths]
    assert b"\x89PNG" == paths[1].read_bytes()[:4]
    assert all(f"| {one.point.name} |" in text for one in outcomes)
    assert "- fitted: 12" in text


def test_the_command_prints_points_and_fails_beyond_a_tolerance(monkeypatch) -> None:
    """CI reads its exit status; a miss that exits 0 is a miss that nobody sees."""
    found = CliRunner().invoke(app, ["reproduce", "p2p", "uvm", "--json"])
    document = json.loads(found.stdout)

    assert 0 == found.exit_code
    assert 26 == len(document["points"])
    counts = {"fitted": 12, "given": 1, "predicted": 0, "counted": 0, "not modelled": 13}
    assert counts.items() <= document["summary"].items()
    assert 8 == document["summary"]["values fitted"], "four of each NIC"

    monkeypatch.setattr(runs, "post_all_us", lambda *_: 1.0)
    assert 1 == CliRunner().invoke(app, ["reproduce", "scatter", "--json"]).exit_code

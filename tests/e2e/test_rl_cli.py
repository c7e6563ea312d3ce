"""`tep rl` from the command line: a plan in JSON, a table, a file, a trace; bad input by name."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import tep
from tep.apps.rl.metadata import Schedule
from tep.apps.rl.models import PUBLISHED
from tep.cli.rl import app


@pytest.fixture
def config(tmp_path):
    """A model of two layers."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dict(PUBLISHED["qwen3-235b"]["config"]) | {"num_hidden_layers": 2}))
    return str(path)


def test_a_plan_says_time_stages_and_bottleneck(config, tmp_path):
    """A user asks this before buying a cluster; and the written table can be read again."""
    table, trace = tmp_path / "routes", tmp_path / "trace.json"
    args = ["plan", "--model", config, "--train", "8", "--infer", "4", "--json"]

    result = CliRunner().invoke(app, [*args, "--output", str(table), "--trace", str(trace)])

    assert result.exception is None, result.output
    found = json.loads(result.stdout)
    assert found["total_ms"] == pytest.approx(
        sum(found["stages_ms"].values()) + found["wait_ms"], abs=0.6
    )
    assert found["digest"] == Schedule.from_bytes(table.read_bytes()).digest()
    assert {"b", "e", "X", "M"} == {e["ph"] for e in json.loads(trace.read_text())["traceEvents"]}
    assert [1.0] == [row["factor"] for row in found["comparison"][:1]]
    assert "NIC" in found["bottleneck"]
    assert found["published"] is None, "nobody has published this one"
    low, high = found["total_interval_ms"]
    assert low < found["total_ms"] + 0.1 <= high + 0.2
    assert "extrapolated" == found["kind"]


def test_a_plan_prints_tables(config):
    """People read tables."""
    args = ["plan", "--model", config, "--train", "8", "--infer", "4", "--profile", "efa_2x200"]

    result = CliRunner().invoke(app, args)

    assert result.exception is None, result.output
    for word in ("in all", "unshard", "wait for network and ranks", "receiving"):
        assert word in result.stdout


def test_what_cannot_be_is_said_by_name(config):
    """A wrong number of ranks, or an unknown model, must not end in a traceback of numpy's."""
    for args, message in (
        (["plan", "--model", "gpt-5"], "neither a file nor one of"),
        (["plan", "--model", config, "--train", "10", "--pp", "3"], "no multiple of"),
        (
            ["plan", "--model", config, "--train", "4", "--watermark-gib", "0.1"],
            "raise watermark_bytes",
        ),
        (["plan", "--model", config, "--profile", "carrier-pigeon"], "carrier-pigeon"),
    ):
        result = CliRunner().invoke(app, args)
        assert isinstance(result.exception, tep.UsageError)
        assert message in str(result.exception)

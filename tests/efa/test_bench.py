"""The benchmark of the backend `efa`, in small: that it measures what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.fake_efa import fabric
from tests.support.here import need_fake_efa

pytestmark = pytest.mark.slow  # a compiler, processes

_PROGRAM = """
import dataclasses, json, sys
from tests.bench import bench_efa
bench_efa._WARM, bench_efa._REPEATS = 0, 2
sys.stdout.write(json.dumps([dataclasses.asdict(one) for one in bench_efa.column_figures(1)]))
"""


@pytest.mark.parametrize(("max_batch", "batches"), [(0, ["1,024", "64", "16"]), (40, ["40", "16"])])
def test_all_figures_are_measured_in_one_run(max_batch, batches):
    """A figure for batches that the device does not take would be one of another device."""
    need_fake_efa()
    with fabric({"nics": 1, "max_batch": max_batch}) as fake:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env=os.environ | fake.environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert 0 == done.returncode, done.stderr[-3000:]
        counters = fake.total()
    figures = json.loads(done.stdout)
    names = [figure["what"] for figure in figures]

    for pages in ("1,024", "4,000"):
        for batch in batches:
            assert f"{pages} pages, submit to doorbell, batches of {batch}, a page" in names
    assert 2 * len(batches) + 6 == len(names) == len(set(names))
    for figure in figures:
        assert 0 < figure["best"] <= figure["value"] <= figure["worst"], figure
    (ours,) = (figure for figure in figures if figure["what"].startswith("by columns"))
    (theirs,) = (figure for figure in figures if figure["what"].startswith("libfabric's efa:"))
    assert theirs["value"] == ours["reference"] == pytest.approx(20 * ours["aim"])
    assert 0 == counters["malformed"] + counters["overruns"]

"""A new user's path, from a clone to a first bench, as the pages say it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.bench.bench_newcomer import walk

CPU_S_MAX = {
    "clone to demo": 90.0,
    "first program, of README.md": 10.0,
    "first notebook": 60.0,
    "first protocol tested, 100 seeds": 30.0,
    "first bench, two processes": 60.0,
}
"""Five times and more what each takes: they hold the order of magnitude on any machine."""


@pytest.mark.slow
@pytest.mark.timeout(900)  # two minutes on a machine with much other work
def test_a_new_user_gets_from_a_clone_to_a_first_bench(tmp_path: Path) -> None:
    """The first quarter of an hour decides whether there is a second one.

    Packages are borrowed from this Python, but in a long run, which installs them as a user does.
    """
    rows = walk(tmp_path, reuse="TEP_LONG" not in os.environ)

    print(*rows, sep="\n")  # noqa: T201  # pytest -rP shows how long each step took
    assert list(CPU_S_MAX) == [row["what"] for row in rows]
    assert [] == [row for row in rows if row["s of CPU"] > CPU_S_MAX[row["what"]]]

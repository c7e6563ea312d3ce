"""Hypothesis profiles for every test; fixtures live beside the tests that use them.

TEP_PROFILE picks one: dev (default), fast, ci, long. `scripts/test` sets it.
"""

from __future__ import annotations

import gc
import importlib
import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Verbosity, settings

_COMMON = {
    # A shared machine stalls now and then: wall-clock deadlines only make tests flaky.
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
    "verbosity": Verbosity.normal,
    "print_blob": True,
}
settings.register_profile("dev", max_examples=50, **_COMMON)
settings.register_profile("fast", max_examples=15, derandomize=True, **_COMMON)
settings.register_profile("ci", max_examples=150, derandomize=True, **_COMMON)
settings.register_profile("long", max_examples=1000, **_COMMON)
settings.load_profile(os.environ.get("TEP_PROFILE", "dev"))


LONGEST = [
    *("rxe_vm", "notebooks", "planted_bugs", "newcomer", "fake_efa", "distribution"),
    *("libfabric_efa", "libfabric_two_processes", "cli", "reproduce"),
    *("kvcache_clusters", "two_guests", "vllm_connector"),
]
"""Files that take longest, each by one worker: a late one leaves the others idle. Two that have a
virtual machine, or one and the fake device, would take each other's processors.
"""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import a share of the test files first, if several processes will import all of them.

    In a fresh clone each file is compiled, which takes longer than all else until the first test.
    Now each process compiles its share, and finds the byte code of the others.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args != session.config.getini("testpaths"):
        return
    share = slice(int(worker["workerid"].removeprefix("gw")), None, worker["workercount"])
    for path in sorted(Path("tests").rglob("test_*.py"))[share]:
        if path.parts[1] not in {"cuda", "efa", "verbs"}:  # they run in processes of their own
            with suppress(Exception, pytest.skip.Exception):  # collecting it tells what is wrong
                importlib.import_module(".".join(path.with_suffix("").parts))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give a test that is marked `long` an hour, also under plain pytest."""
    if item.get_closest_marker("long"):
        item.add_marker(pytest.mark.timeout(3600))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest files first and tests/tidy last, whatever order was drawn.

    The tidy tests keep the syntax trees of the whole project, a gigabyte of small objects. Every
    test after them would pay for these at each fork and each pass of the garbage collector.
    """
    place = {f"test_{name}": k for k, name in enumerate(LONGEST)}
    items.sort(
        key=lambda item: (item.path.parent.name == "tidy", place.get(item.path.stem, len(place)))
    )


def pytest_collection_finish() -> None:
    """Have the collector pass over what was imported: many tests collect, at 0.1 s each else."""
    gc.collect()
    gc.freeze()

"""Numbers that are given beside the engine: to drivers, clusters, faults and the testing tools.

The same values and the same rule as in `test_numbers`: they work, or a usage error names them.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_args

import numpy as np
import pytest

import tep
import tep.testing
from tep.drivers.threads import InlineDriver, ThreadDriver
from tep.drivers.turning import TurnDriver
from tep.sim.faults import Chaos, Fault
from tep.testing import Case, Violation, hunt, run
from tests.property.test_numbers import ODD, check
from tests.world.scenario import Scenario
from tests.world.specs import TransferSpec

TEXTS = {"name", "node"}

DRIVERS = [
    (kind, name)
    for kind in (ThreadDriver, TurnDriver, InlineDriver)
    for name in inspect.signature(kind).parameters
    if name not in TEXTS
]


@pytest.mark.parametrize(
    ("kind", "name"), DRIVERS, ids=[f"{kind.__name__}-{name}" for kind, name in DRIVERS]
)
def test_arguments_of_drivers(kind: Callable[..., object], name: str) -> None:
    """A worker met a number that is none in its thread, long after it was given."""

    def make(value: object) -> None:
        made = vars(kind(**{name: value}))
        times = [made[each] for each in ("_spin_s", "_watch_s", "_call_timeout_s") if each in made]
        assert all(type(each) is float and each >= 0 for each in times)

    for value in ODD:
        check(make, name, value)


def test_length_of_shared_memory() -> None:
    """A raw TypeError, or a memory of no bytes that mmap refuses, names nothing."""

    def alloc(value: object) -> None:
        small = not isinstance(value, int | np.integer) or value <= 4096
        if small:
            tep.alloc_shared(value)
            return
        with pytest.raises(MemoryError):
            tep.alloc_shared(max(value, 2**50))

    for value in ODD:
        check(alloc, "nbytes", value)


FAULTS = [
    (fault, field.name)
    for fault in get_args(Fault)
    for field in dataclasses.fields(fault)
    if field.name not in TEXTS
]


@pytest.mark.parametrize(
    ("fault", "name"), FAULTS, ids=[f"{fault.__name__}-{name}" for fault, name in FAULTS]
)
def test_arguments_of_faults(fault: Callable[..., object], name: str) -> None:
    """A fault that cannot be is found where it is written down, not when its time comes."""
    needed = inspect.signature(fault).parameters.values()
    sound = {p.name: "a" if p.name in TEXTS else 0 for p in needed if p.default is p.empty}
    for value in ODD:
        check(lambda v: fault(**(sound | {name: v})), name, value)


def test_faults_were_found() -> None:
    """Else the tests above would look at nothing."""
    assert {"Clog", "KillNic", "Slow"} <= {fault.__name__ for fault, _ in FAULTS}
    assert len(DRIVERS) > 8


CLUSTER: dict[str, tuple[str, Callable[[Any, Any], object]]] = {
    "at": ("us", lambda cluster, v: cluster.at(v, lambda: None)),
    "kill_nic": ("nic", lambda cluster, v: cluster.kill_nic(1, v)),
    "kill_nic of": ("node", lambda cluster, v: cluster.kill_nic(v, 0)),
    "revoke": ("nic", lambda cluster, v: cluster.revoke(1, v)),
    "revoke of": ("node", lambda cluster, v: cluster.revoke(v)),
    "restart": ("node", lambda cluster, v: cluster.restart(v)),
}


@pytest.mark.slow
@pytest.mark.parametrize("verb", CLUSTER)
def test_arguments_of_a_cluster(verb: str) -> None:
    """An event scheduled with a wrong number must be refused, not fail in the middle of a run."""
    name, call = CLUSTER[verb]
    for value in ODD:
        with tep.sim.Cluster(2, 2) as cluster:
            check(lambda v, cluster=cluster: call(cluster, v), name, value)


def test_seed_of_a_scenario() -> None:
    """A seed that is no number draws a scenario that nobody can draw again."""
    for value in ODD:
        check(Scenario.draw, "seed", value)


async def refuses(_: object) -> None:
    """A protocol with a finding, so that a hunt of 2**64 runs ends with its first."""
    raise AssertionError


HUNTS: dict[str, Callable[[Any], object]] = {
    "runs": lambda v: hunt(refuses, runs=v),
    "seed": lambda v: hunt(refuses, runs=1, seed=v),
    "nodes": lambda v: hunt(refuses, runs=1, nodes=v),
    "nics": lambda v: hunt(refuses, runs=1, nics=v),
    "nics ": lambda v: hunt(refuses, runs=1, nics=(1, v)),
    "heal_us": lambda v: hunt(refuses, runs=1, heal_us=v),
    "deadline_s": lambda v: run(refuses, Case(nics=(1, 1)), deadline_s=v),
    "case": lambda v: run(refuses, v),
    "Case: nics": lambda v: run(refuses, Case(nics=v)),
    "Case: heal_us": lambda v: run(refuses, Case(nics=(1, 1), heal_us=v)),
}


@pytest.mark.parametrize("name", HUNTS)
def test_arguments_of_a_hunt(name: str) -> None:
    """A hunt with runs=-1 found nothing, and said so as if it had looked."""

    def one(value: object) -> None:
        with suppress(Violation):
            HUNTS[name](value)

    for value in ODD:
        check(one, name.rpartition(": ")[2].strip(), value)


SPEC_NUMBERS = [f.name for f in dataclasses.fields(TransferSpec) if "int" in str(f.type)]


@pytest.mark.parametrize("name", SPEC_NUMBERS)
def test_numbers_of_a_transfer(name: str) -> None:
    """An assertion that says nothing is no answer to whoever writes a scenario by hand."""
    for value in ODD:
        check(lambda v: TransferSpec(**{name: v}), name, value)


@pytest.mark.parametrize("name", ["nics", "messages", "buffers"])
def test_numbers_of_a_scenario(name: str) -> None:
    """The same for the scenario around it."""
    sound = {"transfers": (TransferSpec(),), "chaos": Chaos.calm()}
    for value in ODD:
        check(lambda v: Scenario(**sound, **{name: v}), name, value)


@pytest.mark.parametrize("backend", ["libfabric", "verbs"])
def test_options_of_hardware_are_looked_at_before_it_is(backend: str) -> None:
    """The check of an option's type must not depend on the machine."""
    module = tep.backends.load_backend(backend)
    for name, parameter in inspect.signature(module.open_domains).parameters.items():
        if not any(kind in str(parameter.annotation) for kind in ("int", "float")):
            continue
        for value in ("x", b"1", 1j, object(), math.nan):
            if "str" in str(parameter.annotation) and isinstance(value, str | bytes):
                continue
            with pytest.raises(tep.UsageError, match=name):
                tep.TransferEngine.open(backend, **{name: value})

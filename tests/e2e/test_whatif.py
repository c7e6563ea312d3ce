"""`tep sim whatif`: each change has its effect on each system, and nonsense is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
from typer.testing import CliRunner

from tep.apps.kvcache.simulate import Load, Plant, simulate
from tep.apps.moe import predict as moe
from tep.base.errors import UsageError
from tep.bench.reproduce import whatif
from tep.bench.reproduce.whatif import Machine, change, effects
from tep.cli import app
from tep.sim.profile import load_profile

CX7 = Machine(profile=load_profile("cx7_400"))


@pytest.fixture(autouse=True, scope="module")
def unchanged() -> Iterator[None]:
    """The machine as it is costs a second a system, and nearly every test compares with it."""

    def once(ask: Callable[[Machine], object]) -> Callable[[Machine], object]:
        known = cache(lambda: ask(CX7))
        return lambda machine: known() if machine is CX7 else ask(machine)

    systems = {name: once(ask) for name, ask in whatif._SYSTEMS.items()}
    with mock.patch.object(whatif, "_SYSTEMS", systems):
        yield


def factors(after: Machine, *systems: str) -> list[float]:
    return [one.factor for one in effects(CX7, after, systems)]


def test_half_the_wire_is_nearly_twice_the_time_where_the_wire_is_the_limit() -> None:
    """What-ifs are there to decide by; one without effect decides wrongly."""
    half = change(CX7, numbers=["nic.wire=188.7 Gb/s"])

    dispatch, combine, _, update, _ = factors(half, "moe", "rl")
    assert 1.5 < dispatch < combine < 2
    assert 1.8 < update < 2
    assert [1] == [round(factor, 2) for factor in factors(half, "kvcache")]  # compute hides it


@pytest.mark.parametrize(
    ("knobs", "least", "most"),
    [
        ({"leaf_gpus": 8}, 0.999, 1.001),
        ({"leaf_gpus": 8, "oversubscription": 4.0}, 3, 4),
        ({"leaf_gpus": 8, "spine_us": 5.0}, 1.01, 1.2),
        ({"rails": True}, 0.999, 1.001),
        ({"rails": True, "oversubscription": 4.0}, 2.5, 4),  # 7 of 8 GPUs are on other rails
        ({"slow_nic": 4.0}, 2, 5),
    ],
)
def test_topologies_and_slow_nics_cost_what_they_take(knobs, least, most) -> None:
    """A spine that is no limit must cost nothing, and one of a quarter at most four times."""
    dispatch, _, _ = factors(change(CX7, **knobs), "moe")

    assert least <= dispatch <= most


def test_rails_that_nothing_crosses_are_refused() -> None:
    """`--rails --oversubscription 4` said a factor of 1.000, and not why."""
    machine = Machine(profile=load_profile("efa_2x200"))
    for more in ({}, {"oversubscription": 4.0}, {"spine_us": 5.0}):
        with pytest.raises(UsageError, match="so nothing crosses from rail to rail"):
            effects(machine, change(machine, rails=True, host_gpus=1, **more), ["moe"])
    crossed = change(machine, rails=True, host_gpus=1, oversubscription=4.0)
    assert effects(machine, crossed, ["failover"])


def test_a_faster_half_helps_where_the_other_half_is_not_the_limit() -> None:
    """8 rollout workers receive what 16 training ranks send: their NICs are the limit."""
    whole = Machine(profile=load_profile("cx8_800"))
    faster, slower = replace(CX7, other=whole.profile), replace(whole, other=CX7.profile)

    rollouts, _ = factors(faster, "rl")
    trains, _ = factors(slower, "rl")
    both, _ = factors(whole, "rl")
    assert both <= rollouts < 0.8
    assert 0.99 < trains < 1.01


@pytest.mark.parametrize("names", [("efa_4x100", "efa_2x200"), ("cx8_800", "cx7_400")])
def test_systems_run_on_two_kinds_of_machines(names) -> None:
    """Immediates are counted by the NICs of both sides: who counts by its own waits for ever."""
    one, other = map(load_profile, names)
    workload = moe.Workload(ep=16, tokens=16, turns=1, nic="cx7" if one.ordered else "efa")
    mixed = moe.predict(workload, machine=[one] * 8 + [other] * 8)
    whole = [moe.predict(workload, machine=machine) for machine in (one, other)]
    plant = Plant(prefillers=1, decoders=1, profile=one, decode_profile=other)
    cluster = simulate(plant, Load(rate=4.0, duration_s=0.5, ntokens=(2048,)))

    assert min(found.dispatch_us for found in whole) < mixed.dispatch_us
    assert mixed.combine_us < 1.3 * max(found.combine_us for found in whole)
    assert cluster.completions
    assert [] == cluster.failed


def test_a_failover_takes_what_the_timeout_takes_where_the_peer_dies() -> None:
    """The sender knows at once that its own NIC died; of a silent peer only its timer tells."""
    efa = Machine(profile=load_profile("efa_2x200"))
    quick = change(efa, numbers=["wire.peer_timeout=1 ms"])

    whole, mine, peers = effects(efa, quick, ["failover"])
    assert (1, 1) == (whole.factor, mine.factor)
    assert 0 < mine.after < whole.after
    assert 1000 < peers.after < 2000
    assert 1e6 < peers.before < 1.001e6


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"numbers": ["nic.wires=3 Gb/s"]}, "there is no 'nic.wires'"),
        ({"numbers": ["nic.wire=fast"]}, "'fast' is no number"),
        ({"numbers": ["nic.wire=3 KiB"]}, "3 KiB does not fit; a finite number, in one of"),
        ({"oversubscription": 2.0}, "a spine needs leaves"),
    ],
)
def test_changes_that_make_no_sense_are_refused(knobs, said) -> None:
    """A misspelt change that changes nothing would be read as an answer."""
    with pytest.raises(UsageError, match=said):
        change(CX7, **knobs)


def test_two_halves_that_cannot_speak_to_each_other_are_refused() -> None:
    """SRD and RC never meet: there is no such cluster to ask about."""
    with pytest.raises(UsageError, match="two transports"):
        effects(CX7, replace(CX7, other=load_profile("efa_2x200")), ["failover"])


def test_the_machine_after_is_as_uncertain_as_the_one_before() -> None:
    """The same machine in its own place is as fast, whatever its numbers are."""
    words = "sim whatif --profile efa_2x200 --to efa_2x200 --beside efa_2x200 --system failover"
    found = CliRunner().invoke(app, [*words.split(), "--json"])

    assert 0 == found.exit_code, found.output
    assert {"1.000 to 1.000"} == {row["interval"] for row in json.loads(found.stdout)}


def test_the_command_prints_before_and_after() -> None:
    """The output must serve people and programs."""
    times = []
    for machines in ("--beside efa_4x100", "--to efa_4x100", "--to efa_4x100 --beside efa_2x200"):
        words = f"sim whatif --profile efa_2x200 {machines} --system failover --json"
        found = CliRunner().invoke(app, words.split())
        assert 0 == found.exit_code, found.output
        write, *_ = json.loads(found.stdout)
        assert "failover: write over all NICs, 2 or more" == write["figure"]
        times.append(float(write["times"]))

    # The last pages all go to one of the slower NICs; 1.07 if the worker took turns of one row.
    assert 1.03 < times[0] < 1.2
    assert 1.5 < times[1] < times[2] < 2  # twice as many NICs, and bytes; 358 Gb/s take them


def test_a_sweep_on_ray_takes_no_number_of_processes() -> None:
    """An option that is ignored in silence is one that the user believes in."""
    words = "sim sweep math:hypot x=1 --processes 2 --ray auto"
    found = CliRunner().invoke(app, words.split())

    assert 2 == found.exit_code
    assert "has no effect with --ray" in found.output

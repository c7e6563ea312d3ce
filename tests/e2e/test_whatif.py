"""`tep sim whatif`: each change has its effect on each system, and nonsense is refused."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tep.cli import app
from tep.errors import UsageError
from tep.reproduce.whatif import Machine, change, effects
from tep.sim.profile import load_profile

CX7 = Machine(profile=load_profile("cx7_400"))


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
        ({"leaf_gpus": 8, "optical_us": (90.0, 10.0)}, 2, 5),
        ({"slow_nic": 4.0}, 2, 5),
    ],
)
def test_topologies_and_slow_nics_cost_what_they_take(knobs, least, most) -> None:
    """A spine that is no limit must cost nothing, and one of a quarter at most four times."""
    dispatch, _, _ = factors(change(CX7, **knobs), "moe")

    assert least <= dispatch <= most


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
        ({"numbers": ["nic.wire=3 KiB"]}, "unit 'KiB' does not fit"),
        ({"oversubscription": 2.0}, "a spine needs leaves"),
    ],
)
def test_changes_that_make_no_sense_are_refused(knobs, said) -> None:
    """A misspelt change that changes nothing would be read as an answer."""
    with pytest.raises(UsageError, match=said):
        change(CX7, **knobs)


def test_the_command_prints_before_and_after() -> None:
    """What people read, and programs."""
    found = CliRunner().invoke(
        app, ["sim", "whatif", "--to", "efa_2x200", "--system", "kvcache", "--json"]
    )

    assert 0 == found.exit_code, found.output
    (row,) = json.loads(found.stdout)
    assert "kvcache: first token, p50" == row["figure"]
    assert isinstance(
        CliRunner().invoke(app, ["sim", "whatif", "--optical", "9"]).exception, UsageError
    )

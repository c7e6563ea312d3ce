"""The fit of profiles: it makes the shipped ones, finds a simulated machine again, and says what it
cannot know.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tep.apps.rl.models import PUBLISHED
from tep.base.errors import UsageError
from tep.bench.reproduce.runs import paged_us, single_us
from tep.bench.reproduce.tables import NIC_PROFILES, load_table
from tep.cli import app, main
from tep.sim.fit import RUN_PAGES, Measured, fit, fitted_fields, model_gbps
from tep.sim.profile import load_profile, write_profile
from tests.support.effort import effort

SIZES = [1 << k for k in range(12, 26)]
PAGES = [1 << k for k in range(10, 17)]


def published(nic: str) -> list[Measured]:
    points = [point for point in load_table("p2p").points if point.keys["nic"] == nic]
    return [Measured(p.keys["kind"], int(p.keys["bytes"]), p.published) for p in points]


def simulated(profile, point: Measured) -> float:
    """The measurement, by whole engines."""
    if point.kind == "single":
        return point.nbytes * 8 / single_us(profile, point.nbytes) / 1000
    return RUN_PAGES * point.nbytes * 8 / paged_us(profile, point.nbytes) / 1000


@pytest.mark.parametrize("nic", NIC_PROFILES)
def test_shipped_profiles_are_what_the_program_fits(nic) -> None:
    """A shipped number that nobody can make again is a number without a source."""
    shipped = load_profile(NIC_PROFILES[nic])
    found = fit(published(nic), shipped)

    assert () == found.kept
    for field in fitted_fields(shipped):
        assert getattr(shipped, field) == pytest.approx(getattr(found.profile, field), rel=0.04)
    assert max(map(abs, found.residuals)) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("nic", NIC_PROFILES)
def test_the_closed_form_is_what_engines_do(nic) -> None:
    """The fit solves the closed form; if engines did something else it would fit something else."""
    profile = replace(load_profile(NIC_PROFILES[nic]), jitter_ps=0)
    points = [Measured("single", n, 1.0) for n in SIZES]
    points += [Measured("paged", n, 1.0) for n in PAGES]
    for point in points:
        assert model_gbps(profile, point) == pytest.approx(simulated(profile, point), rel=1e-2)


@given(
    wire=st.integers(100, 390),
    small=st.integers(30, 800),
    fill=st.integers(32, 512),
    ack=st.integers(2, 40),
    base=st.sampled_from(["cx7_400", "efa_2x200"]),
)
@settings(max_examples=effort(15, 5))
def test_a_fit_finds_the_numbers_of_a_simulated_machine(wire, small, fill, ack, base) -> None:
    """Measurements of a machine that follows the model must give back that machine."""
    start = load_profile(base)
    fields = fitted_fields(start)
    values = (wire * 10**9 // start.nics, small * 1000, fill * 1024, ack * 10**6)
    machine = replace(start, **dict(zip(fields, values, strict=True)), jitter_ps=0)
    points = [Measured("single", n, 0.0) for n in SIZES] + [
        Measured("paged", n, 0.0) for n in PAGES
    ]
    points = [point._replace(gbps=model_gbps(machine, point)) for point in points]
    found = fit(points, replace(start, jitter_ps=0))

    for field in set(fields) - set(found.kept):
        assert getattr(machine, field) == pytest.approx(getattr(found.profile, field), rel=0.03)
    assert max(map(abs, found.residuals)) < 1e-3


def test_the_machine_has_the_nics_that_were_measured() -> None:
    """Two NICs on a base of one: half of the measured rate was predicted."""
    truth = replace(load_profile("efa_2x200"), jitter_ps=0)
    points = [Measured("single", n, 0.0, 2) for n in SIZES[::3]]
    points += [Measured("paged", n, 0.0, 2) for n in PAGES[::2]]
    points = [point._replace(gbps=model_gbps(truth, point)) for point in points]
    found = fit(points, replace(load_profile("efa_2x200"), jitter_ps=0, nics=1))

    assert 2 == found.profile.nics
    assert found.profile.wire_bps == pytest.approx(truth.wire_bps, rel=0.02)
    with pytest.raises(UsageError, match=r"\[1, 2\] NICs"):
        fit([points[0], points[1]._replace(nics=1)], truth)


@pytest.mark.slow
def test_whole_engines_measured_give_their_profile_back() -> None:
    """The same through engines, once: from a machine, to results, to a profile."""
    base = load_profile("cx7_400")
    machine = replace(
        base, wire_bps=300 * 10**9, op_ps=120_000, fill_bytes=98_304, ack_ps=9 * 10**6
    )
    points = [Measured("single", n, 0.0) for n in SIZES[::3]]
    points += [Measured("paged", n, 0.0) for n in PAGES[::2]]
    points = [point._replace(gbps=simulated(machine, point)) for point in points]
    found = fit(points, base).profile

    for field in fitted_fields(base):
        assert getattr(machine, field) == pytest.approx(getattr(found, field), rel=0.01)


def test_numbers_without_points_are_guesses_and_said_to_be() -> None:
    """Pages alone say nothing of the fill: a number made up for it would look measured."""
    points = [point for point in published("CX7") if point.kind == "paged"]
    found = fit(points, load_profile("cx7_400"))

    assert {"fill_bytes", "ack_ps"} == set(found.kept)
    assert "fitted" == found.profile.numbers["wire_bps"].confidence
    assert found.profile.fill_bytes != load_profile("cx7_400").fill_bytes
    for name in fitted_fields(found.profile):
        is_guess = found.profile.numbers[name].source == "not seen in measured points"
        assert is_guess == (name in found.kept), name


def test_a_written_profile_is_read_back_as_it_was(tmp_path) -> None:
    """A profile that changes by a rounding is another machine."""
    found = fit(published("EFA"), load_profile("efa_2x200")).profile
    write_profile(found, tmp_path / "mine.toml")
    read = load_profile(str(tmp_path / "mine.toml"))

    assert replace(found, numbers={}) == replace(read, numbers={})
    assert found.numbers["wire_bps"].source == read.numbers["wire_bps"].source


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "kind, bytes and gbps are asked for: Input data was truncated"),
        ("[]", "no points; each needs kind, bytes and gbps"),
        ('{"points": 3}', "Expected `array`, got `int`"),
        ('[{"kind": "single", "bytes": 4096}]', r"missing required field `gbps` - at `\$\[0\]`"),
        ("[null]", r"Expected `object`, got `null` - at `\$\[0\]`"),
        ('[{"kind": "double", "bytes": 4096, "gbps": 3}]', "is no measurement"),
        ('[{"kind": "single", "bytes": 4096, "gbps": 0}]', "is no measurement"),
    ],
)
def test_results_that_are_none_are_refused(tmp_path, text, said) -> None:
    """A file of another program must not become a machine."""
    path = tmp_path / "results.json"
    path.write_text(text)
    found = CliRunner().invoke(app, ["sim", "fit", str(path)])

    assert isinstance(found.exception, UsageError)
    with pytest.raises(UsageError, match=said):
        raise found.exception


@pytest.mark.slow
def test_the_command_writes_a_profile_that_clusters_take(tmp_path) -> None:
    """From measured results to a simulated cluster of that machine, without a line of Python."""
    results, profile = tmp_path / "results.json", tmp_path / "mine.toml"
    points = [{"kind": p.kind, "bytes": p.nbytes, "gbps": p.gbps} for p in published("CX7")]
    results.write_text(json.dumps({"points": points}))
    found = CliRunner().invoke(app, ["sim", "fit", str(results), "--out", str(profile), "--json"])

    assert 0 == found.exit_code, found.output
    assert 6 == len(json.loads(found.stdout)["points"])
    assert 370 == pytest.approx(simulated(str(profile), Measured("paged", 65_536, 0.0)), rel=0.03)


PATHS = [
    "moe --nic {} --ep 16 --guessed 1",
    "kvcache --profile {} -p 1 -d 1 --tp 1 --tokens 4096 --seconds 4 --guessed 1 --fabric timing",
    "rl plan --profile {} --model {model} --train 8 --infer 4 --guessed 1",
    "sim fit {results} --base {}",
]


@pytest.mark.slow
@pytest.mark.parametrize("command", PATHS)
def test_a_path_stands_wherever_a_profile_s_name_does(tmp_path, capsys, command) -> None:
    """A machine of one's own is of no use where only the shipped ones are taken."""
    path, results = tmp_path / "mine.toml", tmp_path / "results.json"
    write_profile(replace(load_profile("efa_2x200"), name="mine"), path)
    points = [{"kind": p.kind, "bytes": p.nbytes, "gbps": p.gbps} for p in published("EFA")]
    results.write_text(json.dumps(points))
    model = tmp_path / "config.json"
    model.write_text(json.dumps(dict(PUBLISHED["qwen3-235b"]["config"]) | {"num_hidden_layers": 2}))
    command = command.replace("{}", "{path}").format(path=path, results=results, model=model)
    words = shlex.split(command)

    assert 0 == main([*words, "--json"])
    json.loads(capsys.readouterr().out)


def test_a_path_that_is_no_profile_is_an_error_with_its_name(tmp_path, capsys) -> None:
    """A slip of the pen must not be a traceback after five seconds."""
    for command in ("moe --nic {}", "kvcache --fabric timing --profile {}"):
        assert 0 != main(command.format(tmp_path / "none.toml").split())
        assert "none.toml" in capsys.readouterr().err

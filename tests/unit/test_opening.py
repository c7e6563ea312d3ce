"""The functions that open one backend each: their signatures, and misspelt options."""

from __future__ import annotations

import dataclasses
import importlib
import inspect

import pytest

import tep
from tep.backends import BACKENDS as BACKENDS_ALL
from tep.backends.auto import choose
from tep.backends.opening import identity
from tep.backends.verbs.settings import Settings

BACKENDS = ["libfabric", "local", "loopback", "verbs"]


def parameters(function) -> dict[str, tuple[str, object]]:
    found = inspect.signature(function).parameters.values()
    return {p.name: (str(p.annotation), p.default) for p in found if p.kind is not p.VAR_KEYWORD}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_signature_is_that_of_its_backend(backend) -> None:
    """An option that the backend has and the function lacks cannot be given, and none says so."""
    mine = parameters(getattr(tep, f"open_{backend}"))
    assert ("Driver | None", None) == mine.pop("driver")
    assert ("str | None", None) == mine.pop("device")
    assert tep.EngineOptions() == mine.pop("options")[1]
    its = parameters(importlib.import_module(f"tep.backends.{backend}").open_domains)
    if backend == "verbs":
        its |= {f.name: (str(f.type), f.default) for f in dataclasses.fields(Settings)}
    assert its == mine


def test_they_open_what_open_opens() -> None:
    """A default that is passed on must mean what leaving it out means."""
    with tep.open_loopback(2, name="typed") as engine:
        assert "typed@loopback/2 NICs" in str(engine.main_address)
    options = tep.EngineOptions(wait_timeout_s=3.0)
    with tep.open_local(options=options, driver=tep.ThreadDriver()) as engine:
        assert 3.0 == engine.wait_timeout_s
        mr, desc = engine.reg_mr(bytearray(64))
        assert engine.submit_single_write(8, (mr, 0), (desc, 8)).wait().ok


def options_of(backend: str) -> list[str]:
    """The keywords of a backend, those too that it takes as `**options`."""
    open_domains = importlib.import_module(f"tep.backends.{backend}").open_domains
    names = [
        name
        for name, found in inspect.signature(open_domains).parameters.items()
        if found.kind is not found.VAR_KEYWORD
    ]
    more = {"verbs": [f.name for f in dataclasses.fields(Settings)], "sim": ["node", "env"]}
    if backend == "auto":
        return options_of(choose().backend)
    return names + more.get(backend, [])


@pytest.mark.parametrize("backend", BACKENDS_ALL)
def test_a_misspelt_option_is_told_the_nearest(backend) -> None:
    """Twenty names in a row are not read; the one that was meant is."""
    assert options_of(backend)
    for option in options_of(backend):
        wrong = f"{option}z"
        with pytest.raises(
            tep.UsageError, match=f"no option '?{wrong}'?; .*did you mean '{option}'"
        ):
            tep.TransferEngine.open(backend, **{wrong: 1})


def test_a_misspelt_backend_is_told_the_nearest() -> None:
    """As for options."""
    with pytest.raises(tep.UsageError, match="'libfabrik' is unknown; .* did you mean 'libfabric'"):
        tep.TransferEngine.open("libfabrik")


@pytest.mark.parametrize("name", ["", "n" * 201, "\u00e9" * 101, "\udc80", 3])
def test_a_name_that_messages_cannot_carry_is_refused(name) -> None:
    """Peers drop a control message with a longer one: `fail` told nobody, and said nothing."""
    with pytest.raises(tep.UsageError, match="verbs: name="):
        identity("verbs", name, None)
    for longest in ("n" * 200, "\u00e9" * 100):
        assert (longest, 7) == identity("verbs", longest, 7)

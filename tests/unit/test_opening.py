"""What opens an engine refuses misspelt options and names with words that help."""

from __future__ import annotations

import dataclasses
import importlib
import inspect

import pytest

import tep
from tep.backends import BACKENDS
from tep.backends.auto import choose
from tep.backends.opening import identity
from tep.backends.verbs.settings import Settings


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


@pytest.mark.parametrize("backend", BACKENDS)
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

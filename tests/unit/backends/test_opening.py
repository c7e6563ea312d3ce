"""Opening an engine refuses misspelt options and names, with words that help."""

from __future__ import annotations

import dataclasses
import importlib
import inspect

import pytest

import tep
from tep.backends import BACKENDS, common
from tep.backends.auto import choose
from tep.backends.common import identity
from tep.backends.verbs.device import Settings


def options_of(backend: str) -> list[str]:
    """The keywords of a backend, those too that it takes as `**options`."""
    open_domains = importlib.import_module(f"tep.backends.{backend}").open_domains
    names = [
        name
        for name, found in inspect.signature(open_domains).parameters.items()
        if found.kind is not found.VAR_KEYWORD
    ]
    more = {"verbs": [f.name for f in dataclasses.fields(Settings)]}
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
    """A misspelt backend gets a suggestion, like a misspelt option."""
    with pytest.raises(tep.UsageError, match="'libfabrik' is unknown; .* did you mean 'libfabric'"):
        tep.TransferEngine.open("libfabrik")


@pytest.mark.parametrize("name", ["", "n" * 201, "\u00e9" * 101, "\udc80", 3])
def test_a_name_that_messages_cannot_carry_is_refused(name) -> None:
    """Peers drop a control message with a longer one: `fail` told nobody, and said nothing."""
    with pytest.raises(tep.UsageError, match="verbs: name="):
        identity("verbs", name, None)
    for longest in ("n" * 200, "\u00e9" * 100):
        assert (longest, 7) == identity("verbs", longest, 7)


@pytest.fixture
def lives(monkeypatch, tmp_path):
    """Begin another life at a time in ns; returns its epoch."""
    monkeypatch.setattr(common, "own_folder", lambda: tmp_path)

    def live(now_ns: int) -> int:
        monkeypatch.setattr(common, "_last_epoch", 0)  # as in a new process
        monkeypatch.setattr(common.time, "time_ns", lambda: now_ns)
        return identity("local", "peer", None)[1]

    return live


def test_a_later_life_has_a_later_epoch_whatever_the_clock_says(lives, tmp_path) -> None:
    """Peers refused an engine that had restarted with the clock set back, until it caught up."""
    assert [1_000, 1_001, 1_002, 2_000, 2_001] == [
        lives(now_ns) for now_ns in (1_000, 400, 1_000, 2_000, 1_999)
    ]
    assert 0o600 == (tmp_path / "epoch").stat().st_mode & 0o777


@pytest.mark.parametrize("kept", [b"", b"123", b"\xff" * 8, b"\xff" * 80])
def test_a_file_that_holds_no_epoch_is_written_anew(lives, tmp_path, kept) -> None:
    """A disk that was full left a part of it, and no engine could be opened."""
    (tmp_path / "epoch").write_bytes(kept)
    found = lives(10**18)
    assert 10**18 == found
    assert 10**18 + 1 == lives(10**17)


def test_without_a_folder_epochs_are_the_time(lives, tmp_path, monkeypatch, caplog) -> None:
    """Without a writable folder engines open all the same, and report the drawback."""

    def refuse() -> None:
        raise tep.UsageError("somebody else's")

    monkeypatch.setattr(common, "own_folder", refuse)
    with caplog.at_level("INFO", "tep"):
        assert [7, 8, 5] == [lives(7), identity("local", "x", None)[1], lives(5)]
    assert "somebody else's" in caplog.text

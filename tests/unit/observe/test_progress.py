"""The bar of long work: people see it, logs do not."""

from __future__ import annotations

import io
import sys

from tep.observe.progress import progress


def test_a_bar_is_shown_to_people_alone(monkeypatch) -> None:
    """A log of a thousand bars is no log."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    with progress("runs", 2) as bar:
        bar.advance(bar.task_ids[0])
    assert "" == out.getvalue()

    out.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm")
    with progress("runs", 2) as bar:
        bar.advance(bar.task_ids[0])
    assert "1/2" in out.getvalue()
    with progress("what takes its time", None, quiet=True):
        pass
    assert "what takes its time" not in out.getvalue()

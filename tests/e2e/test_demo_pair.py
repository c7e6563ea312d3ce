"""The demo's two processes when something is wrong with the other one."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tep.base.errors import FabricError
from tep.cli.demo_pair import PAIRS, LeftOut, Pair, Remote, count_overtakes, move_between

DATA = np.arange(256, dtype=np.uint8)


def test_a_backend_that_is_not_here_is_left_out_with_its_cure(monkeypatch):
    """A person adds a backend to the table; where it cannot run, the demo must go on."""
    from tep.backends import libfabric
    from tep.base.errors import BackendUnavailable

    def refuse(**_):
        raise BackendUnavailable("not on this machine", (("looked", "found nothing"),))

    monkeypatch.setattr(libfabric, "open_domains", refuse)
    found = move_between(PAIRS[0], DATA, 64, seed=1)

    assert isinstance(found, LeftOut)
    assert ("libfabric tcp", "not on this machine") == (found.fabric, found.why)
    assert (("looked", "found nothing"),) == found.tried
    assert "pip install" in found.cure


def test_what_goes_wrong_in_the_receiver_is_said_here():
    """An error in a process without a terminal is a hang to who looks at the other one."""
    pair = Pair("loopback", "loopback", {"nics": 1}, {"nics": 0})
    with pytest.raises(FabricError, match="the receiver of loopback: UsageError: .*nics"):
        move_between(pair, DATA, 64, seed=1)


def test_a_receiver_that_was_killed_is_an_error_at_once():
    """Waiting two minutes for a process that is not there any more."""
    start_s = time.monotonic()
    with Remote(PAIRS[0]) as receiver:
        receiver.process.kill()
        receiver.process.join()
        with pytest.raises(FabricError, match="ended"):
            receiver.ask("open", "loopback", {})
    assert time.monotonic() - start_s < 30


def test_overtakes_are_counted_once_a_number():
    """A number that stands before any smaller one came early; in order nobody did."""
    assert 0 == count_overtakes([1, 2, 3])
    assert 2 == count_overtakes([2, 3, 1])
    assert 1 == count_overtakes([1, 3, 2])
    assert 2 == count_overtakes([3, 2, 1])
    assert 0 == count_overtakes([7])

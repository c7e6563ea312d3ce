"""The demo's two processes when something is wrong with the other one."""

from __future__ import annotations

import multiprocessing
import time

import numpy as np
import pytest

from tep.base.errors import FabricError
from tep.bench.demo import PAIRS, File, LeftOut, Pair, move_between, remote

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
    start_s, before = time.monotonic(), set(multiprocessing.active_children())
    with remote(PAIRS[1], File(256, 64, 1)) as answers:
        (process,) = set(multiprocessing.active_children()) - before
        process.kill()
        process.join()
        with pytest.raises(FabricError, match="the receiver of local has ended"):
            for _ in answers:
                pass
    assert time.monotonic() - start_s < 30

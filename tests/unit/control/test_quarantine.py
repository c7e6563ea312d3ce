"""Memory that a NIC that is down may still touch: how long it is held, and who is told."""

from __future__ import annotations

import numpy as np
import pytest

import tep
from tep.backends.base import Access
from tep.base.errors import BusyError, FabricError
from tep.base.units import KiB
from tep.sim.cluster import Cluster
from tep.sim.faults import Chaos
from tests.support.inside import machine_of, worker_of


class Pair:
    """Two engines on a calm fabric; a has a region, b a region to write to."""

    def __init__(self, nics: int = 2) -> None:
        self.cluster = Cluster(2, nics, chaos=Chaos.calm())
        self.a, self.b = self.cluster.engines
        self.memory = np.zeros(KiB, np.uint8)
        self.mr, self.desc = self.a.reg_mr(self.memory)
        _, self.target = self.b.reg_mr(np.zeros(KiB, np.uint8))


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_memory_that_a_dead_nic_knows_is_held_until_close(pair: Pair) -> None:
    """Nobody can ask a NIC that is down what it still does to the memory."""
    raw, _ = pair.a.reg_mr((pair.memory.ctypes.data, KiB, "cpu"))
    source, _ = pair.a.reg_mr(bytes(64), access=Access.SOURCE)
    pair.cluster.kill_nic("a", 1)
    pair.cluster.env.run_until(lambda: not worker_of(pair.a).group.alive[1])

    assert "NIC 1 (a/1) is down" in pair.mr.quarantined[0].why
    assert 2 * KiB == pair.a.stats().bytes_quarantined
    assert f"bytes 0 .. {KiB} of region 1 are in quarantine" in pair.a.stall_report()
    assert () == source.quarantined, "nothing of it was on its way"
    pair.a.deregister(source)
    pair.a.deregister(pair.mr)
    assert pair.mr.quarantined
    assert [pair.mr] == list(machine_of(pair.a).kept)
    with pytest.raises(BusyError, match="the engine cannot hold its memory for you"):
        pair.a.deregister(raw)
    pair.a.close()
    assert () == pair.mr.quarantined
    assert {} == machine_of(pair.a).kept


def test_a_source_on_a_dead_nic_is_held(pair: Pair) -> None:
    """The NIC may be reading still; what it reads goes nowhere, but the bytes must stay mapped."""
    source, _ = pair.a.reg_mr(bytes(KiB), access=Access.SOURCE)
    sent = pair.a.submit_single_write(KiB, (source, 0), (pair.target, 0))
    pair.cluster.env.run_until(lambda: sent.stats().rows_posted == sent.rows)
    pair.cluster.kill_nic("a", 0)
    assert sent.wait(1).ok, "the path is fenced, and the other NIC has carried it"

    assert "NIC 0 (a/0) is down" in source.quarantined[0].why


def test_a_refused_write_leaves_nothing_in_quarantine(pair: Pair) -> None:
    """The target's NIC has said that it changed nothing (C11)."""
    mr, desc = pair.b.reg_mr(np.zeros(KiB, np.uint8))
    pair.b.deregister(mr)
    sent = pair.a.submit_single_write(8, (pair.mr, 0), (desc, 0))
    with pytest.raises(FabricError, match="REMOTE_KEY"):
        sent.wait(1)
    assert () == pair.mr.quarantined == mr.quarantined
    assert isinstance(sent, tep.Transfer)

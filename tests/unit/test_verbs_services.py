"""Watches, removals and leases on verbs, over the stub."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tep.api import Pages
from tep.backends.verbs import open_domains
from tep.control.membership import PeerChange
from tep.drivers import InlineDriver
from tep.engine import TransferEngine
from tep.errors import FabricError, LeaseError
from tests.support.here import need_stub

FAST = {"handshake_s": 0.2, "timeout": 8, "drain_s": 0.2, "resend_s": 0.005}
EVERY_S, LOST_S = 0.02, 0.3
PAGES = Pages(np.arange(16))


class Engines:
    """Engine a and some others, of two devices each, turned together; what a was told."""

    def __init__(self, stub) -> None:
        self.stub, self.ring = stub, []
        self.a, self.b = self.open("a", 0), self.open("b", 2)
        self.told = []
        self.a.on_peer(lambda event: self.told.append(event.kind))
        self.memory = np.zeros(1 << 12, np.uint8)
        self.mr, _ = self.a.reg_mr(self.memory)

    def open(self, name, device):
        devices = [f"stub{device}", f"stub{device + 1}"]
        opened = open_domains(devices, name=name, library=self.stub.path, **FAST)
        driver = InlineDriver(self.ring)
        return TransferEngine(opened.domains, driver=driver, name=name, epoch=opened.epoch)

    def until(self, done, what):
        end_s = time.monotonic() + 10
        while not done():
            for machine in tuple(self.ring):
                machine.step()
                machine.deliver()
            assert time.monotonic() < end_s, f"waited 10 s for {what}"

    def write(self, engine, target, imm=1):
        src, _ = engine.reg_mr(np.ones(1 << 12, np.uint8))
        return engine.submit_paged_writes(64, (src, PAGES), (target, PAGES), imm)

    def kill(self, engine):
        for domain in engine._domains:
            domain.die()
        self.ring.remove(engine._machine)


@pytest.fixture
def engines():
    stub = need_stub()
    stub.reset()
    found = Engines(stub)
    yield found
    for machine in tuple(found.ring):
        machine.close()
    stub.reset()


def test_a_watched_peer_is_lost_back_and_restarted(engines):
    """Heartbeats need no queue pair: what cannot be written to can still be asked."""
    a, b, told = engines.a, engines.b, engines.told
    watch = a.watch_peer(b.main_address, every_s=EVERY_S, lost_after_s=LOST_S)
    engines.until(lambda: watch.round_trip_s is not None, "an answer")
    missed = a.expect_imm_count(5, 1, sender=b.main_address)
    engines.ring.remove(b._machine)  # it is stopped
    engines.until(lambda: missed.finished, "the loss")
    assert "PEER_LOST" == missed.error.code
    engines.ring.append(b._machine)
    engines.until(lambda: PeerChange.BACK in told, "its return")
    engines.kill(b)
    reborn = engines.open("b", 2)
    a.add_peer_group([reborn.main_address])
    engines.until(lambda: PeerChange.RESTARTED in told, "the restart")

    assert [PeerChange.LOST, PeerChange.BACK] == told[:2]
    assert PeerChange.RESTARTED is told[-1]
    assert watch.closed


def test_a_removed_peer_leaves_nothing_and_can_be_met_again(engines):
    """Its queue pairs stay with the NIC; what the engine knew of it goes."""
    a, b = engines.a, engines.b
    _, desc = b.reg_mr(np.zeros(1 << 12, np.uint8))
    for turn in range(3):
        sent = engines.write(a, desc)
        a.remove_peer(b.main_address).wait(10)
        assert sent.ok
        assert ({}, {}) == (a._peers.links, a._machine.life._peers), turn


def test_a_lease_ends_free_by_its_writers_word_or_by_a_fence(engines):
    """Queue pairs that are gone write nothing: the bytes of a dead writer are free, not lost."""
    a, b = engines.a, engines.b
    grant = a.lease(engines.mr, b.main_address, for_s=60)
    engines.write(b, grant.lease).wait(10)
    grant.revoke().wait(10)
    with pytest.raises(LeaseError, match="asked back"):
        engines.write(b, grant.lease)

    grant = a.lease(engines.mr, b.main_address, for_s=60)
    engines.write(b, grant.lease).wait(10)
    engines.ring.remove(b._machine)  # it is stopped, with a write on its way
    late = engines.write(b, grant.lease, imm=2)
    grant.revoke().wait(10)
    engines.memory[:] = 0
    engines.ring.append(b._machine)
    with pytest.raises((FabricError, LeaseError)):
        late.wait(10)

    assert () == engines.mr.quarantined
    assert not engines.memory.any(), "free, and written to"
    assert 2 not in dict(a.stats().imms_unexpected)

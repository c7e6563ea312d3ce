"""Watches and removals on verbs, over the stub."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tep.backends.verbs import open_domains
from tep.base.api import EngineOptions, Pages
from tep.base.errors import FabricError
from tep.control.membership import PeerChange
from tep.drivers.threads import InlineDriver
from tep.engine import TransferEngine
from tests.support.here import need_stub
from tests.support.inside import machine_of, nics_of, peers_of, worker_of
from tests.verbs.rig import die

FAST = {"handshake_s": 0.2, "timeout": 8, "drain_s": 0.2, "resend_s": 0.005}
EVERY_S, LOST_S = 0.02, 0.3
QUICK = EngineOptions(probe_first_s=0.02, probe_max_s=0.1)
PAGES = Pages(np.arange(16))


class Engines:
    """Engine a and some others, of two devices each, turned together; what a was told."""

    def __init__(self, stub) -> None:
        self.stub, self.ring = stub, []
        self.a, self.b = self.open("a", 0), self.open("b", 2)
        self.told = []
        self.a.on_peer(lambda event: self.told.append(event.kind))
        self.memory = np.zeros(1 << 12, np.uint8)
        self.mr, self.desc = self.a.reg_mr(self.memory)

    def open(self, name, device):
        devices = [f"stub{device}", f"stub{device + 1}"]
        opened = open_domains(devices, name=name, library=self.stub.path, **FAST)
        driver = InlineDriver(self.ring)
        return TransferEngine(
            opened.domains, driver=driver, name=name, epoch=opened.epoch, options=QUICK
        )

    def until(self, done, what):
        end_s = time.monotonic() + 60
        while not done():
            for each in tuple(self.ring):
                each.step()
                each.deliver()
            assert time.monotonic() < end_s, f"waited 10 s for {what}"

    def write(self, engine, target, imm=1):
        src, _ = engine.reg_mr(np.ones(1 << 12, np.uint8))
        return engine.submit_paged_writes(64, (src, PAGES), (target, PAGES), imm)

    def write_in_time(self, engine, target):
        """Write until it works: a path that was fenced off is asked for when rows on it failed."""
        end_s, tries = time.monotonic() + 10, 0
        while True:
            sent, tries = self.write(engine, target, imm=None), tries + 1
            self.until(lambda sent=sent: sent.finished, "a write")
            if sent.ok:
                return tries
            assert time.monotonic() < end_s, sent.error

    def kill(self, engine):
        for domain in nics_of(engine):
            die(domain)
        self.ring.remove(machine_of(engine))


@pytest.fixture
def engines():
    stub = need_stub()
    stub.reset()
    found = Engines(stub)
    yield found
    for each in tuple(found.ring):
        each.close()
    stub.reset()


@pytest.mark.slow
def test_a_watched_peer_is_lost_back_and_restarted(engines):
    """Heartbeats need no queue pair: what cannot be written to can still be asked."""
    a, b, told = engines.a, engines.b, engines.told
    watch = a.watch_peer(b.main_address, every_s=EVERY_S, lost_after_s=LOST_S)
    engines.until(lambda: watch.round_trip_s is not None, "an answer")
    missed = a.expect_imm_count(5, 1, sender=b.main_address)
    engines.ring.remove(machine_of(b))  # it is stopped
    engines.until(lambda: missed.finished, "the loss")
    assert "PEER_LOST" == missed.error.code
    engines.ring.append(machine_of(b))
    engines.until(lambda: PeerChange.BACK in told, "its return")
    engines.kill(b)
    reborn = engines.open("b", 2)
    a.add_peer_group([reborn.main_address])
    engines.until(lambda: PeerChange.RESTARTED in told, "the restart")

    assert [PeerChange.LOST, PeerChange.BACK] == told[:2]
    assert PeerChange.RESTARTED is told[-1]
    assert watch.closed


@pytest.mark.slow
def test_a_removed_peer_leaves_nothing_and_can_be_met_again(engines):
    """Earlier transfers end as if nothing had happened; the state of the peer is dropped.

    Both ways share a connection: met anew, the first rows may fail, and open the paths that the
    removal has fenced off.
    """
    a, b = engines.a, engines.b
    _, desc = b.reg_mr(np.zeros(1 << 12, np.uint8))
    for turn in range(3):
        tries = engines.write_in_time(a, desc)
        assert turn or tries == 1
        sent = engines.write(a, desc)
        removal = a.remove_peer(b.main_address).wait(60)
        assert sent.ok
        assert "" == removal.unfenced
        assert ({}, {}) == (peers_of(a).links, worker_of(a).members.peers), turn


def test_memory_is_free_once_its_silent_writer_is_removed(engines):
    """Queue pairs that are gone write nothing: what a stopped writer had posted lands no more."""
    a, b = engines.a, engines.b
    engines.write(b, engines.desc).wait(60)
    engines.ring.remove(machine_of(b))  # it is stopped, with a write on its way
    late = engines.write(b, engines.desc, imm=2)
    removal = a.remove_peer(b.main_address).wait(60)
    engines.memory[:] = 0
    engines.ring.append(machine_of(b))
    with pytest.raises(FabricError):
        late.wait(60)

    assert "" == removal.unfenced
    assert not engines.memory.any(), "free, and written to"
    assert 2 not in dict(a.stats().imms_unexpected)
    a.expect_imm_count(9, 1, sender=b.main_address)  # from now on it may write again
    engines.write_in_time(b, engines.desc)
    assert engines.memory[: 16 * 64].all()

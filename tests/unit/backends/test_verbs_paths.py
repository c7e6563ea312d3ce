"""Engines over the verbs stub that lose NICs, links and acknowledgements: counts stay exact."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tep.backends.verbs import open_domains
from tep.base.api import EngineOptions, Pages
from tep.base.errors import FabricError
from tep.drivers.threads import InlineDriver
from tep.engine import TransferEngine
from tests.support.inside import machine_of, nics_of, peers_of, worker_of
from tests.support.verbs_stub import Knob
from tests.verbs.rig import die

PAGE = 64
FAST = {"handshake_s": 0.3, "timeout": 8, "drain_s": 0.3, "resend_s": 0.005}


class Engines:
    """Two engines of two NICs each, over the stub."""

    def __init__(self, stub, devices=(("stub0", "stub1"), ("stub2", "stub3")), **options):
        self.ring = []
        options = {"library": stub.path, **FAST, **options}
        self.a = self._open(devices[0], "a", options)
        self.b = self._open(devices[1], "b", options)
        rng = np.random.default_rng(1)
        self.source = rng.integers(0, 256, 256 * PAGE, np.uint8)
        self.target = np.zeros(256 * PAGE, np.uint8)
        self.mr, self.desc = self.a.reg_mr(self.source)[0], self.b.reg_mr(self.target)[1]

    def _open(self, devices, name, options):
        opened = open_domains(devices, name=name, **options)
        driver = InlineDriver(self.ring)
        quick = EngineOptions(probe_first_s=0.02, probe_max_s=0.2)
        return TransferEngine(
            opened.domains, driver=driver, name=name, epoch=opened.epoch, options=quick
        )

    def write(self, imm):
        pages = Pages(np.arange(256))
        return self.a.submit_paged_writes(PAGE, (self.mr, pages), (self.desc, pages), imm=imm)

    def turn(self):
        for each in tuple(self.ring):
            each.step()
            each.deliver()

    def check_once(self):
        """Whatever comes late has come: b has the bytes, and no immediate beyond those counted."""
        for _ in range(50):
            self.turn()

        assert (self.source == self.target).all()
        assert {1: 256} == dict(self.b.stats().imms_unexpected)

    def close(self):
        self.a.close()
        self.b.close()


@pytest.fixture
def engines(stub):
    found = Engines(stub, sq_depth=16)
    yield found
    stub.reset()
    found.close()


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
@pytest.mark.parametrize("device", [0, 1, 2, 3])
def test_a_write_outlives_any_nic_whose_link_is_cut(stub, engines, device, turns):
    """The transfer is done, its count exact and its bytes right, whichever of the four it was."""
    engines.write(1).wait(60)
    engines.target[:] = 0
    got = engines.b.expect_imm_count(2, 256)
    sent = engines.write(2)
    for _ in range(turns):
        engines.turn()
    stub.set(Knob.CUT_LINK, device + 1)
    sent.wait(60)
    got.wait(60)

    engines.check_once()


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 2, 30, 129, 200])
def test_a_row_whose_acknowledgement_is_lost_is_counted_once(stub, engines, lost):
    """It has landed, and its sender cannot know: written again as it was, it would count twice."""
    engines.write(1).wait(60)
    got = engines.b.expect_imm_count(2, 256)
    stub.set(Knob.LOSE_ACK, lost)
    sent = engines.write(2)
    sent.wait(60)
    got.wait(60)

    engines.check_once()
    assert 0 < worker_of(engines.a).failover.rows


@pytest.mark.slow
@pytest.mark.parametrize("turns", [0, 3])
@pytest.mark.parametrize(
    "what", ["cut 0", "cut 1", "cut 2", "cut 3", "lose 1", "lose 300", "kill a1", "kill b0"]
)
def test_writes_both_ways_outlive_what_happens_to_a_nic(stub, engines, what, turns):
    """A fence breaks the pair for both: what the other side had out there must be made good too."""
    a, b, every = engines.a, engines.b, Pages(np.arange(256))
    source, target = engines.source[::-1].copy(), np.zeros_like(engines.target)
    back = (b.reg_mr(source)[0], every), (a.reg_mr(target)[1], every)
    engines.write(1).wait(60)
    b.submit_paged_writes(PAGE, *back, imm=1).wait(60)
    engines.target[:] = target[:] = 0
    handles = [b.expect_imm_count(2, 256), a.expect_imm_count(2, 256), engines.write(2)]
    handles.append(b.submit_paged_writes(PAGE, *back, imm=2))
    for _ in range(turns):
        engines.turn()
    how, which = what.split()
    if how == "kill":
        nics_of(getattr(engines, which[0]))[int(which[1])].fail_device()
    else:
        stub.set(Knob.CUT_LINK if how == "cut" else Knob.LOSE_ACK, int(which) + (how == "cut"))
    for handle in handles:
        handle.wait(60)

    engines.check_once()
    assert (source == target).all()
    assert {1: 256} == dict(a.stats().imms_unexpected)


@pytest.mark.slow
@pytest.mark.parametrize("both", [False, True])
def test_a_path_comes_back_however_often_it_is_lost(stub, engines, both):
    """One connection serves both ways: it is used again when both sides have let go of it."""
    a, b, every = engines.a, engines.b, Pages(np.arange(256))
    source, target = engines.source[::-1].copy(), np.zeros_like(engines.target)
    back = (b.reg_mr(source)[0], every), (a.reg_mr(target)[1], every)

    def write_all(imm):
        engines.target[:] = target[:] = 0
        sent = [engines.write(imm)]
        if both:
            sent.append(b.submit_paged_writes(PAGE, *back, imm=imm))
        counts = zip((b, a), sent, strict=False)
        waits = [*sent, *(engine.expect_imm_count(imm, 256) for engine, _ in counts)]
        for handle in waits:
            handle.wait(60)
        assert (engines.source == engines.target).all()
        assert not both or (source == target).all()
        return sum(handle.stats().rows_again for handle in sent)

    def shut():
        return [link.shut() for engine in (a, b) for link in peers_of(engine).links.values()]

    write_all(0)
    for imm in range(1, 7):
        stub.set(Knob.LOSE_ACK, 30 * imm)
        write_all(imm)
        until_s = time.monotonic() + 60
        while any(shut()):
            assert time.monotonic() < until_s, f"not opened again: {shut()}"
            engines.turn()
    assert 0 == write_all(7)
    assert 6 <= sum(
        far.reopened for e in (a, b) for far in worker_of(e).group.far_ends.known.values()
    )


@pytest.mark.slow
def test_without_another_way_the_error_says_what_failed(stub, engines):
    """Both of a peer's NICs are gone: an error that names them, and no wait without end."""
    engines.write(1).wait(60)
    for domain in nics_of(engines.b):
        die(domain)
    engines.ring.remove(machine_of(engines.b))
    with pytest.raises(FabricError, match="UNREACHABLE"):
        engines.write(2).wait(20)


def test_a_device_that_is_named_twice_is_two_nics(stub):
    """A queue pair uses one port of a bond; the doctor's cure would leave a port idle, or fail."""
    engines = Engines(stub, (["stub0"] * 2, ["stub1"] * 2))
    try:
        got = engines.b.expect_imm_count(2, 256)
        engines.write(2).wait(60)
        got.wait(60)

        assert [128, 128] == [nic.rows for nic in engines.a.stats().nics]
        assert (engines.source == engines.target).all()
    finally:
        engines.close()

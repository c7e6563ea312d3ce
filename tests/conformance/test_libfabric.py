"""The contract on real libfabric: tcp over loopback addresses; one process."""

from __future__ import annotations

import errno
import math
import os
import select
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest

import tep
from tep.backends import libfabric
from tep.backends.base import Kind, Status, new_completions
from tep.backends.ffi.libfabric import FI_EAVAIL
from tep.backends.libfabric.rules import RULES, parse
from tep.base.errors import FabricError
from tep.base.units import MiB
from tep.testing.contract import Ability, DomainContract, World
from tep.testing.contract_engine import EngineContract, OpenEngines
from tep.testing.world import Net
from tests.support.here import require
from tests.support.inside import nics_of

pytestmark = pytest.mark.slow  # real libraries and clocks: not in the fast minute

TIMEOUT_S = 1.0


class FabricWorld(World):
    """Nodes of one process on one provider, each turned by the test."""

    turns_max = 200_000

    def __init__(self, provider, **options):
        self.provider = provider
        self.options = {"peer_timeout_s": TIMEOUT_S, **options}
        self.abilities = frozenset({Ability.FORK, Ability.FAIL_NIC, Ability.KILL, Ability.RESTART})
        self.nodes = []

    def node(self, nics=1):
        return self._open(nics, f"node{len(self.nodes)}")

    def _open(self, nics, name):
        found = libfabric.open_domains(provider=self.provider, nics=nics, name=name, **self.options)
        self.nodes.append(found)
        return found

    def turn(self):
        os.sched_yield()

    def kill(self, node):
        """End as the kernel ends a process's sockets: nobody says goodbye."""
        for domain in node.domains:
            domain._say_bye = lambda: None
            domain.close()

    def fail_nic(self, node, nic):
        """Let fi_cq_read say that the device is gone, once what is there has been read."""
        node.domains[nic]._drain()
        fail_read(node.domains[nic])

    def restart(self, node):
        """Open again at the very same IP addresses and ports."""
        names = []
        for domain in node.domains:
            port = int.from_bytes(parse(domain.address, self.provider).raw[2:4], "big")
            names.append(f"{domain.caps.nic}:{port}")
        return self._open(names, node.name)

    def close(self):
        for node in self.nodes:
            for domain in node.domains:
                domain.close()
        self.nodes.clear()


class TestTcp(DomainContract):
    """The provider that any Linux machine has."""

    @pytest.fixture
    def world(self):
        require("tcp")
        with FabricWorld("tcp") as world:
            yield world


class TestTcpNarrow(DomainContract):
    """The same with a window of three rows: nearly every post is refused in part."""

    @pytest.fixture
    def world(self, monkeypatch):
        require("tcp")
        narrow = replace(RULES["tcp"], window_rows=3, window_bytes=65536)
        monkeypatch.setattr(libfabric, "RULES", {"tcp": narrow})
        with FabricWorld("tcp") as world:
            yield world


def fabric_engines(provider="tcp"):
    """Engines of two NICs with a worker thread each."""

    def opened(name=None):
        found = libfabric.open_domains(
            provider=provider, nics=2, name=name, peer_timeout_s=TIMEOUT_S
        )
        driver = tep.ThreadDriver(found.name)
        return tep.TransferEngine(found.domains, driver=driver, name=found.name, epoch=found.epoch)

    return OpenEngines(opened, opened)


class TestEngines(EngineContract):
    """The engine's share, as people use it: threads, two NICs."""

    @pytest.fixture
    def engines(self):
        require("tcp")
        with fabric_engines() as engines:
            yield engines


@pytest.mark.parametrize("turns", [0, 1])
def test_a_process_that_was_held_up_does_not_bury_its_peers(turns, monkeypatch):
    """The peers' answers wait in the queue; by the deadline alone the peers would be gone."""
    require("tcp")
    true, late_s = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: true() + late_s)
    with FabricWorld("tcp") as world:
        net = Net(world)
        a, b = net.pair()
        batch = a.batch(b, imm=1)  # connects: a greeting is on its way
        for _ in range(turns):
            net.turn()
        late_s = 10 * TIMEOUT_S

        net.write(batch, a)

        assert [] == a.errors()
        assert {1: 1} == b.imms()


def test_c08_a_burst_on_a_machine_that_is_held_up_is_not_called_lost(monkeypatch):
    """There the target is not polled until it counts as dead, and the clause blamed the NIC."""
    require("tcp")
    true, late_s = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: true() + late_s)

    def turn():
        nonlocal late_s
        late_s += TIMEOUT_S / 20

    with FabricWorld("tcp") as world:
        world.turn = turn
        net = Net(world)
        TestTcp().test_c08_a_burst_beyond_any_receive_queue_arrives(net)

        assert {Status.UNREACHABLE} == {error.status for error in net.sides[0].errors()}


@pytest.mark.xfail(strict=True, reason="libfabric does not stop a row that is being received")
def test_c16_nothing_of_a_long_row_is_written_after_deregister():
    """Memory that went back to its owner in the middle of a row changes under it."""
    require("tcp")
    with FabricWorld("tcp") as world:
        net = Net(world)
        a, b = net.pair(nbytes=32 * MiB)
        net.write(a.batch(b, nbytes=64), a)
        a.post(a.batch(b, nbytes=32 * MiB))
        net.until(lambda: b.target.data[MiB] == a.source.data[MiB], "the first MiB")
        b.target.deregister()
        end = int(b.target.data[-1])
        for _ in range(300):
            net.turn()

        assert end == b.target.data[-1]


def test_c31_a_read_to_a_wrong_place_fails_and_those_behind_it_arrive():
    """A batch of reads whose second is impossible: the ones behind it never ended."""
    require("tcp")
    with FabricWorld("tcp") as world:
        net = Net(world)
        a, b = net.pair()
        at = [0, 64, 128]
        batch = a.read(b, b.readable(256), local=[0, len(a.target.data), 128], remote=at)
        net.write(batch, a)

        assert {Status.OK: 2, Status.LOCAL_KEY: 1} == a.rows_ended(batch.ctx)
        assert [1] == [error.row for error in a.errors()]


@pytest.mark.parametrize("times", [3, math.inf])
def test_a_peer_for_whom_no_endpoint_can_be_opened_is_tried_again(times):
    """Out of poll(), where a greeting is answered, an exception would end the whole engine."""
    require("tcp")
    with FabricWorld("tcp") as world:
        net = Net(world)
        a, b = net.pair()
        (domain,) = a.domains
        open_endpoint, left = domain.nic.open_endpoint, [times]

        def refuse(options=()):
            left[0] -= 1
            if left[0] >= 0:
                raise FabricError("fi_endpoint: Too many open files", code="PROVIDER")
            return open_endpoint(options)

        domain.nic.open_endpoint = refuse
        b.post(b.batch(a, imm=1))  # its greeting is met in poll()
        a.post(a.batch(b, imm=2))
        net.until(lambda: not a.rows_open and not b.rows_open, "both ends")
        if times == math.inf:
            assert [Status.UNREACHABLE] == [x.status for x in a.errors()]
            assert "Too many open files" in domain.status_text(Status.UNREACHABLE)
        else:
            assert [] == a.errors() == b.errors()
            assert {2: 1} == b.imms()
            assert "Too many" not in domain.status_text(Status.UNREACHABLE)


def test_c28_a_peer_that_asks_while_it_is_forgotten_is_answered(monkeypatch):
    """Its question lies in the queue that is emptied when its endpoint closes."""
    require("tcp")
    with FabricWorld("tcp") as world:
        net = Net(world)
        a, b = net.pair()
        net.write(a.batch(b, imm=1), a)
        net.write(b.batch(a, imm=3), b)
        (domain,) = a.domains
        peer = domain.peers.all[a.peer(b)]
        asks, cut = b.batch(a, imm=2), domain.peers.cut

        def ask(closing):
            cut(closing)
            monkeypatch.undo()
            for to in b_peers:
                to.leases.clear()  # as if the row were the first under its key
            b.post(asks)
            net.sides.remove(a)
            net.until(lambda: not any(to.outbox for to in b_peers), "b's question")
            net.sides.append(a)

        b_peers = b.domains[0].peers.all
        monkeypatch.setattr(domain.peers, "cut", ask)
        domain.forget(a.peer(b))
        net.until(lambda: peer.forget_s == 0.0, "the end of the endpoint")
        net.settle()

        assert {Status.OK: 1} == b.rows_ended(asks.ctx)
        assert {2: 1, 3: 1} == a.imms()


def fail_read(domain):
    """fi_cq_read fails as a whole, whatever is there."""
    domain._queue._read = lambda *_: -errno.EIO
    return "fi_cq_read: "


def fail_readerr(domain):
    """An error is announced, and cannot be read."""
    domain._queue._read = lambda *_: -FI_EAVAIL
    domain.nic._readerr = lambda *_: -errno.EIO
    return "fi_cq_readerr: "


def fail_recv(domain):
    """The queue works, and no receive can be posted any more."""
    domain._main.recv = lambda *_: -errno.EIO
    return "fi_recv: "


@pytest.mark.parametrize("fail", [fail_read, fail_readerr, fail_recv])
def test_c23_a_call_that_says_that_the_nic_is_gone_ends_all_of_it(fail):
    """An exception out of poll() would end the engine, with the NICs that live, as a bug in tep.

    Rows in flight, a row that waits for a greeting, a message and a control message: each ends
    once, before
    the NIC says DOWN; later ones at once. The memory is held until close, since libfabric may still
    touch it, and closing does not fail although libfabric says so.
    """
    require("tcp")
    with FabricWorld("tcp") as world:
        net = Net(world)
        a, b = net.pair()
        c, late = net.side(), net.side()
        net.write(a.batch(b, imm=1), a)
        net.write(b.batch(a, imm=7), b)
        b.post(b.batch(a, imm=8))  # arrives only where the queue still works
        for side in (b, c, late):
            net.forget(side)
        (domain,) = a.domains
        a.try_post(a.batch(b, src=[0] * 40, imm=2), 0, 40)
        a.try_post(a.batch(c, imm=3), 0, 1)
        a.send(b, b"message")
        a.control(b, b"control message")
        said = fail(domain)
        b.control(a, b"a frame, whose buffer is posted again")
        net.until(lambda: b.poll() or any(x.kind == Kind.DOWN for x in a.seen), "the NIC's end")

        assert 0 == a.rows_open == a.messages_open
        assert [Kind.DOWN] == [x.kind for x in a.seen if x.status == Status.NIC_DOWN][-1:]
        assert {Status.OK, Status.NIC_DOWN} >= {x.status for x in a.seen}
        assert said in domain.status_text(Status.NIC_DOWN)
        if fail is fail_recv:
            assert {7: 1, 8: 1} == a.imms()

        seen = len(a.seen)
        for batch in (a.batch(b), a.batch(late)):
            a.try_post(batch, 0, 1)
        a.send(c, b"message")
        assert not domain.arm(), "what was posted has ended"
        net.quiet()
        assert [Status.NIC_DOWN] * 3 == [x.status for x in a.seen[seen:]]
        assert domain.arm(), "nothing is waiting, and nothing will come"
        assert domain.wakeup_fd() is None or [] == select.select([domain.wakeup_fd()], [], [], 0)[0]

        memory = weakref.ref(a.source._whole)
        a.source.deregister()
        a.source = None
        assert fail is fail_recv or memory() is not None
        fabric = domain.nic._open[0]
        true_close = fabric._close
        fabric._close = lambda address: true_close(address) - errno.EBUSY
        domain.close()
        assert 0 == domain.poll(new_completions(8))


def test_c23_an_engine_goes_on_with_its_other_nics():
    """The NIC that is lost takes its rows along, and says why; the next write goes another way."""
    require("tcp")
    with fabric_engines() as engines:
        a, b = engines.engine(), engines.engine()
        region, _ = a.reg_mr(np.ones(64 * 64, np.uint8))
        target = np.zeros(64 * 64, np.uint8)
        _, desc = b.reg_mr(target)
        pages = tep.Pages(np.arange(64))

        def write(imm):
            sent = a.submit_paged_writes(64, (region, pages), (desc, pages), imm)
            try:
                sent.wait(20)
            except FabricError as error:
                return error
            return b.expect_imm_count(imm, 64).wait(20)

        assert write(1).ok
        fail_read(nics_of(a)[0])
        error = write(2)  # unless the worker has met the end of the NIC before

        assert error is None or error.code == "NIC_DOWN", error
        assert error is None or "fi_cq_read: " in str(error)
        target[:] = 0
        assert write(3).ok
        assert target.all()
        assert "DOWN" in a.explain(), a.explain()


LONG_S = 100.0
"""A deadline that no machine is held up by."""


class SlowTime:
    """A clock that is put forward in steps too small to be taken for having been held up."""

    def __init__(self, monkeypatch, side):
        self.side = side
        self.ahead_s = 0.0
        true = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: true() + self.ahead_s)

    def pass_s(self, seconds):
        """Let time pass for one side alone; return how its rows have ended since."""
        before = len(self.side.seen)
        until_s = self.ahead_s + seconds
        while self.ahead_s < until_s:
            self.ahead_s += 0.15
            self.side.poll()
        return [Status(seen.status) for seen in self.side.seen[before:]]


@pytest.fixture
def silent(monkeypatch):
    """(net, a, b, clock): `b` is not polled, and so answers nobody."""
    require("tcp")
    with FabricWorld("tcp", peer_timeout_s=LONG_S) as world:
        net = Net(world)
        a, b = net.pair()
        net.forget(a)
        net.forget(b)
        yield net, a, b, SlowTime(monkeypatch, a)


def test_c17_a_row_has_its_own_time_however_old_the_greeting_is(silent):
    """A peer that is back in time for a row is reached, though earlier rows were too early."""
    net, a, b, clock = silent
    within_s = a.domains[0].timeout_s
    early, late = a.batch(b, imm=1), a.batch(b, imm=2)  # connects: the greeting is on its way
    a.try_post(early, 0, 1)
    assert [] == clock.pass_s(0.9 * within_s)
    a.try_post(late, 0, 1)

    assert [Status.UNREACHABLE] == clock.pass_s(0.2 * within_s)
    assert {Status.UNREACHABLE: 1} == a.rows_ended(early.ctx)
    net.sides += [a, b]
    net.settle()
    assert {Status.OK: 1} == a.rows_ended(late.ctx)
    assert {2: 1} == b.imms()


def test_c17_a_silent_peer_fails_every_row_in_time(silent):
    """Rows that come one after the other must not keep each other waiting for ever."""
    _, a, b, clock = silent
    batch = a.batch(b)
    step_s = 0.1 * a.domains[0].timeout_s
    for k in range(25):
        a.try_post(batch, 0, 1)
        ended = clock.pass_s(step_s)
        assert {Status.UNREACHABLE} >= set(ended)
        assert a.rows_open <= 11, "each has ended within its time, and a step"
        assert k < 11 or ended
    clock.pass_s(11 * step_s)
    assert 0 == a.rows_open
    assert 11 * step_s < LONG_S


def test_c17_a_row_after_the_end_of_others_is_tried_anew(silent):
    """A peer that came back right after it was given up would stay so for another second."""
    net, a, b, clock = silent
    a.try_post(a.batch(b, imm=1), 0, 1)
    a.try_post(a.batch(b, imm=2), 0, 1)
    clock.pass_s(0.9 * a.domains[0].timeout_s)
    while a.rows_open:
        clock.pass_s(0.1)
    assert [Status.UNREACHABLE] * 2 == [seen.status for seen in a.seen]
    a.try_post(a.batch(b, imm=3), 0, 1)
    net.sides += [a, b]
    net.settle()

    assert {3: 1} == b.imms()


def test_c17_rows_are_not_tried_anew_before_the_end_of_others_is_known(silent):
    """A sender that does not know of it yet goes on posting, and would wait for each post."""
    _, a, b, clock = silent
    (domain,) = a.domains
    batch = a.batch(b, src=[0] * 40)
    a.try_post(batch, 0, 20)
    clock.pass_s(0.9 * domain.timeout_s)
    while not domain._done:
        clock.ahead_s += 0.15
        domain.poll(new_completions(0))
    a.try_post(batch, 20, 40)
    a.poll()
    a.poll()
    a.poll()

    assert {Status.UNREACHABLE: 40} == a.rows_ended(batch.ctx)


def test_c17_a_peer_that_dies_before_it_grants_a_lease_is_an_error(silent):
    """It has answered the greeting, no row is out: nothing but the row's own time ends it."""
    net, a, b, clock = silent
    batch = a.batch(b)
    net.sides += [a, b]
    net.quiet()
    net.forget(b)
    a.try_post(batch, 0, 1)

    assert [] == clock.pass_s(0.9 * a.domains[0].timeout_s)
    assert [Status.UNREACHABLE] == clock.pass_s(0.2 * a.domains[0].timeout_s)

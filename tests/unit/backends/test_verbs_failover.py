"""The part of a verbs NIC in failover: sources, fences, control messages, deaths."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from unittest import mock

import numpy as np
import pytest

from tep.backends.base import Access, Kind, Status, WriteBatch, new_completions
from tep.backends.verbs import open_domains
from tep.base.errors import FabricError
from tep.memory.source import adapt
from tests.support.verbs_stub import Knob

PAGE = 64
FAST = {"handshake_s": 0.3, "timeout": 8, "drain_s": 0.3, "resend_s": 0.005}


class Nodes:
    """Single NICs, each on a device of its own, with memory that any may write to."""

    def __init__(self, stub, names="abc", **options):
        self.nics = {}
        self.seen = {name: [] for name in names}
        self.out = new_completions(1024)
        for k, name in enumerate(names):
            opened = open_domains([f"stub{k}"], name=name, library=stub.path, **FAST | options)
            self.nics[name] = opened.domains[0]
        self.memory = {name: np.arange(1 << 14, dtype=np.uint8) for name in names}
        self.keys = {
            name: nic.register(adapt(self.memory[name]), Access.SOURCE_AND_TARGET)
            for name, nic in self.nics.items()
        }

    def turn(self):
        for name, nic in self.nics.items():
            self.seen[name] += self.out[: nic.poll(self.out)].tolist()

    def until(self, done):
        end_s = time.monotonic() + 60
        while not done():
            self.turn()
            assert time.monotonic() < end_s, f"waited in vain: {self.seen}"

    def connect(self, a, b):
        nic = self.nics[a]
        peer = nic.connect(self.nics[b].address)
        self.until(lambda: nic.peers.up[peer] is not None)

    def write(self, a, b, n=1, imm=1, ctx=1):
        nic, keys = self.nics[a], self.keys
        at = np.arange(n, dtype=np.uint64) * np.uint64(PAGE)
        src, dst = at + np.uint64(keys[a].base), at + np.uint64(keys[b].base)
        peer = nic.connect(self.nics[b].address)
        batch = WriteBatch(n, peer, src, keys[a].lkey, dst, keys[b].rkey, PAGE, imm, ctx)
        assert n == nic.post(batch, 0, n)

    def fence(self, at, source, ctx=7):
        self.nics[at].fence(self.nics[source].address, ctx)
        self.until(lambda: any(e[0] == Kind.FENCED and e[5] == ctx for e in self.seen[at]))
        return next(e[1] for e in self.seen[at] if e[0] == Kind.FENCED and e[5] == ctx)

    def unfence(self, at, source):
        self.nics[at].unfence(self.nics[source].address)

    def statuses(self, name, ctx):
        """Return the statuses of one batch's rows."""
        found = Counter()
        for entry in self.seen[name]:
            if entry[0] == Kind.WRITE and entry[5] == ctx:
                found[Status(entry[1])] += entry[2]
        return found

    def ended(self, name, kind=Kind.WRITE):
        found = Counter()
        for entry in self.seen[name]:
            if entry[0] == kind:
                found[Status(entry[1])] += entry[2]
        return found

    def imms(self, name):
        """Immediates that arrived, by (source's name, value)."""
        names = {nic.address: who for who, nic in self.nics.items()}
        found = Counter()
        for entry in self.seen[name]:
            if entry[0] == Kind.IMM:
                found[names[self.nics[name].source(entry[5])], entry[3]] += entry[2]
        return found


@pytest.fixture
def nodes(stub, request):
    found = Nodes(stub, **getattr(request, "param", {}))
    yield found
    for nic in found.nics.values():
        nic.close()


@pytest.mark.slow
@pytest.mark.parametrize("distinct", [False, True])
def test_a_burst_of_two_senders_is_told_apart(stub, nodes, distinct):
    """One entry for both would credit one sender with the other's immediates."""
    n, step = 60, int(distinct)
    for name in "ac":
        nodes.connect(name, "b")
    numbers = {name: nodes.nics["b"].connect(nodes.nics[name].address) for name in "ac"}
    nodes.until(lambda: all(nodes.nics["b"].peers.up[k] for k in numbers.values()))
    for bursts in (1, 2):
        for name in "ac":  # in one poll, so that columns meet both
            conn = nodes.nics["b"].peers.up[numbers[name]]
            stub.inject_imms(conn.ids[1][0], n, 5, step)
        nodes.turn()
        each = bursts * (1 if distinct else n)

        assert {(who, 5 + k * step): each for who in "ac" for k in range(n)} == (
            dict(nodes.imms("b"))
        )
        nodes.fence("b", "a")  # and let in again, over other queue pairs
        nodes.unfence("b", "a")
        nodes.until(lambda: nodes.nics["b"].peers.up[numbers["a"]])


def test_rows_of_a_fenced_pair_end_unreachable_both_ways_and_messages_pass(nodes):
    """Any other end would fail the transfer instead of moving it; messages use the first NICs."""
    nodes.connect("a", "b")
    nodes.write("a", "b", 30, imm=1)
    assert Status.OK == nodes.fence("b", "a")
    before = nodes.imms("b")
    nodes.write("a", "b", 30, imm=2, ctx=2)
    nodes.write("b", "a", 2, imm=3, ctx=3)
    nodes.until(lambda: nodes.ended("b") and nodes.ended("a").total() == 60)
    for name, other in ("ab", "ba"):
        nodes.nics[other].post_recvs(100, 1)
        peer = nodes.nics[name].connect(nodes.nics[other].address)
        assert nodes.nics[name].post_send(peer, b"still here", 9)
    nodes.until(lambda: all(nodes.ended(name, Kind.RECV) for name in "ab"))
    nodes.write("a", "b", 1, imm=2, ctx=4)
    nodes.write("c", "b", 1, imm=4, ctx=5)
    nodes.until(lambda: nodes.ended("c") and nodes.ended("a").total() == 61)

    # One meets the end of the connection, the others are flushed after it; the last is refused.
    assert {Status.OK: 30, Status.UNREACHABLE: 2, Status.FLUSHED: 29} == nodes.ended("a")
    assert {Status.UNREACHABLE: 2} == nodes.ended("b")
    assert {("a", 1): 30} == before
    assert {("a", 1): 30, ("c", 4): 1} == nodes.imms("b")
    assert {} == nodes.imms("a")


def test_a_fence_waits_until_the_whole_queue_was_read(stub, nodes):
    """What had landed before it came behind it, and was counted for what was written again."""
    nodes.connect("a", "b")
    nic = nodes.nics["b"]
    nodes.until(lambda: any(nic.peers.up))
    (conn,) = filter(None, nic.peers.up)
    nic.fence(nodes.nics["a"].address, 7)
    stub.inject_imms(conn.ids[1][0], 300, 5)
    nodes.out = nodes.out[:16]
    nodes.until(lambda: any(entry[0] == Kind.FENCED for entry in nodes.seen["b"]))
    kinds = [entry[0] for entry in nodes.seen["b"]]

    assert 300 == sum(entry[2] for entry in nodes.seen["b"] if entry[0] == Kind.IMM)
    assert Kind.IMM not in kinds[kinds.index(Kind.FENCED) :]


@pytest.mark.slow
def test_a_fence_waits_for_what_was_not_drained_and_then_says_so(nodes):
    """A queue pair that keeps what it holds may keep immediates that landed, too."""
    nodes.connect("a", "b")
    (conn,) = (conn for conn in nodes.nics["b"].peers.up if conn is not None)
    refusal = FabricError("the device is stuck", code="PROVIDER")
    with mock.patch.object(conn._device.lib, "modify_qp", side_effect=refusal):
        found = nodes.fence("b", "a")

    assert Status.PROVIDER == found
    assert "did not return" in nodes.nics["b"].status_text(found)
    assert Status.OK == nodes.fence("b", "c", 8)

    nodes.unfence("b", "a")
    nodes.write("a", "b", ctx=5)
    nodes.write("b", "a", ctx=5)
    nodes.until(lambda: nodes.statuses("a", 5) and nodes.statuses("b", 5))
    assert Status.OK not in nodes.statuses("a", 5) + nodes.statuses("b", 5)
    assert {} == nodes.imms("b")


@pytest.mark.slow
@pytest.mark.parametrize("lossy", [False, True])
@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("nodes", [{"handshake_s": 3.0}], indirect=True)  # others may have the CPU
def test_rows_of_a_pair_wait_for_what_they_need_once_its_fences_are_lifted(
    stub, nodes, both, noticed, lossy
):
    """The engines' messages may be quicker than the NICs', or slower."""
    nodes.connect("a", "b")
    nodes.nics["b"].post_recvs(100, 8)
    to_b = nodes.nics["a"].connect(nodes.nics["b"].address)
    stub.set(Knob.DROP_DATAGRAMS, 3 * lossy)
    for turns in range(8):
        nodes.fence("b", "a", 100 + turns)
        if both:
            nodes.fence("a", "b", 100 + turns)
        if noticed:
            nodes.write("a", "b", ctx=200 + turns)
            nodes.until(lambda turns=turns: nodes.statuses("a", 200 + turns))
        nodes.unfence("b", "a")
        for _ in range(turns):
            nodes.turn()
        nodes.unfence("a", "b")
        for name, other in ("ab", "ba"):
            nodes.write(name, other, 30, imm=turns, ctx=turns)
        assert nodes.nics["a"].post_send(to_b, b"and a message", turns)
        nodes.until(lambda turns=turns: all(nodes.statuses(x, turns).total() == 30 for x in "ab"))
        nodes.until(lambda turns=turns: nodes.ended("a", Kind.SENT).total() == turns + 1)

        assert {Status.OK: 30} == nodes.statuses("a", turns) == nodes.statuses("b", turns), turns
        assert 30 == nodes.imms("b")["a", turns] == nodes.imms("a")["b", turns]
    assert {Status.OK: 8} == nodes.ended("a", Kind.SENT)


def test_a_fence_that_is_being_put_up_is_lifted_when_it_stands(nodes):
    """Rows in flight must be counted before any row of a new connection."""
    nodes.connect("a", "b")
    here, there = nodes.nics["b"], nodes.nics["a"].address
    peer = here.connect(there)
    nodes.until(lambda: here.peers.up[peer])
    conn = here.peers.up[peer]
    nodes.write("a", "b", 30, imm=1)
    here.fence(there, 7)
    conn.quiet_s, conn.deadline_s = math.inf, math.inf  # it does not drain
    nodes.unfence("b", "a")
    nodes.unfence("a", "b")
    for _ in range(50):
        nodes.turn()
    assert None is here.peers.up[peer]
    assert 0 == nodes.ended("b", Kind.FENCED).total()
    conn.quiet_s = 0.0
    nodes.until(lambda: nodes.ended("b", Kind.FENCED))
    nodes.write("a", "b", 3, imm=3, ctx=3)
    nodes.until(lambda: nodes.statuses("a", 3).total() == 3)
    assert {Status.OK: 3} == nodes.statuses("a", 3)

    here.fence(there, 8)
    nodes.unfence("b", "a")
    here.fence(there, 9)
    nodes.until(lambda: nodes.ended("b", Kind.FENCED).total() == 3)
    nodes.write("a", "b", imm=2, ctx=2)
    nodes.until(lambda: nodes.statuses("a", 2))
    assert Status.OK not in nodes.statuses("a", 2)
    assert {Status.OK: 3} == nodes.ended("b", Kind.FENCED)


def test_where_no_fence_is_the_connection_stays(nodes):
    """A question that is put again must not flush the rows of the new life, or cost messages."""
    nodes.connect("a", "b")
    nodes.until(lambda: nodes.nics["b"].peers.up[0] is not None)
    before = list(nodes.nics["a"].peers.up), list(nodes.nics["b"].peers.up)
    nodes.nics["b"].post_recvs(100, 1)
    for k in range(6):
        nodes.write("a", "b", 30, imm=k, ctx=k)
        nodes.unfence(*("ab" if k % 2 else "ba"))
        nodes.write("b", "a", 30, imm=k, ctx=k)
        nodes.unfence(*("ba" if k % 2 else "ab"))
        nodes.turn()
    assert nodes.nics["a"].post_send(nodes.nics["a"].connect(nodes.nics["b"].address), b"m", 9)
    nodes.until(lambda: nodes.ended("b", Kind.RECV))
    nodes.until(lambda: nodes.ended("a")[Status.OK] == nodes.ended("b")[Status.OK] == 180)

    assert before == (nodes.nics["a"].peers.up, nodes.nics["b"].peers.up)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_fences_come_and_go_in_any_order(stub, seed):
    """Whatever was fenced, lifted, asked and lost before: lifted at both ends, rows pass."""
    rng = random.Random(seed)
    nodes = Nodes(stub, "ab")
    stub.set(Knob.DROP_DATAGRAMS, rng.choice([0, 3]))
    numbers, posted, fences = itertools.count(1), {}, []
    for _ in range(3):
        for deed in rng.choices(["fence", "unfence", "write", "turn"], [1, 1, 3, 4], k=20):
            here, there = rng.choice(["ab", "ba"])
            if deed == "fence":
                fences.append((here, next(numbers)))
                nodes.nics[here].fence(nodes.nics[there].address, fences[-1][1])
            elif deed == "unfence":
                nodes.unfence(here, there)
            elif deed == "write":
                number, n = next(numbers), rng.choice([1, 5, 30])
                posted[here, number] = n
                nodes.write(here, there, n, imm=number, ctx=number)
            else:
                nodes.turn()
        _settle(nodes, posted, fences)
        first, then = rng.choice(["ab", "ba"])
        nodes.unfence(first, then)
        for _ in range(rng.randrange(6)):
            nodes.turn()
        nodes.unfence(then, first)
        last = {(name, next(numbers)): 30 for name in "ab"}
        for (here, there), (_, number) in zip(["ab", "ba"], last, strict=True):
            nodes.write(here, there, 30, imm=number, ctx=number)
        _settle(nodes, last, ())
        assert all({Status.OK: 30} == nodes.statuses(*row) for row in last)
        posted |= last
    for nic in nodes.nics.values():
        nic.close()


def _settle(nodes, posted, fences):
    """Wait for rows and fences; no row landed twice, and all those did that are said to have."""
    nodes.until(lambda: all(nodes.statuses(*row).total() == n for row, n in posted.items()))
    nodes.until(lambda: sum(nodes.ended(x, Kind.FENCED).total() for x in "ab") >= len(fences))
    assert all(set(nodes.ended(name, Kind.FENCED)) <= {Status.OK} for name in "ab")
    for (here, number), n in posted.items():
        landed = nodes.imms("ba"["ab".index(here)])[here, number]
        assert nodes.statuses(here, number)[Status.OK] <= landed <= n


def test_a_nic_that_dies_hands_out_what_had_come(stub, nodes):
    """Its peers were told that these rows are there: nobody writes them again."""
    nodes.connect("a", "b")
    nodes.until(lambda: nodes.nics["b"].peers.up[0] is not None)
    nodes.nics["a"].poll(nodes.out)
    nodes.write("a", "b", 30, imm=1)
    nodes.nics["b"].fail_device()
    nodes.write("b", "a", 3, imm=2)
    nodes.until(lambda: nodes.ended("b", Kind.DOWN))
    kinds = [entry[0] for entry in nodes.seen["b"]]

    assert {("a", 1): 30} == nodes.imms("b")
    assert kinds.index(Kind.IMM) < kinds.index(Kind.DOWN)
    assert {Status.NIC_DOWN: 3} == nodes.ended("b")
    assert Status.OK == nodes.fence("b", "a"), "it is down, and can still be asked"


@pytest.mark.slow
def test_notes_pass_where_no_row_does(stub, nodes):
    """A failover is talked about while the queue pairs are gone, and datagrams get lost."""
    nodes.connect("a", "b")
    nodes.fence("b", "a")
    stub.set(Knob.DROP_DATAGRAMS, 3)
    peer = nodes.nics["a"].connect(nodes.nics["b"].address)
    controls = [b"%d" % k * k for k in range(20)]
    for k, note in enumerate(controls):
        assert nodes.nics["a"].post_control(peer, note, k)
    nodes.until(lambda: nodes.ended("a", Kind.SENT).total() == 20)
    slots = [entry[5] for entry in nodes.seen["b"] if entry[0] == Kind.CONTROL]
    taken = [nodes.nics["b"].take_control(slot) for slot in slots]

    assert {Status.OK: 20} == nodes.ended("a", Kind.SENT)
    assert [(note, nodes.nics["a"].address) for note in controls] == taken


def test_one_nic_whose_link_is_cut_is_kept(stub):
    """Without another there is nothing to fail over to, and links come back."""
    nodes = Nodes(stub, "ab")
    nodes.connect("a", "b")
    stub.set(Knob.CUT_LINK, 1)
    nodes.write("a", "b", 3)
    nodes.until(lambda: nodes.ended("a").total() == 3)
    stub.set(Knob.CUT_LINK, 0)
    nodes.write("a", "b", 2, ctx=2)
    nodes.until(lambda: nodes.ended("a").total() == 5)
    for nic in nodes.nics.values():
        nic.close()

    assert {Status.UNREACHABLE: 1, Status.FLUSHED: 2, Status.OK: 2} == nodes.ended("a")
    assert 0 == nodes.ended("a", Kind.DOWN).total()

"""The depths of a NIC's queues, the failure of one, and that none can overflow."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tep.backends.base import Access, Kind, ReadBatch, Status, WriteBatch, new_completions
from tep.backends.ffi.ibverbs import ENUMS
from tep.backends.verbs import open_domains
from tep.backends.verbs.device import (
    DATAGRAMS_IN,
    DATAGRAMS_OUT,
    MESSAGES_OUT,
)
from tep.base.errors import UsageError
from tep.memory.source import adapt
from tests.support.verbs_stub import Knob

PAGE = 64
FAST = {"handshake_s": 0.3, "timeout": 8, "drain_s": 0.1, "resend_s": 0.005}


class Pair:
    """A NIC a that is connected to a NIC b, with memory on both."""

    def __init__(self, stub, **options):
        self.stub, self.out = stub, new_completions(4096)
        options = {"library": stub.path, **FAST, **options}
        self.a = open_domains(["stub0"], name="a", **options).domains[0]
        self.b = open_domains(["stub1"], name="b", **options).domains[0]
        self.nics = {"a": self.a, "b": self.b}
        self.memory = {name: np.zeros(1 << 16, np.uint8) for name in "ab"}
        self.keys = {
            name: nic.register(adapt(self.memory[name]), Access.SOURCE_AND_TARGET)
            for name, nic in self.nics.items()
        }
        self.seen = {"a": [], "b": []}
        self.a.connect(self.b.address)
        self.b.connect(self.a.address)
        self.until(lambda: self.a.peers.up[0] and self.b.peers.up[0])

    def turn(self, *names):
        for name in names or "ab":
            self.seen[name] += self.out[: self.nics[name].poll(self.out)].tolist()

    def until(self, done, *names):
        end_s = time.monotonic() + 60
        while not done():
            self.turn(*names)
            assert time.monotonic() < end_s, f"waited in vain: {self.seen}"

    def write(self, source, target, n, *, nbytes=PAGE, imm=None, ctx=1, rkey=None):
        at = np.arange(n, dtype=np.uint64) * np.uint64(PAGE)
        here, there = self.keys[source], self.keys[target]
        rkey = there.rkey if rkey is None else rkey
        src, dst = at + np.uint64(here.base), at + np.uint64(there.base)
        return self.nics[source].post(
            WriteBatch(n, 0, src, here.lkey, dst, rkey, nbytes, imm, ctx), 0, n
        )

    def ended(self, name, kind=Kind.WRITE):
        return [entry for entry in self.seen[name] if entry[0] == kind]

    def close(self):
        self.a.close()
        self.b.close()


def test_the_completion_queue_holds_all_that_can_be_in_it(stub):
    """Overrun is the end of a NIC, and comes only on the day when everything comes at once."""
    stub.set(Knob.ON_OVERRUN, 1)
    before = stub.count("overruns")
    rows, imms, messages = 300, 40, 20
    pair = Pair(stub, sq_depth=rows, imm_recvs=imms, msg_recvs_max=messages)
    pair.a.post_recvs(8, 200)
    pair.b.post_recvs(8, 200)
    # b is not polled from here on: what comes to it stays in its queue.
    for _ in range(MESSAGES_OUT):
        assert pair.b.post_send(0, b"out", 1)
    for _ in range(messages):
        assert pair.a.post_send(0, b"in", 1)
    assert imms == pair.write("a", "b", imms, imm=7)
    to_b = pair.a.peers.table[0].where
    for _ in range(0, DATAGRAMS_IN, DATAGRAMS_OUT):
        pair.turn("a")
        for _ in range(DATAGRAMS_OUT):
            pair.a._datagrams.send(to_b, b"no handshake")
    to_a = pair.b.peers.table[0].where
    for _ in range(DATAGRAMS_OUT):
        pair.b._datagrams.send(to_a, b"no handshake")
    assert rows == pair.write("b", "a", rows, rkey=12345)  # one fails, all others are flushed
    at, key = pair.keys["b"].base, pair.keys["b"].lkey
    reads = pair.b.depths.reads
    batch = ReadBatch(reads, 0, at, key, at, 12345, PAGE, None, 2)
    assert reads == pair.b.post_read(batch, 0, reads) > 0
    pair.b.peers.drop(pair.b.peers.up[0])
    overruns = stub.count("overruns") - before
    pair.until(lambda: len(pair.ended("b")) == rows)
    pair.until(lambda: len(pair.ended("b", Kind.READ)) == reads)
    pair.close()

    assert 0 == overruns
    whole = rows + reads + imms + messages + MESSAGES_OUT
    assert whole + DATAGRAMS_IN + DATAGRAMS_OUT == pair.b.depths.cq
    assert [imms] == [entry[2] for entry in pair.ended("b", Kind.IMM)]
    assert messages == len(pair.ended("b", Kind.RECV))
    assert [] == pair.ended("b", Kind.DOWN)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["IBV_EVENT_CQ_ERR", "IBV_EVENT_SRQ_ERR"])
@pytest.mark.parametrize("sleeping", [False, True])
def test_a_queue_that_fails_takes_its_nic_down(stub, kind, sleeping):
    """Its completions are lost: who waits for them would wait for ever."""
    pair = Pair(stub)
    stub.event(pair.b.device.pointer, ENUMS[kind])
    if sleeping:
        pair.b.arm()
    pair.until(lambda: pair.ended("b", Kind.DOWN))
    pair.write("b", "a", 3)
    pair.until(lambda: pair.ended("b"))
    pair.b.fence(pair.a.address, 7)
    pair.until(lambda: pair.ended("b", Kind.FENCED))
    text = pair.b.status_text(Status.NIC_DOWN)
    fenced = pair.ended("b", Kind.FENCED)[0][1]
    why = pair.b.status_text(fenced)
    pair.close()

    assert {Status.NIC_DOWN} == {entry[1] for entry in pair.ended("b")}
    assert kind in text
    # What had landed is not known: a failover that took its counts for true would hang.
    assert Status.PROVIDER == fenced
    assert kind in why


@pytest.mark.slow
def test_an_overrun_ends_what_is_open_and_hangs_nobody(stub):
    """An overrun drops completions with one event, and the device is silent afterwards."""
    pair, before = Pair(stub, sq_depth=16), stub.count("overruns")
    stub.set(Knob.ON_OVERRUN, 1)
    stub.set(Knob.SINK, 1)  # rows are completed whether or not somebody has room for it
    posted = 0
    while posted <= pair.a.depths.cq:
        pair.a._credits = 1  # as if all before had come back
        posted += pair.write("a", "b", 1)
    stub.set(Knob.SINK, 0)
    posted += pair.write("a", "b", 5)
    pair.until(lambda: pair.ended("a", Kind.DOWN))
    pair.close()

    assert stub.count("overruns") > before
    assert posted == sum(entry[2] for entry in pair.ended("a"))
    assert "overrun" in pair.a.status_text(Status.NIC_DOWN)


def test_a_queue_that_cannot_be_read_takes_its_nic_down(stub):
    """The error of one NIC must not end the engine, nor the NICs beside it."""
    pair = Pair(stub)
    pair.write("a", "b", 5)
    stub.set(Knob.POLL_ERROR, 1)
    pair.until(lambda: pair.ended("a", Kind.DOWN))
    pair.close()

    assert 5 == sum(entry[2] for entry in pair.ended("a"))
    assert {Status.NIC_DOWN, Status.FLUSHED} >= {entry[1] for entry in pair.ended("a")}
    assert "ibv_poll_cq returns -2" in pair.a.status_text(Status.NIC_DOWN)
    assert [] == pair.ended("b", Kind.DOWN)


def test_depths_that_the_device_cannot_do_are_refused_with_what_it_can(stub):
    """Else the first transfer fails, far from the setting, with "Invalid argument"."""
    options = {"library": stub.path}
    stub.set(Knob.PLAIN_QPS, 1)
    with pytest.raises(UsageError, match=r"sq_depth=9000 .* max_qp_wr is 32768"):
        open_domains(["stub0"], sq_depth=9000, **options)
    stub.set(Knob.PLAIN_QPS, 0)
    with pytest.raises(UsageError, match=r"sq_depth=40000; 1 to 32768"):
        open_domains(["stub0"], sq_depth=40000, **options)
    for name in ("sq_depth", "imm_recvs", "msg_recvs_max"):
        with pytest.raises(UsageError, match=rf"{name}=0; 1 to 32"):
            open_domains(["stub0"], **{name: 0}, **options)
    nic = open_domains(["stub0"], sq_depth=32768, **options).domains[0]
    depths = nic.depths
    nic.close()

    assert (32768, 0, 32767, 512) == depths[:4]


def test_short_rows_are_copied_into_their_request_and_long_ones_are_not(stub):
    """Inline is a read less; one byte more than the device grants is refused."""
    inline = ENUMS["IBV_SEND_INLINE"]
    pair = Pair(stub)
    pair.memory["a"][:] = np.arange(1 << 16)
    for nbytes in (0, 1, 8, 28, 29):
        mark = stub.seen()
        pair.write("a", "b", 2, nbytes=nbytes)
        flags = {row.flags & inline for row in stub.since(mark)}
        assert {inline if 0 < nbytes <= 28 else 0} == flags
    while sum(entry[2] for entry in pair.ended("a")) < 10:
        pair.turn()
    pair.close()

    assert {Status.OK} == {entry[1] for entry in pair.ended("a")}
    assert (pair.memory["a"][64:93] == pair.memory["b"][64:93]).all()

"""The verbs backend at the table of operations: what a provider reads, and what it may answer."""

from __future__ import annotations

import errno
import math
import time
from collections import deque
from dataclasses import replace
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from tep.backends.base import Access, Kind, Status, WriteBatch, new_completions
from tep.backends.common import Unread
from tep.backends.ffi.ibverbs import ENUMS
from tep.backends.verbs import open_domains, send
from tep.backends.verbs.conns import Draining
from tep.backends.verbs.device import Device
from tep.backends.verbs.handshake import Address
from tep.backends.verbs.messages import Routes
from tep.base.errors import BackendUnavailable, FabricError, UsageError
from tep.memory.source import adapt
from tests.support.verbs_stub import Knob

WRITE, WRITE_IMM = ENUMS["IBV_WR_RDMA_WRITE"], ENUMS["IBV_WR_RDMA_WRITE_WITH_IMM"]
SIGNALED = ENUMS["IBV_SEND_SIGNALED"]
PAGE = 64


class Rig:
    """Two connected domains on the stub, and memory on both."""

    def __init__(self, stub, **options):
        options = {"library": stub.path, "handshake_s": 0.5, "timeout": 8, **options}
        self.a = open_domains(["stub0"], name="a", **options).domains[0]
        self.b = open_domains(["stub1"], name="b", **options).domains[0]
        self.source = np.arange(1 << 16, dtype=np.uint8)
        self.target = np.zeros(1 << 16, np.uint8)
        self.here = self.a.register(adapt(self.source), Access.SOURCE)
        self.there = self.b.register(adapt(self.target), Access.SOURCE_AND_TARGET)
        self.peer = self.a.connect(self.b.address)
        self.out = new_completions(4096)
        self.until(lambda: self.a.peers.up[0] is not None)

    def until(self, done):
        end_s = time.monotonic() + 60
        found = []
        while not done():
            found += self.poll(self.a) + self.poll(self.b)
            assert time.monotonic() < end_s, "waited in vain"
        return found

    def poll(self, domain):
        return self.out[: domain.poll(self.out)].tolist()

    def rows(self, indices, nbytes=PAGE, imm=None, ctx=1, peer=None):
        at = np.array(indices, np.uint64) * np.uint64(PAGE)
        src, dst = at + np.uint64(self.source.ctypes.data), at + np.uint64(self.there.base)
        peer = self.peer if peer is None else peer
        return WriteBatch(
            len(at), peer, src, self.here.lkey, dst, self.there.rkey, nbytes, imm, ctx
        )

    def settle(self, rows):
        """Completions of side a until `rows` rows are back, as (status, count, row)."""
        found = []
        end_s = time.monotonic() + 60
        while sum(entry[2] for entry in found) < rows:
            found += [entry for entry in self.poll(self.a) if entry[0] == Kind.WRITE]
            self.poll(self.b)
            assert time.monotonic() < end_s, f"{found} of {rows} rows"
        return [(entry[1], entry[2], entry[4]) for entry in found]

    def close(self):
        self.a.close()
        self.b.close()


@pytest.fixture
def rig(stub):
    found = Rig(stub)
    yield found
    found.close()


def test_a_run_is_one_chain_with_one_completion(stub, rig):
    """One call and one completion for many rows is what makes Python fast enough."""
    posts, mark = stub.posts(), stub.seen()
    batch = rig.rows(range(100), imm=0x01020304)
    taken = rig.a.post(batch, 0, 100)
    seen = stub.since(mark)

    assert 100 == taken == len(seen)
    assert 1 == stub.posts() - posts
    assert [0] * 99 + [1] == [row.last for row in seen]
    assert [0] * 99 + [SIGNALED] == [row.flags for row in seen]
    assert {WRITE_IMM} == {row.opcode for row in seen}
    assert {b"\x01\x02\x03\x04"} == {row.imm_be.to_bytes(4, "little") for row in seen}
    assert batch.src.tolist() == [row.addr for row in seen]
    assert batch.dst.tolist() == [row.raddr for row in seen]
    assert {(PAGE, rig.here.lkey, rig.there.rkey, 1)} == {
        (row.length, row.lkey, row.rkey, row.num_sge) for row in seen
    }
    assert [(Status.OK, 100, 0)] == rig.settle(100)
    assert (rig.source[: 100 * PAGE] == rig.target[: 100 * PAGE]).all()


def test_few_rows_are_posted_one_by_one_and_look_the_same(stub, rig):
    """The scalar path packs bytes by hand: a wrong offset there is a write to the wrong place."""
    mark = stub.seen()
    batch = rig.rows([3, 1], imm=np.array([1, 0xFFFFFFFF], np.uint32))
    rig.a.post(batch, 0, 2)
    seen = stub.since(mark)

    assert [1, 1] == [row.last for row in seen]
    assert [SIGNALED] * 2 == [row.flags for row in seen]
    assert [b"\0\0\0\1", b"\xff\xff\xff\xff"] == [r.imm_be.to_bytes(4, "little") for r in seen]
    assert batch.src.tolist() == [row.addr for row in seen]
    assert batch.dst.tolist() == [row.raddr for row in seen]
    assert [(PAGE, rig.here.lkey, rig.there.rkey)] * 2 == [
        (row.length, row.lkey, row.rkey) for row in seen
    ]
    assert 2 == sum(count for _, count, _ in rig.settle(2))


def test_a_host_that_is_off_holds_up_nobody_else(stub, rig):
    """The kernel waits a second for its neighbour's answer: all transfers of the engine waited too.

    The handle stays in the making while the rows of the living peer go back and forth.
    """
    where = Address.decode(rig.b.address)
    gid = bytes(10) + b"\xff\xff" + bytes([10, 77, 0, 99])
    off = msgspec.structs.replace(where, gid=gid, identity=7)
    stub.set(Knob.HOLD_AH, 1)
    rig.a.connect(off.encode())
    for _ in range(20):
        rig.a.post(rig.rows(range(8)), 0, 8)
        assert [(Status.OK, 8, 0)] == rig.settle(8)
    held = stub.lib.stub_set(Knob.HOLD_AH, 0)

    assert held == 1


def test_a_neighbour_that_did_not_answer_is_asked_again_later_and_not_at_once(stub, rig):
    """Each question costs its peer's whole engine; a handle that was made is kept."""
    found = Routes(rig.a.device)
    where = Address.decode(rig.b.address)
    stub.set(Knob.HOLD_AH, 1)
    assert 0 == found.find(where)
    stub.set(Knob.HOLD_AH, 0)
    rig.until(lambda: found.find(where) or found._silent)
    assert 0 == found.find(where)
    found._silent[where] = (0.0, found._silent[where][1])
    made = found.find(where)

    assert made
    assert made == found.find(where)
    found.forget(where)
    found.close()


def test_templates_keep_nothing_of_the_batch_before(stub, rig):
    """Cached columns that outlive their batch would send pages under another's key or immediate."""
    for batch in (
        rig.rows(range(20), imm=7),
        rig.rows(range(20)),
        rig.rows(range(30), nbytes=np.arange(30, dtype=np.uint64)),
        rig.rows(range(20), nbytes=0, imm=9),
        rig.rows(range(25), imm=np.arange(25, dtype=np.uint32)),
        rig.rows(range(20), nbytes=8, imm=7),
    ):
        mark = stub.seen()
        rig.a.post(batch, 0, batch.n)
        seen = stub.since(mark)
        lengths = np.broadcast_to(batch.nbytes, batch.n).tolist()
        imms = None if batch.imm is None else np.broadcast_to(batch.imm, batch.n).tolist()

        assert lengths == [row.length for row in seen]
        assert [int(length > 0) for length in lengths] == [row.num_sge for row in seen]
        assert {WRITE if imms is None else WRITE_IMM} == {row.opcode for row in seen}
        if imms is not None:
            assert imms == [int.from_bytes(r.imm_be.to_bytes(4, "little"), "big") for r in seen]
        assert batch.n == sum(count for _, count, _ in rig.settle(batch.n))


@pytest.fixture
def peers(stub, rig):
    """For ten rows in turn to the rig's peer and to another, which is connected."""
    third = open_domains(["stub2"], name="c", library=stub.path).domains[0]
    other = rig.a.connect(third.address)
    poll = new_completions(8)
    rig.until(lambda: third.poll(poll) == 0 and all(rig.a.peers.up))
    yield np.array([rig.peer, other] * 5, np.uint64)
    third.close()


def test_a_scatter_is_one_request_a_peer(stub, rig, peers):
    """Rows to many peers share a set of templates; each must end on its own queue pair."""
    mark = stub.seen()
    rig.a.post(rig.rows(range(10), nbytes=0, imm=5, peer=peers), 0, 10)
    seen = stub.since(mark)
    qps = [conn._made[1] for conn in rig.a.peers.up]
    back = rig.settle(10)

    assert qps * 5 == [row.qp for row in seen]
    assert [1] * 10 == [row.last for row in seen]
    assert 10 == sum(count for _, count, _ in back)


@pytest.fixture
def fan(stub, rig, peers):
    """A rig with a second peer: rows to both in turn, and what the stub read of them."""

    def post(start=0, **columns):
        mark = stub.seen()
        batch = rig.rows(range(start, start + 10), peer=peers, **columns)
        batch.rkey = np.full(10, batch.rkey, np.uint64)
        assert 10 == rig.a.post(batch, 0, 10)
        return batch, stub.since(mark)

    return rig, post


def test_scatters_to_the_same_peers_keep_nothing_of_the_one_before(fan):
    """State kept from the scatter before would send rows to the wrong place, or too far."""
    rig, post = fan
    qps = [conn._made[1] for conn in rig.a.peers.up]
    sizes = np.arange(10, dtype=np.uint64)
    for k, (nbytes, imm) in enumerate(
        ((PAGE, 7), (PAGE, 7), (PAGE, 8), (sizes, 8), (sizes + np.uint64(1), None), (0, 2**32 - 1))
    ):
        batch, seen = post(start=k, nbytes=nbytes, imm=imm, ctx=k)

        assert qps * 5 == [row.qp for row in seen]
        assert batch.dst.tolist() == [row.raddr for row in seen]
        lengths = np.broadcast_to(nbytes, 10).tolist()
        sources = [at if n else 0 for at, n in zip(batch.src.tolist(), lengths, strict=True)]
        assert sources == [row.addr for row in seen]
        assert lengths == [row.length for row in seen]
        assert [int(length > 0) for length in lengths] == [row.num_sge for row in seen]
        assert {WRITE if imm is None else WRITE_IMM} == {row.opcode for row in seen}
        if imm is not None:
            assert {imm.to_bytes(4, "big")} == {r.imm_be.to_bytes(4, "little") for r in seen}
        assert {(1, SIGNALED)} == {(row.last, row.flags) for row in seen}
        assert 10 == sum(count for _, count, _ in rig.settle(10))


@pytest.mark.parametrize("row", [0, 4])
@pytest.mark.parametrize(
    ("column", "status"), [("nbytes", Status.LENGTH), ("rkey", Status.REMOTE_KEY)]
)
def test_impossible_rows_are_found_in_a_scatter_that_is_known(fan, column, status, row):
    """A number cut to 32 bits is a short write, or one elsewhere, that is called a success."""
    rig, post = fan
    for _ in range(3):
        post()
        rig.settle(10)
    batch = rig.rows(range(10), peer=np.array([0, 1] * 5, np.uint64))
    batch.nbytes = np.full(10, PAGE, np.uint64)
    batch.rkey = np.full(10, rig.there.rkey, np.uint64)
    getattr(batch, column)[row] += np.uint64(1 << 32)
    at = 0
    while at < 10:
        at += rig.a.post(batch, at, 10)
    back = rig.settle(10)

    assert [(status, 1, row)] == [entry for entry in back if entry[0] != Status.OK]
    assert 9 == sum(count for found, count, _ in back if found == Status.OK)


def test_each_impossible_row_of_a_scatter_has_its_own_reason(fan):
    """A key is looked for where a length was wrong, for days."""
    rig, _ = fan
    batch = rig.rows(range(10), peer=np.array([0, 1] * 5, np.uint64))
    batch.nbytes = np.full(10, PAGE, np.uint64)
    batch.rkey = np.full(10, rig.there.rkey, np.uint64)
    batch.rkey[2] += np.uint64(1 << 32)
    batch.nbytes[3] += np.uint64(1 << 32)
    at = 0
    while at < 10:
        at += rig.a.post(batch, at, 10)
    bad = [entry for entry in rig.settle(10) if entry[0] != Status.OK]

    assert [(Status.REMOTE_KEY, 1, 2), (Status.LENGTH, 1, 3)] == sorted(bad, key=lambda e: e[2])


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize(
    ("code", "status"), [(errno.ENOMEM, Status.OK), (errno.EIO, Status.PROVIDER)]
)
def test_a_scatter_survives_a_refusal(stub, fan, code, status, times):
    """One queue pair has no room, or never takes the row: the other nine go out all the same."""
    rig, post = fan
    for _ in range(times):
        post()
        rig.settle(10)
    stub.set(Knob.FAIL_AFTER, 4)
    stub.set(Knob.FAIL_POST, code)
    post(imm=5)
    back = rig.settle(10)

    assert 10 == sum(count for _, count, _ in back)
    assert [] == [entry for entry in back if entry[0] not in {Status.OK, status}]
    assert (status == Status.OK) == all(entry[0] == Status.OK for entry in back)


def fail_once(monkeypatch, owner, name):
    """Let a method find no memory, the first time."""
    healthy, left = getattr(owner, name), [1]

    def scarce(*args):
        if left:
            left.pop()
            raise MemoryError
        return healthy(*args)

    monkeypatch.setattr(owner, name, scarce)
    return left


@pytest.mark.parametrize("times", [0, 2])
def test_a_scatter_survives_a_failed_allocation(stub, fan, times, monkeypatch):
    """It gave the NIC up; and a template that was half written is not to be posted later."""
    rig, post = fan
    for _ in range(times):
        post()
        rig.settle(10)
    left = fail_once(monkeypatch, send._Fan, "_fill_addresses")
    post(imm=5, nbytes=8)
    assert not left
    assert 10 == sum(count for status, count, _ in rig.settle(10) if status == Status.OK)
    _, seen = post()
    assert {(PAGE, WRITE)} == {(row.length, row.opcode) for row in seen}
    assert 10 == sum(count for status, count, _ in rig.settle(10) if status == Status.OK)


def test_a_run_that_found_no_memory_leaves_nothing_of_it_behind(stub, rig, monkeypatch):
    """Keys that were half written went out with the next rows that had those of before."""
    rig.a.post(rig.rows(range(100)), 0, 100)
    rig.settle(100)
    left = fail_once(monkeypatch, send._RunRing, "_fill_lengths")
    assert 0 == rig.a.post(rig.rows(range(100), imm=7), 0, 100)
    assert not left
    assert not rig.a.arm()  # nothing is out: the engine must not sleep beside what was refused
    mark = stub.seen()
    assert 100 == rig.a.post(rig.rows(range(100)), 0, 100)
    assert {WRITE} == {row.opcode for row in stub.since(mark)}
    assert [(Status.OK, 100, 0)] == rig.settle(100)


def test_a_message_fails_alone_where_the_device_registers_no_memory(rig, monkeypatch):
    """FabricError came out of post_send(), and ended the engine."""

    def full(*_):
        raise FabricError("ibv_reg_mr_iova2: ENOMEM", code="PROVIDER")

    rig.b.post_recvs(64, 1)
    with monkeypatch.context() as short:
        short.setattr(Device, "register", full)
        assert rig.a.post_send(rig.peer, b"lost", 7)
        assert [(Kind.SENT, Status.PROVIDER, 7)] == [(e[0], e[1], e[5]) for e in rig.poll(rig.a)]
        assert "ENOMEM" in rig.a.status_text(Status.PROVIDER)
    found = []
    assert rig.a.post_send(rig.peer, b"kept", 8)
    while not found:
        rig.poll(rig.b)
        found = rig.poll(rig.a)
    assert [(Kind.SENT, Status.OK, 8)] == [(e[0], e[1], e[5]) for e in found]


def test_a_fence_that_follows_its_lifting_stays(rig):
    """It was lifted by what had been asked before it, and late rows landed."""
    rig.a.fence(rig.b.address, 1)
    rig.a.unfence(rig.b.address)
    rig.a.fence(rig.b.address, 2)
    found = []
    while len(found) < 2:
        found += [entry for entry in rig.poll(rig.a) if entry[0] == Kind.FENCED]
        rig.poll(rig.b)
    for _ in range(20):
        rig.poll(rig.a)
    assert [(Status.OK, 1), (Status.OK, 2)] == [(entry[1], entry[5]) for entry in found]
    assert rig.a.peers.table[rig.peer].shut


def test_a_connection_has_drained_once_the_queue_was_read_twice_to_its_end():
    """The first of these reads may have begun before the last completion came."""
    held, retired = [True], []
    conn = Mock(number=1, peer=0, quiet_s=0.0, deadline_s=math.inf)
    draining = Draining(lambda _: held[0], deque(), 8, lambda one, well: retired.append(well))
    draining.add(conn, 0.0)
    draining.progress(1.0, 0, whole=True)
    held[0] = False
    for whole in (False, True, False, True):
        assert [] == retired
        draining.progress(1.0, 1, whole=whole)
    assert [True] == retired


def test_a_control_message_that_comes_twice_is_heard_once(rig):
    """Its answer was lost, or the network doubled it: an engine would do twice what was said."""
    hear = rig.b.peers.hear
    rig.b.peers.hear = lambda *told: (hear(*told), hear(*told))
    heard = []
    for number in (1, 2):
        assert rig.a.post_control(rig.peer, b"%d" % number, number)
        sent = []
        while not sent:
            heard += [rig.b.take_control(e[5])[0] for e in rig.poll(rig.b) if e[0] == Kind.CONTROL]
            sent = [entry for entry in rig.poll(rig.a) if entry[0] == Kind.SENT]
        assert [(Status.OK, number)] == [(entry[1], entry[5]) for entry in sent]
    assert [b"1", b"2"] == heard


@pytest.mark.parametrize("name", ["add", "_end"])
def test_a_control_message_that_found_no_memory_is_heard_when_it_is_repeated(
    rig, monkeypatch, name
):
    """It was acknowledged and lost; or its answer ended another message."""
    left = fail_once(monkeypatch, Unread if name == "add" else type(rig.a.peers.controls), name)
    for number in (1, 2):
        assert rig.a.post_control(rig.peer, b"%d" % number, number)
    heard, sent = [], []
    while len(sent) < 2:
        heard += [rig.b.take_control(e[5])[0] for e in rig.poll(rig.b) if e[0] == Kind.CONTROL]
        sent += [entry for entry in rig.poll(rig.a) if entry[0] == Kind.SENT]
    assert not left
    assert [(Status.OK, 1), (Status.OK, 2)] == [(entry[1], entry[5]) for entry in sent]
    assert [b"1", b"2"] == heard


def test_a_scatter_that_was_known_waits_for_a_peer_that_is_lost(stub, fan):
    """Rows on a queue pair that is gone never come back, or crash the provider."""
    rig, post = fan
    for _ in range(3):
        post()
        rig.settle(10)
    bad = rig.rows([0])
    bad.rkey = 12345
    rig.a.post(bad, 0, 1)
    assert [(Status.REMOTE_KEY, 1, 0)] == rig.settle(1)
    post(imm=3)
    back = rig.settle(10)

    assert 10 == sum(count for status, count, _ in back if status == Status.OK)


def test_a_long_run_asks_now_and_then(stub, rig):
    """One completion for a thousand rows would keep the queue full until the last of them."""
    mark = stub.seen()
    rig.a.post(rig.rows(range(1000)), 0, 1000)
    flags = [row.flags for row in stub.since(mark)]

    assert [255, 511, 767, 999] == [k for k, flag in enumerate(flags) if flag == SIGNALED]
    assert [(0, 1000, 0)] == rig.settle(1000)  # read at once, the last speaks for all


def test_the_last_completion_of_a_burst_speaks_for_those_before_it(rig):
    """Counted one by one they cost more than posting; a run's rows must not be another's."""
    lengths = [7, 10, 300, 8, 7, 1000, 260]
    posted = [rig.a.post(rig.rows(range(n), ctx=n), 0, n) for n in lengths]
    back = [entry for entry in rig.poll(rig.a) if entry[0] == Kind.WRITE]

    assert lengths == posted
    assert [(Status.OK, n, n) for n in lengths] == [(e[1], e[2], e[5]) for e in back]


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 40, 99])
def test_a_short_post_takes_what_bad_wr_says(stub, rig, after):
    """ENOMEM in the middle of a chain: rows before it are out, rows after it never were.

    The last row that was taken asked for no completion; the connection is given up for one.
    """
    stub.set(Knob.FAIL_AFTER, after)
    stub.set(Knob.FAIL_POST, errno.ENOMEM)
    mark = stub.seen()
    batch = rig.rows(range(100), imm=3)
    taken = rig.a.post(batch, 0, 100)
    back = rig.settle(taken)
    rest = rig.a.post(batch, taken, 100)

    assert after == taken
    assert taken == sum(count for _, count, _ in back)
    assert 100 - taken == rest
    assert [(Status.OK, rest, taken)] == rig.settle(rest)
    assert 100 == len(stub.since(mark))
    assert (rig.source[: 100 * PAGE] == rig.target[: 100 * PAGE])[taken * PAGE :].all()


@pytest.mark.slow
def test_a_refused_request_fails_its_row_and_no_other(stub, rig):
    """Any other errno: trying again would fail again, and must not stop the rows behind it."""
    stub.set(Knob.FAIL_AFTER, 10)
    stub.set(Knob.FAIL_POST, errno.EINVAL)
    batch = rig.rows(range(100))
    taken = rig.a.post(batch, 0, 100)
    back = rig.settle(taken)
    rest = rig.a.post(batch, taken, 100)

    assert 11 == taken
    assert [(Status.PROVIDER, 1, 10)] == [e for e in back if e[0] == Status.PROVIDER]
    assert {*range(10)} == {row + k for _, count, row in back for k in range(count)} - {10}
    assert "Invalid argument" in rig.a.status_text(Status.PROVIDER)
    assert 89 == rest == sum(count for _, count, _ in rig.settle(rest))


def test_an_error_in_a_run_names_its_row_and_flushes_the_rest(stub, rig):
    """Rows before the failed one asked for no completion: they went well all the same."""
    batch = rig.rows(range(100))
    batch.rkey = np.full(100, rig.there.rkey, np.uint64)
    batch.rkey[60] = 12345
    rig.a.post(batch, 0, 100)
    back = rig.settle(100)

    assert (Status.OK, 60, 0) == back[0]
    assert (Status.REMOTE_KEY, 1, 60) == back[1]
    assert [(Status.FLUSHED, 1, row) for row in range(61, 100)] == back[2:]


def test_a_few_rows_of_the_middle_of_a_batch_fail_by_their_own_numbers(rig):
    """Another row's number would have another transfer's row written again."""
    batch = replace(rig.rows(range(8)), rkey=12345)
    assert 3 == rig.a.post(batch, 5, 8)

    assert [5, 6, 7] == [row for _, _, row in rig.settle(3)]


def test_rows_that_no_nic_can_take_fail_and_no_other(stub, rig):
    """A length or key of more than 32 bits would be cut off on its way into the request."""
    batch = rig.rows(range(10), nbytes=np.full(10, PAGE, np.uint64))
    batch.nbytes[3] = (1 << 32) + 5
    batch.rkey = np.full(10, rig.there.rkey, np.uint64)
    batch.rkey[7] += np.uint64(1 << 32)
    at = 0
    while at < 10:
        at += rig.a.post(batch, at, 10)
    back = rig.settle(10)

    failed = [(Status.LENGTH, 1, 3), (Status.REMOTE_KEY, 1, 7)]
    assert failed == [entry for entry in back if entry[0] != Status.OK]
    assert 8 == sum(count for status, count, _ in back if status == Status.OK)


def test_rows_wait_for_the_handshake_and_none_is_lost(stub):
    """A transfer submitted while its peer still connects is held, not posted too early."""
    stub.set(Knob.DROP_DATAGRAMS, 2)
    rig = Rig.__new__(Rig)
    options = {"library": stub.path, "resend_s": 0.002}
    rig.a = open_domains(["stub0"], name="a", **options).domains[0]
    rig.b = open_domains(["stub1"], name="b", **options).domains[0]
    rig.source, rig.target = np.arange(1 << 16, dtype=np.uint8), np.zeros(1 << 16, np.uint8)
    rig.here = rig.a.register(adapt(rig.source), Access.SOURCE)
    rig.there = rig.b.register(adapt(rig.target), Access.SOURCE_AND_TARGET)
    rig.peer, rig.out = rig.a.connect(rig.b.address), new_completions(64)
    mark = stub.seen()
    taken = rig.a.post(rig.rows(range(50), imm=1), 0, 50)
    early = stub.seen() - mark
    back = rig.settle(50)
    rig.close()

    assert 50 == taken
    assert 0 == early
    assert 50 == sum(count for _, count, _ in back)


def test_a_fatal_event_takes_the_nic_down(stub, rig):
    """The device says that it is dead; nothing else would end what it holds."""
    stub.set(Knob.SINK, 0)
    rig.b.close()
    stub.event(rig.a.device.pointer, ENUMS["IBV_EVENT_DEVICE_FATAL"])
    armed = rig.a.arm()
    kinds, end_s = [], time.monotonic() + 60
    while not kinds:
        kinds = [entry[0] for entry in rig.poll(rig.a)]
        assert time.monotonic() < end_s, "it never says that it is down"
    taken = rig.a.post(rig.rows(range(3)), 0, 3)
    back = rig.settle(3)

    assert not armed
    assert [Kind.DOWN] == kinds
    rig.a._poll_cq = None  # of a device that is gone nothing is asked any more
    assert [] == rig.poll(rig.a)
    assert rig.a.arm()
    assert 3 == taken
    assert {Status.NIC_DOWN} == {status for status, _, _ in back}


@pytest.mark.parametrize("kind", range(ENUMS["IBV_EVENT_QP_FATAL"], 4))
def test_a_queue_pair_that_failed_by_itself_is_replaced(stub, rig, kind):
    """The device tells of it in an event only: rows that are posted there never come back."""
    failed = rig.a.peers.up[0]
    stub.event(rig.a.device.pointer, kind, failed._made[1])
    rig.a.arm()
    rig.until(lambda: rig.a.peers.up[0] not in {None, failed})
    mark = stub.seen()
    rig.a.post(rig.rows(range(3)), 0, 3)

    assert 3 == sum(count for _, count, _ in rig.settle(3))
    assert failed._made[1] not in {row.qp for row in stub.since(mark)}


def test_a_message_that_is_too_long_ends_once(rig):
    """The engine counts by it: with none of it the message would stay open for ever."""
    assert rig.a.post_send(rig.peer, bytes(rig.a.caps.max_msg_bytes + 1), 5)

    assert [(Kind.SENT, Status.LENGTH, 1, 5)] == [
        (kind, status, count, ctx) for kind, status, count, _, _, ctx, _ in rig.poll(rig.a)
    ]


def test_a_message_is_read_and_given_back_after_close(rig):
    """Its buffer went to a receive queue that was gone."""
    rig.b.post_recvs(64, 1)
    assert rig.a.post_send(rig.peer, b"kept", 1)
    slots, end_s = [], time.monotonic() + 60
    while not slots:
        rig.poll(rig.a)
        slots = [entry[5] for entry in rig.poll(rig.b) if entry[0] == Kind.RECV]
        assert time.monotonic() < end_s, "it does not arrive"
    (slot,) = slots
    rig.b.close()
    rig.b.device.data = None  # it has no queues any more

    assert b"kept" == bytes(rig.b.recv_view(slot))
    rig.b.recv_done(slot)


def test_immediates_of_a_burst_are_counted_by_columns(stub, rig):
    """Equal ones become one entry; different ones keep every bit, in their own order."""
    (conn,) = rig.b.peers.up
    number = conn.ids[1][0]
    stub.inject_imms(number, 300, 0x01020304)
    equal = rig.poll(rig.b)
    stub.inject_imms(number, 40, 0xFFFFFFF0)
    stub.inject_imms(number, 40, 5, 1)
    mixed = rig.poll(rig.b)

    assert [(Kind.IMM, 0, 300, 0x01020304, 0, 0, 0)] == equal
    expected = [0xFFFFFFF0] * 40 + list(range(5, 45))
    assert expected == [entry[3] for entry in mixed for _ in range(entry[2])]


def test_receives_are_put_back_as_they_are_used(stub, rig):
    """A depth that drifts ends in a stalled sender hours later."""
    (conn,) = rig.b.peers.up
    for _ in range(50):
        stub.inject_imms(conn.ids[1][0], 2000, 1)
        while rig.poll(rig.b):
            pass

    stub.inject_imms(conn.ids[1][0], rig.b.depths.imms, 1)


def test_close_gives_everything_back(stub):
    """Leaks of closed engines add up in a process that lives for months."""
    before = stub.live()
    for _ in range(3):
        rig = Rig(stub)
        rig.b.post_recvs(100, 4)
        assert rig.a.post_send(rig.peer, b"x" * 50, 1)
        rig.a.post(rig.rows(range(10)), 0, 10)
        rig.close()

    assert before == stub.live()


def test_the_best_gid_is_chosen_and_the_ranking_is_told(stub):
    """Index 0 is link-local on most machines, and does not leave its subnet."""
    domain = open_domains(["stub3"], library=stub.path).domains[0]
    chosen, told = domain.device.gid.entry, domain.describe()
    domain.close()

    assert 2 == chosen
    assert "GID 2 10.0.0.4: RoCE v2, routable IPv4 (rank 0)" in told


def test_options_that_cannot_be_are_refused_with_their_values(stub):
    """A typo must not open a NIC with defaults."""
    with pytest.raises(UsageError, match=r"no option sq_dept; there are: nics, .*sq_depth"):
        open_domains(["stub0"], library=stub.path, sq_dept=5)
    with pytest.raises(UsageError, match=r"sq_depth=0; 1 to 32768"):
        open_domains(["stub0"], library=stub.path, sq_depth=0)
    with pytest.raises(UsageError, match=r"gid_index=3 is empty on stub0; there are: GID 2"):
        open_domains(["stub0"], library=stub.path, gid_index=3)
    with pytest.raises(BackendUnavailable, match=r"no RDMA device 'mlx5_9'; there are: stub0"):
        open_domains(["mlx5_9"], library=stub.path)
    with pytest.raises(
        BackendUnavailable, match=r"8 usable RDMA devices that belong together, 9 wanted"
    ):
        open_domains(9, library=stub.path)

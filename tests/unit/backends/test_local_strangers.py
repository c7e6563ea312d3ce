"""The local backend among strangers, hostile peers and spent limits: what they cost it."""

from __future__ import annotations

import errno
import gc
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tep.backends import base as seam
from tep.backends import local as local_room
from tep.backends.base import Access, Kind, Status, WriteBatch, new_completions
from tep.backends.common import new_fence
from tep.backends.local import LocalDomain, alloc_shared, memory, open_domains, outbound
from tep.backends.local import channel as channel_room
from tep.backends.local import sender as sender_room
from tep.backends.local.channel import Address, Channel, Hello, is_bell
from tep.backends.local.memory import new_memfd
from tep.backends.local.port import TABLE
from tep.memory.source import adapt
from tests.support.descriptors import descriptors, open_descriptors, opened_since
from tests.support.effort import effort

PATIENCE_S = 20.0
U64 = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 70_000), st.just(2**64 - 1))


OPENED: list[LocalDomain] = []


@pytest.fixture(autouse=True)
def close_all() -> Iterator[None]:
    """Close what a test has opened, also one that fails."""
    yield
    while OPENED:
        OPENED.pop().close()


def nic() -> LocalDomain:
    domain = open_domains().domains[0]
    assert isinstance(domain, LocalDomain)
    OPENED.append(domain)
    return domain


class Writer:
    """A NIC that writes 8 bytes and an immediate to one other, again and again."""

    def __init__(self, to: LocalDomain, target: np.ndarray | None = None) -> None:
        self.me, self.to = nic(), to
        self.target = np.zeros(8, np.uint8) if target is None else target
        self.source = np.zeros(8, np.uint8)
        self.lkey = self.me.register(adapt(self.source), Access.SOURCE).lkey
        self.rkey = to.register(adapt(self.target), Access.SOURCE_AND_TARGET).rkey
        self.peer = self.me.connect(to.address)
        self.out = new_completions(64)
        self.imms = 0

    def post(self) -> None:
        src, dst = adapt(self.source).ptr, adapt(self.target).ptr
        row = WriteBatch(1, self.peer, src, self.lkey, dst, self.rkey, 8, 7, 1)
        assert self.me.post(row, 0, 1) == 1

    def turn(self) -> list[int]:
        """Poll both; return the statuses of rows that ended."""
        found = [int(entry["status"]) for entry in self.out[: self.me.poll(self.out)]]
        for entry in self.out[: self.to.poll(self.out)]:
            self.imms += int(entry["count"]) if entry["kind"] == Kind.IMM else 0
        return found

    def write(self) -> int:
        """Write once; return its status."""
        self.source += 1
        self.post()
        status = self.ended()
        self.turn()
        return status

    def read(self, key: seam.DomainKey, rows: int) -> tuple[int, bytes]:
        """Read 8 bytes so many times; the last row's status, and what it brought."""
        sink = np.zeros((rows, 8), np.uint8)
        here = adapt(sink)
        local = here.ptr + 8 * np.arange(rows, dtype=np.uint64)
        lkey = self.me.register(here, Access.SINK).lkey
        batch = seam.ReadBatch(rows, self.peer, local, lkey, key.base, key.rkey, 8, None, 2)
        assert self.me.post_read(batch, 0, rows) == rows
        return self.ended(), sink[-1].tobytes()

    def ended(self) -> int:
        """Wait for the end of a row; its status."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not (found := self.turn()):
            assert time.monotonic() < deadline_s, "the row does not end"
        return found[-1]

    def close(self) -> None:
        self.me.close()


@pytest.fixture
def victim() -> LocalDomain:
    return nic()


def call(victim: LocalDomain) -> socket.socket:
    """A stranger's connection."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(Address.from_bytes(victim.address).socket)
    return sock


def serve(victim: LocalDomain, turns: int = 40) -> None:
    out = new_completions(4)
    for _ in range(turns):
        victim.poll(out)


NOT_UTF8 = b"\x93\x01\xc4\x03abc\xa2\xff\xfe"
NESTED = b"\x93\x01\xc4\x00" + b"\x91" * 4000


@pytest.mark.parametrize("datagram", [NOT_UTF8, NESTED, b"\xc1", b"x" * 5000])
def test_a_strangers_datagram_ends_its_connection_and_nothing_else(victim, datagram) -> None:
    """Any user of the host could end an engine with ten bytes that are not UTF-8."""
    with call(victim) as stranger:
        stranger.send(datagram)
        serve(victim)
        assert b"" == stranger.recv(100)
    writer = Writer(victim)
    assert Status.OK == writer.write()
    writer.close()


def test_what_strangers_send_along_is_closed() -> None:
    """Descriptors in a datagram are ours to close; a stranger could use up all that we may have."""
    victim = nic()
    token = Address.from_bytes(victim.address).token
    before = descriptors()
    for number in (1, 2, 3, 4, 5):
        hellos = Hello(bytes(16), "x", b"s"), Hello(token, "x", b"s")
        for said in (*hellos, channel_room.Control(b"s", b"p")):
            with call(victim) as stranger, Path(os.devnull).open() as null:
                socket.send_fds(stranger, [msgspec.msgpack.encode(said)], [null.fileno()] * number)
                serve(victim)
    assert set() == opened_since(before)
    victim.close()


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "most"), [(1 << 20, 64), (320, 20), (10, 1)])
def test_silent_strangers_are_few_and_lock_nobody_out(monkeypatch, limit, most) -> None:
    """A thousand connections that say nothing took every slot: new peers' rows waited for ever."""
    monkeypatch.setattr("tep.backends.local.port.resource.getrlimit", lambda _: (limit, limit))
    gc.collect()  # what earlier tests dropped would be closed meanwhile
    victim = nic()
    before = open_descriptors()
    crowd = []
    for _ in range(300):
        crowd.append(call(victim))
        serve(victim, 20)
    held = open_descriptors() - before - len(crowd)
    writer = Writer(victim)
    assert Status.OK == writer.write()
    writer.close()
    for sock in crowd:
        sock.close()

    assert most == held


@pytest.mark.parametrize("posts", [False, True])
def test_a_silent_stranger_is_hung_up_on_in_time(victim, monkeypatch, posts) -> None:
    """A connection without a word held a descriptor until the engine's end; nobody has to poll."""
    monkeypatch.setattr("tep.backends.local.port._CALLER_S", 0.02)
    writer = Writer(victim)
    assert Status.OK == writer.write()
    with call(writer.me) as stranger:
        stranger.setblocking(False)
        if posts:  # the call is taken meanwhile
            writer.post()
        while True:
            if writer.me.arm():  # asleep: only the timer can wake it
                assert select.select([writer.me.wakeup_fd()], [], [], PATIENCE_S)[0]
            serve(writer.me, 1)
            try:
                assert b"" == stranger.recv(1)
                break
            except BlockingIOError:
                continue


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run some lines in a process of their own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


LIMITED = """
import itertools, os, resource, sys, time, numpy as np, tep
e = tep.TransferEngine.open("local", name="limited")
old, new = (tep.MrDesc.from_bytes(bytes.fromhex(text)) for text in sys.argv[1:])
mr, _ = e.reg_mr(np.ones(64, np.uint8))
imms = itertools.count()  # a retry of the same one would wait until the peer was told
write = lambda desc: e.submit_single_write(8, (mr, 0), (desc, 0), next(imms)).wait(20)
write(old)
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
used = len(os.listdir("/proc/self/fd")) - 1
for free in range(20):
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + free, hard))
    try:
        write(new)
        print("reached with", free)
        break
    except tep.FabricError as error:
        assert error.code == "UNREACHABLE" and "ulimit -n" in str(error), str(error)
    write(old)
else:
    raise SystemExit("never reached")
e.close()
"""


@pytest.mark.slow
def test_without_descriptors_a_new_peer_fails_in_time_and_nothing_else() -> None:
    """The limit of descriptors was a raw OSError in the step: it ended transfers to old peers too.

    A peer that is out of reach for want of descriptors is reached once there are some.
    """
    import tep

    with tep.TransferEngine.open("local") as old, tep.TransferEngine.open("local") as new:
        memory = np.zeros(64, np.uint8)
        descs = [engine.reg_mr(memory)[1].to_bytes().hex() for engine in (old, new)]
        ended = run(LIMITED, *descs)

    assert 0 == ended.returncode, ended.stderr
    assert "reached with" in ended.stdout


OPENINGS = """
import gc, os, resource
import tep
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
tep.TransferEngine.open("local", nics=2).close()
gc.collect()
used = len(os.listdir("/proc/self/fd")) - 1
for free in range(60):
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + free, hard))
    try:
        tep.TransferEngine.open("local", nics=2).close()
        print("opened with", free)
        break
    except tep.BackendUnavailable as error:
        assert "Too many open files" in str(error), str(error)
        assert "ulimit -n" in str(error), str(error)
    gc.collect()
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 60, hard))
    assert used == len(os.listdir("/proc/self/fd")) - 1, (free, used, os.listdir("/proc/self/fd"))
else:
    raise SystemExit("never opened")
"""


@pytest.mark.slow
def test_an_engine_that_cannot_be_opened_says_why_and_leaves_nothing() -> None:
    """At each number of descriptors: a typed error with the cure, and all of them given back."""
    ended = run(OPENINGS)

    assert 0 == ended.returncode, ended.stderr
    assert "opened with" in ended.stdout


def test_a_bell_is_an_eventfd_that_does_not_block() -> None:
    """A peer could hand over a full pipe as its bell: the first ring would block for ever."""
    reader, writer = os.pipe()
    kinds = {
        os.eventfd(0, os.EFD_NONBLOCK): True,
        os.eventfd(0): False,
        new_memfd("no bell", 8): False,
        reader: False,
        writer: False,
    }
    found = {fd: is_bell(fd) for fd in kinds}
    for fd in kinds:
        os.close(fd)

    assert kinds == found


def test_another_user_gets_no_mapping_of_shared_memory(victim, monkeypatch) -> None:
    """The kernel keeps other users out of plain memory; alloc_shared() let them in by token."""
    shared = alloc_shared(8)
    begin = Channel.__init__

    def begin_with_another_user(channel: Channel, sock: socket.socket) -> None:
        begin(channel, sock)
        channel.may_write = False

    monkeypatch.setattr(Channel, "__init__", begin_with_another_user)
    other = Writer(victim, shared)
    monkeypatch.setattr(other.me.sender.outs[other.peer], "pid", 0)
    for _ in range(50):
        other.turn()
    assert not other.me.sender.outs[other.peer]._shares
    other.close()
    monkeypatch.undo()
    same = Writer(victim, shared)
    for _ in range(50):
        same.turn()
    assert same.me.sender.outs[same.peer]._shares
    same.close()


def test_words_of_a_peer_that_make_no_sense_end_its_connection_only(victim) -> None:
    """A tail that jumps ran through the ring as thousands of immediates, or raised in the step."""
    good = Writer(victim)
    for tail, mtail in ((2**63, 0), (-1 & 2**64 - 1, 0), (0, 2**40), (0, 4), (8193, 0)):
        bad = Writer(victim)
        assert Status.OK == bad.write()
        lane, out = bad.me.sender.outs[bad.peer].lane, bad.me.sender.outs[bad.peer]
        out.words[out.board] = lane.tail + tail & 2**64 - 1
        out.words[out.board + 1] = lane.mtail + mtail & 2**64 - 1
        for _ in range(40):
            bad.turn()
        assert 1 == bad.imms
        assert Status.UNREACHABLE == bad.write(), "it was hung up on"
        assert Status.OK == good.write()
        bad.close()
    good.close()


@settings(max_examples=effort(60, 15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    port=st.lists(st.tuples(st.integers(8, TABLE + 40), U64), max_size=8),
    lane=st.lists(st.tuples(st.sampled_from([8, 16, 24, 32, 40, 64, 512, 8704]), U64), max_size=6),
    message=st.booleans(),
)
def test_whatever_peers_write_into_shared_words_no_poll_raises(port, lane, message) -> None:
    """Both ends of a connection share memory: each reads there what the other, broken, wrote."""
    victim = nic()
    victim.post_recvs(64, 4)
    writer = Writer(victim)
    assert Status.OK == writer.write()
    out = writer.me.sender.outs[writer.peer]
    if message:
        writer.me.post_send(writer.peer, b"hello", 5)
    for at, word in lane:
        out.lane.words[at] = word
    for at, word in port:
        out.words[at] = word
    writer.post()
    for _ in range(20):
        writer.turn()
        if message:
            writer.me.post_send(writer.peer, b"again", 6)
        writer.post()
    writer.close()
    victim.close()


def test_a_table_that_makes_no_sense_is_no_target(victim) -> None:
    """The lengths in a port's table are the peer's words: a sum beyond 2^64 raised in the step."""
    for base, nbytes, share in ((2**64 - 8, 2**64 - 1, 0), (0, 2**64 - 1, 1), (1, 8, 1)):
        target = alloc_shared(8)
        writer = Writer(victim, target)
        at = TABLE + 4 * (writer.rkey & 0xFFFF)
        number = victim.port.words[at + 3]
        words = (base, nbytes, number if share else 0)
        for k, word in enumerate(words):
            victim.port.words[at + 1 + k] = word
        assert Status.OK != writer.write()
        writer.close()


def test_acknowledgements_that_nobody_sent_are_not_believed() -> None:
    """A counter that jumps to 2^63 had the sender build a list of so many statuses."""
    writer = memory.LaneWriter(new_fence())
    assert writer.put_message(b"one")
    words = writer.words
    words[40], words[64] = 2**63, 2**64 - 1
    assert [Status.PROVIDER] == writer.take_acks()
    assert [] == writer.take_acks()
    words[40] = 0
    assert [] == writer.take_acks()
    os.close(writer.fd)
    writer.close()


RECYCLED = """
import os, sys
import numpy as np
from tep.backends.base import Access
from tep.memory.source import adapt
from tests.unit.backends.test_local_strangers import Writer, nic
victim = nic()
target, secret = np.zeros(8, np.uint8), np.full(8, 5, np.uint8)
shown = victim.register(adapt(secret), Access.READABLE)
to_child, from_child = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    os.read(to_child[0], 1)
    os.write(from_child[1], bytes(target))
    os._exit(0)
for rows in (1, 20):
    writer = Writer(victim, target)
    assert writer.write() == 0
    assert writer.read(shown, rows) == (0, bytes([5]) * 8)
    target[:] = 0
    out = writer.me.sender.outs[writer.peer]
    out.pid = child  # as if the peer's number were used again
    for found in out.targets.values():
        assert found.mapped is None
    assert writer.write() == 0  # a descriptor of its memory stays with it
    assert bytes(target) == bytes([2]) * 8
    target[:] = 0
    os.close(out.memory)
    out.memory = -1
    assert writer.write() == 7
    assert writer.imms == 2
    assert writer.read(shown, rows) == (7, bytes(8))
    writer.close()
os.write(to_child[1], b"x")
print("child has", os.read(from_child[0], 8))
os.waitpid(child, 0)
victim.close()
"""


@pytest.mark.slow
def test_a_process_that_has_the_peers_number_now_gets_and_gives_no_byte() -> None:
    """process_vm_writev and _readv find a process by number, and numbers are used again.

    Here a forked child of the peer has the number: the same addresses, the same user.
    """
    ended = run(RECYCLED)
    assert 0 == ended.returncode, ended.stderr
    assert f"child has {bytes(8)!r}" in ended.stdout


def test_an_answer_that_makes_no_sense_ends_one_peer_and_raises_nothing(victim, monkeypatch):
    """An exception out of poll() ends the engine, with all its peers."""
    monkeypatch.setattr(outbound, "is_bell", lambda _: False)
    writer = Writer(victim)

    assert Status.UNREACHABLE == writer.write()
    assert "its answer makes no sense" in writer.me.status_text(Status.UNREACHABLE)


def test_a_peer_whose_port_cannot_be_mapped_for_a_while_is_called_again(victim, monkeypatch):
    """A process that is short of descriptors for a second lost its peers until they restarted."""
    true, left = outbound.SharedMap, [2]

    def short(fd, nbytes, **options):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EMFILE, "too many")
        return true(fd, nbytes, **options)

    monkeypatch.setattr(outbound, "SharedMap", short)

    assert Status.OK == Writer(victim).write()
    assert left[0] < 0


def test_immediates_that_no_memory_is_left_for_come_later(victim, monkeypatch):
    """A MemoryError while a burst is taken ended the engine, and the burst was lost."""
    writer = Writer(victim)
    take, fails = LocalDomain._take_burst, [True]

    def short(self, *args):
        if fails:
            fails.pop()
            raise MemoryError
        return take(self, *args)

    monkeypatch.setattr(LocalDomain, "_take_burst", short)
    at = np.full(60, adapt(writer.source).ptr, np.uint64)
    to = np.full(60, adapt(writer.target).ptr, np.uint64)
    imms = np.arange(60, dtype=np.uint32)
    rows = WriteBatch(60, writer.peer, at, writer.lkey, to, writer.rkey, 8, imms, 1)
    assert 60 == writer.me.post(rows, 0, 60)
    deadline_s = time.monotonic() + PATIENCE_S
    while writer.imms < 60:
        writer.turn()
        assert time.monotonic() < deadline_s, f"{writer.imms} of 60 arrived"

    assert not fails


def test_a_row_far_behind_its_region_is_refused(victim) -> None:
    """Twice the region's address leaves the same rest as the address itself."""
    writer = Writer(victim)
    assert Status.OK == writer.write()
    src, dst = adapt(writer.source).ptr, adapt(writer.target).ptr
    row = WriteBatch(1, writer.peer, src, writer.lkey, 2 * dst, writer.rkey, 8, None, 2)
    assert 1 == writer.me.post(row, 0, 1)

    assert Status.REMOTE_RANGE == writer.ended()


def test_a_peer_that_closes_leaves_no_descriptor(victim) -> None:
    """A bell, a process and its memory for each of them: a service runs out in weeks."""
    before = descriptors()
    for _ in range(3):
        writer = Writer(victim)
        assert Status.OK == writer.write()
        writer.close()
    serve(victim)

    assert set() == opened_since(before)


@pytest.mark.slow
def test_peers_that_are_gone_leave_next_to_nothing(victim, monkeypatch) -> None:
    """A service whose peers come and go for months kept 5 KiB of each."""
    monkeypatch.setattr(sender_room, "_GONE_MAX", 8)
    lkey = victim.register(adapt(np.zeros(8, np.uint8)), Access.SOURCE).lkey
    numbers, addresses, out = [], [], new_completions(4)
    for _ in range(20):
        peer = nic()
        addresses.append(peer.address)
        numbers.append(victim.connect(peer.address))
        peer.close()
        assert victim.post(WriteBatch(1, numbers[-1], 0, lkey, 0, 1, 0, 1, 1), 0, 1) == 1
        while not victim.poll(out):
            pass
    sender = victim.sender
    assert 20 == len(set(numbers))
    assert len({id(sender.outs[number]) for number in numbers}) == 1
    assert len(sender._ids) == 8
    assert not sender._numbers
    assert numbers[-1] == victim.connect(addresses[-1])
    again = victim.connect(addresses[0])
    assert victim.post(WriteBatch(1, again, 0, lkey, 0, 1, 0, 1, 1), 0, 1) == 1
    while not (n := victim.poll(out)):
        pass
    assert [Status.UNREACHABLE] == [entry["status"] for entry in out[:n]]


def test_letting_every_process_trace_this_one_is_said_once(monkeypatch, caplog) -> None:
    """A process that can be written to by all of its user's others has to know that."""
    monkeypatch.setattr(local_room, "_yama_scope", lambda: 1)
    monkeypatch.setattr(local_room, "allow_any_tracer", lambda: True)
    local_room._open_to_tracers.cache_clear()
    with caplog.at_level(logging.WARNING, "tep"):
        for _ in range(2):
            open_domains().domains[0].close()
        open_domains(allow_tracer=False).domains[0].close()
    local_room._open_to_tracers.cache_clear()

    assert 1 == sum("every process of this user" in text for text in caplog.messages)
    assert "allow_tracer=False" in local_room.probe()

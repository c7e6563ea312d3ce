"""The routes of bytes to a peer: through the kernel, into mapped memory, or none."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import itertools
import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tep.backends.base import Access, Kind, ReadBatch, Status, WriteBatch, new_completions
from tep.backends.common import HostRegion
from tep.backends.local import LocalDomain, alloc_shared, open_domains
from tep.backends.local import copying as copying_room
from tep.backends.local import outbound as outbound_room
from tep.backends.local.memory import COPYING, Witness, arena_of
from tep.base.errors import FabricError, UsageError
from tep.memory.source import adapt
from tests.support.descriptors import descriptors, opened_since
from tests.support.effort import effort

NBYTES = 64 * 1024


class Pair:
    """Two NICs of this process, and how to write from one to the other."""

    def __init__(self) -> None:
        self.a, self.b = (open_domains().domains[0] for _ in range(2))
        assert isinstance(self.a, LocalDomain)
        assert isinstance(self.b, LocalDomain)
        self.peer = self.a.connect(self.b.address)
        self.out = new_completions(64)
        self.imms = 0

    def close(self) -> None:
        self.a.close()
        self.b.close()

    def turn(self) -> list[tuple[int, int, int]]:
        """Poll both; return (status, row, count) of the sender's completions."""
        back = self.out[: self.a.poll(self.out)].tolist()
        found = [(entry[1], entry[4], entry[2]) for entry in back]
        for entry in self.out[: self.b.poll(self.out)].tolist():
            assert entry[0] == Kind.IMM
            self.imms += entry[2]
        return found

    def write(self, source, target, src, dst, nbytes, imm=1) -> dict[int, int]:
        """Write rows between two buffers; return the status of each row that failed."""
        return self.move(WriteBatch, source, target, src, dst, nbytes, imm)

    def read(self, source, target, src, dst, nbytes) -> dict[int, int]:
        """Read what write() would write: the source is the other NIC's."""
        return self.move(ReadBatch, target, source, dst, src, nbytes, None)

    def move(self, kind, near, far, src, dst, nbytes, imm) -> dict[int, int]:
        here, there = adapt(near), adapt(far)
        reading = kind is ReadBatch
        lkey = self.a.register(here, Access.SINK if reading else Access.SOURCE)
        rkey = self.b.register(there, Access.READABLE if reading else Access.SOURCE_AND_TARGET)
        columns = [np.array(c, np.uint64) for c in (src, dst, nbytes)]
        batch = kind(
            len(src),
            self.peer,
            columns[0] + np.uint64(here.ptr),
            lkey.lkey,
            columns[1] + np.uint64(there.ptr),
            rkey.rkey,
            columns[2] if len(set(nbytes)) > 1 else nbytes[0],
            imm,
            5,
        )
        post = self.a.post_read if reading else self.a.post
        assert post(batch, 0, batch.n) == batch.n
        back, failed = 0, {}
        for _ in range(500):
            for status, row, count in self.turn():
                back += count
                if status:
                    failed[row] = status
            if back == batch.n:
                break
        assert back == batch.n
        self.turn()
        self.a.deregister(lkey)
        self.b.deregister(rkey)
        return failed


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


ROWS = st.lists(
    st.tuples(st.integers(0, NBYTES - 9000), st.integers(0, 9000)), min_size=1, max_size=40
)


def memories(seed: int, how: str, way: str) -> tuple[np.ndarray, np.ndarray]:
    """Source with random bytes, and target; mapped: the peer's of both is shared memory."""
    source = np.random.default_rng(seed).integers(0, 256, NBYTES).astype(np.uint8)
    target = np.zeros(NBYTES, np.uint8)
    if way == "kernel":
        return source, target
    shared = alloc_shared(NBYTES)
    shared[:] = source if how == "read" else target
    return (shared, target) if how == "read" else (source, shared)


@pytest.mark.parametrize("how", ["write", "read"])
@pytest.mark.parametrize("way", ["kernel", "mapped"])
@pytest.mark.parametrize("same_length", [True, False])
@settings(max_examples=effort(25, 6), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS)
def test_rows_land_where_they_should_and_nowhere_else(pair, how, way, same_length, rows) -> None:
    """Whatever the offsets and lengths: the target is as if its rows were copied one by one."""
    source, target = memories(len(rows), how, way)
    expected = np.zeros(NBYTES, np.uint8)
    src = [at for at, _ in rows]
    dst = [NBYTES - 9000 - at for at in src]
    nbytes = [rows[0][1]] * len(rows) if same_length else [n for _, n in rows]
    for here, there, n in zip(src, dst, nbytes, strict=True):
        expected[there : there + n] = source[here : here + n]
    pair.imms = 0
    move = pair.write if how == "write" else pair.read
    failed = move(source, target, src, dst, nbytes)

    assert {} == failed
    assert np.array_equal(expected, target)
    assert pair.imms == (len(rows) if how == "write" else 0)


COLUMNS = st.one_of(
    st.integers(0, 140),
    st.lists(st.integers(0, 140), min_size=6, max_size=6).map(lambda v: np.array(v, np.uint64)),
)


@settings(max_examples=effort(400, 15))
@given(at=COLUMNS, nbytes=COLUMNS, origin=st.integers(0, 60), size=st.integers(1, 100))
def test_rows_lie_inside_only_if_each_of_them_does(at, nbytes, origin, size) -> None:
    """A check of the first start, or the last length, writes over what lies beside a region."""
    columns = np.broadcast_arrays(np.array(at, np.int64), np.array(nbytes, np.int64))
    rows = list(zip(*(np.atleast_1d(column).tolist() for column in columns), strict=True))
    expected = all(origin <= start and start + n <= origin + size for start, n in rows)
    memory = adapt(bytearray(size))

    assert expected == HostRegion(memory, 0, writable=True).covers(at, nbytes, origin)


def test_shared_memory_is_mapped_once_and_let_go_with_its_last_region(pair) -> None:
    """A peer's mapping keeps memory alive: after deregister() it has to be freed."""

    def mapped() -> int:
        gc.collect()  # what other tests dropped
        maps = Path("/proc/self/maps").read_text().splitlines()
        return sum("memfd:tep-alloc-shared" in line for line in maps)

    before = mapped()
    arena = alloc_shared(NBYTES)
    source = np.arange(NBYTES, dtype=np.uint8)
    for _ in range(3):
        assert {} == pair.write(source, arena[64:], [0], [0], [100])
        assert np.array_equal(source[:100], arena[64:164])
    for _ in range(40):
        pair.turn()
    assert before + 1 == mapped(), "the owner's own mapping is left"


def test_each_senders_byte_of_the_witness_is_in_its_page_and_not_in_the_proof() -> None:
    """A byte behind the page is another mapping's, or ends each copy as if the peer were gone."""
    at = [Witness.byte(1 << 20, slot) - (1 << 20) for slot in range(1000)]

    assert all(64 <= byte < mmap.PAGESIZE for byte in at)
    assert all(a // 64 != b // 64 for a, b in itertools.pairwise(at))


def test_alloc_shared_is_freed_with_its_last_array() -> None:
    """Memory that nobody can reach any more must not fill /dev/shm's memory."""
    before = descriptors()
    whole = alloc_shared(5000)
    part = whole[100:200]
    address = part.ctypes.data
    del whole
    assert arena_of(address, 100) is not None
    assert 0 == part.sum()
    part[:] = 1
    del part
    gc.collect()

    assert arena_of(address, 100) is None
    assert set() == opened_since(before)


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, "4096"])
def test_alloc_shared_refuses_what_is_no_length(nbytes) -> None:
    """A negative length would be a huge one to the kernel."""
    with pytest.raises(UsageError, match="alloc_shared: nbytes=.* is (below 1|not an integer)"):
        alloc_shared(nbytes)


@contextlib.contextmanager
def holes_in(npages, holes) -> Iterator[mmap.mmap]:
    """Make memory with some pages that are not mapped meanwhile."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, npages * page)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    for hole in holes:
        assert 0 == libc.munmap(address + hole * page, page)
    yield memory
    for hole in holes:  # for the mapping's own end
        libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_long] * 5]
        libc.mmap(address + hole * page, page, 3, mmap.MAP_PRIVATE | 0x10 | 0x20, -1, 0)


@pytest.mark.parametrize("lengths", [[4096] * 12, [4096] * 11 + [4095]])
def test_rows_into_unmapped_memory_fail_alone(pair, lengths) -> None:
    """A region can be unmapped under its registration: its rows fail by number, the others land."""
    page, holes = mmap.PAGESIZE, {3, 4, 9}
    with holes_in(12, holes) as memory:
        source = np.full(page, 7, np.uint8)
        raw = (np.frombuffer(memory, np.uint8).ctypes.data, 12 * page, "cpu")
        failed = pair.write(source, raw, [0] * 12, [k * page for k in range(12)], lengths)

        assert dict.fromkeys(holes, Status.PROVIDER) == failed
        assert 9 == pair.imms
        for k in set(range(12)) - holes:
            assert b"\7" * lengths[k] == memory[k * page : k * page + lengths[k]]


@pytest.mark.parametrize("lengths", [[4096] * 12, [4096] * 11 + [4095]])
def test_rows_out_of_unmapped_memory_fail_alone(pair, lengths) -> None:
    """A region that its owner has unmapped fails the reads of its holes, and no others."""
    page = mmap.PAGESIZE
    with holes_in(12, {3, 4, 9}) as memory:
        for k in set(range(12)) - {3, 4, 9}:
            memory[k * page : (k + 1) * page] = bytes([k + 1]) * page
        raw = (np.frombuffer(memory, np.uint8).ctypes.data, 12 * page, "cpu")
        at = [k * page for k in range(12)]
        target = np.zeros(12 * page, np.uint8)
        failed = pair.read(raw, target, at, at, lengths)

    assert dict.fromkeys({3, 4, 9}, Status.PROVIDER) == failed
    for k in set(range(12)) - {3, 4, 9}:
        assert (target[k * page :][: lengths[k]] == k + 1).all()


@pytest.fixture
def refused(monkeypatch) -> None:
    """A kernel that does not let this process touch another."""
    monkeypatch.setattr(outbound_room, "can_reach", lambda *_: errno.EPERM)


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("rows", [1, 20])
def test_without_permission_rows_fail_with_the_cure_and_shared_memory_works(pair, rows) -> None:
    """Containers refuse process_vm_writev: the message says what helps, and one way is open."""
    source = np.arange(NBYTES, dtype=np.uint8)
    plain, shared = np.zeros(NBYTES, np.uint8), alloc_shared(NBYTES)
    at = [100 * k for k in range(rows)]
    failed = pair.write(source, plain, at, at, [100] * rows)

    assert dict.fromkeys(range(rows), Status.PROVIDER) == failed
    assert 0 == plain.sum()
    assert 0 == pair.imms
    text = pair.a.status_text(Status.PROVIDER)
    assert "process_vm_readv of process" in text
    assert "EPERM: Operation not permitted" in text
    assert "register memory of tep.alloc_shared()" in text

    assert {} == pair.write(source, shared, at, at, [100] * rows)
    assert np.array_equal(source[: 100 * rows], shared[: 100 * rows])

    sink = np.zeros(NBYTES, np.uint8)
    failed = pair.read(source, sink, at, at, [100] * rows)
    assert dict.fromkeys(range(rows), Status.PROVIDER) == failed
    assert 0 == sink.sum()
    assert {} == pair.read(shared, sink, at, at, [100] * rows)
    assert np.array_equal(source[: 100 * rows], sink[: 100 * rows])


def test_a_process_that_answers_with_other_bytes_is_not_the_peer() -> None:
    """In another pid namespace the same number is another process, not to be written to."""
    mine = np.frombuffer(b"expected", np.uint8)

    assert 0 == copying_room.can_reach(os.getpid(), mine.ctypes.data, b"expected")
    assert errno.ESRCH == copying_room.can_reach(os.getpid(), mine.ctypes.data, b"otherwis")
    assert copying_room.can_reach(2**22 + 1, mine.ctypes.data, b"expected") == errno.ESRCH


def test_a_key_is_refused_from_the_moment_it_is_withdrawn(pair) -> None:
    """The cached region of a withdrawn key, and a new region in its place, are not the old one."""
    target = np.zeros(64, np.uint8)
    source = np.ones(64, np.uint8)
    lkey = pair.a.register(adapt(source), Access.SOURCE).lkey
    keys = []
    for _ in range(5):
        key = pair.b.register(adapt(target), Access.SOURCE_AND_TARGET)
        keys.append(key.rkey)
        statuses = []
        for rkey in keys:
            row = WriteBatch(
                1, pair.peer, adapt(source).ptr, lkey, adapt(target).ptr, rkey, 8, None, 1
            )
            pair.a.post(row, 0, 1)
            while not (found := pair.turn()):
                pass
            statuses.append(found[0][0])
        assert [Status.REMOTE_KEY] * (len(keys) - 1) + [Status.OK] == statuses
        pair.b.deregister(key)


def test_memory_is_not_given_back_under_a_sender_that_was_stopped_in_mid_copy(pair) -> None:
    """It goes on where it was stopped, hours later: into what is somebody else's by then."""
    target, other = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    assert {} == pair.write(np.ones(64, np.uint8), target, [0], [0], [64])
    keys = [pair.b.register(adapt(m), Access.SOURCE_AND_TARGET) for m in (target, other)]
    pair.b.caps = replace(pair.b.caps, peer_timeout_s=0.05)
    pair.a.sender.outs[pair.peer].lane.words[COPYING] = 1  # as a stopped process leaves it
    with pytest.raises(FabricError, match="in the middle of a copy here for 0.05 s .stopped by a"):
        pair.b.deregister(keys[0])
    pair.a.die()
    pair.b.deregister(keys[1])  # the dead write no more


def test_a_sender_in_the_slot_of_another_is_heard() -> None:
    """Two senders, one after the other in one slot, may publish the very same tail."""
    b = open_domains().domains[0]
    target, out = np.zeros(8, np.uint8), new_completions(4)
    rkey = b.register(adapt(target), Access.SOURCE_AND_TARGET).rkey
    for turn in range(4):
        a = open_domains().domains[0]
        source = adapt(np.full(8, turn, np.uint8))
        lkey = a.register(source, Access.SOURCE).lkey
        row = WriteBatch(
            1, a.connect(b.address), source.ptr, lkey, adapt(target).ptr, rkey, 8, turn, 1
        )
        assert a.post(row, 0, 1) == 1
        imms: list[int] = []
        for _ in range(200):
            a.poll(out)
            imms += [entry[3] for entry in out[: b.poll(out)].tolist()]
        assert [turn] == imms
        a.close()
    b.close()

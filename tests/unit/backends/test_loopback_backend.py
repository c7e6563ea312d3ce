"""The loopback beyond its contract: exact statuses, options, threads, forks."""

from __future__ import annotations

import os
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tep.backends import open_backend
from tep.backends.base import Access, Kind, Status, WriteBatch, new_completions
from tep.backends.common import HostRegion, copy_rows
from tep.backends.loopback import Hub, LoopbackDomain, open_domains, probe
from tep.base.errors import ClosedError, FabricError, UsageError
from tep.memory.source import adapt
from tep.testing.world import Net
from tests.support.loopbacks import open_made
from tests.support.worlds import LoopbackWorld


@pytest.fixture
def in_order():
    with LoopbackWorld() as world:
        yield Net(world)


def status_of(net: Net, a, batch) -> Status:
    """Post one row and return how it ended."""
    net.write(batch, a)
    [status] = a.rows_ended(batch.ctx)
    return status


# ---------------------------------------------------------------------- how a row ends


def test_each_flaw_of_a_row_has_its_own_status(in_order) -> None:
    """A user who reads REMOTE_RANGE looks at offsets; reading REMOTE_KEY, at descriptors."""
    a, b = in_order.pair(nics=2)
    size = len(a.source.data)
    foreign = b.target.keys[1].rkey
    nowhere = a.batch(b)
    nowhere.lkey = 4711

    assert Status.LOCAL_KEY == status_of(in_order, a, nowhere)
    assert Status.LOCAL_KEY == status_of(in_order, a, a.batch(b, src=size - 10))
    assert Status.REMOTE_KEY == status_of(in_order, a, a.batch(b, rkey=4712))
    assert Status.REMOTE_KEY == status_of(in_order, a, a.batch(b, rkey=foreign))
    assert Status.REMOTE_RANGE == status_of(in_order, a, a.batch(b, dst=size - 10))
    assert b.untouched()
    for status in (Status.LOCAL_KEY, Status.REMOTE_KEY, Status.REMOTE_RANGE, Status.STALE_PEER):
        assert a.domains[0].status_text(status), status
    assert "" == a.domains[0].status_text(Status.OK)


def test_one_bad_row_among_many_is_found(in_order) -> None:
    """The others of its batch are carried out, and it alone is named."""
    a, b = in_order.pair()
    size = len(b.target.data)
    for n in (15, 16, 64):
        at = [64 * k for k in range(n)]
        for bad in (0, n // 2, n - 1):
            dst = list(at)
            dst[bad] = size - 1
            batch = a.batch(b, src=at, dst=dst)
            in_order.write(batch, a)
            errors = [seen for seen in a.errors() if seen.ctx == batch.ctx]

            assert [(Status.REMOTE_RANGE, bad)] == [(e.status, e.row) for e in errors]
            assert n - 1 == a.rows_ended(batch.ctx)[Status.OK]


def test_who_polls_is_woken_while_there_is_more(in_order) -> None:
    """A driver that sleeps would leave the rest until something else comes."""
    a, b = in_order.pair()
    (domain,) = a.domains
    woken: list[int] = []
    domain.set_waker(lambda: woken.append(1))
    for _ in range(2):
        a.post(a.batch(b))
    woken.clear()
    first = new_completions(1)
    assert 1 == domain.poll(first)
    assert [1] == woken
    assert 1 == domain.poll(first)
    assert [1] == woken, "nothing is left"


def test_who_was_refused_is_woken_when_there_is_room() -> None:
    """Rows that found the queue full are offered again when somebody says so."""
    with LoopbackWorld(sq_depth=2) as world:
        net = Net(world)
        a, b = net.pair()
        (domain,) = a.domains
        woken: list[int] = []
        domain.set_waker(lambda: woken.append(1))
        batch = a.batch(b, src=[0, 8, 16], dst=0, nbytes=8)
        assert 2 == domain.post(batch, 0, 3)
        assert 0 == domain.post(batch, 2, 3)
        woken.clear()
        while not domain.poll(new_completions(8)):
            pass

        assert [1] == woken
        assert 1 == domain.post(batch, 2, 3)


def test_too_long_is_length() -> None:
    """caps are enforced, so that an engine that ignores them is found out here."""
    with LoopbackWorld(max_write_bytes=100, max_msg_bytes=10) as world:
        net = Net(world)
        a, b = net.pair()
        b.domains[0].post_recvs(64, 1)
        long = a.batch(b, nbytes=101, imm=1)
        many = a.batch(b, src=[0] * 20, dst=0, nbytes=101)
        a.post(long)
        a.post(many)
        message = a.send(b, b"x" * 11)
        net.settle()

        assert {Status.LENGTH: 1} == a.rows_ended(long.ctx)
        assert {Status.LENGTH: 20} == a.rows_ended(many.ctx)
        assert [(Kind.SENT, message)] == [
            (seen.kind, seen.ctx) for seen in a.errors() if seen.kind == Kind.SENT
        ]
        assert [] == b.messages()


def test_unknown_closed_and_restarted_peers_differ(in_order) -> None:
    """STALE_PEER says: ask for the new address. UNREACHABLE says: nobody is there."""
    world = in_order.world
    a, b = in_order.pair()
    with LoopbackWorld() as elsewhere:
        stranger = a.domains[0].connect(Hub(99).address("nobody", 0, 1))
        batch = a.batch(b)
        batch.peer = stranger
        assert Status.UNREACHABLE == status_of(in_order, a, batch)
        assert elsewhere.nodes == []
    in_order.forget(b)
    world.kill(b.node)
    assert Status.UNREACHABLE == status_of(in_order, a, a.batch(b))
    world.restart(b.node)
    assert Status.STALE_PEER == status_of(in_order, a, a.batch(b))


def test_read_only_memory_is_no_target(in_order) -> None:
    """A read-only page as a target would be a crash in the middle of somebody's write."""
    domain = in_order.side().domains[0]
    frozen = adapt(b"these bytes are constant")

    assert domain.register(frozen, Access.SOURCE).lkey
    with pytest.raises(FabricError, match=r"read-only.*Access\.SOURCE"):
        domain.register(frozen, Access.SOURCE_AND_TARGET)
    with pytest.raises(FabricError, match=r"memory on cuda:0 cannot be registered.*takes cpu"):
        domain.register(adapt((4096, 4096, "cuda:0")), Access.SOURCE)


# ---------------------------------------------------------------------- options and hub


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nics": 0}, "nics=0; 1 to 64"),
        ({"nics": 65}, "nics=65; 1 to 64"),
        ({"reads": -1}, "reads=-1"),
        ({"name": ""}, "name=''"),
        ({"name": "x" * 201}, "1 to 200 bytes"),
    ],
)
def test_impossible_options_say_what_is_possible(options, says) -> None:
    """An option that is wrong is the caller's to mend, by the message alone."""
    with pytest.raises(UsageError, match=says):
        open_domains(**options)


def test_two_engines_opened_by_name_meet() -> None:
    """`TransferEngine.open("loopback")` twice is the first thing that a user tries."""
    first, second = open_backend("loopback", nics=2), open_backend("loopback")

    assert first.name != second.name
    assert first.epoch < second.epoch
    assert 3 == len({domain.address for node in (first, second) for domain in node.domains})
    assert first.driver is None
    assert probe()
    peer = first.domains[0].connect(second.domains[0].address)
    assert first.domains[0].post_send(peer, b"hello", 1)
    for node in (first, second):
        for domain in node.domains:
            domain.close()


def test_caps_repeat_the_options() -> None:
    """The engine must plan by the options that a user sets."""
    opened = open_domains(2, hub=Hub(), name="x", reads=7)
    caps = opened.domains[1].caps

    assert ("x/1", 7, True) == (caps.nic, caps.reads, caps.ordered)


# ---------------------------------------------------------------------- copying rows of one length


@given(
    st.integers(0, 12_000),
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), min_size=1, max_size=40),
)
def test_copying_by_columns_is_copying_row_by_row(nbytes, rows) -> None:
    """Any length, any alignment, both ways of copying: the bytes equal a plain loop's."""
    noise = np.random.default_rng(1).integers(0, 256, nbytes + 600, np.uint8)
    source = HostRegion(adapt(noise), 0, writable=False)
    target = HostRegion(adapt(np.zeros(nbytes * len(rows) + 600, np.uint8)), 0, writable=True)
    src = np.array([src for src, _ in rows], np.intp)
    dst = np.array([k * nbytes + shift for k, (_, shift) in enumerate(rows)], np.intp)
    dst = np.maximum.accumulate(dst)  # rows may touch but must not depend on their order
    keep = np.concatenate(([True], np.diff(dst) >= nbytes))
    src, dst = src[keep], dst[keep]
    expected = target.view.copy()
    for at, to in zip(src, dst, strict=True):
        expected[to : to + nbytes] = noise[at : at + nbytes]
    copy_rows(source, src, target, dst, nbytes, len(src))

    assert np.array_equal(expected, target.view)


# ---------------------------------------------------------------------- threads, wake-ups, forks


def test_two_threads_lose_nothing() -> None:
    """Two engines with a worker each write to one another at once; every row counts once."""
    hub = Hub()
    nodes = [open_made(LoopbackDomain, 1, hub=hub, name=name, sq_depth=64) for name in "ab"]
    arrays = [np.zeros(64 * 64, np.uint8) for _ in range(2)]
    keys = [
        node.domains[0].register(adapt(array), Access.SOURCE_AND_TARGET)
        for node, array in zip(nodes, arrays, strict=True)
    ]
    nrows = 3000
    found = [Counter(), Counter()]
    start = threading.Barrier(2)

    def work(me: int) -> None:
        domain, it = nodes[me].domains[0], 1 - me
        peer = domain.connect(nodes[it].domains[0].address)
        out = new_completions(64)
        at = np.arange(50, dtype=np.uint64) * np.uint64(64)
        base = np.uint64(keys[it].base)
        posted = 0
        start.wait()
        while found[me]["back"] < nrows or found[me]["imms"] < nrows:
            if posted < nrows:
                source = np.uint64(adapt(arrays[me]).ptr)
                batch = WriteBatch(
                    50, peer, at + source, keys[me].lkey, at + base, keys[it].rkey, 64, 7, posted
                )
                posted += domain.post(batch, 0, min(50, nrows - posted))
            n = domain.poll(out)
            for kind, status, count, *_ in out[:n].tolist():
                assert status == Status.OK
                found[me]["back" if kind == Kind.WRITE else "imms"] += count

    threads = [threading.Thread(target=work, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert [{"back": nrows, "imms": nrows}] * 2 == found
    for node in nodes:
        node.domains[0].close()


def test_deregister_ends_all_writing_by_other_threads() -> None:
    """When deregister() has returned, the memory may be unmapped: a late copy is a crash."""
    hub = Hub()
    a, b = (open_domains(hub=hub).domains[0] for _ in range(2))
    noise, target = np.ones(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    mine, theirs = adapt(noise), adapt(target)
    key_a = a.register(mine, Access.SOURCE)
    key_b = b.register(theirs, Access.SOURCE_AND_TARGET)
    peer, out, stop = a.connect(b.address), new_completions(16), threading.Event()
    failed = threading.Event()

    def write() -> None:
        while not stop.is_set():
            a.post(
                WriteBatch(1, peer, mine.ptr, key_a.lkey, key_b.base, key_b.rkey, 1 << 20, None, 1),
                0,
                1,
            )
            if (out["status"][: a.poll(out)] == Status.REMOTE_KEY).any():
                failed.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not target[-1]:
        pass
    b.deregister(key_b)
    target[:] = 0
    seen_late = failed.wait(30)
    stop.set()
    thread.join(30)

    assert seen_late
    assert not target.any()
    a.close()
    b.close()


def test_a_sender_without_a_receive_is_woken_when_one_is_posted(in_order) -> None:
    """The sender's worker sleeps; only the receiver knows that there is room now."""
    a, b = in_order.pair()
    calls: list[int] = []
    a.send(b, b"waits")
    in_order.quiet()
    a.domains[0].set_waker(lambda: calls.append(1))
    assert a.domains[0].arm()
    b.domains[0].post_recvs(64, 1)
    assert calls
    in_order.settle()
    assert [b"waits"] == b.messages()


def test_a_sender_without_a_receive_learns_that_the_peer_closed(in_order) -> None:
    """It would wait for a buffer that nobody can post any more."""
    a, b = in_order.pair()
    calls: list[int] = []
    ctx = a.send(b, b"waits")
    in_order.quiet()
    a.domains[0].set_waker(lambda: calls.append(1))
    b.domains[0].close()
    assert calls
    in_order.settle()
    assert [(ctx, Status.UNREACHABLE)] == [(seen.ctx, seen.status) for seen in a.errors()]


def test_more_messages_than_the_queue_holds_are_refused(in_order) -> None:
    """An unbounded queue hides a receiver that has stopped."""
    a, b = in_order.pair()
    peer = a.peer(b)
    taken = sum(a.domains[0].post_send(peer, b"x", k) for k in range(100))

    assert 64 == taken


def test_a_child_may_open_engines_of_its_own() -> None:
    """After a fork the parent's are closed, and the hub is there for new ones."""
    hub = Hub()
    old = open_domains(hub=hub).domains[0]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            a, b = (open_domains(hub=hub, name=name).domains[0] for name in "ab")
            a.post_send(a.connect(b.address), b"x", 1)
            try:
                old.connect(b.address)
            except ClosedError:
                code = 0
        finally:
            os._exit(code)

    assert 0 == os.waitpid(child, 0)[1]
    assert old.alive
    old.close()

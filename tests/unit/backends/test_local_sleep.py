"""A local NIC looks at its descriptors seldom: no news is lost, and nobody is woken in vain."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tep.backends import local
from tep.backends.base import Access, Kind, Status, WriteBatch, new_completions
from tep.backends.local import LocalDomain, alloc_shared, open_domains
from tep.backends.local import sender as sending
from tep.engine import TransferEngine
from tep.memory.source import adapt
from tests.support.effort import effort
from tests.support.inside import nics_of

Bytes = npt.NDArray[np.uint8]


@pytest.fixture
def nics() -> Iterator[tuple[LocalDomain, LocalDomain]]:
    """Two NICs that have not met."""
    a, b = (open_domains().domains[0] for _ in range(2))
    assert isinstance(a, LocalDomain)
    assert isinstance(b, LocalDomain)
    yield a, b
    a.close()
    b.close()


def poll(nic: LocalDomain) -> list[int]:
    """The kinds of what one poll hands out."""
    out = new_completions(16)
    return [entry[0] for entry in out[: nic.poll(out)].tolist()]


def wakes(nic: LocalDomain) -> bool:
    """Return True if a sleeper on its descriptor would be woken."""
    fd = nic.wakeup_fd()
    assert fd is not None
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def go_to_sleep(nic: LocalDomain) -> None:
    """Poll until the NIC says that it has no news."""
    for _ in range(3):
        if nic.arm():
            return
        assert not poll(nic)
    raise AssertionError("it always has news")


def blank(nbytes: int) -> Bytes:
    """Memory of this process alone."""
    return np.zeros(nbytes, np.uint8)


def meet(a: LocalDomain, b: LocalDomain, allocate: Callable[[int], Bytes] = blank) -> WriteBatch:
    """Connect a to b; a row to be written, with immediate 7."""
    here, there = (adapt(allocate(64)) for _ in range(2))
    lkey = a.register(here, Access.SOURCE).lkey
    target = b.register(there, Access.SOURCE_AND_TARGET)
    peer = a.connect(b.address)
    for nic in (b, a, b):
        go_to_sleep(nic)
        assert not poll(nic)
    return WriteBatch(1, peer, here.ptr, lkey, target.base, target.rkey, 8, 7, 1)


def test_a_socket_with_news_ends_a_sleep_once(nics) -> None:
    """Left unread, it would wake the sleeper again and again; overlooked, a peer is never met."""
    a, b = nics
    go_to_sleep(b)
    a.connect(b.address)
    assert wakes(b)
    assert not poll(b)
    go_to_sleep(b)
    assert not wakes(b)


def test_a_ring_ends_a_sleep_once(nics) -> None:
    """A ring that nobody takes back lets no later sleeper sleep."""
    a, b = nics
    row = meet(a, b)
    assert b.arm()
    assert not wakes(b)
    assert 1 == a.post(row, 0, 1)
    assert wakes(b)
    assert [Kind.IMM] == poll(b)
    assert b.arm()
    assert not wakes(b)


def test_an_armed_nic_that_is_polled_before_it_is_rung_sleeps_and_is_rung_again(nics) -> None:
    """A poll before the sleep needs no wake-up; the next sleep must not miss one."""
    a, b = nics
    row = meet(a, b)
    for _ in range(3):
        assert b.arm()
        assert not poll(b)
        assert 1 == a.post(row, 0, 1)
        assert [Kind.IMM] == poll(b)
        assert b.arm()
        assert not wakes(b)
        assert 1 == a.post(row, 0, 1)
        assert wakes(b)
        assert [Kind.IMM] == poll(b)


TURNS = st.lists(
    st.one_of(
        st.tuples(st.just("post"), st.integers(1, 6000)),
        st.tuples(st.just("take"), st.integers(1, 6000)),
        st.tuples(st.just("sleep"), st.just(0)),
    ),
    max_size=12,
)


@settings(max_examples=effort(60, 15))
@given(turns=TURNS)
def test_who_sleeps_for_want_of_room_is_woken_when_there_is_some(turns) -> None:
    """A bell is asked for only where half a ring is taken; missing one would sleep for ever."""
    with mock.patch.object(local, "_SQ_DEPTH", 1 << 16):
        a, b = (open_domains().domains[0] for _ in range(2))
    assert isinstance(a, LocalDomain)
    assert isinstance(b, LocalDomain)
    try:
        row, sent, back, got, armed = meet(a, b), 0, 0, [], False
        out = new_completions(6000)

        def take(most: int) -> int:
            n = b.poll(out[:most])
            got.extend(out["imm"][:n].tolist())
            return n

        def turn() -> None:
            found = out[: a.poll(out)]
            nonlocal back
            back += int(found["count"].sum())

        for what, n in [*turns, ("sleep", 0)]:
            if what == "post":
                imms = np.arange(sent, sent + n, dtype=np.uint32)
                batch = WriteBatch(n, row.peer, row.src, row.lkey, row.dst, row.rkey, 8, imms, 1)
                taken = a.post(batch, 0, n)
                sent, armed = sent + taken, False
            elif what == "take":
                take(n)
            else:
                turn()
                armed = a.arm()
        while take(6000):
            pass
        if armed and back < sent:
            assert wakes(a)
        for _ in range(100):
            turn()
            take(6000)
        assert (sent, list(range(sent))) == (back, got)
    finally:
        a.close()
        b.close()


def one_list(row: WriteBatch, n: int) -> WriteBatch:
    """The same row n times, as a list with one immediate."""
    src = np.full(n, row.src, np.uint64)
    return WriteBatch(n, row.peer, src, row.lkey, row.dst, row.rkey, 8, 7, 1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows of 8 bytes are a helping, twelve are shown without a bell."""
    monkeypatch.setattr(sending, "HELPING_BYTES", 32)
    monkeypatch.setattr(sending, "_UNRUNG_BYTES_MAX", 96)


def test_a_long_list_wakes_a_sleeper_seldom_and_at_its_end(small: None, nics) -> None:
    """Each wake-up takes both sides time; but a peer that is never woken waits for ever."""
    a, b = nics
    batch = one_list(meet(a, b), 40)
    assert b.arm()
    assert 40 == a.post(batch, 0, 40)
    got, unrung = 0, 4
    while got < 40:
        assert wakes(b) == (unrung >= 12 or unrung + got == 40)
        if wakes(b):
            got += unrung
            out = new_completions(16)
            assert unrung == sum(entry[2] for entry in out[: b.poll(out)].tolist())
            assert b.arm()
            unrung = 0
        a.sender.small_helpings()
        assert poll(a) or got == 40
        unrung += 4
    assert not wakes(b)


def test_the_end_of_one_list_rings_although_another_follows(small: None, nics) -> None:
    """Somebody may wait for the first list alone."""
    a, b = nics
    row = meet(a, b)
    assert b.arm()
    assert 6 == a.post(one_list(row, 6), 0, 6)
    assert 40 == a.post(one_list(row, 40), 0, 40)
    assert not wakes(b)
    assert [Kind.WRITE] * 3 == poll(a)  # four rows, then the last two and two of the second list
    assert wakes(b)


def test_helpings_grow_while_there_is_nothing_else_to_do(small: None, nics) -> None:
    """Small ones cost a tenth of a long list's time; large ones keep all else waiting."""
    a, b = nics
    row = meet(a, b)
    back = meet(b, a)
    assert 200 == a.post(one_list(row, 200), 0, 200)

    def helping() -> int:
        out = new_completions(16)
        entries = out[: a.poll(out)].tolist()
        return sum(entry[2] for entry in entries if entry[0] == Kind.WRITE)

    assert [4 + 4, 16, 32, 32] == [helping() for _ in range(4)]  # the first four with the post
    assert 1 == b.post(back, 0, 1)
    assert [32, 4, 16] == [helping() for _ in range(3)]  # an immediate arrives with the first
    assert 1 == a.post(row, 0, 1)
    assert [4, 16] == [helping() for _ in range(2)]


def test_a_row_that_a_helping_cuts_does_not_slow_down_the_rows_behind_it(small: None, nics) -> None:
    """Its rest goes alone, and the list as columns: one row at a time takes three times as long."""
    a, b = nics
    row = one_list(meet(a, b), 200)
    alone, mover = [], a.sender.writes
    move_row = mover.move_row
    mover.move_row = lambda *args: alone.append(args) or move_row(*args)
    batch = WriteBatch(200, row.peer, row.src, row.lkey, row.dst, row.rkey, 6, 7, 1)
    assert 200 == a.post(batch, 0, 200)
    polls = 0
    while a.sender.writes.open:
        poll(a)
        poll(b)
        polls += 1
    assert len(alone) <= 2 * polls + 2


@pytest.mark.parametrize("length", [1000, 100])
def test_a_nic_in_the_middle_of_a_row_says_that_it_has_work(small: None, nics, length) -> None:
    """No completion tells of it, and a driver that takes it for idle sleeps between the parts."""
    a, b = nics
    here, there = adapt(blank(length)), adapt(blank(length))
    lkey = a.register(here, Access.SOURCE).lkey
    target = b.register(there, Access.SOURCE_AND_TARGET)
    row = meet(a, b)
    kicks: list[int] = []
    a.set_waker(lambda: kicks.append(1))
    batch = WriteBatch(1, row.peer, here.ptr, lkey, target.base, target.rkey, length, 7, 1)
    assert 1 == a.post(batch, 0, 1)
    polls = 1
    while not poll(a):
        assert polls == len(kicks)
        polls += 1
    assert polls == len(kicks) + 1 > 1


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("takes", [False, True])
def test_a_peer_that_closes_because_it_has_the_immediate_is_no_failure(shared, takes) -> None:
    """The sender looks for it after the immediate is shown; one that was not taken is lost."""
    a, b = (open_domains().domains[0] for _ in range(2))
    assert isinstance(a, LocalDomain)
    assert isinstance(b, LocalDomain)
    row = meet(a, b, alloc_shared if shared else blank)
    assert 1 == a.post(row, 0, 1)  # from now on the peer's region is known
    assert [Kind.WRITE] == poll(a)
    assert [Kind.IMM] == poll(b)
    look = a._watches.look

    def close_first() -> bool:
        a._watches.look = look
        if takes:
            assert [Kind.IMM] == poll(b)
        b.close()
        return look()

    a._watches.look = close_first
    try:
        assert 1 == a.post(row, 0, 1)
        out = new_completions(16)
        (entry,) = out[: a.poll(out)].tolist()
        assert (Kind.WRITE, Status.OK if takes else Status.UNREACHABLE, 1) == entry[:3]
    finally:
        a.close()
        b.close()


def test_a_peer_that_is_lost_while_nothing_waits_for_it_lets_the_worker_sleep() -> None:
    """The loss was seen only with rows on their way: till then its worker took a whole core."""
    with TransferEngine.open("local", name="idle-a") as a:
        (domain,) = nics_of(a)
        sender = domain.sender
        with TransferEngine.open("local", name="idle-b") as b:  # open, so that it is lost only once
            mr, _ = a.reg_mr(np.zeros(8, np.uint8))
            _, desc = b.reg_mr(np.zeros(8, np.uint8))
            a.submit_single_write(8, (mr, 0), (desc, 0), 1).wait(20)
            (out,) = sender._numbers

            def lose() -> bool:
                sender.active.clear()
                sender.lost.append(out)
                domain.poll(new_completions(8))
                return sender.runnable()

            assert not a.driver.call(lose)
            assert [] == sender.lost

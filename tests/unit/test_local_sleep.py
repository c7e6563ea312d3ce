"""A local NIC looks at its descriptors seldom: no news is lost, and nobody is woken in vain."""

from __future__ import annotations

import select
from collections.abc import Iterator

import numpy as np
import pytest

from tep.backends.base import Access, Kind, WriteBatch, new_completions
from tep.backends.local import LocalDomain, open_domains
from tep.memory import adapt


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
    """Whether who slept on its descriptor would be woken."""
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


def meet(a: LocalDomain, b: LocalDomain) -> WriteBatch:
    """Connect a to b; a row to be written, with immediate 7."""
    here, there = (adapt(np.zeros(64, np.uint8)) for _ in range(2))
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
    """Who turns before it has slept must not be told, nor miss what comes in its next sleep."""
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

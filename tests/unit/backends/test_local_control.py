"""Control messages of the local backend where their socket is full, and where their reader dies."""

from __future__ import annotations

import select
from collections.abc import Iterator
from typing import cast

import pytest

from tep.backends.base import Kind, Status, new_completions
from tep.backends.local import LocalDomain, open_domains
from tep.backends.local.channel import CONTROL_BYTES_MAX

PATIENCE_MS = 30_000


class Nic:
    """A NIC, and what it has handed out."""

    def __init__(self) -> None:
        self.domain = cast("LocalDomain", open_domains().domains[0])
        self.ends: list[Status] = []
        self.controls: list[bytes] = []

    def turn(self) -> None:
        """Poll until there is no news."""
        out = new_completions(16)
        while True:
            n = self.domain.poll(out)
            for kind, status, _, _, _, ctx, _ in out[:n].tolist():
                if kind == Kind.SENT:
                    self.ends.append(Status(status))
                elif kind == Kind.CONTROL:
                    self.controls.append(self.domain.take_control(ctx)[0])
            if not n and self.domain.arm():
                return

    def is_readable(self, within_ms: int) -> bool:
        poller = select.poll()
        poller.register(self.domain.wakeup_fd(), select.POLLIN)
        return bool(poller.poll(within_ms))


@pytest.fixture
def pair() -> Iterator[tuple[Nic, Nic, int]]:
    """Two NICs that have met, and as many control messages under way as there is room for."""
    a, b = Nic(), Nic()
    peer = a.domain.connect(b.domain.address)
    a.turn()
    b.turn()
    a.turn()
    posted = 0
    while a.domain.post_control(peer, posted.to_bytes(CONTROL_BYTES_MAX, "big"), posted):
        posted += 1
        assert posted < 10_000, "a socket without an end"
    a.turn()
    yield a, b, posted
    a.domain.close()
    b.domain.close()


def test_notes_wait_for_room_and_room_wakes(pair) -> None:
    """A peer that was stopped for a while must find every word, and its sender must not spin."""
    a, b, posted = pair
    assert 0 < len(a.ends) < posted
    assert not a.is_readable(0), "it would turn for nothing until the peer goes on"
    while len(b.controls) < posted:
        b.turn()
        assert len(a.ends) == posted or a.is_readable(PATIENCE_MS)
        a.turn()

    assert [Status.OK] * posted == a.ends
    assert list(range(posted)) == [int.from_bytes(note, "big") for note in b.controls]
    a.turn()
    assert not a.is_readable(0), "there is room, and nobody to whom that is news"


def test_notes_that_wait_end_with_their_reader(pair) -> None:
    """A question to the dead is put elsewhere, or given up; it must not stay open."""
    a, b, posted = pair
    b.domain.die()
    while len(a.ends) < posted:  # it calls once more: the reader may only have had no descriptor
        assert a.is_readable(PATIENCE_MS)
        a.turn()

    assert posted == len(a.ends)
    assert Status.UNREACHABLE == a.ends[-1]
    assert a.domain.post_control(a.domain.connect(b.domain.address), b"more", 1)
    a.turn()
    assert Status.UNREACHABLE == a.ends[-1]


def test_a_note_that_is_too_long_is_an_error(pair) -> None:
    """The socket would cut it, and its reader hang up."""
    a, b, _ = pair
    assert a.domain.post_control(
        a.domain.connect(b.domain.address), bytes(CONTROL_BYTES_MAX + 1), 1
    )
    a.turn()
    assert Status.LENGTH == a.ends[-1]

"""Where a local NIC stands at a fence, its peer may do anything: neither loses what the other says.

`tep.backends.local.memory` has the rules. A fence of these NICs does what a test wants done there.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from tep.backends import local
from tep.backends.base import Access, Kind, Status, WriteBatch, new_completions
from tep.backends.local import memory, outbound, port, sender
from tep.backends.local.memory import COPYING, EVENTS
from tep.backends.local.outbound import Way
from tep.memory.source import adapt

NBYTES = 1024
Imms = npt.NDArray[np.uint32] | int | None


class Nic:
    """A NIC with memory, and what is done at its fences, by the function that stands there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: dict[str, Callable[[], object]] = {}
        self.stood: Counter[str] = Counter()
        monkeypatch.setattr(local, "new_fence", lambda: self._stand)
        self.domain = local.open_domains().domains[0]
        self.bytes = np.zeros(NBYTES, np.uint8)
        self.memory = adapt(self.bytes)
        self.out = new_completions(2 * EVENTS)
        self.register()

    def register(self) -> None:
        rights = Access.SOURCE_AND_TARGET | Access.READABLE | Access.SINK
        self.key = self.domain.register(self.memory, rights)

    def _stand(self) -> None:
        name = sys._getframe(1).f_code.co_name
        self.stood[name] += 1
        self.at.pop(name, int)()

    def poll(self) -> list[tuple[int, ...]]:
        return self.out[: self.domain.poll(self.out)].tolist()

    @property
    def words(self) -> memoryview:
        return self.domain.port.words

    @property
    def word(self) -> int:
        """Where the port's table has the key."""
        return port.TABLE + 4 * (self.key.rkey & port.REGIONS - 1)


class Pair:
    """NIC a, which writes to NIC b; they have met, and nothing is under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.a, self.b = self.nics = Nic(monkeypatch), Nic(monkeypatch)
        self.peer = self.a.domain.connect(self.b.domain.address)
        out = self.a.domain.sender.outs[self.peer]
        while out.way is not Way.UP:
            for nic in self.nics:  # whoever was asleep reads its sockets
                nic.domain.arm()
                nic.poll()
        self.lane = out.lane

    def write(self, n: int = 1, nbytes: int = 8, imm: Imms = 7) -> int:
        """Post n rows that are the same, but for their immediates."""
        (a, b), key = (nic.key for nic in self.nics), self.b.key
        src, dst = self.a.memory.ptr, b.base
        batch = WriteBatch(n, self.peer, src, a.lkey, dst, key.rkey, nbytes, imm, 1)
        return self.a.domain.post(batch, 0, n)

    def fill(self) -> None:
        """Write more rows than the ring has room for, while b takes none."""
        sent = 0
        while sent < EVENTS + 10:
            n = EVENTS + 10 - sent
            sent += self.write(n, imm=np.arange(n, dtype=np.uint32))
            self.a.poll()
        for _ in range(3):
            self.a.poll()

    def ended(self) -> int:
        """The status of the one row that was written."""
        while not (found := [entry[1] for entry in self.a.poll() if entry[0] == Kind.WRITE]):
            pass
        (status,) = found
        return status


@pytest.fixture
def pair(monkeypatch):
    found = Pair(monkeypatch)
    yield found
    for nic in found.nics:
        missed = nic.at.copy()
        nic.at.clear()
        nic.domain.close()
        assert not missed, "it stood at no fence there"


def test_who_falls_asleep_sees_what_came_meanwhile(pair):
    """Its peer looks whether it sleeps, and rings only then; nobody would ring again."""
    pair.b.domain.arm()
    pair.b.poll()
    pair.b.at["arm"] = pair.write

    assert not pair.b.domain.arm()
    assert [Kind.IMM] == [entry[0] for entry in pair.b.poll()]


def test_who_falls_asleep_while_it_is_told_something_sees_it(pair):
    """The tail is shown before the look at who sleeps."""
    slept = []
    pair.b.poll()
    pair.a.at["publish"] = lambda: slept.append(pair.b.domain.arm())
    pair.write()

    assert [False] == slept


def test_who_waits_for_room_sees_what_is_taken_meanwhile(pair):
    """The receiver rings whoever has asked before the look, and rings once."""
    pair.fill()
    pair.a.at["runnable"] = pair.b.poll

    assert not pair.a.domain.arm()


def test_who_waits_for_room_is_seen_by_who_takes_meanwhile(pair):
    """It takes, and then looks who waits: whoever asks in between has seen what it took."""
    pair.fill()
    slept = []
    pair.b.at["wanted"] = lambda: slept.append(pair.a.domain.arm())
    pair.b.poll()

    assert [False] == slept


def test_a_key_that_is_withdrawn_before_a_copy_moves_nothing(pair):
    """A copy is announced before the look at its key: the memory is somebody else's by then."""
    pair.a.bytes[:] = 1
    pair.write(imm=None)
    assert Status.OK == pair.ended()
    pair.b.bytes[:] = 0

    def withdraw() -> None:
        assert 1 == pair.lane.words[COPYING]
        pair.b.words[pair.b.word] = 0

    pair.a.at["begin_copy"] = withdraw
    pair.write(imm=None)

    assert Status.REMOTE_KEY == pair.ended()
    assert not pair.b.bytes.any()


def test_who_withdraws_a_key_waits_for_a_copy_that_has_begun(pair, monkeypatch):
    """It looks for copies once the key is gone: one that begins before has seen the key."""
    waited = []

    def begin() -> None:
        assert 0 == pair.b.words[pair.b.word]
        pair.lane.words[COPYING] = 1

    def end(_: float) -> None:
        waited.append(True)
        pair.lane.words[COPYING] = 0

    pair.write(imm=None)
    pair.ended()
    monkeypatch.setattr(port.time, "sleep", end)
    pair.b.at["_await_copies"] = begin
    pair.b.domain.deregister(pair.b.key)

    assert [True] == waited


def test_a_region_is_shown_whole(pair):
    """Its key is written last: who reads the key first, and then the rest, has one region's."""
    word, seen = pair.b.word + 4, []
    pair.b.at["grant"] = lambda: seen.append(pair.b.words[word : word + 3].tolist())
    pair.b.register()
    assert [[0, pair.b.memory.ptr, NBYTES]] == seen
    assert pair.b.key.rkey == pair.b.words[word]

    def another() -> None:
        pair.b.words[word + 1] = 0

    pair.a.at["_find"] = another
    pair.write()
    assert Status.REMOTE_RANGE == pair.ended()


def test_processors_that_order_less_have_fences_where_x86_needs_none(monkeypatch):
    """An entry that is read before its tail, or overwritten while it is read, is another's."""
    for room in (memory, outbound, sender):
        monkeypatch.setattr(room, "STRONG", False)
    monkeypatch.setattr(memory, "order_of", lambda fence: fence)
    pair = Pair(monkeypatch)
    a, b = pair.nics
    b.domain.post_recvs(64, 4)
    found: dict[str, int] = {}

    def count(nic: Nic, deed: Callable[[], object], *names: str) -> None:
        before = nic.stood.copy()
        deed()
        found.update({name: nic.stood[name] - before[name] for name in names})

    count(a, lambda: pair.write(3), "_carry_columns", "publish")
    count(b, b.poll, "take_event")
    count(a, lambda: pair.write(50, imm=np.arange(50, dtype=np.uint32)), "_carry_columns")
    count(b, b.poll, "take_events")
    b.register()
    count(a, pair.write, "_carry_row")  # the key is new to a
    count(a, lambda: pair.lane.room(look=True), "room")
    count(a, lambda: a.domain.post_send(pair.peer, b"text", 1), "fits")
    count(b, b.poll, "next_message", "take_message")
    count(a, a.poll, "take_acks")
    for nic in pair.nics:
        nic.domain.close()

    more = {"publish": 2, "take_event": 3 * 2, "take_events": 2, "take_message": 2}
    assert dict.fromkeys(found, 1) | more == found

"""Processes that are killed, or stopped for a while, in the middle of a paged write; on real wires.

Three processes of two NICs each: `a` writes to `b` without end, and `c` is the one who must not
notice. The word that a failing sender gives is here as well, since both ends of it are processes.
"""

from __future__ import annotations

import itertools
import signal
import time

import pytest

from tep.base.units import KiB
from tests.support.children import NICS, Child, transfer, wait_until
from tests.support.here import require

pytestmark = pytest.mark.slow

TIMEOUT_S = 1.0
"""After which a libfabric peer that does not answer is an error; `local` needs no clock."""

PAUSE_S = 0.02
"""The pause between two good writes: without it they take two cores, and show no more."""

NEVER = 99  # an immediate that nobody sends

PAGE, PAGES = 64 * KiB, 32
STREAM = 1 << 24
"""The immediate of `a`'s first writes to `b`; later ones have later numbers. It is far from the
numbers of single writes; a fast wire makes a thousand of these a second."""


class Three:
    """The processes, and the record of their writes to each other."""

    def __init__(self, provider: str) -> None:
        self.provider = provider
        self.all = a, b, c = Child(), Child(), Child()
        self.a, self.b, self.c = a, b, c
        self.desc: dict[Child, str] = {}
        self._imms = itertools.count(100)
        self._streams = itertools.count(STREAM)
        self.imm = STREAM

    def open(self, *who: Child) -> None:
        for child, name in zip(self.all, "abc", strict=True):
            if child in who:
                nics = NICS[self.provider]
                child.address = child.do(
                    "open", provider=self.provider, nics=nics, name=name, timeout_s=TIMEOUT_S
                )
                self.desc[child] = child.do("reg", nbytes=PAGE * PAGES, seed=ord(name))

    def start_stream(self) -> None:
        """Let `a` write to `b` for good; returns in the middle of it.

        If `b` gets no CPU for TIMEOUT_S before it has answered for the first time, the stream ends
        in an error, rightly. Then it begins again, once, when `b` can be reached.
        """
        if not self._begins():
            wait_until(lambda: "done" == self.try_once(self.a, self.b), "`b` to be reached again")
            assert self._begins(), self.a.do("error", tag="stream")

    def _begins(self) -> bool:
        """Return True if a stream with its own immediate flows; False: it has ended already."""
        self.imm = next(self._streams)
        self.a.do("stream", desc=self.desc[self.b], page_bytes=PAGE, npages=PAGES, imm=self.imm)
        wait_until(lambda: self.a.do("rounds") > 1 or self.a.do("stream_ended"), "the stream")
        return self.a.do("rounds") > 1

    def write(self, source: Child, target: Child) -> tuple[str, str]:
        """One good write and its count: how both ended."""
        desc, imm = self.desc[target], next(self._imms)
        return transfer(source, target, desc, page_bytes=4 * KiB, npages=16, seed=5, imm=imm)

    def write_for(self, seconds: float, source: Child, target: Child) -> None:
        """Make good writes for a while, some tens a second; each has to succeed."""
        start_s = time.monotonic()
        target.do("expect", imm=NEVER, count=1)
        while time.monotonic() - start_s < seconds:
            assert ("done", "done") == self.write(source, target)
            assert "timeout" == target.do("wait", tag=f"imm{NEVER}", timeout_s=PAUSE_S)

    def end_stream(self) -> None:
        """End it well: all that was done was counted, no more and no less."""
        code, rounds = self.a.do("end_stream")
        assert "done" == code, self.a.do("error", tag="stream")
        wait_until(lambda: self.b.do("count", imm=self.imm) >= rounds * PAGES, "the last of them")
        assert rounds * PAGES == self.b.do("count", imm=self.imm)

    def try_once(self, source: Child, target: Child) -> str:
        """One write, over every pair of NICs, to a peer that may or may not be back."""
        desc = self.desc[target]
        source.do(
            "write", tag="try", desc=desc, page_bytes=64, npages=16, seed=5, imm=next(self._imms)
        )
        return source.do("wait", tag="try", timeout_s=4 * TIMEOUT_S)

    def end(self) -> None:
        for child in self.all:
            child.end()


@pytest.fixture(params=["tcp", "local"])
def three(request):
    """Three processes with open engines."""
    if request.param != "local":
        require(request.param)
    found = Three(request.param)
    try:
        found.open(*found.all)
        yield found
    finally:
        found.end()


def test_a_killed_receiver(three):
    """Its senders get an error that says so, and in time; nobody else notices."""
    a, b, c = three.all
    three.start_stream()
    b.signal(signal.SIGKILL)
    assert ("done", "done") == three.write(a, c)
    assert ("done", "done") == three.write(c, a)
    code, rounds = a.do("end_stream", timeout_s=4 * TIMEOUT_S)

    assert code in {"UNREACHABLE", "PROVIDER"}, "it had not ended within the time of its wait"
    why = a.do("error", tag="stream")
    assert "to b NIC" in why, why
    if code == "UNREACHABLE":
        assert "cannot fence a dead path off" in why, "it has another NIC: why was that no help?"
    assert rounds > 1
    a.do("forget_region")  # BusyError, were a row still out


def test_a_killed_sender(three):
    """Its writes are counted, its missing ones reported by name, its target can be used again."""
    a, b, c = three.all
    three.start_stream()
    imm = three.imm
    b.do("expect", imm=imm, count=1 << 40)
    a.signal(signal.SIGKILL)
    assert ("done", "done") == three.write(c, b)
    assert ("done", "done") == three.write(b, c)

    assert "timeout" == b.do("wait", tag=f"imm{imm}", timeout_s=0.1)
    b.do("cancel", tag=f"imm{imm}")
    assert "cancelled" == b.do("wait", tag=f"imm{imm}")
    assert b.do("count", imm=imm) >= PAGES
    b.do("write", tag="back", desc=three.desc[a], page_bytes=PAGE, npages=2, seed=5, imm=2)
    assert b.do("wait", tag="back", timeout_s=4 * TIMEOUT_S) in {"UNREACHABLE", "PROVIDER"}
    b.do("forget_region")  # an error, were the dead one thought to write there still


def test_a_stopped_receiver_and_then_a_stopped_sender(three):
    """A process that sleeps beyond every deadline loses nothing, and holds up nobody else.

    Its senders are late or get an error, as the wire can tell. A sender that slept goes on where it
    was: no row fails for the time that it was away, no immediate is missing or comes twice.
    """
    a, b, c = three.all
    three.start_stream()
    b.signal(signal.SIGSTOP)
    three.write_for(1.2 * TIMEOUT_S, c, a)
    # On tcp its kernel acknowledges, on EFA it has no receive left, some time: the deadline tells.
    if three.provider.startswith(("tcp", "efa", "srd")):
        code, _ = a.do("end_stream", timeout_s=20 * TIMEOUT_S, by_itself=True)
        assert "UNREACHABLE" == code
        b.signal(signal.SIGCONT)
        wait_until(lambda: "done" == three.try_once(a, b), "the revived peer to be reached")
    else:
        b.signal(signal.SIGCONT)
        three.end_stream()

    three.start_stream()
    a.signal(signal.SIGSTOP)
    three.write_for(1.2 * TIMEOUT_S, c, b)
    a.signal(signal.SIGCONT)
    before = a.do("rounds")
    wait_until(lambda: a.do("rounds") > before, "the stream to flow again")
    three.end_stream()
    assert ("done", "done") == three.write(c, b)
    assert ("done", "done") == three.write(b, a)


def test_the_word_that_it_failed(three):
    """Whoever waits for a sender that gives up must hear it, in its words, and not wait on."""
    a, b, c = three.all
    b.do("expect", imm=7, count=99)
    b.do("expect", imm=8, count=16)
    big = {"desc": three.desc[b], "page_bytes": 64, "npages": 16, "seed": 5}
    a.do("write", tag="w", imm=7, **big)
    assert "done" == a.do("wait", tag="w")
    wait_until(lambda: b.do("count", imm=7) == 16, "what the sender had written")
    a.do("cancelled", tag="gone", imm=7, **big)
    assert "PEER_FAILED" == b.do("wait", tag="imm7")
    assert "a (epoch" in b.do("error", tag="imm7")
    assert "gave it up: it was cancelled; " in b.do("error", tag="imm7")
    assert "BurntImm" == a.ask("write", tag="late", imm=7, **big)["error"]

    c.signal(signal.SIGKILL)  # nobody is there to be told, and nobody waits for that
    a.do("cancelled", tag="gone", imm=7, **(big | {"desc": three.desc[c]}))
    a.do("write", tag="w", imm=8, **big)
    assert "done" == b.do("wait", tag="imm8")

"""Watches and removals between processes that are killed, stopped and started again.

The engines do it all: the application over there waits for its next line, and has no part in it.
"""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.children import NICS, Child, wait_until
from tests.support.here import require

pytestmark = pytest.mark.slow

EVERY_S, LOST_S = 0.05, 0.8
WRITE = {"page_bytes": 4096, "npages": 4, "seed": 5, "imm": 7}
NEVER = 99  # an immediate that nobody sends


class Nodes:
    """Processes by name, each with an engine of two NICs and a region."""

    def __init__(self, provider: str) -> None:
        self.provider = provider
        self.all: list[Child] = []

    def start(self, name: str, nics: object = None) -> Child:
        child = Child()
        self.all.append(child)
        nics = nics or NICS[self.provider]
        child.address = child.do(
            "open", provider=self.provider, nics=nics, name=name, timeout_s=LOST_S
        )
        child.desc = child.do("reg", nbytes=1 << 20, seed=5)
        return child

    def end(self) -> None:
        for child in self.all:
            child.end()


@pytest.fixture
def nodes(request):
    if request.param != "local":  # which needs no library
        require(request.param)
    found = Nodes(request.param)
    try:
        yield found
    finally:
        found.end()


def pass_time(child: Child, seconds: float) -> None:
    """Wait over there for what does not come."""
    child.do("expect", imm=NEVER, count=1)
    assert "timeout" == child.do("wait", tag=f"imm{NEVER}", timeout_s=seconds)


def beats(a: Child, name: str, count: int) -> None:
    """Wait until a peer was asked so many times more."""
    first, _ = a.do("beats", name=name)
    wait_until(
        lambda: a.do("beats", name=name)[0] >= first + count, f"{count} heartbeats of {name}"
    )


def told(a: Child, name: str, *changes: str) -> None:
    """Wait for the last of these changes; they have to be all there were."""
    wait_until(lambda: changes[-1:] == tuple(a.do("told", peer=name)[-1:]), f"{name}: {changes}")
    assert list(changes) == a.do("told", peer=name)


def write(source: Child, target: Child) -> tuple[str, str]:
    """One write and its count: how both ended."""
    target.do("expect", imm=WRITE["imm"], count=WRITE["npages"])
    source.do("write", tag="w", desc=target.desc, **WRITE)
    return source.do("wait", tag="w"), target.do("wait", tag=f"imm{WRITE['imm']}")


@pytest.mark.parametrize("nodes", ["tcp", "local"], indirect=True)
def test_watched_peers_that_are_stopped_killed_and_started_again(nodes):
    """Whoever waits for the dead must hear it in time, and nobody be buried alive."""
    a, b, c = map(nodes.start, "abc")
    a.do("watch", addresses=[b.address, c.address], every_s=EVERY_S, lost_after_s=LOST_S)
    wait_until(lambda: all(a.do("beats", name=name)[1] for name in "bc"), "the first answers")
    a.do("expect", imm=1, count=1, sender=b.address)
    a.do("expect", imm=2, count=1, sender=c.address)
    turns, (asked, _) = b.do("spent")[0], a.do("beats", name="b")
    beats(a, "b", 8)
    if nodes.provider in {"tcp", "local"}:  # the others have to look for news by themselves
        turns, asked = b.do("spent")[0] - turns, a.do("beats", name="b")[0] - asked
        assert turns <= 40 * asked, f"{turns} turns of an idle engine for {asked} heartbeats"

    a.signal(signal.SIGSTOP)
    pass_time(b, 1.25 * LOST_S)
    a.signal(signal.SIGCONT)
    beats(a, "b", 4)
    assert [] == a.do("told", peer="b") + a.do("told", peer="c"), "it was held up itself"

    ports = c.do("ports") if nodes.provider == "tcp" else None
    start_s = time.monotonic()  # before: on a busy machine they may be lost by the next line
    b.signal(signal.SIGSTOP)
    c.signal(signal.SIGKILL)
    for imm, name in ((1, "b"), (2, "c")):
        assert "PEER_LOST" == a.do("wait", tag=f"imm{imm}")
        assert f"its sender {name} was lost: no answer for" in a.do("error", tag=f"imm{imm}")
    assert time.monotonic() - start_s >= LOST_S - 3 * EVERY_S
    b.signal(signal.SIGCONT)
    told(a, "b", "LOST", "BACK")

    reborn = nodes.start("c", ports)
    if ports is None:  # it is elsewhere: somebody has to say so
        a.do("meet", address=reborn.address)
    told(a, "c", "LOST", "RESTARTED")
    told(a, "b", "LOST", "BACK")
    a.do("remove", address=b.address)
    assert ("done", "done") == write(b, a), "who was removed is met again"


@pytest.mark.parametrize("nodes", ["tcp", "local"], indirect=True)
def test_a_removal_says_that_these_nics_cannot_fence(nodes):
    """Memory that is called free under a writer changes in its next user's hands."""
    a, b = map(nodes.start, "ab")
    assert ("done", "done") == write(b, a)
    assert "cannot fence a path off" in a.do("remove", address=b.address)
    assert ("done", "done") == write(b, a), "nothing keeps it out"
    b.signal(signal.SIGKILL)
    assert "cannot fence a path off" in a.do("remove", address=b.address)
    a.do("forget_region")  # which takes the memory back from everybody

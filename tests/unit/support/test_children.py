"""Children that are forked: to a test they are like processes that were started."""

from __future__ import annotations

import signal
from pathlib import Path

import tep
from tests.support.children import Child


def test_a_child_ends_well_or_tells_how_it_died():
    """A crash of the engine's C code must not look like an end."""
    ended, killed = Child(), Child()
    assert ended.wait(0) is None
    ended.end()
    killed.signal(signal.SIGKILL)
    killed.end()

    assert (0, -signal.SIGKILL) == (ended.wait(), killed.wait())


def test_a_child_that_is_stopped_has_stopped():
    """A test that goes on too early would see the answers of a peer that it believes silent."""
    child = Child()
    child.signal(signal.SIGSTOP)
    state = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]
    child.end()

    assert "T" == state


def test_each_child_has_its_memory_at_a_place_of_its_own():
    """A write to the sender's own address in place of the target's would go unnoticed."""
    children = [Child() for _ in range(6)]
    for child in children:
        child.do("open", provider="local", nics=1, name="a")
    descs = [bytes.fromhex(child.do("reg", nbytes=4096)) for child in children]
    for child in children:
        child.end()
    places = {tep.MrDesc.from_bytes(desc).bases for desc in descs}

    assert len(children) == len(places)

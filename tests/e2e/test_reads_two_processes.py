"""Reads between two processes: every byte, the immediate to the owner, and an owner that dies.

What the backend `efa` does is in test_efa_faults.py; Soft-RoCE's reads are in tests/verbs.
"""

from __future__ import annotations

import signal

import pytest

from tests.support.children import NICS, Child
from tests.support.here import require

pytestmark = pytest.mark.slow  # processes

PROVIDERS = ["local", "tcp"]
PAGE, PAGES, SEED = 4096, 2048, 11
IMM = 77


class Pair:
    """An owner of readable memory and a reader, a process each."""

    def __init__(self, provider: str) -> None:
        self.owner, self.reader = Child(), Child()
        for child, name in ((self.owner, "owner"), (self.reader, "reader")):
            child.do("open", provider=provider, nics=NICS[provider], name=name)

    def share(self, nbytes: int) -> str:
        desc = self.owner.do("reg", nbytes=nbytes, seed=SEED, access="READABLE")
        self.reader.do("reg", nbytes=nbytes, access="SINK")
        assert isinstance(desc, str)
        return desc

    def end(self) -> None:
        self.owner.end()
        self.reader.end()


@pytest.fixture(params=PROVIDERS)
def pair(request):
    if request.param != "local":
        require(request.param)
    found = Pair(request.param)
    yield found
    found.end()


@pytest.mark.parametrize(("page", "pages"), [(PAGE, PAGES), (512, 3000), (3 << 20, 3)])
def test_every_byte_comes_and_the_owner_is_told_once(pair, page, pages):
    """Small pages, usual ones, and rows that are longer than what a backend moves in one go."""
    desc = pair.share(page * pages)
    pair.owner.do("expect", imm=IMM, count=1)
    read = {"desc": desc, "page_bytes": page, "npages": pages, "seed": SEED}
    pair.reader.do("read", tag="r", imm=IMM, **read)

    assert "done" == pair.reader.do("wait", tag="r")
    assert pair.reader.do("check", page_bytes=page, npages=pages, seed=SEED)
    assert "done" == pair.owner.do("wait", tag=f"imm{IMM}")


def test_reads_of_a_killed_owner_fail(pair):
    """In the middle of a long read, and afterwards: an error, in time, and asleep until then.

    On tcp the engine offered the rest of a read again and again, for a core: 20,000 turns.
    """
    desc = pair.share(PAGE * PAGES)
    read = {"page_bytes": PAGE, "npages": PAGES, "seed": SEED}
    pair.reader.do("read", tag="first", desc=desc, **read)
    assert "done" == pair.reader.do("wait", tag="first")
    pair.owner.signal(signal.SIGSTOP)
    pair.reader.do("read", tag="middle", desc=desc, **read)
    pair.owner.signal(signal.SIGKILL)
    pair.reader.do("read", tag="after", desc=desc, **read)

    before, _ = pair.reader.do("spent")
    middle, after = (pair.reader.do("wait", tag=t, timeout_s=60) for t in ("middle", "after"))
    turns = pair.reader.do("spent")[0] - before
    assert middle not in {"timeout", "cancelled"}
    assert after not in {"done", "timeout", "cancelled"}
    assert turns < 5000


def test_memory_that_was_taken_back_is_read_no_more(pair):
    """The owner deregisters: a later read is an error that says so."""
    desc = pair.share(PAGE * PAGES)
    read = {"page_bytes": PAGE, "npages": PAGES, "seed": SEED}
    pair.reader.do("read", tag="first", desc=desc, **read)
    assert "done" == pair.reader.do("wait", tag="first")
    pair.owner.do("forget_region")
    pair.reader.do("read", tag="late", desc=desc, **read)

    assert "REMOTE_KEY" == pair.reader.do("wait", tag="late")

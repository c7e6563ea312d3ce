"""The backend `efa` under each fault of the fake device: what ends how, what is counted.

Two processes; `a` writes rows with immediates to `b`, transfer after transfer. What the device says
that has landed has to be counted, no more and no less; each transfer ends, and once the fault is
over all is as before. 40,000 rows for each fault, or a million in `scripts/test --long`.
"""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from tests.support.children import Child, wait_until
from tests.support.fake_efa import fabric
from tests.support.here import need_fake_efa

pytestmark = pytest.mark.slow  # a compiler, processes

PAGES = 2000
TRANSFERS = 500 if os.environ.get("TEP_LONG") else 20
TIMEOUT_S = 1.0
IMM = 7


class Two:
    """Two processes on two hosts, and how their transfers ended."""

    def __init__(self, run, nics=1, timeout_s=TIMEOUT_S):
        self.run, self.nics, self.timeout_s = run, nics, timeout_s
        self.ended = {}
        self.a, self.b = self.start(0), self.start(1)
        self.desc = self.target(self.b)
        self.a.do("reg", nbytes=8 * PAGES, seed=5)

    def start(self, host):
        child = Child(self.run.environment(host))
        name = "ab"[host]
        how = {"provider": "srd", "nics": self.nics, "timeout_s": self.timeout_s}
        child.do("open", name=name, **how)
        return child

    def target(self, child):
        # All that lands is counted, also of transfers that failed.
        child.do("claim", imm=IMM)
        return child.do("reg", nbytes=8 * PAGES)

    def write(self, desc=None, npages=PAGES):
        """One transfer: how it ended."""
        desc = desc or self.desc
        how = {"page_bytes": 8, "npages": npages, "seed": 5, "imm": IMM}
        self.a.do("write", tag="w", desc=desc, **how)
        code = self.a.do("wait", tag="w", timeout_s=20)
        self.ended[code] = self.ended.get(code, 0) + 1
        if code != "done":  # it is burnt, and used again here: nobody takes it for another's
            self.a.do("remove_imm", imm=IMM)
        return code

    def landed(self):
        total = self.run.total()
        return total["imms_landed"] - total["overruns"]

    def all_is_counted(self):
        """Check that each immediate is counted once; other rows of a failed transfer still land."""
        wait_until(
            lambda: self.b.do("count", imm=IMM) == self.landed(), "a count of what has landed"
        )

    def all_is_well(self):
        """Check that all is as without faults: bytes, counts, and nothing that is kept for ever."""
        self.is_as_before()
        self.a.do("forget_region")  # BusyError, were a row still out

    def is_as_before(self):
        """Bytes and counts of what is written now are right."""
        wait_until(lambda: "done" == self.write(), "a transfer that succeeds")
        self.b.do("clear")
        assert ["done"] * 3 == [self.write() for _ in range(3)]
        assert self.b.do("check", page_bytes=8, npages=PAGES, seed=5)
        self.all_is_counted()
        assert 0 == self.run.total()["malformed"]

    def end(self):
        for child in (self.a, self.b):
            child.end()


@pytest.fixture
def two():
    """A function that starts two processes with so many NICs on a device with some settings.

    `patience_s` is the timeout of a peer where no fault makes one silent.
    """
    need_fake_efa()
    with contextlib.ExitStack() as stack:

        def start(nics=1, patience_s=TIMEOUT_S, **settings):
            run = stack.enter_context(fabric({"nics": nics, "seed": 11, **settings}))
            pair = Two(run, nics, patience_s)
            stack.callback(pair.end)
            assert "done" == pair.write()
            return pair

        yield start


ROW_FAULTS = {
    "fail op=imm status=14 p=0.0005": {"done", "UNREACHABLE"},  # UNKNOWN_PEER
    "fail op=imm status=7 p=0.0005": {"done", "REMOTE_KEY"},  # BAD_ADDRESS
    "fail op=imm status=2 p=0.0005": {"done", "PROVIDER"},  # QP_INTERNAL
    "fail op=imm status=10 p=0.0005": {"done", "RNR"},
    "lose_ack op=imm p=0.0005": {"done", "UNREACHABLE"},
    "drop op=imm p=0.0005": {"done"},
    "drop op=send p=0.2": {"done"},
    "rnr p=0.02": {"done"},
    "slow us=300 p=0.005": {"done"},
}


def test_rows_that_fail_fail_alone(two):
    """Each row that the device refuses ends its transfer by its own code; none is counted twice.

    One fault after the other between the same two processes, which have to be well after each.
    """
    pair = two()
    for fault, codes in ROW_FAULTS.items():
        pair.ended.clear()
        pair.run.fault(fault)
        for _ in range(TRANSFERS):
            pair.write()
        pair.run.clear()

        assert codes == pair.ended.keys(), fault
        pair.all_is_counted()
        pair.is_as_before()
    pair.a.do("forget_region")  # BusyError, were a row still out


READ_FAULTS = {
    "fail op=read status=7 p=0.0005": {"done", "REMOTE_KEY"},
    "fail op=read status=14 p=0.0005": {"done", "UNREACHABLE"},
    "slow us=300 p=0.005": {"done"},
}


def test_reads_that_fail_fail_alone(two):
    """A failed read must not fail others, like a write; the pages that came are the owner's."""
    pair = two()
    pair.desc = pair.b.do("reg", nbytes=8 * PAGES, seed=9, access="READABLE")

    def read():
        pair.a.do("clear")
        pair.a.do("read", tag="r", desc=pair.desc, page_bytes=8, npages=PAGES, seed=9)
        code = pair.a.do("wait", tag="r")
        if code == "done":
            assert pair.a.do("check", page_bytes=8, npages=PAGES, seed=9)
        return code

    assert "done" == read()
    for fault, codes in READ_FAULTS.items():
        pair.run.fault(fault)
        ended = {read() for _ in range(TRANSFERS)}
        pair.run.clear()
        wait_until(lambda: "done" == read(), "a read that succeeds")
        assert codes == ended | {"done"}, fault

    assert PAGES <= pair.run.total()["reads"]
    assert 0 == pair.run.total()["malformed"]
    pair.a.do("forget_region")


def test_reads_of_a_killed_owner_end(two):
    """Whoever pulls from the dead must hear of it, in time, and get the memory back."""
    pair = two()
    pair.desc = pair.b.do("reg", nbytes=8 * PAGES, seed=9, access="READABLE")
    pair.run.fault("slow us=200 host=0")
    pair.a.do("read", tag="r", desc=pair.desc, page_bytes=8, npages=PAGES, seed=9)
    pair.b.signal(signal.SIGKILL)
    assert "UNREACHABLE" == pair.a.do("wait", tag="r")
    pair.a.do("forget_region")


def test_a_mute_peer(two):
    """Rows to it fail in time; it is written to again as soon as it answers."""
    pair = two()
    pair.run.fault("mute host=1")
    assert "UNREACHABLE" == pair.write()
    pair.run.clear()
    pair.all_is_well()


def test_a_peer_that_restarts_at_the_same_address(two):
    """Rows meant for the dead must not reach its successor, which has its queue pair's number."""
    pair = two()
    pair.a.do("stream", desc=pair.desc, page_bytes=8, npages=PAGES, imm=IMM)
    wait_until(lambda: pair.a.do("rounds") > 1, "the stream to flow")
    old = pair.b
    nics = old.do("nics")
    old.signal(signal.SIGKILL)
    old.end()
    pair.b = pair.start(1)
    before, pair.desc = pair.desc, pair.target(pair.b)
    assert [raw[:40] for _, raw in nics] == [raw[:40] for _, raw in pair.b.do("nics")]
    code, _ = pair.a.do("end_stream")
    assert "UNREACHABLE" == code
    pair.a.do("remove_imm", imm=IMM)

    landed = pair.landed()
    assert "done" == pair.write()
    how = {"page_bytes": 8, "npages": PAGES, "seed": 5, "imm": IMM}
    assert "StaleEpoch" == pair.a.ask("write", tag="old", desc=before, **how)["error"]
    wait_until(lambda: pair.b.do("count", imm=IMM) >= PAGES, "the new one's immediates")
    assert PAGES == pair.b.do("count", imm=IMM)
    assert landed + PAGES == pair.landed()
    pair.a.do("forget_region")


def test_a_device_that_disappears_under_the_sender(two):
    """Rows that it had end as NIC_DOWN; the other NIC carries what comes next."""
    pair = two(nics=2)
    pair.run.fault("slow host=0 nic=1 us=2000")
    how = {"page_bytes": 8, "npages": PAGES, "seed": 5, "imm": IMM}
    pair.a.do("write", tag="late", desc=pair.desc, **how)
    pair.run.fault("gone host=0 nic=1")
    assert "NIC_DOWN" == pair.a.do("wait", tag="late")
    assert "the device is gone" in pair.a.do("error", tag="late")
    pair.a.do("remove_imm", imm=IMM)
    assert ["done"] * 3 == [pair.write() for _ in range(3)]
    pair.all_is_counted()
    assert pair.a.do("rows")[0] >= 3 * PAGES


def test_a_device_that_disappears_under_the_target(two):
    """Waits at the target must end with the error, and writers must get theirs in time."""
    pair = two(nics=2)
    pair.run.fault("gone host=1 nic=1")
    assert pair.write() in {"UNREACHABLE", "done"}
    wait_until(lambda: "done" == pair.write(), "the NIC that is left to be used alone", 30)
    pair.all_is_counted()


@pytest.mark.parametrize("queues", [{"sq": 128, "rq": 64, "cqe": 256}, {"sq": 4096, "cqe": 600}])
def test_short_queues(two, queues):
    """Queues of the smallest useful size: they are full all the time, and turn over and over."""
    pair = two(patience_s=10.0, **queues)
    for _ in range(TRANSFERS):
        assert "done" == pair.write()
    pair.all_is_well()


def test_queues_that_are_too_short_are_refused():
    """With no room behind the messages no row would ever leave."""
    need_fake_efa()
    with fabric({"nics": 1, "sq": 100}) as run:
        child = Child(run.environment())
        try:
            said = child.ask("open", provider="srd", nics=1, name="a")
        finally:
            child.end()

    assert "BackendUnavailable" == said["error"]
    assert "its queues hold 100 requests; 64 are for messages" in said["text"]

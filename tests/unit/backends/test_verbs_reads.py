"""Reads of the verbs backend on the stub: chains, what devices can, and what they take in part."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from tep.backends.base import Access, Kind, ReadBatch, Status
from tep.backends.verbs import open_domains
from tep.base.errors import UsageError
from tep.memory.source import adapt
from tests.support.verbs_stub import Knob
from tests.unit.backends.test_verbs_depths import PAGE, Pair


class Reader(Pair):
    """NIC a reads pages of NIC b."""

    def __init__(self, stub, **options):
        super().__init__(stub, **options)
        self.pages = np.random.default_rng(1).integers(0, 256, 1 << 16).astype(np.uint8)
        self.readable = self.b.register(adapt(self.pages), Access.READABLE)

    def read(self, n, ctx=1):
        """Read pages 0 to n, each to its own place; return how many were taken."""
        at = np.arange(n, dtype=np.uint64) * np.uint64(PAGE)
        here, there = self.keys["a"], self.readable
        local, remote = at + np.uint64(here.base), at + np.uint64(there.base)
        batch = ReadBatch(n, 0, local, here.lkey, remote, there.rkey, PAGE, None, ctx)
        return self.a.post_read(batch, 0, n)

    def ended_rows(self):
        """Count the reads that have ended, by status."""
        found = {}
        for _, status, count, *_ in self.ended("a", Kind.READ):
            found[Status(status)] = found.get(Status(status), 0) + count
        return found


def test_a_batch_of_reads_is_one_chain(stub):
    """A call of the provider for each page would cost more than the page."""
    pair = Reader(stub)
    before = stub.posts()
    assert 100 == pair.read(100)
    posts = stub.posts() - before
    pair.until(lambda: sum(pair.ended_rows().values()) == 100)
    pair.close()

    assert 1 == posts
    assert {Status.OK: 100} == pair.ended_rows()
    assert np.array_equal(pair.pages[: 100 * PAGE], pair.memory["a"][: 100 * PAGE])


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EINVAL])
@pytest.mark.parametrize("taken", [0, 1, 37])
def test_a_chain_that_is_taken_in_part_ends_each_row_once(stub, taken, code):
    """Rows that were left out are posted again or failed; those before them are flushed."""
    pair = Reader(stub)
    stub.set(Knob.FAIL_AFTER, taken)
    stub.set(Knob.FAIL_POST, code)
    assert 60 == pair.read(60)
    pair.until(lambda: sum(pair.ended_rows().values()) == 60)
    errors = [row for _, status, _, _, row, *_ in pair.ended("a", Kind.READ) if status]
    pair.close()

    refused = [taken] if code == errno.EINVAL else []
    assert {*refused, *range(taken)} >= set(errors) >= {*refused}
    assert 60 - len(errors) == pair.ended_rows()[Status.OK]
    for row in set(range(60)) - set(errors):
        part = slice(row * PAGE, row * PAGE + PAGE)
        assert np.array_equal(pair.pages[part], pair.memory["a"][part])


def test_a_device_without_reads_says_why(stub):
    """Virtual functions may be denied reads: then the engine has to know, before a row fails."""
    stub.set(Knob.NO_READS, 1)
    nic = open_domains(["stub0"], library=stub.path).domains[0]
    stub.set(Knob.NO_READS, 0)
    nic.close()

    assert 0 == nic.caps.reads
    assert "stub0 cannot read: its max_qp_init_rd_atom is 0" in nic.caps.no_reads


def test_a_peer_whose_device_answers_no_reads_fails_them_in_words(stub):
    """A queue pair that asks such a peer would fail, with all rows that are on it."""
    nic = open_domains(["stub0"], name="c", library=stub.path).domains[0]
    stub.set(Knob.NO_READS, 1)
    pair = Reader(stub)
    stub.set(Knob.NO_READS, 0)
    pair.a.close()
    pair.a = pair.nics["a"] = nic
    pair.keys["a"] = nic.register(adapt(pair.memory["a"]), Access.SOURCE_AND_TARGET)
    pair.a.connect(pair.b.address)
    for _ in range(2):  # before there is a connection, and with one
        assert 3 == pair.read(3)
        pair.until(lambda: sum(pair.ended_rows().values()) == 3)
        assert {Status.PROVIDER: 3} == pair.ended_rows()
        pair.seen["a"].clear()
    assert 1 == pair.write("a", "b", 1, imm=5)
    pair.until(lambda: pair.ended("a") and pair.ended("b", Kind.IMM))
    text = nic.status_text(Status.PROVIDER)
    pair.close()

    assert "the peer's device answers no reads" in text


def test_reads_that_nobody_wants_leave_their_room_to_rows(stub):
    """The longest queue that a user names has no room for reads, and says so."""
    for options, reads, why in (
        ({"reads": 0}, 0, "it was opened with reads=0"),
        ({"sq_depth": 32768}, 0, "sq_depth=32768 leaves no room for them"),
        ({"sq_depth": 100, "reads": 7}, 7, ""),
        ({}, 128, ""),
    ):
        nic = open_domains(["stub0"], library=stub.path, **options).domains[0]
        nic.close()
        assert reads == nic.caps.reads
        assert why in nic.caps.no_reads
    with pytest.raises(UsageError, match=r"sq_depth=32668 reads=101 is more than stub0 can do"):
        open_domains(["stub0"], library=stub.path, sq_depth=32668, reads=101)

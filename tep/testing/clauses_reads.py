"""C29 to C33, optional: reads bring the owner's bytes, to where they belong, and then they end.

A backend without reads (`caps.reads` 0) is skipped, and has to say why it has none.
"""

from __future__ import annotations

from collections import Counter
from typing import cast

import numpy as np
import pytest

from tep.backends.base import Access, ControlDomain, Kind, ReadBatch, Status
from tep.testing.clauses_rows import ODD_LENGTHS
from tep.testing.world import Ability, Buffer, Net, Side

__all__ = ["ReadsContract"]

_REFUSED = {Status.REMOTE_KEY, Status.REMOTE_RANGE}
_OPEN_ENDED = {Status.NIC_DOWN, Status.GIVEN_UP}
_FENCE_CTX = 2**40


def _reading(net: Net, nics: int = 1, nbytes: int = 65536) -> tuple[Side, Side, Buffer]:
    """A reader, an owner, and the owner's memory; skip a backend without reads."""
    a, b = net.pair(nics, nbytes)
    caps = a.domains[0].caps
    if not caps.reads:
        assert caps.no_reads, "C29: where there are no reads, the backend says why"
        pytest.skip(f"this backend has no reads: {caps.no_reads}")
    return a, b, b.readable(nbytes)


def _finish(net: Net, a: Side, batch: ReadBatch, nic: int = 0) -> Counter[Status]:
    """Post all rows, and wait until nothing more comes; how they ended."""
    net.write(batch, a, nic)
    ended = a.rows_ended(batch.ctx)
    assert batch.n == ended.total()
    return ended


def _check_bad_read(net: Net, a: Side, b: Side, memory: Buffer, bad: ReadBatch) -> None:
    """A bad row of one is blamed, beside good rows of another batch; then good ones work."""
    size = len(memory.data)
    at = [64 * k for k in range(3)]
    good = a.read(b, memory, local=at, remote=at)
    a.post(good)
    a.post(bad)
    net.settle()
    errors = [seen for seen in a.errors() if seen.ctx == bad.ctx]

    assert [(Kind.READ, 0, 1)] == [(error.kind, error.row, error.count) for error in errors]
    assert errors[0].status in _REFUSED, f"C31: {Status(errors[0].status).name} says too little"
    assert set(a.rows_ended(good.ctx)) <= {Status.OK, Status.FLUSHED}
    assert a.untouched(192), "C31: a refused read brings nothing that peers may not read"
    again = a.read(b, memory, local=at, remote=[size - 64 * (k + 1) for k in range(3)])
    assert {Status.OK: 3} == _finish(net, a, again), "the way to the peer has to be made anew"


class ReadsContract:
    """Clauses on reads."""

    def test_c29_reads_bring_the_bytes(self, net: Net) -> None:
        """Each row brings its own page, and the owner learns nothing and keeps its bytes."""
        a, b, memory = _reading(net)
        before = memory.data.copy()
        n = 60
        at = [64 * k for k in range(n)]
        for remote in (at, at[::-1], 640):
            a.target.data[:] = 0
            batch = a.read(b, memory, local=at, remote=remote)
            assert {Status.OK: n} == _finish(net, a, batch)
            starts = [remote] * n if isinstance(remote, int) else remote
            rows = np.concatenate([before[start : start + 64] for start in starts])
            assert np.array_equal(rows, a.target.data[: 64 * n])

        assert [] == b.seen, "C29: the owner's engine notices nothing"
        assert np.array_equal(before, memory.data)
        assert a.target.guards_hold()

    def test_c29_columns_may_be_scalars_or_arrays(self, net: Net) -> None:
        """A scalar must hold for every row, like for writes, in a batch of few or of many."""
        a, b, memory = _reading(net)
        for n in (1, 3, 50):
            at = [64 * k for k in range(n)]
            for nbytes in (64, [64] * n):
                batch = a.read(b, memory, local=at, remote=at, nbytes=nbytes)
                a.target.data[:] = 0
                assert {Status.OK: n} == _finish(net, a, batch)
                assert np.array_equal(memory.data[: 64 * n], a.target.data[: 64 * n])
        batch = a.read(b, memory, local=4096, remote=at)  # all rows meet in the same bytes
        assert {Status.OK: 50} == _finish(net, a, batch)
        rows = memory.data[: 64 * 50].reshape(50, 64)
        assert (rows == a.target.data[4096:4160]).any(axis=0).all()

    def test_c29_a_row_is_new_enough(self, net: Net) -> None:
        """A read that is posted after a change brings the change, not a cached page."""
        a, b, memory = _reading(net)
        for value in (1, 2, 3):
            memory.data[:4096] = value
            assert {Status.OK: 1} == _finish(net, a, a.read(b, memory, nbytes=4096))
            assert (a.target.data[:4096] == value).all()

    def test_c29_every_nic_reads_from_every_nic(self, net: Net) -> None:
        """A row's keys must belong to its two NICs, in both directions."""
        a, b, memory = _reading(net, nics=2)
        for nic in range(2):
            for far in range(2):
                at = 256 * (2 * nic + far)
                batch = a.read(b, memory, local=at, remote=at, nbytes=256, nic=nic, far=far)
                assert {Status.OK: 1} == _finish(net, a, batch, nic)

        assert np.array_equal(memory.data[:1024], a.target.data[:1024])

    def test_c29_a_full_queue_takes_a_prefix(self, net: Net) -> None:
        """Rows that did not fit are offered again; no more than caps.reads are ever out."""
        a, b, _ = _reading(net)
        limit = a.domains[0].caps.reads
        n = min(3 * limit + 1, 6000)
        into = a.buffer(8 * n)
        source = b.readable(8 * n)
        at = [8 * k for k in range(n)]
        batch = a.read(b, source, local=at, remote=at, nbytes=8, into=into)

        def offer() -> bool:
            before = a.accepted[batch.ctx]
            whole = [a.offer(batch) for _ in range(3)]  # no time passes between these
            taken = a.accepted[batch.ctx] - before
            assert taken <= limit, f"C29: {taken} reads, caps.reads={limit}"
            return whole[-1]

        net.until(offer, f"post_read() to take all {n} rows")
        net.settle()
        assert {Status.OK: n} == a.rows_ended(batch.ctx)
        assert np.array_equal(source.data, into.data)

    def test_c29_reads_and_writes_share_a_nic(self, net: Net) -> None:
        """Neither is counted as the other, and neither stops the other."""
        a, b, memory = _reading(net)
        into = a.buffer(65536)
        at = [64 * k for k in range(40)]
        for turn in range(6):
            a.post(a.read(b, memory, local=at, remote=at, into=into))
            a.post(a.batch(b, src=at, dst=at, imm=turn))
            b.post(b.batch(a, src=at, dst=[8192 + k for k in at], imm=turn))
        net.settle()

        assert [] == a.errors() + b.errors()
        assert dict.fromkeys(range(6), 40) == b.imms() == a.imms()
        assert np.array_equal(memory.data[:2560], into.data[:2560])
        assert np.array_equal(a.source.data[:2560], b.target.data[:2560])

    def test_c29_empty_reads_complete(self, net: Net) -> None:
        """A list of pieces may hold an empty one; it has to come back like any other."""
        a, b, memory = _reading(net)
        batch = a.read(b, memory, local=[0, 64, 128], nbytes=[0, 64, 0])

        assert {Status.OK: 3} == _finish(net, a, batch)
        assert a.untouched(0, 64)
        assert np.array_equal(memory.data[:64], a.target.data[64:128])
        assert a.untouched(128)

    def test_c30_only_the_rows_bytes_change(self, net: Net) -> None:
        """One byte too many is somebody else's page, here as there."""
        a, b, memory = _reading(net)
        expected = a.target.data.copy()
        local, remote, at = [], [], 1
        for k, nbytes in enumerate(ODD_LENGTHS):
            remote.append(3 * k + 1)
            local.append(at)
            expected[at : at + nbytes] = memory.data[remote[-1] : remote[-1] + nbytes]
            at += nbytes + 1 + k % 3
        batch = a.read(b, memory, local=local, remote=remote, nbytes=list(ODD_LENGTHS))

        assert {Status.OK: len(ODD_LENGTHS)} == _finish(net, a, batch)
        assert np.array_equal(expected, a.target.data)
        assert a.target.guards_hold()
        size = len(memory.data)
        whole = a.read(b, memory, nbytes=size)
        assert {Status.OK: 1} == _finish(net, a, whole), "both ends of a region belong to it"
        assert np.array_equal(memory.data, a.target.data)
        assert a.target.guards_hold()

    def test_c30_nothing_is_written_after_the_completion(self, net: Net) -> None:
        """A page whose read is back is used for something else at once."""
        a, b, memory = _reading(net, nbytes=256 * 1024)
        n, nbytes = 40, 4096
        at = [k * nbytes for k in range(n)]
        for k in range(n):
            batch = a.read(b, memory, local=at[k], remote=at[k], nbytes=nbytes)
            batch.ctx = 1000 + k
            a.post(batch)
        reused: set[int] = set()
        while len(reused) < n:
            net.until(lambda: len(a.returned) > len(reused), "the next read to complete")
            for ctx in a.returned.keys() - reused:
                page = a.target.data[at[ctx - 1000] : at[ctx - 1000] + nbytes]
                assert np.array_equal(memory.data[at[ctx - 1000] :][:nbytes], page)
                page[:] = 0
                reused.add(ctx)
        net.settle()

        assert not a.target.data[: n * nbytes].any()

    def test_c30_an_ended_row_is_over_whatever_its_status(self, net: Net) -> None:
        """Memory of a read that failed goes to somebody else, who finds old bytes in it."""
        a, b, memory = _reading(net)
        batch = a.read(b, memory, n=120)
        _some(net, a, batch)
        net.forget(b)
        b.close()
        net.ended(a, "reads of a closed peer to end")
        if not set(a.rows_ended(batch.ctx)) & _OPEN_ENDED:
            a.target.data[:] = 7
            net.quiet()
            assert (a.target.data == 7).all()
        assert a.target.guards_hold()

    def test_c30_nothing_is_written_after_deregister(self, net: Net) -> None:
        """The reader gives its memory back while reads are out; C16 holds for them as well."""
        a, b, memory = _reading(net)
        into = a.buffer(65536)
        batch = a.read(b, memory, n=200, into=into)
        _some(net, a, batch)
        net.turn()
        into.deregister()
        frozen = into.data.copy()
        net.settle()

        assert np.array_equal(frozen, into.data)
        assert a.accepted[batch.ctx] == a.rows_ended(batch.ctx).total()

    def test_c31_memory_that_is_not_readable_is_refused(self, net: Net) -> None:
        """The right to write a region is no right to read it, and a source is private."""
        a, b, memory = _reading(net)
        for private in (b.target, b.source, b.buffer(4096, Access.SINK)):
            bad = a.read(b, private, local=4096)
            _check_bad_read(net, a, b, memory, bad)

    def test_c31_an_unknown_key_is_an_error(self, net: Net) -> None:
        """A read under a wrong key that reports success is a page of nothing."""
        a, b, memory = _reading(net)
        bad = a.read(b, memory, local=4096, rkey=memory.keys[0].rkey ^ 0x5A5A)
        _check_bad_read(net, a, b, memory, bad)

    def test_c31_outside_the_region_is_an_error(self, net: Net) -> None:
        """The page behind the last one is another tenant's."""
        a, b, memory = _reading(net)
        size, base = len(memory.data), memory.keys[0].base
        for remote in (size - 63, size, -1 if base else size + 1, 2**64 - 64 - base):
            _check_bad_read(net, a, b, memory, a.read(b, memory, local=4096, remote=remote))

    def test_c31_the_error_names_its_row(self, net: Net) -> None:
        """One bad page of many is found by its row number, or never."""
        a, b, memory = _reading(net)
        at, bad = [64 * k for k in range(40)], 23
        remote = [*at[:bad], len(memory.data), *at[bad + 1 :]]
        batch = a.read(b, memory, local=at, remote=remote)
        ended = _finish(net, a, batch)
        blamed = [e for e in a.errors() if e.status != Status.FLUSHED]

        assert [(batch.ctx, bad, 1)] == [(e.ctx, e.row, e.count) for e in blamed]
        assert blamed[0].status in _REFUSED
        assert set(ended) <= {Status.OK, Status.FLUSHED, Status(blamed[0].status)}
        assert a.untouched(64 * bad, 64 * bad + 64)

    def test_c31_readable_memory_is_no_target(self, net: Net) -> None:
        """Pages that are shared for reading must not be changed by peers."""
        a, b, memory = _reading(net)
        before = memory.data.copy()
        batch = a.batch(b, target=memory, imm=8)
        net.write(batch, a)

        assert Status.OK not in a.rows_ended(batch.ctx)
        assert np.array_equal(before, memory.data)
        assert Counter() == b.imms()
        empty = a.batch(b, target=memory, nbytes=0, imm=9)
        net.write(empty, a)
        assert {9: 1} == b.imms(), "C9: 'your memory was read' needs no other region"

    def test_c31_both_rights_at_once(self, net: Net) -> None:
        """A region may be open both ways."""
        a, b, _ = _reading(net)
        both = b.readable(4096, Access.SOURCE_AND_TARGET | Access.READABLE)
        net.write(a.batch(b, nbytes=1024, target=both), a)
        batch = a.read(b, both, local=4096, nbytes=4096)

        assert {Status.OK: 1} == _finish(net, a, batch)
        assert np.array_equal(a.source.data[:1024], a.target.data[4096:5120])
        assert np.array_equal(both.data, a.target.data[4096:8192])

    def test_c31_a_sink_takes_reads_and_no_writes(self, net: Net) -> None:
        """A process that reads its pages need not let peers write them."""
        a, b, memory = _reading(net)
        sink = a.buffer(4096, Access.SINK)
        assert {Status.OK: 1} == _finish(net, a, a.read(b, memory, into=sink, nbytes=4096))
        assert np.array_equal(memory.data[:4096], sink.data)
        batch = b.batch(a, target=sink)
        net.write(batch, b)

        assert Status.OK not in b.rows_ended(batch.ctx)
        assert np.array_equal(memory.data[:4096], sink.data)

    def test_c31_no_read_sees_what_is_written_after_deregister(self, net: Net) -> None:
        """The owner takes its memory back, and fills it with what peers may not see."""
        a, b, _ = _reading(net)
        memory = b.readable(65536)
        was = memory.data.copy()
        batch = a.read(b, memory, n=200)
        _some(net, a, batch)
        for turn in range(6):
            if turn == 3:
                memory.deregister()
                memory.data[:] = 1
            net.turn()
            a.offer(batch)
        net.settle()
        failed = {seen.row for seen in a.errors()}
        fresh = np.flatnonzero((a.target.data == 1).any())

        assert 0 == len(fresh), "C31: bytes that were written after deregister() got out"
        for row in set(range(a.accepted[batch.ctx])) - failed:
            place = slice(64 * row, 64 * row + 64)
            assert np.array_equal(was[place], a.target.data[place])

    def test_c32_reads_of_a_dead_peer_end_in_errors(self, net: Net) -> None:
        """A decoder that pulls its pages must learn that nobody is there to pull them from."""
        net.need(Ability.KILL)
        a, b, memory = _reading(net)
        c = net.side()
        other = c.readable(4096)
        assert {Status.OK: 1} == _finish(net, a, a.read(b, memory))
        early = a.read(b, memory, n=50)
        taken = _some(net, a, early)
        net.kill(b)
        net.ended(a, "reads of a dead peer to fail")
        late = net.try_lost(a, a.read(b, memory, local=4096), "a read of nobody to fail")

        assert taken == a.rows_ended(early.ctx).total()
        assert Status.NIC_DOWN not in a.rows_ended(early.ctx)
        assert Status.OK not in late
        assert {Status.OK: 1} == _finish(net, a, a.read(c, other, local=8192))

    def test_c32_no_read_brings_bytes_of_the_next_incarnation(self, net: Net) -> None:
        """Old keys may be valid again by chance: only the address tells the incarnations apart."""
        net.need(Ability.KILL, Ability.RESTART)
        a, b, memory = _reading(net)
        assert {Status.OK: 1} == _finish(net, a, a.read(b, memory, local=8192))
        net.kill(b)
        reborn = net.side(node=net.world.restart(b.node))
        reborn.readable(65536)
        stale = net.try_lost(a, a.read(b, memory, nbytes=256), "a stale read to fail")
        net.quiet()

        assert Status.OK not in stale
        assert a.untouched(0, 256)

    def test_c32_a_nic_that_dies_ends_its_reads(self, net: Net) -> None:
        """FLUSHED says that the memory is free: then nothing may come any more."""
        net.need(Ability.FAIL_NIC)
        a, b, memory = _reading(net, nics=2)
        assert {Status.OK: 1} == _finish(net, a, a.read(b, memory, local=8192))
        batch = a.read(b, memory, n=50)
        taken = _some(net, a, batch)
        net.world.fail_nic(a.node, 0)
        net.ended(a, "reads of a dead NIC to end")
        ended = a.rows_ended(batch.ctx)
        if Status.NIC_DOWN not in ended:
            a.target.data[:] = 7
        frozen = a.target.data.copy()
        net.quiet()

        assert taken == ended.total()
        assert set(ended) <= {Status.OK, Status.FLUSHED, Status.NIC_DOWN}
        if Status.NIC_DOWN not in ended:
            assert np.array_equal(frozen, a.target.data)
        lives = a.read(b, memory, local=4096, nic=1, far=1)
        assert {Status.OK: 1} == _finish(net, a, lives, 1), "the other NIC is not concerned"

    def test_c32_close_ends_every_read(self, net: Net) -> None:
        """A read that never comes back holds its memory for ever."""
        a, b, memory = _reading(net)
        batch = a.read(b, memory, n=100)
        _some(net, a, batch)
        a.close()
        a.target.data[:] = 7
        net.until(lambda: a.rows_open == 0, "reads that were open at close() to be handed out")
        net.quiet()

        assert (a.target.data == 7).all(), "C14: after close() nothing is written"
        assert set(a.rows_ended(batch.ctx)) <= {Status.OK, Status.FLUSHED}

    def test_c33_a_fence_shuts_out_reads(self, net: Net) -> None:
        """A read after the fence could return the memory's next contents."""
        a, b, memory = _reading(net, nics=2)
        if not b.domains[0].caps.imm_source:
            pytest.skip("this backend has no fences")
        batch = a.read(b, memory, n=100)
        _some(net, a, batch)
        net.turn()
        nic = cast("ControlDomain", b.domains[0])
        nic.fence(a.domains[0].address, _FENCE_CTX)

        def fenced() -> bool:
            return any(s.kind == Kind.FENCED and s.ctx == _FENCE_CTX for s in b.seen)

        net.until(fenced, "the fence to close")
        memory.data[:] = 1
        net.settle()
        assert not (a.target.data == 1).any(), "C33: bytes that were written after the fence"
        late = a.read(b, memory, local=8192)
        assert Status.OK not in _finish(net, a, late)
        way = a.read(b, memory, local=16384, nic=1)
        assert {Status.OK: 1} == _finish(net, a, way, 1), "other NICs are not concerned"
        nic.unfence(a.domains[0].address)
        cast("ControlDomain", a.domains[0]).unfence(b.domains[0].address)
        assert {Status.OK: 1} == _finish(net, a, a.read(b, memory, local=32768))


def _some(net: Net, side: Side, batch: ReadBatch) -> int:
    """Post what fits at once; how many rows that were, 1 or more."""
    net.until(lambda: side.try_post(batch, 0, batch.n) > 0, "post_read() to take a row")
    return side.accepted[batch.ctx]

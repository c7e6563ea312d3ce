"""C1 to C10: rows are taken, completed, and land where they should; an immediate means that the
bytes of its row are there, and arrives exactly once.
"""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np

from tep.backends.base import Status, new_completions
from tep.testing.world import Net, Seen

__all__ = ["ImmsContract", "RowsContract"]

ODD_LENGTHS = (1, 2, 3, 7, 8, 63, 64, 65, 127, 1000, 4095, 4096, 4097)


class RowsContract:
    """Clauses on rows without a fault."""

    def test_c01_every_row_completes_once(self, net: Net) -> None:
        """A missing completion hangs a transfer; a second one corrupts the next one's count."""
        a, b = net.pair()
        batches = [a.batch(b, n=n, imm=imm) for n in (1, 2, 7, 64) for imm in (None, 5)]
        for batch in batches:
            a.post(batch)
        net.settle()

        assert {batch.ctx: batch.n for batch in batches} == a.returned
        assert [] == a.errors()

    def test_c01_completions_name_their_batch(self, net: Net) -> None:
        """The engine finds the transfer by ctx alone, and a ctx is any 64-bit number."""
        a, b = net.pair()
        names = (0, 1, 2**31, 2**32, 2**63, 2**64 - 1)
        for ctx in names:
            a.post(a.batch(b, src=[0, 64, 128], dst=[0, 64, 128], ctx=ctx))
        net.settle()

        assert dict.fromkeys(names, 3) == a.returned

    def test_c01_one_ctx_may_be_posted_in_parts(self, net: Net) -> None:
        """A batch that went out in parts is still one batch, whose rows are counted together."""
        a, b = net.pair()
        batch = a.batch(b, n=30)
        for stop in range(4, 36, 4):
            net.until(functools.partial(a.offer, batch, 0, min(stop, batch.n)), "4 more rows")
        net.settle()

        assert {batch.ctx: 30} == a.returned
        assert np.array_equal(a.source.data[:1920], b.target.data[:1920])

    def test_c01_poll_of_one_entry_loses_nothing(self, net: Net) -> None:
        """A full completion buffer is usual under load; the rest waits for the next poll."""
        a, b = net.pair()
        batch = a.batch(b, src=[64 * k for k in range(40)], dst=0, imm=list(range(40)))
        small = new_completions(1)
        for side in (a, b):
            side.out = small
        net.write(batch, a)

        assert {batch.ctx: 40} == a.returned
        assert Counter(range(40)) == b.imms()

    def test_c01_ok_means_that_the_source_is_no_longer_read(self, net: Net) -> None:
        """A transfer that is done gives its source back; what is written there next is not its."""
        a, b = net.pair(nbytes=256 * 1024)
        was = a.source.data.copy()
        n, nbytes = 40, 4096
        at = [k * nbytes for k in range(n)]
        for k in range(n):
            batch = a.batch(b, src=at[k], dst=at[k], nbytes=nbytes, ctx=1000 + k)
            a.post(batch)
        reused: set[int] = set()
        while len(reused) < n:
            net.until(lambda: len(a.returned) > len(reused), "the next row to complete")
            for ctx in a.returned.keys() - reused:
                a.source.data[at[ctx - 1000] : at[ctx - 1000] + nbytes] = 0
                reused.add(ctx)
        net.settle()

        assert np.array_equal(was[: n * nbytes], b.target.data[: n * nbytes])

    def test_c02_poll_returns_at_once_when_idle(self, net: Net) -> None:
        """A poll that waits for news stops every other NIC and command of its engine."""
        a, b = net.pair()
        out = new_completions(4)
        for domain in (*a.domains, *b.domains):
            assert 0 == net.world.returns(functools.partial(domain.poll, out), "poll() when idle")

    def test_c02_post_returns_at_once_when_full(self, net: Net) -> None:
        """A post that waits for room can wait for ever: it is the caller who polls."""
        a, b = net.pair()
        rows = [0] * min(a.domains[0].caps.sq_depth + 1, 4096)
        batch = a.batch(b, src=rows, dst=rows, nbytes=8)
        for _ in range(64):
            if net.world.returns(lambda: a.offer(batch), "post() when full"):
                break
        net.settle()

        assert a.accepted == a.returned

    def test_c03_full_queue_takes_a_prefix(self, net: Net) -> None:
        """Rows beyond the prefix are posted again: one that was kept anyway would land twice."""
        depth = min(net.side().domains[0].caps.sq_depth, 20_000)
        nrows = 2 * depth + 3
        a, b = net.pair(nbytes=8 * nrows)
        offsets = [8 * k for k in range(nrows)]
        batch = a.batch(b, src=offsets, dst=offsets, nbytes=8, imm=77)
        taken = refusals = 0
        while taken < nrows and refusals < 8:
            more = a.try_post(batch, taken, nrows)
            taken += more
            refusals += more == 0

        net.settle()
        assert taken == a.returned.total()
        assert Counter({77: taken}) == b.imms()
        assert np.array_equal(a.source.data[: 8 * taken], b.target.data[: 8 * taken])
        assert b.untouched(8 * taken)

    def test_c03_refused_rows_can_be_offered_again(self, net: Net) -> None:
        """After a refusal the rest of the batch goes out once completions have been polled."""
        depth = min(net.side().domains[0].caps.sq_depth, 20_000)
        nrows = 3 * depth + 1
        a, b = net.pair(nbytes=8 * nrows)
        offsets = [8 * k for k in range(nrows)]
        net.write(a.batch(b, src=offsets, dst=offsets, nbytes=8, imm=78), a)

        assert nrows == a.returned.total()
        assert {78: nrows} == b.imms()
        assert np.array_equal(a.source.data, b.target.data)

    def test_c03_only_rows_start_to_stop_are_taken(self, net: Net) -> None:
        """Rows before start are out already, and rows after stop wait for another NIC's turn."""
        a, b = net.pair()
        offsets = [64 * k for k in range(12)]
        batch = a.batch(b, src=offsets, dst=offsets, imm=list(range(100, 112)))
        start = 4
        while start < 9:
            start += a.try_post(batch, start, 9)
            net.turn()
        net.settle()

        assert {batch.ctx: 5} == a.returned
        assert Counter(range(104, 109)) == b.imms()
        assert np.array_equal(a.source.data[256:576], b.target.data[256:576])
        assert b.untouched(0, 256)
        assert b.untouched(576)

    def test_c04_completions_may_mix_but_stay_countable(self, net: Net) -> None:
        """Rows of many batches, NICs and peers complete mixed; each counts for its own batch."""
        a, b = net.pair(nics=2)
        c = net.side(nics=1)
        expected: Counter[int] = Counter()
        for turn in range(12):
            to, remote = ((b, turn % 2), (c, 0))[turn % 3 == 2]
            nic = turn // 2 % 2
            offsets = [64 * (turn * 5 + k) for k in range(5)]
            batch = a.batch(to, src=offsets, dst=offsets, nic=nic, remote=remote)
            a.post(batch, nic)
            expected[batch.ctx] = 5
        net.settle()

        assert expected == a.returned
        assert [] == a.errors()

    def test_c04_a_stuck_message_holds_back_no_row_to_another_peer(self, net: Net) -> None:
        """One slow receiver must not stop a scatter to all others."""
        a, b = net.pair()
        c = net.side()
        a.send(b, b"b has posted no receive yet")
        batch = a.batch(c, src=[0, 64, 128], dst=[0, 64, 128], imm=3)
        a.post(batch)
        net.until(lambda: a.returned[batch.ctx] == 3, "rows to c while a message to b is stuck")
        net.until(lambda: c.imms().total() == 3, "c's immediates")
        b.domains[0].post_recvs(256, 1)
        net.settle()

        assert [b"b has posted no receive yet"] == b.messages()

    def test_c05_rows_land_in_any_order_but_all_land(self, net: Net) -> None:
        """Rows that meet in the same bytes leave each byte from one of them, and all count."""
        a, b = net.pair(nics=2)
        n = 100
        for nic in range(2):
            src = [64 * (nic * n + k) for k in range(n)]
            a.post(a.batch(b, src=src, dst=0, imm=list(range(n)), nic=nic, remote=nic), nic)
        net.settle()

        assert dict.fromkeys(range(n), 2) == b.imms()
        candidates = a.source.data[: 64 * 2 * n].reshape(2 * n, 64)
        assert (candidates == b.target.data[:64]).any(axis=0).all()
        assert b.untouched(64)

    def test_c09_empty_rows_carry_immediates(self, net: Net) -> None:
        """A barrier, and the empty shards of a short write, are rows of no bytes."""
        a, b = net.pair()
        net.write(a.batch(b, nbytes=0, imm=9), a)
        net.write(a.batch(b, src=[0] * 20, dst=[0] * 20, nbytes=0, imm=list(range(20))), a)
        net.write(a.batch(b, nbytes=[0, 64, 0, 64], src=0, dst=64, imm=30), a)

        assert Counter(range(20)) + Counter({9: 1, 30: 4}) == b.imms()
        assert {1: 1, 2: 20, 3: 4} == a.returned
        assert [] == a.errors()
        assert b.untouched(0, 64)
        assert np.array_equal(a.source.data[:64], b.target.data[64:128])
        assert b.untouched(128)

    def test_c09_empty_rows_need_no_source(self, net: Net) -> None:
        """A barrier has no source region: the lkey and src of an empty row mean nothing."""
        a, b = net.pair()
        batch = a.batch(b, nbytes=0, imm=9)
        batch.lkey, batch.src = 0, 0
        net.write(batch, a)

        assert {9: 1} == b.imms()
        assert [] == a.errors()

    def test_c09_empty_rows_without_immediate_complete(self, net: Net) -> None:
        """A scatter may hold an empty slice; it has to come back like any other."""
        a, b = net.pair()
        batch = a.batch(b, src=[0, 0, 0], dst=0, nbytes=0)
        net.write(batch, a)

        assert {Status.OK: 3} == a.rows_ended(batch.ctx)
        assert Counter() == b.imms()
        assert b.untouched()

    def test_c10_odd_lengths_touch_nothing_else(self, net: Net) -> None:
        """One byte too many is somebody else's KV page."""
        a, b = net.pair()
        expected = b.target.data.copy()
        src, dst, at = [], [], 1
        for k, nbytes in enumerate(ODD_LENGTHS):
            src.append(3 * k + 1)
            dst.append(at)
            expected[at : at + nbytes] = a.source.data[src[-1] : src[-1] + nbytes]
            at += nbytes + 1 + k % 3
        before = a.source.data.copy()
        net.write(a.batch(b, src=src, dst=dst, nbytes=list(ODD_LENGTHS), imm=1), a)

        assert np.array_equal(expected, b.target.data)
        assert np.array_equal(before, a.source.data)
        assert a.source.guards_hold()
        assert b.target.guards_hold()

    def test_c10_rows_reach_both_ends_of_a_region(self, net: Net) -> None:
        """The first and the last byte belong to the region; the ones beside them do not."""
        a, b = net.pair(nbytes=4099)
        net.write(a.batch(b, src=[0, 4098], dst=[0, 4098], nbytes=1), a)

        assert a.source.data[[0, 4098]].tolist() == b.target.data[[0, 4098]].tolist()
        assert b.untouched(1, 4098)

        net.write(a.batch(b, nbytes=4099), a)
        assert np.array_equal(a.source.data, b.target.data)
        assert b.target.guards_hold()

    def test_c10_columns_may_be_scalars_or_arrays(self, net: Net) -> None:
        """A scalar holds for every row; each column may be either, in a batch of few or of many."""
        a, b = net.pair()
        for n in (3, 50):
            spread = [64 * k for k in range(n)]
            for src, dst in ((spread, 7), (7, spread), (spread, spread)):
                for nbytes in (64, [64] * n):
                    b.target.data[:] = 0
                    net.write(a.batch(b, src=src, dst=dst, nbytes=nbytes, imm=[4] * n), a)
                    starts = [src] * n if isinstance(src, int) else src
                    rows = np.stack([a.source.data[at : at + 64] for at in starts])
                    if isinstance(dst, int):  # all rows meet here: each byte is one of theirs
                        assert (rows == b.target.data[dst : dst + 64]).any(axis=0).all()
                    else:
                        assert np.array_equal(rows.reshape(-1), b.target.data[: 64 * n])

        assert {4: 6 * 53} == b.imms()
        assert b.target.guards_hold()


_STOPPED_MAX = 30  # turns after which a sender that nobody listens to counts as stopped

VALUES = (0, 1, 2, 7, 0xFF, 0x100, 0xFFFF, 0x10001, 0x01020304, 0x04030201, 2**31, 2**32 - 1)


class ImmsContract:
    """Clauses on immediates."""

    def test_c06_bytes_are_there_when_the_immediate_is_seen(self, net: Net) -> None:
        """The reader is released by the immediate alone: early, it reads the old page."""
        a, b = net.pair(nics=2, nbytes=128 * 1024)
        nbytes, n = 1000, 100
        late: list[int] = []

        def look(seen: Seen) -> None:
            at = seen.imm * nbytes
            if not np.array_equal(a.source.data[at : at + nbytes], b.target.data[at : at + nbytes]):
                late.append(seen.imm)

        b.on_imm = look
        for nic in range(2):
            rows = range(nic, n, 2)
            at = [k * nbytes for k in rows]
            batch = a.batch(b, src=at, dst=at, nbytes=nbytes, imm=list(rows), nic=nic, remote=nic)
            a.post(batch, nic)
        net.settle()

        assert [] == late
        assert Counter(range(n)) == b.imms()

    def test_c06_holds_for_rows_of_many_packets(self, net: Net) -> None:
        """A long row travels in many pieces, and the immediate with one of them."""
        nbytes = 1024 * 1024 + 3
        nbytes = min(nbytes, net.side().domains[0].caps.max_write_bytes)
        a, b = net.pair(nbytes=nbytes)
        whole: list[bool] = []
        b.on_imm = lambda _: whole.append(np.array_equal(a.source.data, b.target.data))
        net.write(a.batch(b, nbytes=nbytes, imm=1), a)

        assert [True] == whole

    def test_c06_holds_when_all_rows_share_one_immediate(self, net: Net) -> None:
        """Pages are counted, not named: n immediates mean n whole rows, whichever they are."""
        a, b = net.pair()
        n, nbytes = 64, 512
        short: list[tuple[int, int]] = []
        arrived = 0

        def look(seen: Seen) -> None:
            nonlocal arrived
            arrived += seen.count
            pages = b.target.data[: n * nbytes].reshape(n, nbytes)
            whole = int((pages == a.source.data[: n * nbytes].reshape(n, nbytes)).all(axis=1).sum())
            if whole < arrived:
                short.append((arrived, whole))

        b.on_imm = look
        at = [k * nbytes for k in range(n)]
        net.write(a.batch(b, src=at, dst=at, nbytes=nbytes, imm=42), a)

        assert [] == short
        assert {42: n} == b.imms()

    def test_c07_no_immediate_without_one_asked_for(self, net: Net) -> None:
        """An immediate out of nothing releases a reader early; 0 is a value like any other."""
        a, b = net.pair()
        net.write(a.batch(b, n=50), a)
        net.write(a.batch(b), a)

        assert Counter() == b.imms()
        assert Counter() == a.imms()

    def test_c07_the_sender_sees_no_immediate_of_its_own(self, net: Net) -> None:
        """Both directions share one counter table: an echo would count twice."""
        a, b = net.pair()
        a.post(a.batch(b, src=[0] * 9, dst=0, imm=5))
        b.post(b.batch(a, src=[0] * 4, dst=0, imm=6))
        net.settle()

        assert ({6: 4}, {5: 9}) == (a.imms(), b.imms())

    def test_c08_all_32_bits_arrive(self, net: Net) -> None:
        """A value cut to 16 bits, or in the other byte order, counts for another transfer."""
        a, b = net.pair()
        for value in VALUES:
            net.write(a.batch(b, imm=value), a)

        assert Counter(VALUES) == b.imms()

    def test_c08_each_row_may_have_its_own(self, net: Net) -> None:
        """A column of immediates goes row by row, in small batches as in large ones."""
        a, b = net.pair()
        expected: Counter[int] = Counter()
        for n in (2, len(VALUES), 200):
            imms = [VALUES[k % len(VALUES)] ^ (k << 8) for k in range(n)]
            expected.update(imms)
            net.write(a.batch(b, n=n, imm=imms), a)

        assert expected == b.imms()

    def test_c08_exactly_one_each_also_over_several_nics(self, net: Net) -> None:
        """A lost immediate hangs the reader, a doubled one releases it early."""
        a, b = net.pair(nics=3)
        for nic in range(3):
            for remote in range(3):
                a.post(a.batch(b, n=20, imm=7, nic=nic, remote=remote), nic)
        net.settle()

        assert {7: 180} == b.imms()

    def test_c08_a_burst_beyond_any_receive_queue_arrives(self, net: Net) -> None:
        """The target may be busy elsewhere while thousands arrive: late is fine, lost is not.

        Where the machine is held up until the target counts as dead, rows end so (C17): told of is
        not lost.
        """
        a, b = net.pair()
        net.write(a.batch(b), a)  # connected: to be deaf before that is C17's matter
        n = net.world.burst_rows
        batch = a.batch(b, src=[0] * n, dst=0, nbytes=8, imm=list(range(n)))
        deaf_s = net.world.now_s()
        net.forget(b)  # nobody polls there for a while; where that stops the sender, so be it
        stopped = 0  # turns; to go on would be to wait until its NIC takes the peer for dead (C17)
        while stopped < _STOPPED_MAX:
            before = a.accepted[batch.ctx]
            if a.offer(batch):
                break
            net.turn()
            stopped = stopped + 1 if a.accepted[batch.ctx] == before else 0
        net.sides.append(b)
        net.until(lambda: a.offer(batch), "the rest of the burst to be taken")
        net.settle()
        took_s = net.world.now_s() - deaf_s
        ended, arrived = a.rows_ended(batch.ctx), b.imms()

        if 2 * took_s < a.domains[0].caps.peer_timeout_s:
            assert {Status.OK: n} == ended
        assert arrived <= Counter(range(n))
        assert ended[Status.OK] <= arrived.total()

    def test_c08_equal_immediates_are_not_merged_away(self, net: Net) -> None:
        """Many equal immediates may come as one entry, but with their number in `count`."""
        a, b = net.pair()
        n = 500
        net.write(a.batch(b, src=[0] * n, dst=0, nbytes=0, imm=2**32 - 1), a)

        assert {2**32 - 1: n} == b.imms()

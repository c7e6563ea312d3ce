"""C6 to C8: an immediate means that the bytes of its row are there, and arrives exactly once."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tep.testing.net import Net, Seen
from tep.testing.world import World

__all__ = ["ImmsContract"]

_STOPPED_MAX = 30  # turns after which a sender that nobody listens to counts as stopped

VALUES = (
    0,
    1,
    2,
    7,
    0xFF,
    0x100,
    0xFFFF,
    0x10000,
    0x10001,
    0x01020304,
    0x04030201,
    2**31,
    2**32 - 1,
)


class ImmsContract:
    """Clauses on immediates."""

    def test_c06_bytes_are_there_when_the_immediate_is_seen(self, world: World) -> None:
        """The reader is released by the immediate alone: early, it reads the old page."""
        net = Net(world)
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

    def test_c06_holds_for_rows_of_many_packets(self, world: World) -> None:
        """A long row travels in many pieces, and the immediate with one of them."""
        net = Net(world)
        nbytes = 1024 * 1024 + 3
        nbytes = min(nbytes, net.side().domains[0].caps.max_write_bytes)
        a, b = net.pair(nbytes=nbytes)
        whole: list[bool] = []
        b.on_imm = lambda _: whole.append(np.array_equal(a.source.data, b.target.data))
        net.write(a.batch(b, nbytes=nbytes, imm=1), a)

        assert [True] == whole

    def test_c06_holds_when_all_rows_share_one_immediate(self, world: World) -> None:
        """Pages are counted, not named: n immediates mean n whole rows, whichever they are."""
        net = Net(world)
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

    def test_c07_no_immediate_without_one_asked_for(self, world: World) -> None:
        """An immediate out of nothing releases a reader early; 0 is a value like any other."""
        net = Net(world)
        a, b = net.pair()
        at = [64 * k for k in range(50)]
        net.write(a.batch(b, src=at, dst=at), a)
        net.write(a.batch(b), a)

        assert Counter() == b.imms()
        assert Counter() == a.imms()

    def test_c07_the_sender_sees_no_immediate_of_its_own(self, world: World) -> None:
        """Both directions share one counter table: an echo would count twice."""
        net = Net(world)
        a, b = net.pair()
        a.post(a.batch(b, src=[0] * 9, dst=0, imm=5))
        b.post(b.batch(a, src=[0] * 4, dst=0, imm=6))
        net.settle()

        assert ({6: 4}, {5: 9}) == (a.imms(), b.imms())

    def test_c08_all_32_bits_arrive(self, world: World) -> None:
        """A value cut to 16 bits, or in the other byte order, counts for another transfer."""
        net = Net(world)
        a, b = net.pair()
        for value in VALUES:
            net.write(a.batch(b, imm=value), a)

        assert Counter(VALUES) == b.imms()

    def test_c08_each_row_may_have_its_own(self, world: World) -> None:
        """A column of immediates goes row by row, in small batches as in large ones."""
        net = Net(world)
        a, b = net.pair()
        expected: Counter[int] = Counter()
        for n in (2, len(VALUES), 200):
            imms = [VALUES[k % len(VALUES)] ^ (k << 8) for k in range(n)]
            expected.update(imms)
            at = [64 * k for k in range(n)]
            net.write(a.batch(b, src=at, dst=at, imm=imms), a)

        assert expected == b.imms()

    def test_c08_exactly_one_each_also_over_several_nics(self, world: World) -> None:
        """A lost immediate hangs the reader, a doubled one releases it early."""
        net = Net(world)
        a, b = net.pair(nics=3)
        for nic in range(3):
            for remote in range(3):
                at = [64 * k for k in range(20)]
                a.post(a.batch(b, src=at, dst=at, imm=7, nic=nic, remote=remote), nic)
        net.settle()

        assert {7: 180} == b.imms()

    def test_c08_a_burst_beyond_any_receive_queue_arrives(self, world: World) -> None:
        """The target may be busy elsewhere while thousands arrive: late is fine, lost is not."""
        net = Net(world)
        a, b = net.pair()
        net.write(a.batch(b), a)  # connected: to be deaf before that is C17's matter
        n = world.burst_rows
        batch = a.batch(b, src=[0] * n, dst=0, nbytes=8, imm=list(range(n)))
        start = 0

        def offer() -> bool:
            nonlocal start
            start += a.try_post(batch, start, n) if start < n else 0
            return start == n

        net.forget(b)  # nobody polls there for a while; where that stops the sender, so be it
        stopped = 0  # turns; to go on would be to wait until its NIC takes the peer for dead (C17)
        while stopped < _STOPPED_MAX:
            before = start
            if offer():
                break
            net.turn()
            stopped = stopped + 1 if start == before else 0
        net.sides.append(b)
        net.until(offer, "the rest of the burst to be taken")
        net.settle()

        assert Counter(range(n)) == b.imms()

    def test_c08_equal_immediates_are_not_merged_away(self, world: World) -> None:
        """Many equal immediates may come as one entry, but with their number in `count`."""
        net = Net(world)
        a, b = net.pair()
        n = 500
        net.write(a.batch(b, src=[0] * n, dst=0, nbytes=0, imm=2**32 - 1), a)

        assert {2**32 - 1: n} == b.imms()

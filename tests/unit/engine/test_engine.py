"""The verbs through whole engines, on the loopback and the chaos fabric: what a user relies on."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from tep.base.api import EngineOptions, Pages, ScatterDst, Single
from tep.base.errors import BusyError, ClosedError, FabricError
from tep.core.plan import count_imms
from tests.support.pairs import BLANK, hostile_pair, pair


def test_write_is_seen_by_its_immediate_and_by_done() -> None:
    """The two ends learn of completion by different means, and neither by the other's."""
    with hostile_pair(seed=1) as p:
        got = p.b.expect_imm_count(7, 1)
        sent = p.a.submit_single_write(100, (p.mr, 10), (p.desc, 20), 7)
        got.wait()
        assert (p.src.data[10:110] == p.dst.data[20:120]).all()
        sent.wait()
        assert p.untouched_but([(20, 120)])


def test_write_without_immediate_tells_nobody() -> None:
    """An immediate that nobody asked for is counted for somebody else."""
    with hostile_pair(2, 2, seed=1) as p:
        p.settle(p.a.submit_single_write(50_000, (p.mr, 0), (p.desc, 0)))
        p.quiet()
        assert 0 == p.b.stats().imms_counted
        assert (p.src.data[:50_000] == p.dst.data[:50_000]).all()


@pytest.mark.parametrize("imm", [0, 1, 0x01020304, 0xFFFFFFFF])
def test_immediates_arrive_as_they_were_sent(imm) -> None:
    """Zero is a value, and so is the last one."""
    with pair(2, 3) as p:
        got = p.b.expect_imm_count(imm, count_imms(Single(1 << 15), 2, 3))
        p.a.submit_single_write(1 << 15, (p.mr, 0), (p.desc, 0), imm)
        p.settle(got)
        p.quiet()
        assert () == p.b.stats().imms_unexpected


@pytest.mark.parametrize("seed", range(5))
def test_rounds_of_one_immediate_do_not_run_into_each_other(seed) -> None:
    """Surplus of a round that ran ahead belongs to the next, and every round fires once."""
    with hostile_pair(2, 2, seed=seed) as p:
        pages = Pages(range(10))
        order: list[int] = []
        waits = [
            p.b.expect_imm_count(3, 10, on_done=lambda _, k=k: order.append(k)) for k in range(6)
        ]
        for _ in range(6):
            p.a.submit_paged_writes(64, (p.mr, pages), (p.desc, pages), 3)
        p.settle(*waits)
        assert list(range(6)) == order
        p.quiet()
        assert () == p.b.stats().imms_unexpected


def test_the_statistics_list_what_nobody_has_expected() -> None:
    """A count that nobody can see is an immediate that somebody else gets later."""
    with pair() as p:
        assert () == p.b.stats().imms_unexpected
        p.a.submit_paged_writes(8, (p.mr, Pages(range(4))), (p.desc, Pages(range(4))), 5)
        p.turn_until(lambda: p.b.stats().imms_unexpected == ((5, 4),))
        p.settle(p.b.expect_imm_count(5, 3))
        assert ((5, 1),) == p.b.stats().imms_unexpected
        assert 1 == p.b.remove_imm(5)
        assert () == p.b.stats().imms_unexpected


def test_loose_immediates_reach_their_callback_with_their_bytes_there() -> None:
    """The callback reads the bytes at once; they must have landed."""
    with hostile_pair(2, 2, seed=9) as p:
        seen: list[int] = []

        def look(imm: int, count: int) -> None:
            assert 1 == count
            at = 64 * (imm - 100)
            assert (p.src.data[at : at + 64] == p.dst.data[at : at + 64]).all()
            seen.append(imm)

        p.b.on_imm(range(100, 200), look)
        pages = Pages(range(100))
        p.a.submit_paged_writes(64, (p.mr, pages), (p.desc, pages), np.arange(100, 200))
        p.turn_until(lambda: len(seen) == 100)
        assert list(range(100, 200)) == sorted(seen)
        assert 0 == p.b.stats().callback_errors
        p.b.remove_imm(100)
        p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 150)
        p.turn_until(lambda: dict(p.b.stats().imms_unexpected).get(150, 0) == 1)


def test_messages_rotate_through_a_pool_smaller_than_their_number() -> None:
    """A buffer not given back stalls the sender after the first round."""
    with hostile_pair(seed=2) as p:
        seen: list[bytes] = []
        p.b.submit_recvs(64, 3, lambda view: seen.append(bytes(view)))
        expected = [b"%d" % k for k in range(50)]
        sent = [p.a.submit_send(p.b.main_address, text) for text in expected]
        p.settle(*sent)
        p.quiet()
        assert sorted(expected) == sorted(seen)
        assert all(message.ok for message in sent)


def test_messages_wait_for_a_pool_and_raising_readers_give_buffers_back() -> None:
    """A reader that raises must not cost the pool a buffer each time."""
    with pair() as p:
        sent = [p.a.submit_send(p.b.main_address, b"x") for _ in range(8)]
        p.quiet()
        assert not any(message.finished for message in sent)

        def read(_: memoryview) -> None:
            raise ValueError("no such request")

        p.b.submit_recvs(64, 2, read)
        p.settle(*sent)
        p.quiet()
        assert 8 == p.b.stats().callback_errors


def test_message_longer_than_the_receivers_buffers_fails_at_the_sender() -> None:
    """Cut to size it would decode as something else."""
    with pair() as p:
        p.b.submit_recvs(8, 2, lambda view: None)
        sent = p.a.submit_send(p.b.main_address, b"123456789")
        p.settle(sent)
        with pytest.raises(FabricError, match="message of 9 bytes to b failed on NIC 0: LENGTH"):
            sent.result()


def test_narrow_queues_carry_everything() -> None:
    """Back-pressure may slow a transfer, never lose a row of it."""
    with hostile_pair(2, 3, nbytes=1 << 18, seed=4, sq_depth=3) as p:
        pages = Pages(np.random.default_rng(0).permutation(512))
        sent = p.a.submit_paged_writes(512, (p.mr, pages), (p.desc, pages), 1)
        got = p.b.expect_imm_count(1, 512)
        p.settle(sent, got)
        assert (p.src.data == p.dst.data).all()


def test_backlog_limit_leaves_room_as_rows_are_posted() -> None:
    """BusyError asks the user to wait: waiting has to help."""
    with pair(sq_depth=4, options=EngineOptions(backlog_rows_max=100)) as p:
        pages = Pages(range(60))
        first = p.a.submit_paged_writes(8, (p.mr, pages), (p.desc, pages))
        with pytest.raises(BusyError, match="60 rows wait for NICs already, 60 more pass the"):
            p.a.submit_paged_writes(8, (p.mr, pages), (p.desc, pages))
        first.wait()
        p.a.submit_paged_writes(8, (p.mr, pages), (p.desc, pages)).wait()


def test_writes_to_a_withdrawn_region_fail_and_change_nothing() -> None:
    """The memory may be in other hands by the time the row arrives."""
    with hostile_pair(2, 2, seed=3) as p:
        p.b.deregister(p.dst_mr)
        sent = p.a.submit_single_write(40_000, (p.mr, 0), (p.desc, 0), 1)
        p.settle(sent)
        p.quiet()
        assert "REMOTE_KEY" == sent.error.code
        assert (p.dst.data == BLANK).all()
        assert 0 == p.b.stats().imms_counted


def test_peer_that_closed_ends_in_an_error() -> None:
    """A write to nobody must not wait for ever."""
    with pair(2, 2) as p:
        p.b.close()
        sent = p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 1)
        p.settle(sent)
        assert "UNREACHABLE" == sent.error.code


def test_engine_may_write_to_itself() -> None:
    """One program, one GPU: the self-exchange of an all-to-all."""
    with pair(3, 1) as p:
        target = np.zeros(1 << 16, np.uint8)
        _, desc = p.a.reg_mr(target)
        got = p.a.expect_imm_count(2, count_imms(Single(60_000), 3, 3))
        p.a.submit_single_write(60_000, (p.mr, 0), (desc, 0), 2)
        p.settle(got)
        assert (p.src.data[:60_000] == target[:60_000]).all()


def test_regions_of_many_kinds_of_buffers() -> None:
    """Any object with a buffer can be registered: that is the promise of reg_mr."""
    with pair() as p:
        buffers = [bytearray(64), mmap.mmap(-1, 64), np.zeros((8, 2), np.float32)]
        buffers.append(memoryview(bytearray(64)))
        for buffer in buffers:
            _, desc = p.b.reg_mr(buffer)
            assert 64 == desc.nbytes
            p.settle(p.a.submit_single_write(64, (p.mr, 0), (desc, 0)))
            assert p.src.data[:64].tobytes() == bytes(memoryview(buffer).cast("B"))


def test_scatter_of_everything_at_once_in_one_group() -> None:
    """Steady steps of the same group take the cached way; all bytes must still be right."""
    with hostile_pair(2, 1, seed=6) as p:
        engines = [p.more(f"t{k}", 1 + k % 4) for k in range(6)]
        targets = [np.zeros(4096, np.uint8) for _ in engines]
        descs = [e.reg_mr(t)[1] for e, t in zip(engines, targets, strict=True)]
        group = p.a.add_peer_group([e.main_address for e in engines])
        for step in range(5):
            dsts = [ScatterDst(100 + k, 100 * step, (d, k)) for k, d in enumerate(descs)]
            order = dsts if step % 2 else dsts[::-1]
            sent = p.a.submit_scatter(p.mr, order, 1, group=group)
            waits = [engine.expect_imm_count(1, 1) for engine in engines]
            p.settle(sent, *waits)
            for k, target in enumerate(targets):
                source = p.src.data[100 * step : 100 * step + 100 + k]
                assert (source == target[k : k + 100 + k]).all()


def test_restarted_peer_is_reached_by_its_new_descriptors_only() -> None:
    """Old keys must never touch the memory of the new incarnation."""
    with pair(2, 2) as p:
        p.settle(p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0)))
        p.b.close()
        again = p.more("b", 3)
        assert again.main_address.epoch > p.desc.addr.epoch
        target = np.full(1 << 16, BLANK, np.uint8)
        _, desc = again.reg_mr(target)
        stale = p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0))
        p.settle(stale)
        assert "STALE_PEER" == stale.error.code
        sent = p.a.submit_single_write(40_000, (p.mr, 0), (desc, 0), 1)
        p.settle(sent)
        assert sent.ok
        assert (p.src.data[:40_000] == target[:40_000]).all()
        assert (target[40_000:] == BLANK).all()


def test_with_block_closes_and_closing_twice_is_once() -> None:
    """The usual form must leave nothing open, also with work under way."""
    with pair() as p:
        with p.a:
            sent = p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0))
            got = p.a.expect_imm_count(1, 1)
        p.a.close()
        assert sent.finished
        assert isinstance(got.error, ClosedError)
        assert [] == [m for m in p.b.driver.ring if m is p.a]

"""Engines with worker threads over the loopback: many users, asyncio, idleness, ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from tep.base.api import EngineOptions, Pages, ScatterDst
from tep.base.errors import (
    BusyError,
    Cancelled,
    ClosedError,
    FabricError,
    TepError,
    UsageError,
    WaitTimeout,
)
from tests.support.inside import machine_of, nics_of, worker_of
from tests.support.loopbacks import MortalLoopback
from tests.support.pairs import Pair, pair

WAIT_S = 30


def run_all(*jobs: Callable[[], object]) -> None:
    """Run jobs on a thread each, started together; re-raise what any of them raised."""
    gate = threading.Barrier(len(jobs))
    raised: list[BaseException] = []

    def run(job: Callable[[], object]) -> None:
        gate.wait()
        try:
            job()
        except BaseException as error:  # noqa: BLE001  # raised again on the test's thread
            raised.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a user's thread hangs"
    if raised:
        raise raised[0]


def test_users_on_many_threads_share_one_engine() -> None:
    """A submit lost, doubled or mixed with a neighbour's shows in a count or in the bytes."""
    nthreads, rounds, npages = 6, 25, 16
    with pair(2, 2, nbytes=nthreads * npages * 64, threads=True) as p:

        def user(me: int) -> None:
            pages = Pages(me * npages + np.arange(npages))
            for k in range(rounds):
                got = p.b.expect_imm_count(me, npages)
                sent = p.a.submit_paged_writes(64, (p.mr, pages), (p.desc, pages), me)
                if k % 3 == 0:
                    p.a.submit_barrier([p.desc], 1000 + me).wait(WAIT_S)
                assert p.a.stats().rows_backlog >= 0
                assert p.b.stats().expectations >= 0
                assert "engine b" in p.b.stall_report()
                got.wait(WAIT_S)
                sent.wait(WAIT_S)

        run_all(*(lambda me=me: user(me) for me in range(nthreads)))
        expected = nthreads * rounds
        barriers = -(-rounds // 3)
        loose = p.b.expect_imm_count(1000, barriers)
        loose.wait(WAIT_S)

        assert (p.src.data == p.dst.data).all()
        stats = p.a.stats()
        assert expected + nthreads * barriers == stats.transfers_done
        assert nthreads * (rounds * npages + barriers) == p.b.stats().imms_counted
        assert {1000 + me: barriers for me in range(1, nthreads)} == dict(
            p.b.stats().imms_unexpected
        )


def test_one_peer_group_used_by_many_threads() -> None:
    """Its cache is shared: one thread's descriptors with another's targets write to strangers."""
    with pair(2, 1, threads=True) as p:
        engines = [p.more(f"t{k}", 1 + k % 2) for k in range(4)]
        targets = [np.zeros((4, 64), np.uint8) for _ in engines]
        descs = [e.reg_mr(t)[1] for e, t in zip(engines, targets, strict=True)]
        group = p.a.add_peer_group([e.main_address for e in engines])

        def user(me: int) -> None:
            order = [(me + k) % 4 for k in range(4)]
            for _ in range(50):
                dsts = [ScatterDst(64, 64 * (4 * k + me), (descs[k], 64 * me)) for k in order]
                p.a.submit_scatter(p.mr, dsts, me, group=group).wait(WAIT_S)

        run_all(*(lambda me=me: user(me) for me in range(4)))
        for k, (engine, target) in enumerate(zip(engines, targets, strict=True)):
            for me in range(4):
                engine.expect_imm_count(me, 50).wait(WAIT_S)
                at = 64 * (4 * k + me)
                assert (p.src.data[at : at + 64] == target[me]).all()
            assert () == engine.stats().imms_unexpected


def test_regions_and_peers_met_by_many_threads_at_once() -> None:
    """Two regions of one number: one loses its memory; two links of one peer: one goes stale."""
    with pair(1, 2, threads=True) as p:
        made: list[int] = []

        def user() -> None:
            for _ in range(20):
                mr, desc = p.a.reg_mr(bytearray(64))
                made.append(desc.region)
                copy = type(p.desc).from_bytes(p.desc.to_bytes())
                p.a.submit_single_write(8, (mr, 0), (copy, 0)).wait(WAIT_S)
                p.a.deregister(mr)

        run_all(user, user, user, user)
        assert 80 == len(set(made))
        assert (1, 1) == (p.a.stats().peers, p.a.stats().regions)


def test_region_given_back_by_two_threads_is_given_back_once() -> None:
    """The second must hear that it is gone, not withdraw a key that is somebody else's by now."""
    with pair(threads=True) as p:
        for _ in range(20):
            mr, _ = p.a.reg_mr(bytearray(64))
            outcomes: list[str] = []

            def give_back(mr=mr, outcomes=outcomes) -> None:
                try:
                    p.a.deregister(mr)
                    outcomes.append("done")
                except ClosedError:
                    outcomes.append("closed")

            run_all(give_back, give_back)
            assert ["closed", "done"] == sorted(outcomes)


def test_close_while_others_submit_leaves_no_handle_open() -> None:
    """Between the check and the queue an engine may close; whoever waits then must hear of it."""
    for _ in range(8):
        with pair(2, 2, threads=True) as p:
            handles: list = []

            def user(p: Pair = p, handles: list = handles) -> None:
                try:
                    for k in range(10_000):
                        handles.append(p.a.submit_single_write(8, (p.mr, 0), (p.desc, 8 * k % 64)))
                        handles.append(p.a.expect_imm_count(k, 1))
                except (ClosedError, BusyError):
                    pass

            def close(p: Pair = p, handles: list = handles) -> None:
                while len(handles) < 30:
                    time.thread_time()
                p.a.close()

            run_all(user, user, close)
            assert [] == [handle.describe() for handle in handles if not handle.finished]
            assert all(handle.ok or isinstance(handle.error, TepError) for handle in handles)


def test_counts_are_exact_when_expectations_race_with_arrivals() -> None:
    """Early, late and in the middle: every round fires once whoever comes first."""
    with pair(2, 2, threads=True) as p:
        fired: list[int] = []
        pages = Pages(range(8))

        def sender() -> None:
            for _ in range(100):
                p.a.submit_paged_writes(8, (p.mr, pages), (p.desc, pages), 1)

        def reader() -> None:
            waits = [
                p.b.expect_imm_count(1, 8, on_done=lambda _, k=k: fired.append(k))
                for k in range(100)
            ]
            waits[-1].wait(WAIT_S)

        run_all(sender, reader)
        assert list(range(100)) == fired
        assert () == p.b.stats().imms_unexpected


def test_await_gather_timeout_and_task_cancel() -> None:
    """Programs for both worlds are written with await; cancelling a task only stops the waiting."""

    async def main(p: Pair) -> None:
        pages = Pages(range(16))
        got = [p.b.expect_imm_count(k, 16) for k in range(5)]
        sent = [p.a.submit_paged_writes(64, (p.mr, pages), (p.desc, pages), k) for k in range(5)]
        await asyncio.wait_for(asyncio.gather(*_tasks(*got, *sent)), WAIT_S)
        never = p.b.expect_imm_count(99, 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await never
        assert not never.finished
        task = asyncio.ensure_future(_wait(never))
        await asyncio.sleep(0)  # the task has begun to wait
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not never.finished
        p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 99)
        await asyncio.wait_for(_wait(never), WAIT_S)
        assert never.ok
        await never
        lost = p.b.expect_imm_count(98, 1)
        lost.cancel()
        with pytest.raises(Cancelled):
            await asyncio.wait_for(_wait(lost), WAIT_S)

    with pair(2, 2, threads=True) as p:
        asyncio.run(main(p))
        assert [] == list(p.b.callback_errors)


async def _wait(handle) -> None:
    await handle


def _tasks(*handles) -> list:
    return [_wait(handle) for handle in handles]


def test_an_await_that_ends_early_says_what_it_waited_for() -> None:
    """A coroutine that gives up after a minute must learn as much as a thread that waits."""

    async def main(p: Pair) -> None:
        never = p.b.expect_imm_count(99, 1)
        with pytest.raises(WaitTimeout) as late:
            await never.wait_async(0.01)
        assert "0x63" in str(late.value)
        assert p.b.stall_report().splitlines()[0].split()[0] in str(late.value)
        assert len(str(late.value).splitlines()) > 1
        assert not never.finished
        for ended in (never.wait_async(WAIT_S), _wait(never)):
            task = asyncio.ensure_future(ended)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError) as cancelled:
                await task
            assert any("it waited for" in note for note in cancelled.value.__notes__)
            assert any("0x63" in note for note in cancelled.value.__notes__)
        p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 99)
        await never.wait_async(WAIT_S)

    with pair(threads=True) as p:
        asyncio.run(main(p))


def test_event_loop_that_ended_before_the_transfer_is_no_error() -> None:
    """A timed-out program leaves; the engine goes on, and reports nothing it cannot help."""
    with pair(threads=True) as p:
        got = p.b.expect_imm_count(1, 1)

        async def main() -> None:
            async with asyncio.timeout(0.001):
                await got

        with pytest.raises(TimeoutError):
            asyncio.run(main())
        p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 1)
        got.wait(WAIT_S)
        assert [] == list(p.b.callback_errors)


def test_callbacks_run_on_the_worker_and_may_not_wait_there() -> None:
    """Waiting there would wait for itself, for ever."""
    with pair(threads=True) as p:
        seen: list[tuple[str, str]] = []
        done = threading.Event()

        def look(_: object) -> None:
            other = p.a.expect_imm_count(5, 1)
            try:
                other.wait(1)
            except UsageError as error:
                seen.append((threading.current_thread().name, str(error)))
            other.cancel()
            done.set()

        p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), on_done=look)
        assert done.wait(WAIT_S)
        message = "wait() inside a callback would wait for the thread it runs on; use callbacks or"
        assert "a-worker" == seen[0][0]
        assert seen[0][1].startswith(message)


def test_wait_times_out_with_a_report_while_the_engine_runs() -> None:
    """A wait from another thread must time out with a report, like with the inline driver."""
    with pair(threads=True) as p:
        got = p.b.expect_imm_count(0xAB, 3)
        p.a.submit_paged_writes(8, (p.mr, Pages([0, 1])), (p.desc, Pages([0, 1])), 0xAB).wait(5)
        p.b.expect_imm_count(0, 0).wait(WAIT_S)
        with pytest.raises(
            WaitTimeout, match=r"imm 0xab: [0-2] of 3 arrived; pending after 0.02 s"
        ):
            got.wait(0.02)


def test_watched_words_and_messages_wake_the_worker() -> None:
    """An idle worker sleeps: a store, a message and a write must each get it up."""
    with pair(threads=True) as p:
        seen: list[object] = []
        events = [threading.Event() for _ in range(2)]
        word = p.b.alloc_uvm_watcher(lambda old, new: (seen.append(new), events[0].set()))
        p.b.submit_recvs(64, 2, lambda view: (seen.append(bytes(view)), events[1].set()))
        word.store(5)
        assert events[0].wait(WAIT_S)
        p.a.submit_send(p.b.main_address, b"hello").wait(WAIT_S)
        assert events[1].wait(WAIT_S)
        assert [5, b"hello"] == seen
        word.close()


def test_idle_engine_uses_no_cpu_and_takes_no_steps() -> None:
    """A worker that spins with nothing to do takes a core from the model."""
    with pair(2, 2, threads=True) as p:
        p.b.expect_imm_count(1, 1)  # a wait is no work
        p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0)).wait(WAIT_S)
        quiet = threading.Event()
        before = None
        for _ in range(200):  # until the last spin is over
            now = (p.a.stats().steps, p.b.stats().steps)
            if now == before:
                break
            before = now
            quiet.wait(0.02)
        start = time.process_time()
        quiet.wait(0.2)
        assert before == (p.a.stats().steps, p.b.stats().steps)
        assert time.process_time() - start < 0.05


def test_nic_that_dies_under_load_fails_its_rows_and_moves_the_rest() -> None:
    """All handles end, the engine goes on with the other NIC, and no byte is wrong."""
    with pair(2, 2, threads=True, sq_depth=8, make=MortalLoopback) as p:
        pages = Pages(range(256))
        sent = [p.a.submit_paged_writes(256, (p.mr, pages), (p.desc, pages), 1) for _ in range(30)]
        p.a.driver.call(nics_of(p.a)[0].fail)
        ended = []
        for transfer in sent:
            try:
                transfer.wait(WAIT_S)
                ended.append("done")
            except FabricError as error:
                ended.append(error.code)
        assert set(ended) <= {"done", "NIC_DOWN"}
        assert "done" in ended
        after = p.a.submit_paged_writes(256, (p.mr, pages), (p.desc, pages), 2)
        p.b.expect_imm_count(2, 256).wait(WAIT_S)
        after.wait(WAIT_S)
        assert 0 == after.stats().nics[0].rows
        assert (p.src.data == p.dst.data).all()
        assert [0, 0] == list(p.a.stats().rows_outstanding)


def test_backlog_limit_holds_under_many_threads() -> None:
    """Counted without a lock, the limit drifts with every lost update."""
    options = EngineOptions(backlog_rows_max=1000)
    with pair(threads=True, options=options) as p:
        pages = Pages(range(100))

        def user() -> None:
            for _ in range(100):
                try:
                    sent = p.a.submit_paged_writes(8, (p.mr, pages), (p.desc, pages))
                except BusyError:
                    continue
                sent.wait(WAIT_S)

        run_all(user, user, user, user)
        assert machine_of(p.a)._rows_asked == worker_of(p.a).taken
        p.a.submit_paged_writes(8, (p.mr, pages), (p.desc, pages)).wait(WAIT_S)


def test_a_bug_in_a_step_ends_every_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """An assert that fails on the worker must reach those who wait, and its thread be joined."""
    printed: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: printed.append(str(args.exc_value)))
    with pair(threads=True) as p:

        def explode(_: object) -> int:
            raise AssertionError("planted")

        async def hope() -> None:
            expectation = p.b.expect_imm_count(5, 1)
            monkeypatch.setattr(nics_of(p.b)[0], "poll", explode)
            p.b.driver.kick()
            await asyncio.wait_for(expectation, WAIT_S)

        with pytest.raises(ClosedError, match="stopped by a bug .*AssertionError: planted"):
            asyncio.run(hope())
        with pytest.raises(ClosedError, match="closed"):
            p.b.expect_imm_count(6, 1)
        p.b.close()
        assert ["planted"] == printed  # close() returned after the thread's last word


def test_inline_wait_inside_a_callback_is_refused() -> None:
    """It would turn the engine while it is turned."""
    with pair() as p:
        never = p.a.expect_imm_count(5, 1)
        done = p.a.expect_imm_count(6, 0, on_done=lambda _: never.wait(1.0))
        p.settle(done)

        assert any("inside a callback" in str(error) for error in p.a.callback_errors)

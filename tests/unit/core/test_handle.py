"""Handles: waiting, callbacks, errors, and what a stalled one says."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import weakref

import pytest

import tep
from tep.base.errors import (
    BadRequest,
    CallbackError,
    Cancelled,
    ClosedError,
    FabricError,
    UsageError,
    WaitTimeout,
)
from tep.base.waiting import note_escape
from tep.core.handles import Handle, State
from tests.support.inside import machine_of
from tests.support.pairs import Pair, pair
from tests.support.script import Scripted, memory, scripted


def write(own: Scripted, on_done=None):
    mr, desc = own.engine.reg_mr(memory(1 << 20))
    return own.engine.submit_single_write(64, (mr, 0), (desc, 0), on_done=on_done)


def finish(own: Scripted) -> None:
    own.turn()
    for nic in own.nics:
        nic.finish()
    own.turn()


def test_states_run_from_pending_to_one_end() -> None:
    """A handle that says done and cancelled is read differently by every caller."""
    own = scripted()
    sent = write(own)
    assert (State.PENDING, False, False, False, False) == (
        sent.state,
        sent.finished,
        sent.ok,
        sent.failed,
        sent.cancelled,
    )
    assert "Transfer(single of 1 rows, 64 bytes to a: pending; 0 posted" in repr(sent)
    with pytest.raises(WaitTimeout, match="not settled yet: single of 1 rows, 64 bytes to a: pend"):
        sent.result()
    finish(own)
    assert (State.DONE, True, True, False, None) == (
        sent.state,
        sent.finished,
        sent.ok,
        sent.cancelled,
        sent.error,
    )
    assert sent is sent.result() is sent.wait(0)


def test_settling_twice_is_a_bug_that_shows() -> None:
    """The second end would overwrite what users have read."""
    handle = Handle(scripted().engine, 0.0)
    handle._settle(State.DONE)
    with pytest.raises(AssertionError, match="settled twice: Handle: done"):
        handle._settle(State.CANCELLED)


@pytest.mark.parametrize("state", [State.CANCELLED, State.FAILED])
def test_whoever_sees_the_end_finds_its_error(state: State) -> None:
    """A waiter on another thread that looked in mid-settling took a cancel for a good end."""
    seen: list[type[BaseException] | None] = []
    is_ready: list[bool] = []

    class Watched(Handle):
        """It is looked at whenever something of it is set."""

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if is_ready and name in {"_state", "_error"}:
                try:
                    self.result()
                    seen.append(None)
                except (Cancelled, FabricError, WaitTimeout) as error:
                    seen.append(type(error))

    handle = Watched(scripted().engine, 0.0)
    is_ready.append(True)
    handle._settle(state, FabricError("gone") if state is State.FAILED else None)

    assert {Cancelled if state is State.CANCELLED else FabricError} == set(seen)
    assert state is handle.state


def test_callbacks_run_after_the_step_and_once() -> None:
    """Inside the step they could submit while queues are half changed."""
    own = scripted()
    seen: list[object] = []
    sent = write(own, on_done=seen.append)
    sent.add_done_callback(seen.append)
    machine_of(own.engine).step()
    own.nics[0].finish()
    machine_of(own.engine).step()
    assert sent.ok
    assert [] == seen
    machine_of(own.engine).deliver()
    machine_of(own.engine).deliver()
    assert [sent, sent] == seen


@pytest.mark.parametrize("when", ["before it is stored", "after it is stored"])
def test_a_callback_that_comes_while_its_handle_is_delivered_runs_once(when: str) -> None:
    """Handles nobody asks for are delivered without the lock: a callback must not fall between."""
    own = scripted()
    sent = write(own)
    machine_of(own.engine).step()
    own.nics[0].finish()
    machine_of(own.engine).step()
    seen: list[object] = []

    class Meanwhile(contextlib.AbstractContextManager[None]):
        """The lock, at whose edges the other thread gets its turn."""

        def __enter__(self) -> None:
            if when == "before it is stored":
                own.engine.driver.lock = contextlib.nullcontext()
                machine_of(own.engine).deliver()

        def __exit__(self, *_: object) -> None:
            own.engine.driver.lock = contextlib.nullcontext()
            machine_of(own.engine).deliver()

    own.engine.driver.lock = Meanwhile()
    sent.add_done_callback(seen.append)
    machine_of(own.engine).deliver()
    assert [sent] == seen


def test_callback_added_after_the_end_runs_at_once() -> None:
    """The classic race: it settled between submit and add_done_callback."""
    own = scripted()
    seen: list[object] = []
    sent = write(own)
    own.turn()
    own.nics[0].finish()
    machine_of(own.engine).step()
    sent.add_done_callback(seen.append)
    assert [] == seen, "settled, but not delivered yet: it waits for its turn"
    machine_of(own.engine).deliver()
    sent.add_done_callback(seen.append)
    assert [sent, sent] == seen


def test_raising_callbacks_are_reported_and_disturb_nothing(caplog) -> None:
    """One bad callback must not stop the other callbacks, nor the engine."""
    own = scripted()
    seen: list[object] = []

    def bad(_: object) -> None:
        raise RuntimeError("boom")

    first, second = write(own, on_done=bad), write(own, on_done=seen.append)
    first.add_done_callback(seen.append)
    with caplog.at_level(logging.ERROR, "tep"):
        finish(own)
        second.add_done_callback(bad)

    assert [first, second] == seen
    assert first.ok
    assert 2 == own.engine.stats().callback_errors
    errors = own.engine.callback_errors
    assert [CallbackError] * 2 == [type(error) for error in errors]
    assert "bad of single of 1 rows, 64 bytes to a: done" in str(errors[0])
    assert str(errors[0]).endswith("raised RuntimeError: boom")
    assert isinstance(errors[0].__cause__, RuntimeError)
    assert 2 == len([record for record in caplog.records if "boom" in record.message])


def test_every_kind_of_callback_may_raise() -> None:
    """Loose immediates, watched words and messages too run user code on the worker."""

    def bad(*_: object) -> None:
        raise KeyError("x")

    with pair() as p:
        p.b.on_imm(range(5), bad)
        p.b.submit_recvs(64, 2, bad)
        word = p.b.alloc_uvm_watcher(bad)
        for _ in range(3):
            word.store(int(word.word[0]) + 1)
            p.settle(
                p.a.submit_send(p.b.main_address, b"hello"),
                p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 3),
            )
            p.quiet(3)

        assert 9 == p.b.stats().callback_errors
        assert 9 == len(p.b.callback_errors)


def test_only_the_last_callback_errors_are_kept() -> None:
    """A callback that always raises must not fill the memory."""
    own = scripted()
    sent = write(own)
    finish(own)
    for _ in range(250):
        sent.add_done_callback(lambda _: 1 // 0)

    assert 250 == own.engine.stats().callback_errors
    assert 100 == len(own.engine.callback_errors)


def test_callbacks_may_submit() -> None:
    """Chains of transfers are written that way."""
    own = scripted()
    made: list[Handle] = []

    def again(_: object) -> None:
        if len(made) < 5:
            made.append(write(own, on_done=again))

    again(None)
    for _ in range(6):
        finish(own)
    assert [True] * 5 == [handle.ok for handle in made]


def test_wait_that_times_out_reports_the_stall_and_leaves_the_handle() -> None:
    """'Timed out' alone names neither the peer, the counter, nor how many are missing."""
    own = scripted(2)
    got = own.engine.expect_imm_count(0xBEEF, 5)
    own.nics[1].arrive(0xBEEF, 3)
    own.nics[1].arrive(0x77, 2)
    sent = write(own)
    with pytest.raises(WaitTimeout) as caught:
        got.wait(0.001)
    text = str(caught.value)

    assert text.startswith("imm 0xbeef: 3 of 5 arrived; pending after 0.001 s\nengine a: 2 open")
    assert "single of 1 rows, 64 bytes to a: pending; 1 posted, 0 back, 0 failed, 0 drop" in text
    assert "NIC 0 (a/0, alive): 1 rows outstanding" in text
    assert "immediates here that no expectation has used: 0xbeef x 3, 0x77 x 2" in text
    with pytest.raises(TimeoutError, match="to a: pending; 1 posted, 0 back"):
        sent.wait(0)
    own.nics[1].arrive(0xBEEF, 2)
    own.nics[0].finish()
    got.wait(1)
    sent.wait(1)


def test_a_wait_that_need_not_wait_raises_what_a_callback_left() -> None:
    """Ctrl-C in a callback would be lost where all handles have ended by then."""
    own = scripted()
    ended = write(own)
    finish(own)
    note_escape(SystemExit(3))
    with pytest.raises(SystemExit):
        ended.wait(1)
    ended.wait(1)


def _leave(_: Handle) -> None:
    raise SystemExit(3)


def test_a_wait_ends_with_what_a_callback_raises_meanwhile() -> None:
    """Ctrl-C in a callback of one transfer would leave the program waiting for another one."""
    own = scripted()
    write(own).add_done_callback(_leave)
    still = own.engine.expect_imm_count(0xBEEF, 2)
    own.turn()
    own.nics[0].finish()
    with pytest.raises(SystemExit):
        still.wait(1)


def test_a_coroutine_ends_with_what_a_callback_raises_meanwhile() -> None:
    """The coroutine would go on with the next line; a wait raises too."""

    async def main(engine: tep.TransferEngine) -> None:
        loop, still = asyncio.get_running_loop(), engine.expect_imm_count(7, 1)
        loop.call_soon(note_escape, SystemExit(3))
        loop.call_soon(still.cancel)
        with pytest.raises(SystemExit):
            await still
        await (ready := engine.expect_imm_count(8, 0))
        note_escape(SystemExit(3))
        with pytest.raises(SystemExit):  # though there is nothing to wait for
            await ready

    with tep.TransferEngine.open("loopback") as engine:
        asyncio.run(main(engine))


def test_default_timeout_is_the_engines() -> None:
    """A wait without a limit turns a lost packet into a hung job."""
    own = scripted()
    machine_of(own.engine).wait_timeout_s = 0.001
    with pytest.raises(WaitTimeout, match="after 0.001 s"):
        own.engine.expect_imm_count(1, 1).wait()
    with pytest.raises(BadRequest, match="wait: timeout_s=nan"):
        own.engine.expect_imm_count(1, 1).wait(math.nan)


def test_inline_engine_cannot_be_awaited() -> None:
    """Nobody would turn it: the event loop would sleep for ever."""

    async def main() -> None:
        own = scripted()
        with pytest.raises(UsageError, match="an engine with an inline driver cannot be awaited"):
            await own.engine.expect_imm_count(1, 1)
        ready = own.engine.expect_imm_count(2, 0)
        own.turn()
        await ready

    asyncio.run(main())


def test_asyncio_waits_for_many_handles() -> None:
    """A server waits for a batch by the means that it has; what blocks a thread stops all else."""

    async def main(p: Pair) -> None:
        async with asyncio.timeout(30):
            many = range(40)
            sent = [p.a.submit_single_write(8, (p.mr, 8 * k), (p.desc, 8 * k), k) for k in many]
            got = [p.b.expect_imm_count(k, 1) for k in many]
            assert [*sent, *got] == await asyncio.gather(*sent, *got)
            more = [p.a.submit_single_write(8, (p.mr, 8 * k), (p.desc, 8 * k)) for k in many]
            assert set(more) == {await ended for ended in asyncio.as_completed(more)}
            lost = p.b.expect_imm_count(99, 1)
            lost.cancel()
            first, last = await asyncio.gather(sent[0], lost, return_exceptions=True)
            assert (sent[0], lost.error) == (first, last)
            assert more[1] is await more[1].wait_async(timeout_s=1)

    with pair(threads=True) as p:
        asyncio.run(main(p))


def test_a_coroutine_has_the_timeout_and_the_report() -> None:
    """A coroutine that waits for ever is a request that nobody answers."""

    async def main(p: Pair) -> None:
        with pytest.raises(WaitTimeout, match="imm 0x4d: 0 of 1 arrived; pending after 0.01 s"):
            await p.b.expect_imm_count(77, 1).wait_async(timeout_s=0.01)

    with pair(threads=True) as p:
        asyncio.run(main(p))


def test_a_wait_that_is_over_leaves_nothing_behind() -> None:
    """A server waits a thousand times for one handle; each wait would be kept, and be woken."""
    own = scripted()
    never = own.engine.expect_imm_count(9, 1)
    told: list[str] = []

    def first(_: object) -> None:
        told.append("first")

    def second(_: object) -> None:
        told.append("second")

    for callback in (first, second, second):
        never.add_done_callback(callback)
    for callback in (first, second):
        never.remove_done_callback(callback)
    gone = weakref.ref(first)
    del first, callback
    gc.collect()
    assert gone() is None
    own.nics[0].arrive(9)
    own.turn(2)
    assert ["second"] == told, "the one that was taken back only once"


def test_a_failed_handle_says_why() -> None:
    """A list of transfers in a debugger is read for the one that failed."""
    own = scripted()
    sent = write(own)
    own.engine.close()
    assert sent.failed
    assert sent.finished
    assert not sent.ok
    assert "; ClosedError: " in repr(sent) or isinstance(sent.error, FabricError)


def test_same_error_raised_to_many_does_not_pile_up_tracebacks() -> None:
    """Each raise lengthens the traceback that the one exception object carries."""
    own = scripted()
    sent = write(own)
    sent.cancel()
    own.turn()
    depths = []
    for _ in range(5):
        with pytest.raises(Cancelled) as caught:
            sent.result()
        depths.append(len(caught.traceback))

    assert depths[:1] * 5 == depths


def test_wait_on_a_closed_engine_raises_its_error() -> None:
    """It must neither hang nor return as if all were well."""
    own = scripted()
    got = own.engine.expect_imm_count(1, 1)
    own.engine.close()
    with pytest.raises(ClosedError, match="the engine was closed before this ended"):
        got.wait(1)
    got.cancel()
    assert not got.cancelled

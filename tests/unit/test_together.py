"""Several handles at once: gather and as_completed, by threads and coroutines, over all drivers."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

import tep
from tep.errors import Cancelled, FabricError, UsageError, WaitTimeout
from tests.support.pairs import pair
from tests.support.script import memory, scripted


def writes(p, n):
    return [p.a.submit_single_write(64, (p.mr, 64 * k), (p.desc, 64 * k), k) for k in range(n)]


@pytest.mark.parametrize("threads", [False, True])
def test_gather_returns_the_handles_in_their_order(threads) -> None:
    """Who unpacks the list would read another transfer's error."""
    with pair(threads=threads) as p:
        sent = writes(p, 100)
        got = [p.b.expect_imm_count(k, 1) for k in range(100)]
        assert [*sent, *got] == tep.gather(*sent, *got).wait(timeout_s=30)
        assert all(handle.ok for handle in (*sent, *got))
        assert [] == tep.gather().wait(0)
        assert 0.0 == tep.gather().wait_timeout_s


@pytest.mark.parametrize("threads", [False, True])
def test_as_completed_returns_each_once(threads) -> None:
    """One that is left out is a buffer never used again; one that comes twice is used twice."""
    with pair(threads=threads) as p:
        sent = writes(p, 50)
        got = [p.b.expect_imm_count(k, 1) for k in range(50)]
        seen = list(tep.as_completed([*sent, *got], timeout_s=30))
        assert len(seen) == 100
        assert {*sent, *got} == set(seen)
        assert [] == list(tep.as_completed([]))


def test_coroutines_have_both() -> None:
    """Servers are written with asyncio: what blocks a thread there stops all requests."""

    async def main(p) -> None:
        async with asyncio.timeout(30):
            sent = writes(p, 40)
            assert sent == await tep.gather(*sent)
            assert sent == await tep.gather(*sent).wait_async(timeout_s=10)
            more = writes(p, 40)
            seen = [handle async for handle in tep.as_completed(more)]
            assert set(more) == set(seen)
            assert more[0] is await more[0]
            assert more[1] is await more[1].wait_async(timeout_s=1)

    with pair(threads=True) as p:
        asyncio.run(main(p))


def test_the_first_error_is_raised_at_once_and_the_others_go_on() -> None:
    """Waiting for the rest would hide the reason why the rest does not come."""
    own = scripted()
    mr, desc = own.engine.reg_mr(memory(1 << 20))
    never = own.engine.expect_imm_count(9, 1)
    lost = own.engine.expect_imm_count(8, 1)
    fine = own.engine.submit_single_write(64, (mr, 0), (desc, 0))
    lost.cancel()
    both = tep.gather(never, lost, fine)
    with pytest.raises(Cancelled):
        both.wait(timeout_s=5)
    assert both.finished
    assert not never.finished
    both.cancel()
    assert not fine.finished, "a NIC has it"
    own.nics[0].finish()
    found = tep.gather(never, lost, fine, return_exceptions=True).wait(timeout_s=5)
    assert [never.error, lost.error, fine] == found
    assert isinstance(found[0], Cancelled)
    assert [True] * 3 == [handle.finished for handle in tep.as_completed([never, lost, fine])]


def test_a_late_gather_names_what_is_open_and_why() -> None:
    """'Timed out' alone does not say which of 64 peers is missing."""
    own = scripted()
    mr, desc = own.engine.reg_mr(memory(1 << 20))
    sent = own.engine.submit_single_write(64, (mr, 0), (desc, 0))
    waits = [own.engine.expect_imm_count(k, 1) for k in range(16)]
    for late in (
        lambda: tep.gather(sent, *waits).wait(timeout_s=0.001),
        lambda: list(tep.as_completed([sent, *waits], timeout_s=0.001)),
    ):
        with pytest.raises(WaitTimeout) as caught:
            late()
        text = str(caught.value)
        assert "of 17 handles: 0 ok, 0 failed or cancelled, 17 open after 0.001 s" in text
        assert "open: imm 0x" in text
        assert "and 9 more" in text
        assert "engine a: 17 open" in text
    with pytest.raises(WaitTimeout) as caught:
        tep.gather(sent).wait(timeout_s=0.001)
    assert " more" not in str(caught.value)
    with pytest.raises(WaitTimeout, match="not finished yet: gather of 1"):
        tep.gather(sent).result()


def test_drivers_take_turns_that_grow_longer(monkeypatch) -> None:
    """One that had the whole time would leave the bytes of the others where they are."""
    turns: list[tuple[str, float]] = []
    both = [scripted(name=name) for name in "ab"]
    for own in both:

        def wait(_: object, seconds: float, name: str = own.engine.name) -> bool:
            turns.append((name, seconds))
            return False

        monkeypatch.setattr(own.driver, "wait", wait)
        monkeypatch.setattr(own.driver, "now_s", lambda: sum(seconds for _, seconds in turns))
    waits = [own.engine.expect_imm_count(1, 1) for own in both]
    with pytest.raises(WaitTimeout):
        next(tep.as_completed(waits, timeout_s=0.1))
    assert list("ababababababa") == [name for name, _ in turns]
    each = [n / 1000 for n in (1, 2, 4, 8, 16, 16) for _ in both]
    assert pytest.approx([*each, 0.006]) == [seconds for _, seconds in turns]
    turns.clear()
    with pytest.raises(WaitTimeout):
        tep.gather(waits[0]).wait(0.1)
    assert [("a", 0.1)] == turns


def test_coroutines_have_the_timeout_and_the_report() -> None:
    """A coroutine that waits for ever is a request that nobody answers."""

    async def main(p) -> None:
        never = p.b.expect_imm_count(77, 1)
        with pytest.raises(WaitTimeout, match="1 open after 0.01 s"):
            await tep.gather(never).wait_async(timeout_s=0.01)
        with pytest.raises(WaitTimeout, match="1 open after 0.01 s"):
            async for _ in tep.as_completed([never], timeout_s=0.01):
                pass
        with pytest.raises(WaitTimeout, match="imm 0x4d: 0 of 1 arrived; pending after 0.01 s"):
            await never.wait_async(timeout_s=0.01)

    with pair(threads=True) as p:
        asyncio.run(main(p))


def test_a_wait_that_is_over_leaves_nothing_behind() -> None:
    """A server waits a thousand times for one batch; each wait would be kept, and be woken."""
    own = scripted()
    never, late = (own.engine.expect_imm_count(k, 1) for k in (8, 9))
    batch = tep.as_completed([never, late])
    told: list[str] = []

    def first(_: object) -> None:
        told.append("first")

    def second(_: object) -> None:
        told.append("second")

    for callback in (first, second, second):
        batch.add_done_callback(callback)
    for callback in (first, second):
        batch.remove_done_callback(callback)
    gone = weakref.ref(first)
    del first, callback
    gc.collect()
    assert gone() is None
    own.nics[0].arrive(9)
    own.turn(2)
    assert ["second"] == told, "the one that was taken back only once"
    seen: list[object] = []
    batch = tep.as_completed([never, late])
    batch.add_done_callback(seen.append)
    assert [batch] == seen, "its handle ended before it was made"


def test_what_nobody_would_turn_cannot_be_awaited_together() -> None:
    """The event loop would sleep for ever."""

    async def main() -> None:
        own = scripted()
        with pytest.raises(UsageError, match="an engine with an inline driver cannot be awaited"):
            await tep.gather(own.engine.expect_imm_count(1, 1))

    asyncio.run(main())


def test_only_handles_can_be_waited_for() -> None:
    """A coroutine in the list would never be run, and the wait never end."""
    with pytest.raises(UsageError, match="gather: handle"):
        tep.gather(asyncio.sleep)
    with pytest.raises(UsageError, match="as_completed: handle"):
        tep.as_completed([3])


def test_an_engine_is_an_asynchronous_context_manager() -> None:
    """`async with` is how a server holds what it opens."""

    async def main() -> tep.TransferEngine:
        async with tep.TransferEngine.open("loopback") as engine:
            mr, desc = engine.reg_mr(bytearray(64))
            assert "1 regions" in repr(engine)
            assert isinstance(await engine.submit_single_write(8, (mr, 0), (desc, 8)), tep.Transfer)
        return engine

    engine = asyncio.run(main())
    assert "closed" in repr(engine)


def test_handles_of_a_simulation_are_gathered_in_its_time() -> None:
    """A timeout in real seconds would make simulated runs differ from each other."""
    with tep.sim.Cluster(nodes=2, seed=1) as cluster:
        a, b = cluster.engines
        mr, _ = a.reg_mr(bytearray(1024))
        _, desc = b.reg_mr(bytearray(1024))
        sent = [a.submit_single_write(64, (mr, 0), (desc, 64 * k), 5) for k in range(8)]
        got = b.expect_imm_count(5, 8)
        assert [*sent, got] == tep.gather(*sent, got).wait(timeout_s=1)


def test_a_failed_handle_says_why() -> None:
    """A list of transfers in a debugger is read for the one that failed."""
    own = scripted()
    mr, desc = own.engine.reg_mr(memory(1 << 20))
    sent = own.engine.submit_single_write(64, (mr, 0), (desc, 0))
    own.engine.close()
    assert sent.failed
    assert sent.finished
    assert not sent.ok
    assert "; ClosedError: " in repr(sent) or isinstance(sent.error, FabricError)

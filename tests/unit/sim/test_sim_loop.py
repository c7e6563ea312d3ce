"""asyncio on simulated time: what works as in real time, and what is refused."""

from __future__ import annotations

import asyncio
import gc

import pytest

from tep.base.errors import StallError, UsageError
from tep.base.units import PS_PER_S, PS_PER_US
from tep.sim.clock import FabricEnv
from tep.sim.loop import current_env, run


def _now_us() -> float:
    env = current_env()
    assert env is not None
    return env.now / PS_PER_US


def test_sleep_takes_exactly_its_simulated_time() -> None:
    """Rounding in the loop would shift every later event by a picosecond or for ever."""

    async def main() -> list[float]:
        seen = []
        for us in (1, 0.25, 1000, 0, 3_600_000_000):
            await asyncio.sleep(us / 1e6)
            seen.append(_now_us())
        return seen

    assert [1, 1.25, 1001.25, 1001.25, 3_600_001_001.25] == run(main())


def test_loop_time_is_simulated_seconds() -> None:
    """Libraries compute deadlines from loop.time()."""

    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        before = loop.time()
        await asyncio.sleep(2.5)
        return before, loop.time()

    assert (0, 2.5) == run(main())


def test_gather_and_task_group_overlap() -> None:
    """Tasks that waited one after the other would triple every simulated time."""

    async def main() -> tuple[list[str], float]:
        log: list[str] = []

        async def task(name: str, us: float) -> str:
            await asyncio.sleep(us / 1e6)
            log.append(name)
            return name

        assert ["a", "b"] == await asyncio.gather(task("a", 3), task("b", 1))
        async with asyncio.TaskGroup() as group:
            for name, us in (("c", 2), ("d", 1), ("e", 2)):
                group.create_task(task(name, us))
        return log, _now_us()

    assert (["b", "a", "d", "c", "e"], 5) == run(main())


def test_timeout_ends_a_wait_for_nothing() -> None:
    """A wait with a deadline is no stall: it ends, in simulated time, at once in real time."""

    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4):
                await asyncio.Event().wait()
        return _now_us()

    assert 4e6 == run(main())


def test_events_of_the_clock_wake_coroutines_at_their_time() -> None:
    """A future set by a fabric event must be seen before the next event."""
    env = FabricEnv()

    async def main() -> tuple[int, list[int]]:
        later: list[int] = []
        future = asyncio.get_running_loop().create_future()
        env.call_at(70, future.set_result, 1)
        env.call_at(71, later.append, 1)
        await future
        return env.now, list(later)

    assert (70, []) == run(main(), env)


def test_ready_coroutines_do_not_starve_and_time_stands_still() -> None:
    """Yielding with sleep(0) is not a passage of time."""

    async def main() -> float:
        for _ in range(100):
            await asyncio.sleep(0)
        return _now_us()

    assert 0 == run(main())


def test_simpy_processes_live_beside_coroutines() -> None:
    """Workloads are written as simpy processes, programs as coroutines; they share one clock."""
    env = FabricEnv()
    log: list[tuple[str, int]] = []

    def process():
        for _ in range(3):
            yield env.timeout(PS_PER_US)
            log.append(("process", env.now))

    async def main() -> None:
        env.process(process())
        await asyncio.sleep(1.5e-6)
        log.append(("coroutine", env.now))

    run(main(), env)
    assert [("process", 1_000_000), ("coroutine", 1_500_000)] == log
    env.run()
    assert 3_000_000 == env.now


def test_works_inside_a_running_loop() -> None:
    """A notebook has a loop running already: without this nobody could try tep in one."""

    async def main() -> float:
        async with asyncio.timeout(1):
            await asyncio.sleep(0.5)
        return _now_us()

    async def notebook() -> tuple[float, str]:
        outer = asyncio.get_running_loop()
        simulated = run(main())
        assert asyncio.get_running_loop() is outer
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        return simulated, task.get_name()

    async def named() -> tuple[float, str]:
        return await asyncio.create_task(notebook(), name="cell")

    assert (5e5, "cell") == asyncio.run(named())


def test_a_wait_that_nothing_can_end_raises_a_report() -> None:
    """A hang without a word is what a simulation is there to prevent."""
    env = FabricEnv()
    env.reporters.append(lambda: "engine a waits for b")

    async def reader() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.sleep(1e-6)
        helper = asyncio.create_task(reader(), name="reader")
        await helper

    with pytest.raises(StallError) as caught:
        run(main(), env)
    text = str(caught.value)
    assert "at 1.000 us of simulated time" in text
    assert "task main: waits in main" in text
    assert "task reader: waits in" in text
    assert "engine a waits for b" in text
    assert not env.running
    assert 7 == run(_value(7), env), "the clock can be used again"


async def _value(value: int) -> int:
    return value


def test_tasks_left_behind_are_cancelled_and_generators_closed() -> None:
    """Warnings about lost tasks would hide the real failure; asyncio.run() does the same."""
    log: list[str] = []
    streams = []

    async def forgotten() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            log.append("cancelled")

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()

    async def ticks():
        try:
            while True:
                yield 1
        finally:
            log.append("closed")

    async def main() -> None:
        asyncio.create_task(forgotten())  # noqa: RUF006  # to be forgotten is its part
        asyncio.create_task(stubborn())  # noqa: RUF006  # as above
        streams.append(ticks())
        assert 1 == await anext(streams[0])
        log.append("main")

    run(main())
    gc.collect()
    assert ["main", "cancelled", "closed"] == log


def test_exceptions_reach_the_caller() -> None:
    """A failed assertion in a coroutine is the test's failure, with its own type."""

    async def main() -> None:
        await asyncio.sleep(1e-6)
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        run(main())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda loop: loop.run_in_executor(None, print), "no threads in simulated time"),
        (lambda loop: loop.add_signal_handler(2, print), "no signal handlers"),
        (lambda loop: loop.add_reader(0, print), "cannot watch"),
    ],
)
def test_what_has_no_simulated_time_is_refused(call, message) -> None:
    """A socket in a simulated loop would wait for ever, without a word."""

    async def main() -> None:
        call(asyncio.get_running_loop())

    with pytest.raises(UsageError, match=message):
        run(main())


def test_other_threads_are_refused() -> None:
    """A call from another thread arrives at a time that no seed decides."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        caught: list[BaseException] = []

        def other() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except UsageError as error:
                caught.append(error)

        import threading

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert "a call from another thread" in str(caught[0])

    run(main())


def test_pythons_collector_is_left_as_it_was_found() -> None:
    """A run looks at old objects more rarely; a program that goes on must not."""
    before = gc.get_threshold()

    async def main() -> tuple[int, int, int]:
        return gc.get_threshold()

    young, _, old = run(main())
    try:
        gc.set_threshold(0)
        off = run(main())
        assert (0, off) == (gc.get_threshold()[0], gc.get_threshold())
    finally:
        gc.set_threshold(*before)

    assert (young, old) > (before[0], before[2])
    assert before == gc.get_threshold()


def test_run_inside_run_is_refused() -> None:
    """Two clocks in one program would run apart."""

    async def main() -> None:
        run(_value(1))

    with pytest.raises(UsageError, match="inside tep.sim.run"):
        run(main())
    with pytest.raises(UsageError, match="takes a coroutine"):
        run(_value)  # type: ignore[arg-type]  # that is the test


def test_a_run_inside_an_event_of_its_clock_is_refused() -> None:
    """The same clock would be turned by two loops at once."""
    env = FabricEnv()
    env.call_at(1, lambda _: run(_value(1), env))
    with pytest.raises(UsageError, match="use `await`"):
        env.run()


def test_a_long_wait_costs_no_more_than_a_short_one() -> None:
    """Simulated days must not be walked through tick by tick."""

    async def main() -> float:
        await asyncio.sleep(400 * 24 * 3600)
        return _now_us() / 1e6

    assert 400 * 24 * 3600 == run(main())
    assert 1_000_000_000_000 == PS_PER_S


def test_an_error_has_no_frames_of_the_event_loop() -> None:
    """The first 40 lines of a failing test showed asyncio's source, and not the protocol's."""

    async def main() -> None:
        await asyncio.sleep(1e-6)
        raise ValueError("of the protocol")

    with pytest.raises(ValueError, match="of the protocol") as found:
        run(main())

    assert "main" == found.traceback[-1].name
    assert [] == [frame.path for frame in found.traceback if "asyncio" in str(frame.path)]

"""The drivers alone, each turning a small machine made for the test: no engine, no NIC."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterator

import pytest

from tep.base.errors import ClosedError, UsageError
from tep.drivers.threads import InlineDriver, ThreadDriver
from tests.support.descriptors import descriptors, opened_since
from tests.support.machines import FakeMachine, Handle

PATIENCE_S = 20.0
"""Time limit for events that must happen at once, seconds; only a broken driver reaches it."""


class Machine(FakeMachine):
    """A machine that does the work it was told, and says where it was turned."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.delivered = 0
        self.stepped_by: set[int] = set()

    def step(self) -> bool:
        self.steps += 1
        self.stepped_by.add(threading.get_ident())
        work = bool(self.todo)
        while self.todo:
            self.todo.pop(0)()
        return work

    def deliver(self) -> None:
        self.delivered += 1


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def driver(machine: Machine) -> Iterator[ThreadDriver]:
    """A thread driver that turns `machine`, closed afterwards."""
    driver = ThreadDriver("test")
    driver.start(machine)
    yield driver
    driver.close()


def asleep(machine: Machine) -> None:
    """Wait until the worker is about to sleep (it arms as the last thing before)."""
    assert machine.armed.wait(PATIENCE_S)


# --- the thread driver ---------------------------------------------------------------------------


def test_kick_wakes_a_sleeping_worker(driver: ThreadDriver, machine: Machine) -> None:
    """A kick lost between the last look and the sleep would leave a submit lying for ever."""
    for _ in range(50):
        machine.armed.clear()
        done = threading.Event()
        machine.todo.append(done.set)
        driver.kick()
        assert done.wait(PATIENCE_S)
        asleep(machine)


def test_kick_from_many_threads_loses_nothing(driver: ThreadDriver, machine: Machine) -> None:
    """NICs and users kick at once; every piece of work must still be found."""
    done = [threading.Event() for _ in range(400)]

    def push(part: list[threading.Event]) -> None:
        for event in part:
            machine.todo.append(event.set)
            driver.kick()

    threads = [threading.Thread(target=push, args=(done[k::4],)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all(event.wait(PATIENCE_S) for event in done)


def test_kicks_of_an_awake_worker_ring_once(driver: ThreadDriver, machine: Machine) -> None:
    """Each ring is a system call: a submit beside a busy worker would cost one."""
    rung: list[int] = []
    done = threading.Event()

    def work() -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(driver._bell)
        for _ in range(3):
            driver.kick()
        rung.append(os.eventfd_read(driver._bell))
        done.set()

    asleep(machine)
    machine.todo.append(work)
    driver.kick()
    assert done.wait(PATIENCE_S)

    assert [1] == rung


def test_a_nic_descriptor_wakes_a_sleeping_worker(machine: Machine) -> None:
    """Hardware announces completions by a descriptor, not by a kick."""
    reader, writer = os.pipe()
    machine.fds.append(reader)
    driver = ThreadDriver("test")
    driver.start(machine)
    try:
        asleep(machine)
        done = threading.Event()
        machine.todo.append(lambda: (os.read(reader, 1), done.set()))
        os.write(writer, b"x")
        assert done.wait(PATIENCE_S)
    finally:
        driver.close()
        os.close(reader)
        os.close(writer)


def test_call_runs_on_the_worker_and_returns(driver: ThreadDriver, machine: Machine) -> None:
    """Registration must happen on the thread that owns the NICs, between two steps."""
    asleep(machine)

    assert driver.call(threading.get_ident) in machine.stepped_by
    assert threading.get_ident() not in machine.stepped_by


def test_call_hands_an_exception_to_its_caller(driver: ThreadDriver) -> None:
    """A refused registration must reach the user and leave the worker alive."""

    def refuse() -> None:
        raise LookupError("no such region 7")

    with pytest.raises(LookupError, match="no such region 7"):
        driver.call(refuse)
    assert 5 == driver.call(lambda: 5)


def test_call_inside_a_call_does_not_wait_for_itself(driver: ThreadDriver) -> None:
    """A callback that registers memory runs on the worker already."""
    assert 5 == driver.call(lambda: driver.call(lambda: 5))


def test_call_after_close_runs_where_it_is_called(driver: ThreadDriver) -> None:
    """stats() of a closed engine must still answer."""
    driver.close()

    assert threading.get_ident() == driver.call(threading.get_ident)


def test_close_is_idempotent_and_ends_the_thread(driver: ThreadDriver) -> None:
    """A second close() comes from `with` after an explicit one; a thread left over leaks a NIC."""
    worker = driver.call(threading.current_thread)
    assert "test-worker" == worker.name
    assert worker.daemon

    driver.close()
    driver.close()
    assert not worker.is_alive()


def test_close_from_the_worker_itself_does_not_join_itself(driver: ThreadDriver) -> None:
    """A callback may close its engine."""
    worker = driver.call(threading.current_thread)
    driver.call(driver.close)

    worker.join(PATIENCE_S)
    assert not worker.is_alive()


def test_kick_after_close_is_harmless(driver: ThreadDriver) -> None:
    """A peer's engine may announce news while this one closes."""
    driver.close()
    driver.kick()


def test_the_descriptor_is_freed_with_the_driver(machine: Machine) -> None:
    """A thousand engines opened and closed must not exhaust the process's descriptors."""
    before = descriptors()
    for _ in range(20):
        driver = ThreadDriver("test")
        driver.start(machine)
        driver.close()
        del driver

    assert set() == opened_since(before)


def test_wait_returns_when_the_handle_settles(driver: ThreadDriver, machine: Machine) -> None:
    """The waiting thread sleeps until the worker settles, and then goes on."""
    handle = Handle()
    machine.todo.append(handle.settle)
    driver.kick()

    assert driver.wait(handle, PATIENCE_S)
    assert driver.wait(handle, 0.0), "a settled handle never times out"


def test_wait_times_out(driver: ThreadDriver) -> None:
    """Every wait can time out, and not long after it said."""
    started = time.monotonic()

    assert not driver.wait(Handle(), 0.05)
    assert 0.05 <= time.monotonic() - started
    assert not driver.wait(Handle(), 0.0)


def test_wait_on_the_worker_is_refused(driver: ThreadDriver) -> None:
    """A callback that waits would stop the only thread that can end its wait."""
    with pytest.raises(UsageError, match=r"wait\(\) inside a callback would wait for the thread"):
        driver.call(lambda: driver.wait(Handle(), 1.0))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_wait_notices_that_the_worker_died(driver: ThreadDriver, machine: Machine) -> None:
    """A bug that ends the worker must be told now, not after the whole timeout."""

    def fail() -> None:
        raise AssertionError("planted")

    machine.todo.append(fail)
    driver.kick()
    with pytest.raises(ClosedError, match="the engine's worker has ended"):
        driver.wait(Handle(), PATIENCE_S)
    assert "planted" == str(machine.crashed_by), "the machine must be told, for those who await"


def test_waits_that_time_out_leave_nothing_on_the_handle(driver: ThreadDriver) -> None:
    """A program that waits in short steps for hours must not grow."""
    handle = Handle()
    for _ in range(3):
        assert not driver.wait(handle, 0.0)

    assert [] == handle.callbacks


def test_idle_uses_no_cpu(driver: ThreadDriver, machine: Machine) -> None:
    """A worker that polls while nothing is outstanding burns a core of every idle process."""
    asleep(machine)
    before_steps = machine.steps
    before_ns = driver.call(time.thread_time_ns)
    assert not driver.wait(Handle(), 0.4)
    used_ns = driver.call(time.thread_time_ns) - before_ns

    assert used_ns < 20_000_000, f"{used_ns / 1e6} ms of CPU in 0.4 s of idleness"
    assert machine.steps - before_steps <= 6, "two calls, each with a step or two, and no others"


def test_watched_words_are_looked_at_while_idle(machine: Machine) -> None:
    """A GPU's increment comes without any wake-up; the worker has to look now and then."""
    machine.is_watching = True
    driver = ThreadDriver("test", watch_s=0.001)
    driver.start(machine)
    seen = threading.Event()
    try:
        asleep(machine)
        step = machine.step

        def counting() -> bool:
            if machine.steps > 30:
                seen.set()
            return step()

        machine.step = counting
        assert seen.wait(PATIENCE_S)
    finally:
        driver.close()


def test_a_refused_arm_means_another_look_not_a_sleep(machine: Machine) -> None:
    """arm() says False when a completion waits already; sleeping then would miss it."""
    machine.arms = False
    driver = ThreadDriver("test")
    driver.start(machine)
    try:
        done = threading.Event()
        step = machine.step

        def third_time() -> bool:
            if machine.steps >= 3:
                done.set()
                machine.arms = True
            return step()

        machine.step = third_time
        driver.kick()
        assert done.wait(PATIENCE_S)
    finally:
        driver.close()


def test_worker_is_pinned_to_its_cpu(machine: Machine) -> None:
    """An unpinned worker leaves the NIC's NUMA node; pinning must not move the user's thread."""
    allowed = os.sched_getaffinity(0)
    cpu = max(allowed)
    driver = ThreadDriver("test", cpu=cpu)
    driver.start(machine)
    try:
        assert {cpu} == driver.call(lambda: os.sched_getaffinity(0))
        assert allowed == os.sched_getaffinity(0)
    finally:
        driver.close()


def test_worker_gives_way_to_the_users_threads(machine: Machine) -> None:
    """A worker as important as the user's thread takes its CPU for milliseconds at a time."""
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    driver = ThreadDriver("test")
    driver.start(machine)
    try:
        found = driver.call(lambda: os.getpriority(os.PRIO_PROCESS, 0))
        assert min(mine + 5, 19) == found
        assert mine == os.getpriority(os.PRIO_PROCESS, 0)
    finally:
        driver.close()


def test_a_cpu_that_is_not_ours_is_refused_at_once() -> None:
    """Pinning fails on the worker, where nobody would see why."""
    with pytest.raises(UsageError, match="cpu=100000 is not among the CPUs of this process"):
        ThreadDriver("test", cpu=100_000)


def test_thread_driver_can_be_awaited(driver: ThreadDriver) -> None:
    """Any real event loop may await what the worker settles."""
    with asyncio.Runner() as runner:
        driver.check_await(runner.get_loop())


def test_clocks_are_monotonic_seconds(driver: ThreadDriver) -> None:
    """Deadlines are computed on the driver's clock."""
    for clock in (driver, InlineDriver()):
        first = clock.now_s()
        assert first <= clock.now_s() <= first + PATIENCE_S


# --- the inline driver ---------------------------------------------------------------------------


def test_inline_turns_every_machine_of_its_ring() -> None:
    """Both ends of a pair must move on, or a wait on one never ends."""
    ring: list[Machine] = []
    machines = [Machine(), Machine()]
    drivers = [InlineDriver(ring), InlineDriver(ring)]
    for driver, machine in zip(drivers, machines, strict=True):
        driver.start(machine)

    assert not drivers[0].turn()
    machines[1].todo.append(lambda: None)
    assert drivers[0].turn()
    assert [2, 2] == [machine.steps for machine in machines]
    assert [2, 2] == [machine.delivered for machine in machines]


def test_inline_wait_turns_until_settled(machine: Machine) -> None:
    """The caller is the only one who can make progress."""
    driver, handle = InlineDriver(), Handle()
    driver.start(machine)
    machine.todo.append(lambda: machine.todo.append(handle.settle))

    assert driver.wait(handle, PATIENCE_S)


def test_inline_wait_times_out_even_under_work(machine: Machine) -> None:
    """Another transfer that keeps the engine busy must not keep a deadline from passing."""
    driver = InlineDriver()
    driver.start(machine)
    machine.step = lambda: True

    assert not driver.wait(Handle(), 0.01)
    assert not driver.wait(Handle(), 0.0)


def test_inline_close_leaves_the_ring_to_the_others() -> None:
    """A closed engine must not be turned any more, its peer must."""
    ring: list[Machine] = []
    drivers = [InlineDriver(ring), InlineDriver(ring)]
    machines = [Machine(), Machine()]
    for driver, machine in zip(drivers, machines, strict=True):
        driver.start(machine)
    drivers[0].close()
    drivers[0].close()

    assert [machines[1]] == ring


def test_inline_calls_where_it_stands_and_cannot_be_awaited() -> None:
    """Awaiting would hang: no thread turns the engine."""
    driver = InlineDriver()
    driver.kick()

    assert threading.get_ident() == driver.call(threading.get_ident)
    with asyncio.Runner() as runner, pytest.raises(UsageError, match="nothing would step it"):
        driver.check_await(runner.get_loop())

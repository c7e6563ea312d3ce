"""The driver that leaves the turn to whoever waits: what ThreadDriver keeps, and the passing."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tep.backends.local.driver import TurnDriver
from tep.errors import ClosedError, UsageError

PATIENCE_S = 20.0


class Handle:
    """Something to wait for."""

    def __init__(self) -> None:
        self.settled = False
        self.callbacks: list[Callable[[Handle], object]] = []

    def add_done_callback(self, callback: Callable[[Handle], object]) -> None:
        self.callbacks.append(callback)

    def settle(self) -> None:
        self.settled = True
        for callback in self.callbacks:
            callback(self)


class Machine:
    """Does what it is told, and notes on which thread."""

    def __init__(self) -> None:
        self.todo: list[Callable[[], object]] = []
        self.turned_by: list[int] = []
        self.inside = threading.Lock()
        self.is_busy = False
        self.armed = threading.Event()

    def step(self) -> bool:
        assert self.inside.acquire(blocking=False), "two threads turn at once"
        self.turned_by.append(threading.get_ident())
        todo, self.todo = self.todo, []
        try:
            for act in todo:
                act()
        finally:
            self.inside.release()
        return bool(todo)

    def deliver(self) -> None:
        pass

    def busy(self) -> bool:
        return self.is_busy

    def watching(self) -> bool:
        return False

    def must_poll(self) -> bool:
        return False

    def wakeup_fds(self) -> list[int]:
        return []

    def arm(self) -> bool:
        self.armed.set()
        return True


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def driver(machine: Machine) -> Iterator[TurnDriver]:
    driver = TurnDriver("test")
    driver.start(machine)
    assert machine.armed.wait(PATIENCE_S)
    while driver._turner:  # the worker has let go of the turn
        os.sched_yield()
    yield driver
    driver.close()


def _the_tests_of_thread_driver() -> dict[str, object]:
    """The tests of ThreadDriver, in a copy of their module where this driver has its name."""
    path = Path(__file__).with_name("test_drivers.py")
    spec = importlib.util.spec_from_file_location("tests_of_thread_driver", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ThreadDriver = TurnDriver
    return vars(module)


THEIRS = _the_tests_of_thread_driver()
NOT_HERE = {
    # Whoever waits polls for up to 100 us first: a bound on CPU stands in test_a_long_wait_sleeps.
    "test_idle_uses_no_cpu",
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "name",
    [
        name
        for name, test in THEIRS.items()
        if name.startswith("test_") and "inline" not in name and name not in NOT_HERE
    ],
)
def test_it_keeps_what_thread_driver_keeps(name: str) -> None:
    """A promise of the usual driver that this one breaks is met only where this one is used."""
    test = THEIRS[name]
    machine = THEIRS["Machine"]()
    names = test.__code__.co_varnames[: test.__code__.co_argcount]
    driver = None
    if "driver" in names:
        driver = TurnDriver("test")
        driver.start(machine)
    try:
        test(
            **{
                key: value
                for key, value in zip(("driver", "machine"), (driver, machine))
                if key in names
            }
        )
    finally:
        if driver is not None:
            driver.close()


def test_the_waiting_thread_turns(driver: TurnDriver, machine: Machine) -> None:
    """A switch of threads on the way in, and one on the way out, cost 20 us each."""
    handle = Handle()
    machine.todo.append(handle.settle)
    machine.turned_by.clear()
    assert driver.wait(handle, PATIENCE_S)

    assert {threading.get_ident()} == set(machine.turned_by)


def test_the_worker_turns_when_nobody_waits(driver: TurnDriver, machine: Machine) -> None:
    """Callbacks and await need progress without a wait(), also right after one."""
    for _ in range(30):
        handle, done = Handle(), threading.Event()
        machine.todo.append(handle.settle)
        driver.kick()
        assert driver.wait(handle, PATIENCE_S)
        machine.todo.append(done.set)
        driver.kick()
        assert done.wait(PATIENCE_S)

    assert threading.get_ident() not in machine.turned_by[-1:]


def test_many_threads_wait_at_once(driver: TurnDriver, machine: Machine) -> None:
    """One of them turns; the others must be told as well, also after it has left."""
    handles = [Handle() for _ in range(6)]
    results: list[bool] = []

    def wait(handle: Handle) -> None:
        results.append(driver.wait(handle, PATIENCE_S))

    threads = [threading.Thread(target=wait, args=(handle,)) for handle in handles]
    for thread in threads:
        thread.start()
    for handle in handles:
        machine.todo.append(handle.settle)
        driver.kick()
    for thread in threads:
        thread.join()

    assert [True] * 6 == results


def test_a_kick_reaches_a_waiter_that_sleeps(driver: TurnDriver, machine: Machine) -> None:
    """Another thread's submit must be carried out by whoever holds the turn, asleep or not."""
    handle = Handle()
    machine.armed.clear()

    def submit() -> None:
        assert machine.armed.wait(PATIENCE_S)
        machine.todo.append(handle.settle)
        driver.kick()

    other = threading.Thread(target=submit)
    other.start()
    assert driver.wait(handle, PATIENCE_S)
    other.join()


def test_a_long_wait_sleeps(driver: TurnDriver) -> None:
    """Polling is for microseconds: a wait of hours must cost nothing."""
    before = time.process_time()
    assert not driver.wait(Handle(), 0.4)

    assert time.process_time() - before < 0.04


def test_call_runs_on_whoever_turns(driver: TurnDriver, machine: Machine) -> None:
    """A registration while another thread waits must not wait for that wait's end."""
    handle = Handle()
    waiter = threading.Thread(target=driver.wait, args=(handle, PATIENCE_S))
    machine.armed.clear()
    waiter.start()
    assert machine.armed.wait(PATIENCE_S)
    assert driver.call(threading.get_ident) == waiter.ident
    machine.todo.append(handle.settle)
    driver.kick()
    waiter.join()


def test_a_callback_on_the_waiter_may_call_but_not_wait(
    driver: TurnDriver, machine: Machine
) -> None:
    """It runs inside the turn: a call is made at once, and a wait could never end."""
    handle = Handle()
    seen: list[object] = []

    def callback() -> None:
        seen.append(driver.call(lambda: 5))
        with pytest.raises(UsageError, match=r"wait\(\) inside a callback"):
            driver.wait(Handle(), 1.0)
        handle.settle()

    machine.todo.append(callback)
    assert driver.wait(handle, PATIENCE_S)
    assert [5] == seen


def test_a_callback_on_the_waiter_may_close(machine: Machine) -> None:
    """Closing joins the worker, which must not need the turn that this thread holds."""
    driver = TurnDriver("test")
    driver.start(machine)
    assert machine.armed.wait(PATIENCE_S)
    worker = driver._thread
    machine.todo.append(driver.close)
    with pytest.raises(ClosedError):
        driver.wait(Handle(), PATIENCE_S)
    worker.join(PATIENCE_S)

    assert not worker.is_alive()


def test_a_machine_that_fails_ends_the_wait_with_its_error(
    driver: TurnDriver, machine: Machine
) -> None:
    """The waiter is told what broke, and everybody after it that the engine is closed."""

    def fail() -> None:
        raise AssertionError("planted")

    machine.todo.append(fail)
    with pytest.raises(ClosedError, match="failed while it was turned.*planted"):
        driver.wait(Handle(), PATIENCE_S)
    with pytest.raises(ClosedError):
        driver.wait(Handle(), PATIENCE_S)


def test_ctrl_c_ends_the_wait_and_not_a_step(driver: TurnDriver, machine: Machine) -> None:
    """An interrupt between a post and its account would leave the engine in two minds."""
    whole: list[bool] = []

    def step() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass
        whole.append(True)

    machine.todo.append(step)
    with pytest.raises(KeyboardInterrupt):
        driver.wait(Handle(), PATIENCE_S)
    assert [True] == whole
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    handle = Handle()
    machine.todo.append(handle.settle)
    assert driver.wait(handle, PATIENCE_S), "the engine goes on"


def test_ctrl_c_wakes_a_sleeping_waiter(driver: TurnDriver, machine: Machine) -> None:
    """A hung cell of a notebook is interrupted now, not when its timeout ends."""
    machine.armed.clear()

    def interrupt() -> None:
        assert machine.armed.wait(PATIENCE_S)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        driver.wait(Handle(), PATIENCE_S)

    assert time.monotonic() - started < PATIENCE_S / 2


def test_a_forked_child_cannot_take_the_turn(driver: TurnDriver) -> None:
    """It would take its parent's wake-ups out of the set that they share."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            driver.wait(Handle(), 1.0)
        except ClosedError:
            code = 0
        finally:
            os._exit(code)

    assert 0 == os.waitpid(child, 0)[1]

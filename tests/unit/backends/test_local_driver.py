"""The driver whose callers turn: who turns when, what wakes whom, and how it ends."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tep.base.errors import ClosedError, UsageError
from tep.drivers.turning import TurnDriver
from tests.support.descriptors import descriptors, opened_since
from tests.support.machines import FakeMachine, Handle

PATIENCE_S = 30.0


class Machine(FakeMachine):
    """Does what it is told, one at a time, and control messages on which thread."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[Handle] = []
        self.turned_by: list[int] = []
        self.inside = threading.Lock()

    def settle(self, handle: Handle) -> None:
        """Submit: settle this handle in the next step."""

        def act() -> None:
            handle.finished = True
            self.ended.append(handle)

        self.todo.append(act)

    def step(self) -> bool:
        assert self.inside.acquire(blocking=False), "two threads turn at once"
        try:
            self.turned_by.append(threading.get_ident())
            todo, self.todo = self.todo, []
            for act in todo:
                act()
        finally:
            self.inside.release()
        return bool(todo)

    def deliver(self) -> None:
        ended, self.ended = self.ended, []
        for handle in ended:
            handle.call_back()

    def owing(self) -> bool:
        return self.is_watching or any(handle.callbacks for handle in self.ended)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def driver(machine: Machine) -> Iterator[TurnDriver]:
    driver = TurnDriver("test")
    driver.start(machine)
    let_go(driver)
    yield driver
    driver.close()


def let_go(driver: TurnDriver) -> None:
    """Wait until nobody holds the turn, and the worker listens."""
    until = time.monotonic() + PATIENCE_S
    while driver._due or driver._turner:
        assert time.monotonic() < until, "somebody keeps the turn"
        os.sched_yield()


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_a_submit_is_carried_out_by_its_own_thread(driver: TurnDriver, machine: Machine) -> None:
    """To hand it to the worker costs a switch between threads, several times what it takes."""
    machine.turned_by.clear()
    handle = Handle()
    machine.settle(handle)
    driver.kick()

    assert handle.finished
    assert {threading.get_ident()} == set(machine.turned_by)


def test_a_wait_turns_and_sleeps_by_itself(machine: Machine) -> None:
    """The descriptor of a NIC wakes the waiting thread, and the worker sleeps on."""
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    mine = TurnDriver("mine", spin_s=0)
    machine.fds.append(fd)
    mine.start(machine)
    try:
        let_go(mine)
        handle = Handle()
        machine.turned_by.clear()
        machine.armed.clear()

        def arrive() -> None:
            assert machine.armed.wait(PATIENCE_S)
            machine.todo.append(lambda: os.eventfd_read(fd))
            machine.settle(handle)
            os.eventfd_write(fd, 1)

        other = in_thread(arrive)
        assert mine.wait(handle, PATIENCE_S)
        other.join()
        assert {threading.get_ident()} == set(machine.turned_by)
    finally:
        mine.close()
        os.close(fd)


def test_after_a_wait_the_worker_listens_again(machine: Machine) -> None:
    """It is muted while somebody else sleeps; for ever, and callbacks would never come."""
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    machine.fds.append(fd)
    driver = TurnDriver("test", spin_s=0)
    driver.start(machine)
    try:
        let_go(driver)
        for _ in range(20):
            assert not driver.wait(Handle(), 0.001)
            done = threading.Event()
            machine.todo.append(lambda: os.eventfd_read(fd))
            machine.todo.append(done.set)
            os.eventfd_write(fd, 1)
            assert done.wait(PATIENCE_S)
            let_go(driver)
    finally:
        driver.close()
        os.close(fd)


def test_callbacks_run_on_the_worker_only(driver: TurnDriver, machine: Machine) -> None:
    """On a thread that submits, they could ask for a lock that this thread holds."""
    threads: list[int] = []
    for _ in range(30):
        submitted, waited = Handle(), Handle()
        told = threading.Event()
        submitted.callbacks.append(lambda _: threads.append(threading.get_ident()))
        waited.callbacks.append(lambda _, told=told: told.set())
        machine.settle(submitted)
        driver.kick()
        machine.settle(waited)
        assert driver.wait(waited, PATIENCE_S)
        assert told.wait(PATIENCE_S)

    assert 30 == len(threads)
    assert threading.get_ident() not in threads


def test_many_threads_wait_at_once(driver: TurnDriver, machine: Machine) -> None:
    """One of them turns; the others must be told as well, also after it has left."""
    handles = [Handle() for _ in range(6)]
    results: list[bool] = []
    threads = [in_thread(lambda h=h: results.append(driver.wait(h, PATIENCE_S))) for h in handles]
    for handle in handles:
        machine.settle(handle)
        driver.kick()
    for thread in threads:
        thread.join()

    assert [True] * 6 == results


def test_a_wait_takes_over_what_is_left_to_the_worker(
    driver: TurnDriver, machine: Machine, monkeypatch
) -> None:
    """The worker is niced: on busy cores it moves bytes at a third of the caller's pace."""
    handle = Handle()
    monkeypatch.setattr(driver, "_ring", lambda: None)  # the worker stays asleep
    machine.is_busy = True
    machine.todo.append(lambda: None)
    driver.kick()  # there is more to do: the worker is to go on
    machine.settle(handle)

    assert driver.wait(handle, PATIENCE_S)
    assert threading.get_ident() == machine.turned_by[-1]
    machine.is_busy = False
    monkeypatch.undo()


def test_threads_that_submit_and_wait_lose_nothing(
    driver: TurnDriver, machine: Machine, monkeypatch
) -> None:
    """A kick lost between the last look and the sleep is a hang; two turners corrupt the engine.

    The look now and then, which would hide a lost wake-up, is put off beyond the test's patience.
    """
    monkeypatch.setattr("tep.drivers.turning._LOOK_S", 2 * PATIENCE_S)
    over: list[bool] = []

    def play(seed: int) -> None:
        for k in range(300):
            handle = Handle()
            if (k + seed) % 3 == 0:
                handle.callbacks.append(lambda _: None)
            machine.settle(handle)
            driver.kick()
            over.append(driver.wait(handle, PATIENCE_S))
            if (k + seed) % 50 == 0:
                driver.call(lambda: None)

    threads = [in_thread(lambda seed=seed: play(seed)) for seed in range(4)]
    for thread in threads:
        thread.join()

    assert [True] * 1200 == over
    assert machine.crashed_by is None


def test_a_kick_reaches_a_waiter_that_sleeps(driver: TurnDriver, machine: Machine) -> None:
    """Another thread's submit must be carried out by whoever holds the turn, asleep or not."""
    handle = Handle()
    machine.armed.clear()

    def submit() -> None:
        assert machine.armed.wait(PATIENCE_S)
        machine.settle(handle)
        driver.kick()

    other = in_thread(submit)
    assert driver.wait(handle, PATIENCE_S)
    other.join()


class Alarm(Machine):
    """A machine that has something to do at a time, and no news."""

    def __init__(self) -> None:
        super().__init__()
        self.due: float | None = None
        self.rang = threading.Event()

    def due_s(self) -> float | None:
        return self.due

    def step(self) -> bool:
        if self.due is not None and time.monotonic() >= self.due:
            self.due = None
            self.rang.set()
        return super().step()


@pytest.mark.parametrize("waiting", [False, True])
def test_what_is_due_is_done_in_time_although_nothing_happens(waiting: bool) -> None:
    """A question whose answer was lost is put again, and a heartbeat sent, by nobody else."""
    machine, driver, handle = Alarm(), TurnDriver("alarm"), Handle()
    driver.start(machine)
    waiter = threading.Thread(target=driver.wait, args=(handle, PATIENCE_S))
    try:
        if waiting:
            waiter.start()
        assert machine.armed.wait(PATIENCE_S)
        machine.todo.append(lambda: setattr(machine, "due", time.monotonic() + 0.02))
        driver.kick()
        assert machine.rang.wait(PATIENCE_S)
    finally:
        machine.settle(handle)
        driver.kick()
        if waiting:
            waiter.join(PATIENCE_S)
        driver.close()


def test_a_long_wait_sleeps(driver: TurnDriver) -> None:
    """Polling is for microseconds: a wait of hours must cost nothing."""
    before = time.process_time()
    assert not driver.wait(Handle(), 0.4)

    assert time.process_time() - before < 0.04


@pytest.mark.parametrize("who", ["a wait", "the worker"])
def test_a_nic_that_kicks_within_a_turn_is_turned_again_at_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """It moves a long row and has no completion yet: a sleep of 67 us between its parts is lost."""
    driver, handle, slept = TurnDriver("test", spin_s=0), Handle(), []
    driver.start(machine)
    try:
        let_go(driver)
        turns = 0

        def move() -> None:
            nonlocal turns
            turns += 1
            if turns < 20:
                machine.todo.append(move)
                driver.kick()
            else:
                handle.finished = True
                machine.ended.append(handle)

        def note(what: object = "arm") -> bool:
            if turns and not handle.finished:
                slept.append(what)
            return True

        step = machine.step
        monkeypatch.setattr(machine, "step", lambda: step() and handle.finished)
        monkeypatch.setattr(machine, "arm", note)
        monkeypatch.setattr(time, "sleep", note)
        machine.is_busy = True
        machine.todo.append(move)
        if who == "a wait":
            assert driver.wait(handle, PATIENCE_S)
        driver._ring()
        until = time.monotonic() + PATIENCE_S
        while not handle.finished:
            assert time.monotonic() < until
            os.sched_yield()
        assert (20, []) == (turns, slept)
    finally:
        driver.close()


def test_a_wait_that_is_to_spin_does_not_sleep(machine: Machine) -> None:
    """A user who asks for spinning pays a core in order not to wait for a wake-up."""
    driver = TurnDriver("test", spin_s=60.0)
    driver.start(machine)
    try:
        let_go(driver)
        machine.turned_by.clear()
        assert not driver.wait(Handle(), 0.05)
        assert len(machine.turned_by) > 100
    finally:
        driver.close()


def test_a_call_while_somebody_waits_does_not_wait_for_its_end(
    driver: TurnDriver, machine: Machine
) -> None:
    """A registration must not hang until another thread's transfer is over; it is the worker's."""
    handle = Handle()
    machine.armed.clear()
    waiter = in_thread(lambda: driver.wait(handle, PATIENCE_S))
    assert machine.armed.wait(PATIENCE_S)
    ran_on = driver.call(threading.get_ident)
    assert ran_on not in {waiter.ident, threading.get_ident()}
    machine.settle(handle)
    driver.kick()
    waiter.join()


def test_waits_that_time_out_leave_nothing_on_the_handle(
    driver: TurnDriver, machine: Machine
) -> None:
    """A wait that is repeated in a loop would pile up callbacks, and places in the line."""
    machine.is_watching = True  # the worker's turn always: every wait stands in line
    handle = Handle()
    for _ in range(5):
        assert not driver.wait(handle, 0.002)

    assert [] == handle.callbacks
    assert [] == driver._line


def test_a_callback_may_submit_and_call_but_not_wait(driver: TurnDriver, machine: Machine) -> None:
    """It runs inside the turn: a submit is noted, a call made at once, a wait could never end."""
    first, second = Handle(), Handle()
    seen: list[object] = []

    def callback(_: Handle) -> None:
        machine.settle(second)
        driver.kick()
        seen.append(driver.call(lambda: 5))
        with pytest.raises(UsageError, match=r"wait\(\) inside a callback"):
            driver.wait(Handle(), 1.0)
        seen.append("refused")

    first.callbacks.append(callback)
    machine.settle(first)
    driver.kick()
    assert driver.wait(second, PATIENCE_S)
    assert [5, "refused"] == seen


def test_closing_ends_the_waits_of_others(driver: TurnDriver, machine: Machine) -> None:
    """They sleep with the turn; nobody would ever wake them."""
    machine.armed.clear()
    ends: list[type] = []

    def wait() -> None:
        try:
            driver.wait(Handle(), PATIENCE_S)
        except ClosedError:
            ends.append(ClosedError)

    waiter = in_thread(wait)
    assert machine.armed.wait(PATIENCE_S)
    driver.close()
    waiter.join()

    assert [ClosedError] == ends


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("by", ["submit", "wait"])
def test_a_step_that_fails_ends_the_engine_as_on_the_worker(
    driver: TurnDriver, machine: Machine, by: str
) -> None:
    """A bug met on a user's thread: what is open fails, and the worker prints the traceback."""

    def fail() -> None:
        raise AssertionError("planted")

    machine.todo.append(fail)
    if by == "submit":
        driver.kick()
    with pytest.raises(ClosedError, match="worker has ended"):
        driver.wait(Handle(), PATIENCE_S)
    assert "planted" in str(machine.crashed_by)
    driver.kick()
    driver.close()
    assert not driver._thread.is_alive()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own handler, also where a shell started the tests with SIGINT ignored (`&`)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("by", ["submit", "wait"])
def test_ctrl_c_ends_the_call_and_not_a_step(driver: TurnDriver, machine: Machine, by: str) -> None:
    """An interrupt between a post and its account would leave the engine in two minds."""
    whole: list[bool] = []

    def step() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass
        whole.append(True)

    machine.todo.append(step)
    with pytest.raises(KeyboardInterrupt):
        driver.kick() if by == "submit" else driver.wait(Handle(), PATIENCE_S)
    assert [True] == whole
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    handle = Handle()
    machine.settle(handle)
    assert driver.wait(handle, PATIENCE_S), "the engine goes on"


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_wakes_a_sleeping_waiter(driver: TurnDriver, machine: Machine) -> None:
    """A hung cell of a notebook is interrupted now, not when its timeout ends."""
    machine.armed.clear()

    def interrupt() -> None:
        assert machine.armed.wait(PATIENCE_S)
        os.kill(os.getpid(), signal.SIGINT)

    other = in_thread(interrupt)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        driver.wait(Handle(), PATIENCE_S)
    other.join()

    assert time.monotonic() - started < PATIENCE_S / 2


def test_a_forked_child_cannot_turn(driver: TurnDriver, machine: Machine) -> None:
    """It would take its parent's wake-ups out of the sets that they share."""
    child = os.fork()
    if child == 0:
        code = 1
        machine.turned_by.clear()
        try:
            driver.kick()
            driver.wait(Handle(), 1.0)
        except ClosedError:
            code = len(machine.turned_by)
        finally:
            os._exit(code)

    assert 0 == os.waitpid(child, 0)[1]


def test_a_kick_after_its_engine_has_gone_is_harmless() -> None:
    """A handle that outlives its engine may still be cancelled."""
    machine = Machine()
    driver = TurnDriver("test")
    driver.start(machine)
    del machine
    until_s = time.monotonic() + PATIENCE_S
    while driver._machine_ref() is not None:
        gc.collect()
        assert time.monotonic() < until_s, "the driver keeps its engine alive"
    driver.kick()
    driver.close()


def test_its_descriptors_go_with_it(machine: Machine) -> None:
    """A service that opens engines for months would run out of them."""
    before = descriptors()
    for _ in range(5):
        driver = TurnDriver("test")
        driver.start(machine)
        driver.close()
        del driver

    assert len(opened_since(before)) <= 3

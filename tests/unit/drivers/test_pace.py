"""The switch interval: who lowers it, and that it is always put back."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tep
from tep.drivers.threads import Driver, Pace, ThreadDriver, wake_on_time
from tep.drivers.turning import TurnDriver
from tests.support.interrupts import Injector, alarmed
from tests.support.machines import FakeMachine, Handle

PATIENCE_S = 20.0
QUICK_S = 2e-4
DRIVERS = pytest.mark.parametrize("make", [ThreadDriver, TurnDriver])


def interval_us() -> int:
    """Return the interval of this moment."""
    return round(sys.getswitchinterval() * 1e6)


@pytest.fixture(autouse=True)
def _interval() -> Iterator[None]:
    """Start with an interval of our own; it must be there again at the end."""
    before = sys.getswitchinterval()
    if before < 0.005:  # CPython's default: some test dropped an engine with rows in flight
        gc.collect()
        before = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    yield
    found = interval_us()
    sys.setswitchinterval(before)
    assert 4000 == found, "the interval was left lowered"


class Machine(FakeMachine):
    """Does what it is told, and shows the interval of its last step."""

    switch_interval_s = QUICK_S

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def step(self) -> bool:
        self.seen = interval_us()
        todo, self.todo = self.todo, []
        for act in todo:
            act()
        return bool(todo)

    def deliver(self) -> None:
        pass

    def owing(self) -> bool:
        return False


def until(reached: object, driver: Driver, machine: Machine) -> None:
    """Wait until the interval is what it should be; the worker sets it before it sleeps."""
    give_up = driver.now_s() + PATIENCE_S
    while interval_us() != reached:
        assert driver.now_s() < give_up, f"{interval_us()} us, not {reached}"
        machine.armed.clear()
        driver.kick()
        machine.armed.wait(0.01)


def test_two_holders_share_it_and_the_last_puts_it_back() -> None:
    """With several engines the first to end would slow the others down, or none puts it back."""
    one, two = Pace(QUICK_S), Pace(QUICK_S)
    one.hold()
    two.hold()
    one.let_go()
    assert 200 == interval_us()
    two.let_go()
    assert 4000 == interval_us()


def test_one_that_changes_nothing_keeps_nothing_lowered() -> None:
    """An engine whose option leaves the interval alone held it at its neighbour's."""
    one, none = Pace(QUICK_S), Pace(math.inf)
    none.hold()
    one.hold()
    one.let_go()

    assert 4000 == interval_us()
    none.let_go()


def test_what_the_program_sets_meanwhile_stays() -> None:
    """A program that sets an interval of its own while rows are in flight would lose it."""
    pace = Pace(QUICK_S)
    pace.hold()
    sys.setswitchinterval(0.003)
    pace.let_go()
    assert 3000 == interval_us()
    sys.setswitchinterval(0.004)


@pytest.mark.parametrize("wanted", [0.006, math.inf])
def test_a_shorter_interval_of_the_program_is_left_alone(wanted: float) -> None:
    """An engine would make a program slower to react that has asked for less."""
    pace = Pace(wanted)
    pace.hold()
    assert 4000 == interval_us()
    pace.let_go()


def test_a_pace_that_is_dropped_lets_go() -> None:
    """A wait that a signal handler left at the wrong moment would lower it for ever."""
    pace = Pace(QUICK_S)
    pace.hold()
    assert 200 == interval_us()
    del pace
    gc.collect()
    assert 4000 == interval_us()


def test_an_interrupt_in_its_end_leaves_nothing_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler that raised inside let_go() left the interval lowered for ever."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    with alarmed():
        for k in itertools.count(1):
            pace, injector = Pace(QUICK_S), Injector(k)
            pace.hold()
            injector.run(pace.let_go)
            del pace
            assert 4000 == interval_us(), f"interrupted at place {k}"
            if not injector.fired:
                break
    assert k > 3


def test_many_threads_leave_it_as_it_was() -> None:
    """One thread lowers it while another puts it back: the last must see who is left."""
    paces = [Pace(QUICK_S) for _ in range(3)]

    def work(seed: int) -> None:
        for k in range(2000):
            pace = paces[(seed + k) % 3]
            pace.hold()
            pace.let_go()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert 4000 == interval_us()


def test_a_forked_child_has_its_own() -> None:
    """The threads that would put it back are not in the child."""
    pace = Pace(QUICK_S)
    pace.hold()
    child = os.fork()
    if child == 0:
        os._exit(interval_us() // 1000)
    assert 4 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    pace.let_go()


def test_a_thread_wakes_on_time() -> None:
    """With the kernel's slack of 50 us each short sleep for the interpreter takes twice as long."""
    slack: list[str] = []

    def work() -> None:
        wake_on_time()
        wake_on_time()
        slack.append(Path(f"/proc/{threading.get_native_id()}/timerslack_ns").read_text())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE_S)
    assert ["1000"] == [one.strip() for one in slack]


@DRIVERS
def test_it_is_lowered_while_rows_are_in_flight(make: type[ThreadDriver]) -> None:
    """A worker that waits 5 ms for the interpreter moves nothing beside a busy thread."""
    machine, driver = Machine(), make("test")
    driver.start(machine)
    try:
        machine.is_busy = True
        until(200, driver, machine)
        machine.is_busy = False
        until(4000, driver, machine)
    finally:
        driver.close()


@DRIVERS
def test_it_is_lowered_while_somebody_waits(make: type[ThreadDriver]) -> None:
    """Whoever waits for a peer needs the interpreter at once when the answer is there."""
    machine, driver, handle = Machine(), make("test"), Handle()
    driver.start(machine)
    waiter = threading.Thread(target=driver.wait, args=(handle, PATIENCE_S))
    waiter.start()
    give_up = driver.now_s() + PATIENCE_S
    while interval_us() != 200:
        assert driver.now_s() < give_up
    machine.todo.append(handle.settle)
    driver.kick()
    waiter.join(PATIENCE_S)
    until(4000, driver, machine)
    driver.close()


@DRIVERS
def test_closing_puts_it_back(make: type[ThreadDriver]) -> None:
    """An engine that ends with rows in flight would leave its process with many switches."""
    machine, driver = Machine(), make("test")
    driver.start(machine)
    machine.is_busy = True
    until(200, driver, machine)
    machine.todo.append(lambda: setattr(machine, "is_busy", False))
    driver.close()
    assert 4000 == interval_us()


def test_an_await_lowers_it_and_puts_it_back() -> None:
    """An event loop's engine would be slow beside a busy thread, or lower it for ever."""
    with tep.TransferEngine.open("local") as a, tep.TransferEngine.open("local") as b:
        mr, _ = a.reg_mr(np.zeros(64, np.uint8))
        _, desc = b.reg_mr(np.zeros(64, np.uint8))

        async def receive() -> int:
            waits = asyncio.ensure_future(b.expect_imm_count(7, 1))
            await asyncio.sleep(0)
            lowered = interval_us()
            a.submit_single_write(8, (mr, 0), (desc, 0), imm=7)
            await waits
            return lowered

        assert 30 == asyncio.run(receive())
        a.submit_single_write(8, (mr, 0), (desc, 0), imm=9).wait()
        b.expect_imm_count(9, 1).wait()
        give_up = time.monotonic() + PATIENCE_S
        while interval_us() != 4000:
            assert time.monotonic() < give_up


def test_an_option_leaves_it_alone() -> None:
    """A program with many threads that compute may not want more switches."""
    with tep.TransferEngine.open(
        "local", options=tep.EngineOptions(switch_interval_s=math.inf)
    ) as engine:
        with pytest.raises(tep.WaitTimeout):
            engine.expect_imm_count(2, 1).wait(0.01)
        assert 4000 == interval_us()


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, "soon"])
def test_an_impossible_interval_is_refused(wrong: object) -> None:
    """The interpreter would refuse it in the middle of a wait."""
    with pytest.raises(tep.UsageError, match="switch_interval_s"):
        tep.EngineOptions(switch_interval_s=wrong)

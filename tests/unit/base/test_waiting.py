"""Times that system calls take, signals that wait for a step, what callbacks raise."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tep.base.waiting import (
    SYSTEM_S,
    Interrupts,
    escaped,
    note_escape,
    raise_escaped,
    system_s,
)


class Alarm(Exception):
    """The exception of a test's signal handler."""


@pytest.fixture
def alarms() -> Iterator[list[int]]:
    """SIGALRM and SIGUSR1 take note and raise Alarm; the handlers of before are put back."""
    came: list[int] = []

    def handle(number: int, _: object) -> None:
        came.append(number)
        raise Alarm

    numbers = (signal.SIGALRM, signal.SIGUSR1)
    before = [signal.signal(number, handle) for number in numbers]
    yield came
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@given(st.floats())
def test_every_float_is_a_time_that_a_system_call_takes(left_s: float) -> None:
    """poll() overflows at 24.8 days, a lock at 292 years; nan would never end."""
    found = system_s(left_s)
    assert 0 <= found <= SYSTEM_S
    assert found * 1000 < 2**31
    assert found == left_s or not 0 <= left_s <= SYSTEM_S


def test_a_signal_waits_for_the_end_of_the_section(alarms: list[int]) -> None:
    """A handler that raises in the middle of a step leaves the engine in two minds."""
    done = []

    def section() -> None:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGALRM)
            done.append(interrupts.came)

    with pytest.raises(Alarm):
        section()
    assert done == [True]
    assert alarms == [signal.SIGALRM]


def test_each_of_several_signals_is_raised_again(alarms: list[int]) -> None:
    """The first handler that raises must not swallow the signals that came beside it."""
    before = signal.getsignal(signal.SIGALRM)

    def section() -> None:
        with Interrupts():
            for _ in range(3):
                signal.raise_signal(signal.SIGALRM)
                signal.raise_signal(signal.SIGUSR1)

    with pytest.raises(Alarm):
        section()
    assert sorted(alarms) == sorted([signal.SIGALRM, signal.SIGUSR1])
    assert signal.getsignal(signal.SIGALRM) is before


def test_sections_nest(alarms: list[int]) -> None:
    """A submit steps within a callback within a step: only the outermost lets signals through."""

    def section() -> None:
        with Interrupts():
            with Interrupts():
                signal.raise_signal(signal.SIGALRM)
            assert not alarms

    with pytest.raises(Alarm):
        section()
    assert alarms == [signal.SIGALRM]


def test_other_threads_and_handlers_are_left_alone() -> None:
    """Python runs handlers on the main thread only; a worker has nothing to swap."""
    before = signal.getsignal(signal.SIGINT)
    found: list[object] = []

    def run() -> None:
        with Interrupts():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before]


@pytest.mark.parametrize("error", [ValueError(), GeneratorExit(), asyncio.CancelledError()])
def test_what_concerns_the_callback_alone_does_not_reach_the_main_thread(
    error: BaseException,
) -> None:
    """A cancelled coroutine in a callback must not cancel the main thread."""
    note_escape(error)
    assert not escaped


def test_the_main_thread_raises_what_escaped_once() -> None:
    """Twice would end the program that caught it; never would swallow Ctrl-C."""
    note_escape(SystemExit(3))
    thread = threading.Thread(target=raise_escaped)
    thread.start()
    thread.join()
    with pytest.raises(SystemExit):
        raise_escaped()
    raise_escaped()

"""Signal handlers that raise wherever the interpreter calls them: in submit, wait and close."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import tep
from tep.backends.loopback import Hub, open_domains
from tep.base.errors import ClosedError
from tep.drivers.threads import Driver, InlineDriver, Machine, ThreadDriver
from tep.drivers.turning import TurnDriver
from tep.engine import TransferEngine
from tep.sim import Cluster
from tests.support.here import require
from tests.support.interrupts import Injector, alarmed

WAIT_S = 60.0
POINTS_MAX = 250
"""More places than this are sampled: most lie inside a step, where every signal waits."""


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """SIGALRM raises Alarm."""
    with alarmed():
        yield


def loopback(driver: Callable[[list[Machine]], Driver]) -> Callable[[], list[TransferEngine]]:
    """Opens two engines on a hub of their own."""

    def opening() -> list[TransferEngine]:
        hub, ring = Hub(7), list[Machine]()
        found = []
        for name in ("a", "b"):
            opened = open_domains(1, hub=hub, name=name)
            found.append(
                TransferEngine(opened.domains, driver=driver(ring), name=name, epoch=opened.epoch)
            )
        return found

    return opening


def simulated() -> list[TransferEngine]:
    """Two engines on simulated hosts."""
    return list(Cluster(2).engines)


def over_tcp(driver: Callable[[], Driver]) -> Callable[[], list[TransferEngine]]:
    """Opens two engines on libfabric's tcp; skips where there is no libfabric."""

    def opening() -> list[TransferEngine]:
        require("tcp")
        one = {"provider": "tcp", "nics": ["127.0.0.1"]}
        return [
            tep.TransferEngine.open("libfabric", driver=driver(), name=name, **one) for name in "ab"
        ]

    return opening


WORLDS: dict[str, Callable[[], list[TransferEngine]]] = {
    "thread": loopback(lambda _: ThreadDriver()),
    "turn": loopback(lambda _: TurnDriver()),
    "inline": loopback(InlineDriver),
    "sim": simulated,
    "local": lambda: [tep.TransferEngine.open("local", name=name) for name in "ab"],
    "tcp-thread": over_tcp(ThreadDriver),
    "tcp-turn": over_tcp(TurnDriver),
}


@contextmanager
def opened(world: str) -> Iterator[tuple[TransferEngine, TransferEngine]]:
    a, b = WORLDS[world]()
    try:
        yield a, b
    finally:
        a.close()
        b.close()


def places(action: Callable[[], object]) -> list[int]:
    """The places to interrupt an action at: all of them, or a sample without gaps that repeat."""
    counting = Injector(-1)
    counting.run(action)
    total = counting.places
    assert total > 5, "nothing was traced"
    step = max(1, total // POINTS_MAX)
    return [*range(1, min(total, 40)), *range(40, total + 1, step)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("what", ["submit", "wait"])
def test_an_engine_outlives_a_handler_that_raises_anywhere(world: str, what: str) -> None:
    """A SIGALRM time-out in a submit loop crashed the engine, and in wait() it was stuck for good.

    After each interrupt the engine must move exact bytes and counts.
    """
    with opened(world) as (a, b):
        src, dst = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
        mr, _ = a.reg_mr(src)
        _, desc = b.reg_mr(dst)

        def submit() -> None:
            a.submit_single_write(8, (mr, 0), (desc, 0), 6)

        def wait() -> None:
            b.expect_imm_count(5, 1).wait(WAIT_S)

        def prepare() -> None:
            if what == "wait":
                a.submit_single_write(8, (mr, 0), (desc, 0), 5)

        def prove(k: int) -> None:
            src[32:40] = k % 251
            got = b.expect_imm_count(1000 + k, 1)
            sent = a.submit_single_write(8, (mr, 32), (desc, 32), 1000 + k)
            got.wait(WAIT_S)
            sent.wait(WAIT_S)
            assert (dst[32:40] == k % 251).all()

        prepare()
        interrupted = 0
        for k in places(submit if what == "submit" else wait):
            prepare()
            injector = Injector(k)
            interrupted += injector.run(submit if what == "submit" else wait)
            prove(k)
        assert interrupted > 5


# Python itself drops what is raised in a finaliser.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("world", WORLDS)
def test_an_interrupted_close_can_be_repeated(world: str) -> None:
    """After an interrupt in close() the engine could not be closed any more, nor its waits end."""
    with opened(world) as (a, _):
        interrupts = places(a.close)
    for k in interrupts[:: max(1, len(interrupts) // 60)]:
        with opened(world) as (a, b):
            pending = b.expect_imm_count(1, 1)
            Injector(k).run(b.close)
            b.close()
            assert pending.finished
            assert isinstance(pending.error, ClosedError)
            with pytest.raises(ClosedError):
                b.reg_mr(np.zeros(8, np.uint8))
            a.expect_imm_count(1, 0).wait(WAIT_S)

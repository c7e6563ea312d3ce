"""Callbacks that raise what they like, and callbacks of rings of engines that call each other."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tep
from tep.backends.loopback import Hub, open_domains
from tep.base.errors import BusyError, TepError, WaitTimeout
from tep.base.waiting import escaped
from tep.core.handles import State
from tep.drivers.threads import Driver, InlineDriver, Machine, ThreadDriver
from tep.drivers.turning import TurnDriver
from tep.engine import TransferEngine

WAIT_S = 60.0

RAISED = [
    ValueError,
    MemoryError,
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    asyncio.CancelledError,
    pytest.fail.Exception,
    pytest.skip.Exception,
]
FOR_MAIN = (SystemExit, KeyboardInterrupt, pytest.fail.Exception, pytest.skip.Exception)
DRIVERS = ["inline", "thread", "turn"]


@contextmanager
def engines(n: int, kind: str) -> Iterator[list[TransferEngine]]:
    """Engines on one hub, with drivers of one kind; nothing escapes to the next test."""
    hub, ring = Hub(7), list[Machine]()

    def driver(name: str) -> Driver:
        if kind == "inline":
            return InlineDriver(ring)
        return TurnDriver(name) if kind == "turn" else ThreadDriver(name)

    with ExitStack() as stack:
        found = []
        for k in range(n):
            opened = open_domains(1, hub=hub, name=f"e{k}")
            found.append(
                stack.enter_context(
                    TransferEngine(
                        opened.domains,
                        driver=driver(f"e{k}"),
                        name=f"e{k}",
                        epoch=opened.epoch,
                    )
                )
            )
        yield found
        escaped.clear()


def wait_all(handles: list[tep.Transfer]) -> list[BaseException]:
    """Wait for each, and say what was raised on the way that callbacks raised."""
    found = []
    for handle in handles:
        while True:
            try:
                handle.wait(WAIT_S)
                break
            except TepError:
                raise
            except BaseException as error:  # noqa: BLE001  # looked at by the test
                found.append(error)
    return found


@pytest.mark.parametrize("kind", DRIVERS)
@pytest.mark.parametrize("error", RAISED)
def test_whatever_a_callback_raises_ends_that_callback_only(
    kind: str, error: type[BaseException]
) -> None:
    """One sys.exit() in a callback ended the engine as a bug in tep, siblings were never told."""
    with engines(2, kind) as (a, b):
        mr, _ = a.reg_mr(np.arange(64, dtype=np.uint8))
        _, desc = b.reg_mr(np.zeros(64, np.uint8))
        told: list[int] = []
        ready = threading.Event()

        def raising(_: object) -> None:
            told.append(-1)
            raise error

        def sibling(k: int) -> Callable[[object], None]:
            return lambda _: (told.append(k), ready.set() if len(told) == 9 else None)[0]

        sent = [a.submit_single_write(8, (mr, 0), (desc, 0), 5, on_done=raising)]
        sent += [
            a.submit_single_write(8, (mr, 0), (desc, 0), 5, on_done=sibling(k)) for k in range(8)
        ]
        raised = wait_all(sent)
        for _ in range(100):  # what is to be told may come after the end of the wait
            if kind == "inline":
                a.driver.turn()
            if ready.wait(0 if kind == "inline" else WAIT_S):
                break
        assert sorted(told) == [-1, *range(8)]
        assert [type(found.__cause__) for found in a.callback_errors] == [error]
        assert a.stats().callback_errors == 1
        if issubclass(error, FOR_MAIN):
            try:
                b.expect_imm_count(99, 1).wait(0.5)
            except WaitTimeout:
                pass
            except BaseException as late:  # noqa: BLE001  # it came by this wait, not by one before
                raised.append(late)
            assert [type(found) for found in raised] == [error]
        else:
            assert raised == []
        b.expect_imm_count(5, 9).wait(WAIT_S)


def test_an_await_of_the_main_thread_gets_what_a_callback_raised() -> None:
    """A coroutine waits for one engine while a callback of another asks to leave."""
    with engines(2, "thread") as (a, b):
        mr, _ = a.reg_mr(np.zeros(64, np.uint8))
        _, desc = b.reg_mr(np.zeros(64, np.uint8))

        def leave(_: object) -> None:
            raise SystemExit(4)

        async def main() -> None:
            never = b.expect_imm_count(1, 1)
            a.submit_single_write(8, (mr, 0), (desc, 0), on_done=leave)
            with pytest.raises(SystemExit):
                await never.wait_async(WAIT_S)
            assert never.state is State.PENDING

        asyncio.run(main())


FRESH = itertools.count(10_000)

VERBS: dict[str, Callable[[TransferEngine, dict[str, object]], object]] = {
    "reg_mr": lambda e, _: e.deregister(e.reg_mr(np.zeros(64, np.uint8))[0]),
    "submit": lambda e, w: e.submit_single_write(8, (w[e.name], 0), (w["desc"], 0), 6),
    "expect": lambda e, _: e.expect_imm_count(1000, 1).cancel(),
    "remove_imm": lambda e, _: e.remove_imm(77),
    "add_peer_group": lambda e, w: e.add_peer_group([w["desc"].addr]),
    "on_imm": lambda e, _: (e.on_imm(range(500, 501), print), e.remove_imm(500)),
    "watcher": lambda e, _: e.alloc_uvm_watcher(lambda _old, _new: None).close(),
    "recvs": lambda e, _: e.submit_recvs(64, 1, print),
    "remove_peer": lambda e, w: e.remove_peer(w["stranger"]),
    "stats": lambda e, _: (e.stats(), e.explain(), e.stall_report()),
    "on_peer": lambda e, _: e.on_peer(lambda _: None),
    "deregister": lambda e, _: e.deregister(e.reg_mr(np.zeros(8, np.uint8))[0]),
    "cancel": lambda e, w: e.submit_barrier([w["desc"]], next(FRESH)).cancel(),
    "watch_peer": lambda e, w: _watched(e, w["desc"].addr),
    "scatter": lambda e, w: e.submit_scatter(w[e.name], [tep.ScatterDst(8, 0, (w["desc"], 8))]),
    "barrier": lambda e, w: e.submit_barrier([w["desc"]], 78),
}


def _watched(engine: TransferEngine, peer: tep.NetAddr) -> None:
    """One watch a peer: callbacks of others may have one."""
    with suppress(BusyError):
        engine.watch_peer(peer, every_s=1.0, lost_after_s=9.0).close()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    n=st.integers(2, 8),
    kind=st.sampled_from(DRIVERS),
    verbs=st.lists(st.sampled_from(sorted(VERBS)), min_size=1, max_size=6),
    step=st.integers(1, 7),
    together=st.booleans(),
)
def test_callbacks_of_a_ring_of_engines_call_each_other(
    n: int, kind: str, verbs: list[str], step: int, together: bool
) -> None:
    """Each callback calls the verbs of the next engine, whose callback does the same at once.

    Two workers that waited for each other hung for ever; several GPUs in one process do this.
    """
    with engines(n, kind) as ring:
        target, stranger = engines_desc(ring)
        world: dict[str, object] = {"desc": target, "stranger": stranger}
        for engine in ring:
            world[engine.name] = engine.reg_mr(np.zeros(64, np.uint8))[0]
        # Callbacks meet: each waits until all are inside theirs, as far as threads allow.
        meet = threading.Barrier(n)
        calls: list[BaseException | None] = []
        done = threading.Event()

        def callback(k: int) -> Callable[[object], None]:
            def call(_: object) -> None:
                try:
                    if together and kind != "inline":
                        meet.wait(WAIT_S)
                    for verb in verbs:
                        VERBS[verb](ring[(k + step) % n], world)
                    calls.append(None)
                except BaseException as error:  # noqa: BLE001  # the test fails with it
                    calls.append(error)
                if len(calls) == n:
                    done.set()

            return call

        sent = [
            engine.submit_single_write(
                8, (world[engine.name], 0), (target, 0), 5, on_done=callback(k)
            )
            for k, engine in enumerate(ring)
        ]
        assert wait_all(sent) == []
        if kind == "inline":
            for _ in range(50):
                ring[0].driver.turn()
        assert done.wait(WAIT_S), f"{len(calls)} of {n} callbacks ended"
        assert calls == [None] * n
        ring[0].expect_imm_count(5, n).wait(WAIT_S)


def engines_desc(ring: list[TransferEngine]) -> tuple[tep.MrDesc, tep.NetAddr]:
    """A target at the first engine; an address that nobody has met."""
    _, desc = ring[0].reg_mr(np.zeros(64, np.uint8))
    addr = ring[0].main_address
    return desc, tep.NetAddr(addr.backend, "nobody", 1, addr.domains, addr.link_bps)


@pytest.mark.parametrize("kind", ["thread", "turn"])
def test_engines_close_each_other_in_callbacks(kind: str) -> None:
    """close() of another engine joined its worker, which waited for ours."""
    with engines(2, kind) as ring:
        meet, ended = threading.Barrier(2), threading.Semaphore(0)

        def closer(other: TransferEngine) -> Callable[[object], None]:
            def call(_: object) -> None:
                meet.wait(WAIT_S)
                other.close()
                ended.release()

            return call

        for me, other in (ring, ring[::-1]):
            me.expect_imm_count(1, 0, on_done=closer(other))
        for _ in ring:
            assert ended.acquire(timeout=WAIT_S)


@pytest.mark.parametrize("driver", [ThreadDriver, TurnDriver])
def test_a_call_that_is_not_taken_ends_and_says_why(driver: type[ThreadDriver]) -> None:
    """A callback that blocks must not block every user of the engine for ever."""
    opened = open_domains(1, hub=Hub(7), name="slow")
    turned = driver("slow", call_timeout_s=0.3)
    with TransferEngine(opened.domains, driver=turned, name="slow", epoch=1) as engine:
        inside, free = threading.Event(), threading.Event()

        def block(_: object) -> None:
            inside.set()
            free.wait(WAIT_S)

        engine.expect_imm_count(1, 0, on_done=block)
        assert inside.wait(WAIT_S)
        with pytest.raises(WaitTimeout, match=r"(?s)reg_mr waited 0.3 s .*slow-worker.*withdrawn"):
            engine.reg_mr(np.zeros(64, np.uint8))
        free.set()
        engine.reg_mr(np.zeros(64, np.uint8))

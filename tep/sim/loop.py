"""An asyncio event loop whose clock is the simulation: `run(main())`. No engine and no NIC here.

While no coroutine can go on, the loop's selector processes simulated events in place of sleeping.
A wait that nothing can end raises StallError. Threads, sockets, subprocesses and signals are
refused.

What is used of asyncio's inside, and tried on Python 3.11: `events._get_running_loop` and
`_set_running_loop`, which make a run inside a running loop possible; `_clock_resolution`; and three
methods about the pair of sockets that the base class wakes its selector with. Without these three
the loop would hold two idle sockets, and work.
"""

from __future__ import annotations

import asyncio
import asyncio.events
import asyncio.tasks
import gc
import math
import selectors
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context
from typing import Any, Final, NoReturn, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

from tep.base.errors import StallError, UsageError
from tep.base.units import PS_PER_S, PS_PER_US
from tep.sim.clock import FOREVER_PS, FabricEnv

__all__ = ["SimLoop", "current_env", "run"]

_YOUNG: Final = 100_000
_OLD: Final = 10
"""Thresholds of Python's collector in a run, at the least: it looks at young objects after 100,000
new ones, and at all of them after ten million. With its own thresholds it looks at all many
times while engines meet, and finds nothing: a quarter of an all-to-all of 256 ranks.
"""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _ClockSelector(selectors.BaseSelector):
    """A selector that watches nothing: to wait is to let the simulation run."""

    def __init__(self, env: FabricEnv) -> None:
        self.env = env
        self.loop: SimLoop | None = None

    def register(
        self,
        fileobj: object,
        events: int,  # noqa: ARG002  # the base class's signature
        data: object = None,  # noqa: ARG002  # as above
    ) -> NoReturn:
        raise UsageError(
            f"tep.sim.run(): a simulated loop cannot watch {fileobj!r}: no sockets and no files in "
            "simulated time; do that before or after the run"
        )

    def unregister(self, fileobj: object) -> NoReturn:
        raise KeyError(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Turn the simulation until a coroutine can go on, at most `timeout` simulated seconds."""
        loop = self.loop
        assert loop is not None
        env = self.env
        # At least 1 ps, or a timer between two ticks of the clock would be asked for for ever.
        deadline_ps = FOREVER_PS if timeout is None else env.now + _ticks(timeout)
        if timeout != 0:
            env.turn(loop.has_queued, deadline_ps)
            if not loop.has_queued():
                if timeout is None:
                    loop.stall()
                env.skip_to(deadline_ps)
                loop.widen()
        loop.forget_queued()
        return []


def _ticks(seconds: float) -> int:
    return max(1, round(seconds * PS_PER_S)) if seconds > 0 else 0


class SimLoop(asyncio.SelectorEventLoop):
    """An asyncio loop on a FabricEnv; `run()` makes one, drives it and closes it.

    Attributes:
        failure: the exception that ends the run in place of main's end.
    """

    def __init__(self, env: FabricEnv) -> None:
        self.env = env
        self.main: asyncio.Task[Any] | None = None
        self.failure: BaseException | None = None
        self._queued = False
        self._order: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self._started = 0
        selector = _ClockSelector(env)
        super().__init__(selector)
        selector.loop = self
        self._clock_resolution = 1 / PS_PER_S

    def time(self) -> float:
        return self.env.now / PS_PER_S

    def create_task(  # type: ignore[override]  # the base's own signature varies by version
        self, coro: Coroutine[Any, Any, T], **options: Any
    ) -> asyncio.Task[T]:
        task = super().create_task(coro, **options)
        self._started += 1
        self._order[task] = self._started
        return task

    def tasks(self) -> list[asyncio.Task[Any]]:
        """List the tasks that have not ended, in the order they were made."""
        return sorted(asyncio.all_tasks(self), key=lambda task: self._order.get(task, 0))

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        self._queued = True
        return super().call_soon(callback, *args, context=context)

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        try:
            # The base class's own check; outside of debug mode it makes none.
            self._check_thread()  # type: ignore[attr-defined]
        except RuntimeError:
            raise UsageError(
                "tep.sim.run(): a call from another thread; a simulation has one thread, or it "
                "could not be replayed"
            ) from None
        return self.call_soon(callback, *args, context=context)

    def has_queued(self) -> bool:
        """Return True if anything was queued since the last round, as a fabric does by futures."""
        return self._queued

    def forget_queued(self) -> None:
        self._queued = False

    def widen(self) -> None:
        """Keep the loop's resolution above what a float can tell apart at this time.

        Otherwise a timer that is due would not count as due, and be waited for without end: after a
        simulated hour a float has steps of half a picosecond, after a year of 4 ns.
        """
        self._clock_resolution = max(1 / PS_PER_S, 2 * math.ulp(self.time()))

    def fail(self, error: BaseException) -> None:
        """End the run with an exception that nobody awaits."""
        if self.failure is None and self.main is not None:
            self.failure = error
            self.main.cancel()

    def stall(self) -> NoReturn:
        raise StallError(
            f"nothing can happen any more at {self.env.now / PS_PER_US:.3f} us of simulated time, "
            "but coroutines wait.\n"
            + "".join(f"{_where(task)}\n" for task in self.tasks())
            + self.env.stall_report()
        )

    def run_in_executor(self, *_: object) -> NoReturn:
        raise UsageError(
            "tep.sim.run(): no threads in simulated time; call the function directly, "
            "it takes no simulated time"
        )

    def add_signal_handler(self, *_: object) -> NoReturn:
        raise UsageError(
            "tep.sim.run(): no signal handlers in simulated time; Ctrl-C ends a run as usual"
        )

    # The base class wakes its selector through a pair of sockets; here nobody else could want to.
    def _make_self_pipe(self) -> None:
        pass

    def _close_self_pipe(self) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def _where(task: asyncio.Task[Any]) -> str:
    """Say where a task waits: the innermost frame that still has a source line."""
    frames = task.get_stack()
    if not frames:
        return f"task {task.get_name()}: not started"
    code = frames[-1].f_code
    line = frames[-1].f_lineno
    return f"task {task.get_name()}: waits in {code.co_name}, {code.co_filename}:{line}"


def current_env() -> FabricEnv | None:
    """The clock of the run() that this code runs under, or None."""
    loop = asyncio.events._get_running_loop()
    return loop.env if isinstance(loop, SimLoop) else None


def run(main: Coroutine[Any, Any, T], env: FabricEnv | None = None) -> T:
    """Run a coroutine in simulated time and return its result.

    Works inside a running loop too, e.g. a notebook's; that loop stands still meanwhile.

    Args:
        main: the coroutine; it may sleep, time out, gather and await transfers.
        env: the clock, e.g. `cluster.env`; None: a new one, which a Cluster made inside finds.

    Raises:
        StallError: main waits for something that can never happen; the message is a stall report.
        UsageError: called from within another simulation that is running.
    """
    __tracebackhide__ = True  # a test that fails shows its own frames, not these
    if not asyncio.iscoroutine(main):
        raise UsageError(
            f"tep.sim.run() takes a coroutine, e.g. run(main()), not a {type(main).__name__}"
        )
    env = FabricEnv() if env is None else env
    outer = asyncio.events._get_running_loop()
    if isinstance(outer, SimLoop):
        main.close()
        raise UsageError("tep.sim.run() inside tep.sim.run(): await the coroutine, or start a task")
    try:
        env.enter()
    except UsageError:
        main.close()
        raise
    outer_task = None if outer is None else _swap_task(outer, None)
    asyncio.events._set_running_loop(None)
    loop = SimLoop(env)
    try:
        with _rare_collections():
            return _run_to_end(loop, main)
    finally:
        loop.close()
        env.running = False
        env.deadline_ps = FOREVER_PS
        asyncio.events._set_running_loop(outer)
        if outer is not None:
            _swap_task(outer, outer_task)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Have Python's collector look at objects more rarely, if it is on."""
    before = young, middle, old = gc.get_threshold()
    if young:
        gc.set_threshold(max(young, _YOUNG), middle, max(old, _OLD))
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _swap_task(
    loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any] | None
) -> asyncio.Task[Any] | None:
    """Set the outer loop's current task aside, where Python keeps one a thread, not one a loop."""
    swap: Callable[..., asyncio.Task[Any] | None] | None = getattr(
        asyncio.tasks, "_swap_current_task", None
    )
    return None if swap is None else swap(loop, task)


def _run_to_end(loop: SimLoop, main: Coroutine[Any, Any, T]) -> T:
    """Run main; whatever comes of it, end the tasks and generators that it leaves behind."""
    __tracebackhide__ = True
    task = loop.main = loop.create_task(main, name="main")
    task.add_done_callback(lambda _: loop.stop())
    try:
        loop.run_forever()
        found: T = task.result()  # without the frames that run_until_complete() would add
    except asyncio.CancelledError:
        if loop.failure is None:
            raise
    finally:
        if task.done() and not task.cancelled():
            task.exception()  # an interrupt came through run_forever(): it is known
        _cancel_rest(loop)
        loop.run_until_complete(loop.shutdown_asyncgens())
    if loop.failure is not None:
        raise loop.failure
    return found


def _cancel_rest(loop: SimLoop) -> None:
    rest = loop.tasks()
    for task in rest:
        task.cancel()
    if not rest:
        return
    try:
        loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
    except StallError:
        # A task answered its cancellation with another wait for nothing. It is left to the
        # collector, quietly: the StallError or result that ended the run counts.
        for task in rest:
            # asyncio sets this itself for a task that is left on purpose.
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        return
    for task in rest:
        if not task.cancelled() and (error := task.exception()) is not None:
            loop.call_exception_handler(
                {"message": "a task failed while the run ended", "exception": error, "task": task}
            )

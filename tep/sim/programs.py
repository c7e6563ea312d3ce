"""Programs of nodes: coroutines that end with a crash of their node, and start again after it.

`Cluster.spawn` starts them. Datagrams between nodes are how they exchange descriptors where nothing
is promised: some are lost, some come twice, and they overtake each other (F20), as on UDP, or on an
RDMA NIC's unreliable queue pairs. Engines neither send nor see them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from tep.base.checks import check_seconds
from tep.base.errors import ClosedError, UsageError
from tep.base.hashing import below
from tep.base.units import PS_PER_NS, PS_PER_US
from tep.sim.chaos_target import Fabric
from tep.sim.clock import FabricEnv, in_one_process
from tep.sim.loop import SimLoop

if TYPE_CHECKING:
    from tep.engine import TransferEngine

__all__ = ["DATAGRAM_BYTES", "Datagrams", "Incarnation", "Main", "Program"]

T = TypeVar("T")


class Incarnation:
    """One life of a node, from its start to its crash, as its programs see it.

    Attributes:
        name: of the node.
        engine: of this life.
        epoch: 1, and one more after each crash.
        alive: False once the node has crashed.
        disk: bytes by name, which outlive crashes. A program that a crash has ended, and that still
            runs its `finally` blocks, writes to a copy that nobody reads.
    """

    def __init__(
        self, name: str, engine: TransferEngine, env: FabricEnv, mail: Callable[[], Datagrams]
    ) -> None:
        self.name = name
        self.engine = engine
        self.epoch: int = engine.main_address.epoch
        self.alive = True
        self.disk: dict[str, bytes] = {}
        self._env = env
        self._mail = mail

    __reduce__ = in_one_process

    def __repr__(self) -> str:
        return f"Incarnation({self.name}, epoch {self.epoch}{'' if self.alive else ', crashed'})"

    def send(self, node: str, payload: bytes) -> None:
        """Send a datagram to a node: it arrives once, twice, or not at all."""
        self._check_alive()
        self._mail().send(self.name, node, payload)

    async def receive(self) -> tuple[str, bytes]:
        """Wait for the next datagram to this node; return its sender and its bytes."""
        self._check_alive()
        return await self._mail().receive(self.name)

    def after(self, us: float, function: Callable[[], object]) -> None:
        """Call a function in so many simulated microseconds, unless the node crashes before."""
        self._check_alive()
        delay_ps = round(check_seconds("after: us", us) * PS_PER_US)
        self._env.call_at(self._env.now + delay_ps, lambda _: function() if self.alive else None)

    def _check_alive(self) -> None:
        if not self.alive:
            raise ClosedError(f"{self.name} crashed in its epoch {self.epoch}")


Main = Callable[[Incarnation], Coroutine[Any, Any, T]]


class _End(asyncio.Future[T]):
    """The end of a program.

    Attributes:
        watched: whether anybody awaits it, and so gets its exception.
    """

    watched = False

    def add_done_callback(self, *args: Any, **options: Any) -> None:
        self.watched = True
        super().add_done_callback(*args, **options)


class Program(Generic[T]):
    """One program of a node: a task in each life of the node, until one comes to its end.

    Attributes:
        end: the result of the task that came to its end, or its exception. An exception that
            nobody awaits ends the run.
    """

    def __init__(self, main: Main[T], loop: SimLoop) -> None:
        self.end: Final[_End[T]] = _End(loop=loop)
        self._main = main
        self._loop = loop
        self._task: asyncio.Task[T] | None = None

    def start(self, me: Incarnation) -> None:
        """Begin in a new life of the node, unless the program has ended."""
        if self.end.done() or self._loop.is_closed():
            return
        name = getattr(self._main, "__name__", "program")
        self._task = self._loop.create_task(self._main(me), name=f"{me.name}: {name}")
        self._task.add_done_callback(self._ended)

    def crash(self) -> None:
        """End with the node."""
        task, self._task = self._task, None
        if task is not None and not self._loop.is_closed():
            task.cancel()

    def _ended(self, task: asyncio.Task[T]) -> None:
        error = None if task.cancelled() else task.exception()
        if task is not self._task or self.end.done():
            return  # its node has crashed: exceptions of its `finally` blocks are ignored
        if task.cancelled():
            self.end.cancel()
        elif error is None:
            self.end.set_result(task.result())
        else:
            self.end.set_exception(error)
            if not self.end.watched:
                self.end.exception()  # it is retrieved: the run ends with it
                self._loop.fail(error)


DATAGRAM_BYTES: Final = 65_507
"""The longest; of UDP over IPv4: 65,535 bytes without the two headers (RFC 768, RFC 791)."""

_FLIGHT_PS: Final = 300 * PS_PER_NS
_SPREAD_PS: Final = 3000 * PS_PER_NS


class Datagrams:
    """All mailboxes of one cluster; `cluster.datagrams`."""

    def __init__(self, fabric: Fabric) -> None:
        self.sent = self.lost = self.doubled = 0
        self._fabric = fabric
        self._draw = fabric.draws.message
        self._boxes: dict[str, deque[tuple[str, bytes]]] = {}
        self._waiting: dict[str, deque[asyncio.Future[tuple[str, bytes]]]] = {}

    def send(self, source: str, target: str, payload: bytes) -> None:
        """Send one datagram from a node to a node: it arrives once, twice, or not at all.

        Raises:
            UsageError: no such node, or too long a payload.
        """
        for name in (source, target):
            if name not in self._fabric.nodes:
                raise UsageError(f"no node {name!r}; there are: {', '.join(self._fabric.nodes)}")
        if len(payload) > DATAGRAM_BYTES:
            raise UsageError(f"a datagram of {len(payload)} bytes; {DATAGRAM_BYTES} at the most")
        chaos, healed = self._fabric.chaos, self._fabric.healed
        self.sent += 1
        # Odd entities: even ones belong to the messages of the seam.
        bits = self._draw(2 * self.sent + 1, 5)
        if not healed and bits & 15 < chaos.datagram_loss:
            self.lost += 1
            return
        copies = 1 + (not healed and bits >> 4 & 15 < chaos.datagram_dup)
        self.doubled += copies - 1
        epoch = self._fabric.nodes[target].epoch
        for copy in range(copies):
            drawn = self._draw(2 * self.sent + 1, 6 + copy)
            due = self._fabric.env.now + _FLIGHT_PS + below(drawn, _SPREAD_PS)
            what = (target, epoch, source, bytes(payload))
            self._fabric.env.call_at(due, self._arrive, what)

    async def receive(self, node: str) -> tuple[str, bytes]:
        """Wait for the next datagram to a node; return its sender and its bytes."""
        box = self._boxes.get(node)
        if box:
            return box.popleft()
        future: asyncio.Future[tuple[str, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(node, deque()).append(future)
        return await future

    def forget(self, node: str) -> None:
        """Empty a node's mailbox: it crashed."""
        self._boxes.pop(node, None)

    def _arrive(self, what: tuple[str, int, str, bytes]) -> None:
        target, epoch, source, payload = what
        if self._fabric.nodes[target].epoch != epoch:
            return  # it was on its way to a node that crashed
        waiting = self._waiting.get(target, deque())
        while waiting:
            future = waiting.popleft()
            if not future.done():
                future.set_result((source, payload))
                return
        self._boxes.setdefault(target, deque()).append((source, payload))

"""Workers in other processes: their ports over asyncio's TCP, typed by msgspec. Control only.

A frame is four bytes of length, little-endian, and MessagePack. A worker connects to the
controller, says who it is, and both prove that they know the token, as at a rendezvous; then it
answers calls. Several may run at once, so that an abort reaches a worker whose update runs. A
connection that ends fails every call on it. Whatever a worker's method raises is the answer. Rule:
a connection speaks for the worker that it began as.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import logging
import typing
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import NoneType
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from tep import BadDescriptor, FabricError, TepError, UsageError
from tep.apps.rl.metadata import RolloutMeta, TrainMeta
from tep.apps.rl.ports import LoadReport, RolloutState, TrainReport
from tep.rendezvous.door import Door, listen
from tep.rendezvous.proof import challenge, enter, refuse, welcome
from tep.rendezvous.wire import Peer

__all__ = [
    "Call", "Caller", "Hello", "Listener", "Remote", "RemoteRollout", "RemoteTraining", "answer",
]  # fmt: skip

T = TypeVar("T")

logger = logging.getLogger(__name__)

_SHOWN: Final = 2000
"""Characters of an error that travel."""

_FRAME_MAX: Final = 256 << 20
_SERVICE: Final = "worker"


class Hello(NamedTuple):
    """The identity of a worker."""

    role: str
    name: str


class _Call(msgspec.Struct, array_like=True):
    number: int
    method: str
    args: list[Any]


class _Answer(msgspec.Struct, array_like=True):
    number: int
    error: str
    value: Any = None


async def _read(reader: asyncio.StreamReader, limit: int) -> bytes:
    length = int.from_bytes(await reader.readexactly(4), "little")
    if length > limit:
        raise UsageError(f"a control frame of {length} bytes; {limit} at the most")
    return await reader.readexactly(length)


def _frame(message: object) -> bytes:
    data = msgspec.msgpack.encode(message)
    if len(data) > _FRAME_MAX:
        raise UsageError(f"a control frame of {len(data)} bytes; {_FRAME_MAX} at the most")
    return len(data).to_bytes(4, "little") + data


def _write(writer: asyncio.StreamWriter, message: object) -> None:
    writer.write(_frame(message))


# ---------------------------------------------------------------------- the worker's side


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadDescriptor(f"{len(data)} bytes are no {kind.__name__}: {error}") from error


async def answer(
    worker: object, host: str, port: int, token: str, hello: Hello, *, patience_s: float = 60.0
) -> None:
    """Connect to a controller and answer its calls until it hangs up.

    Args:
        worker: its public coroutine methods are called.
        host: where the controller listens, or will soon.
        port: there.
        token: a secret that it knows too; it is never sent.
        hello: who this worker is.
        patience_s: how long to call, seconds.

    Raises:
        FabricError: nobody let it in within patience_s.
        RendezvousError: what listens there does not know the token.
        UsageError: the controller refused; says why.
    """
    try:
        peer = await enter(host, port, token, (_SERVICE, *hello), patience_s)
    except TimeoutError as error:
        text = f"no controller at {host}:{port} within {patience_s:g} s: {error}"
        raise FabricError(text, code="TIMEOUT", peer=f"{host}:{port}") from None
    reader, writer = peer.streams()
    running: dict[asyncio.Task[None], None] = {}
    try:
        while True:
            try:
                data = await _read(reader, _FRAME_MAX)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            call = _decode(data, _Call)
            task = asyncio.get_running_loop().create_task(_serve(worker, call, writer))
            running[task] = None
            task.add_done_callback(lambda done: running.pop(done, None))
    finally:
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        writer.close()


async def _serve(worker: object, call: _Call, writer: asyncio.StreamWriter) -> None:
    try:
        method = _method(worker, call.method)
        args = _typed(method, call.args)
        frame = _frame(_Answer(call.number, "", await method(*args)))
    except Exception as error:  # noqa: BLE001  # of a user's function: who asked must hear it
        _log(error, f"{type(worker).__name__}.{call.method}")
        text = f"{type(error).__name__}: {error}".encode(errors="replace")[:_SHOWN]
        frame = _frame(_Answer(call.number, text.decode(errors="replace")))
    writer.write(frame)
    await writer.drain()


def _log(error: Exception, what: str) -> None:
    """Show where an exception came from; errors of tep and of the system say it themselves."""
    if not isinstance(error, TepError | OSError):
        logger.warning("%s raised", what, exc_info=error)


def _method(worker: object, name: str) -> Callable[..., Awaitable[object]]:
    found = None if name.startswith("_") else getattr(worker, name, None)
    if not inspect.iscoroutinefunction(found):
        raise UsageError(f"{type(worker).__name__} has no method {name!r} to call from afar")
    return found


def _typed(method: Callable[..., object], args: Sequence[Any]) -> list[Any]:
    """Convert arguments to what the method's annotations say."""
    hints = typing.get_type_hints(method)
    names = list(inspect.signature(method).parameters)[: len(args)]
    return [msgspec.convert(arg, hints[name]) for name, arg in zip(names, args, strict=True)]


# ---------------------------------------------------------------------- the controller's side


class Caller:
    """One worker's connection, as the controller holds it."""

    def __init__(
        self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.hello = hello
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._gone = ""
        self._listening = asyncio.get_running_loop().create_task(self._listen())

    async def call(self, returns: type[T], method: str, *args: object) -> T:
        """Call a method of the worker.

        Raises:
            FabricError: it is gone, or answered with an error.
        """
        if self._gone:
            raise FabricError(self._gone, code="PEER_GONE", peer=self.hello.name)
        number = next(self._numbers)
        future = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            _write(self._writer, _Call(number, method, list(args)))
            await self._writer.drain()
            return msgspec.convert(await future, returns)
        except msgspec.ValidationError as error:
            text = f"{self.hello.name} answered {method} with something else: {error}"
            raise FabricError(text, peer=self.hello.name) from error
        except ConnectionError as error:
            text = f"{self.hello.name} hung up: {error}"
            raise FabricError(text, code="PEER_GONE", peer=self.hello.name) from error
        finally:
            self._open.pop(number, None)

    async def _listen(self) -> None:
        why = "hung up"
        try:
            while True:
                data = await _read(self._reader, _FRAME_MAX)
                reply = _decode(data, _Answer)
                future = self._open.get(reply.number)
                if future is None or future.done():
                    continue
                if reply.error:
                    future.set_exception(FabricError(reply.error, peer=self.hello.name))
                else:
                    future.set_result(reply.value)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except TepError as error:
            why = f"sent what is no answer: {error}"
        finally:
            self._gone = f"{self.hello.name} {why}; its process has ended, or the network is down"
            for future in self._open.values():
                if not future.done():
                    gone = FabricError(self._gone, code="PEER_GONE", peer=self.hello.name)
                    future.set_exception(gone)
            self._writer.close()

    async def close(self) -> None:
        """Hang up; the worker ends."""
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)


class Listener:
    """The listener that workers connect to; an async context manager.

    Args:
        token: a secret that the workers know; it is never sent.
        host, port: to listen at; port 0: any, see `port`.
    """

    def __init__(self, token: str, host: str = "127.0.0.1", port: int = 0) -> None:
        self._token = token
        self._where = (host, port)
        self._came: dict[tuple[str, str], Caller] = {}
        self._news = asyncio.Condition()
        self._callers: list[Caller] = []
        self._door: Door | None = None
        self._port = 0

    @property
    def port(self) -> int:
        """The port it listens at."""
        assert self._door is not None, "use it as an async context manager"
        return self._port

    async def __aenter__(self) -> Listener:
        host, port = self._where
        try:
            sockets = await listen(host, port)
        except OSError as error:
            raise UsageError(
                f"the controller cannot listen on {host}:{port}: {error}; if torch has taken the "
                "port, set TEP_RENDEZVOUS_PORT to another one in all ranks"
            ) from error
        self._port = sockets[0].getsockname()[1]
        self._door = Door(sockets, self._admit)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._door is not None
        await self._door.close()
        for caller in self._callers:
            await caller.close()

    async def _admit(self, peer: Peer) -> None:
        asked = await challenge(peer, self._token)
        match asked.who:
            case (str(service), str(role), str(name)) if service == _SERVICE:
                hello = Hello(role, name)
            case _:
                await refuse(peer, f"{asked.who} is no worker")
        await welcome(peer, self._token, asked)
        caller = Caller(hello, *peer.streams())
        self._callers.append(caller)
        async with self._news:
            self._came[hello.role, hello.name] = caller
            self._news.notify_all()

    async def wait_for(self, role: str, name: str, timeout_s: float) -> Caller:
        """Wait until this worker has connected; a later one of the same name is another.

        Raises:
            TimeoutError: it has not.
        """
        async with asyncio.timeout(timeout_s), self._news:
            await self._news.wait_for(lambda: (role, name) in self._came)
            return self._came.pop((role, name))

    async def next(self, role: str) -> Caller:
        """Wait for any worker of a role that nobody has asked for yet."""
        async with self._news:
            while True:
                found = next((key for key in self._came if key[0] == role), None)
                if found is not None:
                    return self._came.pop(found)
                await self._news.wait()


class Call(Generic[T]):
    """A method of a worker in another process, by the same name: declares what it returns."""

    def __init__(self, returns: type[T]) -> None:
        self._returns = returns
        self._method = ""

    def __set_name__(self, owner: type[Remote], name: str) -> None:
        self._method = name

    def __get__(self, remote: Remote, owner: type[Remote]) -> Callable[..., Coroutine[Any, Any, T]]:
        return functools.partial(remote.caller.call, self._returns, self._method)


class Remote:
    """A worker in another process, as a port of the controller."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller


class RemoteTraining(Remote):
    """A training rank in another process."""

    set_routing = Call(bytes)
    connect = Call(NoneType)
    transfer_weights = Call(TrainReport)
    abort = Call(NoneType)
    load = Call(NoneType)

    async def param_meta(self) -> TrainMeta:
        found, name = await self.caller.call(TrainMeta, "param_meta"), self.caller.hello.name
        if str(found.rank) != name.removeprefix("train"):
            raise FabricError(f"training rank {name} says that it is {found.rank}", peer=name)
        return found


class RemoteRollout(Remote):
    """A rollout worker in another process."""

    begin = Call(bytes)
    finished = Call(int)
    abort = Call(RolloutState)
    state = Call(RolloutState)
    digest = Call(str)
    load_report = Call(LoadReport)

    async def param_meta(self) -> RolloutMeta:
        found, name = await self.caller.call(RolloutMeta, "param_meta"), self.caller.hello.name
        if found.name != name:
            raise FabricError(f"rollout worker {name!r} says that it is {found.name!r}", peer=name)
        return found

"""Calls of methods between processes, over one connection each, typed by msgspec. Control only.

A worker connects to a listener, says who it is, and both prove that they know the token, as at a
rendezvous; then each end may call methods of the other's object. Several calls may run at once, so
that an abort reaches a worker whose update runs. Whatever a method raises is the answer. A
connection that ends fails every call on it. Rule: a connection speaks for the worker that it began
as.

A message is a MessagePack array in a frame of `wire`: a call [0, number, method, arguments], whose
number is -1 if no answer is wanted, or an answer [1, number, error, value].
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import logging
import typing
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from tep.base.errors import BadDescriptor, FabricError, TepError, UsageError
from tep.rendezvous.wire import Door, Peer, challenge, enter, frame, listen, refuse, welcome

__all__ = ["Call", "Caller", "Hello", "Listener", "Remote", "answer", "connect"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

FRAME_MAX: Final = 256 << 20
_SHOWN: Final = 2000  # characters of an error that travel
_SERVICE: Final = "worker"
_NO_ANSWER: Final = -1


class Hello(NamedTuple):
    """The identity of a worker."""

    role: str
    name: str


class _Call(msgspec.Struct, array_like=True, tag=0):
    number: int
    method: str
    args: list[Any]


class _Answer(msgspec.Struct, array_like=True, tag=1):
    number: int
    error: str
    value: Any = None


_DECODER: msgspec.msgpack.Decoder[_Call | _Answer] = msgspec.msgpack.Decoder(_Call | _Answer)


def _decode(data: bytes) -> _Call | _Answer:
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadDescriptor(f"{len(data)} bytes are no call or answer: {error}") from error


class Caller:
    """One end of a connection; needs a running loop.

    Args:
        hello: the worker of this connection.
        peer: the connection, proven at both ends.
        worker: its public coroutine methods may be called by the other end; None: none.
        name: of the other end, for errors; "": the worker's.

    Attributes:
        lost: why the connection ended, where that does not prove that the other end has hung up.
        ended: done when the connection has ended.
    """

    def __init__(self, hello: Hello, peer: Peer, worker: object = None, name: str = "") -> None:
        self.hello = hello
        self._name = name or hello.name
        self.worker = worker
        self.lost: Exception | None = None
        self._peer = peer
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._gone = ""
        self.ended = asyncio.get_running_loop().create_task(self._listen())

    async def call(self, returns: type[T], method: str, *args: object) -> T:
        """Call a method of the other end.

        Raises:
            FabricError: it is gone, or answered with an error.
        """
        name = self._name
        if self._gone:
            raise FabricError(self._gone, code="PEER_GONE", peer=name)
        number = next(self._numbers)
        future = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._peer.write(_frame(_Call(number, method, list(args))))
            await self._peer.drain()
            return msgspec.convert(await future, returns)
        except msgspec.ValidationError as error:
            text = f"{name} answered {method} with something else: {error}"
            raise FabricError(text, peer=name) from error
        except ConnectionError as error:
            raise FabricError(f"{name} hung up: {error}", code="PEER_GONE", peer=name) from error
        finally:
            self._open.pop(number, None)

    def tell(self, method: str, *args: object) -> None:
        """Call a method of the other end, and wait for no answer; nothing happens if it is gone."""
        if not self._gone:
            self._peer.write(_frame(_Call(_NO_ANSWER, method, list(args))))

    def keep_alive(self) -> None:
        self._peer.keep_alive()

    async def _listen(self) -> None:
        why = "hung up"
        try:
            while True:
                message = _decode(await self._peer.receive(FRAME_MAX))
                if isinstance(message, _Call):
                    task = asyncio.get_running_loop().create_task(self._serve(message))
                    self._serving.add(task)
                    task.add_done_callback(self._serving.discard)
                    continue
                future = self._open.get(message.number)
                if future is None or future.done():
                    continue
                if message.error:
                    future.set_exception(FabricError(message.error, peer=self._name))
                else:
                    future.set_result(message.value)
        except (EOFError, ConnectionError):
            pass
        except (TepError, OSError) as error:
            self.lost = error
            why = f"was lost: {error}"
        finally:
            self._gone = f"{self._name} {why}; its process has ended, or the network is down"
            for future in self._open.values():
                if not future.done():
                    gone = FabricError(self._gone, code="PEER_GONE", peer=self._name)
                    future.set_exception(gone)
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)
            self._peer.hang_up()

    async def _serve(self, call: _Call) -> None:
        worker = self.worker
        try:
            method = _method(worker, call.method)
            args = _typed(method, call.args)
            reply = _frame(_Answer(call.number, "", await method(*args)))
        except Exception as error:  # noqa: BLE001  # of a user's function: who asked must hear it
            _log(error, f"{type(worker).__name__}.{call.method}")
            text = f"{type(error).__name__}: {error}".encode(errors="replace")[:_SHOWN]
            reply = _frame(_Answer(call.number, text.decode(errors="replace")))
        if call.number != _NO_ANSWER:
            self._peer.write(reply)
            with contextlib.suppress(ConnectionError):
                await self._peer.drain()

    async def close(self) -> None:
        """Hang up; what runs for the other end is cancelled."""
        self.ended.cancel()
        await asyncio.gather(self.ended, return_exceptions=True)


def _frame(message: _Call | _Answer) -> bytes:
    return frame(message, FRAME_MAX)


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
    given = inspect.signature(method).bind(*args).arguments
    return [msgspec.convert(arg, hints[name]) for name, arg in given.items()]


async def connect(
    worker: object, host: str, port: int, token: str, hello: Hello, *, patience_s: float = 60.0
) -> Caller:
    """Connect a worker, whose public coroutine methods are called, to a controller's listener.

    It may not listen yet: this calls for `patience_s`.

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
    return Caller(hello, peer, worker, f"the controller at {host}:{port}")


async def answer(
    worker: object, host: str, port: int, token: str, hello: Hello, *, patience_s: float = 60.0
) -> None:
    """Connect a worker as connect() does, and answer calls until the controller hangs up."""
    caller = await connect(worker, host, port, token, hello, patience_s=patience_s)
    try:
        await asyncio.shield(caller.ended)
    finally:
        await caller.close()
    if caller.lost is not None:
        raise caller.lost


class Listener:
    """The listener that workers connect to; an async context manager.

    Args:
        token: a secret that the workers know; it is never sent.
        host, port: to listen at; port 0: any, see `port`.
        awaited: who may come, each once; None: whoever knows the token.

    Attributes:
        port: the one that it listens at, once it is entered.
    """

    def __init__(
        self,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        awaited: Collection[Hello] | None = None,
    ) -> None:
        self._token = token
        self._where = (host, port)
        self.port = port
        self._awaited = None if awaited is None else set(awaited)
        self._came: dict[Hello, Caller] = {}
        self._news = asyncio.Condition()
        self._callers: list[Caller] = []
        self._door: Door | None = None

    async def __aenter__(self) -> Listener:
        host, port = self._where
        try:
            sockets = await listen(host, port)
        except OSError as error:
            raise UsageError(
                f"the controller cannot listen on {host}:{port}: {error}; if torch has taken the "
                "port, set TEP_RENDEZVOUS_PORT to another one in all ranks"
            ) from error
        self.port = sockets[0].getsockname()[1]
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
        if self._awaited is not None:
            if hello not in self._awaited:
                await refuse(peer, f"{role} {name} is not awaited, or is here already")
            self._awaited.discard(hello)
        await welcome(peer, self._token, asked)
        caller = Caller(hello, peer)
        self._callers.append(caller)
        async with self._news:
            self._came[hello] = caller
            self._news.notify_all()

    async def wait_for(self, role: str, name: str, timeout_s: float) -> Caller:
        """Wait until this worker has connected; a later one of the same name is another."""
        async with asyncio.timeout(timeout_s), self._news:
            await self._news.wait_for(lambda: (role, name) in self._came)
            return self._came.pop(Hello(role, name))

    async def next(self, role: str) -> Caller:
        """Wait for any worker of a role that nobody has asked for yet."""
        async with self._news:
            while True:
                found = next((hello for hello in self._came if hello.role == role), None)
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

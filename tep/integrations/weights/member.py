"""One process of an update, for frameworks whose calls block: an engine, and a thread for asyncio.

The hub listens in training rank 0; the other training ranks and all rollout ranks connect to it
with a secret token. Only control goes there: weights are written from engine to engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import uuid
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from tep import FabricError, TepError, TransferEngine, UsageError, WaitTimeout
from tep.apps.rl import Threads, UpdateReport
from tep.compat.engines import open_engine
from tep.integrations.weights.hub import Hub, RemoteReceiver, RemoteSender
from tep.integrations.weights.ranks import Wants, Weight, WeightReceiver, WeightSender, as_sent
from tep.rendezvous.calls import Hello, Listener, answer

__all__ = ["Fabric", "Meeting", "Member", "Worker"]

T = TypeVar("T")

_END_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Fabric:
    """The way in which a process reaches the others.

    Attributes:
        backend: a name of `tep info`.
        options: of the backend, e.g. {"provider": "efa"}.
        host: address of this machine at which the hub listens.
        port: for it; 0: any.
        timeout_s: of an update, and of each wait.
    """

    backend: str = "local"
    options: Mapping[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 0
    timeout_s: float = 300.0


class Meeting(NamedTuple):
    """The place of the hub, and a secret that whoever takes part has to know."""

    host: str
    port: int
    token: str

    def __repr__(self) -> str:
        return f"{self.host}:{self.port}"


class Member:
    """This process: first `meet`, `lead`, `follow` or `receive_from`; `close` it at the end.

    Its name is its own among all processes; a rollout rank has a receiver.
    """

    def __init__(self, name: str, fabric: Fabric) -> None:
        self.name = name
        self.receiver: WeightReceiver | None = None
        self._fabric = fabric
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"tep weights {name}", daemon=True
        )
        self._thread.start()
        self._engine: TransferEngine | None = None
        self._listener: Listener | None = None
        self._meeting: Meeting | None = None
        self._sender: WeightSender | None = None
        self._hub: Hub | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------------ coming together

    def meet(self, token: str = "") -> Meeting:
        """Begin to listen, as rank 0 may have to before anybody knows its rank."""
        if self._meeting is None:
            token = token or secrets.token_hex(16)
            self._listener = Listener(token, self._fabric.host, self._fabric.port)
            self._call(self._listener.__aenter__())
            self._meeting = Meeting(self._fabric.host, self._listener.port, token)
        return self._meeting

    def lead(self, world: int) -> Meeting:
        """Be training rank 0 of `world`: the hub is here."""
        meeting = self.meet()
        if self._sender is None:
            self._sender = WeightSender(self._open(), 0, world, compute=Threads())
            self._hub = Hub([self._sender], timeout_s=self._fabric.timeout_s)
            self._start(self._greet(self._hub))
        return meeting

    def follow(self, meeting: Meeting, rank: int, world: int) -> None:
        self._end_meeting()
        if self._sender is None:
            sender = WeightSender(self._open(), rank, world, compute=Threads())
            self._sender = sender
            hello = Hello("sender", str(rank))
            self._start(self._answer(sender, meeting, hello))

    def receive_from(self, meeting: Meeting, wants: Wants = as_sent) -> None:
        """Be a rollout rank; return when the hub knows it."""
        self._end_meeting()
        if self.receiver is None:
            receiver = WeightReceiver(self._open(), self.name, wants)
            self.receiver = receiver
            hello = Hello("receiver", self.name)
            self._start(self._answer(receiver, meeting, hello))
        self._call(self._welcomed(self.receiver, meeting))

    async def _welcomed(self, receiver: WeightReceiver, meeting: Meeting) -> None:
        waiting = asyncio.ensure_future(receiver.welcomed.wait())
        await asyncio.wait({waiting, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            raise FabricError(
                f"{self.name}: the hub at {meeting} did not take it: "
                f"{receiver.why_gone or 'it hung up'}",
                code="NO_HUB",
            )

    def _open(self) -> TransferEngine:
        if self._engine is None:
            options: dict[str, Any] = {"name": self.name, **self._fabric.options}
            self._engine = open_engine(self._fabric.backend, **options)
        return self._engine

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(self._do(self._loop.create_task, work))

    async def _greet(self, hub: Hub) -> None:
        assert self._listener is not None
        while True:
            caller = await self._listener.next("receiver")
            with contextlib.suppress(TepError, OSError):  # it is gone again
                await hub.welcome(caller.hello.name, RemoteReceiver(caller))

    async def _answer(
        self, service: WeightSender | WeightReceiver, meeting: Meeting, hello: Hello
    ) -> None:
        """Answer the hub until it hangs up, and then say so to whoever waits here."""
        host, port, token = meeting
        why = f"the hub at {meeting} hung up"
        try:
            await answer(service, host, port, token, hello, patience_s=self._fabric.timeout_s)
        except (OSError, TepError) as error:
            why = f"the hub at {meeting}: {error}"
        await service.gone(why)

    # ------------------------------------------------------------------ training ranks

    def send(self, weights: Iterable[tuple[str, Any]], version: int) -> UpdateReport | None:
        """Send this rank's part of a version; all training ranks call it. Rank 0 gets the report.

        Raises:
            TepError: not every rollout rank has the version; all go on with the one they have.
        """
        self._sender_here().load(weights)
        return self.sending(version).result(4 * self._fabric.timeout_s)

    def loading(self) -> AbstractContextManager[Callable[[str, Any], None]]:
        """Take this rank's part of a version piece by piece; see WeightSender.loading."""
        return self._sender_here().loading()

    def sending(self, version: int) -> Future[UpdateReport | None]:
        """Begin to send what was loaded; each wait in it has its limit of time."""
        work = self._send(self._sender_here(), version)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _sender_here(self) -> WeightSender:
        if self._sender is None:
            raise UsageError(f"{self.name} is no training rank; lead() or follow() first")
        return self._sender

    async def _send(self, sender: WeightSender, version: int) -> UpdateReport | None:
        sending = asyncio.ensure_future(sender.send(version, 3 * self._fabric.timeout_s))
        if self._hub is None:
            await sending
            return None
        try:
            await self._gather_senders(self._hub, sender.world)
            report = await self._hub.update(version)
            await sending
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        return report

    async def _gather_senders(self, hub: Hub, world: int) -> None:
        assert self._listener is not None
        for rank in range(len(hub.trains), world):
            try:
                caller = await self._listener.wait_for("sender", str(rank), self._fabric.timeout_s)
            except TimeoutError:
                text = f"training rank {rank} of {world} has not come to the hub"
                raise FabricError(text, code="TIMEOUT") from None
            hub.append(RemoteSender(caller))

    def keep(self, names: Iterable[str]) -> None:
        """At rank 0: only these rollout ranks take part from now on."""
        if self._hub is None:
            raise UsageError(f"{self.name} does not lead; lead() first")
        self._hub.keep(list(names))

    # ------------------------------------------------------------------ rollout ranks

    async def wait_whole(self, version: int | None) -> int:
        """Wait for a version, in any loop; see WeightReceiver.whole."""
        waiting = self._here().whole(version, self._fabric.timeout_s)
        future = asyncio.run_coroutine_threadsafe(waiting, self._loop)
        return await asyncio.wrap_future(future)

    def whole(self, version: int | None, timeout_s: float) -> int:
        """Wait for a version; see WeightReceiver.whole."""
        return self._call(self._here().whole(version, timeout_s), timeout_s + _END_S)

    @contextlib.contextmanager
    def read(self, version: int) -> Iterator[list[Weight]]:
        """Give out a version; see WeightReceiver.read."""
        reading = self._here().read(version)
        weights = self._do(reading.__enter__)
        try:
            yield weights
        finally:
            self._do(reading.__exit__, None, None, None)

    def _here(self) -> WeightReceiver:
        if self.receiver is None:
            raise UsageError(f"{self.name} is no rollout rank; receive_from() first")
        return self.receiver

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine in the loop's thread and wait for it."""
        timeout_s = timeout_s or self._fabric.timeout_s + _END_S
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise WaitTimeout(f"{self._thread.name}: not done in {timeout_s} s") from None

    def _do(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in the loop's thread."""

        async def work() -> T:
            return function(*args)

        return self._call(work())

    def _end_meeting(self) -> None:
        """Stop listening, as anybody but rank 0."""
        if self._listener is not None:
            self._call(self._listener.__aexit__())
            self._listener = None

    def close(self) -> None:
        """Leave: end the thread, give back memory, close the engine."""

        async def end() -> None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self.receiver is not None:
                self.receiver.close()

        self._call(end())
        self._end_meeting()
        if self._engine is not None:
            self._engine.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            self._loop.close()


class Worker:
    """One rank of a trainer that builds its groups anew each round: verl and NeMo-RL.

    Each worker says in prepare() where it listens; the first training rank's place is the hub's,
    and all others connect there in join(). Who is connected stays connected over rounds.

    Args:
        fabric: how to reach the others.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._member: Member | None = None
        self._meeting: Meeting | None = None
        self._rank: int | None = None
        self._rounds = 0

    def prepare(self) -> dict[str, Any]:
        """Say who this is, and where it could be met."""
        if self._member is None:
            self._member = Member(f"worker-{uuid.uuid4().hex[:12]}", self._fabric)
        if self._meeting is None:
            self._meeting = self._member.meet()
        return {"name": self._member.name, "hub": list(self._meeting)}

    def join(self, rank: int, world: int, metadata: Sequence[Mapping[str, Any]]) -> None:
        """Come together with the others.

        Args:
            rank: of a training rank; -1: a rollout rank.
            world: training ranks.
            metadata: of all workers, what prepare() gave; the training ranks' first.
        """
        if self._member is None:
            raise UsageError("prepare() comes before the process group")
        hub = Meeting(*metadata[0]["hub"])
        if self._rank is not None and (rank != self._rank or hub != self._meeting):
            raise UsageError(
                f"{self._member.name} was rank {self._rank} of the hub {self._meeting}; now rank "
                f"{rank} of {hub}: make a new engine for another group"
            )
        self._rank, self._meeting = rank, hub
        if rank < 0:
            self._member.receive_from(hub)
        elif rank > 0:
            self._member.follow(hub, rank, world)
        else:
            self._member.lead(world)
            self._member.keep(str(one["name"]) for one in metadata[world:])

    async def send(self, weights: Iterable[Any] | AsyncIterable[Any]) -> None:
        """Send the next version: this rank's part of it; all training ranks call it.

        Raises:
            TepError: not every rollout rank has it.
        """
        member = self._joined(training=True)
        with member.loading() as add:
            if isinstance(weights, AsyncIterable):
                async for name, tensor in weights:
                    add(name, tensor)
            else:
                for name, tensor in weights:
                    add(name, tensor)
        self._rounds += 1
        await asyncio.wrap_future(member.sending(self._rounds))

    async def receive(self) -> AsyncIterator[list[Weight]]:
        """Wait for the next version, and give it out once; no update begins before the exit."""
        member = self._joined(training=False)
        version = await member.wait_whole(None)
        with member.read(version) as weights:
            yield weights

    def _joined(self, *, training: bool) -> Member:
        if self._member is None or self._rank is None or training != (self._rank >= 0):
            kind = "training" if training else "rollout"
            raise UsageError(f"this is no {kind} rank of a process group (rank {self._rank})")
        return self._member

    def close(self) -> None:
        """Leave the group."""
        if self._member is not None:
            self._member.close()
        self._member = self._meeting = self._rank = None

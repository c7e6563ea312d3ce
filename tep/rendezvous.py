"""Rendezvous for scripts: N processes exchange bytes (addresses, descriptors) before they transfer.

    engine = tep.TransferEngine.open("libfabric", provider="tcp")
    peers = tep.rendezvous.exchange(engine.main_address.to_bytes())  # by rank, under torchrun

Rank 0 listens, the others connect; everything goes through rank 0, over asyncio's TCP. It is made
for a few kilobytes a rank at the start of a job, and moves no data of transfers.

Both sides prove that they know the token without sending it. What a stranger sends is bounded,
refused and reported. The frames are in `rendezvous_wire`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import socket
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from tep.errors import FabricError, UsageError, WaitTimeout
from tep.rendezvous_wire import (
    STRANGER_BYTES_MAX,
    TROUBLE,
    Challenge,
    Got,
    Join,
    Joined,
    Late,
    Message,
    Peer,
    Put,
    Refused,
    StrangeError,
)

__all__ = ["AsyncGroup", "Group", "Place", "exchange", "exchange_async", "join", "join_async"]

T = TypeVar("T")

_VERSION: Final = 1
_RETRY_S: Final = 0.05
_GRACE_S: Final = 1.0  # what others wait longer than rank 0, so that its report reaches them


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which of the processes this one is, and where they meet.

    Attributes:
        rank: 0 to size - 1; rank 0 listens.
        size: how many processes meet.
        host, port: where rank 0 listens.
        token: a secret that all of them know; keeps strangers and other jobs out.
    """

    rank: int
    size: int
    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise UsageError(f"rendezvous: rank={self.rank} size={self.size}; 0 <= rank < size")
        if not self.token:
            raise UsageError(
                "rendezvous: no token; give token=, or set TEP_TOKEN, the same secret in all ranks"
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them.

        TEP_RENDEZVOUS_PORT goes before MASTER_PORT, which torch's own store may have taken. The
        token is TEP_TOKEN, or torchrun's run id.

        Raises:
            UsageError: one is missing or no number.
        """
        env = os.environ if environ is None else environ
        port = "TEP_RENDEZVOUS_PORT" if "TEP_RENDEZVOUS_PORT" in env else "MASTER_PORT"
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", port)
        missing = [name for name in names if not env.get(name)]
        if missing:
            raise UsageError(
                f"rendezvous: {', '.join(missing)} not set; start with torchrun, set them, or give "
                "tep.rendezvous.Place(rank=, size=, host=, port=, token=)"
            )
        numbers = {}
        for name in ("RANK", "WORLD_SIZE", port):
            try:
                numbers[name] = int(env[name])
            except ValueError as error:
                raise UsageError(f"rendezvous: {name}={env[name]!r} is no number") from error
        token = env.get("TEP_TOKEN") or env.get("TORCHELASTIC_RUN_ID") or ""
        return cls(
            rank=numbers["RANK"],
            size=numbers["WORLD_SIZE"],
            host=env["MASTER_ADDR"],
            port=numbers[port],
            token=token,
        )


def exchange(data: bytes, place: Place | None = None, *, timeout_s: float = 60.0) -> list[bytes]:
    """Give every rank's bytes to every rank: join, all_gather, close. Returns them by rank."""
    return _run(exchange_async(data, place, timeout_s=timeout_s))


async def exchange_async(
    data: bytes, place: Place | None = None, *, timeout_s: float = 60.0
) -> list[bytes]:
    """As exchange(), without blocking the event loop."""
    group = await join_async(place, timeout_s=timeout_s)
    try:
        return await group.all_gather(data, timeout_s=timeout_s)
    finally:
        await group.close()


async def join_async(
    place: Place | None = None,
    *,
    timeout_s: float = 60.0,
    listener: socket.socket | None = None,
) -> AsyncGroup:
    """Meet all other ranks.

    Args:
        place: who and where; None = from the environment.
        timeout_s: how long to wait for all to come, seconds.
        listener: rank 0 only: a bound socket to listen on instead of host and port.

    Raises:
        UsageError: refused by rank 0: wrong token, world size, a rank that is here already; or the
            port is taken.
        WaitTimeout: not all came in time; says who is missing.
    """
    place = Place.from_env() if place is None else place
    group = AsyncGroup(place)
    try:
        if place.rank == 0:
            await group._gather_ranks(timeout_s, listener)
        else:
            await group._find_rank_0(timeout_s)
    except BaseException:
        await group.close()
        raise
    return group


def join(
    place: Place | None = None,
    *,
    timeout_s: float = 60.0,
    listener: socket.socket | None = None,
) -> Group:
    """As join_async(), for scripts without an event loop."""
    _refuse_running_loop()
    runner = asyncio.Runner()
    try:
        group = runner.run(join_async(place, timeout_s=timeout_s, listener=listener))
    except BaseException:
        runner.close()
        raise
    return Group(runner, group)


class AsyncGroup:
    """The ranks that have met. Collective calls are made by all of them, in the same order.

    Attributes:
        rank, size: of this process, and of all.
    """

    def __init__(self, place: Place) -> None:
        self.rank = place.rank
        self.size = place.size
        self._place = place
        self._turn = 0
        self._peers: dict[int, Peer] = {}  # at rank 0: everybody else; elsewhere: rank 0
        self._refusals: list[str] = []
        self._closed = False

    # --- what users call

    async def all_gather(self, data: bytes, *, timeout_s: float = 60.0) -> list[bytes]:
        """Give every rank's bytes to every rank; returns them by rank.

        Raises:
            WaitTimeout: not all called in time; says who is missing.
            FabricError: a rank has gone, or called something else.
        """
        return await self._collect("all_gather", bytes(data), timeout_s)

    async def barrier(self, *, timeout_s: float = 60.0) -> None:
        """Return when all ranks have called; errors as all_gather()."""
        await self._collect("barrier", b"", timeout_s)

    async def close(self) -> None:
        """Hang up. Idempotent."""
        self._closed = True
        peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            await peer.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- meeting

    async def _gather_ranks(self, timeout_s: float, listener: socket.socket | None) -> None:
        if self.size == 1:
            if listener is not None:
                listener.close()
            return
        full = asyncio.Event()
        place = self._place

        async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = Peer(reader, writer)
            try:
                await asyncio.wait_for(self._admit(peer), timeout_s)
            except TROUBLE as error:
                self._refusals.append(f"{peer.name}: {error}")
                await peer.close()
            if len(self._peers) == self.size - 1:
                full.set()

        try:
            if listener is not None:
                server = await asyncio.start_server(receive, sock=listener)
            else:
                server = await asyncio.start_server(receive, place.host, place.port)
        except OSError as error:
            raise UsageError(
                f"rendezvous: rank 0 cannot listen on {place.host}:{place.port}: {error}; if torch "
                "has taken MASTER_PORT, set TEP_RENDEZVOUS_PORT to another one in all ranks"
            ) from error
        try:
            await asyncio.wait_for(full.wait(), timeout_s)
        except TimeoutError:
            raise await self._late("join", self._peers, timeout_s) from None
        finally:
            server.close()  # it listens no more; what was accepted stays
        await self._tell(Got(0, []))

    async def _admit(self, peer: Peer) -> None:
        """Rank 0: let a rank in, or say why not; StrangeError says it here, too."""
        nonce = os.urandom(16)
        await peer.say(Challenge(nonce))
        asked = await peer.hear(STRANGER_BYTES_MAX)
        if not isinstance(asked, Join):
            raise StrangeError("it did not introduce itself")
        why = ""
        if not hmac.compare_digest(asked.proof, self._proof(b"join", nonce)):
            why = "wrong token; set the same TEP_TOKEN in all ranks"
        elif asked.version != _VERSION:
            why = f"rendezvous version {asked.version}, rank 0 has {_VERSION}"
        elif asked.size != self.size:
            why = f"rank {asked.rank} has world size {asked.size}, rank 0 has {self.size}"
        elif not 0 < asked.rank < self.size:
            why = f"rank {asked.rank} is not among 1 to {self.size - 1}"
        elif asked.rank in self._peers and not self._peers[asked.rank].gone:
            why = f"rank {asked.rank} is here already, from {self._peers[asked.rank].name}"
        if why:
            await peer.say(Refused(why))
            raise StrangeError(why)
        self._peers[asked.rank] = peer  # before the next await: the same rank may knock twice
        await peer.say(Joined(self._proof(b"joined", asked.nonce)))

    async def _find_rank_0(self, timeout_s: float) -> None:
        place, what = self._place, "nobody listens there"
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    try:
                        streams = await asyncio.open_connection(place.host, place.port)
                    except OSError as error:  # not up yet
                        what = str(error)
                        await asyncio.sleep(_RETRY_S)
                        continue
                    what = "it does not answer"
                    peer = self._peers[0] = Peer(*streams)
                    await self._introduce(peer)
                    break
        except TimeoutError:
            raise WaitTimeout(
                f"rendezvous: rank {self.rank} found no rank 0 at {place.host}:{place.port} within "
                f"{timeout_s} s: {what}; missing: 0"
            ) from None
        await self._hear_from_0("join", max(0.0, deadline - loop.time()))

    async def _introduce(self, peer: Peer) -> None:
        place, nonce = self._place, os.urandom(16)
        try:
            challenge = await peer.hear(STRANGER_BYTES_MAX)
            if not isinstance(challenge, Challenge):
                raise StrangeError("it is no rendezvous")
            proof = self._proof(b"join", challenge.nonce)
            await peer.say(Join(_VERSION, self.rank, self.size, nonce, proof))
            answer = await peer.hear(STRANGER_BYTES_MAX)
        except TROUBLE as error:
            raise FabricError(
                f"rendezvous: rank {self.rank} met something at {place.host}:{place.port} that is "
                f"not rank 0 of this job: {error}; is the port another program's?"
            ) from error
        if isinstance(answer, Refused):
            raise UsageError(f"rendezvous: rank {self.rank} was refused by rank 0: {answer.why}")
        expected = self._proof(b"joined", nonce)
        if not isinstance(answer, Joined) or not hmac.compare_digest(answer.proof, expected):
            raise FabricError(
                f"rendezvous: {place.host}:{place.port} does not know the token: it is not rank 0"
            )

    def _proof(self, what: bytes, nonce: bytes) -> bytes:
        key = hashlib.sha256(self._place.token.encode()).digest()
        return hmac.digest(key, what + nonce, "sha256")

    # --- collectives

    async def _collect(self, what: str, data: bytes, timeout_s: float) -> list[bytes]:
        if self._closed:
            raise UsageError(f"rendezvous: {what} after close")
        self._turn += 1
        if self.size == 1:
            return [data]
        try:
            if self.rank == 0:
                return await self._collect_at_0(what, data, timeout_s)
            return await self._collect_elsewhere(what, data, timeout_s)
        except BaseException:
            await self.close()  # the ranks may be out of step now
            raise

    async def _collect_at_0(self, what: str, data: bytes, timeout_s: float) -> list[bytes]:
        found: dict[int, bytes] = {}

        async def one(rank: int, peer: Peer) -> None:
            try:
                put = await peer.hear()
            except TROUBLE as error:
                raise self._lost(rank, what, error) from error
            if not isinstance(put, Put) or (put.turn, put.what) != (self._turn, what):
                raise FabricError(
                    f"rendezvous: rank {rank} is at {_at(put)}, rank 0 at {what} {self._turn}; all "
                    "ranks have to make the same calls in the same order"
                )
            found[rank] = put.data

        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                for item in self._peers.items():
                    group.create_task(one(*item))
        except TimeoutError:
            raise await self._late(what, found, timeout_s) from None
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            await self._tell(Late(str(first), lost=True))
            raise first from None
        gathered = [data, *(found[rank] for rank in range(1, self.size))]
        await asyncio.wait_for(self._tell(Got(self._turn, gathered)), timeout_s)
        return gathered

    async def _collect_elsewhere(self, what: str, data: bytes, timeout_s: float) -> list[bytes]:
        try:
            await asyncio.wait_for(self._peers[0].say(Put(self._turn, what, data)), timeout_s)
        except TROUBLE as error:
            raise self._lost(0, what, error) from error
        return await self._hear_from_0(what, timeout_s)

    async def _hear_from_0(self, what: str, timeout_s: float) -> list[bytes]:
        """Wait for rank 0 to have heard from all; a little longer than it waits itself."""
        try:
            answer = await asyncio.wait_for(self._peers[0].hear(), timeout_s + _GRACE_S)
        except TimeoutError:
            raise WaitTimeout(
                f"rendezvous: {what} {self._turn} of rank {self.rank}: no answer from rank 0 in "
                f"{timeout_s} s; it has not called {what} (missing: 0), or waits longer for others"
            ) from None
        except TROUBLE as error:
            raise self._lost(0, what, error) from error
        if isinstance(answer, Late):
            raise (FabricError if answer.lost else WaitTimeout)(f"{answer.why} (says rank 0)")
        if not isinstance(answer, Got) or answer.turn != self._turn:
            raise FabricError(f"rendezvous: rank 0 answers {what} {self._turn} with {_at(answer)}")
        return answer.data

    async def _late(self, what: str, here: Mapping[int, object], timeout_s: float) -> WaitTimeout:
        """Say who is missing: to those who came, and as the error to raise."""
        missing = [str(rank) for rank in range(1, self.size) if rank not in here]
        turn = f" {self._turn}" if self._turn else ""
        text = (
            f"rendezvous: {what}{turn}: {self.size - len(missing)} of {self.size} ranks within "
            f"{timeout_s} s; missing: {', '.join(missing)}"
        )
        if self._refusals:
            text += f"; refused: {'; '.join(self._refusals[:8])}"
        await self._tell(Late(text))
        return WaitTimeout(text)

    async def _tell(self, message: Message) -> None:
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                await peer.say(message)

    def _lost(self, rank: int, what: str, error: BaseException) -> FabricError:
        name = type(error).__name__
        return FabricError(
            f"rendezvous: rank {rank} is gone at {what} {self._turn} ({name}: {error})",
            code="UNREACHABLE",
            peer=f"rank {rank}",
        )


class Group:
    """The blocking form of AsyncGroup; it runs an event loop of its own inside each call."""

    def __init__(self, runner: asyncio.Runner, group: AsyncGroup) -> None:
        self.rank = group.rank
        self.size = group.size
        self._runner = runner
        self._group = group

    def all_gather(self, data: bytes, *, timeout_s: float = 60.0) -> list[bytes]:
        """Give every rank's bytes to every rank; returns them by rank. See AsyncGroup."""
        return self._runner.run(self._group.all_gather(data, timeout_s=timeout_s))

    def barrier(self, *, timeout_s: float = 60.0) -> None:
        """Return when all ranks have called."""
        self._runner.run(self._group.barrier(timeout_s=timeout_s))

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._runner.run(self._group.close())
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _at(message: Message) -> str:
    return f"{message.what} {message.turn}" if isinstance(message, Put) else type(message).__name__


def _refuse_running_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UsageError(
        "rendezvous: an event loop runs here (a notebook?): use `await join_async()` or "
        "`await exchange_async()`"
    )


def _run(what: Coroutine[Any, Any, T]) -> T:
    try:
        _refuse_running_loop()
    except UsageError:
        what.close()
        raise
    return asyncio.run(what)

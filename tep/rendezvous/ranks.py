"""The ranks of one rendezvous: their place, their meeting, and their collective calls.

Rule 1: a call ends in time, and says which ranks it waited for. Rule 2: rank 0 sends the others
the reason why a call has failed. Rule 3: after a failed call nothing more is sent.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeVar

from tep.base.checks import check_seconds, unpicklable
from tep.base.errors import RendezvousError, UsageError, WaitTimeout
from tep.rendezvous.wire import (
    PART_BYTES_MAX,
    TROUBLE,
    Door,
    Got,
    Late,
    Message,
    Peer,
    Put,
    Who,
    challenge,
    enter,
    frame,
    listen,
    refuse,
    welcome,
)

__all__ = ["RANKS_MAX", "AsyncGroup", "Place"]

T = TypeVar("T")

RANKS_MAX: Final = 4095
"""Number of parts of 1 MiB that fit into one frame with its 32-bit length."""

_PORT_MAX: Final = 65535
_PORT: Final = "TEP_RENDEZVOUS_PORT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The rank of this process, and the meeting point.

    Attributes:
        rank: 0 to size - 1; rank 0 listens.
        size: number of processes that meet.
        host, port: rank 0's address.
        token: a secret that all of them know; keeps strangers and other jobs out. Never printed.

    Raises:
        UsageError: a number is out of range, or there is no token.
    """

    rank: int
    size: int
    host: str = "127.0.0.1"
    port: int = 0
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size <= RANKS_MAX:
            raise UsageError(
                f"rendezvous: rank={self.rank} size={self.size}; 0 <= rank < size <= {RANKS_MAX}"
            )
        if not 0 <= self.port <= _PORT_MAX:
            raise UsageError(f"rendezvous: port={self.port}; 0 to {_PORT_MAX}")
        if not self.token:
            raise UsageError(
                "rendezvous: no token; give token=, or set TEP_TOKEN, the same secret in all ranks"
            )

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def variables(self) -> dict[str, str]:
        """Return the environment variables that `from_env` reads, for the starter of this rank."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            _PORT: str(self.port),
            "TEP_TOKEN": self.token,
        }

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them.

        TEP_RENDEZVOUS_PORT goes before MASTER_PORT; if torchrun's own store is there
        (TORCHELASTIC_USE_AGENT_STORE), the next port is taken. The token is TEP_TOKEN, or
        torchrun's run id, which keeps jobs apart and is no secret.

        Raises:
            UsageError: one is missing or no number.

        Source: pytorch pull request 125743, on TORCHELASTIC_USE_AGENT_STORE; quoted.
        """
        env = os.environ if environ is None else environ
        port_name = _PORT if env.get(_PORT) else "MASTER_PORT"
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", port_name)
        missing = [name for name in names if not env.get(name)]
        if missing:
            raise UsageError(
                f"rendezvous: {', '.join(missing)} not set; start with torchrun, set them, or give "
                "tep.rendezvous.Place(rank=, size=, host=, port=, token=)"
            )
        rank, size, port = (_number(env, name) for name in ("RANK", "WORLD_SIZE", port_name))
        if port_name != _PORT and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port += 1
        token = env.get("TEP_TOKEN") or env.get("TORCHELASTIC_RUN_ID") or ""
        return cls(rank=rank, size=size, host=env["MASTER_ADDR"], port=port, token=token)


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError as error:
        raise UsageError(f"rendezvous: {name}={env[name]!r} is no number") from error


_SERVICE: Final = "rank"
_GRACE_S: Final = 1.0  # the others wait so much longer than rank 0, for its report


class AsyncGroup:
    """The ranks that have met. Collective calls are made by all of them, in the same order.

    After a call that failed the ranks may be out of step, and the group is closed.

    Attributes:
        rank, size: this process's rank, and the number of ranks.
    """

    def __init__(self, place: Place) -> None:
        self.rank = place.rank
        self.size = place.size
        self._place = place
        self._turn = 0
        self._peers: dict[int, Peer] = {}  # at rank 0: everybody else; elsewhere: rank 0
        self._here: set[int] = set()  # at rank 0: the ranks that were admitted
        self._door: Door | None = None  # at rank 0
        self._calling = False
        self._closed = False

    __reduce__ = unpicklable("its connections are this process's; each process joins by itself")

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._turn} calls so far"
        return f"AsyncGroup(rank {self.rank} of {self.size}, {state})"

    # --- what users call

    async def all_gather(self, data: bytes, *, timeout_s: float = 60.0) -> list[bytes]:
        """Give every rank's bytes, 1 MiB at the most, to every rank; return them by rank.

        Raises:
            UsageError: no bytes, or too many; nothing has happened then.
            WaitTimeout: not all called in time; says who is missing.
            RendezvousError: a rank has gone, or called something else.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise UsageError(f"rendezvous: all_gather takes bytes, not {type(data).__name__}")
        part = bytes(data)
        if len(part) > PART_BYTES_MAX:
            raise UsageError(
                f"rendezvous: all_gather of {len(part)} bytes; {PART_BYTES_MAX} a rank at the most"
            )
        return await self._collect("all_gather", part, timeout_s)

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

    async def gather_ranks(self, timeout_s: float, listener: socket.socket | None) -> None:
        """Listen, at rank 0, until all others are here."""
        if self.size == 1:
            if listener is not None:
                listener.close()
            return
        full = asyncio.Event()

        async def admit(peer: Peer) -> None:
            self._here.add(await self._admit(peer))
            if len(self._present()) == self.size - 1:
                full.set()

        self._door = Door(await self._listen(listener), admit)
        try:
            async with asyncio.timeout(timeout_s):
                await full.wait()
        except TimeoutError:
            raise await self._late("join", self._present(), timeout_s) from None
        finally:
            await self._door.close()  # admitted ranks stay connected
        await self._tell(Got(0, []), timeout_s)

    def _present(self) -> set[int]:
        """Return the ranks that have come and not left again, at rank 0."""
        return {rank for rank in self._here if not self._peers[rank].gone}

    async def _listen(self, listener: socket.socket | None) -> list[socket.socket]:
        if listener is not None:
            return [listener]
        try:
            return await listen(self._place.host, self._place.port)
        except OSError as error:
            raise UsageError(
                f"rendezvous: rank 0 cannot listen on {self._place}: {error}; if torch has taken "
                "the port, set TEP_RENDEZVOUS_PORT to another one in all ranks"
            ) from error

    async def _admit(self, peer: Peer) -> int:
        """Admit a rank, at rank 0, and return it; or refuse it and raise the reason."""
        asked = await challenge(peer, self._place.token)
        why, rank = self._why_not(asked.who)
        if why:
            await refuse(peer, why)
        before = self._peers.get(rank)
        self._peers[rank] = peer  # before the next await: the same rank may connect twice
        self._here.discard(rank)
        if before is not None:
            await before.close()
        await welcome(peer, self._place.token, asked)
        return rank

    def _why_not(self, who: Who) -> tuple[str, int]:
        """Return the reason why a caller is refused, or '', and its rank."""
        match who:
            case (str(service), int(rank), int(size)) if service == _SERVICE:
                pass
            case _:
                return f"{who} is no rank of a rendezvous", 0
        if size != self.size:
            return f"rank {rank} has world size {size}, rank 0 has {self.size}", 0
        if not 0 < rank < self.size:
            return f"rank {rank} is not among 1 to {self.size - 1}", 0
        known = self._peers.get(rank)
        if known is not None and not known.gone:
            return f"rank {rank} is here already, from {known.name}", 0
        return "", rank

    async def find_rank_0(self, timeout_s: float) -> None:
        """Connect another rank to rank 0, and wait until all others have."""
        place, loop = self._place, asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        who = (_SERVICE, self.rank, self.size)
        try:
            self._peers[0] = await enter(place.host, place.port, place.token, who, timeout_s)
        except TimeoutError as error:
            raise WaitTimeout(
                f"rendezvous: rank {self.rank} found no rank 0 at {place} within {timeout_s} s: "
                f"{error}; missing: 0"
            ) from None
        except UsageError as error:
            raise UsageError(
                f"rendezvous: rank {self.rank} was refused by rank 0: {error}"
            ) from error
        except RendezvousError as error:
            raise RendezvousError(
                f"rendezvous: rank {self.rank} met something at {place} that is not rank 0 of this "
                f"job: {error}; is the port another program's?"
            ) from error
        await self._hear_from_0("join", max(0.0, deadline - loop.time()))

    # --- collectives

    async def _collect(self, what: str, data: bytes, timeout_s: float) -> list[bytes]:
        if self._closed:
            raise UsageError(f"rendezvous: {what} after close, or after a call that failed")
        if self._calling:
            raise UsageError(f"rendezvous: {what} while another call is under way; await it first")
        timeout_s = check_seconds("rendezvous: timeout_s", timeout_s, never=True)
        self._turn += 1
        if self.size == 1:
            return [data]
        self._calling = True
        try:
            if self.rank == 0:
                return await self._collect_at_0(what, data, timeout_s)
            deadline = asyncio.get_running_loop().time() + timeout_s
            await self._with_0(what, timeout_s, self._peers[0].say(Put(self._turn, what, data)))
            return await self._hear_from_0(what, deadline - asyncio.get_running_loop().time())
        except BaseException:
            await self.close()  # the ranks may be out of step now
            raise
        finally:
            self._calling = False

    async def _collect_at_0(self, what: str, data: bytes, timeout_s: float) -> list[bytes]:
        found: dict[int, bytes] = {}

        async def one(rank: int, peer: Peer) -> None:
            try:
                put = await peer.hear(1)
            except TROUBLE as error:
                raise self._lost(rank, what, error) from error
            if not isinstance(put, Put) or (put.turn, put.what) != (self._turn, what):
                raise RendezvousError(
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
            await self._tell(Late(str(first), lost=True), _GRACE_S)
            raise first from None
        gathered = [data, *(found[rank] for rank in range(1, self.size))]
        slow = await self._tell(Got(self._turn, gathered), timeout_s)
        if slow:
            raise WaitTimeout(
                f"rendezvous: {what} {self._turn}: ranks {_list(slow)} did not take the answer "
                f"within {timeout_s} s"
            )
        return gathered

    async def _hear_from_0(self, what: str, timeout_s: float) -> list[bytes]:
        """Wait for rank 0's answer, a little longer than rank 0 waits for all ranks."""
        heard = self._peers[0].hear(self.size)
        answer = await self._with_0(what, timeout_s, heard, _GRACE_S)
        if isinstance(answer, Late):
            raise (RendezvousError if answer.lost else WaitTimeout)(f"{answer.why} (says rank 0)")
        if not isinstance(answer, Got) or answer.turn != self._turn:
            raise RendezvousError(
                f"rendezvous: rank 0 answers {what} {self._turn} with {_at(answer)}"
            )
        return answer.data

    async def _with_0(
        self, what: str, timeout_s: float, work: Coroutine[Any, Any, T], grace_s: float = 0.0
    ) -> T:
        """Wait for something that rank 0 has a part in."""
        try:
            async with asyncio.timeout(timeout_s + grace_s):
                try:
                    return await work
                except TROUBLE as error:
                    raise self._lost(0, what, error) from error
        except TimeoutError:
            raise WaitTimeout(
                f"rendezvous: {what} {self._turn} of rank {self.rank}: no answer from rank 0 in "
                f"{timeout_s:.3g} s; it has not called {what} (missing: 0), or waits longer for "
                "others"
            ) from None

    async def _late(self, what: str, here: Collection[int], timeout_s: float) -> WaitTimeout:
        """Send those that came the list of missing ranks; return it as the error to raise."""
        missing = [rank for rank in range(1, self.size) if rank not in here]
        turn = f" {self._turn}" if self._turn else ""
        text = (
            f"rendezvous: {what}{turn}: {self.size - len(missing)} of {self.size} ranks within "
            f"{timeout_s} s; missing: {_list(missing)}"
        )
        door = self._door
        if door is not None and door.refused:
            text += f"; refused {door.refused}: {'; '.join(door.refusals)}"
        await self._tell(Late(text), _GRACE_S)
        return WaitTimeout(text)

    async def _tell(self, message: Message, timeout_s: float) -> list[int]:
        """Send to all others at once; return those that did not take it in time.

        A rank that is gone is skipped; the next call reports it.
        """
        slow = []
        data = frame(message)

        async def one(rank: int, peer: Peer) -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    try:
                        await peer.send(data)
                    except OSError:
                        return
            except TimeoutError:
                slow.append(rank)

        await asyncio.gather(*(one(*item) for item in self._peers.items()))
        return sorted(slow)

    def _lost(self, rank: int, what: str, error: BaseException) -> RendezvousError:
        name = type(error).__name__
        return RendezvousError(
            f"rendezvous: rank {rank} is gone at {what} {self._turn} ({name}: {error})"
        )


def _list(ranks: Collection[int]) -> str:
    return ", ".join(map(str, ranks))


def _at(message: Message) -> str:
    return f"{message.what} {message.turn}" if isinstance(message, Put) else type(message).__name__

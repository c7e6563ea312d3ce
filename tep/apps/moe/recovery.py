"""After a failure: waits are called off, and survivors agree on who is dead, and how far they are.

Every survivor calls the others (one immediate each), those who do not answer are suspected, and
votes go round until all votes of a round are equal: the decision is a function of the votes, so all
take the same one. What is not covered: a rank that dies while this goes on (the survivors get an
error and may have different views), and a rank that is not dead but silent for longer than the
timeout and wakes up later (its late writes carry old turns; nobody counts them).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

import tep
from tep import ClosedError, FabricError, TepError, WaitTimeout
from tep.apps.moe.config import VOTE_BYTES
from tep.apps.moe.payload import Payload

if TYPE_CHECKING:
    from tep import Expectation, Transfer

__all__ = ["TROUBLE", "Guard", "Recovery", "Settles", "Vote"]


_CALL: Final = 1 << 26
_VOTE: Final = 1 << 27
_FIELDS: Final = 5  # u64: incident, round, step, turn, progress; then the bitmap of the suspected
_ROUNDS_MAX: Final = 16
_TRY_SHIFT: Final = 20  # the number of the try stands above round, source and incident
_TRIES_MAX: Final = 32


class Vote(NamedTuple):
    """The word of one survivor, or what all agree on.

    Attributes:
        step, turn: the highest it began; of all: the highest that any began.
        progress: how far it is: 2 for each step that is through, 1 for a dispatch that is; of all:
            of the survivor that is behind all others.
        suspects: ranks that it takes for dead; of all: that died just now.
    """

    step: int
    turn: int
    progress: int
    suspects: frozenset[int] = frozenset()


class Recovery:
    """One rank's part in it.

    Args:
        engine, mr, payload: of this rank.
        descs: arenas of all ranks.
        guard: alarmed when another rank calls.
    """

    def __init__(
        self,
        engine: tep.TransferEngine,
        mr: tep.MrHandle,
        payload: Payload,
        descs: list[tep.MrDesc],
        guard: Guard,
    ) -> None:
        assert payload.arena is not None
        self._engine, self._mr, self._descs, self._guard = engine, mr, descs, guard
        self._config, self._layout, self._arena = payload.config, payload.layout, payload.arena
        self._rank = payload.rank
        self._patience = Guard(2 * self._config.timeout_s, f"rank {self._rank}, recovery")
        self._incident = 0
        self._round = 0
        self._called: tep.Expectation | None = None
        self._listen()

    def _listen(self) -> None:
        """Take notice when another rank calls."""
        self._called = self._engine.expect_imm_count(self._call_imm(), 1)
        self._guard.watch_call(self._called)

    def _call_imm(self, attempt: int = 0) -> int:
        return self._config.imm_base | _CALL | attempt << _TRY_SHIFT | (self._incident & 0xFFFF)

    def _vote_imm(self, source: int, attempt: int) -> int:
        number = attempt << _TRY_SHIFT | (self._round & 0x3FF) << 10 | source
        return self._config.imm_base | _VOTE | number

    async def drain(self, sent: list[tep.Transfer]) -> None:
        """Wait until no own write is under way any more, whatever becomes of it."""
        await self._failed(dict(enumerate(sent)))

    async def run(self, alive: npt.NDArray[np.bool_], said: Vote) -> Vote:
        """Agree with the survivors among `alive`; collective.

        Raises:
            FabricError: code EVICTED: the others take this rank for dead. Code RECOVERY: no
                agreement.
        """
        others = [p for p in np.flatnonzero(alive).tolist() if p != self._rank]
        suspects = await self._call(others)
        votes: dict[int, Vote] = {}
        for _ in range(_ROUNDS_MAX):
            mine = said._replace(suspects=frozenset(suspects))
            asked = [p for p in others if p not in suspects]
            votes = {self._rank: mine}
            for p, vote in (await self._exchange(mine, asked)).items():
                if vote is None:
                    suspects = suspects | {p}
                else:
                    votes[p] = vote
            if any(self._rank in vote.suspects for vote in votes.values()):
                raise tep.FabricError(
                    f"rank {self._rank}: other ranks take it for dead; it was silent for too long",
                    code="EVICTED",
                )
            agreed = all(vote.suspects == mine.suspects for vote in votes.values())
            if agreed and suspects == set(mine.suspects):
                break
            suspects = suspects.union(*(vote.suspects for vote in votes.values()))
        else:
            raise tep.FabricError(
                f"rank {self._rank}: no agreement on who is dead in {_ROUNDS_MAX} rounds; "
                f"suspected: {sorted(suspects)}",
                code="RECOVERY",
            )
        self._next_incident()
        return Vote(
            max(vote.step for vote in votes.values()),
            max(vote.turn for vote in votes.values()),
            min(vote.progress for vote in votes.values()),
            frozenset(suspects),
        )

    def _next_incident(self) -> None:
        if self._called is not None and not self._called.finished:
            self._called.cancel()
        self._incident += 1
        self._listen()

    async def _call(self, others: list[int]) -> set[int]:
        """Call everybody; return those who cannot be reached."""
        return await self._unreached(
            others,
            lambda p, attempt: self._engine.submit_barrier(
                [self._descs[p]], self._call_imm(attempt)
            ),
        )

    async def _unreached(
        self, ranks: list[int], write: Callable[[int, int], tep.Transfer]
    ) -> set[int]:
        """Write to each rank by write(rank, number of the try); return those that none gets to.

        A write that fails is written again, once for each NIC that may be the one that is dead: the
        engine takes another then. Each try has an immediate of its own, since a failed one's is
        burnt.
        """
        missing = set(ranks)
        for attempt in range(self._tries(ranks)):
            writes = {}
            for p in sorted(missing):
                with contextlib.suppress(tep.FabricError, tep.UsageError):
                    writes[p] = write(p, attempt)
            missing -= set(writes) - await self._failed(writes)
            if not missing:
                break
        return missing

    async def _failed(self, writes: dict[int, tep.Transfer]) -> set[int]:
        failed = set()
        for p, write in writes.items():
            try:
                await self._patience.wait(write, f"answer of rank {p}")
            except (*TROUBLE, tep.Cancelled):  # cancelled: by the wait that was called off
                failed.add(p)
        return failed

    async def _exchange(self, mine: Vote, asked: list[int]) -> dict[int, Vote | None]:
        """Write the own vote to everybody asked, and read theirs; None = none came.

        Rounds are numbered through all incidents, and survivors go through them together: nobody is
        two rounds ahead of another, so two places for each rank's vote are enough.
        """
        self._round += 1
        layout, parity = self._layout, self._round % 2
        own = layout.votes + 2 * self._config.world * VOTE_BYTES
        row = self._arena[own : own + VOTE_BYTES]
        row[:] = 0
        row[: 8 * _FIELDS].view(np.uint64)[:] = (self._incident, self._round, *mine[:3])
        for p in mine.suspects:
            row[8 * _FIELDS + p // 8] |= 1 << p % 8
        there = layout.votes + (2 * self._rank + parity) * VOTE_BYTES
        lost = await self._unreached(
            asked,
            lambda p, attempt: self._engine.submit_single_write(
                VOTE_BYTES,
                (self._mr, own),
                (self._descs[p], there),
                self._vote_imm(self._rank, attempt),
            ),
        )
        found: dict[int, Vote | None] = dict.fromkeys(lost)
        for p in asked:
            if p not in found:
                found[p] = self._read(p) if await self._voted(p) else None
        return found

    def _tries(self, ranks: list[int]) -> int:
        """The number of tries for a write to one of these ranks."""
        nics = max([len(self._descs[p].rkeys) for p in ranks], default=0)
        return min(1 + nics, _TRIES_MAX)

    async def _voted(self, source: int) -> bool:
        """Wait for the vote of a rank, through the tries of its write."""
        for attempt in range(self._tries([self._rank])):
            vote = self._engine.expect_imm_count(self._vote_imm(source, attempt), 1)
            try:
                await self._patience.wait(vote, f"vote of rank {source}")
            except TROUBLE as error:
                if isinstance(error, tep.FabricError) and error.code == "PEER_FAILED":
                    continue
                return False
            return True
        return False

    def _read(self, source: int) -> Vote:
        at = self._layout.votes + (2 * source + self._round % 2) * VOTE_BYTES
        row = self._arena[at : at + VOTE_BYTES]
        incident, said, step, turn, progress = row[: 8 * _FIELDS].view(np.uint64).tolist()
        assert (incident, said) == (self._incident, self._round), (incident, said, self._round)
        bits = np.unpackbits(row[8 * _FIELDS :], bitorder="little")
        return Vote(step, turn, progress, frozenset(np.flatnonzero(bits).tolist()))


# ---------------------------------------------------------------------- guard


TROUBLE = (FabricError, WaitTimeout, ClosedError)
"""Errors of a turn that a rank, a NIC or the wire is to blame for."""


class Settles(Protocol):
    """A thing that a guard can wait for: a handle of the engine, or a future."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> object: ...

    def result(self) -> object: ...

    def cancel(self) -> object: ...


class Guard:
    """All waits of one rank.

    Args:
        timeout_s: how long one wait may last, seconds of the running loop.
        name: of the rank, for messages.
    """

    def __init__(self, timeout_s: float, name: str) -> None:
        self.timeout_s = timeout_s
        self._name = name
        self._open: dict[asyncio.Future[None], Settles] = {}
        self.trouble: TepError | None = None
        self._resets = 0

    async def wait(self, handle: Settles, what: str) -> None:
        """Wait until a handle settles; then as its result().

        Raises:
            WaitTimeout: it did not in time.
            FabricError: what alarm() was called with, now or before.
        """
        if self.trouble is not None:
            handle.cancel()
            raise self.trouble
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not done.done():
                done.set_result(None)

        def wake(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle)

        def late() -> None:
            self._end(done, WaitTimeout(f"{self._name}: {what}: not within {self.timeout_s} s"))

        self._open[done] = handle
        timer = loop.call_later(self.timeout_s, late)
        handle.add_done_callback(wake)
        try:
            await done
        except BaseException:
            handle.cancel()
            raise
        finally:
            timer.cancel()
            self._open.pop(done, None)
        handle.result()

    def alarm(self, error: TepError) -> None:
        """Call off every wait, open or to come, until reset()."""
        if self.trouble is None:
            self.trouble = error
            for done in tuple(self._open):
                self._end(done, error)

    def reset(self) -> None:
        """Wait again; what was watched before does not matter any more."""
        self.trouble = None
        self._resets += 1

    def watch(self, transfer: Transfer) -> None:
        """Raise the alarm if a transfer fails, whether or not anybody waits for it."""
        loop, begun = asyncio.get_running_loop(), self._resets

        def look(settled: Transfer) -> None:
            error = settled.error
            if error is not None and not settled.cancelled and begun == self._resets:
                with contextlib.suppress(RuntimeError):  # the loop has ended: nobody to tell
                    loop.call_soon_threadsafe(self.alarm, error)

        transfer.add_done_callback(look)

    def watch_call(self, called: Expectation) -> None:
        """Raise the alarm when another rank calls for recovery, or its call has failed."""
        loop = asyncio.get_running_loop()

        def look(settled: Expectation) -> None:
            if settled.ok or isinstance(settled.error, FabricError):
                error = FabricError(f"{self._name}: another rank calls for recovery", code="CALLED")
                with contextlib.suppress(RuntimeError):  # as above
                    loop.call_soon_threadsafe(self.alarm, error)

        called.add_done_callback(look)

    @staticmethod
    def _end(done: asyncio.Future[None], error: TepError) -> None:
        if not done.done():
            done.set_exception(error)

"""One turn, and the host proxy of a rank, which moves bytes between words and flags of the kernels.

What kernels and proxy share stands first: who takes part, what moves where, and the watched words
by which kernels tell the proxy how far they are; a word holds the number of the last turn that got
there. The proxy never touches payload. At most two payload writes go to each peer for dispatch (a
private burst before the routes are known, the rest behind it) and one for combine; with several
NICs a write by bytes is one row on each.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

import tep
from tep import (
    BadDescriptor,
    ClosedError,
    FabricError,
    MrDesc,
    TepError,
    UsageError,
    WaitTimeout,
)
from tep.apps.moe.config import (
    RANKS_MAX,
    Arrivals,
    Batch,
    Ints,
    Layout,
    MoeConfig,
    Routes,
)
from tep.apps.moe.group import Board, Move
from tep.apps.moe.kernels import Gpu, spend
from tep.apps.moe.payload import F32, Payload

if TYPE_CHECKING:
    from tep import Transfer, TransferEngine, Watcher

__all__ = [
    "CALL_TRIES_MAX", "COMBINE", "COMBINED", "DISPATCH", "DISPATCHED", "ROUTE", "TROUBLE", "TURNS",
    "Guard", "Peers", "Proxy", "Turn", "Word", "call_imms", "cut", "imm_of", "near_rest",
    "pack_hello", "parts_of", "results_to", "tokens_to", "unpack_hellos",
]  # fmt: skip

# What an immediate says: routes, payload, buffers free, results, buffers free.
ROUTE: Final = 0
DISPATCH: Final = 1
DISPATCHED: Final = 2
COMBINE: Final = 3
COMBINED: Final = 4

TURNS: Final = 1 << 23
"""Turns are numbered modulo this."""


def imm_of(base: int, turn: int, kind: int) -> int:
    """The immediate of one kind in one turn: bits 31-28 base, 25-3 turn, 2-0 kind.

    Each turn has its own, so that what a broken turn left behind is never taken for the next.
    """
    return base | (turn % TURNS) << 3 | kind


CALL_TRIES_MAX: Final = 32


def call_imms(base: int) -> range:
    """The immediates of ranks that have ended: RANKS_MAX times the try, plus the rank."""
    return range(base | 1 << 26, (base | 1 << 26) + CALL_TRIES_MAX * RANKS_MAX)


class Turn:
    """One dispatch with its combine.

    Attributes:
        number: equal on all ranks.
        batch: own copies.
        weights: f32[n, R].
        sample: the caller's x or results, for the type of what is given back.
        routes: settled once all routes are here, with them.
        landed: settled once all copies that come by NIC are here.
        returned: settled once all results that come by NIC are here.
        sent_tokens, sent_results: transfers whose source must not be touched yet.
        arrivals: what this rank got, in output order.
    """

    def __init__(self, number: int, batch: Batch, weights: F32, sample: Any) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.batch = batch
        self.weights = weights
        self.sample = sample
        self.routes: asyncio.Future[Routes] = loop.create_future()
        self.landed: asyncio.Future[None] = loop.create_future()
        self.returned: asyncio.Future[None] = loop.create_future()
        self.sent_tokens: list[Transfer] = []
        self.sent_results: list[Transfer] = []
        self.arrivals: Arrivals | None = None

    def fail(self, error: BaseException) -> None:
        """Tell all who wait."""
        for future in (self.routes, self.landed, self.returned):
            if not future.done():
                future.set_exception(error)
            future.exception()  # taken note of, whether or not anybody waits


# ---------------------------------------------------------------------- guard


TROUBLE = (FabricError, WaitTimeout, ClosedError)
"""Errors of a turn that a rank, a NIC or the wire is to blame for."""


class Settles(Protocol):
    """A thing that a guard can wait for: a handle of the engine, or a future."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> object: ...

    def result(self) -> object: ...

    def cancel(self) -> object: ...


class Guard:
    """All waits and writes of one rank.

    Args:
        timeout_s: how long one wait may last, seconds of the running loop.
        name: for messages.

    Attributes:
        trouble: the alarm that was raised, or None.
    """

    def __init__(self, timeout_s: float, name: str) -> None:
        self.timeout_s = timeout_s
        self._name = name
        self._open: dict[asyncio.Future[None], Settles] = {}
        self._sent: set[Transfer] = set()
        self.trouble: TepError | None = None

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
        """End every wait, open or to come, by this error."""
        if self.trouble is None:
            self.trouble = error
            for done in tuple(self._open):
                self._end(done, error)

    def watch(self, transfer: Transfer) -> None:
        """Raise the alarm if a transfer fails, whether or not anybody waits for it."""
        loop = asyncio.get_running_loop()
        self._sent.add(transfer)

        def look(settled: Transfer) -> None:
            self._sent.discard(settled)
            error = settled.error
            if error is not None and not settled.cancelled:
                with contextlib.suppress(RuntimeError):  # the loop has ended: nobody to tell
                    loop.call_soon_threadsafe(self.alarm, error)

        transfer.add_done_callback(look)

    async def drain(self) -> None:
        """Cancel the transfers that are watched, and wait until no NIC has any of them."""
        sent = tuple(self._sent)
        for transfer in sent:
            transfer.cancel()
        for transfer in sent:
            with contextlib.suppress(TepError):
                await transfer

    @staticmethod
    def _end(done: asyncio.Future[None], error: TepError) -> None:
        if not done.done():
            done.set_exception(error)


# ---------------------------------------------------------------------- peers


_MARK: Final = struct.Struct("<I")  # checksum of the configuration; the arena's descriptor follows


def pack_hello(config: MoeConfig, desc: MrDesc) -> bytes:
    """Pack a rank's message to the others at the start: configuration and arena."""
    return _MARK.pack(zlib.crc32(repr(config).encode())) + desc.to_bytes()


def unpack_hellos(config: MoeConfig, rank: int, hellos: Sequence[bytes]) -> list[MrDesc]:
    """Arenas of all ranks.

    Raises:
        UsageError: a rank has another configuration.
        BadDescriptor: what a rank sent is no hello.
    """
    mark = _MARK.pack(zlib.crc32(repr(config).encode()))
    for other, hello in enumerate(hellos):
        if len(hello) < _MARK.size:
            raise BadDescriptor(f"rank {other}: {hello!r} is no hello of an all-to-all")
        if hello[: _MARK.size] != mark:
            raise UsageError(f"rank {other} has another configuration than rank {rank}: {config}")
    return [MrDesc.from_bytes(hello[_MARK.size :]) for hello in hellos]


class Peers:
    """All ranks, as one of them sees them.

    Attributes:
        descs: arena of each rank.
        others: all ranks but this one, from the next one on round the world, so that not all
            ranks of a node begin with the same peer.
        near_others: those of them that are reached over the node's link.
    """

    def __init__(self, config: MoeConfig, rank: int, descs: list[MrDesc], *, linked: bool) -> None:
        self.config = config
        self.rank = rank
        self.descs = descs
        self._linked = linked
        self.others = [(rank + k) % config.world for k in range(1, config.world)]
        self.near_others = [p for p in self.others if self.near(p)]

    def near(self, rank: int) -> bool:
        """Whether payload to or from a rank goes over the node's link."""
        return self._linked and self.config.same_node(self.rank, rank)

    def nics(self, rank: int) -> int:
        """NICs of a rank."""
        return len(self.descs[rank].rkeys)


# ---------------------------------------------------------------------- moves


_PART_BYTES_MIN: Final = 8192  # as the engine's and fabric-lib's shards
_PART_ALIGN: Final = 64


def parts_of(nbytes: int, nics: int) -> int:
    """In how many parts a slice goes out over a sender's NICs: one each, but none below 8 KiB.

    Also how many immediates its receiver counts, one a part.
    """
    return max(1, min(nics, nbytes // _PART_BYTES_MIN))


def cut(nbytes: int, parts: int, k: int) -> tuple[int, int]:
    """Start and stop of part k; the parts tile the slice."""
    start = nbytes * k // parts // _PART_ALIGN * _PART_ALIGN
    last = k == parts - 1
    return start, nbytes if last else nbytes * (k + 1) // parts // _PART_ALIGN * _PART_ALIGN


def private_area(peers: Peers, layout: Layout, copies: int) -> tuple[int, int]:
    """Number of copies that fit this rank's private area at a peer, and the area's offset."""
    size = peers.config.private_tokens
    return min(copies, size), layout.private + peers.rank * size * layout.stride


def tokens_to(peers: Peers, layout: Layout, batch: Batch, *, near: bool) -> list[Move]:
    """First burst of tokens for the ranks of the node (near), or for all others."""
    blocks = batch.counts.reshape(peers.config.world, -1).sum(axis=1)
    starts, stride, moves = np.cumsum(blocks) - blocks, layout.stride, []
    for p in peers.others:
        copies, there = private_area(peers, layout, int(blocks[p]))
        if copies and peers.near(p) == near:
            moves.append(Move(p, int(starts[p]) * stride, there, copies * stride))
    return moves


def near_rest(peers: Peers, layout: Layout, routes: Routes) -> list[Move]:
    """The bytes pulled from send buffers of ranks of the node, behind their first burst."""
    moves, rank = [], peers.rank
    for p in peers.near_others:
        rest = int(routes.rest[p, rank])
        if rest:
            first = int(routes.starts[p, rank] + routes.private[p, rank])
            here = layout.shared + int(routes.shared_at[p, rank]) * layout.stride
            moves.append(Move(p, here, first * layout.stride, rest * layout.stride))
    return moves


def results_to(peers: Peers, layout: Layout, routes: Routes, *, near: bool) -> list[Move]:
    """Results for the ranks of the node (near), or for all others."""
    starts, size, moves = routes.result_starts(peers.rank), layout.result_stride, []
    for p in peers.others:
        copies = int(routes.copies[p, peers.rank])
        if copies and peers.near(p) == near:
            here = layout.results_out + int(starts[p]) * size
            there = layout.results_in + int(routes.starts[p, peers.rank]) * size
            moves.append(Move(p, here, there, copies * size))
    return moves


# ---------------------------------------------------------------------- words


class Word:
    """One word, watched while somebody waits for it."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._value = 0
        self._watcher: Watcher | None = None
        self._seen: asyncio.Future[None] | None = None
        self._wanted = 0

    def store(self, value: int) -> None:
        """Kernel: tell the proxy."""
        self._value = value
        if self._watcher is not None:
            self._watcher.store(value)

    def reach(self, value: int) -> asyncio.Future[None]:
        """Proxy: wait until the word holds this value."""
        loop = asyncio.get_running_loop()
        seen = self._seen = loop.create_future()
        self._wanted = value
        self._watcher = self._engine.alloc_uvm_watcher(
            lambda _, new: loop.call_soon_threadsafe(self._look, new)
        )
        if self._value >= value:  # stored before anybody watched
            self._watcher.store(self._value)
        return seen

    def _look(self, value: int) -> None:
        seen = self._seen
        if seen is not None and value >= self._wanted:
            self.close()
            if not seen.done():
                seen.set_result(None)

    def close(self) -> None:
        """Watch no more. Idempotent."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.close()


# ---------------------------------------------------------------------- proxy


_BY_PEERS: Final = tep.Routing()
_FIRST_NIC: Final = tep.Routing(domain=0)


class Proxy:
    """Drives one engine for one all-to-all.

    Args:
        engine, mr, payload: the rank's, with its arena.
        kernels: the times of the stages.
        guard: waits, and ends the turn for an error.
        board: where routes are learnt if no bytes are moved.
        mark: called with the name of each stage once it is through.

    Attributes:
        barrier_s: how long the last barrier of each kind took, seconds.
    """

    def __init__(
        self,
        engine: tep.TransferEngine,
        kernels: Gpu,
        mr: tep.MrHandle,
        payload: Payload,
        guard: Guard,
        board: Board | None,
        mark: Callable[[str], None],
    ) -> None:
        self.engine = engine
        self.config = config = payload.config
        self.kernels = kernels
        self.layout = payload.layout
        self.counted, self.staged, self.read, self.computed, self.summed = (
            Word(engine) for _ in range(5)
        )
        self.mr = mr
        self.payload = payload
        self.guard = guard
        self._board = board
        self.mark = mark
        self.barrier_s: dict[int, float] = {}
        self._groups: dict[str, tep.PeerGroup] = {}
        self._ready: dict[str, tep.Prepared] = {}  # what is the same in every turn
        self._pinned = [_FIRST_NIC]
        self._spread_private = config.private_scatter == "bytes"
        self._peers: Peers | None = None

    def meet(self, peers: Peers) -> None:
        self._peers = peers
        addresses = [peers.descs[p].addr for p in peers.others]
        # One a scatter: a group remembers the targets of its last request.
        names = ("routes", "private", "rest", "results", "barrier")
        self._groups = {name: self.engine.add_peer_group(addresses) for name in names}
        self._ready = {}
        self._pinned = [tep.Routing(domain=nic) for nic in range(peers.nics(peers.rank))]

    # ------------------------------------------------------------------ a turn

    async def dispatch(self, turn: Turn) -> None:
        """Send this rank's copies and see all others' arrive; settles the turn's futures."""
        peers, kernels, config = self.peers, self.kernels, self.config
        await self._told(self.counted, turn.number, "routes of its own kernel")
        self._scatter_routes(turn)
        routes_in = self._expect(turn, ROUTE, len(peers.others))
        await self._told(self.staged, turn.number, "tokens of its own kernel")
        if self._scatter_private(turn):
            self.mark("posted")
        await self.guard.wait(routes_in, f"routes of turn {turn.number}")
        routes = self._routes(turn)
        late = [p for p in peers.others if routes.rest[peers.rank, p] and not peers.near(p)]
        await spend(kernels.routes_s(config.world * config.num_experts, len(late)))
        payload_in = self._expect(turn, DISPATCH, self.dispatch_imms(routes))
        self._scatter_rest(turn, routes, late)
        await spend(kernels.flag_s())
        turn.routes.set_result(routes)
        await self.guard.wait(payload_in, f"tokens of turn {turn.number}")
        await spend(kernels.flag_s())
        turn.landed.set_result(None)

    async def dispatched(self, turn: Turn) -> None:
        """Tell everybody, and learn from everybody, that dispatch buffers may be used again."""
        await self._told(self.read, turn.number, "its own receive kernel")
        await self._barrier(turn, DISPATCHED)

    async def combine(self, turn: Turn) -> None:
        """Send results back and see the own ones arrive."""
        routes = turn.routes.result()
        results_in = self._expect(turn, COMBINE, self.combine_imms(routes))
        await self._told(self.computed, turn.number, "results of its own kernel")
        if self._scatter_results(turn, routes):
            self.mark("posted")
        await self.guard.wait(results_in, f"results of turn {turn.number}")
        await spend(self.kernels.flag_s())
        turn.returned.set_result(None)

    async def combined(self, turn: Turn) -> None:
        """The same as dispatched(), for the buffers of combine."""
        await self._told(self.summed, turn.number, "its own sum")
        await self._barrier(turn, COMBINED)

    async def _told(self, word: Word, number: int, what: str) -> None:
        await self.guard.wait(word.reach(number), what)
        await spend(self.kernels.watch_s())

    def _expect(self, turn: Turn, kind: int, count: int) -> tep.Expectation:
        return self.engine.expect_imm_count(self._imm(turn, kind), count)

    def _imm(self, turn: Turn, kind: int) -> int:
        return imm_of(self.config.imm_base, turn.number, kind)

    @property
    def peers(self) -> Peers:
        """The ranks that it works with."""
        assert self._peers is not None, "start() comes first"
        return self._peers

    # ------------------------------------------------------------------ what is sent

    def _scatter_routes(self, turn: Turn) -> None:
        peers, layout = self.peers, self.layout
        if not peers.others:
            return
        ready = self._ready.get("routes")
        if ready is None:
            there, n = layout.routes_in + peers.rank * layout.route_bytes, layout.route_bytes
            dsts = [
                tep.ScatterDst(n, layout.routes_out, (peers.descs[p], there)) for p in peers.others
            ]
            ready = self._ready["routes"] = self.engine.prepare_scatter(
                self.mr, dsts, group=self._groups["routes"]
            )
        sent = ready.submit(self._imm(turn, ROUTE))
        self.guard.watch(sent)
        turn.sent_tokens.append(sent)

    def _scatter_private(self, turn: Turn) -> bool:
        moves = tokens_to(self.peers, self.layout, turn.batch, near=False)
        return self._scatter(turn, DISPATCH, "private", moves, spread=self._spread_private)

    def _scatter_rest(self, turn: Turn, routes: Routes, late: list[int]) -> None:
        rank, layout = self.peers.rank, self.layout
        slices = []
        for p in late:
            first = int(routes.starts[rank, p] + routes.private[rank, p])
            there = layout.shared + int(routes.shared_at[rank, p]) * layout.stride
            nbytes = int(routes.rest[rank, p]) * layout.stride
            slices.append(Move(p, first * layout.stride, there, nbytes))
        self._scatter(turn, DISPATCH, "rest", slices, spread=True)

    def _scatter_results(self, turn: Turn, routes: Routes) -> bool:
        moves = results_to(self.peers, self.layout, routes, near=False)
        return self._scatter(turn, COMBINE, "results", moves, spread=True)

    def _scatter(
        self, turn: Turn, kind: int, group: str, slices: Sequence[Move], *, spread: bool
    ) -> bool:
        """Submit, unless there is nothing to send; say which.

        Spread slices go out as one scatter a NIC, pinned to it, so that the rows of all peers make
        one batch there; the engine's own scatter by bytes would make a batch of each row.
        """
        nics = self.peers.nics(self.peers.rank) if spread else 1
        for nic in range(nics):
            dsts = []
            for peer, here, there, nbytes in slices:
                parts = parts_of(nbytes, nics)
                if nic < parts:
                    start, stop = cut(nbytes, parts, nic)
                    dst = self.peers.descs[peer], there + start
                    dsts.append(tep.ScatterDst(stop - start, here + start, dst))
            if dsts:
                sent = self.engine.submit_scatter(
                    self.mr,
                    dsts,
                    self._imm(turn, kind),
                    group=self._groups[group],
                    routing=self._pinned[nic] if nics > 1 else _BY_PEERS,
                )
                self.guard.watch(sent)
                (turn.sent_results if kind == COMBINE else turn.sent_tokens).append(sent)
        return bool(slices)

    # ------------------------------------------------------------------ what is counted

    def _routes(self, turn: Turn) -> Routes:
        """Places of all ranks by their counts: made once for all, if no bytes are moved.

        A table of all pairs of ranks at each of them takes memory as the third power of their
        number.
        """
        if self.payload.arena is not None:
            return Routes(self.config, self.read_routes(turn))
        assert self._board is not None
        return self._board.once(turn.number, lambda: Routes(self.config, self.read_routes(turn)))

    def read_routes(self, turn: Turn) -> Ints:
        """All ranks' counts, once their immediates are counted."""
        peers, config = self.peers, self.config
        counts = np.zeros((config.world, config.num_experts), np.int64)
        counts[peers.rank] = turn.batch.counts
        for p in peers.others:
            if self.payload.arena is None:
                assert self._board is not None
                counts[p] = self._board.counts[turn.number, p]
            else:
                counts[p] = self.payload.read_route(turn.number, p)
        return counts

    def dispatch_imms(self, routes: Routes) -> int:
        """Immediates that vouch for all copies that come here by NIC."""
        peers, stride, total = self.peers, self.layout.stride, 0
        for p in peers.others:
            if not peers.near(p):
                nics = peers.nics(p)
                burst = int(routes.private[p, peers.rank]) * stride
                rest = int(routes.rest[p, peers.rank]) * stride
                total += _imms(burst, nics if self._spread_private else 1) + _imms(rest, nics)
        return total

    def combine_imms(self, routes: Routes) -> int:
        """Immediates that vouch for all results that come here by NIC."""
        peers, stride, total = self.peers, self.layout.result_stride, 0
        for p in peers.others:
            if not peers.near(p):
                total += _imms(int(routes.copies[peers.rank, p]) * stride, peers.nics(p))
        return total

    # ------------------------------------------------------------------ buffers are free

    async def _barrier(self, turn: Turn, kind: int) -> None:
        """Everybody has sent and read: RDMA barrier once the own writes are acknowledged."""
        peers = self.peers
        what = "tokens" if kind == DISPATCHED else "results"
        for transfer in turn.sent_tokens if kind == DISPATCHED else turn.sent_results:
            await self.guard.wait(
                transfer, f"acknowledgement of its own {what} of turn {turn.number}"
            )
        if not peers.others:
            return
        begun_s = asyncio.get_running_loop().time()
        came = self._expect(turn, kind, len(peers.others))
        ready = self._ready.get("barrier")
        if ready is None:
            ready = self._ready["barrier"] = self.engine.prepare_barrier(
                [peers.descs[p] for p in peers.others],
                group=self._groups["barrier"],
                routing=_FIRST_NIC,
            )
        barrier = ready.submit(self._imm(turn, kind))
        self.guard.watch(barrier)
        await self.guard.wait(came, f"barrier of turn {turn.number}, {what}")
        self.barrier_s[kind] = asyncio.get_running_loop().time() - begun_s
        await self.guard.wait(barrier, f"acknowledgement of its own barrier of turn {turn.number}")

    def close(self) -> None:
        """Watch no words any more."""
        for word in (self.counted, self.staged, self.read, self.computed, self.summed):
            word.close()


def _imms(nbytes: int, nics: int) -> int:
    """Immediates of one slice that is spread over so many NICs; none if there is nothing in it."""
    return parts_of(nbytes, nics) if nbytes else 0

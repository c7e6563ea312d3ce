"""AllToAll: dispatch tokens to the ranks of their experts, combine the results.

The coroutines here play the four kernels (send and receive of dispatch and of combine): they alone
touch payload. The host proxy beside them moves it; they talk through watched words and flags.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Hashable
from typing import Any, Self

import numpy as np
import numpy.typing as npt

import tep
from tep.apps.moe.config import RANKS_MAX, MoeConfig, sort_copies
from tep.apps.moe.group import Group, Move
from tep.apps.moe.kernels import HOST, Gpu, spend
from tep.apps.moe.payload import Bytes, Payload, Received
from tep.apps.moe.proxy import (
    CALL_TRIES_MAX,
    TROUBLE,
    Guard,
    Peers,
    Proxy,
    Turn,
    call_imms,
    near_rest,
    pack_hello,
    results_to,
    tokens_to,
    unpack_hellos,
)

__all__ = ["AllToAll"]


class AllToAll:
    """Dispatch and combine of one MoE layer, for one rank.

    One turn is dispatch, then combine. Each is a send and a receive half, so that other work fits
    between them; `dispatch` and `combine` are both halves. All ranks make the same calls in the
    same order. Turns do not overlap.

    A failure ends it on all ranks: every call that runs, and every later one, raises. Then close
    it; nothing is written to its memory any more, and another of the ranks that are left can be
    made, with another `imm_base` if it is on the same engines.

    Args:
        engine: this rank's; any backend.
        group: rank, world, and how hellos are exchanged.
        kernels: what the stages cost beyond numpy's own time.
        carries_bytes: False, on a simulated fabric that moves none: keep time and count only.
        **shape: the fields of MoeConfig but world and node_size, which the group knows.

    Attributes:
        turn: number of the last turn.
        marks_s: when each stage of the running half ended, since the launch of its send kernel.
    """

    def __init__(
        self,
        engine: tep.TransferEngine,
        group: Group,
        *,
        kernels: Gpu = HOST,
        carries_bytes: bool = True,
        **shape: Any,
    ) -> None:
        self.config = MoeConfig(world=group.world, node_size=group.node_size, **shape)
        self.rank = group.rank
        self.turn = 0
        self.marks_s: dict[str, float] = {}
        self._engine = engine
        self._group = group
        self._kernels = kernels
        self._link = group.link
        self._guard = Guard(self.config.timeout_s, f"rank {group.rank}")
        self._started = False
        self._now: Turn | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._free: dict[str, asyncio.Task[None]] = {}
        self._began_s = 0.0
        self._calls = call_imms(self.config.imm_base)
        self._called: set[int] = set()  # the ranks that have ended
        self._heard = asyncio.Event()
        self._verdict: tep.TepError | None = None
        if not carries_bytes and group.board is None:
            raise tep.UsageError("AllToAll(carries_bytes=False): all ranks live in one process")
        self._payload = Payload(self.config, self.rank, None)
        nbytes = self._payload.layout.nbytes
        arena = self._payload.arena = np.zeros(nbytes, np.uint8) if carries_bytes else None
        if self._link is not None:
            self._link.arena = arena
        self._mr, self._desc = engine.reg_mr((1 << 40, nbytes, "cpu") if arena is None else arena)
        self._proxy = Proxy(
            engine,
            self._kernels,
            self._mr,
            self._payload,
            self._guard,
            group.board,
            self._mark,
        )

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Meet the other ranks; the first dispatch does it otherwise. Idempotent.

        Raises:
            UsageError: a rank has another configuration.
        """
        if self._started:
            return
        self._started = True
        loop = asyncio.get_running_loop()

        def called(imm: int, _: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody to tell
                loop.call_soon_threadsafe(self._hear, imm % RANKS_MAX)

        self._engine.on_imm(self._calls, called)
        hellos = await self._group.exchange(pack_hello(self.config, self._desc))
        self._descs = unpack_hellos(self.config, self.rank, hellos)
        linked = self._link is not None
        self._peers = Peers(self.config, self.rank, self._descs, linked=linked)
        self._proxy.meet(self._peers)

    async def close(self) -> None:
        """End what still runs, and give the memory back; the engine stays open. Idempotent.

        Call it on all ranks together.
        """
        await self._stop()
        with contextlib.suppress(tep.ClosedError):  # the engine was closed before
            if not self._mr.closed:
                self._engine.remove_imm(self._calls.start)
                self._engine.deregister(self._mr)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:  # peers may still write here, and wait for us
            with contextlib.suppress(*TROUBLE):
                for what in ("dispatch", "combine"):
                    await self._await_free(what)
        await self.close()

    # ------------------------------------------------------------------ both halves

    async def dispatch(
        self, x: Any, x_scale: Any, indices: npt.NDArray[np.integer], weights: Any
    ) -> Received:
        """Send tokens to the ranks of their experts, and get those for the own experts.

        Args:
            x: [n, hidden], 0 <= n <= max_tokens, elements as wide as dispatch_format's.
            x_scale: f32[n, num_scales], or None if there are none.
            indices: int[n, topk], expert of each choice, all distinct; -1 = none.
            weights: f32[n, topk].

        Raises:
            BadRequest: shapes or indices that cannot be; nothing was sent.
            FabricError: this all-to-all has ended. Code DEAD_RANK: ranks died, or were silent for
                two timeouts; the message names them. ENDED: another rank was the first to give up.
                Other codes: as of the engine; nobody is dead.
            WaitTimeout: it has ended; nobody is dead, but the turn did not end in time.
        """
        await self.dispatch_send(x, x_scale, indices, weights)
        return await self.dispatch_recv()

    async def combine(self, results: Any) -> Any:
        """Send results to where their tokens came from, and sum the own tokens' results.

        Args:
            results: [rows, hidden], in the order of Received; what stands in padding is ignored.

        Returns:
            [n, hidden] of combine_format: for each token the sum of weight * result over its
            choices, in the order of the choices, in f32, rounded once.

        Raises:
            FabricError, WaitTimeout: as dispatch().
        """
        await self.combine_send(results)
        return await self.combine_recv()

    # ------------------------------------------------------------------ dispatch

    async def dispatch_send(
        self, x: Any, x_scale: Any, indices: npt.NDArray[np.integer], weights: Any
    ) -> None:
        """First half of dispatch: stage and send. x may be changed when it returns."""
        await self.start()
        if self._now is not None:
            raise tep.UsageError(f"rank {self.rank}: turn {self.turn} is not combined yet")
        given = self._payload.check(x, x_scale, indices)
        weights = np.ascontiguousarray(weights, np.float32)
        if weights.shape != np.shape(indices):
            raise tep.BadRequest(
                f"weights of shape {weights.shape}; as indices, {np.shape(indices)}"
            )
        batch = sort_copies(indices, self.config)
        async with self._ending():
            await self._await_free("dispatch")
            self.turn += 1
            turn = self._now = Turn(self.turn, batch, weights, x)
            await self._send_tokens(turn, given)

    async def _send_tokens(self, turn: Turn, given: tuple[Bytes, Bytes | None] | None) -> None:
        kernels, payload, layout = self._kernels, self._payload, self._payload.layout
        batch = turn.batch
        self._begin()
        self._spawn(self._proxy.dispatch(turn), turn)
        await spend(kernels.launch_s())
        if self._group.board is not None:
            self._group.board.publish(turn.number, self.rank, batch.counts)
        payload.write_route(turn.number, batch.counts)
        self._proxy.counted.store(turn.number)
        moves = tokens_to(self._peers, layout, batch, near=True)
        blocks = batch.counts.reshape(self.config.world, -1).sum(axis=1)
        pushed = sum(move.nbytes for move in moves) // layout.stride
        staged = int(blocks[self._peers.others].sum()) - pushed
        await spend(kernels.copy_s(staged, layout.stride))
        if given is not None:
            payload.stage(turn.number, batch, given, turn.weights)
        self._mark("staged")
        self._proxy.staged.store(turn.number)
        pushed_s = await self._push(moves, self._peers.near_others, ("tokens", turn.number))
        await spend(kernels.send_rest_s("dispatch", pushed_s))
        self._mark("send kernel")

    async def dispatch_recv(self) -> Received:
        """Second half of dispatch: wait for all copies, and put them in order."""
        async with self._ending():
            return await self._receive(self._current())

    async def _receive(self, turn: Turn) -> Received:
        kernels, stride = self._kernels, self._payload.layout.stride
        await spend(kernels.receive_launch_s("dispatch"))
        if self._link is not None and self._peers.near_others:
            flags = self._link.expect(("tokens", turn.number), len(self._peers.near_others))
            await self._guard.wait(flags, f"tokens of turn {turn.number} from its node")
        routes = await turn.routes
        self._mark("routes")
        arrivals = turn.arrivals = routes.arrivals(self.rank)
        pulls = near_rest(self._peers, self._payload.layout, routes)
        if pulls and self._link is not None:
            await self._link.move(pulls, pushes=False)
        self._mark("node link")
        copies = routes.copies[:, self.rank]
        far = sum(int(copies[p]) for p in self._peers.others if not self._peers.near(p))
        here = len(arrivals.row) - far
        if not turn.landed.done():  # what is here is put in order while the rest still comes
            await spend(kernels.copy_s(here, stride))
            here = 0
        await turn.landed
        self._mark("payload")
        await spend(kernels.copy_s(far + here, stride))
        received = self._payload.gather(turn.number, routes, arrivals, turn.sample)
        self._mark("dispatch")
        self._free["dispatch"] = self._spawn(self._proxy.dispatched(turn))
        self._proxy.read.store(turn.number)
        return received

    # ------------------------------------------------------------------ combine

    async def combine_send(self, results: Any) -> None:
        """First half of combine: stage and send. results may be changed when it returns."""
        turn = self._current()
        if turn.arrivals is None:
            raise tep.UsageError(f"rank {self.rank}: combine before dispatch has ended")
        rows = self._payload.check_results(results, turn.arrivals)
        turn.sample = results
        async with self._ending():
            await self._await_free("combine")
            await self._send_results(turn, rows)

    async def _send_results(self, turn: Turn, results: Bytes | None) -> None:
        kernels, layout = self._kernels, self._payload.layout
        assert turn.arrivals is not None
        self._begin()
        self._spawn(self._proxy.combine(turn), turn)
        await spend(kernels.launch_s())
        routes = turn.routes.result()
        moves = results_to(self._peers, layout, routes, near=True)
        if results is not None:
            self._payload.stage_results(routes, turn.arrivals, results)
        copies = routes.copies[:, self.rank]
        away = sum(int(copies[p]) for p in self._peers.others if not self._peers.near(p))
        await spend(kernels.copy_s(away, layout.result_stride))
        self._mark("staged")
        self._proxy.computed.store(turn.number)
        near = [move.peer for move in moves]
        pushed_s = await self._push(moves, near, ("results", turn.number))
        await spend(kernels.send_rest_s("combine", pushed_s))
        self._mark("send kernel")

    async def combine_recv(self) -> Any:
        """Second half of combine: wait for all results, and sum them."""
        async with self._ending():
            summed = await self._sum(self._current())
        self._now = None
        return summed

    async def _sum(self, turn: Turn) -> Any:
        kernels, layout = self._kernels, self._payload.layout
        await spend(kernels.receive_launch_s("combine"))
        routes = turn.routes.result()
        givers = [
            p for p in self._peers.others if self._peers.near(p) and routes.copies[self.rank, p]
        ]
        if self._link is not None and givers:
            flags = self._link.expect(("results", turn.number), len(givers))
            await self._guard.wait(flags, f"results of turn {turn.number} from its node")
        self._mark("node link")
        await turn.returned
        self._mark("payload")
        copies, tokens = len(turn.batch.tokens), len(turn.weights)
        await spend(kernels.sum_s(copies, tokens, layout.result_stride))
        summed = self._payload.sum(turn.batch.place, turn.weights, turn.sample)
        self._mark("combine")
        self._free["combine"] = self._spawn(self._proxy.combined(turn))
        self._proxy.summed.store(turn.number)
        return summed

    @property
    def barrier_s(self) -> float:
        """Duration of the last barrier, seconds; it is in no latency, but may delay the next."""
        return max(self._proxy.barrier_s.values(), default=0.0)

    # ------------------------------------------------------------------ inside

    def _current(self) -> Turn:
        if self._now is None:
            raise tep.UsageError(f"rank {self.rank}: dispatch_send() comes first")
        return self._now

    def _begin(self) -> None:
        self._began_s = asyncio.get_running_loop().time()
        self.marks_s = {}

    def _mark(self, stage: str) -> None:
        self.marks_s.setdefault(stage, asyncio.get_running_loop().time() - self._began_s)

    async def _push(self, moves: list[Move], peers: list[int], flag: Hashable) -> float:
        if self._link is None or not peers:
            return 0.0
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        if moves:
            await self._link.move(moves, pushes=True)
        self._link.signal(peers, flag)
        return loop.time() - start_s

    def _spawn(
        self, work: Coroutine[Any, Any, None], turn: Turn | None = None
    ) -> asyncio.Task[None]:
        """Run a part of the proxy; its failure reaches whoever waits for the turn, or for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is None:
                return
            if turn is not None:
                turn.fail(error)
            if isinstance(error, TROUBLE):
                self._guard.alarm(error)

        task.add_done_callback(ended)
        return task

    async def _await_free(self, what: str) -> None:
        """Wait until buffers may be written again."""
        if what in self._free:
            await self._free[what]

    # ------------------------------------------------------------------ the end

    async def _stop(self) -> None:
        """End all parts of the proxy, and wait until no NIC has a write of this rank any more."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._proxy.close()
        await self._guard.drain()

    @contextlib.asynccontextmanager
    async def _ending(self) -> AsyncIterator[None]:
        """If a wait fails, now or before, end this all-to-all, and say who is to blame."""
        try:
            if self._guard.trouble is not None:
                raise self._guard.trouble
            yield
        except TROUBLE as error:
            if self._verdict is None:
                self._guard.alarm(error)
                _, self._verdict = await asyncio.gather(self._stop(), self._judge(error))
        if self._verdict is not None:
            raise self._verdict

    async def _judge(self, cause: tep.TepError) -> tep.TepError:
        """Tell all others that this rank has ended, and find out who is dead or silent."""
        if isinstance(cause, tep.ClosedError):
            return cause
        lost = await self._call_roll()
        if not lost:
            return cause
        named = ", ".join(f"{rank} ({self._descs[rank].addr.name})" for rank in lost)
        return tep.FabricError(
            f"rank {self.rank}: dead or silent: rank {named}; this all-to-all has ended, make "
            f"another of the ranks that are left: {cause}",
            code="DEAD_RANK",
            peer=self._descs[lost[0]].addr.name,
        )

    async def _call_roll(self) -> list[int]:
        """Call every other rank, as each does whose call failed; return those that are gone.

        Gone is who cannot be written to; or, if there is nobody of that kind, who has not called
        within the timeout, for example because its program hangs. One that has called may have left
        since then.
        """
        others = set(self._peers.others)
        missing = set(others)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_s):
                nics = max((self._peers.nics(p) for p in others), default=0)
                # A call that fails burns its immediate, and marks a NIC down: the next try has
                # another of both.
                for attempt in range(min(1 + nics, CALL_TRIES_MAX)):
                    if missing:
                        missing -= await self._call(sorted(missing), attempt)
                if missing <= self._called:
                    missing = others
                    while not missing <= self._called:
                        self._heard.clear()
                        await self._heard.wait()
        return sorted(missing - self._called)

    async def _call(self, ranks: list[int], attempt: int) -> set[int]:
        """Write the word that this rank has ended; return those who have got it."""
        imm = self._calls[attempt * RANKS_MAX + self.rank]
        calls, reached = {}, set()
        for p in ranks:
            with contextlib.suppress(tep.TepError):
                calls[p] = self._engine.submit_barrier([self._descs[p]], imm)
        for p, call in calls.items():
            with contextlib.suppress(tep.TepError):
                await call
                reached.add(p)
        return reached

    def _hear(self, rank: int) -> None:
        """Another rank has ended."""
        self._called.add(rank)
        self._heard.set()
        what = f"rank {self.rank}: rank {rank} has ended this all-to-all"
        self._guard.alarm(tep.FabricError(what, code="ENDED", peer=self._descs[rank].addr.name))

"""A small engine that keeps to vLLM's contract for KV connectors, on the simulated fabric.

It has what matters to a connector: a pool of blocks with counts of users, requests that wait, load,
run in chunks and are preempted, and the order of calls in a step. A block that is free is painted,
so that a write to it shows; a request that ends is compared with what it should have computed.
"""

from __future__ import annotations

import asyncio
import pickle
import random
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace

import numpy as np

from tep.apps.kvcache import KvBlocks
from tep.integrations.vllm.scheduler import Scheduler
from tep.integrations.vllm.terms import Report, Terms
from tep.integrations.vllm.worker import Worker

US = 1e-6
TOKENS, HEADS, RUN, LAYERS = 4, 2, 8, 2
PAINT = 0xA5
TERMS = Terms(
    lease_s=4000 * US,
    load_s=25_000 * US,
    beat_s=60 * US,
    lost_after_s=600 * US,
    doubt_s=800 * US,
)


class Status(Enum):
    WAITING = 0
    WAITING_FOR_REMOTE_KVS = 1
    RUNNING = 2
    FINISHED_LENGTH_CAPPED = 3
    FINISHED_ABORTED = 4
    FINISHED_ERROR = 5


@dataclass(eq=False)
class Request:
    """A request of one instance."""

    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: dict | None
    local: int = 0  # blocks of its prompt that the prefix cache has
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    answer: dict | None = None
    shown: int = -1  # blocks that the connector knows of; -1: no step had the request yet
    resumed: bool = False  # it was preempted
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    load_began_s: float | None = None


def content(prompt: list[int], block: int, layer: int) -> np.ndarray:
    """The KV of one block of a prompt: [head, token, element]."""
    return np.random.default_rng([*prompt, block, layer]).integers(
        0, 256, (HEADS, TOKENS, RUN), np.uint8
    )


def copy_of(value):
    """Copy an object like vLLM's channel between processes."""
    return pickle.loads(pickle.dumps(value))  # noqa: S301  # our own bytes


class Pool:
    """Blocks and their users; block 0 is vLLM's placeholder."""

    def __init__(self, owner: Instance, nblocks: int) -> None:
        self.owner = owner
        self.users = [0] * nblocks
        self.free = list(range(1, nblocks))

    def get(self, n: int) -> list[int] | None:
        if n > len(self.free):
            return None
        found, self.free = self.free[:n], self.free[n:]
        for block in found:
            self.owner.check_paint(block)
            self.users[block] = 1
        return found

    def take(self, blocks) -> None:
        for block in blocks:
            assert self.users[block] > 0
            self.users[block] += 1

    def give_back(self, blocks) -> None:
        for block in blocks:
            self.users[block] -= 1
            if self.users[block] < 0:
                self.owner.violations.append(f"block {block} was freed twice")
            if self.users[block] == 0:
                self.owner.paint(block)
                self.free.append(block)


class Instance:
    """One instance of the fake: a scheduler, and a worker for each engine."""

    def __init__(
        self, engines, dice: random.Random, violations: list[str], *, nblocks: int, recompute: bool
    ) -> None:
        self.violations, self.dice, self.recompute = violations, dice, recompute
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.tp = len(engines)
        self.heads = HEADS // self.tp
        self.memory = [
            [np.full((nblocks, self.heads, TOKENS, RUN), PAINT, np.uint8) for _ in range(LAYERS)]
            for _ in engines
        ]
        self.pool = Pool(self, nblocks)
        self.workers = []
        for rank, engine in enumerate(engines):
            cache = KvBlocks(engine, tp=self.tp, rank=rank)
            for layer in range(LAYERS):
                cache.add(f"{layer}", layer, self.memory[rank][layer], "bhtd", heads=HEADS)
            self.workers.append(Worker(cache, TERMS))
        self.scheduler = Scheduler([TOKENS], TERMS, token=str(dice.random()))
        self.scheduler.ranks = tuple(worker.address for worker in self.workers)
        self.scheduler.pool = SimpleNamespace(
            blocks=range(nblocks), touch=self.pool.take, free_blocks=self.pool.give_back
        )
        self.received, self.failed = set(), set()
        self.left = {"sent": {}, "received": {}}
        self.preempted: set[str] = set()
        self.dead = False
        self.loaded = 0

    # ------------------------------------------------------------------ memory

    def paint(self, block: int) -> None:
        for rank in self.memory:
            for layer in rank:
                layer[block] = PAINT

    def check_paint(self, block: int) -> None:
        if any((layer[block] != PAINT).any() for rank in self.memory for layer in rank):
            self.violations.append(f"block {block} was written while it was free")

    def compute(self, request: Request, layer: int, first: int, stop: int) -> None:
        """Write the KV of some tokens of a prompt."""
        prompt = request.prompt_token_ids
        for index in range(first // TOKENS, -(-stop // TOKENS)):
            right = content(prompt, index, layer)
            a, b = max(0, first - index * TOKENS), min(TOKENS, stop - index * TOKENS)
            for rank, memory in enumerate(self.memory):
                held = right[rank * self.heads : (rank + 1) * self.heads]
                memory[layer][request.blocks[index], :, a:b] = held[:, a:b]

    def check(self, request: Request, ntokens: int, when: str) -> None:
        """A request's first tokens must have their own KV."""
        for layer in range(LAYERS):
            for index in range(-(-ntokens // TOKENS)):
                n = min(TOKENS, ntokens - index * TOKENS)
                right = content(request.prompt_token_ids, index, layer)
                for rank, memory in enumerate(self.memory):
                    held = right[rank * self.heads : (rank + 1) * self.heads]
                    if (memory[layer][request.blocks[index], :, :n] != held[:, :n]).any():
                        self.violations.append(
                            f"{request.request_id}, {when}: block {index} is not its own"
                        )
                        return

    # ------------------------------------------------------------------ clients

    def add(self, request: Request) -> Request:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.scheduler.arrived(request)
        return request

    def abort(self, request: Request) -> None:
        if request.request_id in self.requests and request.status.value < 3:
            self._finish(request, Status.FINISHED_ABORTED)

    def die(self) -> None:
        self.dead = True
        for request in self.requests.values():
            request.ended.set()

    @property
    def idle(self) -> bool:
        return not (self.requests or self.scheduler.pending or self.scheduler.doubt)

    # ------------------------------------------------------------------ steps

    async def run(self) -> None:
        while not self.dead:
            await asyncio.sleep(self.dice.uniform(2, 12) * US)
            if not self.dead:
                await self.step()

    async def step(self) -> None:
        chunks = self._schedule()
        orders = copy_of(self.scheduler.orders(self._output(chunks)))
        self.preempted = set()
        while any(worker.stop(orders) for worker in self.workers):  # noqa: ASYNC110  # as vLLM
            await asyncio.sleep(2 * US)
        for worker in self.workers:
            worker.obey(orders)
        for layer in range(LAYERS):
            await asyncio.sleep(self.dice.uniform(0, 3) * US)
            if self.dead:
                return
            for request, first, n in chunks:
                if request.blocks:  # it may have been aborted meanwhile
                    self.compute(request, layer, first, first + n)
            for worker in self.workers:
                worker.layer_saved(layer)
        whole = Report()
        for worker in self.workers:
            report = copy_of(worker.poll())
            for kind in self.left:
                self._count(kind, getattr(report, kind))
                setattr(report, kind, set())
            whole = whole.aggregate(report)
        self._update(chunks, whole)

    def _count(self, kind: str, names: set[str]) -> None:
        for name in names:
            self.left[kind][name] = self.left[kind].get(name, 0) + 1

    def _all(self, kind: str) -> set[str]:
        whole = {name for name, n in self.left[kind].items() if n == self.tp}
        for name in whole:
            del self.left[kind][name]
        return whole

    def _schedule(self) -> list[tuple[Request, int, int]]:
        """Schedule requests and their tokens: (request, first, count)."""
        for request in [one for one in self.running if self.dice.random() < 0.02]:
            self.running.remove(request)
            self.waiting.insert(0, request)
            request.status, request.num_computed_tokens = Status.WAITING, 0
            self.pool.give_back(request.blocks)
            request.blocks, request.resumed = [], True
            self.preempted.add(request.request_id)
        for request in tuple(self.waiting):
            if request.request_id in self.preempted:
                continue
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                if request.request_id not in self.received:
                    continue
                self.received.discard(request.request_id)
                self._loaded(request)
            if not request.blocks and not self._admit(request):
                continue
            if request.status is Status.WAITING:
                request.status = Status.RUNNING
                self.waiting.remove(request)
                self.running.append(request)
        return [
            (one, one.num_computed_tokens, min(n, self.dice.choice((3, 5, 40))))
            for one in self.running
            if (n := len(one.prompt_token_ids) - one.num_computed_tokens) > 0
        ]

    def _admit(self, request: Request) -> bool:
        """Allocate the blocks of a request; whether it can go on."""
        ntokens = len(request.prompt_token_ids)
        local = min(request.local * TOKENS, (ntokens - 1) // TOKENS * TOKENS)
        external, later = self.scheduler.matched(request, local)
        blocks = self.pool.get(-(-ntokens // TOKENS))
        if blocks is None:
            return False
        request.blocks, request.num_computed_tokens = blocks, local
        for layer in range(LAYERS):
            self.compute(request, layer, 0, local)
        self.scheduler.allocated(request, (list(blocks),), external)
        request.shown = -1
        if later:
            request.status = Status.WAITING_FOR_REMOTE_KVS
            request.load_began_s = asyncio.get_running_loop().time()
            request.num_computed_tokens += external
        return not later

    def _loaded(self, request: Request) -> None:
        request.status = Status.WAITING
        if request.request_id in self.failed:
            self.failed.discard(request.request_id)
            if request.num_computed_tokens == 0:
                self.pool.give_back(request.blocks)
                request.blocks = []
                return
        self.check(request, request.num_computed_tokens, "loaded")
        self.loaded += request.num_computed_tokens == len(request.prompt_token_ids)
        last = len(request.prompt_token_ids) - 1
        request.num_computed_tokens = min(request.num_computed_tokens, last)

    def _output(self, chunks) -> SimpleNamespace:
        """vLLM's SchedulerOutput: a chunk's blocks are known with the chunk, not before."""
        new, old, resumed = [], [], set()
        for one, first, n in chunks:
            need = -(-(first + n) // TOKENS)
            more = one.blocks[max(0, one.shown) : need]
            if one.shown < 0 and not one.resumed:
                new.append((one, more))
            else:
                if one.shown < 0:
                    resumed.add(one.request_id)
                old.append((one, more))
            one.shown, one.resumed = max(need, one.shown), False
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=one.request_id,
                    block_ids=(list(blocks),),
                    num_computed_tokens=one.num_computed_tokens,
                )
                for one, blocks in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[one.request_id for one, _ in old],
                resumed_req_ids=resumed,
                new_block_ids=[(list(blocks),) if blocks else None for _, blocks in old],
                num_computed_tokens=[one.num_computed_tokens for one, _ in old],
            ),
            num_scheduled_tokens={one.request_id: n for one, _, n in chunks},
            preempted_req_ids=set(self.preempted),
        )

    def _update(self, chunks, report: Report) -> None:
        """Process a step's results like vLLM: failures, then the connector, then the blocks."""
        loading = [r for r in self.waiting if r.status is Status.WAITING_FOR_REMOTE_KVS]
        errors = []
        for request in loading:
            bad = [k for k, block in enumerate(request.blocks) if block in report.bad]
            if request.request_id in report.failed:
                bad = [0]
            if bad:
                request.num_computed_tokens = min(request.num_computed_tokens, bad[0] * TOKENS)
                self.failed.add(request.request_id)
                errors.append(request)
        for request, first, n in chunks:
            if request.status is Status.RUNNING and request in self.running:
                request.num_computed_tokens = first + n
                if request.num_computed_tokens == len(request.prompt_token_ids):
                    self.check(request, request.num_computed_tokens, "computed")
                    self._finish(request, Status.FINISHED_LENGTH_CAPPED)
        if not self.recompute:
            for request in errors:
                self._finish(request, Status.FINISHED_ERROR)
        received, sent = self._all("received"), self._all("sent")
        self.scheduler.reported(report, received)
        for name in received:
            request = self.requests[name]
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                self.received.add(name)
            else:
                self._free(request)
        for name in sent:
            self._free(self.requests[name])

    def _finish(self, request: Request, status: Status) -> None:
        delay = request.status is Status.WAITING_FOR_REMOTE_KVS
        delay = delay and request.request_id not in self.received
        self.received.discard(request.request_id)
        self.failed.discard(request.request_id)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        request.status = status
        keep, request.answer = self.scheduler.finished(request, (list(request.blocks),))
        if not (keep or delay):
            self._free(request)
        request.ended.set()

    def _free(self, request: Request) -> None:
        if request.status.value < 3:
            self.violations.append(f"{request.request_id} was freed while it is {request.status}")
        self.pool.give_back(request.blocks)
        request.blocks = []
        del self.requests[request.request_id]

"""Drawn runs of the vLLM connector: two instances of the fake, clients of both, and trouble."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from dataclasses import dataclass, field, replace

from tep import EngineOptions, sim
from tep.base.units import PS_PER_S, PS_PER_US
from tep.integrations.vllm.terms import Source
from tests.support.fake_vllm import TERMS, US, Instance, Request


@dataclass
class Case:
    """One run: what is asked, and what befalls it."""

    seed: int
    tp: tuple[int, int]
    nblocks: tuple[int, int]
    requests: int
    recompute: bool
    lost: int = 0  # of 16 messages
    faults: tuple[str, ...] = ()

    @classmethod
    def draw(cls, dice: random.Random, *, trouble: bool = True) -> Case:
        kinds = ("restart 0", "restart 1", "silence 0", "silence 1")
        return cls(
            dice.randrange(1 << 32),
            (dice.choice((1, 2)), dice.choice((1, 2))),
            (dice.choice((12, 40)), dice.choice((12, 40))),
            dice.randint(1, 5),
            dice.random() < 0.7,
            dice.choice((0, 0, 2, 6)) if trouble else 0,
            tuple(dice.choice(kinds) for _ in range(dice.choice((0, 0, 1, 2)))) if trouble else (),
        )


@dataclass
class Run:
    """The events of a run, and its faults."""

    violations: list[str] = field(default_factory=list)
    loaded: int = 0
    refused: dict[str, int] = field(default_factory=dict)


class Play:
    """One case: two instances, prefill and decode, and clients that go from one to the other."""

    def __init__(self, case: Case, cluster: sim.Cluster, dead_after_s: float) -> None:
        self.case, self.cluster, self.found = case, cluster, Run()
        self.dead_after_s = dead_after_s  # so long a NIC holds rows to a peer that is gone
        self.dice = random.Random(case.seed)
        self.silent = [False, False]
        self.tasks: list[asyncio.Task] = []
        self.former: list[Instance] = []
        self.sides = [self._start(side) for side in range(2)]

    def _nodes(self, side: int) -> range:
        first = side * self.case.tp[0]
        return range(first, first + self.case.tp[side])

    def _start(self, side: int) -> Instance:
        engines = [self.cluster.engines[k] for k in self._nodes(side)]
        instance = Instance(
            engines,
            random.Random(self.dice.random()),
            self.found.violations,
            nblocks=self.case.nblocks[side],
            recompute=self.case.recompute,
        )
        self.tasks.append(asyncio.create_task(instance.run()))
        return instance

    async def play(self) -> None:
        clients = [asyncio.create_task(self._client(k)) for k in range(self.case.requests)]
        faults = [asyncio.create_task(self._fault(kind)) for kind in self.case.faults]
        ended = await asyncio.gather(*clients, *faults, return_exceptions=True)
        # The next request goes through, and introduces who has restarted.
        if not any(self.silent) and not self.found.violations:
            ended += await asyncio.gather(self._client(-1), return_exceptions=True)
        await self._drain()
        for task in self.tasks:
            if task.done() and (error := task.exception()) is not None:
                ended.append(error)
            task.cancel()
        self.found.violations += [
            f"{type(one).__name__}: {one}" for one in ended if isinstance(one, Exception)
        ]
        for name, side, silent in zip("PD", self.sides, self.silent, strict=True):
            self._check_leaks(name, side, silent=silent)

    async def _fault(self, what: str) -> None:
        kind, number = what.split()
        side = int(number)
        await asyncio.sleep(self.dice.uniform(0, 1500) * US)
        if kind == "restart":
            self.sides[side].die()
            self.former.append(self.sides[side])
            for node in self._nodes(side):
                self.cluster.restart(node)
            self.silent[side] = False
            self.sides[side] = self._start(side)
        elif not self.silent[side]:
            for node in self._nodes(side):
                for nic in range(len(self.cluster.engines[node].main_address.domains)):
                    self.cluster.kill_nic(node, nic)
            self.silent[side] = True

    async def _client(self, index: int) -> None:
        dice = random.Random(self.case.seed + index)
        name = f"r{index}"
        # Few lengths and few tokens: requests with equal shapes and other contents.
        prompt = [dice.randrange(3) for _ in range(dice.choice((3, 8, 17)))]
        await asyncio.sleep(dice.choice((0, 20, 400)) * US)
        first, second = self.sides
        ours = {"do_remote_decode": True}
        early = dice.random() < 0.4
        if early:
            ours["tep"] = {"key": f"key {self.case.seed} {index}"}
        prefill = first.add(Request(f"{name}p", prompt, ours, dice.choice((0, 0, 1))))
        if dice.random() < 0.15:
            self._abort_later(dice, first, prefill)
        if early:
            ranks = Source(ours["tep"]["key"], first.scheduler.ranks).params(prompt, 1.0)["ranks"]
            params = {"do_remote_prefill": True, "tep": ours["tep"] | {"ranks": ranks}}
        else:
            await prefill.ended.wait()
            if dice.random() < 0.2:  # the router is slow, perhaps too slow
                await asyncio.sleep(dice.uniform(0.1, 2) * TERMS.lease_s)
            params = prefill.answer and json.loads(json.dumps(prefill.answer))
        if second.dead:
            return
        if params is not None and dice.random() < 0.1:
            prompt = [*prompt[:-1], prompt[-1] + 1]  # the router mixes them up
            params["tep"].setdefault("digest", "another")
        decode = second.add(Request(f"{name}d", prompt, params, dice.choice((0, 0, 1, 9))))
        if dice.random() < 0.25:
            self._abort_later(dice, second, decode)
        await self._end_of(decode)
        if decode.load_began_s is None:
            return
        took_s = asyncio.get_running_loop().time() - decode.load_began_s
        excused = early or self.silent[1]  # its prefill may never come; its own NICs are dead
        if took_s > 0.9 * TERMS.load_s and not excused:
            self.found.violations.append(f"{name} waited {took_s / US:.0f} us for nothing")

    async def _end_of(self, decode: Request) -> None:
        """Wait for a request's end.

        Where all NICs of an instance are dead, blocks stay in doubt: a request waits for free ones
        as long as the instance lives.
        """
        while not (decode.ended.is_set() or self.silent[1]):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(decode.ended.wait(), TERMS.load_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(decode.ended.wait(), 2 * TERMS.load_s)

    def _abort_later(self, dice: random.Random, side: Instance, request: Request) -> None:
        async def abort() -> None:
            await asyncio.sleep(dice.uniform(0, 60) * US)
            if not side.dead:
                side.abort(request)

        self.tasks.append(asyncio.create_task(abort()))

    async def _drain(self) -> None:
        """Let leases run out and loads end, unless something is known to be wrong."""
        excused = any(self.silent)  # what is left then is no violation
        limit_s = (
            2 * TERMS.lease_s if excused else TERMS.load_s + 3 * TERMS.lease_s + self.dead_after_s
        )
        until_us = self.cluster.now_us + limit_s / US
        while self.cluster.now_us < until_us and not self.found.violations:
            await asyncio.sleep(20 * TERMS.beat_s)
            if all(side.idle for side in self.sides):
                break
        await asyncio.sleep(20 * TERMS.beat_s)

    def _check_leaks(self, name: str, side: Instance, *, silent: bool) -> None:
        found = self.found
        found.loaded += side.loaded
        # A silent writer's blocks stay out of use; a lost message can be a lost peer.
        other_silent = any(self.silent)
        for key, value in side.scheduler.refused.items():
            found.refused[key] = found.refused.get(key, 0) + value
        for request in () if other_silent else side.requests.values():
            found.violations.append(f"{name}: {request.request_id} is left: {request.status}")
        for block in side.pool.free:
            side.check_paint(block)
        missing = [block for block, users in enumerate(side.pool.users) if users]
        if missing and not other_silent:
            found.violations.append(f"{name}: blocks {missing} have leaked")
        if not silent and not other_silent and side.scheduler.doubt:
            found.violations.append(f"{name}: doubts are left")


def run_case(case: Case) -> Run:
    """Play one case to its end."""
    names = [f"{side}{k}" for side, n in zip("pd", case.tp, strict=True) for k in range(n)]
    chaos = sim.Chaos.draw(case.seed)
    if case.lost:  # what is lost is told before its peer is taken for lost: NICs give up sooner
        dead_after_ps = min(chaos.dead_after_ps, 200 * PS_PER_US)
        chaos = replace(chaos, message_loss=case.lost, dead_after_ps=dead_after_ps)
    probing = EngineOptions(probe_first_s=50 * US, probe_max_s=400 * US)

    async def main() -> Run:
        dead_after_s = chaos.dead_after_ps / PS_PER_S
        play = Play(case, cluster, dead_after_s)
        await asyncio.wait_for(play.play(), 0.3 + dead_after_s)
        return play.found

    with sim.Cluster(
        len(names), names=names, seed=case.seed, chaos=chaos, options=probing
    ) as cluster:
        found = cluster.run(main())
        for engine in cluster.engines:
            found.violations += [f"{engine.name}: {e}" for e in engine.callback_errors]
    return found

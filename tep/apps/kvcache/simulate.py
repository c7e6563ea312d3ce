"""Whole clusters under load: requests at a rate, layer-wise transfer, and what it costs.

Capacity runs keep time on the timing fabric, and move no bytes. On the chaos fabric a toy model
computes for real, and the tokens of each answer are compared with those of one place. There a seed
draws a `Scenario`: members come, go, crash and lose NICs under load, and no request may be lost. A
`World` is the cluster alone.
"""

from __future__ import annotations

import asyncio
import math
import random
import resource
import statistics
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Self, TypeVar

import numpy as np

from tep import EngineOptions, TransferEngine, UsageError
from tep.apps.kvcache.blocks import Patience
from tep.apps.kvcache.decoder import Decoder
from tep.apps.kvcache.memory import KvMemory, SideOptions, host_memory, no_memory
from tep.apps.kvcache.model import (
    Completion,
    DecodeWork,
    Model,
    PrefillWork,
    Request,
    cut_chunks,
)
from tep.apps.kvcache.prefiller import Prefiller
from tep.apps.kvcache.scheduler import Scheduler
from tep.apps.kvcache.toy import ToyModel
from tep.apps.kvcache.traces import BLOCK_TOKENS, Arrival
from tep.apps.kvcache.ttft import OVERHEAD, PUBLISHED, Overhead, TtftModel
from tep.base.units import PS_PER_S
from tep.observe.shown import Shown, draw
from tep.sim import (
    Chaos,
    ChaosFabric,
    FabricEnv,
    Profile,
    SimDriver,
    SimNode,
    TimingFabric,
    run,
)

__all__ = [
    "EVENTS", "Load", "Member", "Plant", "Report", "Scenario", "TimedModel", "World",
    "draw_scenario", "first_token", "simulate",
]  # fmt: skip

Event = Callable[["World"], object]
T = TypeVar("T")
Made = TypeVar("Made", Prefiller, Decoder)

_TOKEN_S: Final = 0.02  # between two generated tokens; guessed


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """A cluster.

    Attributes:
        prefillers, decoders: instances at the start.
        prefill_tp, decode_tp: ranks of each; each rank is an engine.
        profile: the machine: a name of tep.sim.profiles(), or a Profile.
        decode_profile: the decoders' machine; None: the same.
        chaos: knobs of the chaos fabric; None: the timing fabric.
        model: gives the layout, the chunk and compute times; but on chaos.
        overhead: what disaggregation takes beside compute and transfer; but on chaos.
        cold: prefillers and decoders never met before the first request.
        prefix_tokens: of past prompts that each prefiller keeps, for prompts that begin alike; what
            it finds is not computed again, and travels as all else.
        layer_s: compute of one layer of one chunk, on chaos.
        npages: pages of each cache; 256 hold a prompt of 32,768 tokens.
        attempts_max: tries at a request.
        patience: times of both sides.
    """

    prefillers: int = 2
    decoders: int = 2
    prefill_tp: int = 4
    decode_tp: int = 4
    profile: Profile | str = "efa_2x200"
    decode_profile: Profile | str | None = None
    chaos: Chaos | None = None
    model: TtftModel = PUBLISHED
    overhead: Overhead = OVERHEAD
    cold: bool = False
    prefix_tokens: int = 0
    layer_s: float = 5e-6
    npages: int = 4096
    attempts_max: int = 6
    patience: Patience = field(
        default_factory=lambda: Patience(beat_s=0.5, silent_s=5.0, cancel_s=1.0, request_s=600.0)
    )

    @property
    def engines(self) -> int:
        """Engines at the start."""
        return self.prefillers * self.prefill_tp + self.decoders * self.decode_tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests.

    Attributes:
        arrivals: these; else they are drawn by the other numbers.
        rate: a second, on average; they come at random, one independent of the other.
        duration_s: for how long they come; what has come is seen through.
        ntokens: lengths of prompts, equally likely.
        max_tokens: tokens wanted.
        seed: of arrivals and lengths.
    """

    arrivals: Sequence[Arrival] = ()
    rate: float = 0.0
    duration_s: float = 0.0
    ntokens: Sequence[int] = (32768,)
    max_tokens: int = 16
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Report(Shown):
    """The outcome of a run. Times in seconds.

    Attributes:
        completions: of every request, in the order of their ends. `ttft_s` is from the arrival to
            the first token; on chaos to the complete cache, from where the decoder had the request.
        compute_s: for each of them, its prefill's compute alone, as the model says; what a prefix
            saved is not in it. NaN: nothing was computed.
        wrong: completions with other tokens than those of one place; they are compared on chaos.
        engines: at the start.
        writes, rows, nbytes: paged writes and tails; rows they made; their bytes.
        simulated_s: from the first arrival to the last end.
        cpu_s: what the run cost.
        rss_bytes: most memory this process has ever held.
        tokens, tokens_found: of all prompts that were computed; those that a prefiller had.
    """

    completions: list[Completion]
    compute_s: list[float]
    wrong: list[Completion]
    engines: int
    writes: int
    rows: int
    nbytes: int
    simulated_s: float
    cpu_s: float
    rss_bytes: int
    tokens: int = 0
    tokens_found: int = 0

    def __repr__(self) -> str:
        (row,) = self.table()
        return f"Report({'; '.join(f'{name}: {value:.4g}' for name, value in row.items())})"

    @property
    def failed(self) -> list[Completion]:
        """Those that failed."""
        return [done for done in self.completions if not done.ok]

    def table(self) -> list[dict[str, Any]]:
        """Return one row: requests, and times to the first token."""
        times = {f"TTFT p{100 * share:.0f}, s": self.ttft_s(share) for share in (0.5, 0.9, 0.99)}
        requests = {"requests": len(self.completions), "failed": len(self.failed)}
        return [requests | times | {"beyond compute p50, s": self.added_s()}]

    def plot(self, axes: Any = None) -> Any:  # type: ignore[override]  # it has its own axes
        """Draw the share of requests that have their first token within a time; return the axes."""
        times = sorted(done.ttft_s for done in self.completions if done.ok)
        shares = [100 * (k + 1) / len(times) for k in range(len(times))]
        rows = [{"TTFT, s": time, "requests, %": share} for time, share in zip(times, shares)]
        return draw(rows, axes, x="TTFT, s", y="requests, %")

    def figures(self) -> dict[str, float]:
        """The figures that have an interval, by name; milliseconds."""
        found = {"TTFT p50": self.ttft_s(), "TTFT p99": self.ttft_s(0.99), "added": self.added_s()}
        return {name: seconds * 1e3 for name, seconds in found.items()}

    def ttft_s(self, share: float = 0.5) -> float:
        """The time to the first token that a share of the completed requests does not exceed."""
        times = sorted(done.ttft_s for done in self.completions if done.ok)
        return times[min(len(times) - 1, int(share * len(times)))] if times else float("nan")

    def added_s(self) -> float:
        """Median of what a request waited beyond its own compute: queues, transfer, overhead."""
        pairs = zip(self.completions, self.compute_s, strict=True)
        found = [done.ttft_s - alone for done, alone in pairs if done.ok]
        return statistics.median(found) if found else float("nan")


class TimedModel:
    """Takes the time that a model would take, and computes nothing.

    `blocks` has for each request the ids of the blocks that its prompt is made of.

    Attributes:
        first_s: the time of the first token of each request that is not over.
        compute_s: the compute of each request's prefill.
        tokens, tokens_found: of all prompts; those that a prefiller had.
    """

    def __init__(self, plant: Plant, blocks: Mapping[str, tuple[int, ...]]) -> None:
        self._plant = plant
        self._blocks = blocks
        self.layout, self.chunk_tokens = plant.model.layout, plant.model.chunk_tokens
        self._known: defaultdict[KvMemory, OrderedDict[int, None]] = defaultdict(OrderedDict)
        self.first_s: dict[str, float] = {}
        self.compute_s: dict[str, float] = {}
        self.tokens = self.tokens_found = 0

    def _find(self, work: PrefillWork) -> int:
        """Return how many tokens a prefiller has of a prompt, not its last; keep those it gets."""
        request, known = work.request, self._known[work.memory]
        blocks = self._blocks.get(request.name, ())
        held = next((k for k, one in enumerate(blocks) if one not in known), len(blocks))
        for one in reversed(blocks):  # the beginning is what others may share: it stays longest
            known[one] = None
            known.move_to_end(one)
        while len(known) > self._plant.prefix_tokens // BLOCK_TOKENS:
            known.popitem(last=False)
        found = min(held * BLOCK_TOKENS, request.ntokens - 1)
        self.tokens += request.ntokens
        self.tokens_found += found
        return found

    async def prefill(self, work: PrefillWork) -> None:
        """Let the layers pass, each with the start of its transfer."""
        model, overhead = self._plant.model, self._plant.overhead
        if self._plant.cold and work.memory not in self._known:
            await asyncio.sleep(overhead.first_contact_s)
        found, spent_s = self._find(work), 0.0
        for chunk in work.chunks:
            start = max(chunk.start, min(found, chunk.stop))
            new = chunk.stop - start
            layer_s = model.layer_compute_s(start, new) if new else 0.0
            spent_s += work.layers * layer_s
            for _ in range(work.layers):
                await asyncio.sleep(layer_s + overhead.start_s)
                work.layer_done()
        self.compute_s[work.request.name] = spent_s

    async def decode(self, work: DecodeWork) -> Sequence[int]:
        """Let the decoder's own pass for the last token pass, and the further tokens."""
        plant, request = self._plant, work.request
        await asyncio.sleep(plant.overhead.before_token_s(plant.model, request.ntokens))
        self.first_s[request.name] = asyncio.get_running_loop().time()
        await asyncio.sleep(_TOKEN_S * (request.max_tokens - 1))
        return [0] * request.max_tokens


def first_token(ntokens: int, plant: Plant | None = None, seed: int = 0) -> Report:
    """Simulate one prompt alone; the report's `ttft_s` and `added_s` are its.

    Args:
        ntokens: its length.
        plant: None: one prefiller and one decoder.
        seed: of the fabric.
    """
    alone = plant or Plant(prefillers=1, decoders=1)
    return simulate(alone, Load(arrivals=(Arrival(0.0, ntokens, 1),), seed=seed))


def simulate(plant: Plant, load: Load, events: Sequence[tuple[float, Event]] = ()) -> Report:
    """Run a cluster under load until every request has ended.

    `events` are (simulated second, what to do to the `World`) pairs: joins, departures, crashes.
    """
    started_s = time.process_time()
    env = FabricEnv()
    timed = TimedModel(plant, {f"r{k}": one.blocks for k, one in enumerate(load.arrivals)})
    world, toy = _world(plant, load, env, timed)
    arrivals = _arrivals(load, ids=toy is not None)
    completions: list[Completion] = []
    with world:
        world.run(_play(plant, world, arrivals, events, completions))
        sides = [one.side for one in world.everybody if isinstance(one.side, Prefiller)]
        senders = [sender for side in sides for sender in side.senders]
    asked = {request.name: request for _, request in arrivals}
    return Report(
        completions,
        [_compute_s(asked[done.request], timed, toy) for done in completions],
        [done for done in completions if toy and not _is_right(toy, asked[done.request], done)],
        plant.engines,
        sum(one.writes for one in senders),
        sum(one.rows for one in senders),
        sum(one.nbytes for one in senders),
        simulated_s=env.now / PS_PER_S,
        cpu_s=time.process_time() - started_s,
        rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        tokens=timed.tokens,
        tokens_found=timed.tokens_found,
    )


def _world(
    plant: Plant, load: Load, env: FabricEnv, timed: TimedModel
) -> tuple[World, ToyModel | None]:
    """Make the cluster; and on chaos the model that computes for real."""
    fabric: TimingFabric | ChaosFabric
    if plant.chaos is None:
        machines = [plant.profile, plant.decode_profile or plant.profile]
        fabric = TimingFabric(env, machines, seed=load.seed, move_bytes=False)
        toy = None
    else:
        fabric = ChaosFabric(env, plant.chaos)
        toy = ToyModel(layer_s=plant.layer_s)
    side = SideOptions(
        npages=plant.npages,
        tail_slots=plant.npages,
        tail_bytes=1024 if toy is None else toy.tail_bytes,
        patience=plant.patience,
        allocate=no_memory if toy is None else host_memory,
    )
    world = World(
        fabric,
        toy or timed,
        side,
        fence_s=2 * plant.patience.silent_s,
        scheduler=Scheduler(wait_s=plant.patience.request_s, attempts_max=plant.attempts_max),
        decode_profile=None if toy else plant.decode_profile,
        options=EngineOptions() if toy is None else _probing(plant.patience),
    )
    return world, toy


def _probing(patience: Patience) -> EngineOptions:
    """Engines that look for a lost peer as often as the instances beat."""
    return EngineOptions(probe_first_s=patience.beat_s, probe_max_s=patience.silent_s)


def _compute_s(request: Request, timed: TimedModel, toy: ToyModel | None) -> float:
    if toy is None:
        return timed.compute_s.get(request.name, math.nan)
    chunks = cut_chunks(request.ntokens, toy.chunk_tokens, toy.page_tokens)
    return len(chunks) * toy.layers * toy.layer_s


def _is_right(toy: ToyModel, request: Request, done: Completion) -> bool:
    assert request.input_ids is not None
    alone = toy.alone(request.input_ids, request.max_tokens)
    return done.tokens is None or list(done.tokens) == alone


def _arrivals(load: Load, *, ids: bool) -> list[tuple[float, Request]]:
    """(second, request) pairs, in order."""
    dice = random.Random(f"kvcache load {load.seed}")
    found: list[tuple[float, Request]] = []
    for k, one in enumerate(load.arrivals):
        found.append((one.at_s, Request(f"r{k}", one.ntokens, None, one.max_tokens)))
    if found:
        return found
    if load.rate <= 0 or load.duration_s <= 0 or not load.ntokens:
        raise UsageError(f"{load}: rate, duration and lengths are positive")
    at_s = dice.expovariate(load.rate)
    while at_s < load.duration_s:
        ntokens = dice.choice(load.ntokens)
        prompt = None
        if ids:
            prompt = np.array([dice.randrange(256) for _ in range(ntokens)], np.int32)
        request = Request(f"r{len(found)}", ntokens, prompt, load.max_tokens)
        found.append((at_s, request))
        at_s += dice.expovariate(load.rate)
    return found


async def _play(
    plant: Plant,
    world: World,
    arrivals: Sequence[tuple[float, Request]],
    events: Sequence[tuple[float, Event]],
    completions: list[Completion],
) -> None:
    for index in range(plant.prefillers):
        world.add_prefiller(f"p{index}", plant.prefill_tp)
    for index in range(plant.decoders):
        world.add_decoder(f"d{index}", plant.decode_tp)
    tasks = [asyncio.create_task(_at(at_s, event, world)) for at_s, event in events]
    now_s = 0.0
    for at_s, request in arrivals:
        await asyncio.sleep(at_s - now_s)
        now_s = at_s
        tasks.append(asyncio.create_task(_client(plant, world, request, completions)))
    await asyncio.gather(*tasks)
    await world.settled()
    for prefiller in world.alive(Prefiller):
        await prefiller.leave()


async def _client(
    plant: Plant, world: World, request: Request, completions: list[Completion]
) -> None:
    model, start_s = world.model, asyncio.get_running_loop().time()
    if isinstance(model, TimedModel):
        await asyncio.sleep(plant.overhead.hop_s)
    done = await world.scheduler.submit(request)
    if isinstance(model, TimedModel) and done.ok:
        done = replace(done, ttft_s=model.first_s.pop(request.name) - start_s)
    completions.append(done)


async def _at(at_s: float, event: Event, world: World) -> None:
    await asyncio.sleep(at_s)
    found = event(world)
    if asyncio.iscoroutine(found):
        await found


# ---------------------------------------------------------------------- scenarios


EVENTS: Final = ("none", "join", "retire", "crash", "restart", "NIC death")
"""The events; "join": one more instance comes."""

_DEGREES: Final = ((1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (2, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run.

    Attributes:
        events: (simulated second, one of EVENTS) pairs.
        happened: filled in by `run`: how often each event was of each kind of member.
    """

    plant: Plant
    load: Load
    events: tuple[tuple[float, str], ...]
    happened: Counter[str] = field(default_factory=Counter)

    def run(self) -> tuple[Report, list[str]]:
        """Play it: the report, and what must not be, in words."""
        dice = random.Random(f"kvcache events {self.load.seed}")
        events = [(at_s, partial(self._strike, what, dice)) for at_s, what in self.events]
        report = simulate(self.plant, self.load, events)
        found = [f"{done.request} was lost: {done.reason}" for done in report.failed]
        return report, found + [
            f"{done.request}: other tokens than in one place" for done in report.wrong
        ]

    def _strike(self, what: str, dice: random.Random, world: World) -> Any:
        """Let an event happen to somebody; where too few would be left, one more joins instead."""
        prefills = dice.random() < 0.5
        kind = "prefiller" if prefills else "decoder"
        names = world.scheduler.prefillers if prefills else world.scheduler.decoders
        whole = [
            (name, rank)
            for name in names
            for rank in range(len(world.members[name].engines))
            if rank not in world.members[name].maimed
        ]
        if what not in {"join", "none"} and (len(names) < 2 if what != "NIC death" else not whole):
            what = "join"
        self.happened[f"{what} of a {kind}"] += 1
        match what:
            case "join":
                tp = len(world.members[names[0]].engines) if names else 1
                name = f"{kind[0]}-joined{len(world.members) + len(world.past)}"
                (world.add_prefiller if prefills else world.add_decoder)(name, tp)
            case "retire":
                return world.retire(dice.choice(names))
            case "crash":
                world.crash(dice.choice(names))
            case "restart":
                world.restart(dice.choice(names))
            case "NIC death":
                world.kill_nic(*dice.choice(whole), dice.randrange(2))
            case _:
                pass
        return None


def draw_scenario(seed: int, **fixed: Any) -> Scenario:
    """Draw a small cluster and one event; `fixed` are `event`, or fields of Plant, not drawn."""
    dice = random.Random(f"kvcache scenario {seed}")
    prefill_tp, decode_tp = dice.choice(_DEGREES)
    drawn: dict[str, Any] = {
        "prefillers": dice.choice((2, 3)),
        "decoders": 2,
        "prefill_tp": prefill_tp,
        "decode_tp": decode_tp,
        "npages": dice.choice((24, 48)),
        "chaos": Chaos.draw(seed),
        # A worker may pause for 3 ms, many times.
        "patience": Patience(
            beat_s=2.5e-3, silent_s=50e-3, cancel_s=12e-3, request_s=1.0, linger_s=50e-3
        ),
    }
    event = dice.choice(EVENTS)
    load = Load(
        rate=dice.choice((20e3, 60e3)),
        duration_s=200e-6,
        ntokens=(1, 8, 21, 60),
        max_tokens=6,
        seed=seed,
    )
    drawn |= fixed
    event = drawn.pop("event", event)
    at_s = dice.uniform(1e-6, 250e-6)
    return Scenario(plant=Plant(**drawn), load=load, events=((at_s, event),))


# ---------------------------------------------------------------------- the cluster


@dataclass(slots=True)
class Member:
    """One incarnation of one instance; `maimed` are the ranks whose engine has lost a NIC."""

    side: Prefiller | Decoder
    engines: list[TransferEngine]
    alive: bool = True
    maimed: set[int] = field(default_factory=set)


class World:
    """Instances on one fabric, and their scheduler. Use it inside `run`, as a context manager.

    It plays the part of whoever starts processes: it alone knows for certain that one is dead, and
    says so to the scheduler (`fenced`) a while after.

    Args:
        fabric: where hosts are made.
        model, side, options: of all instances and their engines.
        nics: of every host, on the chaos fabric.
        fence_s: from a death to the certainty of it.
        decode_profile: the decoders' machine, one of a fabric that has several.

    Attributes:
        members: name -> its newest incarnation.
        past: incarnations that were replaced or have left.
    """

    def __init__(
        self,
        fabric: Any,
        model: Model,
        side: SideOptions,
        *,
        nics: int = 2,
        fence_s: float = 0.05,
        scheduler: Scheduler | None = None,
        options: EngineOptions | None = None,
        decode_profile: Profile | str | None = None,
    ) -> None:
        self.fabric = fabric
        self.env: FabricEnv = fabric.env
        self.model = model
        self.scheduler = scheduler or Scheduler()
        self.members: dict[str, Member] = {}
        self.past: list[Member] = []
        self._side = side
        self._nics = nics
        self._fence_s = fence_s
        self._options = options or EngineOptions()
        self._decode_profile = decode_profile
        self._fences: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ coming

    def add_prefiller(self, name: str, tp: int) -> Prefiller:
        """Start one and have it join."""
        return self._start_prefiller(name, self._hosts([f"{name}.{k}" for k in range(tp)], None))

    def add_decoder(self, name: str, tp: int) -> Decoder:
        """Start one and have it join."""
        names = [f"{name}.{k}" for k in range(tp)]
        return self._start_decoder(name, self._hosts(names, self._decode_profile))

    def _hosts(self, names: Sequence[str], profile: Profile | str | None) -> list[SimNode]:
        what = self._nics if isinstance(self.fabric, ChaosFabric) else profile
        return [self.fabric.node(name, what) for name in names]

    def _start_prefiller(self, name: str, nodes: Sequence[SimNode]) -> Prefiller:
        side = Prefiller(name, self._engines(nodes), self.model, self._side)
        self.enrol(side)
        self.scheduler.join_prefiller(side.card)
        return side

    def _start_decoder(self, name: str, nodes: Sequence[SimNode]) -> Decoder:
        side = Decoder(name, self._engines(nodes), self.model, self._side)
        self.enrol(side)
        self.scheduler.join_decoder(side)
        return side

    def _engines(self, nodes: Sequence[SimNode]) -> list[TransferEngine]:
        return [
            TransferEngine(
                node.domains,
                driver=SimDriver(self.env, node),
                name=node.name,
                epoch=node.epoch,
                options=self._options,
            )
            for node in nodes
        ]

    def enrol(self, side: Prefiller | Decoder) -> None:
        """Count an instance among the members, before it joins."""
        self.members[side.name] = Member(side, list(side.memory.engines))

    # ------------------------------------------------------------------ going

    async def retire(self, name: str) -> None:
        """Have an instance leave in good order: what it has under way is finished first."""
        member = self.members[name]
        if isinstance(member.side, Prefiller):
            self.scheduler.leave_prefiller(name)
            await member.side.leave()
        else:
            self.scheduler.leave_decoder(name)
            await member.side.drained()
        self._end(member)
        if isinstance(member.side, Prefiller):
            self._certify(member.side)
        if self.members.get(name) is member:
            del self.members[name]
        self.past.append(member)

    def crash(self, name: str) -> None:
        """Pull the plug of an instance, on the chaos fabric all at once. It does not come back."""
        member = self.members[name]
        if isinstance(self.fabric, ChaosFabric):
            for engine in member.engines:
                self.fabric.crash(engine.name)
        self._die(member)

    def restart(self, name: str) -> None:
        """Crash an instance, on the chaos fabric, and start it again at once, with no cache."""
        member = self.members[name]
        nodes = [self.fabric.restart(engine.name) for engine in member.engines]
        self._die(member)
        self.past.append(member)
        prefills = isinstance(member.side, Prefiller)
        (self._start_prefiller if prefills else self._start_decoder)(name, nodes)

    def kill_nic(self, name: str, rank: int, nic: int) -> None:
        """Kill one NIC of an instance for good, on the chaos fabric."""
        member = self.members[name]
        member.maimed.add(rank)
        self.fabric.kill_nic(member.engines[rank].name, nic)

    def _die(self, member: Member) -> None:
        name = member.side.name
        self._end(member)
        if isinstance(member.side, Prefiller):
            self.scheduler.leave_prefiller(name)
            self._certify(member.side)
        else:
            self.scheduler.leave_decoder(name)

    def _certify(self, dead: Prefiller) -> None:
        task = asyncio.get_running_loop().create_task(self._fence(dead))
        self._fences.add(task)
        task.add_done_callback(self._fences.discard)

    async def _fence(self, dead: Prefiller) -> None:
        await asyncio.sleep(self._fence_s)
        self.scheduler.fenced(dead.name, dead.card.epoch)
        for member in self.members.values():  # also those that take no new requests
            if isinstance(member.side, Decoder):
                member.side.fenced(dead.name, dead.card.epoch)

    def _end(self, member: Member) -> None:
        member.alive = False
        member.side.close()
        for engine in member.engines:
            engine.close()

    # ------------------------------------------------------------------ all of it

    @property
    def everybody(self) -> list[Member]:
        """All incarnations there ever were."""
        return [*self.past, *self.members.values()]

    def alive(self, kind: type[Made]) -> list[Made]:
        """The instances of one kind that run."""
        return [m.side for m in self.members.values() if m.alive and isinstance(m.side, kind)]

    async def settled(self) -> None:
        """Return when every fence is up and every end is confirmed."""
        while self._fences:
            await asyncio.wait(tuple(self._fences))
        for decoder in self.alive(Decoder):
            await decoder.settled()

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in this world's simulated time."""
        return run(main, self.env)

    def close(self) -> None:
        """End everything. Idempotent."""
        for member in self.members.values():
            if member.alive:
                self._end(member)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

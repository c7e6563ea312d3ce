"""A simulated day on the chaos fabric: members come, go, crash, restart and lose NICs under load.

Every byte is checked. There is no world to rebuild: the scheduler hears of who comes and goes,
nobody else is told anything.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tep.apps.kvcache.check import CheckedModel
from tep.apps.kvcache.decoder import Decoder
from tep.apps.kvcache.heartbeat import Patience
from tep.apps.kvcache.layout import KvBuffer, KvLayout
from tep.apps.kvcache.model import Completion, Request
from tep.apps.kvcache.options import SideOptions
from tep.apps.kvcache.prefiller import Prefiller
from tep.apps.kvcache.scheduler import Scheduler
from tep.apps.kvcache.trial import member_flaws
from tep.apps.kvcache.words import told_word
from tep.apps.kvcache.world import World
from tep.sim import Chaos, ChaosFabric, FabricEnv

__all__ = ["Day", "DayReport", "run_day"]

_LAYOUT: Final = KvLayout("day", 4, (KvBuffer("kv", 3, 2, 4, planes=2),))
_TP: Final = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """What happens.

    Attributes:
        seed: of all that is drawn.
        seconds: how long requests come, simulated.
        changes: joins, departures, crashes, restarts and deaths of single NICs, spread over that
            time. Each engine keeps one NIC at least.
        requests: spread over it as well.
        prefillers, decoders: at the start; there are never fewer than two of each.
        layer_s: compute of one layer of one chunk: a request takes 3 to 9 times as long, so that
            changes meet requests under way. Time-outs are multiples of it.
    """

    seed: int = 0
    seconds: float = 86_400.0
    changes: int = 200
    requests: int = 2000
    prefillers: int = 4
    decoders: int = 4
    layer_s: float = 20.0


@dataclass(slots=True)
class DayReport:
    """What came of it.

    Attributes:
        completions: of every request.
        happened: how many changes there were of each kind.
        violations: what must not be, in words; empty if all is well.
        checked: pages whose bytes were compared.
        retried: requests that needed more than one attempt.
        simulated_s, cpu_s: how long it was, and what it cost.
    """

    completions: list[Completion] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    checked: int = 0
    retried: int = 0
    simulated_s: float = 0.0
    cpu_s: float = 0.0


def run_day(day: Day) -> DayReport:
    """Run a day to its end, with all requests seen through."""
    started_s = time.process_time()
    env = FabricEnv()
    report = DayReport()
    model = CheckedModel(lambda _: day.layer_s, decode_s=2 * day.layer_s)
    unit_s = day.layer_s
    patience = Patience(
        beat_s=unit_s,
        silent_s=4.5 * unit_s,
        hello_s=unit_s,
        cancel_s=unit_s,
        request_s=90 * unit_s,
    )
    side = SideOptions(npages=64, tail_slots=16, tail_bytes=24, patience=patience)
    with World(
        ChaosFabric(env, Chaos.draw(day.seed)),
        _LAYOUT,
        model,
        prefiller=side,
        decoder=side,
        chunk_tokens=8,
        fence_s=6 * unit_s,
        watch=told_word,
        # A request may meet many that die, on a day when everybody does: it is tried again.
        decoder_options={"imms": range(1, 200), "attempts_max": 12},
        scheduler=Scheduler(wait_s=30 * unit_s, cool_s=3 * unit_s, attempts_max=12),
    ) as world:
        world.run(_play(day, world, report))
        report.violations += model.violations
        for member in world.everybody:
            report.violations += member_flaws(member)
    report.checked = model.checked
    for done in report.completions:
        report.retried += done.attempts > 1
        if not done.ok:
            report.violations.append(f"{done.request} was lost: {done.reason}")
    if len(report.completions) != day.requests:
        report.violations.append(f"{len(report.completions)} of {day.requests} requests ended")
    report.simulated_s = env.now / 1e12
    report.cpu_s = time.process_time() - started_s
    return report


async def _play(day: Day, world: World, report: DayReport) -> None:
    dice = random.Random(f"kvcache day {day.seed}")
    for index in range(day.prefillers):
        world.add_prefiller(f"p{index}", dice.choice(_TP))
    for index in range(day.decoders):
        world.add_decoder(f"d{index}", dice.choice(_TP))
    events = [(dice.uniform(0, day.seconds), index, True) for index in range(day.requests)]
    events += [(dice.uniform(0, day.seconds), index, False) for index in range(day.changes)]
    tasks = []
    now_s = 0.0
    for at_s, index, is_request in sorted(events):
        await asyncio.sleep(at_s - now_s)
        now_s = at_s
        if is_request:
            work = _client(world, _request(index, dice), report)
        else:
            work = _change(world, index, dice, report)
        tasks.append(asyncio.create_task(work))
    await asyncio.gather(*tasks)
    await world.settled()
    for prefiller in world.alive(Prefiller):
        await prefiller.leave()


def _request(index: int, dice: random.Random) -> Request:
    ntokens = dice.randint(1, 24)
    ids = np.array([dice.randrange(1000) for _ in range(ntokens)], np.int32)
    return Request(f"r{index}", ntokens, ids)


async def _client(world: World, request: Request, report: DayReport) -> None:
    report.completions.append(await world.scheduler.submit(request))


async def _change(world: World, index: int, dice: random.Random, report: DayReport) -> None:
    """Somebody comes, goes or loses a NIC; of those who go, half do so without a word."""
    kind: type[Prefiller] | type[Decoder] = dice.choice((Prefiller, Decoder))
    stay = world.scheduler.prefillers if kind is Prefiller else world.scheduler.decoders
    whole = [
        (name, rank)
        for name in stay
        for rank in range(len(world.members[name].engines))
        if rank not in world.members[name].maimed
    ]
    what = dice.choice(("join", "join", "retire", "crash", "restart", "NIC death"))
    if what != "join" and (len(stay) <= 2 if what != "NIC death" else not whole):
        what = "join"
    report.happened[f"{what} of a {kind.__name__.lower()}"] += 1
    match what:
        case "join" if kind is Prefiller:
            world.add_prefiller(f"p-joined{index}", dice.choice(_TP))
        case "join":
            world.add_decoder(f"d-joined{index}", dice.choice(_TP))
        case "retire":
            await world.retire(dice.choice(stay))
        case "crash":
            world.crash(dice.choice(stay))
        case "NIC death":
            world.kill_nic(*dice.choice(whole), dice.randrange(2))
        case _:
            world.restart(dice.choice(stay))

"""Drawn scenarios on the chaos fabric, and the oracle that judges them.

Everything comes from one seed: the layout, both degrees of parallelism, requests, cancels, deaths,
joins and leaves, and the fabric's own malice. Rule: what the oracle holds against a run must follow
from the protocol; a failed request without a cause is a violation, one with a cause is not.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from tep import EngineOptions
from tep.apps.kvcache.blocks import Patience
from tep.apps.kvcache.decoder import Decoder
from tep.apps.kvcache.layout import KvBuffer, KvLayout
from tep.apps.kvcache.memory import SideOptions
from tep.apps.kvcache.model import Completion, Request
from tep.apps.kvcache.prefiller import Prefiller
from tep.apps.kvcache.scheduler import Scheduler
from tep.apps.kvcache.simulate import Member
from tep.sim import Chaos, ChaosFabric, Clog, FabricEnv, Mute, Pause, Slow, Swizzle
from tests.support.kv_check import CheckedModel, PaintedWorld

__all__ = ["EVENTS", "LAYOUTS", "Trial", "Verdict", "member_flaws", "run_trial"]

_US: Final = 1e-6

LAYOUTS: Final = (
    KvLayout("gqa-fused", 4, (KvBuffer("kv", 3, 4, 6, planes=2),)),
    KvLayout("gqa-split", 2, (KvBuffer("k", 3, 4, 5), KvBuffer("v", 3, 4, 5))),
    KvLayout("mla", 4, (KvBuffer("c", 4, 1, 9),)),
    KvLayout("draft", 3, (KvBuffer("kv", 4, 4, 4), KvBuffer("draft", 1, 4, 3, first_layer=3))),
)
"""Small ones of every kind: fused and split planes, a compressed cache, a second model's buffer."""

EVENTS: Final = (
    "none",
    "kill_nic",
    "revoke",
    "slow",
    "clog",
    "mute",
    "swizzle",
    "pause",
    "crash",
    "restart",
    "retire",
    "join",
)
"""The events that befall an instance, or one of its NICs; "join": a new pair comes."""

_BRIEF: Final = frozenset({"none", "slow", "pause", "restart", "join"})
"""After these everybody is there again, or has never been away for long."""

_LASTS: Final = (300_000, 2_000_000, 8_000_000, 100_000_000, None)
"""ps; None = for good. A choice, around the time that a row takes."""

_REST_S: Final = 60.0
"""The longest time until everything is at rest: an error of the fabric comes after up to 0.5 s, and
messages are sent, and peers asked about rows, several times before they are given up.
"""

_LAME_S: Final = 3.0
"""After so long who was struck and cannot be reached is put down; nobody need wait for him."""

_DEGREES: Final = ((1, 1), (2, 1), (1, 2), (4, 2), (2, 8), (8, 4), (2, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One scenario.

    Attributes:
        seed: of all that is not written here, and of the fabric.
        layout: index in LAYOUTS.
        prefill_tp, decode_tp: ranks of the two sides.
        prefillers, decoders: how many there are at the start.
        requests: how many.
        npages: pages of every cache.
        imms: immediates of each decoder; few, so that they come round.
        cancels: share of the requests that their client gives up.
        event: what happens: one of EVENTS.
        event_us: when.
        more: further events, drawn, each after the one before.
        harm: the fabric loses messages, overruns queues, and lets failed rows land late.
        impatient: peers count as silent after a time in which a paused worker may say nothing.
        chaos: the fabric's knobs; None = drawn from the seed.
    """

    seed: int = 0
    layout: int = 0
    prefill_tp: int = 1
    decode_tp: int = 1
    prefillers: int = 2
    decoders: int = 2
    requests: int = 6
    npages: int = 14
    imms: int = 12
    cancels: float = 0.0
    event: str = "none"
    event_us: float = 60.0
    more: int = 0
    harm: bool = False
    impatient: bool = False
    chaos: Chaos | None = None

    @classmethod
    def draw(cls, seed: int, **fixed: Any) -> Trial:
        """Draw a scenario; `fixed` fields are not drawn."""
        dice = random.Random(f"kvcache trial {seed}")
        prefill_tp, decode_tp = dice.choice(_DEGREES)
        drawn: dict[str, Any] = {
            "seed": seed,
            "layout": dice.randrange(len(LAYOUTS)),
            "prefill_tp": prefill_tp,
            "decode_tp": decode_tp,
            "prefillers": dice.choice((1, 2, 2, 3)),
            "decoders": dice.choice((1, 2)),
            "requests": dice.choice((3, 6, 10)),
            "npages": dice.choice((12, 14, 30)),
            "imms": dice.choice((12, 40, 1000)),
            "cancels": dice.choice((0.0, 0.0, 0.3)),
            "event": dice.choice(("none", *EVENTS)),
            "event_us": dice.uniform(1.0, 250.0),
            "impatient": dice.random() < 0.25,
            "more": dice.choice((0, 0, 0, 1, 3)),
            "harm": dice.random() < 0.3,
        }
        return cls(**(drawn | fixed))


@dataclass(slots=True)
class Verdict:
    """The outcome of a trial.

    Attributes:
        violations: what must not be, in words; empty if all is well.
        completions: of every request that its client did not give up.
        cancelled: requests that were given up before they ended.
        checked: pages whose bytes were compared.
        struck: (event, instance) pairs, without those that hit nobody.
        now_us: simulated time at the end.
    """

    violations: list[str] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    cancelled: int = 0
    checked: int = 0
    struck: list[tuple[str, str]] = field(default_factory=list)
    now_us: float = 0.0


def run_trial(trial: Trial, change: Callable[[PaintedWorld], object] | None = None) -> Verdict:
    """Run one scenario and judge it.

    Args:
        trial: the scenario.
        change: called with the world before anybody joins, e.g. to break something on purpose.
    """
    env = FabricEnv()
    fabric = ChaosFabric(env, trial.chaos or Chaos.draw(trial.seed, harm=trial.harm))
    verdict = Verdict()
    unit_s = (400 if trial.impatient else 50_000) * _US  # workers may pause for 3 ms, many times
    patience = Patience(
        beat_s=unit_s / 20,
        silent_s=unit_s,
        cancel_s=unit_s / 4,
        request_s=unit_s * 20,
        linger_s=max(unit_s, 10_000 * _US),  # longer than a clog that ends, or a worker's pause
    )
    side = SideOptions(npages=trial.npages, tail_slots=4, tail_bytes=24, patience=patience)
    layout = LAYOUTS[trial.layout]
    model = CheckedModel(lambda tokens: tokens * 0.5 * _US, decode_s=5 * _US, layout=layout)
    with PaintedWorld(
        fabric,
        model,
        side,
        fence_s=1.5 * unit_s,
        imms=range(1, 1 + trial.imms),
        scheduler=Scheduler(wait_s=20 * unit_s, cool_s=unit_s),
        options=EngineOptions(probe_first_s=50 * _US, probe_max_s=400 * _US),
    ) as world:
        if change is not None:
            change(world)
        world.run(_play(trial, world, verdict))
        _judge(trial, world, model, verdict)
    verdict.checked = model.checked
    verdict.now_us = env.now / 1e6
    return verdict


async def _play(trial: Trial, world: PaintedWorld, verdict: Verdict) -> None:
    dice = random.Random(f"kvcache play {trial.seed}")
    for index in range(trial.prefillers):
        world.add_prefiller(f"p{index}", trial.prefill_tp)
    for index in range(trial.decoders):
        world.add_decoder(f"d{index}", trial.decode_tp)
    requests = _requests(trial, dice)
    clients = [
        asyncio.create_task(_client(world, request, dice.uniform(0, 200) * _US, verdict))
        for request in requests
    ]
    for client in clients:
        if dice.random() < trial.cancels:
            asyncio.get_running_loop().call_later(dice.uniform(0, 300) * _US, client.cancel)
    events = asyncio.create_task(_events(trial, world, dice, verdict))
    await asyncio.gather(*clients, return_exceptions=True)
    verdict.cancelled = sum(client.cancelled() for client in clients)
    for client in clients:
        if not client.cancelled() and (error := client.exception()) is not None:
            verdict.violations.append(f"a client got {type(error).__name__}: {error}")
    await events
    await _wind_down(world, verdict)


def _requests(trial: Trial, dice: random.Random) -> list[Request]:
    page_tokens = LAYOUTS[trial.layout].page_tokens
    common = np.array([dice.randrange(1000) for _ in range(5 * page_tokens)], np.int32)
    found = []
    for index in range(trial.requests):
        ntokens = dice.randint(1, 5 * page_tokens)
        ids = np.array([dice.randrange(1000) for _ in range(ntokens)], np.int32)
        if dice.random() < 0.5:
            alike = dice.randint(0, ntokens)
            ids[:alike] = common[:alike]
        found.append(Request(f"r{index}", ntokens, ids))
    return found


async def _client(world: PaintedWorld, request: Request, delay_s: float, verdict: Verdict) -> None:
    await asyncio.sleep(delay_s)
    verdict.completions.append(await world.scheduler.submit(request))


async def _events(trial: Trial, world: PaintedWorld, dice: random.Random, verdict: Verdict) -> None:
    await asyncio.sleep(trial.event_us * _US)
    await _event(trial, trial.event, world, dice, verdict)
    for _ in range(trial.more):
        await asyncio.sleep(dice.uniform(0, 100) * _US)
        await _event(trial, dice.choice(EVENTS), world, dice, verdict)


async def _event(
    trial: Trial, event: str, world: PaintedWorld, dice: random.Random, verdict: Verdict
) -> None:
    """Let it happen to somebody who is there."""
    there = sorted(name for name, member in world.members.items() if member.alive)
    if not there:
        return
    name = dice.choice(there)
    engine = dice.choice(world.members[name].engines).name
    nic, lasts = dice.randrange(2), dice.choice(_LASTS)
    if event not in {"none", "join"}:
        verdict.struck.append((event, name))
    match event:
        case "kill_nic":
            world.fabric.kill_nic(engine, nic)
        case "revoke":
            world.fabric.revoke(engine, dice.choice((None, 0, 1)))
        case "slow":
            world.fabric.inflict(Slow(engine, nic, dice.randint(3, 30), lasts))
        case "clog":
            world.fabric.inflict(Clog(engine, nic, lasts))
        case "mute":
            world.fabric.inflict(Mute(engine, nic, lasts))
        case "swizzle":
            world.fabric.inflict(Swizzle(engine, 2, lasts or 50_000_000, dice.randrange(100)))
        case "pause":
            world.fabric.inflict(Pause(engine, lasts or 50_000_000))
        case "crash":
            world.crash(name)
        case "restart":
            world.restart(name)
        case "retire":
            try:
                async with asyncio.timeout(_LAME_S):
                    await world.retire(name)
            except TimeoutError:  # of those that it waits for, some cannot be reached any more
                world.crash(name)
        case "join" if "p9" not in world.members:
            world.add_prefiller("p9", trial.prefill_tp)
            world.add_decoder("d9", trial.decode_tp)
        case _:
            pass


async def _wind_down(world: PaintedWorld, verdict: Verdict) -> None:
    """Bring everything to rest, as an operator would: who cannot be reached is put down.

    The control path of some may be gone for good, with their first NIC: they can neither confirm
    nor hear.
    """
    struck = [name for event, name in verdict.struck if event not in _BRIEF]
    struck += [fault.node.rpartition(".")[0] for fault in world.fabric.happened]
    while True:
        lame = [one for one in struck if one in world.members and world.members[one].alive]
        try:
            async with asyncio.timeout(_LAME_S if lame else _REST_S):
                await world.settled()
                break
        except TimeoutError:
            if not lame:
                verdict.violations.append("ends are not confirmed although all can be reached")
                break
            world.crash(lame[0])
    for prefiller in world.alive(Prefiller):
        try:
            async with asyncio.timeout(_REST_S):
                await prefiller.leave()
        except TimeoutError:
            if prefiller.name not in struck:
                verdict.violations.append(f"{prefiller.name} still has {prefiller.njobs} attempts")
            world.crash(prefiller.name)
    await asyncio.sleep(1_000 * _US)  # what is on the wire lands


def _judge(trial: Trial, world: PaintedWorld, model: CheckedModel, verdict: Verdict) -> None:
    found = verdict.violations
    found += model.violations + world.violations
    kinds = {"p": trial.prefillers, "d": trial.decoders}
    spared = not verdict.struck or verdict.struck[0][0] in _BRIEF
    spared = spared or kinds[verdict.struck[0][1][0]] > 1
    harmless = spared and not (trial.impatient or trial.harm or len(verdict.struck) > 1)
    for done in verdict.completions:
        if not done.ok and harmless:
            found.append(f"{done.request} failed without a cause: {done.reason}")
        if not done.ok and not done.reason:
            found.append(f"{done.request} failed without a reason")
    if len(verdict.completions) + verdict.cancelled != trial.requests:
        found.append(
            f"{trial.requests} requests, {len(verdict.completions)} completions and "
            f"{verdict.cancelled} cancelled"
        )
    for member in world.everybody:
        found += member_flaws(world, member)


def member_flaws(world: PaintedWorld, member: Member) -> list[str]:
    """The faults of one incarnation of an instance, at rest if it lives."""
    found = [
        f"{engine.name}: {error}" for engine in member.engines for error in engine.callback_errors
    ]
    if member.alive:
        found += _leaks(member)
        world.paint(member).look(np.arange(member.side.pool.npages))
    return found + world.paint(member).violations


def _leaks(member: Member) -> list[str]:
    """The things that a living instance at rest holds, and must not."""
    side = member.side
    found: list[str] = []
    if isinstance(side, Decoder):
        for what, left in (
            ("attempts", len(side._open)),
            ("live immediates", sum(len(one.imms.live) for one in side.receivers)),
        ):
            if left:
                found.append(f"{side.name}: {left} {what} left")
    for what, pool in (("page", side.pool), ("tail slot", side.tails)):
        if pool.nfree != pool.npages:
            found.append(f"{side.name}: {pool.npages - pool.nfree} {what}s leaked")
    return found

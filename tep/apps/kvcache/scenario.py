"""Clusters on the chaos fabric that a seed draws: members come, go, crash and lose NICs under load.

Each answer is compared with the model's own in one place, and no request may be lost.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from tep.apps.kvcache.heartbeat import Patience
from tep.apps.kvcache.simulate import Load, Plant, Report, simulate
from tep.apps.kvcache.world import World
from tep.sim import Chaos

__all__ = ["EVENTS", "Scenario", "draw_day", "draw_scenario", "strike"]

EVENTS: Final = ("none", "join", "retire", "crash", "restart", "NIC death")
"""The events; "join": one more instance comes."""

_DEGREES: Final = ((1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (2, 2))
_DAY_S: Final = 86_400.0
_LAYER_S: Final = 20.0  # of a day: changes shall meet requests under way


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run.

    Attributes:
        plant, load: the cluster and its requests.
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
        kind, found = strike(world, what, dice)
        self.happened[kind] += 1
        return found


def draw_scenario(seed: int, **fixed: Any) -> Scenario:
    """Draw a small cluster and one event.

    Args:
        seed: of everything drawn.
        fixed: `event`, or fields of Plant, that are not drawn.
    """
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
    return Scenario(plant=Plant(fabric="chaos", **drawn), load=load, events=((at_s, event),))


def draw_day(seed: int, requests: int, changes: int) -> Scenario:
    """Draw a day on which members come and go; a request takes minutes."""
    dice = random.Random(f"kvcache day {seed}")
    patience = Patience(
        beat_s=_LAYER_S,
        silent_s=4.5 * _LAYER_S,
        cancel_s=_LAYER_S,
        request_s=90 * _LAYER_S,
    )
    plant = Plant(
        prefillers=4,
        decoders=4,
        prefill_tp=2,
        decode_tp=1,
        fabric="chaos",
        layer_s=_LAYER_S,
        npages=64,
        attempts_max=12,  # a request may meet many that die, on a day when everybody does
        patience=patience,
    )
    load = Load(
        rate=requests / _DAY_S, duration_s=_DAY_S, ntokens=range(1, 25), max_tokens=4, seed=seed
    )
    kinds = ("join", "join", *EVENTS[2:])
    events = sorted((dice.uniform(0, _DAY_S), dice.choice(kinds)) for _ in range(changes))
    return Scenario(plant=plant, load=load, events=tuple(events))


def strike(world: World, what: str, dice: random.Random) -> tuple[str, Any]:
    """Let an event happen to somebody; where too few would be left, one more joins instead.

    Returns:
        The event and the kind of its member, in words; and what has to be awaited, or None.
    """
    prefills = dice.random() < 0.5
    kind, names = (
        ("prefiller", world.scheduler.prefillers)
        if prefills
        else ("decoder", world.scheduler.decoders)
    )
    add: Callable[[str, int], object] = world.add_prefiller if prefills else world.add_decoder
    whole = [
        (name, rank)
        for name in names
        for rank in range(len(world.members[name].engines))
        if rank not in world.members[name].maimed
    ]
    if what not in {"join", "none"} and (len(names) < 2 if what != "NIC death" else not whole):
        what = "join"
    found: Any = None
    match what:
        case "join":
            tp = len(world.members[names[0]].engines) if names else 1
            add(f"{kind[0]}-joined{len(world.members) + len(world.past)}", tp)
        case "retire":
            found = world.retire(dice.choice(names))
        case "crash":
            world.crash(dice.choice(names))
        case "restart":
            world.restart(dice.choice(names))
        case "NIC death":
            world.kill_nic(*dice.choice(whole), dice.randrange(2))
        case _:
            pass
    return f"{what} of a {kind}", found

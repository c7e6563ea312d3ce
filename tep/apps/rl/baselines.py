"""What others do with the same bytes on the same machines, simulated: rank 0, and broadcasts.

Both are given the best case: they send what is quantised already, compute costs nothing, transfers
follow each other without a pause, and the fan-out inside a replica is free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tep import Single, count_imms
from tep.apps.rl.fleet import Fleet
from tep.apps.rl.predict import Prediction
from tep.apps.rl.routes import Schedule
from tep.base.units import MiB

__all__ = ["Baseline", "broadcast_per_shard", "comparison", "gather_and_broadcast"]

_PIPELINE: Final = 16 * MiB
"""A ring passes on pieces of this size: long against a NIC's start-up, short against the whole."""

_SHORT, _LONG, _AHEAD = 8, 40, 3  # pieces simulated; under way to rank 0


@dataclass(frozen=True, slots=True)
class Baseline:
    """One way to update, and what it waits for.

    Attributes:
        name: in words.
        total_ms: for the whole model.
        busy: the link that is busy all the time, and what it carries.
        busy_bytes: over that link.
        note: how it was simulated.
    """

    name: str
    total_ms: float
    busy: str
    busy_bytes: int
    note: str


def gather_and_broadcast(
    schedule: Schedule, replicas: int, model_bytes: int, *, profile: str = "cx7_400"
) -> Baseline:
    """Everything goes to training rank 0, which broadcasts it to the first worker of each replica.

    Rank 0 passes on what it has while more comes in, and the broadcast is a chain, so that it sends
    one copy only. What the first workers then do inside their replica is not counted. Two lengths
    are simulated; the rest of the model is their slope.

    Args:
        schedule: for the numbers of ranks and workers.
        replicas: copies of the model in inference.
        model_bytes: of one copy, as inference holds it.
        profile: of the machines.
    """
    total_s = _by_slope(lambda pieces: _chain_s(schedule, replicas, pieces, profile), model_bytes)
    return Baseline(
        "gather to rank 0, broadcast",
        total_s * 1e3,
        "the NIC of training rank 0: every byte in and, meanwhile, out",
        model_bytes,
        f"{_LONG} pieces of {_PIPELINE // MiB} MiB simulated, the rest by slope; fan-out is free",
    )


def _by_slope(simulate: Callable[[int], float], model_bytes: int) -> float:
    """Seconds for a whole model, from two simulated numbers of pieces."""
    short_s, long_s = simulate(_SHORT), simulate(_LONG)
    slope_s = (long_s - short_s) / ((_LONG - _SHORT) * _PIPELINE)
    return short_s + slope_s * (model_bytes - _SHORT * _PIPELINE)


def _chain_s(schedule: Schedule, replicas: int, pieces: int, profile: str) -> float:
    """Simulated seconds until the first worker of the last replica has so many pieces."""
    ranks = schedule.ranks
    with Fleet(ranks, replicas, profile, region_bytes=pieces * _PIPELINE) as fleet:
        rows = count_imms(Single(_PIPELINE), *fleet.nics)
        senders = fleet.trains[1:] or fleet.trains

        def send(piece: int) -> None:
            """A rank in turn sends its piece to rank 0, which asks for a few ahead."""
            if piece >= pieces:
                return
            k, at = piece % len(senders), piece * _PIPELINE
            source = fleet.sources[k + 1 if len(senders) < ranks else k]
            senders[k].submit_single_write(
                _PIPELINE, (source, at), (fleet.staging[0], at), imm=piece
            )

        async def rank_0() -> None:
            for piece in range(pieces):
                at = piece * _PIPELINE
                await fleet.trains[0].expect_imm_count(piece, rows)
                send(piece + _AHEAD)
                fleet.trains[0].submit_single_write(
                    _PIPELINE, (fleet.sources[0], at), (fleet.targets[0], at), imm=piece
                )

        async def main() -> float:
            hops = [asyncio.ensure_future(_hop(fleet, k, pieces, rows)) for k in range(replicas)]
            for piece in range(_AHEAD):
                send(piece)
            await asyncio.gather(rank_0(), *hops)
            return asyncio.get_running_loop().time()

        return fleet.cluster.run(main())


async def _hop(fleet: Fleet, k: int, pieces: int, rows: int) -> None:
    """Worker k of a chain passes each piece on as soon as it has it."""
    engine = fleet.rollouts[k]
    for piece in range(pieces):
        await engine.expect_imm_count(piece, rows)
        if k + 1 < len(fleet.rollouts):
            at = piece * _PIPELINE
            where = ((fleet.relays[k], at), (fleet.targets[k + 1], at))
            engine.submit_single_write(_PIPELINE, *where, imm=piece)


def broadcast_per_shard(
    schedule: Schedule, model_bytes: int, *, profile: str = "cx7_400"
) -> Baseline:
    """Each shard's owner broadcasts it to all rollout workers over a ring, as NCCL does.

    A broadcast delivers every byte to every member of its communicator, whether it needs it or not,
    and collectives of one communicator run one after another.

    Two lengths are simulated over the whole ring; the rest of the model is their slope.
    """
    workers = len(schedule.receivers)
    total_s = _by_slope(lambda pieces: _ring_s(schedule, pieces, profile), model_bytes)
    return Baseline(
        "broadcast per shard (ring)",
        total_s * 1e3,
        f"the NICs of all {workers} rollout workers: each receives the whole model",
        model_bytes,
        f"{_LONG} pieces of {_PIPELINE // MiB} MiB over {workers} hops, the rest by slope",
    )


def _ring_s(schedule: Schedule, pieces: int, profile: str) -> float:
    """Simulated seconds until the last worker of the ring has so many pieces."""
    workers = len(schedule.receivers)
    with Fleet(1, workers, profile, region_bytes=pieces * _PIPELINE) as fleet:
        rows = count_imms(Single(_PIPELINE), *fleet.nics)

        async def main() -> float:
            hops = [asyncio.ensure_future(_hop(fleet, k, pieces, rows)) for k in range(workers)]
            for piece in range(pieces):
                at = piece * _PIPELINE
                where = ((fleet.sources[0], at), (fleet.targets[0], at))
                fleet.trains[0].submit_single_write(_PIPELINE, *where, imm=piece)
            await asyncio.gather(*hops)
            return asyncio.get_running_loop().time()

        return fleet.cluster.run(main())


def comparison(ours: Prediction, others: list[Baseline]) -> list[dict[str, object]]:
    """One row a way: time, factor, and the link that is busy."""
    rows: list[dict[str, object]] = [
        {
            "way": "static schedule of one-sided writes",
            "ms": round(ours.total_ms),
            "factor": "1.0",
            "busy": f"{ours.links[0].name} ({ours.links[0].fraction:.0%})",
            "GB over it": round(ours.links[0].nbytes / 1e9, 1),
            "how": "simulated whole, with published compute",
        }
    ]
    rows += (
        {
            "way": other.name,
            "ms": round(other.total_ms),
            "factor": f"{other.total_ms / ours.total_ms:.1f}",
            "busy": other.busy,
            "GB over it": round(other.busy_bytes / 1e9, 1),
            "how": other.note,
        }
        for other in others
    )
    return rows

"""What others do with the same bytes on the same machines, simulated: rank 0, and broadcasts.

Both are given the best case: they send what is quantised already, compute costs nothing, and the
fan-out inside a replica is free.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from tep.api import Single
from tep.apps.rl.fleet import Fleet
from tep.apps.rl.predict import Prediction
from tep.apps.rl.routes import Schedule
from tep.plan import count_imms
from tep.units import MiB

__all__ = ["Baseline", "broadcast_per_shard", "comparison", "gather_and_broadcast"]

_PIPELINE: Final = 16 * MiB
"""A ring passes on pieces of this size: long against a NIC's start-up, short against the whole."""


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
    """Everything goes to training rank 0, which sends it to the first worker of each replica.

    What those then do inside their replica is not counted.

    Args:
        schedule: for the numbers of ranks and workers.
        replicas: copies of the model in inference.
        model_bytes: of one copy, as inference holds it.
        profile: of the machines.
    """
    short, long = model_bytes // 512, model_bytes // 128
    times = {n: _rank_zero_s(schedule, replicas, n, profile) for n in (short, long)}
    slope_s = (times[long] - times[short]) / (long - short)
    total_s = times[short] + slope_s * (model_bytes - short)
    return Baseline(
        "gather to rank 0, broadcast",
        total_s * 1e3,
        f"the NICs of training rank 0: all bytes in, {replicas} copies out",
        model_bytes * (1 + replicas),
        "1/512 and 1/128 of the model simulated, the rest by slope; fan-out in replicas is free",
    )


def _rank_zero_s(schedule: Schedule, replicas: int, nbytes: int, profile: str) -> float:
    """Simulated seconds to gather and to send on so many bytes."""
    ranks, workers = schedule.ranks, len(schedule.receivers)
    share = nbytes // ranks
    with Fleet(ranks, workers, profile, region_bytes=nbytes) as fleet:

        async def main() -> float:
            sent = [
                fleet.trains[rank].submit_single_write(
                    share, (fleet.sources[rank], 0), (fleet.staging[0], rank * share)
                )
                for rank in range(1, ranks)
            ]
            for transfer in sent:
                await transfer
            firsts = [fleet.targets[k * (workers // replicas)] for k in range(replicas)]
            sent = [
                fleet.trains[0].submit_single_write(nbytes, (fleet.sources[0], 0), (first, 0))
                for first in firsts
            ]
            for transfer in sent:
                await transfer
            return asyncio.get_running_loop().time()

        return fleet.cluster.run(main())


def broadcast_per_shard(
    schedule: Schedule, model_bytes: int, *, profile: str = "cx7_400"
) -> Baseline:
    """Each shard's owner broadcasts it to all rollout workers over a ring, as NCCL does.

    A broadcast delivers every byte to every member of its communicator, whether it needs it or not,
    and collectives of one communicator run one after another.

    Two lengths are simulated over the whole ring; the rest of the model is their slope.
    """
    workers = len(schedule.receivers)
    short, long = 8, 40
    times = {n: _ring_s(schedule, n, profile) for n in (short, long)}
    slope_s = (times[long] - times[short]) / ((long - short) * _PIPELINE)
    total_s = times[short] + slope_s * (model_bytes - short * _PIPELINE)
    return Baseline(
        "broadcast per shard (ring)",
        total_s * 1e3,
        f"the NICs of all {workers} rollout workers: each receives the whole model",
        model_bytes,
        f"{long} pieces of {_PIPELINE // MiB} MiB simulated over {workers} hops; the rest by slope",
    )


def _ring_s(schedule: Schedule, pieces: int, profile: str) -> float:
    """Simulated seconds until the last worker of the ring has so many pieces."""
    workers = len(schedule.receivers)
    with Fleet(1, workers, profile, region_bytes=pieces * _PIPELINE) as fleet:
        rows = count_imms(Single(_PIPELINE), fleet.nics, fleet.nics)

        async def hop(k: int) -> None:
            """Worker k passes each piece on as soon as it has it."""
            engine = fleet.rollouts[k]
            for piece in range(pieces):
                await engine.expect_imm_count(piece, rows)
                if k + 1 < workers:
                    where = (
                        (fleet.relays[k], piece * _PIPELINE),
                        (fleet.targets[k + 1], piece * _PIPELINE),
                    )
                    engine.submit_single_write(_PIPELINE, *where, imm=piece)

        async def main() -> float:
            hops = [asyncio.ensure_future(hop(k)) for k in range(workers)]
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

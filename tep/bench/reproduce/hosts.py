"""All-to-all of two hosts by a published benchmark's loop, with engines in the place of its verbs.

Each GPU writes messages of one size in an order that all have: by GPU of the other host in turn, or
all to the one of its own number ("rail"). Its NICs take turns, `_STRIPE` messages to each GPU, and
it does not pass over a NIC that has `_WINDOW` in flight. So with eight GPUs in turn half of a
host's NICs wait: that is the benchmark's own doing, and not the network's.

Source: UCCL, ep/bench/alltoall, commit 98831013: test_alltoall.cpp and test_alltoall_rail.cpp.
"""

from __future__ import annotations

import asyncio
from typing import Final

import tep
from tep import sim
from tep.base.units import GiB

__all__ = ["alltoall_gib_s"]

_GPUS: Final = 8
_STRIPE: Final = 64
_WINDOW: Final = 256
_ROUNDS: Final = 1000
"""Rounds of eight messages; a round is one scatter, so that a window opens a round at a time."""


async def _after(write: tep.Transfer, window: asyncio.Semaphore) -> None:
    await write
    window.release()


def alltoall_gib_s(machine: sim.Profile, nbytes: int, *, rail: bool, seed: int = 0) -> float:
    """Return what each GPU of one host sends, GiB/s; the other host's traffic is the same."""
    with sim.Cluster(2 * _GPUS, profile=machine, seed=seed, move_bytes=False) as cluster:
        regions = [engine.reg_mr((1 << 40, _GPUS * nbytes, "cpu")) for engine in cluster.engines]
        nics = len(cluster.engines[0].main_address.domains)
        stripe = _STRIPE // _GPUS if rail else _STRIPE

        async def one(gpu: int) -> None:
            peers = [_GPUS + gpu] * _GPUS if rail else range(_GPUS, 2 * _GPUS)
            dsts = [
                tep.ScatterDst(nbytes, 0, (regions[peer][1], slot * nbytes))
                for slot, peer in enumerate(peers)
            ]
            windows = [asyncio.Semaphore(_WINDOW // _GPUS) for _ in range(nics)]
            sent = []
            for turn in range(_ROUNDS):
                nic = turn // stripe % nics
                await windows[nic].acquire()
                way = tep.Routing(domain=nic)
                write = cluster.engines[gpu].submit_scatter(regions[gpu][0], dsts, routing=way)
                sent.append(asyncio.ensure_future(_after(write, windows[nic])))
            await asyncio.gather(*sent)

        async def main() -> None:
            await asyncio.gather(*map(one, range(_GPUS)))

        cluster.run(main())
        return _ROUNDS * _GPUS * nbytes / cluster.now_us * 1e6 / GiB

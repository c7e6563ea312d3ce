"""One-sided writes over memory that two hosts share by CXL, beside the same writes over NICs.

Idea of cMPI: MPI's messages become copies into a pool of CXL memory that all hosts map. No hardware
keeps their caches coherent with it, so a sender flushes what it wrote before it sets a flag, and a
receiver drops its own stale lines before it reads.

Measures: half a round trip (write and counted immediate) by size, over kernel TCP, ConnectX-7, EFA
and the pool, with and without coherence. Published (arXiv 2510.05476, abstract): the pool's
latency is 7.2 to 8.1 times lower than TCP's; up to 49 times lower for small messages of MPI, over
MPI's own stack on TCP, which is not modelled here. Leaves out: contention in the pool, atomics,
MPI's matching. Guessed: a load of the pool takes 600 ns; a x16 link of PCIe gen 5 carries 504 Gb/s,
half of it one writer's stores; 48 flushes are under way at a time; TCP takes 7 us of both
kernels and 2 us of wire, at 100 Gb/s.

    python notebooks/examples/cxl_shared_memory.py [--trips N]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys

import tep
from tep.sim import Profile, load_profile

SIZES = (8, 4096, 65536, 1 << 20, 32 << 20)
NS, US = 1000, 10**6  # picoseconds
LINE_BYTES, POOL_S, FLUSHES = 64, 600e-9, 48
PUBLISHED = (7.2, 8.1)


def machine(name: str, gbps: float, side_ps: int, latency_ps: int) -> Profile:
    """A profile without a NIC's own times: each side's work, the way, and a rate."""
    bps = round(gbps * 1e9)
    return dataclasses.replace(
        load_profile("cx7_400"),
        name=name,
        step_delay_ps=side_ps,
        post_first_ps=side_ps,
        post_next_ps=side_ps,
        link_bps=2 * bps,
        wire_bps=bps,
        op_ps=0,
        dma_bps=2 * bps,
        fill_bytes=0,  # nothing is gathered before the first byte leaves
        latency_ps=latency_ps,
        receive_ps=0,
        ack_ps=0,
    )


MACHINES: dict[str, Profile | str] = {
    "TCP": machine("tcp", 100, 7 * US // 2, 2 * US),
    "EFA, 2 NICs": "efa_2x200",
    "ConnectX-7": "cx7_400",
    "CXL pool": machine("cxl_pool", 252, 50 * NS, 600 * NS),
}


def coherence_s(nbytes: int) -> float:
    """Write back all lines and wait; then, over there, drop them before they are read."""
    return 2 * POOL_S * max(1.0, nbytes / LINE_BYTES / FLUSHES)


def half_trip_us(profile: Profile | str, nbytes: int, trips: int, *, flush: bool = False) -> float:
    """Microseconds from a submit to the count at the other side, the mean of both ways."""
    with tep.sim.Cluster(2, profile=profile, move_bytes=False) as cluster:
        memory = (1 << 40, nbytes, "cpu")
        ends = [engine.reg_mr(memory) for engine in cluster.engines]
        nics = len(cluster.engines[0].main_address.domains)
        count = tep.count_imms(tep.Single(nbytes), nics, nics)

        async def main() -> float:
            started_us = cluster.now_us
            for trip in range(2 * trips):
                here, there = trip % 2, 1 - trip % 2
                source, target = cluster.engines[here], cluster.engines[there]
                got = target.expect_imm_count(1, count)
                if flush:
                    await asyncio.sleep(coherence_s(nbytes))
                source.submit_single_write(nbytes, (ends[here][0], 0), (ends[there][1], 0), imm=1)
                await got
            return (cluster.now_us - started_us) / (2 * trips)

        return cluster.run(main())


def measure(trips: int = 4) -> dict[str, dict[int, float]]:
    """Machine -> size -> microseconds."""
    found = {
        name: {nbytes: half_trip_us(profile, nbytes, trips) for nbytes in SIZES}
        for name, profile in MACHINES.items()
    }
    pool = MACHINES["CXL pool"]
    kept = {nbytes: half_trip_us(pool, nbytes, trips, flush=True) for nbytes in SIZES}
    return found | {"and coherent": kept}


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trips", type=int, default=4, help="round trips of each size")
    args = parser.parse_args(argv)
    found = measure(args.trips)
    print(f"{'half a round trip, us':>22}" + "".join(f"{name:>14}" for name in found))
    for nbytes in SIZES:
        row = "".join(f"{times[nbytes]:14.2f}" for times in found.values())
        print(f"{nbytes:20,} B{row}")
    times = found["TCP"][8] / found["and coherent"][8]
    print(f"8 B: TCP takes {times:.1f} times as long; published: {PUBLISHED[0]} to {PUBLISHED[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One-sided writes over memory that two hosts share by CXL, beside the same writes over NICs.

Idea of cMPI: MPI's one-sided and two-sided messages over a pool of CXL memory.

Measures: half a round trip (write and counted immediate) by size, over ConnectX-7, EFA, and a
memory pool that both hosts map. Leaves out: how hosts keep their caches coherent with the pool
(flushes cost CPU, and none is charged here), contention in the pool, and atomics.
The pool's numbers are guesses: a load of pooled CXL memory takes some 600 ns, a x16 link of
PCIe gen 5 carries 504 Gb/s, and half of that is left for one writer's stores.

    python notebooks/examples/cxl_shared_memory.py [--trips N]
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

import tep
from tep.sim import Profile, load_profile

SIZES = (8, 4096, 65536, 1 << 20, 32 << 20)
NS = 1000  # picoseconds


def cxl_pool() -> Profile:
    """A profile without a NIC: a store is its own post, and its latency is the pool's."""
    return dataclasses.replace(
        load_profile("cx7_400"),
        name="cxl_pool",
        summary="memory of a CXL pool that two hosts map; guessed",
        step_delay_ps=100 * NS,  # the reader polls a word of the pool
        post_first_ps=0,
        post_next_ps=0,
        link_bps=504_000_000_000,
        wire_bps=252_000_000_000,
        op_ps=0,
        dma_bps=252_000_000_000,
        fill_bytes=0,  # nothing is gathered before the first byte leaves
        latency_ps=600 * NS,
        receive_ps=0,
        ack_ps=0,
    )


def half_trip_us(profile: Profile | str, nbytes: int, trips: int) -> float:
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
                source.submit_single_write(nbytes, (ends[here][0], 0), (ends[there][1], 0), imm=1)
                await got
            return (cluster.now_us - started_us) / (2 * trips)

        return cluster.run(main())


def measure(trips: int = 4) -> dict[str, dict[int, float]]:
    """Machine -> size -> microseconds."""
    machines: dict[str, Profile | str] = {
        "ConnectX-7": "cx7_400",
        "EFA, 2 NICs": "efa_2x200",
        "CXL pool": cxl_pool(),
    }
    return {
        name: {nbytes: half_trip_us(profile, nbytes, trips) for nbytes in SIZES}
        for name, profile in machines.items()
    }


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
    return 0


if __name__ == "__main__":
    sys.exit(main())

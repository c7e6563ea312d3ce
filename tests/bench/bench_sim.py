"""Measure the speed of the simulator on the timing fabric: CPU time, all engines included."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from tep.base.api import Pages, ScatterDst
from tep.core.handles import Handle
from tep.sim import Cluster
from tests.bench.figures import Figure, cpu_ns, show_figures

_RANKS: Final = 64
_NODE: Final = 8


def simulator_figures(rounds: int = 5) -> Iterator[Figure]:
    """Measure, one figure at a time; `rounds` rounds each."""
    for profile in ("cx7_400", "efa_2x200"):
        yield _paged(profile, rounds)
    yield _all_to_all(rounds)


def _paged(profile: str, rounds: int, npages: int = 16384, page_bytes: int = 65536) -> Figure:
    """Measure CPU of one paged write of 1 GiB on the timing fabric, with both engines, no bytes
    moved.
    """
    rng = np.random.default_rng(1)
    src, dst = rng.permutation(npages), rng.permutation(npages)
    with Cluster(nodes=2, profile=profile, move_bytes=False) as cluster:
        a, b = cluster.engines
        memory = (1 << 40, npages * page_bytes, "cpu")
        (mr, _), (_, desc) = a.reg_mr(memory), b.reg_mr(memory)

        def one() -> None:
            got = b.expect_imm_count(7, npages)
            sent = a.submit_paged_writes(page_bytes, (mr, Pages(src)), (desc, Pages(dst)), imm=7)
            got.wait()
            sent.wait()

        median, best = cpu_ns(one, rounds * 3)
    return Figure(
        what=f"paged write of {npages} pages on the timing fabric, {profile}",
        value=median / 1e6,
        best=best / 1e6,
        unit="ms",
        aim=8.0,
    )


def _all_to_all(rounds: int) -> Figure:
    """Measure CPU of 64 ranks writing to 56 peers each on other nodes of 8, a dispatch's traffic,
    all engines included.
    """
    with Cluster(nodes=_RANKS, profile="cx7_400", move_bytes=False) as cluster:
        memory = (1 << 40, 1 << 30, "cpu")
        regions = [engine.reg_mr(memory) for engine in cluster.engines]
        peers = [
            [p % _RANKS for p in range(r + 1, r + _RANKS) if p % _RANKS // _NODE != r // _NODE]
            for r in range(_RANKS)
        ]

        def one() -> None:
            handles: list[Handle] = []
            for rank, engine in enumerate(cluster.engines):
                handles.append(engine.expect_imm_count(9, len(peers[rank])))
                dsts = [ScatterDst(118_528, 0, (regions[p][1], 0)) for p in peers[rank]]
                handles.append(engine.submit_scatter(regions[rank][0], dsts, imm=9))
            for handle in handles:
                handle.wait()

        one()
        median, best = cpu_ns(one, rounds)
    return Figure(
        what=f"all-to-all of {_RANKS} ranks x {len(peers[0])} peers on the timing fabric",
        value=median / 1e9,
        best=best / 1e9,
        unit="s",
        aim=2.0,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each figure, 3 or more")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    figures = simulator_figures(args.rounds)
    show_figures("python -m tests.bench.bench_sim", figures, json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

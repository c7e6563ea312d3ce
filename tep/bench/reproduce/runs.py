"""A value for each point of a published table: table name -> a function of the point's keys.

Point to point, scatter, MoE, KvCache and the waiting of RL run through the engines on the timing
fabric. Kernels, the watched word and RL's operations are inputs, given back. The functions here
have no number of a machine. `None` if nothing is simulated.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Final

import numpy as np

import tep
from tep import sim
from tep.apps.kvcache.simulate import Report, first_token
from tep.apps.kvcache.ttft import OVERHEAD, PUBLISHED
from tep.apps.moe.kernels import load_gpu
from tep.apps.moe.predict import Prediction, Workload, per_token, predict
from tep.apps.rl import study
from tep.apps.rl.predict import Prediction as Update
from tep.base.units import PS_PER_US, KiB
from tep.bench.reproduce.hosts import alltoall_gbytes_s
from tep.bench.reproduce.tables import NIC_PROFILES, Point, Table, load_table

__all__ = [
    "Outcome", "layer_us", "paged_us", "pair", "post_all_us", "reproduce", "reproduce_at",
    "single_us",
]  # fmt: skip

_PAGES: Final = 16_384


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """A point with its simulated value.

    Attributes:
        table, point: the published number.
        simulated: in the table's unit; None: not modelled.
        left_out: the simulated value without this point, see residue.leave_one_out; None: not
            asked for, or unknown.
    """

    table: Table
    point: Point
    simulated: float | None
    left_out: float | None = None

    @property
    def error(self) -> float | None:
        """See Table.error."""
        if self.simulated is None:
            return None
        return self.table.error(self.point, self.simulated)

    @property
    def holds(self) -> bool:
        """True if the error is within the point's tolerance, or there is none."""
        error, tolerance = self.error, self.point.tolerance
        return error is None or tolerance is None or abs(error) <= tolerance + 1e-9


def reproduce(name: str) -> Iterator[Outcome]:
    """Simulate a table, point by point, in order.

    Raises:
        UsageError: there is no such table.
    """
    table = load_table(name)
    for point in table.points:
        modelled = point.kind != "not modelled" or name in _TRIED
        yield Outcome(table, point, _RUNS[name](point.keys) if modelled else None)


def reproduce_at(name: str, **keys: str) -> float:
    """Simulate a point that need not be published; the keys are the table's columns."""
    return _RUNS[name](keys)


# ---------------------------------------------------------------- point to point


def pair(
    profile: str | sim.Profile, nbytes: int, seed: int = 0
) -> tuple[sim.Cluster, tep.MrHandle, tep.MrDesc]:
    """Make two engines with a region each, without memory behind them."""
    cluster = sim.Cluster(profile=profile, seed=seed, move_bytes=False)
    a, b = cluster.engines
    mr, _ = a.reg_mr((1 << 40, nbytes, "cpu"))
    _, desc = b.reg_mr((1 << 41, nbytes, "cpu"))
    return cluster, mr, desc


def single_us(profile: str | sim.Profile, nbytes: int, seed: int = 0) -> float:
    """Measure submit to the sender's done, one write in flight at a time; the second of two."""
    cluster, mr, desc = pair(profile, nbytes, seed)
    with cluster:
        start_us = 0.0
        for _ in range(2):
            start_us = cluster.now_us
            cluster.engines[0].submit_single_write(nbytes, (mr, 0), (desc, 0)).wait()
        return cluster.now_us - start_us


def paged_us(profile: str | sim.Profile, page_bytes: int, npages: int = _PAGES) -> float:
    """Measure submit to the sender's done of pages in random order; as published, no immediates."""
    cluster, mr, desc = pair(profile, page_bytes * npages)
    order = np.random.default_rng(1)
    with cluster:
        src, dst = (tep.Pages(order.permutation(npages)) for _ in range(2))
        cluster.engines[0].submit_paged_writes(page_bytes, (mr, src), (desc, dst)).wait()
        return cluster.now_us


def _p2p(keys: Mapping[str, str]) -> float:
    profile, nbytes = NIC_PROFILES[keys["nic"]], int(keys["bytes"])
    if keys["kind"] == "single":
        return nbytes * 8 / single_us(profile, nbytes) / 1000
    return _PAGES * nbytes * 8 / paged_us(profile, nbytes) / 1000


# ---------------------------------------------------------------- KvCache


@cache
def _first(ntokens: int) -> Report:
    return first_token(ntokens)


def _kvcache(keys: Mapping[str, str]) -> float:
    ntokens = int(keys["ntokens"])
    last = PUBLISHED.chunks(ntokens)[-1]
    pages = PUBLISHED.last_pages(ntokens)
    values: dict[str, Callable[[], float]] = {
        "ttft_same_node": lambda: PUBLISHED.compute_s(ntokens) * 1e3,
        "ttft_disaggregated": lambda: _first(ntokens).ttft_s() * 1e3,
        "added": lambda: _first(ntokens).added_s() * 1e3,
        "layer_compute": lambda: PUBLISHED.chunk_layer_s(last) * 1e3,
        "layer_transfer": lambda: OVERHEAD.start_s * 1e3 + layer_us(pages) / 1e3,
        "chunk_steps": lambda: float(len(PUBLISHED.chunks(ntokens))),
        "pages": lambda: float(pages),
    }
    return values[keys["quantity"]]()


def layer_us(npages: int) -> float:
    """Measure one layer's pages from one rank, submit to the last page's immediate."""
    cluster, mr, desc = pair(NIC_PROFILES["EFA"], 32 * KiB * npages)
    with cluster:
        a, b = cluster.engines
        pages = tep.Pages(np.arange(npages))
        a.submit_paged_writes(32 * KiB, (mr, pages), (desc, pages), imm=42)
        b.expect_imm_count(42, npages).wait()
        return cluster.now_us


# ---------------------------------------------------------------- RL


@cache
def _update() -> Update:
    return study.published_deployment().predict()


def _rl(keys: Mapping[str, str]) -> float:
    found = _update()
    values = found.stages | {"total": found.total_ms, "wait": found.wait_ms}
    return values[keys["operation"]]


# ---------------------------------------------------------------- MoE


@cache
def _step(workload: Workload) -> Prediction:
    return predict(workload)


def _half(workload: Workload, op: str) -> float:
    found = _step(workload)
    return found.dispatch_us if op == "dispatch" else found.combine_us


def _decode(keys: Mapping[str, str]) -> float:
    ep = int(keys["ep"])
    if keys["nic"].startswith("DeepEP"):
        row = per_token(Workload(ep=ep, nic="cx7"))
        return row.dispatch_us if keys["op"] == "dispatch" else row.combine_us
    nic, nics = keys["nic"].lower(), 2 if keys["nic"].endswith("_2nics") else None
    return _half(Workload(ep=ep, nic=nic.removesuffix("_2nics"), nics=nics), keys["op"])


def _hosts(keys: Mapping[str, str]) -> float:
    return alltoall_gbytes_s("efa_4x100", int(keys["bytes"]), rail=keys["traffic"] == "rail")


def _tails(keys: Mapping[str, str]) -> float:
    halves = _step(Workload(ep=int(keys["ep"]), nic=keys["nic"].lower())).p99_us
    return halves[keys["op"] == "combine"]


def _prefill(keys: Mapping[str, str]) -> float:
    return _half(Workload.prefill(ep=int(keys["ep"]), nic=keys["nic"].lower()), keys["op"])


def _private(keys: Mapping[str, str]) -> float:
    def dispatch_us(private: int) -> float:
        nic, ep = keys["nic"].lower(), int(keys["ep"])
        return _half(Workload(ep=ep, nic=nic, private_tokens=private), "dispatch")

    return 100 * (dispatch_us(int(keys["private_tokens"])) / dispatch_us(32) - 1)


def _kernels(keys: Mapping[str, str]) -> float:
    seconds: float = getattr(load_gpu(keys["nic"].lower()), keys["kernel"])
    return seconds * 1e6


# ---------------------------------------------------------------- the host's CPU


def _scatter(keys: Mapping[str, str]) -> float:
    profile = sim.load_profile(NIC_PROFILES.get(keys["nic"], "cx7_400"))
    if keys["stage"] != "post_all":
        # Their sum is the profile's: enqueue, and the worker's pick-up.
        parts = {"enqueue": 0.120, "worker_pickup": 0.855}
        return profile.step_delay_ps / PS_PER_US * parts[keys["stage"]] / sum(parts.values())
    return post_all_us(profile, int(keys["ep"]) - 1)


def post_all_us(profile: sim.Profile, peers: int) -> float:
    """Measure from before the first write of a scatter to after its last, on the worker's CPU."""
    machine = dataclasses.replace(profile, jitter_ps=0)
    with sim.Cluster(peers + 1, profile=machine, move_bytes=False) as cluster:
        first, *others = cluster.engines
        mr, _ = first.reg_mr((1 << 40, 1 << 20, "cpu"))
        descs = [engine.reg_mr((1 << 41, 1 << 20, "cpu"))[1] for engine in others]
        seen: list[float] = []

        async def one(engine: tep.TransferEngine) -> None:
            await engine.expect_imm_count(7, 1)
            seen.append(cluster.now_us)

        async def main() -> None:
            waiting = [asyncio.ensure_future(one(engine)) for engine in others]
            first.submit_scatter(mr, [tep.ScatterDst(64, 0, (desc, 0)) for desc in descs], 7)
            await asyncio.gather(*waiting)

        cluster.run(main())
    # The first arrival shows when the first row was posted, the last when the last was.
    return max(seen) - min(seen) + machine.post_first_ps / PS_PER_US


def _uvm(keys: Mapping[str, str]) -> float:
    del keys  # the one point that is not left out
    return load_gpu("cx7").watch * 1e6


_RUNS: Final[Mapping[str, Callable[[Mapping[str, str]], float]]] = {
    "p2p": _p2p,
    "kvcache": _kvcache,
    "rl": _rl,
    "hosts": _hosts,
    "moe-decode": _decode,
    "moe-others": _decode,
    "moe-prefill": _prefill,
    "moe-private": _private,
    "moe-tails": _tails,
    "moe-kernels": _kernels,
    "scatter": _scatter,
    "uvm": _uvm,
}

_TRIED: Final = frozenset({"moe-private", "moe-tails"})
"""Tables whose points are simulated although they are not modelled, to show the error."""

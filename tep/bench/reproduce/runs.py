"""A value for each point of a published table: table name -> a function of the point's keys.

Point to point, scatter, MoE, KvCache and the waiting of RL run through the engines on the timing
fabric. Kernels, the watched word and RL's operations are inputs, given back. The functions here
have no number of a machine: what has guessed numbers is given to them by name. `None` if nothing is
simulated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final

import numpy as np

import tep
from tep import sim
from tep.apps.kvcache.simulate import Plant, Report, first_token
from tep.apps.kvcache.ttft import OVERHEAD, PUBLISHED, Overhead
from tep.apps.moe.kernels import Gpu, load_gpu
from tep.apps.moe.predict import (
    Prediction,
    Workload,
    family_of,
    per_token,
    predict,
    profile_of,
)
from tep.apps.rl import study
from tep.apps.rl.predict import Prediction as Update
from tep.base.units import PS_PER_US, GiB, KiB
from tep.bench.reproduce.tables import NIC_PROFILES, Outcome, load_table
from tep.sim.sweeps import interval

__all__ = [
    "layer_us", "paged_us", "pair", "post_all_us", "reproduce", "reproduce_at", "single_us",
]  # fmt: skip

_PAGES: Final = 16_384

Keys = Mapping[str, str]
"""The columns of a published table that say which point it is."""


def reproduce(name: str, guessed: float = 1.0) -> Iterator[Outcome]:
    """Simulate a table, point by point, in order; predictions with intervals if `guessed` > 1.

    Raises:
        UsageError: there is no such table.
    """
    table = load_table(name)
    for point in table.points:
        if point.kind == "not modelled" and name not in _TRIED:
            yield Outcome(table, point, None)
            continue
        value, ends = reproduce_at(name, **point.keys), None
        if point.kind == "predicted" and guessed > 1:
            run = partial(_RUNS[name], point.keys)
            given = _GIVEN[name](point.keys)
            ends = interval(run, {"value": value}, guessed, **given)["value"]
        yield Outcome(table, point, value, ends=ends)


def reproduce_at(name: str, **keys: str) -> float:
    """Simulate a point that need not be published; the keys are the table's columns."""
    return _RUNS[name](keys, **_GIVEN[name](keys))


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


def paged_us(
    profile: str | sim.Profile, page_bytes: int, npages: int = _PAGES, seed: int = 0
) -> float:
    """Measure submit to the sender's done of pages in random order; as published, no immediates."""
    cluster, mr, desc = pair(profile, page_bytes * npages, seed)
    order = np.random.default_rng(1)
    with cluster:
        src, dst = (tep.Pages(order.permutation(npages)) for _ in range(2))
        cluster.engines[0].submit_paged_writes(page_bytes, (mr, src), (desc, dst)).wait()
        return cluster.now_us


def _p2p(keys: Keys, machine: sim.Profile, seed: int = 0) -> float:
    nbytes = int(keys["bytes"])
    if keys["kind"] == "single":
        return nbytes * 8 / single_us(machine, nbytes, seed) / 1000
    return _PAGES * nbytes * 8 / paged_us(machine, nbytes, seed=seed) / 1000


# ---------------------------------------------------------------- KvCache


@cache
def _first(ntokens: int, machine: sim.Profile, overhead: Overhead, seed: int) -> Report:
    plant = Plant(prefillers=1, decoders=1, profile=machine, overhead=overhead)
    return first_token(ntokens, plant, seed)


def _kvcache(keys: Keys, machine: sim.Profile, overhead: Overhead, seed: int = 0) -> float:
    ntokens = int(keys["ntokens"])
    last = PUBLISHED.chunks(ntokens)[-1]
    pages = PUBLISHED.last_pages(ntokens)
    values: dict[str, Callable[[], float]] = {
        "ttft_same_node": lambda: PUBLISHED.compute_s(ntokens) * 1e3,
        "ttft_disaggregated": lambda: _first(ntokens, machine, overhead, seed).ttft_s() * 1e3,
        "added": lambda: _first(ntokens, machine, overhead, seed).added_s() * 1e3,
        "layer_compute": lambda: PUBLISHED.chunk_layer_s(last) * 1e3,
        "layer_transfer": lambda: overhead.start_s * 1e3 + layer_us(pages, machine, seed) / 1e3,
        "chunk_steps": lambda: float(len(PUBLISHED.chunks(ntokens))),
        "pages": lambda: float(pages),
    }
    return values[keys["quantity"]]()


def layer_us(npages: int, profile: str | sim.Profile = NIC_PROFILES["EFA"], seed: int = 0) -> float:
    """Measure one layer's pages from one rank, submit to the last page's immediate."""
    cluster, mr, desc = pair(profile, 32 * KiB * npages, seed)
    with cluster:
        a, b = cluster.engines
        pages = tep.Pages(np.arange(npages))
        a.submit_paged_writes(32 * KiB, (mr, pages), (desc, pages), imm=42)
        b.expect_imm_count(42, npages).wait()
        return cluster.now_us


# ---------------------------------------------------------------- RL


@cache
def _update(deployment: study.Deployment, seed: int) -> Update:
    return deployment.predict(seed=seed)


def _rl(keys: Keys, deployment: study.Deployment, seed: int = 0) -> float:
    found = _update(deployment, seed)
    values = found.stages | {"total": found.total_ms, "wait": found.wait_ms}
    return values[keys["operation"]]


# ---------------------------------------------------------------- MoE


@cache
def _step(
    way: Callable[..., Prediction], workload: Workload, machine: sim.Profile, gpu: Gpu
) -> Prediction:
    return way(workload, machine=machine, gpu=gpu)


def _layer(keys: Keys) -> Workload:
    """The decode step of a point's ranks and NICs; DeepEP's are ConnectX-7."""
    name = keys["nic"].lower()
    nic = "cx7" if name.startswith("deepep") else name.removesuffix("_2nics")
    return Workload(ep=int(keys["ep"]), nic=nic, nics=2 if name.endswith("_2nics") else None)


def _moe(
    keys: Keys, machine: sim.Profile, gpu: Gpu, seed: int = 0, figure: str = "", **changes: Any
) -> float:
    """One figure of a layer; of the point's half, if it is not named."""
    way = per_token if keys["nic"].startswith("DeepEP") else predict
    found = _step(way, replace(_layer(keys), seed=seed, **changes), machine, gpu)
    return found.figures()[figure or keys["op"]]


def _tails(keys: Keys, **given: Any) -> float:
    return _moe(keys, **given, figure=f"{keys['op']} p99")


def _prefill(keys: Keys, **given: Any) -> float:
    return _moe(keys, **given, tokens=4096, turns=1)


def _private(keys: Keys, **given: Any) -> float:
    private, usual = (
        _moe(keys, **given, figure="dispatch", private_tokens=int(tokens))
        for tokens in (keys["private_tokens"], 32)
    )
    return 100 * (private / usual - 1)


def _kernels(keys: Keys) -> float:
    seconds: float = getattr(load_gpu(keys["nic"].lower()), keys["kernel"])
    return seconds * 1e6


# ---------------------------------------------------------------- two hosts

# Each GPU writes messages of one size in an order that all have: by GPU of the other host in turn,
# or all to the one of its own number ("rail"). Its NICs take turns, `_STRIPE` messages to each GPU,
# and it does not pass over a NIC that has `_WINDOW` in flight. So with eight GPUs in turn half of a
# host's NICs wait: that is the published benchmark's own doing, and not the network's.
# Source: UCCL, ep/bench/alltoall, commit 98831013: test_alltoall.cpp and test_alltoall_rail.cpp.

_GPUS: Final = 8
_STRIPE: Final = 64
_WINDOW: Final = 256
_ROUNDS: Final = 1000
"""Rounds of eight messages; a round is one scatter, so that a window opens a round at a time."""


async def _after(write: tep.Transfer, window: asyncio.Semaphore) -> None:
    await write
    window.release()


def _hosts(keys: Keys, machine: sim.Profile, seed: int = 0) -> float:
    """GiB/s that each GPU of one host sends; the other host's traffic is the same."""
    nbytes, rail = int(keys["bytes"]), keys["traffic"] == "rail"
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


# ---------------------------------------------------------------- the host's CPU


def _scatter(keys: Keys, machine: sim.Profile, seed: int = 0) -> float:
    if keys["stage"] != "post_all":
        # Their sum is the profile's: enqueue, and the worker's pick-up.
        parts = {"enqueue": 0.120, "worker_pickup": 0.855}
        return machine.step_delay_ps / PS_PER_US * parts[keys["stage"]] / sum(parts.values())
    return post_all_us(machine, int(keys["ep"]) - 1, seed)


def post_all_us(profile: sim.Profile, peers: int, seed: int = 0) -> float:
    """Measure from before the first write of a scatter to after its last, on the worker's CPU."""
    machine = replace(profile, jitter_ps=0)
    with sim.Cluster(peers + 1, profile=machine, seed=seed, move_bytes=False) as cluster:
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


def _uvm(_: Keys) -> float:
    return load_gpu("cx7").watch * 1e6


_RUNS: Final[Mapping[str, Callable[..., float]]] = {
    "p2p": _p2p,
    "kvcache": _kvcache,
    "rl": _rl,
    "hosts": _hosts,
    "moe-decode": _moe,
    "moe-others": _moe,
    "moe-prefill": _prefill,
    "moe-private": _private,
    "moe-tails": _tails,
    "moe-kernels": _kernels,
    "scatter": _scatter,
    "uvm": _uvm,
}
"""Table -> the value of a point: its keys, and by name what `_GIVEN` has for it, and a seed."""


def _nic(keys: Keys) -> dict[str, Any]:
    return {"machine": sim.load_profile(NIC_PROFILES.get(keys["nic"], "cx7_400"))}


def _layer_given(keys: Keys) -> dict[str, Any]:
    workload = _layer(keys)
    return {"machine": profile_of(workload), "gpu": load_gpu(family_of(workload))}


_GIVEN: Final[Mapping[str, Callable[[Keys], dict[str, Any]]]] = {
    **dict.fromkeys(("p2p", "scatter"), _nic),
    **{name: _layer_given for name in _RUNS if name.startswith("moe-")},
    **dict.fromkeys(("moe-kernels", "uvm"), lambda _: {}),
    "kvcache": lambda _: {
        "machine": sim.load_profile(NIC_PROFILES["EFA"]),
        "overhead": OVERHEAD,
    },
    "rl": lambda _: {"deployment": study.published_deployment()},
    "hosts": lambda _: {"machine": sim.load_profile("efa_4x100")},
}
"""Table -> what its points are simulated with and has guessed numbers."""

_TRIED: Final = frozenset({"moe-private", "moe-tails"})
"""Tables whose points are simulated although they are not modelled, to show the error."""

"""Other all-to-alls on the same fabric, for comparison: times only, no payload.

`per_token`: every copy is a write of its own, posted by the GPU as soon as it is known, counted by
the receiver; no routes, no proxy, no staging (as DeepEP's low-latency kernels). Where a GPU cannot
post (EFA), its host does, a row at a time. `padded`: every rank sends every other the same, padded
to the largest block that may occur (as collectives without counts). What each leaves out is said at
its function; all that both ends do otherwise is the model of `kernels.Gpu`.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

import tep
from tep import sim
from tep.apps.moe.config import MoeConfig
from tep.apps.moe.kernels import Gpu, load_gpu
from tep.apps.moe.link import Move
from tep.apps.moe.nvlink import Nvlink, NvlinkPort, NvlinkTimes
from tep.apps.moe.predict import Workload, draw_indices, family_of, predict, profile_of
from tep.apps.moe.routing import Ints, sort_copies
from tep.sim import Profile

__all__ = ["Row", "compare", "padded", "per_token", "ways"]

_GPU_POST_PS: Final = 20_000
"""CPU time of a row that the GPU posts: none, but its warps share one doorbell; 20 ns is a guess.
The NIC's own 74 ns a row, which is fitted, is what counts."""

_ARRIVED, _READY, _COMBINED = 1, 2, 3

_BY_BYTES: Final = tep.Routing(scatter_by="bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a comparison; microseconds, p50 over ranks."""

    name: str
    dispatch_us: float
    combine_us: float


def per_token(workload: Workload) -> Row:
    """A write for each copy.

    Leaves out: how receivers learn the counts (one more write a peer), atomics, and that DeepEP's
    kernels keep SMs busy while they wait.
    """
    profile = profile_of(workload)
    if profile.ordered:
        profile = replace(profile, post_first_ps=_GPU_POST_PS, post_next_ps=_GPU_POST_PS)
    return _run("per-token writes", workload, profile, _PerToken)


def padded(workload: Workload) -> Row:
    """Equal blocks to all, of the largest size that may occur: tokens * min(topk, local experts).

    Leaves out: the collective library's own protocol; its copies are ours.
    """
    return _run("padded, dense", workload, profile_of(workload), _Padded)


def compare(workload: Workload) -> list[Row]:
    """The reference's way, its variants, and the others, for one workload."""
    return [run() for run in ways(workload)]


def ways(workload: Workload) -> list[Callable[[], Row]]:
    """What `compare` runs, one call a row."""
    variants = {
        "host proxy, as the reference": workload,
        "  first burst by bytes": replace(workload, private_scatter="bytes"),
        "  sums at the sending node": replace(workload, sums="node"),
        "  both": replace(workload, sums="node", private_scatter="bytes"),
        "  adaptive private areas": replace(workload, private_sizes="adaptive"),
    }
    # Nodes of one GPU have nothing to add up, one node has nobody to send to.
    adds = 1 < workload.gpus < workload.ep
    mine = [
        partial(_predicted, name, variant)
        for name, variant in variants.items()
        if variant.sums != "node" or adds
    ]
    return [*mine, partial(per_token, workload), partial(padded, workload)]


def _predicted(name: str, workload: Workload) -> Row:
    found = predict(workload)
    return Row(name=name, dispatch_us=found.dispatch_us, combine_us=found.combine_us)


class _Rank:
    """One rank without routes and proxy: knows by itself what comes."""

    def __init__(
        self, cluster: sim.Cluster, link: NvlinkPort, gpu: Gpu, workload: Workload, rank: int
    ) -> None:
        self.engine = cluster.engines[rank]
        self.mr, self.desc = self.engine.reg_mr((1 << 40, 1 << 40, "cpu"))
        self.link = link
        self.gpu = gpu
        self.rank = rank
        self.node = min(workload.gpus, workload.ep)
        self.config = MoeConfig(
            num_experts=workload.experts,
            topk=workload.topk,
            hidden=workload.hidden,
            num_scales=workload.scales,
            max_tokens=workload.tokens,
            world=workload.ep,
        )
        world = workload.ep
        self.others = [(rank + k) % world for k in range(1, world)]
        self.far = [p for p in self.others if p // self.node != rank // self.node]
        self.near = [p for p in self.others if p // self.node == rank // self.node]

    async def half(self, out: Ints, coming: Ints, stride: int, stage: str, imm: int) -> float:
        """One way; seconds. out, coming: copies to and from each rank."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        await asyncio.sleep(self.gpu.launch_s())
        await asyncio.sleep(self.staging_s(out, stride))
        arrived = self.engine.expect_imm_count(imm, self.rows(coming))
        self.post(out, stride, imm)
        moves = [Move(p, 0, 0, int(out[p]) * stride) for p in self.near if out[p]]
        push = asyncio.ensure_future(self.link.push(moves))
        await arrived
        await push
        self.link.signal(self.near, imm)
        if self.near:
            await self.link.expect(imm, len(self.near))
        copies = int(coming.sum())
        if stage == "combine":
            await asyncio.sleep(self.gpu.sum_s(copies, self.config.max_tokens, stride))
        else:
            await asyncio.sleep(self.gpu.copy_s(copies, stride))
        return loop.time() - start_s

    async def barrier(self, descs: list[tep.MrDesc], imm: int) -> None:
        """Everybody is through."""
        self.engine.submit_barrier([descs[p] for p in self.others], imm)
        await self.engine.expect_imm_count(imm, len(self.others))

    def staging_s(self, out: Ints, stride: int) -> float:
        raise NotImplementedError

    def rows(self, coming: Ints) -> int:
        raise NotImplementedError

    def post(self, out: Ints, stride: int, imm: int) -> None:
        raise NotImplementedError

    descs: list[tep.MrDesc]


class _PerToken(_Rank):
    def staging_s(self, out: Ints, stride: int) -> float:  # noqa: ARG002  # the base's
        return 0.0

    def rows(self, coming: Ints) -> int:
        return int(coming[self.far].sum())

    def post(self, out: Ints, stride: int, imm: int) -> None:
        for p in self.far:
            if out[p]:
                pages = tep.Pages(np.arange(int(out[p])))
                self.engine.submit_paged_writes(
                    stride, (self.mr, pages), (self.descs[p], pages), imm
                )


class _Padded(_Rank):
    @property
    def block(self) -> int:
        return self.config.max_tokens * self.config.copies_per_token

    def staging_s(self, out: Ints, stride: int) -> float:
        return self.gpu.copy_s(int(out.sum()), stride)

    def rows(self, coming: Ints) -> int:
        del coming
        shape = tep.Scatter(self.block * self.config.dispatch_stride, _BY_BYTES)
        nics = len(self.desc.rkeys)
        return len(self.far) * tep.count_imms(shape, nics, nics)

    def post(self, out: Ints, stride: int, imm: int) -> None:
        del out
        dsts = [tep.ScatterDst(self.block * stride, 0, (self.descs[p], 0)) for p in self.far]
        if dsts:
            self.engine.submit_scatter(self.mr, dsts, imm, routing=_BY_BYTES)


def _run(name: str, workload: Workload, profile: Profile, kind: type[_Rank]) -> Row:
    gpu = load_gpu(family_of(workload))
    link = Nvlink(
        NvlinkTimes(bytes_s=gpu.nvlink_bytes_s, latency_s=gpu.nvlink_latency_s), carries_bytes=False
    )
    ports = [link.port(rank) for rank in range(workload.ep)]
    cluster = sim.Cluster(workload.ep, profile=profile, seed=workload.seed, move_bytes=False)
    ranks = [kind(cluster, ports[r], gpu, workload, r) for r in range(workload.ep)]
    draw = draw_indices(workload)
    config = ranks[0].config
    blocks = np.array(
        [
            sort_copies(draw(r, 0), config).counts.reshape(workload.ep, -1).sum(axis=1)
            for r in range(workload.ep)
        ]
    )
    descs = [rank.desc for rank in ranks]
    times: list[tuple[float, float]] = []

    async def one(rank: _Rank) -> None:
        rank.descs = descs
        rank.link.connect(rank.engine, dict.fromkeys(rank.near, b""), {})
        out, back = blocks[rank.rank], blocks[:, rank.rank]
        there = await rank.half(out, back, config.dispatch_stride, "dispatch", _ARRIVED)
        await rank.barrier(descs, _READY)
        here = await rank.half(back, out, config.combine_stride, "combine", _COMBINED)
        times.append((there, here))

    async def main() -> None:
        await asyncio.gather(*(one(rank) for rank in ranks))

    with cluster:
        cluster.run(main())
    dispatch, combine = (statistics.median(column) * 1e6 for column in zip(*times, strict=True))
    return Row(name=name, dispatch_us=dispatch, combine_us=combine)

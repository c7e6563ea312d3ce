"""Predict the latency of dispatch and combine on published machines: real engines, simulated time.

All ranks run the product's own algorithm over the timing fabric, without payload bytes; kernels and
NVLink come from `kernels.Gpu`. What is fitted, and where it is wrong: profiles/README.md. Beside it
stand other all-to-alls on the same fabric. `per_token`: every copy is a write of its own, posted by
the GPU as soon as it is known, counted by the receiver; no routes, no proxy, no staging (as
DeepEP's low-latency kernels). Where a GPU cannot post (EFA), its host does, a row at a time.
`padded`: every rank sends every other the same, padded to the largest block that may occur (as
collectives without counts).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

import tep
from tep import sim
from tep.apps.moe.alltoall import AllToAll
from tep.apps.moe.config import Ints, MoeConfig, sort_copies
from tep.apps.moe.group import Move, Nvlink, NvlinkPort, local_groups
from tep.apps.moe.kernels import Gpu, load_gpu
from tep.base.units import PS_PER_S
from tep.observe.shown import Shown
from tep.sim import Profile, load_profile

__all__ = [
    "NICS", "Prediction", "Workload", "compare", "draw_indices", "family_of", "padded",
    "per_token", "predict", "profile_of", "ways",
]  # fmt: skip


NICS: Final = {"cx7": "cx7_400", "efa": "efa_2x200", "efa_p5": "efa_4x100"}
"""Names that the command line knows -> profile of the timing fabric."""

_US: Final = 1e6

_SAMPLES: Final = 64
"""Latencies in a median, at the least: routing is random, and of one turn of 16 ranks the median
moves by 5 % from seed to seed."""

Indices = Callable[[int, int], Ints]
"""(rank, turn) -> expert of each choice, i64[tokens, topk]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The layer to predict; the defaults are the published decode step.

    Attributes:
        ep: ranks.
        nic: a key of NICS, or the name of a profile.
        tokens: of each rank.
        topk, experts, hidden, scales: of the model; DeepSeek-V3's.
        private_tokens: first burst of each peer; 256 is the reference's benchmark setting.
        gpus: of a node.
        nics: NICs of a GPU; None = the profile's.
        skew: of the routing: experts are drawn with probability ~ 1 / (k + 1) ** skew.
        slow_nic: the first NIC of rank 0 takes so many times as long for every byte; 1 = sound.
        turns: how many; the first is left out of the medians if there are more. None: one, and as
            many more as give _SAMPLES latencies: 5 at EP16, 2 at EP64.
        seed: of routing and jitter.
        private_scatter: as of MoeConfig.
    """

    ep: int = 64
    nic: str = "cx7"
    tokens: int = 128
    topk: int = 8
    experts: int = 256
    hidden: int = 7168
    scales: int = 56
    private_tokens: int = 256
    gpus: int = 8
    nics: int | None = None
    skew: float = 0.0
    slow_nic: float = 1.0
    turns: int | None = None
    seed: int = 0
    private_scatter: Literal["peers", "bytes"] = "peers"

    @property
    def all_turns(self) -> int:
        """The number of turns to run."""
        return self.turns if self.turns is not None else 1 - (-_SAMPLES // self.ep)

    @classmethod
    def prefill(cls, **changes: Any) -> Workload:
        """The published prefill step: 4096 tokens a rank, so many that one turn is typical."""
        return cls(**({"tokens": 4096, "turns": 1} | changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Shown):
    """Medians over ranks and turns, microseconds from a half's launch.

    Attributes:
        workload: what was predicted.
        dispatch_us, combine_us: latency: launch of the send kernel to end of the receive kernel.
        p99_us: the same two, of the slowest rank in a hundred.
        dispatch_parts, combine_parts: what the median rank's latency is made of, in order.
        barrier_us: of one barrier, for the last rank to come; it is in no latency.
    """

    workload: Workload
    dispatch_us: float
    combine_us: float
    p99_us: tuple[float, float]
    dispatch_parts: dict[str, float] = field(default_factory=dict)
    combine_parts: dict[str, float] = field(default_factory=dict)
    barrier_us: float = 0.0

    def figures(self) -> dict[str, float]:
        """The four latencies by name."""
        found = {"dispatch": self.dispatch_us, "combine": self.combine_us}
        return found | {f"{half} p99": us for half, us in zip(found, self.p99_us, strict=True)}

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each half."""
        halves = (("dispatch", self.dispatch_us), ("combine", self.combine_us))
        return [
            {"half": half, "p50, us": p50, "p99, us": p99}
            for (half, p50), p99 in zip(halves, self.p99_us, strict=True)
        ]


def draw_indices(workload: Workload) -> Indices:
    """Routing drawn from the seed: a token's choices are distinct; even, or skewed to few."""
    shape = workload.tokens, workload.experts

    def chosen(scores: npt.NDArray[np.floating]) -> Ints:
        # Copied: a view of the first columns would keep the choices' order of all experts.
        return np.argpartition(scores, workload.topk - 1, axis=1)[:, : workload.topk].copy()

    if not workload.skew:
        return lambda rank, turn: chosen(
            np.random.default_rng([workload.seed, rank, turn]).random(shape, np.float32)
        )
    weights = 1.0 / (np.arange(workload.experts) + 1.0) ** workload.skew
    # Which experts are the popular ones must not follow their numbers, or one rank had them all.
    order = np.random.default_rng([workload.seed, 99]).permutation(workload.experts)
    logs = np.log(weights)[np.argsort(order)]

    def draw(rank: int, turn: int) -> Ints:
        rng = np.random.default_rng([workload.seed, rank, turn])
        # The largest k of log-weights plus Gumbel noise: k draws without replacement.
        return chosen(-(rng.gumbel(size=shape) + logs))

    return draw


def predict(
    workload: Workload,
    indices: Indices | None = None,
    *,
    gpu: Gpu | None = None,
    machine: Profile | Sequence[Profile] | None = None,
) -> Prediction:
    """Run the step on all ranks.

    Args:
        workload: the layer.
        indices: the routing; None: drawn.
        gpu: other kernels and proxy than those of the workload's NIC.
        machine: other NICs, of every rank or of each.

    Raises:
        UsageError: an unknown NIC, or numbers that contradict each other.
    """
    machine = machine or profile_of(workload)
    gpu = gpu or load_gpu(family_of(workload))
    nvlink = Nvlink(bytes_s=gpu.nvlink_bytes_s, latency_s=gpu.nvlink_latency_s)
    groups = local_groups(workload.ep, node_size=min(workload.gpus, workload.ep), links=nvlink.port)
    draw = indices or draw_indices(workload)
    marks: dict[str, list[dict[str, float]]] = {"dispatch": [], "combine": []}
    barriers: list[float] = []

    async def rank(cluster: sim.Cluster, number: int) -> None:
        alltoall = AllToAll(
            cluster.engines[number],
            groups[number],
            kernels=gpu,
            carries_bytes=False,
            **_shape(workload),
        )
        async with alltoall:
            for turn in range(workload.all_turns):
                chosen = draw(number, turn)
                weights = np.ones(chosen.shape, np.float32)
                await alltoall.dispatch(None, None, chosen, weights)
                first = alltoall.marks_s
                await alltoall.combine(None)
                if turn or workload.all_turns == 1:
                    marks["dispatch"].append(first)
                    marks["combine"].append(alltoall.marks_s)
        barriers.append(alltoall.barrier_s)

    with _cluster(workload, machine) as cluster:
        cluster.run(_all(rank(cluster, number) for number in range(workload.ep)))
    first = machine if isinstance(machine, Profile) else machine[0]
    return _summary(workload, marks, _first_byte_s(first), min(barriers))


def _shape(workload: Workload) -> dict[str, Any]:
    return {
        "num_experts": workload.experts,
        "topk": workload.topk,
        "hidden": workload.hidden,
        "num_scales": workload.scales,
        "max_tokens": workload.tokens,
        "private_tokens": workload.private_tokens,
        "private_scatter": workload.private_scatter,
    }


async def _all(ranks: Iterable[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*ranks)


def _cluster(workload: Workload, machine: Profile | Sequence[Profile]) -> sim.Cluster:
    cluster = sim.Cluster(workload.ep, profile=machine, seed=workload.seed, move_bytes=False)
    if workload.slow_nic != 1:
        cluster.slow_down(0, 0, workload.slow_nic)
    return cluster


def family_of(workload: Workload) -> str:
    """Whose proxy numbers hold for a workload's NIC: "cx7" (ordered), or "efa"."""
    return "cx7" if profile_of(workload).ordered else "efa"


def profile_of(workload: Workload) -> Profile:
    """The timing fabric's profile of a workload's NIC."""
    profile = load_profile(NICS.get(workload.nic, workload.nic))
    if workload.nics is not None:
        profile = replace(profile, nics=workload.nics)
    return profile


def _summary(
    workload: Workload,
    marks: dict[str, list[dict[str, float]]],
    first_byte_s: float,
    barrier_s: float,
) -> Prediction:
    for half, found in marks.items():
        found.sort(key=lambda one: one[half])
    parts = {
        f"{half}_parts": _parts(half, found[len(found) // 2], first_byte_s)
        for half, found in marks.items()
    }
    dispatch_s, combine_s = ([one[half] for one in found] for half, found in marks.items())
    return _prediction(workload, dispatch_s, combine_s, barrier_us=barrier_s * _US, **parts)


def _parts(op: str, typical: dict[str, float], first_byte_s: float) -> dict[str, float]:
    """Return what a rank's latency is made of, microseconds, from the end of each stage."""
    if "posted" in typical:
        staged = min(typical["staged"], typical["posted"])
        sent = staged, typical["posted"], typical["posted"] + first_byte_s
        ends = dict(zip(("send kernel", "proxy", "first byte"), sent, strict=True))
        ends["NIC"] = max(typical["payload"], *ends.values())
    else:  # nothing leaves the node
        names = ("send kernel", "routes", "node link")
        ends = {name: typical[name] for name in names if name in typical}
    ends["receive kernel"] = typical[op]
    parts, before = {}, 0.0
    for name, end in ends.items():
        parts[name] = max(0.0, end - before) * _US
        before = max(before, end)
    return parts


def _prediction(
    workload: Workload, dispatch_s: Sequence[float], combine_s: Sequence[float], **parts: Any
) -> Prediction:
    """Make a prediction of latencies in ascending order."""
    dispatch_us, combine_us = (statistics.median(one) * _US for one in (dispatch_s, combine_s))
    at = min(len(dispatch_s) - 1, round(0.99 * len(dispatch_s)))
    return Prediction(
        workload=workload,
        dispatch_us=dispatch_us,
        combine_us=combine_us,
        p99_us=(dispatch_s[at] * _US, combine_s[at] * _US),
        **parts,
    )


def _first_byte_s(profile: Profile) -> float:
    """Scatter submitted to the first byte at a peer: worker's turn, one post, wire."""
    found = profile.step_delay_ps + profile.post_first_ps + profile.latency_ps
    return (found + profile.receive_ps) / PS_PER_S


# ---------------------------------------------------------------------- alternatives


_GPU_POST_PS: Final = 20_000
"""CPU time of a row that the GPU posts: none, but its warps share one doorbell; 20 ns is a guess.
The NIC's own 74 ns a row, which is fitted, is what counts."""

_ARRIVED, _READY, _COMBINED = 1, 2, 3

_BY_BYTES: Final = tep.Routing(scatter_by="bytes")


def per_token(
    workload: Workload, *, gpu: Gpu | None = None, machine: Profile | None = None
) -> Prediction:
    """Predict a write for each copy; other kernels and NICs as of `predict`.

    Leaves out: how receivers learn the counts (one more write a peer), atomics, and that DeepEP's
    kernels keep SMs busy while they wait.
    """
    machine = machine or profile_of(workload)
    if machine.ordered:
        machine = replace(machine, post_first_ps=_GPU_POST_PS, post_next_ps=_GPU_POST_PS)
    return _run(workload, gpu, machine, padded=False)


def padded(
    workload: Workload, *, gpu: Gpu | None = None, machine: Profile | None = None
) -> Prediction:
    """Predict equal blocks to all, of the largest size that may occur: tokens * min(topk, local
    experts); other kernels and NICs as of `predict`.

    Leaves out: the collective library's own protocol; its copies are ours.
    """
    return _run(workload, gpu, machine or profile_of(workload), padded=True)


def compare(workload: Workload) -> dict[str, Prediction]:
    """The reference's way, its variants, and the others, for one workload."""
    return {name: run(one) for name, run, one in ways(workload)}


def ways(workload: Workload) -> list[tuple[str, Callable[..., Prediction], Workload]]:
    """The runs of `compare`: name, function, workload."""
    return [
        ("host proxy, as the reference", predict, workload),
        ("first burst by bytes", predict, replace(workload, private_scatter="bytes")),
        ("per-token writes", per_token, workload),
        ("padded, dense", padded, workload),
    ]


class _Rank:
    """One rank without routes and proxy: knows by itself what comes.

    Args:
        block: token copies of one size for all that go to each other rank, which are one row; 0:
            each copy is a row of its own, and none is staged.
    """

    def __init__(
        self,
        cluster: sim.Cluster,
        link: NvlinkPort,
        gpu: Gpu,
        config: MoeConfig,
        rank: int,
        block: int,
    ) -> None:
        self.engine = cluster.engines[rank]
        self.mr, self.desc = self.engine.reg_mr((1 << 40, 1 << 40, "cpu"))
        self.link, self.gpu, self.config, self.block = link, gpu, config, block
        self.descs: list[tep.MrDesc] = []  # of all ranks
        world, node = config.world, rank // config.node_size
        self.others = [(rank + k) % world for k in range(1, world)]
        self.far = [p for p in self.others if p // config.node_size != node]
        self.near = [p for p in self.others if p // config.node_size == node]

    async def half(self, out: Ints, coming: Ints, stride: int, stage: str, imm: int) -> float:
        """Run one way; return seconds. out, coming: copies to and from each rank."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        await asyncio.sleep(self.gpu.launch_s())
        await asyncio.sleep(self.gpu.copy_s(int(out.sum()), stride) if self.block else 0.0)
        arrived = self.engine.expect_imm_count(imm, self.rows(coming))
        self.post(out, stride, imm)
        moves = [Move(p, 0, 0, int(out[p]) * stride) for p in self.near if out[p]]
        push = asyncio.ensure_future(self.link.move(moves, pushes=True))
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

    async def barrier(self, imm: int) -> None:
        """Wait until everybody is through."""
        self.engine.submit_barrier([self.descs[p] for p in self.others], imm)
        await self.engine.expect_imm_count(imm, len(self.others))

    def rows(self, coming: Ints) -> int:
        """The rows that come."""
        if not self.block:
            return int(coming[self.far].sum())
        shape = tep.Scatter(self.block * self.config.dispatch_stride, _BY_BYTES)
        nics = len(self.desc.rkeys)
        return len(self.far) * tep.count_imms(shape, nics, nics)

    def post(self, out: Ints, stride: int, imm: int) -> None:
        """Send the copies of all other nodes."""
        if self.block:
            size = self.block * stride
            dsts = [tep.ScatterDst(size, 0, (self.descs[p], 0)) for p in self.far]
            if dsts:
                self.engine.submit_scatter(self.mr, dsts, imm, routing=_BY_BYTES)
            return
        for p in self.far:
            if out[p]:
                pages = tep.Pages(np.arange(int(out[p])))
                self.engine.submit_paged_writes(
                    stride, (self.mr, pages), (self.descs[p], pages), imm
                )


def _run(workload: Workload, gpu: Gpu | None, machine: Profile, *, padded: bool) -> Prediction:
    gpu, ep = gpu or load_gpu(family_of(workload)), workload.ep
    link = Nvlink(bytes_s=gpu.nvlink_bytes_s, latency_s=gpu.nvlink_latency_s)
    config = MoeConfig(world=ep, node_size=min(workload.gpus, ep), **_shape(workload))
    block = config.max_tokens * config.copies_per_token if padded else 0
    cluster = sim.Cluster(ep, profile=machine, seed=workload.seed, move_bytes=False)
    ranks = [_Rank(cluster, link.port(r), gpu, config, r, block) for r in range(ep)]
    draw = draw_indices(workload)
    counts = np.array([sort_copies(draw(r, 0), config).counts for r in range(ep)])
    blocks = counts.reshape(ep, ep, -1).sum(axis=2)
    times: list[tuple[float, float]] = []

    async def one(number: int, rank: _Rank) -> None:
        rank.descs = [other.desc for other in ranks]
        out, back = blocks[number], blocks[:, number]
        there = await rank.half(out, back, config.dispatch_stride, "dispatch", _ARRIVED)
        await rank.barrier(_READY)
        here = await rank.half(back, out, config.combine_stride, "combine", _COMBINED)
        times.append((there, here))

    with cluster:
        cluster.run(_all(one(number, rank) for number, rank in enumerate(ranks)))
    return _prediction(workload, *(sorted(column) for column in zip(*times, strict=True)))

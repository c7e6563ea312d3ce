"""Predicts an update at full scale: published compute, simulated network, no bytes moved.

All ranks of a sub-mesh gather together, so they compute in step; one coroutine plays the thread of
all of them. Every write is a real request to a real engine on the timing fabric, and every barrier
is made of immediates. Regions are addresses without memory behind them. The published numbers of a
trillion-parameter update stand here too, each with its source.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import numpy as np

import tep
from tep import Expectation, ScatterDst, Span, Transfer
from tep.apps import HBM_BYTES_S
from tep.apps.rl.metadata import Schedule, Task
from tep.apps.rl.models import InferLayout, TrainLayout
from tep.apps.rl.ports import ROUTING, Kind, count_data, make_imm, stage_span
from tep.base.units import MiB
from tep.observe.shown import Shown
from tep.sim import Profile, load_profile

__all__ = [
    "DENSE_MS", "KIMI_K2", "LINE_BYTES_PER_S", "OPERATIONS", "PUBLISHED_MS",
    "QUANTUM_BYTES", "TOTAL_MS", "WAIT_MS", "Attribution", "Busy", "Prediction",
    "StageTimes", "predict",
]  # fmt: skip


QUANTUM_BYTES: Final = 4 * MiB
"""The bytes that a NIC sends of one flow before the next. The profiles' 64 KiB would be ninety
million turns for six terabytes; rows here are megabytes, so the share of each flow is the same."""


class Busy(NamedTuple):
    """The load of one kind of link.

    Attributes:
        nbytes: that the busiest of these links carries.
        fraction: of the update's time that this takes at line rate.
    """

    name: str
    nbytes: int
    fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Shown):
    """The result of a simulation.

    Attributes:
        total_ms: until the last rollout worker has counted everything.
        stages: milliseconds of each stage on the mean training rank.
        wait_ms: the rest: waiting for the network and for other ranks.
        links: training NICs out, rollout NICs in; the busiest first.
        peak_bytes: most staging held by a rank.
        spans: the stages of each sub-mesh, if asked for; see stage_span().
    """

    total_ms: float
    stages: dict[str, float]
    wait_ms: float
    links: tuple[Busy, ...]
    peak_bytes: int
    spans: tuple[Span, ...] = field(repr=False)

    def figures(self) -> dict[str, float]:
        """The figures that have an interval, by name; milliseconds."""
        return {"total": self.total_ms, "wait": self.wait_ms}

    def table(self) -> list[dict[str, str | float]]:
        """Return a row a stage, the wait, and the whole."""
        parts = {**self.stages, "wait for network and ranks": self.wait_ms, "in all": self.total_ms}
        return [{"stage": name, "time, ms": ms} for name, ms in parts.items()]

    @property
    def compute_ms(self) -> float:
        """Exposed compute of the mean training rank."""
        return sum(self.stages.values())

    @property
    def bottleneck(self) -> str:
        """The part to make faster, in a sentence."""
        link = self.links[0]
        if self.compute_ms > link.fraction * self.total_ms:
            stage = max(self.stages, key=lambda name: self.stages[name])
            return (
                f"compute of the training ranks, {stage} above all; busiest link: {link.name}, "
                f"{link.fraction:.0%} of the time"
            )
        return f"{link.name}: at line rate for {link.fraction:.0%} of the time"


def predict(
    schedule: Schedule,
    times: StageTimes,
    *,
    profile: str | Profile = "cx7_400",
    seed: int = 0,
    spans: bool = False,
    drains: bool = False,
    rollout_profile: str | Profile | None = None,
) -> Prediction:
    """Simulate one update.

    Args:
        schedule: of the deployment.
        times: of its compute stages.
        profile: of the machines.
        seed: of the fabric.
        spans: record what happened when.
        drains: between mesh groups a rank waits for its own writes, as published; ours does not.
        rollout_profile: of the rollout workers' machines, where those are others.
    """
    ranks, workers = schedule.ranks, len(schedule.receivers)
    machines = [_machine(profile), _machine(rollout_profile or profile)]
    with tep.sim.Cluster(
        nodes=ranks + workers,
        profile=[machines[0]] * ranks + [machines[1]] * workers,
        seed=seed,
        names=[*(f"train{k}" for k in range(ranks)), *(f"rollout{k}" for k in range(workers))],
        move_bytes=False,
        options=tep.EngineOptions(wait_timeout_s=3600.0),
    ) as cluster:
        run = _Run(cluster, schedule, times, spans, drains)
        total_ms = cluster.run(run.main()) * 1e3
        sent = [sum(nic.nbytes for nic in engine.stats().nics) for engine in run.trains]
    stages = {name: ms / ranks for name, ms in run.stages_ms.items()}
    return Prediction(
        total_ms=total_ms,
        stages=stages,
        wait_ms=total_ms - sum(stages.values()),
        links=_links(machines, sent, schedule.received_bytes().tolist(), total_ms),
        peak_bytes=run.peak_bytes,
        spans=tuple(run.spans),
    )


def _machine(profile: str | Profile) -> Profile:
    return dataclasses.replace(load_profile(profile), quantum_bytes=QUANTUM_BYTES)


def _links(
    machines: Sequence[Profile], sent: Sequence[int], received: Sequence[int], total_ms: float
) -> tuple[Busy, ...]:
    """The load of the busiest device of each kind, all traffic counted."""
    found = []
    for machine, carried, name in (
        (machines[0], sent, "NICs of the training ranks, sending"),
        (machines[1], received, "NICs of the rollout workers, receiving"),
    ):
        line = machine.wire_bps * machine.nics / 8e3  # of all NICs of a node, bytes a millisecond
        most = max(carried, default=0)
        found.append(Busy(name, most, most / line / total_ms))
    return tuple(sorted(found, key=lambda busy: -busy.fraction))


_BASE: Final = 1 << 40
_SLOT: Final = 1 << 41


class _Run:
    """One update being simulated."""

    def __init__(
        self,
        cluster: tep.sim.Cluster,
        schedule: Schedule,
        times: StageTimes,
        spans: bool,
        drains: bool,
    ) -> None:
        ends = int((schedule.rows["dst"] + schedule.rows["nbytes"]).max())
        nbytes = max(schedule.watermark_bytes, ends)
        regions = [
            engine.reg_mr((_BASE + k * _SLOT, nbytes, "cpu"))
            for k, engine in enumerate(cluster.engines)
        ]
        self.trains = cluster.engines[: schedule.ranks]
        self._rollouts = cluster.engines[schedule.ranks :]
        self._sources = [mr for mr, _ in regions]
        self._staging = [desc for _, desc in regions]
        self._targets = self._staging[schedule.ranks :]
        self._nics = len(self._staging[0].rkeys), len(self._targets[0].rkeys)
        self.stages_ms: dict[str, float] = {}
        self.spans: list[Span] = []
        self.peak_bytes = 0
        self._schedule = schedule
        self._times = times
        self._record = spans
        self._drains = drains
        self._mine: list[list[int]] = [[] for _ in range(schedule.ranks)]
        for task in schedule.tasks:
            for rank in task.members:
                self._mine[rank].append(task.number)
        self._rows = np.bincount(schedule.rows["task"], minlength=len(schedule.tasks)).tolist()
        self._ended = [asyncio.Event() for _ in schedule.tasks]

    async def main(self) -> float:
        """Run the update; return simulated seconds."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        nlocal, nremote = self._nics
        counts: list[Expectation] = []
        for k, engine in enumerate(self._rollouts):
            data = count_data(self._schedule, k, [nlocal] * self._schedule.ranks, nremote)
            for kind, count in ((Kind.DATA, data), (Kind.FINISH, 1)):
                counts.append(engine.expect_imm_count(make_imm(kind, 1), count))
        for number, name in enumerate(self._schedule.groups):
            meshes: dict[tuple[int, ...], list[Task]] = {}
            for task in self._schedule.tasks:
                if task.group == number:
                    meshes.setdefault(task.members, []).append(task)
            await asyncio.gather(
                *(self._mesh(f"{name} {k}", tasks) for k, tasks in enumerate(meshes.values()))
            )
            await self._barrier(number)
        for ended in self._ended:
            await ended.wait()
        await self._barrier(len(self._schedule.groups))
        self._finish()
        for expectation in counts:
            await expectation
        return loop.time() - start_s

    # ------------------------------------------------------------------ training ranks

    async def _mesh(self, mesh: str, tasks: Sequence[Task]) -> None:
        """The thread of all ranks of one sub-mesh, which gather in step."""
        loop = asyncio.get_running_loop()
        expert = self._schedule.groups[tasks[0].group] == _EXPERTS
        if self._drains:
            began = loop.time()
            await self._drained(tasks[0].members, tasks[0].group)
            self._note(mesh, "drain", tasks[0], began, loop.time())
        for task in tasks:
            began = loop.time()
            await self._room(task)
            if loop.time() > began:
                self._note(mesh, "watermark", task, began, loop.time())
            # The mean of the members: one that writes more keeps the others waiting where they
            # gather next. That is in the published time of gathering, and must not count twice.
            rows = self._rows[task.number] / len(task.members)
            seconds = self._times.seconds(task, rows, expert=expert)
            at = loop.time()
            for name, each in seconds.items():
                self.stages_ms[name] = self.stages_ms.get(name, 0.0) + each * 1e3 * len(
                    task.members
                )
                self._note(mesh, name, task, at, at + each)
                at += each
            await asyncio.sleep(sum(seconds.values()))
            self._write(mesh, task)

    async def _room(self, task: Task) -> None:
        """Wait until the task's place in every member's staging is free: the watermark."""
        for rank, after in zip(task.members, task.after):
            if after >= 0:
                for number in self._mine[rank][: after + 1]:
                    if not self._ended[number].is_set():
                        await self._ended[number].wait()
            held = sum(
                self._schedule.tasks[number].nbytes
                for number in self._mine[rank][after + 1 :]
                if number <= task.number and not self._ended[number].is_set()
            )
            self.peak_bytes = max(self.peak_bytes, held)

    async def _drained(self, members: Sequence[int], group: int) -> None:
        """Wait until what these ranks wrote in earlier groups has ended."""
        tasks = self._schedule.tasks
        earlier = {n for rank in members for n in self._mine[rank] if tasks[n].group < group}
        for number in sorted(earlier):
            await self._ended[number].wait()

    def _write(self, mesh: str, task: Task) -> None:
        """Submit what every member writes in this task: one request for each of its receivers."""
        imm = make_imm(Kind.DATA, 1)
        loop = asyncio.get_running_loop()
        start_s, open_ = loop.time(), 0

        def settled(transfer: Transfer) -> None:
            nonlocal open_
            transfer.result()
            open_ -= 1
            if not open_:
                self._note(mesh, "write", task, start_s, loop.time())
                self._ended[task.number].set()

        for rank, base in zip(task.members, task.staging):
            rows = self._schedule.rows_of(task.number, rank)
            by_receiver: dict[int, list[ScatterDst]] = {}
            columns = (rows[name].tolist() for name in ("receiver", "src", "dst", "nbytes"))
            for receiver, src, dst, nbytes in zip(*columns):
                to = (self._targets[receiver], dst)
                by_receiver.setdefault(receiver, []).append(ScatterDst(nbytes, base + src, to))
            for dsts in by_receiver.values():
                open_ += 1
                self.trains[rank].submit_scatter(
                    self._sources[rank], dsts, imm, routing=ROUTING, on_done=settled
                )
        if not open_:
            self._ended[task.number].set()

    async def _barrier(self, number: int) -> None:
        """All training ranks: in round r each tells the one 2**r further on."""
        world, step = self._schedule.ranks, 0
        while 1 << step < world:
            imm = make_imm(Kind.BARRIER, 1, number * 32 + step)
            seen = [engine.expect_imm_count(imm, 1) for engine in self.trains]
            for rank, engine in enumerate(self.trains):
                engine.submit_barrier([self._staging[(rank + (1 << step)) % world]], imm)
            for expectation in seen:
                await expectation
            step += 1

    def _finish(self) -> None:
        imm = make_imm(Kind.FINISH, 1)
        for rank, engine in enumerate(self.trains):
            told = self._targets[self._schedule.finishes(rank)]
            if told:
                engine.submit_barrier(told, imm)

    def _note(self, mesh: str, stage: str, task: Task, start_s: float, stop_s: float) -> None:
        if self._record:
            self.spans.append(stage_span(mesh, stage, task.name, start_s, stop_s))


Attribution = Literal["roofline", "bytes"]
"""The rule by which the published totals of one model become the times of another.

roofline: a stage's bytes at the rate of the hardware, and what is then left of its total by
tensors. Experts are not gathered: a rank's shards are whole experts, and the 1.4 GB of one tensor
over NICs of 50 GB/s would take five times the published time. A dense tensor costs less than one
of experts: see DENSE_MS. bytes: all of it by gathered bytes, which NICs cannot carry; the least
that another model may take.
"""

LINE_BYTES_PER_S: Final[Mapping[str, float]] = {
    "load": 63e9,
    "unshard": 450e9,
    "quantise": HBM_BYTES_S / 1.5,
}
"""Shortest time of a stage's bytes: PCIe gen 5 x16 one way; NVLink 4 one way, for each
gathered byte; the GPU's memory, for two bytes read and one written of each two gathered. Source:
vendor pages, quoted. Its FLOPs, two a parameter, are a thousandth of that. Fusing has no bytes
where it is not a copy."""

DENSE_MS: Final = 84.0
"""Compute of Kimi-K2's dense parameters on the mean rank, of 876 ms in all; guessed.

The experts' compute takes longer than their writes (le.qun.ch, 2025-09-17, quoted), which are
709 ms at line rate. That leaves the dense parameters between 0 and 167 ms: this is the middle."""

_EXPERTS: Final = "experts"  # the mesh group of train_metas()


class Operation(NamedTuple):
    """One line of the published table: a training rank's time in one update, and its calls."""

    total_ms: float
    calls: int


OPERATIONS: Final[Mapping[str, Operation]] = {
    "load": Operation(184, 487),
    "unshard": Operation(518, 974),
    "fuse": Operation(18, 487),
    "quantise": Operation(88, 647),
    "submit": Operation(26, 1144),
    "other": Operation(42, 487),
}
"""Source: arXiv 2510.27656 v2, Table 5 (Kimi-K2, 256 -> 128 GPUs, bf16 -> fp8), quoted; its names:
host-to-device, full_tensor, fuse projections, quantize, RDMA submit, other. Other has no calls; one
per parameter is assumed. The parts of the table add up to the total: they are one thread's exposed
times, what overlaps is already subtracted. So they are spent one after another here, and the
network beside them."""

WAIT_MS: Final = 357.0
"""Waiting for other ranks, same table. Not an input: the prediction's counterpart is what is left
of its total."""

TOTAL_MS: Final = 1233.0
"""The whole update, same table. Not an input."""

PUBLISHED_MS: Final = {
    "kimi-k2": "1,233 ms: EFA, 256 to 128 GPUs (arXiv 2510.27656 v2, Table 5)",
    "qwen3-235b": "2,000 ms: EFA, 128 to 32 GPUs, before two of four stages were overlapped "
    "(le.qun.ch, 2025-09-07); 1,200 to 2,000 ms in others' summary of the paper's section 5",
    "deepseek-v3": "1,200 to 2,000 ms in others' summary of the paper's section 5, which does not "
    "say on what",
}
"""Published times of whole updates, by model, in words; nothing is fitted to the last two."""


KIMI_K2: Final = "kimi-k2", TrainLayout(fsdp=16, pp=2, ep=8), InferLayout(ep=32, replicas=4)
"""The published deployment: model, layouts of training and of inference. Source: arXiv 2510.27656
v2, section 7: FSDP/PP/EP = 16/2/8 and EP 32, quoted. That 128 GPUs are four replicas, each with
data-parallel attention, is inferred: 1,144 submits a rank are about experts x 4 replicas plus 13
dense parameters of a layer to each of 128 GPUs."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of compute for each byte, and for each tensor, of each stage.

    Attributes:
        per_byte: stage -> seconds a byte: load of a rank's own shards, else of gathered bytes.
        per_tensor: stage -> seconds a tensor of experts.
        per_row: seconds to submit a row.
        dense_times: so many times a tensor of experts does another tensor cost.
        gathers_experts: False: a rank handles its own shards of experts only.
    """

    per_byte: Mapping[str, float]
    per_tensor: Mapping[str, float]
    per_row: float
    dense_times: float = 1.0
    gathers_experts: bool = True

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        attribution: Attribution = "roofline",
        dense_ms: float = DENSE_MS,
    ) -> StageTimes:
        """Make rates of published totals, which are for the bytes of the published schedule."""
        by_line, ranks = attribution == "roofline", schedule.ranks
        own, gathered, tensors = ({True: 0, False: 0} for _ in range(3))
        for task in schedule.tasks:
            expert = schedule.groups[task.group] == _EXPERTS
            own[expert] += task.gather_bytes  # each byte is loaded once
            whole = expert and by_line
            gathered[expert] += task.gather_bytes * (1 if whole else len(task.members))
            tensors[expert] += len(task.gathers) * len(task.members)
        per_byte: dict[str, float] = {}
        rest: dict[str, float] = {"other": OPERATIONS["other"].total_ms / 1e3 * ranks}
        dense_s = 0.0
        for name in ("load", "unshard", "fuse", "quantise"):
            seconds = OPERATIONS[name].total_ms / 1e3 * ranks
            moved = own if name == "load" else gathered
            per_byte[name] = seconds / sum(moved.values())
            if by_line:
                line = 1 / LINE_BYTES_PER_S[name] if name in LINE_BYTES_PER_S else 0.0
                per_byte[name] = min(per_byte[name], line)
            rest[name] = seconds - per_byte[name] * sum(moved.values())
            dense_s += per_byte[name] * moved[False]
        dense_times = 1.0
        if by_line:
            share = max(0.0, dense_ms / 1e3 * ranks - dense_s) / sum(rest.values())
            dense_times = share / (1 - share) * tensors[True] / tensors[False]
        counted = tensors[True] + dense_times * tensors[False]
        per_tensor = {name: seconds / counted for name, seconds in rest.items()}
        per_row = OPERATIONS["submit"].total_ms / 1e3 * ranks / len(schedule.rows)
        return cls(per_byte, per_tensor, per_row, dense_times, not by_line)

    def seconds(self, task: Task, rows: float, *, expert: bool) -> dict[str, float]:
        """Compute time of one task on one of its ranks, which writes so many rows in the mean."""
        own = task.gather_bytes / len(task.members)
        gathered = task.gather_bytes if self.gathers_experts or not expert else own
        found = {
            name: rate * (own if name == "load" else gathered)
            for name, rate in self.per_byte.items()
        }
        tensors = len(task.gathers) * (1.0 if expert else self.dense_times)
        for name, each in self.per_tensor.items():
            found[name] = found.get(name, 0.0) + each * tensors
        found["submit"] = self.per_row * rows
        return found

"""Questions about a deployment: plan it, predict it, change one thing, compare, and draw it.

The baselines are what others do with the same bytes on the same machines. Both are given the best
case: they send what is quantised already, compute costs nothing, transfers follow each other
without a pause, and the fan-out inside a replica is free.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from os import PathLike
from typing import TYPE_CHECKING, Final, Literal

from tep import Single, Trace, UsageError, count_imms
from tep import Span as TraceSpan
from tep.apps.rl.metadata import Schedule
from tep.apps.rl.models import (
    InferLayout,
    Model,
    TrainLayout,
    load_model,
    rollout_metas,
    target_shards,
    train_metas,
)
from tep.apps.rl.ports import Span
from tep.apps.rl.predict import (
    KIMI_K2,
    Attribution,
    Fleet,
    MeshSpan,
    Prediction,
    SlowNic,
    StageTimes,
    predict,
)
from tep.apps.rl.schedule import WATERMARK_BYTES, make_schedule
from tep.base.units import GiB, MiB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "BUNDLE_BYTES", "COLOURS", "Baseline", "Deployment", "baselines_of", "broadcast_per_shard",
    "change_names", "comparison", "draw", "from_reports", "gather_and_broadcast", "infer_layout",
    "published_deployment", "published_times", "train_layout", "what_ifs", "write_perfetto",
]  # fmt: skip


BUNDLE_BYTES: Final = 1 * GiB
"""Small parameters share a task up to this; a layer's experts at full scale never do. Guessed: well
below the watermark, and far above what a request costs."""

_EP_TRAIN, _PP_TRAIN, _EP_INFER = 8, 2, 32  # of the published deployment, where they divide


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A model between two layouts, on machines of one profile.

    Attributes:
        model: what is updated.
        train, infer: layouts.
        profile: of the machines.
        watermark_bytes, bundle_bytes: of the schedule.
        attribution: of published compute times.
        group_order: of mesh groups; None: experts first.
        speeds: of the training ranks; None: all equal.
        slow: one NIC that is slower than the others.
        factors: stage -> factor on its time.
        drains: as of `predict`.
    """

    model: Model
    train: TrainLayout
    infer: InferLayout
    profile: str = "cx7_400"
    watermark_bytes: int = WATERMARK_BYTES
    bundle_bytes: int = BUNDLE_BYTES
    attribution: Attribution = "bytes"
    group_order: tuple[str, ...] | None = None
    speeds: tuple[float, ...] | None = None
    slow: SlowNic | None = None
    factors: tuple[tuple[str, float], ...] = ()
    drains: bool = False

    def schedule(self) -> Schedule:
        """Compute the routing table; the last few are remembered."""
        return _schedule(
            self.model,
            self.train,
            self.infer,
            self.watermark_bytes,
            self.bundle_bytes,
            self.speeds,
            self.group_order,
        )

    def predict(
        self, schedule: Schedule | None = None, *, seed: int = 0, spans: bool = False
    ) -> Prediction:
        """Simulate one update."""
        times = published_times(self.attribution).scaled(**dict(self.factors))
        found = schedule or self.schedule()
        return predict(
            found,
            times,
            profile=self.profile,
            seed=seed,
            slow=self.slow,
            spans=spans,
            drains=self.drains,
        )


@contextmanager
def _without_collector() -> Iterator[None]:
    """Let Python's collector rest, which looks at a schedule's objects ten times for nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@lru_cache(maxsize=3)
@_without_collector()
def _schedule(
    model: Model,
    train: TrainLayout,
    infer: InferLayout,
    watermark_bytes: int,
    bundle_bytes: int,
    speeds: tuple[float, ...] | None,
    group_order: tuple[str, ...] | None,
) -> Schedule:
    return make_schedule(
        train_metas(model, train),
        rollout_metas(model, infer),
        watermark_bytes=watermark_bytes,
        bundle_bytes=bundle_bytes,
        speeds=speeds,
        group_order=group_order,
    )


def train_layout(world: int, **sizes: int) -> TrainLayout:
    """A layout for so many training ranks: like the published one as far as that divides.

    Args:
        world: training ranks.
        **sizes: pp, ep, tp, replicas, fsdp where they shall be other.

    Raises:
        UsageError: the sizes given do not divide the number of ranks.
    """
    given = math.prod(sizes.values())
    if given < 1 or world % given:
        raise UsageError(f"{world} training ranks are no multiple of {sizes}")
    left = world // given
    pp = sizes.get("pp", _PP_TRAIN if left % _PP_TRAIN == 0 and left > _PP_TRAIN else 1)
    left //= 1 if "pp" in sizes else pp
    ep = sizes.get("ep", math.gcd(left, _EP_TRAIN) if left > _EP_TRAIN else 1)
    left //= 1 if "ep" in sizes else ep
    fsdp = sizes.get("fsdp", left)
    if "fsdp" in sizes:
        ep *= left
    found = TrainLayout(
        fsdp=fsdp, pp=pp, ep=ep, tp=sizes.get("tp", 1), replicas=sizes.get("replicas", 1)
    )
    assert found.world == world, (found, world)
    return found


def infer_layout(world: int, ep: int | None = None, tp: int = 1) -> InferLayout:
    """A layout for so many workers: replicas of the largest expert parallelism up to 32."""
    chosen = ep or max(k for k in range(1, _EP_INFER + 1) if world % k == 0)
    if world % chosen:
        raise UsageError(f"{world} inference workers are no multiple of ep={chosen}")
    return InferLayout(ep=chosen, tp=tp, replicas=world // chosen)


@lru_cache(maxsize=4)
def published_times(attribution: Attribution = "bytes") -> StageTimes:
    """Compute rates from the published Kimi-K2 update."""
    model, train, infer = KIMI_K2
    deployment = Deployment(model=load_model(model), train=train, infer=infer)
    return StageTimes.of(deployment.schedule(), attribution)


@lru_cache(maxsize=1)
def published_deployment() -> Deployment:
    """The published update as nearly as it is known.

    From an author's articles on it (le.qun.ch, 2025-09), quoted: its machines have EFA; its dense
    parameters go first, and their writes take longer than their compute and hide the barrier; the
    experts' compute takes longer than their writes. Concluded from the second: a rank begins the
    experts when its own dense writes have ended. Of the ways to spread the published compute only
    "bytes" agrees with both: by roofline the dense parameters' compute takes 334 ms and by calls
    712, their writes 318 at line rate.

    The watermark is not published; guessed: room for two of the largest tasks, one that is made
    while the other is sent. The README says what hangs on it. The rule was chosen in sight of the
    published waiting, which is thus no test of it.

    Known to differ: one of the articles has dense parameters sharded inside each node, so that
    gathering them takes no NIC; here they are sharded over a stage's 128 ranks, which puts 1.4 GB
    on each training GPU's NICs, 4 % of what they send. And it says that the last barrier waits for
    an especially slow rank: here all ranks of a stage are equally fast.
    """
    model, train, infer = KIMI_K2
    wide = Deployment(
        model=load_model(model),
        train=train,
        infer=infer,
        profile="efa_2x200",
        group_order=("dense", "experts"),
        drains=True,
    )
    largest = max(task.nbytes for task in wide.schedule().tasks)
    return replace(wide, watermark_bytes=2 * largest)


def baselines_of(deployment: Deployment, schedule: Schedule) -> list[Baseline]:
    """The other ways to do the same update."""
    _, model_bytes = target_shards(deployment.model, InferLayout(ep=1), 0)
    profile = deployment.profile
    return [
        gather_and_broadcast(schedule, deployment.infer.replicas, model_bytes, profile=profile),
        broadcast_per_shard(schedule, model_bytes, profile=profile),
    ]


_Change = Callable[[Deployment], Deployment]


def _changes(base: Deployment) -> dict[str, _Change]:
    """The changes that can be asked: name -> the deployment with one thing changed."""
    halved = tuple(0.5 if rank == 0 else 1.0 for rank in range(base.train.world))
    # Every row is shared by all NICs of a device: one slow NIC of two makes the device as slow.
    return {
        "as it is": lambda d: d,
        "one training NIC at half its rate": lambda d: replace(d, slow=SlowNic("train0")),
        "the same, and the schedule knows": lambda d: replace(
            d, slow=SlowNic("train0"), speeds=halved
        ),
        "one inference NIC at half its rate": lambda d: replace(d, slow=SlowNic("rollout0")),
        "100 inference GPUs": lambda d: replace(d, infer=infer_layout(100)),
        "EFA, 2 x 200 Gb/s": lambda d: replace(d, profile="efa_2x200"),
        "half the watermark": lambda d: replace(d, watermark_bytes=d.watermark_bytes // 2),
        "dense parameters first": lambda d: replace(d, group_order=("dense", "experts")),
        "unsharding costs nothing": lambda d: replace(d, factors=(("unshard", 0.0),)),
        "compute by roofline": lambda d: replace(d, attribution="roofline"),
        "compute by calls": lambda d: replace(d, attribution="calls"),
    }


def change_names(base: Deployment) -> tuple[str, ...]:
    """Names of the changes that `what_ifs` knows."""
    return tuple(_changes(base))


def what_ifs(
    base: Deployment, names: Sequence[str] | None = None, *, seed: int = 0
) -> Iterator[tuple[str, Prediction]]:
    """Predict a deployment with one thing changed, for each of the changes.

    Args:
        base: what it is compared with.
        names: which changes; None: all.
        seed: of the fabric.

    Raises:
        UsageError: an unknown change.
    """
    changes = _changes(base)
    unknown = set(names or ()) - set(changes)
    if unknown:
        raise UsageError(f"unknown: {sorted(unknown)}; there are: {list(changes)}")
    for name in names or changes:
        yield name, changes[name](base).predict(seed=seed)


_PIPELINE: Final = 16 * MiB
"""A ring passes on pieces of this size: long against a NIC's start-up, short against the whole."""

_SHORT, _LONG, _AHEAD = 8, 40, 3  # pieces simulated; under way to rank 0


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
    """Everything goes to training rank 0, which broadcasts it to the first worker of each replica.

    Rank 0 passes on what it has while more comes in, and the broadcast is a chain, so that it sends
    one copy only. What the first workers then do inside their replica is not counted. Two lengths
    are simulated; the rest of the model is their slope.

    Args:
        schedule: for the numbers of ranks and workers.
        replicas: copies of the model in inference.
        model_bytes: of one copy, as inference holds it.
        profile: of the machines.
    """
    total_s = _by_slope(lambda pieces: _chain_s(schedule, replicas, pieces, profile), model_bytes)
    return Baseline(
        "gather to rank 0, broadcast",
        total_s * 1e3,
        "the NIC of training rank 0: every byte in and, meanwhile, out",
        model_bytes,
        f"{_LONG} pieces of {_PIPELINE // MiB} MiB simulated, the rest by slope; fan-out is free",
    )


def _by_slope(simulate: Callable[[int], float], model_bytes: int) -> float:
    """Seconds for a whole model, from two simulated numbers of pieces."""
    short_s, long_s = simulate(_SHORT), simulate(_LONG)
    slope_s = (long_s - short_s) / ((_LONG - _SHORT) * _PIPELINE)
    return short_s + slope_s * (model_bytes - _SHORT * _PIPELINE)


def _chain_s(schedule: Schedule, replicas: int, pieces: int, profile: str) -> float:
    """Simulated seconds until the first worker of the last replica has so many pieces."""
    ranks = schedule.ranks
    with Fleet(ranks, replicas, profile, region_bytes=pieces * _PIPELINE) as fleet:
        rows = count_imms(Single(_PIPELINE), *fleet.nics)
        senders = fleet.trains[1:] or fleet.trains

        def send(piece: int) -> None:
            """A rank in turn sends its piece to rank 0, which asks for a few ahead."""
            if piece >= pieces:
                return
            k, at = piece % len(senders), piece * _PIPELINE
            source = fleet.sources[k + 1 if len(senders) < ranks else k]
            senders[k].submit_single_write(
                _PIPELINE, (source, at), (fleet.staging[0], at), imm=piece
            )

        async def rank_0() -> None:
            for piece in range(pieces):
                at = piece * _PIPELINE
                await fleet.trains[0].expect_imm_count(piece, rows)
                send(piece + _AHEAD)
                fleet.trains[0].submit_single_write(
                    _PIPELINE, (fleet.sources[0], at), (fleet.targets[0], at), imm=piece
                )

        async def main() -> float:
            hops = [asyncio.ensure_future(_hop(fleet, k, pieces, rows)) for k in range(replicas)]
            for piece in range(_AHEAD):
                send(piece)
            await asyncio.gather(rank_0(), *hops)
            return asyncio.get_running_loop().time()

        return fleet.cluster.run(main())


async def _hop(fleet: Fleet, k: int, pieces: int, rows: int) -> None:
    """Worker k of a chain passes each piece on as soon as it has it."""
    engine = fleet.rollouts[k]
    for piece in range(pieces):
        await engine.expect_imm_count(piece, rows)
        if k + 1 < len(fleet.rollouts):
            at = piece * _PIPELINE
            where = ((fleet.relays[k], at), (fleet.targets[k + 1], at))
            engine.submit_single_write(_PIPELINE, *where, imm=piece)


def broadcast_per_shard(
    schedule: Schedule, model_bytes: int, *, profile: str = "cx7_400"
) -> Baseline:
    """Each shard's owner broadcasts it to all rollout workers over a ring, as NCCL does.

    A broadcast delivers every byte to every member of its communicator, whether it needs it or not,
    and collectives of one communicator run one after another.

    Two lengths are simulated over the whole ring; the rest of the model is their slope.
    """
    workers = len(schedule.receivers)
    total_s = _by_slope(lambda pieces: _ring_s(schedule, pieces, profile), model_bytes)
    return Baseline(
        "broadcast per shard (ring)",
        total_s * 1e3,
        f"the NICs of all {workers} rollout workers: each receives the whole model",
        model_bytes,
        f"{_LONG} pieces of {_PIPELINE // MiB} MiB over {workers} hops, the rest by slope",
    )


def _ring_s(schedule: Schedule, pieces: int, profile: str) -> float:
    """Simulated seconds until the last worker of the ring has so many pieces."""
    workers = len(schedule.receivers)
    with Fleet(1, workers, profile, region_bytes=pieces * _PIPELINE) as fleet:
        rows = count_imms(Single(_PIPELINE), *fleet.nics)

        async def main() -> float:
            hops = [asyncio.ensure_future(_hop(fleet, k, pieces, rows)) for k in range(workers)]
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


COLOURS: Final = {
    "load": "#4c78a8",
    "unshard": "#f58518",
    "gather": "#f58518",
    "fuse": "#b279a2",
    "quantise": "#e45756",
    "make": "#e45756",
    "submit": "#9d755d",
    "other": "#bab0ac",
    "watermark": "#eeeeee",
    "drain": "#dddddd",
    "write": "#54a24b",
    "barrier": "#222222",
}
"""A colour for each stage."""


def from_reports(spans: Iterable[Span]) -> list[MeshSpan]:
    """Spans of real workers, from the first one's start on."""
    found = list(spans)
    first_s = min(span.start_s for span in found)
    return [
        MeshSpan(
            f"rank {span.rank}",
            span.stage,
            span.task,
            (span.start_s - first_s) * 1e3,
            (span.stop_s - first_s) * 1e3,
        )
        for span in found
    ]


def write_perfetto(path: str | PathLike[str], spans: Iterable[MeshSpan]) -> None:
    """Write a trace for ui.perfetto.dev: a process a sub-mesh, a track a stage."""
    trace = Trace("host")
    for span in spans:
        # Writes of several tasks overlap: they are pairs of begin and end, as transfers are.
        kind: Literal["transfer", "step"] = "transfer" if span.stage == "write" else "step"
        times = span.start_ms / 1e3, span.stop_ms / 1e3
        trace.add(TraceSpan(kind, span.mesh, span.stage, span.task, *times, {}))
    trace.write(path)


def draw(axes: Axes, spans: Sequence[MeshSpan], lanes: Sequence[str]) -> None:
    """Draw one sub-mesh's, or rank's, stages as bars: a lane a stage, from top to bottom."""
    for y, lane in enumerate(lanes):
        mine = [span for span in spans if span.stage == lane]
        bars = [(span.start_ms, span.stop_ms - span.start_ms) for span in mine]
        alpha = 0.35 if lane == "write" else 1.0  # those of neighbours overlap
        colour = COLOURS.get(lane, "#888888")
        # The edge keeps a bar that is thinner than a pixel from vanishing.
        axes.broken_barh(
            bars, (y - 0.4, 0.8), facecolors=colour, edgecolors=colour, linewidth=0.4, alpha=alpha
        )
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("ms")

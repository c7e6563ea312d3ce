"""Questions about a deployment: plan it, predict it, and compare it with other ways.

The other ways get their best case: they send what is quantised already, compute costs nothing,
transfers follow each other without a pause, and the fan-out inside a replica is free. What is left
is the time of a NIC that carries each byte once, in and out, and of a copy in the receiver's
memory.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from tep import UsageError
from tep.apps import HBM_BYTES_S
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
from tep.apps.rl.predict import (
    DENSE_MS,
    KIMI_K2,
    Attribution,
    Prediction,
    StageTimes,
    predict,
)
from tep.apps.rl.schedule import WATERMARK_BYTES, make_schedule
from tep.base.units import GiB
from tep.sim import Profile, doubts, load_profile

__all__ = [
    "BUNDLE_BYTES", "Deployment", "comparison", "infer_layout", "published_deployment",
    "published_times", "train_layout",
]  # fmt: skip


BUNDLE_BYTES: Final = 1 * GiB
"""Small parameters share a task up to this; a layer's experts at full scale never do. Guessed: well
below the watermark, and far above what a request costs."""

_EP_TRAIN, _PP_TRAIN, _EP_INFER = 8, 2, 32  # of the published deployment, where they divide


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A model between two layouts, on machines of one profile.

    Attributes:
        watermark_bytes, bundle_bytes: of the schedule.
        attribution, dense_ms: of published compute times.
        group_order: of mesh groups; None: experts first.
        drains: as of `predict`.
    """

    model: Model
    train: TrainLayout
    infer: InferLayout
    profile: Profile | str = "cx7_400"
    watermark_bytes: int = WATERMARK_BYTES
    bundle_bytes: int = BUNDLE_BYTES
    attribution: Attribution = "roofline"
    dense_ms: float = DENSE_MS
    group_order: tuple[str, ...] | None = None
    drains: bool = False

    def doubts(self, factor: float) -> Iterator[tuple[str, Deployment]]:
        """Yield both ends of what is guessed: of the machine, the watermark if it is the usual one,
        and how compute is spread; see tep.sim.doubts. More dense compute leaves less for experts,
        which end last; by bytes it has no part, so that it is a fast end of its own.
        """
        machine = load_profile(self.profile)
        machines = dict(doubts(machine, factor))
        for end, rule, times in (
            ("slow", self.attribution, 1 / factor),
            ("fast", "bytes", factor),
            ("fast, more dense", self.attribution, factor),
        ):
            found = replace(
                self,
                profile=machines.get(end.partition(",")[0], machine),
                attribution=rule,
                dense_ms=self.dense_ms * times,
            )
            if self.watermark_bytes == WATERMARK_BYTES:
                with suppress(UsageError):  # a task needs more: the watermark stays
                    other = replace(found, watermark_bytes=round(WATERMARK_BYTES * times))
                    other.schedule()
                    found = other
            yield end, found

    def schedule(self) -> Schedule:
        """Compute the routing table; the last few are remembered."""
        # Without what the table does not depend on, so that such deployments share it.
        same = replace(self, profile="", attribution="roofline", dense_ms=DENSE_MS)
        return _schedule(replace(same, drains=False))

    def predict(
        self, schedule: Schedule | None = None, *, seed: int = 0, spans: bool = False
    ) -> Prediction:
        """Simulate one update."""
        return predict(
            schedule or self.schedule(),
            published_times(self.attribution, self.dense_ms),
            profile=self.profile,
            seed=seed,
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
def _schedule(of: Deployment) -> Schedule:
    return make_schedule(
        train_metas(of.model, of.train),
        rollout_metas(of.model, of.infer),
        watermark_bytes=of.watermark_bytes,
        bundle_bytes=of.bundle_bytes,
        group_order=of.group_order,
    )


def train_layout(world: int, **sizes: int) -> TrainLayout:
    """A layout for so many training ranks: like the published one as far as that divides.

    `sizes` are pp, ep, tp, replicas, fsdp where they shall be other. UsageError: they do not
    divide the number of ranks.
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
def published_times(
    attribution: Attribution = "roofline", dense_ms: float = DENSE_MS
) -> StageTimes:
    """Compute rates from the published Kimi-K2 update."""
    model, train, infer = KIMI_K2
    deployment = Deployment(model=load_model(model), train=train, infer=infer)
    return StageTimes.of(deployment.schedule(), attribution, dense_ms)


def published_deployment() -> Deployment:
    """The published update as nearly as it is known.

    From an author's articles on it (le.qun.ch, 2025-09), quoted: its machines have EFA; its dense
    parameters go first, and their writes take longer than their compute and hide the barrier; the
    experts' compute takes longer than their writes. Concluded from the second: a rank begins the
    experts when its own dense writes have ended.

    Known to differ: the articles say that the last barrier waits for an especially slow rank; here
    all ranks of a stage are equally fast.
    """
    model, train, infer = KIMI_K2
    return Deployment(
        model=load_model(model),
        train=train,
        infer=infer,
        profile="efa_2x200",
        group_order=("dense", "experts"),
        drains=True,
    )


def comparison(deployment: Deployment, ours: Prediction) -> list[dict[str, object]]:
    """Return a row a way to do the same update: its time, its factor, and the link that is busy."""
    _, model_bytes = target_shards(deployment.model, InferLayout(ep=1), 0)
    machine = load_profile(deployment.profile)
    line_ms = model_bytes * 8e3 / (machine.wire_bps * machine.nics)
    copied_ms = 2e3 * model_bytes / HBM_BYTES_S
    workers, busiest = deployment.infer.world, ours.links[0]
    busy = {
        "gather to rank 0, broadcast": "the NICs of training rank 0: every byte in and out",
        "broadcast per shard (ring)": f"the NICs of all {workers} rollout workers: every byte in",
    }
    link = f"{busiest.name} ({busiest.fraction:.0%})"
    rows = [("static schedule of one-sided writes", ours.total_ms, link, busiest.nbytes)]
    rows += [
        (f"{way}, best case", line_ms + copied_ms, link, model_bytes) for way, link in busy.items()
    ]
    return [
        {
            "way": way,
            "ms": round(ms),
            "factor": round(ms / ours.total_ms, 1),
            "busy": link,
            "GB over it": round(nbytes / 1e9, 1),
        }
        for way, ms, link, nbytes in rows
    ]

"""Published numbers of a trillion-parameter update, each with its source; and rates made of them.

Inputs of the prediction, and what it is compared with. No model lives here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from tep.apps.rl.routes import Schedule, Task

__all__ = [
    "KIMI_K2",
    "LINE_BYTES_PER_S",
    "OPERATIONS",
    "TOTAL_MS",
    "WAIT_MS",
    "Attribution",
    "StageTimes",
]

Attribution = Literal["roofline", "bytes", "calls"]
"""How a published total is shared out to tasks.

roofline: bytes at the quoted rate of the hardware, LINE_BYTES_PER_S, and what is then left of it by
tensors. bytes, calls: all of it by bytes, or by tensors. What was measured is not published, so
that the three together say how much hangs on it: of the published total of Kimi-K2 they make 92 %,
89 % and 118 % (bytes, roofline, calls). bytes is the plainest and the default.
"""

LINE_BYTES_PER_S: Final[Mapping[str, float]] = {
    "load": 63e9,
    "unshard": 450e9,
    "quantise": 3.35e12 / 1.5,
}
"""What bytes of a stage take at the least: PCIe gen 5 x16 one way; NVLink 4 one way, for each
gathered byte; HBM3 of an H100, for two bytes read and one written of each two gathered. Source:
vendor pages, quoted. Fusing has none: where it is not a copy it takes no bytes at all."""


class Operation(NamedTuple):
    """One line of the published table: a training rank's time in one update.

    Attributes:
        total_ms: in one update.
        calls: how often.
    """

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


@dataclass(frozen=True, slots=True)
class Deployment:
    """The published deployment: parallelism of training and of inference.

    Attributes:
        model: name.
        fsdp, pp, ep: of training.
        infer_ep: of inference.
        replicas: of inference.
    """

    model: str
    fsdp: int
    pp: int
    ep: int
    infer_ep: int
    replicas: int


KIMI_K2: Final = Deployment("kimi-k2", 16, 2, 8, 32, 4)
"""Source: arXiv 2510.27656 v2, section 7: FSDP/PP/EP = 16/2/8 and EP 32, quoted. That 128 GPUs are
four replicas, each with data-parallel attention, is inferred: 1,144 submits a rank are about
experts x 4 replicas plus 13 dense parameters of a layer to each of 128 GPUs."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of compute for each byte, and for each tensor, of each stage.

    Attributes:
        per_byte: stage -> seconds a byte: load of a rank's own shards, else of gathered bytes.
        per_tensor: stage -> seconds a tensor.
        per_row: seconds to submit a row.
    """

    per_byte: Mapping[str, float]
    per_tensor: Mapping[str, float]
    per_row: float

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        attribution: Attribution = "bytes",
        operations: Mapping[str, Operation] = OPERATIONS,
    ) -> StageTimes:
        """Make rates of published totals.

        Args:
            schedule: of the published deployment, which says how many bytes the totals are for.
            attribution: see there.
            operations: the totals.
        """
        gathered = tensors = 0
        for task in schedule.tasks:
            gathered += task.gather_bytes * len(task.members)
            tensors += len(task.gathers) * len(task.members)
        own = sum(task.gather_bytes for task in schedule.tasks)  # each byte is loaded once
        ranks = schedule.ranks
        per_byte: dict[str, float] = {}
        per_tensor: dict[str, float] = {"other": operations["other"].total_ms / 1e3 * ranks}
        for name in ("load", "unshard", "fuse", "quantise"):
            seconds = operations[name].total_ms / 1e3 * ranks
            nbytes = own if name == "load" else gathered
            by_bytes = {"bytes": seconds, "calls": 0.0}.get(attribution)
            if by_bytes is None:
                rate = LINE_BYTES_PER_S.get(name)
                by_bytes = min(seconds, nbytes / rate) if rate else 0.0
            per_byte[name] = by_bytes / nbytes
            per_tensor[name] = seconds - by_bytes
        per_tensor = {name: seconds / tensors for name, seconds in per_tensor.items()}
        per_row = operations["submit"].total_ms / 1e3 * ranks / len(schedule.rows)
        return cls(per_byte, per_tensor, per_row)

    def seconds(self, task: Task, rows: float) -> dict[str, float]:
        """Compute time of one task on one of its ranks, which writes so many rows in the mean."""
        own = task.gather_bytes / len(task.members)
        found = {
            name: rate * (own if name == "load" else task.gather_bytes)
            for name, rate in self.per_byte.items()
        }
        for name, each in self.per_tensor.items():
            found[name] = found.get(name, 0.0) + each * len(task.gathers)
        found["submit"] = self.per_row * rows
        return found

    def scaled(self, **factors: float) -> StageTimes:
        """The same with some stages faster or slower, e.g. unshard=0."""
        by_byte = {name: rate * factors.get(name, 1.0) for name, rate in self.per_byte.items()}
        by_tensor = {name: each * factors.get(name, 1.0) for name, each in self.per_tensor.items()}
        return StageTimes(by_byte, by_tensor, self.per_row * factors.get("submit", 1.0))

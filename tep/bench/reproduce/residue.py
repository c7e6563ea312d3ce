"""Leave-one-out: the simulation of each point without that point. Costs some minutes of CPU.

A fitted point: its numbers come from all other points; if these no longer determine one, from the
other NIC's points, or from a guess that was made without this point. A predicted point: the
simulated value, since nothing was fitted to it. An input has no such value unless another source
gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tep import sim
from tep.apps.kvcache import ttft
from tep.apps.kvcache.simulate import Plant, first_token
from tep.apps.kvcache.ttft import FITTED_ROWS, OVERHEAD, PUBLISHED, PUBLISHED_ROWS
from tep.apps.moe.kernels import Gpu, load_gpu
from tep.apps.moe.predict import Workload, predict, profile_of
from tep.base.units import PS_PER_US, KiB
from tep.bench.reproduce.runs import Outcome, layer_us, post_all_us
from tep.bench.reproduce.tables import NIC_PROFILES, Point, load_table
from tep.sim.fit import Measured, fit, left_out, model_gbps

__all__ = ["leave_one_out"]

Floats = npt.NDArray[np.float64]
Key = tuple[str, str]
"""Table and point."""

_QUANTA: Final = tuple(KiB << k for k in range(4, 9))
_GPU_FIELDS: Final = ("memory_bytes_s", "nvlink_bytes_s", "push_hidden")
_SHIFT: Final = 0.02


def leave_one_out(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Fill in `left_out` of every point that can be estimated without itself."""
    values: dict[Key, float] = {}
    names = {outcome.table.name for outcome in outcomes}
    for name, work in _WORK.items():
        if names & set(name.split()):
            values |= work()
    for one in outcomes:
        if one.point.kind == "predicted" and one.simulated is not None:
            values[one.table.name, one.point.name] = one.simulated
    return [replace(one, left_out=values.get((one.table.name, one.point.name))) for one in outcomes]


def _p2p() -> dict[Key, float]:
    """Estimate by a fit to the NIC's other points.

    One of the two smaller single writes alone determines only the sum of `fill` and `ack`: then
    `fill`, in bytes of the whole device, is taken from the other NIC.
    """
    found: dict[Key, float] = {}
    machines = {nic: sim.load_profile(name) for nic, name in NIC_PROFILES.items()}
    for nic, machine in machines.items():
        points = [point for point in load_table("p2p").points if point.keys["nic"] == nic]
        measured = [Measured(p.keys["kind"], int(p.keys["bytes"]), p.published) for p in points]
        values = left_out(measured, machine)
        fills = {one.fill_bytes * one.nics for name, one in machines.items() if name != nic}
        like_other = replace(machine, fill_bytes=fills.pop() // machine.nics)
        largest = max(one.nbytes for one in measured if one.kind == "single")
        for k, one in enumerate(measured):
            if one.kind == "single" and one.nbytes < largest:
                rest = [*measured[:k], *measured[k + 1 :]]
                values[k] = model_gbps(fit(rest, like_other, held=("fill_bytes",)).profile, one)
        found |= {("p2p", point.name): value for point, value in zip(points, values, strict=True)}
    return found


def _kvcache() -> dict[Key, float]:
    """Fit to the three other rows, among them those that the shipped numbers were not fitted to."""
    found: dict[Key, float] = {}
    for row in FITTED_ROWS:
        rest = [other for other in PUBLISHED_ROWS if other is not row]
        model, overhead = ttft.fit(PUBLISHED.layout, PUBLISHED.chunk_tokens, rest, OVERHEAD)
        plant = Plant(prefillers=1, decoders=1, fabric="timing", model=model, overhead=overhead)
        said, last = first_token(row.ntokens, plant), model.chunks(row.ntokens)[-1]
        transfer_s = overhead.start_s + layer_us(model.last_pages(row.ntokens)) / 1e6
        values = {
            "ttft_same_node": model.compute_s(row.ntokens),
            "ttft_disaggregated": said.ttft_s(),
            "added": said.added_s(),
            "layer_compute": model.chunk_layer_s(last),
            "layer_transfer": transfer_s,
        }
        found |= {("kvcache", f"{row.ntokens} {key}"): s * 1e3 for key, s in values.items()}
    return found


def _quantum() -> dict[Key, float]:
    """Choose the quantum among powers of two by the other three points it was fitted to."""
    points = [p for p in load_table("moe-decode").points if p.of == "nic.quantum"]
    machine = profile_of(Workload(nic="cx7"))
    said: dict[int, list[float]] = {}
    for quantum in _QUANTA:
        steps = {}
        for ep in sorted({int(point.keys["ep"]) for point in points}):
            changed = replace(machine, quantum_bytes=quantum)
            steps[ep] = predict(Workload(ep=ep, nic="cx7"), machine=changed)
        said[quantum] = [_half(steps[int(p.keys["ep"])], p.keys["op"]) for p in points]
    published = np.array([point.published for point in points])
    found = {}
    for k, point in enumerate(points):
        rest = np.arange(len(points)) != k
        errors = {
            q: np.square(np.array(v)[rest] / published[rest] - 1).sum() for q, v in said.items()
        }
        found["moe-decode", point.name] = said[min(errors, key=lambda q: errors[q])][k]
    return found


def _half(step: object, op: str) -> float:
    value: float = getattr(step, f"{op}_us")
    return value


def _gpu() -> dict[Key, float]:
    """Fit memory, NVLink and hidden time by one step of least squares from the shipped values."""
    keys = [
        (table, point)
        for table in ("moe-prefill", "moe-private")
        for point in load_table(table).points
        if "nvlink_bytes_s" in point.of
    ]
    base = load_gpu("cx7")  # neither the numbers fitted here nor these points depend on the NIC
    now = _gpu_says(base, keys)
    columns = []
    for field in _GPU_FIELDS:
        moved = replace(base, **{field: getattr(base, field) * (1 + _SHIFT)})
        columns.append((_gpu_says(moved, keys) - now) / _SHIFT)
    slope = np.stack(columns, axis=1)
    published = np.array([point.published for _, point in keys])
    scale = np.array([1.0 if table == "moe-private" else p.published / 100 for table, p in keys])
    found = {}
    for k, (table, point) in enumerate(keys):
        rest = np.arange(len(keys)) != k
        miss = ((published - now) / scale)[rest]
        step, *_ = np.linalg.lstsq((slope / scale[:, None])[rest], miss, rcond=None)
        found[table, point.name] = float(now[k] + slope[k] @ step)
    return found


def _gpu_says(gpu: Gpu, keys: Sequence[tuple[str, Point]]) -> Floats:
    prefill = predict(Workload.prefill(ep=8), gpu=gpu)
    private = {
        tokens: predict(Workload(ep=8, private_tokens=tokens), gpu=gpu).dispatch_us
        for tokens in (32, 24, 8)
    }
    values = []
    for table, point in keys:
        if table == "moe-prefill":
            values.append(_half(prefill, point.keys["op"]))
        else:
            tokens = int(point.keys["private_tokens"])
            values.append(100 * (private[tokens] / private[32] - 1))
    return np.array(values)


def _rest_peer() -> dict[Key, float]:
    """Take a second burst's cost for the proxy from the other NIC: each has one point for it."""
    gpus = {"EFA": load_gpu("efa"), "CX7": load_gpu("cx7")}
    found = {}
    for point in load_table("moe-private").points:
        if "rest_peer" not in point.of:
            continue
        nic, ep = point.keys["nic"], int(point.keys["ep"])
        other = next(gpu for name, gpu in gpus.items() if name != nic)
        gpu = replace(gpus[nic], rest_peer=other.rest_peer)
        took = [
            predict(Workload(ep=ep, nic=nic.lower(), private_tokens=tokens), gpu=gpu).dispatch_us
            for tokens in (int(point.keys["private_tokens"]), 32)
        ]
        found["moe-private", point.name] = 100 * (took[0] / took[1] - 1)
    return found


def _poll() -> dict[Key, float]:
    """Let immediates cost the worker nothing, as before there was this number."""
    machine = replace(profile_of(Workload(nic="efa")), poll_ps=0)
    return {
        ("moe-others", point.name): _half(
            predict(Workload(ep=int(point.keys["ep"]), nic="efa"), machine=machine),
            point.keys["op"],
        )
        for point in load_table("moe-others").points
        if point.kind == "fitted"
    }


def _kernels() -> dict[Key, float]:
    """Take the other NIC's published time: both NICs have one kernel."""
    points = [point for point in load_table("moe-kernels").points if point.kind == "given"]
    return {
        ("moe-kernels", point.name): other.published
        for point in points
        for other in points
        if other is not point and other.keys["kernel"] == point.keys["kernel"]
    }


def _post_all() -> dict[Key, float]:
    """Compute the cost of a row from the same NIC's scatters to fewer peers."""
    points = [p for p in load_table("scatter").points if p.name.endswith("p50")]
    found = {}
    for point in (p for p in points if p.kind == "given" and p.keys["stage"] == "post_all"):
        nic, peers = point.keys["nic"], int(point.keys["ep"]) - 1
        rest = [p for p in points if p.keys["nic"] == nic and p is not point]
        row_us = sum(p.published / (int(p.keys["ep"]) - 1) for p in rest) / len(rest)
        machine = replace(
            sim.load_profile(NIC_PROFILES[nic]), post_first_ps=round(row_us * PS_PER_US)
        )
        found["scatter", point.name] = post_all_us(machine, peers)
    return found


_WORK: Final[Mapping[str, Callable[[], dict[Key, float]]]] = {
    "p2p": _p2p,
    "kvcache": _kvcache,
    "moe-decode": _quantum,
    "moe-prefill moe-private": _gpu,
    "moe-private": _rest_peer,
    "moe-others": _poll,
    "moe-kernels": _kernels,
    "scatter": _post_all,
}
"""Names of tables -> functions that leave out their points."""

"""Compare every published point with the simulator, also without itself, and write docs/published.

    python -m tests.bench.bench_published --out docs/published --json

As `tep reproduce`, with two more things. Leave-one-out is the simulation of each point without that
point. A fitted point: its numbers come from all other points; if these no longer determine one,
from the other NIC's points, or from a guess that was made without this point. A predicted point:
the simulated value, since nothing was fitted to it. An input has no such value unless another
source gives it. And the report: Markdown, and pictures with published points over simulated curves.
Costs some minutes of CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from tep import sim
from tep.apps.kvcache import ttft
from tep.apps.kvcache.simulate import Plant, first_token
from tep.apps.kvcache.ttft import FITTED_ROWS, OVERHEAD, PUBLISHED, PUBLISHED_ROWS
from tep.apps.moe.kernels import Gpu, load_gpu
from tep.apps.moe.predict import Workload, predict, profile_of
from tep.base.units import PS_PER_US, KiB
from tep.bench.reproduce.runs import layer_us, post_all_us, reproduce, reproduce_at
from tep.bench.reproduce.tables import (
    NIC_PROFILES,
    Outcome,
    Point,
    load_table,
    summary,
    table_names,
)
from tep.sim.fit import Measured, fit, left_out, model_gbps

Floats = npt.NDArray[np.float64]
Key = tuple[str, str]
"""Table and point."""

_QUANTA: Final = tuple(KiB << k for k in range(4, 9))
_GPU_FIELDS: Final = ("memory_bytes_s", "nvlink_bytes_s", "push_hidden")
_SHIFT: Final = 0.02


def key_of(one: Outcome) -> Key:
    """Table and name of its point."""
    return one.table.name, one.point.name


def leave_one_out(outcomes: Sequence[Outcome]) -> dict[Key, float]:
    """The value without itself of every point that can be estimated so."""
    values: dict[Key, float] = {}
    names = {outcome.table.name for outcome in outcomes}
    for name, work in _WORK.items():
        if names & set(name.split()):
            values |= work()
    for one in outcomes:
        if one.point.kind == "predicted" and one.simulated is not None:
            values[key_of(one)] = one.simulated
    return values


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
        plant = Plant(prefillers=1, decoders=1, model=model, overhead=overhead)
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


# ---------------------------------------------------------------- the report

_NO_VALUE: Final = {
    "fitted": "nothing left",
    "given": "nothing left",
    "predicted": "not asked",
    "counted": "not asked",
    "not modelled": "",
}
"""The text of the column "left out" if there is no value, by class."""


def row_of(one: Outcome, left_out: Mapping[Key, float]) -> dict[str, str]:
    """The text of each column of a table, with the column "left out" behind the error."""
    value = left_out.get(key_of(one))
    error = None if value is None else one.table.error(one.point, value)
    said = one.table.error_text(error) or _NO_VALUE[one.point.kind]
    row = one.row()
    behind = {name: row.pop(name) for name in ("class", "of")}
    return row | {"left out": said} | behind


def write_report(
    outcomes: Sequence[Outcome], left_out: Mapping[Key, float], folder: Path
) -> list[Path]:
    """Write report.md, and a picture for each table that has one; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["# Published and simulated", ""]
    for key, value in summary(outcomes).items():
        said = f"{len(value)}: {', '.join(value)}" if isinstance(value, list) else value
        lines.append(f"- {key}: {said}")
    lines += ["", *_COLUMNS_SAID]
    paths = []
    for table, group in groupby(outcomes, lambda one: one.table):
        mine = list(group)
        lines += ["", f"## {table.title} ({table.unit})", "", f"Source: {table.source}."]
        lines += [f"Note: {note}." for note in table.notes]
        picture = _CURVES.get(table.name)
        if picture is not None:
            paths.append(folder / f"{table.name}.png")
            _draw(mine, picture, paths[-1])
            lines += ["", f"![{table.title}]({table.name}.png)"]
        rows = [row_of(one, left_out) for one in mine]
        lines += ["", _line(rows[0]), _line(["---"] * len(rows[0]))]
        lines += [_line(row.values()) for row in rows]
    path = folder / "report.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [path, *paths]


_COLUMNS_SAID: Final = (
    "Every published point is in one class. Fitted: numbers of the simulator were fitted to it, or",
    "chosen in sight of it. Given: it is an input itself. Predicted: nothing was fitted to it.",
    "Counted: pages and steps, from shapes alone. Not modelled: something that matters is missing;",
    "the last column says what, and a value, if any, is no prediction. Left out: how far off the",
    "simulation is without the point. Numbers fitted to it then come from all other points, from",
    "the other NIC, or from an earlier guess. Interval: of a prediction, with all that is guessed",
    "1.5 times as slow and as fast (docs/concepts/simulator.md); no error of the model is in it.",
)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


# ---------------------------------------------------------------- pictures


def _draw(outcomes: Sequence[Outcome], curves: Callable[[Axes], str], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    x = curves(axes)
    colours = {line.get_label(): line.get_color() for line in axes.get_lines()}
    for series, group in groupby(sorted(outcomes, key=lambda one: _series(one, x)), _by(x)):
        if series in colours:
            mine = list(group)
            xs = [float(one.point.keys[x]) for one in mine]
            published = [one.point.published for one in mine]
            axes.plot(xs, published, "o", color=colours[series], markeredgecolor="black")
    axes.plot([], [], "o", color="white", markeredgecolor="black", label="published")
    axes.set_title(outcomes[0].table.title, fontsize=10)
    axes.set_ylabel(outcomes[0].table.unit)
    axes.minorticks_off()  # their labels stand over those of the sizes
    for text in axes.legend(fontsize=8).get_texts():
        text.set_text(text.get_text().replace("_", " "))
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)


def _series(one: Outcome, x: str) -> str:
    return " ".join(value for key, value in one.point.keys.items() if key != x)


def _by(x: str) -> Callable[[Outcome], str]:
    return lambda one: _series(one, x)


def _p2p(axes: Axes) -> str:
    sizes = [KiB << k for k in range(16)]
    for nic, name in NIC_PROFILES.items():
        profile = sim.load_profile(name)
        for kind, style in (("single", "-"), ("paged", "--")):
            rates = [model_gbps(profile, Measured(kind, n, 1.0)) for n in sizes]
            axes.plot(sizes, rates, style, label=f"{kind} {nic}")
    axes.set(xscale="log", xlabel="bytes of a write, or of a page")
    return "bytes"


def _kvcache(axes: Axes) -> str:
    lengths = [2048 << k for k in range(7)]
    for label in (
        *("ttft_same_node", "ttft_disaggregated", "added"),
        *("layer_compute", "layer_transfer"),
    ):
        values = [reproduce_at("kvcache", ntokens=str(n), quantity=label) for n in lengths]
        axes.plot(lengths, values, label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens of the prompt")
    return "ntokens"


def _by_ep(table: str, least: int, most: int, *nics: str) -> Callable[[Axes], str]:
    def curves(axes: Axes) -> str:
        sizes = [ep for ep in (8, 16, 32, 64, 128) if least <= ep <= most]
        for nic in nics:
            for op, style in (("dispatch", "-"), ("combine", "--")):
                values = [reproduce_at(table, op=op, ep=str(ep), nic=nic) for ep in sizes]
                axes.plot(sizes, values, style, label=f"{op} {nic}")
        axes.set(xscale="log", xlabel="ranks", xticks=sizes, xticklabels=map(str, sizes))
        return "ep"

    return curves


def _private(axes: Axes) -> str:
    tokens = (32, 24, 16, 8, 4, 2)
    for nic in NIC_PROFILES:
        for ep, style in (("8", ":"), ("16", "-."), ("32", "--"), ("64", "-")):
            values = [
                reproduce_at("moe-private", private_tokens=str(n), nic=nic, ep=ep) for n in tokens
            ]
            axes.plot(tokens, values, style, label=f"{nic} {ep}")
    axes.set(xlabel="private tokens a peer")
    return "private_tokens"


def _scatter(axes: Axes) -> str:
    sizes = (4, 8, 16, 32, 64, 128)
    for nic in NIC_PROFILES:
        keys = {"stage": "post_all", "nic": nic, "quantile": "p50"}
        values = [reproduce_at("scatter", ep=str(ep), **keys) for ep in sizes]
        axes.plot(sizes, values, label=" ".join(keys.values()))
    axes.set(xscale="log", yscale="log", xlabel="ranks", xticks=sizes, xticklabels=sizes)
    return "ep"


_CURVES: Final[Mapping[str, Callable[[Axes], str]]] = {
    "p2p": _p2p,
    "kvcache": _kvcache,
    "moe-decode": _by_ep("moe-decode", 8, 64, "EFA", "CX7"),
    "moe-others": _by_ep("moe-others", 16, 128, "EFA", "DeepEP_H800"),
    "moe-prefill": _by_ep("moe-prefill", 8, 128, "EFA", "CX7"),
    "moe-private": _private,
    "scatter": _scatter,
}
"""Table -> draws its simulated curves, labelled like the points' other keys; returns the x key."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="tables; none: all of them")
    parser.add_argument("--out", type=Path, help="write report.md and pictures into this folder")
    parser.add_argument("--guessed", type=float, default=1.5, help="of intervals, as everywhere")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)

    outcomes = [
        one for name in args.names or table_names() for one in reproduce(name, args.guessed)
    ]
    without = leave_one_out(outcomes)
    if args.out:
        write_report(outcomes, without, args.out)
    points = [one.document() | {"left_out": without.get(key_of(one))} for one in outcomes]
    if args.json:
        sys.stdout.write(json.dumps({"summary": summary(outcomes), "points": points}) + "\n")
    else:
        for one in outcomes:
            sys.stdout.write(f"{one.table.name}: {'  '.join(row_of(one, without).values())}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The report: outcomes as Markdown, and pictures with published points over simulated curves.

Nothing is simulated here but the points between the published ones that the curves need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final, get_args

from tep import sim
from tep.base.distribution import need
from tep.base.units import KiB
from tep.bench.reproduce.runs import Outcome, reproduce_at
from tep.bench.reproduce.tables import NIC_PROFILES, Class
from tep.sim.fit import Measured, model_gbps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLUMNS", "rows_of", "summary", "write_report"]

COLUMNS: Final = (
    *("point", "published", "simulated", "interval", "error", "left out", "class", "of"),
)


def rows_of(outcomes: Sequence[Outcome]) -> list[dict[str, str]]:
    """Make one row a point, as text."""
    return [
        {
            "point": one.point.name,
            "published": f"{one.point.published:g}",
            "simulated": _number(one.simulated),
            "interval": "" if one.ends is None else " to ".join(map(_number, one.ends)),
            "error": _error(one, one.simulated) + ("" if one.holds else " !"),
            "left out": _error(one, one.left_out) or _NO_VALUE[one.point.kind],
            "class": one.point.kind,
            "of": one.point.of,
        }
        for one in outcomes
    ]


_NO_VALUE: Final = {
    "fitted": "nothing left",
    "given": "nothing left",
    "predicted": "not asked",
    "counted": "not asked",
    "not modelled": "",
}
"""The text of the column "left out" if there is no value, by class."""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _error(one: Outcome, value: float | None) -> str:
    if value is None:
        return ""
    found = one.table.error(one.point, value)
    return f"{found:+.1f}" if one.table.unit == "%" else f"{found:+.1f} %"


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Summarise the points of each class, their errors, and the values that were fitted."""
    found: dict[str, object] = {"points": len(outcomes)}
    for kind in get_args(Class):
        mine = [one for one in outcomes if one.point.kind == kind]
        found[kind] = len(mine)
        errors = [abs(one.error) for one in mine if one.error is not None]
        if kind in {"fitted", "predicted", "not modelled"}:
            found[f"{kind}, median error"] = round(median(errors or [0.0]), 2)
            found[f"{kind}, largest error"] = round(max(errors, default=0.0), 2)
    found["beyond their tolerance"] = sum(not one.holds for one in outcomes)
    numbers = sorted({name for one in outcomes for name in one.point.numbers})
    found["values fitted"] = len(numbers)
    found["fitted values"] = numbers
    found |= _waiting(outcomes)
    return found


def _waiting(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Describe the inputs and the results in the weight update's total."""
    found = {one.point.name: one for one in outcomes if one.table.name == "rl"}
    if not found:
        return {}
    total, wait = found["total ms"], found["wait ms"]
    given = total.point.published - wait.point.published
    said = f"{total.point.published:g} ms published, of which {given:g} are inputs; waiting"
    said += f" {wait.point.published:g} published, {_number(wait.simulated)} simulated"
    return {"rl": said}


def write_report(outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Write report.md, and a picture for each table that has one; return the paths.

    Raises:
        BackendUnavailable: matplotlib is not installed.
    """
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
        lines += ["", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
        lines += [_line([row[name] for name in COLUMNS]) for row in rows_of(mine)]
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


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


# ---------------------------------------------------------------- pictures


def _draw(outcomes: Sequence[Outcome], curves: Callable[[Axes], str], path: Path) -> None:
    need("matplotlib", "plot", "a report with pictures").use("Agg")
    from matplotlib import pyplot as plt

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

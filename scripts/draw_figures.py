"""Draw the figures of the documentation as SVG: `scripts/docs figures`, or this with a folder.

A figure that is drawn here explains one idea; nothing in it is data. Those of NOTEBOOKS are taken
from notebooks: the cells are run, on the simulator, up to the figure.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, FAINT, BLUE, ORANGE, GREEN, RED = (
    "#24292f", "#8c959f", "#0969da", "#bc4c00", "#1a7f37", "#cf222e",
)  # fmt: skip
WHITE = "#ffffff"


def _box(
    ax: Axes, at: tuple[float, float], size: tuple[float, float], text: str, color: str
) -> None:
    """Draw a rounded box with its lower left corner at `at`, and text in its middle."""
    ax.add_patch(
        FancyBboxPatch(at, *size, boxstyle="round,pad=0.02", fc=WHITE, ec=color, lw=1.6, zorder=2)
    )
    x, y = at[0] + size[0] / 2, at[1] + size[1] / 2
    ax.text(x, y, text, ha="center", va="center", color=color, fontsize=10, zorder=3)


def _arrow(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    color: str = INK,
    text: str = "",
    bend: float = 0.0,
    dashed: bool = False,
) -> None:
    """Draw an arrow from one point to another, with its text above the middle."""
    style = f"arc3,rad={bend}"
    ax.add_patch(
        FancyArrowPatch(
            start, end, connectionstyle=style, arrowstyle="-|>", mutation_scale=12, lw=1.4,
            color=color, zorder=1, linestyle="--" if dashed else "-",
        )
    )  # fmt: skip
    if text:
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        y += 0.12 - bend * (end[0] - start[0]) / 2
        ax.text(x, y, text, ha="center", va="bottom", color=color, fontsize=9)


def counting(ax: Axes) -> None:
    """Draw four pages over two NICs, which arrive in another order; the fourth is the last."""
    ax.set_xlim(0, 10.6)
    ax.set_ylim(0, 4.6)
    ax.text(1.0, 4.3, "sender", ha="center", color=INK, fontsize=11, weight="bold")
    ax.text(7.0, 4.3, "receiver", ha="center", color=INK, fontsize=11, weight="bold")
    nics = {1: 3.05, 2: 1.35}
    for number, y in nics.items():
        _box(ax, (2.0, y - 0.3), (0.9, 0.6), f"NIC {number}", FAINT)
        _box(ax, (5.2, y - 0.3), (0.9, 0.6), f"NIC {number}", FAINT)
    pages = {"A": (3.6, 1, BLUE), "B": (2.6, 2, ORANGE), "C": (1.6, 1, GREEN), "D": (0.6, 2, RED)}
    order = {"C": 3.4, "A": 2.5, "D": 1.6, "B": 0.7}
    for page, (y, nic, color) in pages.items():
        _box(ax, (0.2, y - 0.25), (1.0, 0.5), f"page {page}", color)
        _arrow(ax, (1.24, y), (1.96, nics[nic]), color)
    for number, (page, y) in enumerate(order.items(), 1):
        _, nic, color = pages[page]
        _arrow(ax, (6.14, nics[nic]), (6.66, y), color)
        _box(ax, (6.7, y - 0.25), (1.0, 0.5), f"page {page}", color)
        ax.text(7.85, y, f"imm 42: {number} of 4", va="center", color=INK, fontsize=10)
    for color, (y, shift) in zip(
        (BLUE, GREEN, ORANGE, RED), [(3.15, 0), (2.95, 0), (1.45, 0), (1.25, 0)]
    ):
        _arrow(ax, (2.94, y), (5.16, y + shift), color)
    ax.text(9.5, 0.7, "complete", va="center", color=GREEN, fontsize=10, weight="bold")


def striping(ax: Axes) -> None:
    """Draw the six pairs of two NICs here and three there, each with a sixth of the rows."""
    ax.set_xlim(0, 10)
    ax.set_ylim(0, 4.3)
    here, there = (3.1, 1.3), (3.6, 2.2, 0.8)
    for k, y in enumerate(here):
        _box(ax, (1.4, y - 0.3), (1.5, 0.6), f"NIC {k} here", INK)
    for k, y in enumerate(there):
        _box(ax, (7.0, y - 0.3), (1.6, 0.6), f"NIC {k} there", INK)
    for lane in range(6):
        color = (BLUE, ORANGE, GREEN, RED, "#8250df", "#0a7c86")[lane]
        start, end = here[lane % 2], there[lane % 3]
        _arrow(ax, (2.95, start), (6.95, end), color)
        share = 0.16 + 0.12 * (lane // 2) + (0.05 if lane % 2 else 0)
        x, y = 2.95 + 4 * share, start + (end - start) * share
        ax.text(x, y, str(lane), color=WHITE, fontsize=8, ha="center", va="center", zorder=4,
                bbox={"boxstyle": "circle,pad=0.25", "fc": color, "ec": "none"})  # fmt: skip
    ax.text(5.0, 0.12, "pair k joins NIC k mod 2 here with NIC k mod 3 there", ha="center",
            color=FAINT, fontsize=10)  # fmt: skip


def failures(ax: Axes) -> None:
    """Draw a lost row, its burnt immediate, a complete fresh one, and the peer's removal."""
    ax.set_xlim(0, 12.6)
    ax.set_ylim(0, 4.2)
    here, there = 3.0, 1.0
    for y, name in ((here, "sender"), (there, "receiver")):
        ax.plot([1.4, 12.4], [y, y], color=FAINT, lw=1.2, zorder=0)
        ax.text(1.25, y, name, ha="right", va="center", color=INK, fontsize=11, weight="bold")
    parts = (
        (1.5, "1  a row is lost,\nits transfer fails"),
        (4.3, "2  imm 7 is burnt at both ends,\na fresh one is taken"),
        (9.9, "3  remove_peer:\nmemory is free again"),
    )
    for x, title in parts:
        ax.text(x, 3.9, title, color=INK, fontsize=9, va="center")
    for x in (4.05, 9.65):
        ax.plot([x, x], [0.1, 4.2], color=FAINT, lw=0.8, ls=":", zorder=0)

    def down(x: float, color: str, end: float = there + 0.06, dashed: bool = False) -> None:
        share = (here - end) / (here - there)
        _arrow(ax, (x, here - 0.06), (x + 0.6 * share, end), color, dashed=dashed)

    def says(x: float, text: str, color: str) -> None:
        ax.text(x, 0.5, text, color=color, fontsize=9, ha="center", va="center")

    for x in (1.6, 2.0, 2.4):
        down(x, BLUE)
    down(2.8, RED, 1.9)
    ax.text(3.2, 1.8, "\u00d7", color=RED, fontsize=15, ha="center", va="center", weight="bold")
    ax.text(1.6, 3.15, "4 rows, imm 7", color=BLUE, fontsize=9)
    says(2.6, "imm 7: 3 of 4", BLUE)
    down(4.4, ORANGE)
    ax.text(4.3, 3.15, "notice: imm 7", color=ORANGE, fontsize=9)
    says(5.1, "expectation\nof imm 7 fails", ORANGE)
    down(5.7, FAINT, dashed=True)
    ax.text(6.1, 2.1, "late row,\nimm 7", color=FAINT, fontsize=9)
    says(6.6, "counts for\nnobody", FAINT)
    for x in (7.2, 7.6, 8.0, 8.4):
        down(x, GREEN)
    ax.text(7.1, 3.15, "again, imm 8", color=GREEN, fontsize=9)
    says(8.5, "imm 8: 4 of 4,\nall bytes are here", GREEN)
    ax.plot([10.0, 12.3], [1.45, 1.45], color=INK, lw=4, solid_capstyle="butt", zorder=2)
    ax.text(12.3, 1.6, "fence", color=INK, fontsize=9, ha="right")
    for x in (9.9, 10.4, 10.9):
        down(x, FAINT, 1.52, dashed=True)
    says(11.1, "memory is used\nfor something else", INK)


def worlds(ax: Axes) -> None:
    """Draw the same engine over three kinds of networks."""
    ax.set_xlim(0, 10)
    ax.set_ylim(0, 4.3)
    _box(ax, (1.0, 3.4), (8.0, 0.6), "your program; KvCache, weight updates, MoE", INK)
    _box(ax, (1.0, 2.3), (8.0, 0.6), "the engine: plan, post, poll, count", BLUE)
    _arrow(ax, (5.0, 3.36), (5.0, 2.95))
    boxes = (
        (0.2, "chaos fabric\nevery order and fault", ORANGE),
        (3.45, "timing fabric\npublished machines", ORANGE),
        (6.7, "real NICs, tcp, one host\nlibfabric, verbs, local", GREEN),
    )  # fmt: skip
    for x, text, color in boxes:
        _box(ax, (x, 0.6), (3.0, 0.9), text, color)
        _arrow(ax, (x + 1.5, 2.26), (x + 1.5, 1.55))
    ax.text(5.0, 1.9, "one seam, one contract", ha="center", va="center", color=FAINT, fontsize=9,
            bbox={"fc": WHITE, "ec": "none", "pad": 1})  # fmt: skip


FIGURES: dict[str, tuple[Callable[[Axes], None], tuple[float, float]]] = {
    "counting": (counting, (9.0, 3.9)),
    "striping": (striping, (8.0, 3.4)),
    "failures": (failures, (10.0, 3.4)),
    "worlds": (worlds, (8.0, 3.4)),
}


NOTEBOOKS: dict[str, dict[str, int]] = {
    "01-one-write-many-pages": {"arrivals": 2},
    "06-four-questions": {"page_size": 1, "slow_link": 3, "broadcasts": 4},
    "07-a-failover-step-by-step": {"failover": 1},
}
"""Notebook -> figures, each with the index of the notebook's figure."""


def figures_of(notebook: str, count: int) -> list[Figure]:
    """Run a notebook's cells until it has drawn so many figures; return these, in order."""
    path = Path(__file__).parents[1] / "notebooks" / f"{notebook}.ipynb"
    names: dict[str, object] = {}
    before = set(plt.get_fignums())
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            program = compile("".join(cell["source"]), str(path), "exec")
            with contextlib.redirect_stdout(io.StringIO()):
                exec(program, names)  # noqa: S102  # ours
        made = sorted(set(plt.get_fignums()) - before)
        if len(made) >= count:
            return [plt.figure(number) for number in made]
    raise ValueError(f"{path}: draws fewer than {count} figures")


def draw(folder: Path, notebooks: dict[str, dict[str, int]]) -> list[Path]:
    """Draw the figures of this file and those of notebooks into a folder; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    with mpl.rc_context(
        {"svg.hashsalt": "tep", "svg.fonttype": "path", "font.family": "DejaVu Sans"}
    ):
        for name, (paint, size) in FIGURES.items():
            figure, ax = plt.subplots(figsize=size)
            ax.axis("off")
            figure.subplots_adjust(0, 0, 1, 1)
            figure.patch.set_facecolor(WHITE)
            paint(ax)
            made.append(folder / f"{name}.svg")
            figure.savefig(made[-1], metadata={"Date": None})
            plt.close(figure)
        for notebook, wanted in notebooks.items():
            found = figures_of(notebook, max(wanted.values()))
            for name, number in wanted.items():
                made.append(folder / f"{name}.svg")
                found[number - 1].savefig(
                    made[-1], metadata={"Date": None}, bbox_inches="tight", pad_inches=0.1
                )  # a legend may stand beside the axes
            plt.close("all")
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs/img"))
    for file in draw(parser.parse_args().folder, NOTEBOOKS):
        print(file)

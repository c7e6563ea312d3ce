"""`tep bench`: measures, and prints medians beside the numbers they are compared to."""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tep.base.errors import BackendUnavailable
from tep.bench import Figure
from tep.cli.show import Json, busy, emit_json, print_table, progress

if TYPE_CHECKING:
    from tep.bench.scale import Cost

__all__ = ["app", "show_figures"]

app = typer.Typer(
    no_args_is_help=True,
    help="Measure: CPU time, medians, side by side with the numbers they are compared to.",
)
Rounds = Annotated[
    int, typer.Option("--rounds", min=3, help="Rounds of each figure; the median is shown.")
]


@app.command("engine")
def engine(rounds: Rounds = 40, json: Json = False) -> None:
    """Measure the engine's own CPU time a page, a write and a scatter, over NICs without cost."""
    from tep.bench.engine import engine_figures  # numpy is loaded when something is measured

    show_figures("tep bench engine", engine_figures(rounds), 21, json=json)


@app.command("sim")
def sim(rounds: Rounds = 5, json: Json = False) -> None:
    """Measure the simulator: chaos scenarios a second, a large paged write and an all-to-all on the
    timing fabric.
    """
    from tep.bench.simulator import simulator_figures

    show_figures("tep bench sim", simulator_figures(rounds), 4, json=json)


@app.command("scale")
def scale(
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PART", help="Runs whose name holds this; can be repeated."),
    ] = None,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Runs of each; the one with the median CPU.")
    ] = 1,
    json: Json = False,
) -> None:
    """Measure large simulations: CPU, memory and counts of events, each in its own process.

    All of them take minutes. loop is one round of a fixed Python loop: on a busy machine it grows
    as CPU does, so compare CPU only where loop is the same.
    """
    from tep.bench.scale import scale_costs, select

    title = "tep bench scale"
    names = only or []
    with progress(title, len(select(names)), quiet=json) as bar:
        found = []
        for cost in scale_costs(names, rounds):
            found.append(cost)
            bar.advance(bar.task_ids[0])
    if json:
        rows = [asdict(cost) | {"reached": cost.reached} for cost in found]
        emit_json({"command": title, "machine": _machine(), "runs": rows})
        return
    table = (
        {
            "what": cost.what,
            "CPU": f"{cost.cpu_s:.2f} s",
            "aim": _scale_aim(cost),
            "memory": f"{cost.memory_gib:.2f} GiB",
            "events": f"{cost.events:,}",
            "passes": f"{cost.passes:,}",
            "loop": f"{cost.loop_ns:.0f} ns",
            "result": cost.result,
        }
        for cost in found
    )
    columns = ("what", "CPU", "aim", "memory", "events", "passes", "loop", "result")
    print_table(f"{title} ({_machine()})", columns, table)


def _scale_aim(cost: Cost) -> str | None:
    if cost.aim_s is None:
        return None
    return f"< {cost.aim_s:g} {'reached' if cost.reached else 'MISSED'}"


@app.command("peers")
def peers(
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="NAME=PYTHON", help="Python of a peer's own environment."),
    ] = None,
    envs: Annotated[
        Path | None,
        typer.Option(
            "--envs",
            envvar="TEP_PEER_ENVS",
            exists=True,
            file_okay=False,
            help="Folder of such environments: FOLDER/nixl/bin/python and so on.",
        ),
    ] = None,
    rounds: Rounds = 9,
    json: Json = False,
) -> None:
    """Compare tep with NIXL, Mooncake, ucxx and MPI, by turns, between two processes of this host.

    Each has its own environment, with numpy; one without is named as absent. Ratios are to
    tep in the same round, above 1 where the other is better.
    """
    from tep.bench.peers import find_peers, peer_rows

    title = "tep bench peers"
    pythons = find_peers(peer or [], envs)
    try:
        with busy(title, quiet=json):
            found = peer_rows(pythons, rounds)
    except LookupError as error:
        raise BackendUnavailable("the players are missing", (("peers", str(error)),)) from error
    if json:
        rows = [asdict(row) for row in found]
        emit_json({"command": title, "machine": _machine(), "rounds": rounds, "rows": rows})
        return
    table = (
        {
            "who": row.who,
            "what": row.what,
            "median": None if row.median is None else f"{row.median:.2f} {row.unit}",
            "least": None if row.least is None else f"{row.least:.2f}",
            "most": None if row.most is None else f"{row.most:.2f}",
            "to tep": None if row.ratio is None else "{:.2g} ({:.2g} to {:.2g})".format(*row.ratio),
            "CPU": None if row.cpu_ms is None else f"{row.cpu_ms:.2f} ms",
            "absent": row.absent or None,
        }
        for row in found
    )
    columns = ("who", "what", "median", "least", "most", "to tep", "CPU", "absent")
    print_table(f"{title} ({_machine()}; wall time, {rounds} rounds)", columns, table)


@app.command("libfabric")
def libfabric(rounds: Rounds = 15, json: Json = False) -> None:
    """Measure the whole engine over libfabric's tcp, beside a C loop on the same settings."""
    from tep.bench.libfabric import FIGURES, libfabric_figures

    try:
        figures = libfabric_figures(rounds)
        show_figures("tep bench libfabric", figures, FIGURES, json=json, decimals=2)
    except LookupError as error:
        raise BackendUnavailable(
            "the C yardstick cannot be built; apt install gcc libfabric-dev, in a checkout of tep",
            (("cc", str(error)),),
        ) from error


@app.command("efa")
def efa(rounds: Rounds = 15, json: Json = False) -> None:
    """Measure the engine over EFA: the backend `efa`, both of its ways, beside libfabric's two
    fabrics; and those two beside a C loop on the same NIC and settings.

    Needs an EFA device, or a fake one: scripts/fake_efa tep bench efa, in a checkout of tep. The
    fake device takes batches of 64 entries; `--set max_batch=0` lets it take any.
    """
    from tep.bench.efa import COLUMN_FIGURES, column_figures
    from tep.bench.libfabric import EFA_FIGURES, efa_figures

    try:
        figures = itertools.chain(column_figures(rounds), efa_figures(rounds))
        show_figures("tep bench efa", figures, COLUMN_FIGURES + EFA_FIGURES, json=json, decimals=2)
    except LookupError as error:
        raise BackendUnavailable(
            "the C yardstick cannot be built; apt install gcc libfabric-dev, in a checkout of tep",
            (("cc", str(error)),),
        ) from error


def show_figures(
    title: str, figures: Iterable[Figure], total: int, *, json: bool, decimals: int = 1
) -> None:
    """Measure `total` figures while a bar moves, and print them as a table or as JSON."""
    found: list[Figure] = []
    with progress(title, total, quiet=json) as bar:
        for figure in figures:
            found.append(figure)
            bar.advance(bar.task_ids[0])
    machine = _machine()
    if json:
        emit_json(
            {
                "command": title,
                "machine": machine,
                "figures": [_document(figure) for figure in found],
            }
        )
        return
    rows = (
        {
            "what": figure.what,
            "median": f"{figure.value:,.{decimals}f} {figure.unit}",
            "best": f"{figure.best:,.{decimals}f}",
            "worst": None if figure.worst is None else f"{figure.worst:,.{decimals}f}",
            "aim": _aim(figure),
            "ratio": None if figure.ratio is None else f"{figure.ratio:.2f} x {figure.reference:g}",
        }
        for figure in found
    )
    columns = ("what", "median", "best", "worst", "aim", "ratio")
    print_table(f"{title} ({machine}; CPU time)", columns, rows)
    for source in dict.fromkeys(
        figure.reference_source for figure in found if figure.reference_source
    ):
        typer.echo(f"compared to: {source}")


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"


def _document(figure: Figure) -> dict[str, object]:
    return {**asdict(figure), "ratio": figure.ratio, "reached": figure.reached}


def _aim(figure: Figure) -> str | None:
    if figure.aim is None:
        return None
    sign = ">=" if figure.more_is_better else "<="
    return f"{sign} {figure.aim:g} {'reached' if figure.reached else 'MISSED'}"

"""`tep demo`: a real file from one engine to another, over every fabric that runs on this machine.

First come two processes over a real fabric (demo_pair), then the fabrics of one process, here. Only
its count of immediates shows the receiver that the file is there; the SHA-256 is taken afterwards.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt
import typer

from tep import TransferEngine
from tep.base.errors import UsageError
from tep.bench.reproduce.tables import paged_gbps
from tep.cli.demo_pair import PAIRS, File, LeftOut, Moved, move, move_between, receive
from tep.cli.show import Json, Seed, emit_json, print_table, progress
from tep.sim import Cluster

__all__ = ["demo", "read_file"]

U8 = npt.NDArray[np.uint8]

_PROFILES: Final = ("efa_2x200", "efa_4x100", "cx7_400")


def read_file(path: Path) -> U8:
    """Map the bytes of a file, without a copy.

    Raises:
        UsageError: it cannot be read, or is empty.
    """
    try:
        return np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:  # the latter: it is empty
        raise UsageError(
            f"tep demo: --file {path}: {error}; give a file that can be read, and is not empty"
        ) from error


def _loopback(data: U8, file: File) -> Moved:
    with ExitStack() as stack:
        sender, receiver = [
            stack.enter_context(TransferEngine.open("loopback", nics=nics, name=f"demo-{nics}"))
            for nics in (2, 4)
        ]
        return move("loopback", sender, receive(receiver, file), data, file)


def _simulated(name: str, data: U8, file: File) -> Moved:
    """Move the file over the chaos fabric, or the machines of a profile."""
    chaos = name == "chaos"
    machine = None if chaos else name
    with Cluster(2, (2, 4) if chaos else None, machine, seed=file.seed) as cluster:
        sender, receiver = cluster.engines
        return move(
            f"chaos, seed {file.seed}" if chaos else f"timing, {name}",
            *(sender, receive(receiver, file), data, file),
            published_gbps=None if chaos else paged_gbps(name, file.page_bytes),
        )


def _row(run: Moved) -> dict[str, object]:
    measured = not run.fabric.startswith("chaos")  # whose times mean nothing
    return {
        "fabric": run.fabric,
        "processes": run.processes,
        "pages": run.pages,
        "NICs": run.nics,
        "MB a NIC": " + ".join(f"{n / 1e6:.1f}" for n in run.nic_bytes),
        "imms expected": run.imms_expected,
        "imms counted": run.imms_counted,
        "ms": f"{run.us / 1e3:,.2f}" if measured else None,
        "Gb/s": f"{run.gbps:.1f}" if measured else None,
        "published": f"{run.published_gbps:.0f}" if run.published_gbps is not None else None,
        "SHA-256": f"{run.sha256[:12]} {'agrees' if run.agrees else 'DIFFERS'}",
    }


def _print(title: str, runs: Sequence[Moved], left_out: Sequence[LeftOut]) -> None:
    for one in left_out:
        typer.echo(f"Left out: {one.fabric}: {one.why}")
        for what, why in one.tried:
            typer.echo(f"  tried {what}: {why}")
        typer.echo(f"  To get it: {one.cure}")
    rows = [_row(run) for run in runs]
    print_table(title, list(rows[0]), rows)


_NOTES: Final = """The receiver learned of completion by its immediate counter alone.
Times of one process are simulated, but loopback's.
Published: arXiv 2510.27656, Table 2: a long run of pages; this file is a short one.
"""


def _largest_library_file() -> Path:
    """Find the largest file of the running Python's own library, packages not counted."""
    found = Path(sysconfig.get_path("stdlib")).rglob("*")
    own = (path for path in found if path.is_file() and "site-packages" not in path.parts)
    return max(own, key=lambda path: path.stat().st_size)


def demo(
    file: Annotated[
        Path | None, typer.Option("--file", help="What to move; default: Python's largest file.")
    ] = None,
    page_bytes: Annotated[
        int, typer.Option("--page-bytes", min=1, help="Length of a page.")
    ] = 65536,
    seed: Seed = 7,
    json: Json = False,
) -> None:
    """Move a real file from one process to another over the real libfabric, then over the loopback,
    the chaos fabric and the timing fabric, and check every byte.
    """
    path = file or _largest_library_file()
    data = read_file(path)
    whole = File(len(data), page_bytes, seed)
    ways: list[Callable[[], Moved | LeftOut]] = [
        partial(move_between, pair, data, page_bytes, seed=seed) for pair in PAIRS
    ]
    ways += [partial(_loopback, data, whole)]
    ways += [partial(_simulated, name, data, whole) for name in ("chaos", *_PROFILES)]
    found: list[Moved | LeftOut] = []
    with progress("moving the file", len(ways), quiet=json) as bar:
        for way in ways:
            found.append(way())
            bar.advance(bar.task_ids[0])
    runs = [one for one in found if isinstance(one, Moved)]
    left_out = [one for one in found if isinstance(one, LeftOut)]
    if json:
        emit_json(
            {
                "file": str(path),
                "nbytes": len(data),
                "seed": seed,
                "runs": [asdict(run) for run in runs],
                "left_out": [asdict(one) for one in left_out],
            }
        )
    else:
        _print(f"{path.name}, {len(data):,} bytes in pages of {page_bytes:,}", runs, left_out)
        typer.echo(_NOTES, nl=False)
    if not all(run.agrees and run.imms_counted == run.imms_expected for run in runs):
        raise typer.Exit(1)

"""`tep demo`: a real file from one engine to another, over every fabric that runs on this machine.

First come two processes over a real fabric, then the fabrics of one process; `tep.bench.demo` runs
them.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tep.cli.show import Json, Seed, emit_json, print_table, progress

if TYPE_CHECKING:
    from tep.bench.demo import LeftOut, Moved

__all__ = ["demo"]


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
    from tep.bench.demo import Moved, read_file, ways

    path = file or _largest_library_file()
    data = read_file(path)
    todo = ways(data, page_bytes, seed)
    found = []
    with progress("moving the file", len(todo), quiet=json) as bar:
        for way in todo:
            found.append(way())
            bar.advance(bar.task_ids[0])
    runs = [one for one in found if isinstance(one, Moved)]
    left_out = [one for one in found if not isinstance(one, Moved)]
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

"""`tep demo`: a real file from one engine to another, over every fabric that runs on this machine.

First come two processes over a real fabric (demo_pair), then the fabrics of one process, here. Only
its count of immediates shows the receiver that the file is there; the SHA-256 is taken afterwards.
"""

from __future__ import annotations

import mmap
import os
import sysconfig
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt
import typer

from tep import TransferEngine
from tep.base.errors import UsageError
from tep.bench.reproduce.tables import paged_gbps
from tep.cli.demo_pair import PAIRS, Here, LeftOut, Moved, move, move_between
from tep.cli.show import Json, OutFile, Seed, emit_json, print_table, progress
from tep.sim import Cluster

__all__ = ["demo", "largest_library_file", "read_file"]

U8 = npt.NDArray[np.uint8]


def largest_library_file() -> Path:
    """Find the largest file of the running Python's own library, packages not counted."""
    root = Path(sysconfig.get_path("stdlib"))
    sizes = (
        (path.stat().st_size, str(path))
        for path in root.rglob("*")
        if path.is_file() and not path.is_symlink() and "site-packages" not in path.parts
    )
    return Path(max(sizes)[1])


def read_file(path: Path) -> U8:
    """Map the bytes of a file, without a copy.

    Raises:
        UsageError: it cannot be read, or is empty.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UsageError(
            f"tep demo: --file {path}: {error.strerror}; give a file that can be read"
        ) from error
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            raise UsageError(f"tep demo: --file {path} is empty; there is nothing to move")
        return np.frombuffer(mmap.mmap(fd, size, access=mmap.ACCESS_READ), np.uint8)
    finally:
        os.close(fd)


def _loopback(data: U8, page_bytes: int, seed: int) -> Moved:
    with ExitStack() as stack:
        sender, receiver = [
            stack.enter_context(TransferEngine.open("loopback", nics=nics, name=f"demo-{nics}"))
            for nics in (2, 4)
        ]
        return move("loopback", sender, Here(receiver), data, page_bytes, seed=seed)


def _simulated(name: str, data: U8, page_bytes: int, seed: int, trace: Path | None) -> Moved:
    """Move the file over the chaos fabric, or the machines of a profile."""
    chaos = name == "chaos"
    machine = None if chaos else name
    with Cluster(2, (2, 4) if chaos else None, machine, seed=seed) as cluster:
        seen = None if trace is None else cluster.trace()
        sender, receiver = cluster.engines
        moved = move(
            f"chaos, seed {seed}" if chaos else f"timing, {name}",
            *(sender, Here(receiver), data, page_bytes),
            seed=seed,
            simulated=True,
            published_gbps=None if chaos else paged_gbps(name, page_bytes),
        )
        if seen is not None and trace is not None:
            seen.stop().write(trace)
        return moved


_LEFT: Final = ("fabric", "pages", "NICs", "MB a NIC", "imms expected", "imms counted", "overtakes")
_RIGHT: Final = "SHA-256"


def _row(run: Moved) -> dict[str, object]:
    timed = run.gbps is not None and not run.fabric.startswith("chaos")
    return {
        "fabric": run.fabric,
        "pages": run.pages,
        "NICs": run.nics,
        "MB a NIC": " + ".join(f"{n / 1e6:.1f}" for n in run.nic_bytes),
        "imms expected": run.imms_expected,
        "imms counted": run.imms_counted,
        "overtakes": run.overtakes,
        "ms": f"{run.real_us / 1e3:,.1f}" if run.real_us is not None else None,
        "GB/s": f"{run.gbytes_per_s:.2f}" if run.gbytes_per_s is not None else None,
        "sim. us": f"{run.sim_us:,.1f}" if run.sim_us is not None else None,
        "Gb/s": f"{run.gbps:.0f}" if timed else None,
        "published": f"{run.published_gbps:.0f}" if run.published_gbps is not None else None,
        _RIGHT: f"{run.sha256[:12]} {'agrees' if run.agrees else 'DIFFERS'}",
    }


def _print(title: str, runs: Sequence[Moved], left_out: Sequence[LeftOut]) -> None:
    pairs = [_row(run) for run in runs if run.processes == 2]
    if pairs:
        print_table(f"{title}: two processes", (*_LEFT, "ms", "GB/s", _RIGHT), pairs)
    for one in left_out:
        typer.echo(f"Left out: {one.fabric}: {one.why}")
        for what, why in one.tried:
            typer.echo(f"  tried {what}: {why}")
        typer.echo(f"  To get it: {one.cure}")
    rehearsals = [_row(run) for run in runs if run.processes == 1]
    columns = (*_LEFT, "sim. us", "Gb/s", "published", _RIGHT)
    print_table(f"{title}: one process", columns, rehearsals)


_NOTES: Final = """The receiver learned of completion by its immediate counter alone.
Published: arXiv 2510.27656, Table 2: a long run of pages; this file is a short one.
"""


def demo(
    file: Annotated[
        Path | None, typer.Option("--file", help="What to move; default: Python's largest file.")
    ] = None,
    page_bytes: Annotated[
        int, typer.Option("--page-bytes", min=1, help="Length of a page.")
    ] = 65536,
    seed: Seed = 7,
    trace: Annotated[
        Path | None,
        OutFile("--trace", help="Write Perfetto traces: PATH.chaos.json, PATH.<profile>.json."),
    ] = None,
    json: Json = False,
) -> None:
    """Move a real file from one process to another over the real libfabric, then over the loopback,
    the chaos fabric and the timing fabric, and check every byte.
    """
    path = largest_library_file() if file is None else file
    data = read_file(path)
    profiles = ("efa_2x200", "efa_4x100", "cx7_400")
    traces = {
        name: trace.with_name(f"{trace.name}.{name}.json")
        for name in ("chaos", *profiles)
        if trace is not None
    }
    runs, left_out = list[Moved](), list[LeftOut]()
    with progress("moving the file", len(PAIRS) + 2 + len(profiles), quiet=json) as bar:

        def keep(found: Moved | LeftOut) -> None:
            bar.advance(bar.task_ids[0])
            if isinstance(found, LeftOut):
                left_out.append(found)
            else:
                runs.append(found)

        for pair in PAIRS:
            keep(move_between(pair, data, page_bytes, seed=seed))
        keep(_loopback(data, page_bytes, seed))
        for name in ("chaos", *profiles):
            keep(_simulated(name, data, page_bytes, seed, traces.get(name)))
    if json:
        emit_json(
            {
                "file": str(path),
                "nbytes": len(data),
                "seed": seed,
                "runs": [asdict(run) for run in runs],
                "left_out": [asdict(one) for one in left_out],
                "traces": [str(traces[name]) for name in traces],
            }
        )
    else:
        _print(f"{path.name}, {len(data):,} bytes in pages of {page_bytes:,}", runs, left_out)
        typer.echo(_NOTES, nl=False)
        if traces:
            typer.echo("Traces for ui.perfetto.dev: " + ", ".join(map(str, traces.values())))
    if not all(run.agrees and run.imms_counted == run.imms_expected for run in runs):
        raise typer.Exit(1)

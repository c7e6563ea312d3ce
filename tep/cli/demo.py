"""`tep demo`: a real file from one engine to another, over every fabric that runs on this machine.

The receiver knows that the file is there by its count of immediates, and by nothing else; the
SHA-256 is taken afterwards.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer

import tep
from tep.cli.show import Json, Seed, emit_json, print_table, progress
from tep.errors import UsageError
from tep.sim import Cluster
from tep.sim.published import paged_gbps

__all__ = ["Moved", "demo", "largest_library_file", "move_file"]

U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One run: what went where, and what the receiver saw.

    Attributes:
        fabric: which fabric, with its profile or seed.
        pages: writes with an immediate.
        nics: NICs of the sender -> of the receiver.
        nic_bytes: bytes that each NIC of the sender carried.
        imms_expected, imms_counted: at the receiver.
        overtakes: immediates that arrived before one of an earlier page.
        sim_us: simulated time from submit to the receiver's count, where time is simulated.
        gbps: over that time.
        published_gbps: the paper's figure for this NIC and page size, if it has one.
        sha256: of what arrived.
        agrees: whether it is the file's.
    """

    fabric: str
    pages: int
    nics: str
    nic_bytes: tuple[int, ...]
    imms_expected: int
    imms_counted: int
    overtakes: int
    sim_us: float | None
    gbps: float | None
    published_gbps: float | None
    sha256: str
    agrees: bool


def largest_library_file() -> Path:
    """The largest file of the running Python's own library, packages not counted."""
    root = Path(sysconfig.get_path("stdlib"))
    sizes = (
        (path.stat().st_size, str(path))
        for path in root.rglob("*")
        if path.is_file() and not path.is_symlink() and "site-packages" not in path.parts
    )
    return Path(max(sizes)[1])


def move_file(
    fabric: str,
    ends: tuple[tep.TransferEngine, tep.TransferEngine],
    data: U8,
    page_bytes: int,
    *,
    seed: int,
    published_gbps: float | None = None,
    simulated: bool = True,
) -> Moved:
    """Move `data` from one engine to the other as pages in random order, and check what arrived.

    Args:
        fabric: name of the run.
        ends: sender, receiver.
        data: uint8[n], n >= 1; the last page is filled up with zeros.
        page_bytes: length of a page.
        seed: of the page order on both sides.
        published_gbps: to stand beside the result.
        simulated: whether the engines' clock is a simulated one.
    """
    sender, receiver = ends
    npages = -(-len(data) // page_bytes)
    source = np.zeros(npages * page_bytes, np.uint8)
    source[: len(data)] = data
    target = np.zeros_like(source)
    rng = np.random.default_rng(seed)
    slots = rng.permutation(npages)  # page k of the file goes to slot slots[k]
    order = rng.permutation(npages)
    mr, _ = sender.reg_mr(source, access=tep.Access.SOURCE)
    region, desc = receiver.reg_mr(target)
    src, dst = (mr, tep.Pages(order)), (desc, tep.Pages(slots[order]))

    started_s = receiver.driver.now_s()
    expected = receiver.expect_imm_count(42, tep.count_imms(tep.Paged(npages)))
    sent = sender.submit_paged_writes(page_bytes, src, dst, imm=42)
    expected.wait()
    elapsed_s = receiver.driver.now_s() - started_s
    landed = target.reshape(npages, page_bytes)[slots].reshape(-1)[: len(data)]
    digest = hashlib.sha256(landed.tobytes()).hexdigest()
    sent.wait()
    counted = receiver.stats().imms_counted
    moved = Moved(
        fabric=fabric,
        pages=npages,
        nics=f"{len(sender.main_address.domains)} -> {len(receiver.main_address.domains)}",
        nic_bytes=tuple(nic.nbytes for nic in sent.stats().nics),
        imms_expected=expected.count,
        imms_counted=counted,
        overtakes=_overtakes(sender, receiver, page_bytes, src, dst),
        sim_us=elapsed_s * 1e6 if simulated else None,
        gbps=len(source) * 8 / elapsed_s / 1e9 if simulated else None,
        published_gbps=published_gbps,
        sha256=digest,
        agrees=digest == hashlib.sha256(data.tobytes()).hexdigest(),
    )
    sender.deregister(mr)
    receiver.deregister(region)
    return moved


def _overtakes(
    sender: tep.TransferEngine,
    receiver: tep.TransferEngine,
    page_bytes: int,
    src: tuple[tep.MrHandle, tep.Pages],
    dst: tuple[tep.MrDesc, tep.Pages],
) -> int:
    """Send the same pages once more, each with its own number as immediate, and look at the order
    of arrival.
    """
    npages, base = len(src[1]), 1 << 16
    arrived: list[int] = []
    receiver.on_imm(range(base, base + npages), lambda imm, count: arrived.extend([imm] * count))
    sent = sender.submit_paged_writes(
        page_bytes, src, dst, imm=np.arange(base, base + npages), routing=tep.Routing()
    )
    sent.wait()
    fence = receiver.expect_imm_count(43, 1)
    while len(arrived) < npages:
        # `sent` says that the pages are there, not that the receiver has looked; a fence makes it
        # look.
        sender.submit_barrier([dst[0]], 43).wait()
        fence.wait()
        fence = receiver.expect_imm_count(43, 1)
    fence.cancel()
    receiver.remove_imm(base)
    numbers = np.array(arrived)
    later = np.minimum.accumulate(numbers[::-1])[::-1]
    return int(np.count_nonzero(numbers[:-1] > later[1:]))


def _loopback(data: U8, page_bytes: int, seed: int) -> Moved:
    with (
        tep.TransferEngine.open("loopback", nics=2, seed=seed, name=f"demo-a{seed}") as sender,
        tep.TransferEngine.open("loopback", nics=4, seed=seed, name=f"demo-b{seed}") as receiver,
    ):
        return move_file(
            "loopback", (sender, receiver), data, page_bytes, seed=seed, simulated=False
        )


def _chaos(data: U8, page_bytes: int, seed: int, trace: Path | None) -> Moved:
    with Cluster(nodes=2, nics=(2, 4), seed=seed, trace=trace is not None) as cluster:
        sender, receiver = cluster.engines
        moved = move_file(f"chaos, seed {seed}", (sender, receiver), data, page_bytes, seed=seed)
        if trace is not None:
            cluster.trace.write_perfetto(trace)
        return moved


def _timing(data: U8, page_bytes: int, seed: int, profile: str, trace: Path | None) -> Moved:
    with Cluster(nodes=2, profile=profile, seed=seed, trace=trace is not None) as cluster:
        sender, receiver = cluster.engines
        published = paged_gbps(profile, page_bytes)
        moved = move_file(
            f"timing, {profile}",
            (sender, receiver),
            data,
            page_bytes,
            seed=seed,
            published_gbps=published,
        )
        if trace is not None:
            cluster.trace.write_perfetto(trace)
        return moved


def read_file(path: Path) -> U8:
    """The bytes of a file, mapped and not copied.

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


def demo(
    file: Annotated[
        Path | None, typer.Option("--file", help="What to move; default: Python's largest file.")
    ] = None,
    page_bytes: Annotated[
        int, typer.Option("--page-bytes", min=1, help="Length of a page.")
    ] = 65536,
    seed: Seed = 7,
    trace: Annotated[
        Path,
        typer.Option(
            "--trace", help="Where the Perfetto traces go: PATH.chaos.json, PATH.<profile>.json."
        ),
    ] = Path("tep-demo-trace"),
    json: Json = False,
) -> None:
    """Move a real file over the loopback, the chaos fabric and the timing fabric, and check every
    byte.
    """
    path = largest_library_file() if file is None else file
    data = read_file(path)
    profiles = ("efa_2x200", "efa_4x100", "cx7_400")
    traces = {name: trace.with_name(f"{trace.name}.{name}.json") for name in ("chaos", *profiles)}
    runs: list[Moved] = []
    with progress(
        "moving the file", 2 + len(profiles), quiet=json or not sys.stderr.isatty()
    ) as bar:
        runs.append(_loopback(data, page_bytes, seed))
        bar.advance(bar.task_ids[0])
        runs.append(_chaos(data, page_bytes, seed, traces["chaos"]))
        bar.advance(bar.task_ids[0])
        for profile in profiles:
            runs.append(_timing(data, page_bytes, seed, profile, traces[profile]))
            bar.advance(bar.task_ids[0])
    if json:
        emit_json(
            {
                "file": str(path),
                "nbytes": len(data),
                "seed": seed,
                "runs": [asdict(run) for run in runs],
                "traces": [str(traces[name]) for name in traces],
            }
        )
    else:
        _print(path, len(data), page_bytes, runs, list(traces.values()))
    if not all(run.agrees and run.imms_counted == run.imms_expected for run in runs):
        raise typer.Exit(1)


def _print(path: Path, nbytes: int, page_bytes: int, runs: list[Moved], traces: list[Path]) -> None:
    columns = (
        "fabric",
        "pages",
        "NICs",
        "MB a NIC",
        "imms expected",
        "imms counted",
        "overtakes",
        "sim. us",
        "Gb/s",
        "published",
        "SHA-256",
    )
    rows = (
        {
            "fabric": run.fabric,
            "pages": run.pages,
            "NICs": run.nics,
            "MB a NIC": " + ".join(f"{n / 1e6:.1f}" for n in run.nic_bytes),
            "imms expected": run.imms_expected,
            "imms counted": run.imms_counted,
            "overtakes": run.overtakes,
            "sim. us": None if run.sim_us is None else f"{run.sim_us:,.1f}",
            "Gb/s": None
            if run.gbps is None or run.fabric.startswith("chaos")
            else f"{run.gbps:.0f}",
            "published": None if run.published_gbps is None else f"{run.published_gbps:.0f}",
            "SHA-256": f"{run.sha256[:12]} {'agrees' if run.agrees else 'DIFFERS'}",
        }
        for run in runs
    )
    print_table(f"{path.name}: {nbytes:,} bytes in pages of {page_bytes:,}", columns, rows)
    typer.echo("The receiver learned of completion by its immediate counter alone.")
    typer.echo(
        "Published: arXiv 2510.27656, Table 2: a long run of pages; this file is a short one."
    )
    typer.echo("Traces for ui.perfetto.dev: " + ", ".join(map(str, traces)))

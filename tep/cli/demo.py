"""`tep demo`: a real file from one engine to another, over every fabric that runs on this machine.

First come two processes over a real fabric (demo_pair), then the fabrics of one process, here. Only
its count of immediates shows the receiver that the file is there; the SHA-256 is taken afterwards.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sysconfig
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt
import typer

import tep
from tep.base.errors import UsageError
from tep.bench.reproduce.tables import paged_gbps
from tep.cli.demo_moved import LeftOut, Moved, count_overtakes, print_pairs, print_rehearsals
from tep.cli.demo_pair import PAIRS, move_between, page_places
from tep.cli.show import Json, OutFile, Seed, emit_json, progress
from tep.sim import Cluster

__all__ = ["demo", "largest_library_file", "move_file", "read_file"]

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
    """Move `data` from one engine to the other as pages in random order, and check the result.

    Args:
        fabric: name of the run.
        ends: sender, receiver.
        data: uint8[n], n >= 1; the last page is filled up with zeros.
        page_bytes: length of a page.
        seed: seed of the page order on both sides.
        published_gbps: the published number to show beside the result.
        simulated: True if the engines' clock is a simulated one.
    """
    sender, receiver = ends
    npages = -(-len(data) // page_bytes)
    source = np.zeros(npages * page_bytes, np.uint8)
    source[: len(data)] = data
    target = np.zeros_like(source)
    order, slots = page_places(npages, seed)
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
    """Send the same pages again, each with its own number as immediate, and check the order
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
        # `sent` says that the pages are there, not that the receiver has polled; a fence makes it
        # poll.
        sender.submit_barrier([dst[0]], 43).wait()
        fence.wait()
        fence = receiver.expect_imm_count(43, 1)
    fence.cancel()
    receiver.remove_imm(base)
    return count_overtakes(arrived)


def _loopback(data: U8, page_bytes: int, seed: int) -> Moved:
    with (
        tep.TransferEngine.open("loopback", nics=2, name=f"demo-a{seed}") as sender,
        tep.TransferEngine.open("loopback", nics=4, name=f"demo-b{seed}") as receiver,
    ):
        return move_file(
            "loopback", (sender, receiver), data, page_bytes, seed=seed, simulated=False
        )


def _chaos(data: U8, page_bytes: int, seed: int, trace: Path | None) -> Moved:
    with Cluster(nodes=2, nics=(2, 4), seed=seed) as cluster:
        seen = None if trace is None else cluster.trace()
        sender, receiver = cluster.engines
        moved = move_file(f"chaos, seed {seed}", (sender, receiver), data, page_bytes, seed=seed)
        if seen is not None and trace is not None:
            seen.stop().write(trace)
        return moved


def _timing(data: U8, page_bytes: int, seed: int, profile: str, trace: Path | None) -> Moved:
    with Cluster(nodes=2, profile=profile, seed=seed) as cluster:
        seen = None if trace is None else cluster.trace()
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
        if seen is not None and trace is not None:
            seen.stop().write(trace)
        return moved


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
    pairs, rehearsals, left_out = list[Moved](), list[Moved](), list[LeftOut]()
    total = len(PAIRS) + 2 + len(profiles)
    with progress("moving the file", total, quiet=json) as bar:
        for pair in PAIRS:
            found = move_between(pair, data, page_bytes, seed=seed)
            if isinstance(found, LeftOut):
                left_out.append(found)
            else:
                pairs.append(found)
            bar.advance(bar.task_ids[0])
        rehearsals.append(_loopback(data, page_bytes, seed))
        bar.advance(bar.task_ids[0])
        rehearsals.append(_chaos(data, page_bytes, seed, traces.get("chaos")))
        bar.advance(bar.task_ids[0])
        for profile in profiles:
            rehearsals.append(_timing(data, page_bytes, seed, profile, traces.get(profile)))
            bar.advance(bar.task_ids[0])
    runs = pairs + rehearsals
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
        title = f"{path.name}, {len(data):,} bytes in pages of {page_bytes:,}"
        print_pairs(title, pairs, left_out)
        print_rehearsals(title, rehearsals)
        typer.echo(_NOTES, nl=False)
        if traces:
            typer.echo("Traces for ui.perfetto.dev: " + ", ".join(map(str, traces.values())))
    if not all(run.agrees and run.imms_counted == run.imms_expected for run in runs):
        raise typer.Exit(1)

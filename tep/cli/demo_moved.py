"""One run of the demo as a record, the printing of records, and the count of overtakes.

Nothing here moves bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import typer

from tep.cli.show import print_table

__all__ = ["LeftOut", "Moved", "count_overtakes", "print_pairs", "print_rehearsals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One run: the transfer, and its result at the receiver.

    Attributes:
        fabric: the fabric, with its profile or seed.
        processes: number of processes of sender and receiver together.
        pages: writes with an immediate.
        nics: NICs of the sender -> of the receiver.
        nic_bytes: bytes that each NIC of the sender carried.
        imms_expected, imms_counted: numbers of immediates at the receiver.
        overtakes: immediates that arrived before one of an earlier page.
        sim_us: simulated time from submit to the receiver's count, if time is simulated.
        gbps: rate over that time.
        published_gbps: the paper's figure for this NIC and page size, if it has one.
        real_us: time on this machine's clock from submit to the receiver's count, if two
            processes ran; the median of the rounds.
        gbytes_per_s: rate over that time.
        sha256: digest of the received bytes.
        agrees: True if it is the file's digest.
    """

    fabric: str
    processes: int = 1
    pages: int
    nics: str
    nic_bytes: tuple[int, ...]
    imms_expected: int
    imms_counted: int
    overtakes: int
    sim_us: float | None = None
    gbps: float | None = None
    published_gbps: float | None = None
    real_us: float | None = None
    gbytes_per_s: float | None = None
    sha256: str
    agrees: bool


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A run that this machine cannot make: the reason, the attempts, and the remedy."""

    fabric: str
    why: str
    tried: tuple[tuple[str, str], ...]
    cure: str


def count_overtakes(numbers: Sequence[int]) -> int:
    """Count the numbers that stand before a smaller one."""
    arrived = np.array(numbers)
    later = np.minimum.accumulate(arrived[::-1])[::-1]
    return int(np.count_nonzero(arrived[:-1] > later[1:]))


def print_pairs(title: str, runs: Sequence[Moved], left_out: Sequence[LeftOut]) -> None:
    """Print the runs of two processes, and the runs left out."""
    if runs:
        columns = (*_LEFT, "ms", "GB/s", _RIGHT)
        rows = (
            _common(run)
            | {
                "ms": None if run.real_us is None else f"{run.real_us / 1e3:,.1f}",
                "GB/s": None if run.gbytes_per_s is None else f"{run.gbytes_per_s:.2f}",
            }
            for run in runs
        )
        print_table(f"{title}: two processes", columns, rows)
    for one in left_out:
        typer.echo(f"Left out: {one.fabric}: {one.why}")
        for what, why in one.tried:
            typer.echo(f"  tried {what}: {why}")
        typer.echo(f"  To get it: {one.cure}")


def print_rehearsals(title: str, runs: Sequence[Moved]) -> None:
    """Print the runs of one process: loopback, and the simulated fabrics."""
    columns = (*_LEFT, "sim. us", "Gb/s", "published", _RIGHT)
    rows = (
        _common(run)
        | {
            "sim. us": None if run.sim_us is None else f"{run.sim_us:,.1f}",
            "Gb/s": None
            if run.gbps is None or run.fabric.startswith("chaos")
            else f"{run.gbps:.0f}",
            "published": None if run.published_gbps is None else f"{run.published_gbps:.0f}",
        }
        for run in runs
    )
    print_table(f"{title}: one process", columns, rows)


_LEFT = ("fabric", "pages", "NICs", "MB a NIC", "imms expected", "imms counted", "overtakes")
_RIGHT = "SHA-256"


def _common(run: Moved) -> dict[str, object]:
    return {
        "fabric": run.fabric,
        "pages": run.pages,
        "NICs": run.nics,
        "MB a NIC": " + ".join(f"{n / 1e6:.1f}" for n in run.nic_bytes),
        "imms expected": run.imms_expected,
        "imms counted": run.imms_counted,
        "overtakes": run.overtakes,
        "SHA-256": f"{run.sha256[:12]} {'agrees' if run.agrees else 'DIFFERS'}",
    }

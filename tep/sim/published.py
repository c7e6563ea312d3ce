"""The published point-to-point throughput, to stand beside what the model says. The model never
reads it.

The table is arXiv 2510.27656 v2, Table 2: GPU memory to GPU memory, one GPU's NICs.
"""

from __future__ import annotations

import csv
from functools import lru_cache
from importlib import resources
from typing import Final, Literal, NamedTuple

__all__ = ["Point", "paged_gbps", "points"]

_NIC_OF: Final = {"efa_2x200": "EFA", "cx7_400": "CX7"}
"""Which column of the paper a profile models; the paper measured no 4 x 100 Gb/s EFA."""


class Point(NamedTuple):
    """One published measurement.

    Attributes:
        kind: "single": one contiguous write outstanding at a time. "paged": many page writes,
            random order.
        nbytes: of the write, or of a page.
        profile: the profile that models this NIC.
        gbps: throughput in Gb/s.
    """

    kind: Literal["single", "paged"]
    nbytes: int
    profile: str
    gbps: float


@lru_cache(maxsize=1)
def points() -> tuple[Point, ...]:
    """All published points that are in the table."""
    text = resources.files("tep.sim.profiles").joinpath("p2p_throughput.csv").read_text("utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    profile_of = {nic: profile for profile, nic in _NIC_OF.items()}
    return tuple(
        Point(
            "single" if row["kind"] == "single" else "paged",
            int(row["size_bytes"]),
            profile_of[row["nic"]],
            float(row["gbps"]),
        )
        for row in rows
    )


def paged_gbps(profile: str, page_bytes: int) -> float | None:
    """The published throughput of pages of this size on this NIC, or None."""
    found = (
        p.gbps for p in points() if (p.kind, p.profile, p.nbytes) == ("paged", profile, page_bytes)
    )
    return next(found, None)

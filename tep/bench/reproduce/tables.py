"""The published numbers: one CSV a table, each point with its class and its tolerance. No model.

Class of a point, which says how its simulated value was made: "fitted": the named numbers were
fitted to it, or chosen in sight of it; "given": it is an input itself, so that its error says
nothing; "predicted": no number was fitted to it; "counted": pages and steps, from shapes alone;
"not modelled": says why.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final, Literal, get_args

from tep.base.errors import UsageError

__all__ = [
    "NIC_PROFILES", "Class", "Point", "Table", "load_table", "paged_gbps", "table_names",
]  # fmt: skip

Class = Literal["fitted", "given", "predicted", "counted", "not modelled"]

_FIXED: Final = ("published", "class", "of", "tolerance")


@dataclass(frozen=True, slots=True)
class Point:
    """One published number.

    Attributes:
        keys: its key in the table: column -> text.
        published: the number, in the table's unit.
        kind: its class.
        of: fitted: the numbers; given: the input; not modelled: the reason; else remarks.
        tolerance: largest error allowed, percent, or points if the unit is percent; None:
            it is not modelled, and a value that is simulated all the same may be off by any.
    """

    keys: dict[str, str]
    published: float
    kind: Class
    of: str
    tolerance: float | None

    @property
    def name(self) -> str:
        """The keys, in one line."""
        return " ".join(self.keys.values())

    @property
    def numbers(self) -> tuple[str, ...]:
        """The numbers that were fitted to it; those of a profile name their NIC, too."""
        if self.kind != "fitted":
            return ()
        names, nic = self.of.split(), self.keys.get("nic", "")
        own = ("nic.", "cpu.", "wire.")
        return tuple(f"{name} {nic}" if name.startswith(own) else name for name in names)


@dataclass(frozen=True, slots=True)
class Table:
    """One published table or figure.

    Attributes:
        name: its name for `tep reproduce`.
        title, source, unit: same for all its points.
        notes: further remarks for a reader.
        points: its points, in order.
    """

    name: str
    title: str
    source: str
    unit: str
    notes: tuple[str, ...]
    points: tuple[Point, ...]

    def error(self, point: Point, value: float) -> float:
        """Return the error of a value: percent, or percentage points if the unit is percent."""
        if self.unit == "%":
            return value - point.published
        return 100 * (value / point.published - 1)


def table_names() -> list[str]:
    """List the names of all tables."""
    found = files("tep.bench.reproduce").joinpath("data").iterdir()
    return sorted(entry.name.removesuffix(".csv") for entry in found if entry.name.endswith(".csv"))


@cache
def load_table(name: str) -> Table:
    """Read a table.

    Raises:
        UsageError: there is none of this name, or its file breaks the rules of this module.
    """
    if name not in table_names():
        raise UsageError(f"table {name!r} is unknown; there are: {', '.join(table_names())}")
    text = files("tep.bench.reproduce").joinpath("data", f"{name}.csv").read_text(encoding="utf-8")
    lines = text.splitlines()
    head = [line[1:].strip().partition(": ") for line in lines if line.startswith("#")]
    said = {key: value for key, _, value in head if key != "note"}
    notes = tuple(value for key, _, value in head if key == "note")
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    points = tuple(_point(name, row) for row in rows)
    return Table(name, said["title"], said["source"], said["unit"], notes, points)


def _point(table: str, row: dict[str, str]) -> Point:
    keys = {key: value for key, value in row.items() if key not in _FIXED}
    kind, tolerance = row["class"], row["tolerance"]
    kinds: tuple[Class, ...] = get_args(Class)
    if kind not in kinds or (kind not in {"predicted", "counted"} and not row["of"]):
        raise UsageError(f"{table}.csv: {row}: a class, and what was fitted or why not")
    if (tolerance == "") != (kind == "not modelled"):
        raise UsageError(f"{table}.csv: {row}: a tolerance, unless the point is not modelled")
    limit = float(tolerance) if tolerance else None
    return Point(
        keys, float(row["published"]), next(one for one in kinds if one == kind), row["of"], limit
    )


NIC_PROFILES: Final = {"EFA": "efa_2x200", "CX7": "cx7_400"}
"""The profile that models a column of the paper; it measured no 4 x 100 Gb/s EFA."""


def paged_gbps(profile: str, page_bytes: int) -> float | None:
    """Return the published throughput of pages of this size on this NIC, or None."""
    wanted = ("paged", str(page_bytes), profile)
    for point in load_table("p2p").points:
        kind, nbytes, nic = point.keys.values()
        if (kind, nbytes, NIC_PROFILES[nic]) == wanted:
            return point.published
    return None

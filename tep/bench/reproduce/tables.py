"""The published numbers, each with its class and its tolerance, and how one compares with a
simulated value. One CSV a table; no model.

Class of a point, which says how its simulated value was made: "fitted": the named numbers were
fitted to it, or chosen in sight of it; "given": it is an input itself, so that its error says
nothing; "predicted": no number was fitted to it; "counted": pages and steps, from shapes alone;
"not modelled": says why.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import median
from typing import Final, Literal, get_args

from tep.base.errors import UsageError

__all__ = [
    "NIC_PROFILES", "Class", "Outcome", "Point", "Table", "load_table", "paged_gbps", "summary",
    "table_names",
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

    def error_text(self, error: float | None) -> str:
        """Write an error with its unit; "" for None."""
        if error is None:
            return ""
        return f"{error:+.1f}" if self.unit == "%" else f"{error:+.1f} %"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A point of a table with its simulated value.

    Attributes:
        simulated: in the table's unit; None: not modelled.
        ends: of a prediction, the interval of the simulated value, see tep.sim.sweeps.interval;
            None: not asked for.
    """

    table: Table
    point: Point
    simulated: float | None
    ends: tuple[float, float] | None = None

    @property
    def error(self) -> float | None:
        """See Table.error."""
        if self.simulated is None:
            return None
        return self.table.error(self.point, self.simulated)

    @property
    def holds(self) -> bool:
        """True if the error is within the point's tolerance, or there is none."""
        error, tolerance = self.error, self.point.tolerance
        return error is None or tolerance is None or abs(error) <= tolerance + 1e-9

    def row(self) -> dict[str, str]:
        """Return the text of each column of a table."""
        simulated = "" if self.simulated is None else f"{self.simulated:.4g}"
        return {
            "point": self.point.name,
            "published": f"{self.point.published:g}",
            "simulated": simulated,
            "interval": " to ".join(f"{end:.4g}" for end in self.ends or ()),
            "error": self.table.error_text(self.error) + ("" if self.holds else " !"),
            "class": self.point.kind,
            "of": self.point.of,
        }

    def document(self) -> dict[str, object]:
        """Return everything, for JSON."""
        return {
            "table": self.table.name,
            "unit": self.table.unit,
            **self.point.keys,
            "published": self.point.published,
            "simulated": self.simulated,
            "interval": self.ends,
            "error": self.error,
            "class": self.point.kind,
            "of": self.point.of,
            "tolerance": self.point.tolerance,
            "holds": self.holds,
        }


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Summarise the points of each class, their errors, and the values that were fitted."""
    found: dict[str, object] = {"points": len(outcomes)}
    for kind in get_args(Class):
        mine = [one for one in outcomes if one.point.kind == kind]
        found[kind] = len(mine)
        errors = [abs(one.error) for one in mine if one.error is not None]
        if kind in {"fitted", "predicted", "not modelled"}:
            found[f"{kind}, median error"] = round(median(errors or [0.0]), 2)
            found[f"{kind}, largest error"] = round(max(errors, default=0.0), 2)
    found["beyond their tolerance"] = sum(not one.holds for one in outcomes)
    numbers = sorted({name for one in outcomes for name in one.point.numbers})
    found["values fitted"] = len(numbers)
    found["fitted values"] = numbers
    return found


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

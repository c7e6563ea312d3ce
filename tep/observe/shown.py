"""Results that one can look at: a line, a table, a frame of pandas, a picture.

Nothing is measured or simulated here. Rule: a result names its rows in `table()`, and a column
names its unit last: "TTFT p50, s". All else follows from that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from typing import Any, Final

from tep.base.distribution import need
from tep.base.errors import UsageError

__all__ = ["Shown", "draw"]

_LIMITS: Final = (" low", " high")
"""Columns of these names are the ends of the interval of the column without."""

_HTML_ROWS_MAX: Final = 200
_DECADES: Final = 16
"""Values that are so many times apart are drawn on a logarithmic axis."""

_TICKS_MAX: Final = 12
_WHOLE: Final = 1000


class Shown:
    """The ways to look at a result: a mixin of classes that have `table()`, or are dataclasses."""

    __slots__ = ()

    def table(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows, each with the same columns; of a dataclass a row a field."""
        assert is_dataclass(self)
        return [{"what": one.name, "value": getattr(self, one.name)} for one in fields(self)]

    def _drawn(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows of the picture, where they are not those of the table."""
        return self.table()

    def _repr_html_(self) -> str:
        rows = self.table()
        names = list(rows[0]) if rows else []
        lines = [_html_row("th", names)]
        lines += [_html_row("td", row.values()) for row in rows[:_HTML_ROWS_MAX]]
        left = len(rows) - _HTML_ROWS_MAX
        more = f"<p>and {left} rows more: to_pandas() has all</p>" if left > 0 else ""
        return f"<table>{''.join(lines)}</table>{more}"

    def __str__(self) -> str:
        found = self.table()
        rows = [list(row) for row in found[:1]]
        rows += [[_text(value) for value in row.values()] for row in found]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame. Raises BackendUnavailable where pandas is not installed."""
        return need("pandas", "", "to_pandas()").DataFrame(list(self.table()))

    def plot(self, axes: Any = None, *, x: str | None = None, y: str | None = None) -> Any:
        """Draw one column over another; see `draw`."""
        return draw(self._drawn(), axes, x=x, y=y)


def draw(
    rows: Sequence[Mapping[str, Any]],
    axes: Any = None,
    *,
    x: str | None = None,
    y: str | None = None,
) -> Any:
    """Draw one column of rows over another with matplotlib (extra `plot`).

    Numbers are drawn as lines, words as bars; the columns that are left and are no figures name the
    lines, and an interval (columns "NAME low", "NAME high") is a band.

    Args:
        rows: each with the same columns.
        axes: matplotlib's, where to draw; None: a figure of its own.
        x: name of a column; None: the first that has several values.
        y: likewise; None: the first figure.

    Returns:
        The axes.

    Raises:
        UsageError: no row, or no such column.
    """
    if axes is None:
        pyplot = need("matplotlib.pyplot", "plot", "a picture")
        axes = pyplot.figure(figsize=(7, 4), layout="constrained").add_subplot()
    x, y = _columns(rows, x, y)
    others = [name for name in _varying(rows) if name not in {x, y} and _is_key(rows, name)]
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        lines.setdefault(", ".join(_text(row[name]) for name in others), []).append(row)
    places = {value: k for k, value in enumerate(dict.fromkeys(row[x] for row in rows))}
    words = any(isinstance(value, str) for value in places)
    for k, (label, found) in enumerate(lines.items()):
        if words:
            shift = 0.8 * ((k + 0.5) / len(lines) - 0.5)
            at = [places[row[x]] + shift for row in found]
            axes.bar(at, [row[y] for row in found], 0.8 / len(lines), label=label)
            continue
        at = [row[x] for row in found]
        (line,) = axes.plot(at, [row[y] for row in found], "o-", label=label)
        if all(y + end in found[0] for end in _LIMITS):
            low, high = ([row[y + end] for row in found] for end in _LIMITS)
            axes.fill_between(at, low, high, alpha=0.2, color=line.get_color())
    if words:
        axes.set_xticks(range(len(places)), list(places))
    elif min(places) > 0 and max(places) > _DECADES * min(places) and len(places) < _TICKS_MAX:
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(places), [f"{value:,}" for value in places])
    if words and len(lines) > 1:
        axes.margins(y=0.1 * (len(lines) + 1))  # room for the legend
    axes.set(xlabel="" if words else x, ylabel=y, ylim=(0, None))
    if len(lines) > 1:
        axes.legend(title=", ".join(others))
    return axes


def _varying(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name for name in rows[0] if len({_text(row[name]) for row in rows}) > 1]


def _is_key(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Whether a column says which row it is: words or whole numbers are, figures are not."""
    return all(not isinstance(row[name], float) for row in rows)


def _columns(rows: Sequence[Mapping[str, Any]], x: str | None, y: str | None) -> tuple[str, str]:
    if not rows:
        raise UsageError("plot: there is no row")
    for name in (x, y):
        if name is not None and name not in rows[0]:
            raise UsageError(f"plot: no column {name!r}; there are: {', '.join(rows[0])}")
    keys = [name for name in _varying(rows) if _is_key(rows, name)]
    figures = [name for name in rows[0] if not _is_key(rows, name) and name != x]
    numbers = [name for name in keys if not isinstance(rows[0][name], str)]
    x = x or next(iter([*numbers, *keys, *rows[0]]))
    return x, y or next(iter([*figures, *(name for name in rows[0] if name != x)]))


def _text(value: object) -> str:
    """Write a value for people: figures with four digits or more."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= _WHOLE else f"{value:.4g}"
    return str(getattr(value, "name", value))


def _html_row(tag: str, values: Any) -> str:
    cells = "".join(f"<{tag}>{escape(_text(value))}</{tag}>" for value in values)
    return f"<tr>{cells}</tr>"

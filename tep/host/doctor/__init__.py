"""The doctor: what works for transfers on this machine, what does not, and the remedy.

Here are the findings; `report` makes all of them.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["Finding", "Level", "bad", "good", "note", "version_of", "warn"]


class Level(Enum):
    """The level of a finding: BAD stops transfers that this machine could make."""

    GOOD = "ok"
    NOTE = "note"
    WARN = "warning"
    BAD = "bad"


class Finding(NamedTuple):
    """One finding.

    Attributes:
        level: see Level.
        area: its subject: a NIC's name, "memlock", a backend.
        text: the fact, with its values.
        remedy: the command or setting that mends it; "" if nothing has to be mended.
    """

    level: Level
    area: str
    text: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        return self._asdict() | {"level": self.level.value}


def good(area: str, text: str) -> Finding:
    """Make a finding that all is as it should be."""
    return Finding(Level.GOOD, area, text)


def note(area: str, text: str, remedy: str = "") -> Finding:
    """Make a finding that matters to some users."""
    return Finding(Level.NOTE, area, text, remedy)


def warn(area: str, text: str, remedy: str) -> Finding:
    """Make a finding that something works, but slower or less safely than it could."""
    return Finding(Level.WARN, area, text, remedy)


def bad(area: str, text: str, remedy: str) -> Finding:
    """Make a finding that stops transfers."""
    return Finding(Level.BAD, area, text, remedy)


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None: it is not installed."""
    from importlib import metadata  # 30 ms, which `tep --help` does not need

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

"""One thing that the doctor found: how bad it is, what it is, what mends it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["Finding", "Level", "bad", "good", "note", "warn"]


class Level(Enum):
    """How bad it is: BAD stops transfers that this machine could make."""

    GOOD = "ok"
    NOTE = "note"
    WARN = "warning"
    BAD = "bad"


class Finding(NamedTuple):
    """What was found.

    Attributes:
        level: how bad it is.
        area: what it is about: a NIC's name, "memlock", a backend.
        text: what is so, with its values.
        remedy: the command or setting that mends it; "" where nothing has to be.
    """

    level: Level
    area: str
    text: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        """As data."""
        return {
            "level": self.level.value,
            "area": self.area,
            "text": self.text,
            "remedy": self.remedy,
        }


def good(area: str, text: str) -> Finding:
    """It is as it should be."""
    return Finding(Level.GOOD, area, text)


def note(area: str, text: str, remedy: str = "") -> Finding:
    """It matters to some."""
    return Finding(Level.NOTE, area, text, remedy)


def warn(area: str, text: str, remedy: str) -> Finding:
    """It works, and slower or less safely than it could."""
    return Finding(Level.WARN, area, text, remedy)


def bad(area: str, text: str, remedy: str) -> Finding:
    """It stops transfers."""
    return Finding(Level.BAD, area, text, remedy)

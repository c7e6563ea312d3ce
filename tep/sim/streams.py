"""What the simulator draws for: the numbers of its streams.

Rule: a stream's number is never given to another purpose, or seeds on record mean other runs.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Stream"]


class Stream(IntEnum):
    """What a draw is for; numbers 100 and up are the knobs of `Chaos.draw`."""

    TIES = 1  # order of events at one instant
    STEP = 2  # when a kicked engine steps
    POST = 3  # how many rows a post takes
    ROW = 4  # cuts and acknowledgement of one row
    FRAGMENT = 5  # delay of one fragment
    MESSAGE = 6
    ERROR = 7  # when a failure is reported
    TIMING = 8  # jitter of the timing fabric
    FAULTS = 9
    SCENARIO = 10
    KNOBS = 100  # one stream a knob: KNOBS + the knob's number

"""Checks of the numbers and texts that users pass in: each returns a plain value or raises.

Each error names the argument, the value and the limits. Code that runs for every transfer tests
`type(value) is int` first, and calls these functions for all else only.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Final, NoReturn

from tep.base.errors import BadRequest, UsageError

__all__ = [
    "FOREIGN", "INT64_MAX", "TIME_MAX_S", "U64_MAX", "check_flag", "check_int", "check_kind",
    "check_seconds", "check_text", "nearest", "shown", "unpicklable",
]  # fmt: skip

INT64_MAX: Final = 2**63 - 1
U64_MAX: Final = 2**64 - 1

TIME_MAX_S: Final = 1e9
"""The longest time, 31 years: in nanoseconds it fits in 64 bits. It stands for "never" too."""

FOREIGN: Final = (
    *(TypeError, ValueError, ArithmeticError, LookupError, AttributeError),
    *(BufferError, RuntimeError),
)
"""Exceptions that a foreign object raises when it is read as a number or sequence and is none.

A list and not `Exception`: a signal handler's exception or a MemoryError may come at any time.
Those belong to the caller, and say nothing about an argument.
"""

_SHOWN_MAX: Final = 80
_FLOAT_MAX: Final = 1 << 1000


def shown(value: object) -> str:
    """Return a value's repr for an error message: cut to 80 characters; never raises."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  # a repr that raises; also ints of more than 4,300 digits
        return f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."


def check_int(
    name: str,
    value: object,
    low: int | None = None,
    high: int | None = None,
    error: type[UsageError] = BadRequest,
) -> int:
    """Return a plain int: numpy's integers would count in 64 bits, and floats would be cut.

    Raises:
        BadRequest, or `error`: it is no integer, or outside `low` .. `high`.
    """
    if type(value) is int:
        found = value
    else:
        try:
            found = int(operator.index(value))  # type: ignore[arg-type]  # that is the check
        except FOREIGN:
            raise error(f"{name}={shown(value)} is not an integer") from None
    if low is not None and high is not None and not low <= found <= high:
        raise error(f"{name}={shown(value)} is outside {_power(low)} .. {_power(high)}")
    if low is not None and found < low:
        raise error(f"{name}={shown(value)} is below {low}")
    return found


def _power(limit: int) -> str:
    """Spell a limit as people write it: 2**32 - 1, and not 4294967295."""
    above = limit + 1
    if limit > 2**20 and above & (above - 1) == 0:
        return f"2**{above.bit_length() - 1} - 1"
    return str(limit)


def check_seconds(
    name: str,
    value: object,
    low: float = 0.0,
    high: float = TIME_MAX_S,
    *,
    never: bool = False,
    error: type[UsageError] = BadRequest,
) -> float:
    """Return a time as a plain float, at least `low` and at most `high` seconds.

    With `never`, infinity and times above `high` mean never; `high` is returned for them.

    Raises:
        BadRequest, or `error`: it is no number, not a number (nan), or out of bounds.
    """
    found = math.nan
    if type(value) is float:  # without a `try` that could take a signal handler's exception
        found = value
    elif type(value) is int:  # as well
        found = float(max(-_FLOAT_MAX, min(_FLOAT_MAX, value)))  # beyond any bound in any case
    elif isinstance(value, Real):
        try:
            found = float(value)
        except OverflowError:
            found = math.inf if operator.gt(value, 0) else -math.inf
        except FOREIGN:
            found = math.nan
    if found != found:  # noqa: PLR0124  # the quickest look for nan
        raise error(f"{name}={shown(value)} is not a number of seconds")
    if low <= found <= high:
        return found
    if never and found > high:
        return high
    more = f"{low:g} .. {high:g} s" + (", or infinite for never" if never else "")
    raise error(f"{name}={shown(value)} is outside {more}")


def check_flag(name: str, value: object, error: type[UsageError] = BadRequest) -> bool:
    """Return True or False; accept Python's and numpy's booleans only."""
    if value is True or value is False:
        return value
    if type(value).__name__ in {"bool", "bool_"} and type(value).__module__ == "numpy":
        return bool(value)
    raise error(f"{name}={shown(value)} is neither True nor False")


def check_text(name: str, value: object) -> str:
    """Return a str that can be sent: valid UTF-8."""
    if not isinstance(value, str):
        raise BadRequest(f"{name}={shown(value)} is not text")
    try:
        value.encode()
    except UnicodeEncodeError as problem:
        text = f"{name}={shown(value)} cannot be written as UTF-8: {problem.reason}"
        raise BadRequest(text) from None
    return value


def check_kind(
    name: str, value: object, kind: type, error: type[UsageError] = BadRequest, cure: str = ""
) -> None:
    """Raise unless a value is of a class."""
    if not isinstance(value, kind):
        what = f"{name}={shown(value)} is a {type(value).__name__}, not a {kind.__name__}"
        raise error(what + (f"; {cure}" if cure else ""))


def nearest(name: object, known: Iterable[str]) -> str:
    """Suggest a name for a misspelt one, for the end of a message; "" if none is similar."""
    import difflib  # of use to a misspelt name only

    found = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def unpicklable(instead: str) -> Callable[[object], NoReturn]:
    """Make a `__reduce__` for an object of one process; its error says what to send instead."""

    def refuse(self: object) -> NoReturn:
        raise UsageError(f"a {type(self).__name__} cannot be pickled or copied: {instead}")

    return refuse

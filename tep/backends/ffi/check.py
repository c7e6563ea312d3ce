"""The one checker that foreign calls pass through: a code below zero becomes an exception.

No other file of tep turns a return code into an exception.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from tep.base.errors import FabricError

__all__ = ["check"]


def check(
    rc: int, what: str, *, describe: Callable[[int], str] = os.strerror, **context: object
) -> int:
    """Return `rc` if it is 0 or more.

    Args:
        rc: what the call returned; -errno where it failed.
        what: the call, e.g. "fi_enable".
        describe: errno -> text, the library's own.
        **context: values that whoever reads the message will want.

    Raises:
        FabricError: code "PROVIDER"; the message holds call, text, code and context.
    """
    if rc >= 0:
        return rc
    values = "".join(f" {name}={value!r}" for name, value in context.items())
    raise FabricError(f"{what} failed: {describe(-rc)} ({rc}){values}", code="PROVIDER")

"""What opening NICs has in common: an incarnation's name and number, and all of them or none."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterable
from typing import Final, TypeVar

from tep.backends.base import Domain
from tep.checks import check_text
from tep.errors import UsageError

__all__ = ["all_or_none", "check_timeout", "identity"]

DomainT = TypeVar("DomainT", bound=Domain)

_NUMBERS: Final = itertools.count(1)
_NAME_BYTES_MAX: Final = 200
_last_epoch = 0


def identity(backend: str, name: str | None, epoch: int | None) -> tuple[str, int]:
    """An incarnation's name and epoch; None = host, pid and a number, and the time in ns.

    So later incarnations have larger epochs, also in another process. Control messages carry the
    name, and peers drop a message with a longer one.
    """
    global _last_epoch
    if epoch is None:
        epoch = _last_epoch = max(time.time_ns(), _last_epoch + 1)
    if name is None:
        name = f"{socket.gethostname()}-{os.getpid()}-{next(_NUMBERS)}"
    if not 1 <= len(check_text(f"{backend}: name", name).encode()) <= _NAME_BYTES_MAX:
        raise UsageError(f"{backend}: name={name!r}; 1 to {_NAME_BYTES_MAX} bytes of UTF-8")
    return name, epoch


def check_timeout(backend: str, peer_timeout_s: float) -> None:
    """Refuse a timeout that cannot be, NaN too."""
    if not peer_timeout_s > 0:
        raise UsageError(f"{backend}: peer_timeout_s={peer_timeout_s}; it must be more than 0")


def all_or_none(opening: Iterable[DomainT]) -> tuple[DomainT, ...]:
    """Open NIC after NIC; if one cannot be, close those before."""
    domains: list[DomainT] = []
    try:
        for domain in opening:
            domains.append(domain)  # noqa: PERF402  # those before a failure are needed
    except BaseException:
        for domain in domains:
            domain.close()
        raise
    return tuple(domains)

"""What opening NICs has in common: an incarnation's name and number, and all of them or none."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import time
from collections.abc import Iterable
from typing import Final, TypeVar

from tep.backends.base import Domain
from tep.base.checks import check_text
from tep.base.errors import UsageError
from tep.host.folders import own_folder

__all__ = ["all_or_none", "check_timeout", "identity"]

DomainT = TypeVar("DomainT", bound=Domain)

_NUMBERS: Final = itertools.count(1)
_NAME_BYTES_MAX: Final = 200
_EPOCH_BYTES: Final = 8
_EPOCH_MAX: Final = 1 << 63
_last_epoch = 0

_log = logging.getLogger("tep")


def identity(backend: str, name: str | None, epoch: int | None) -> tuple[str, int]:
    """An incarnation's name and epoch; None = host, pid and a number, and a number of its own.

    So later incarnations have larger epochs, also in another process. Control messages carry the
    name, and peers drop a message with a longer one.
    """
    if epoch is None:
        epoch = _next_epoch()
    if name is None:
        name = f"{socket.gethostname()}-{os.getpid()}-{next(_NUMBERS)}"
    if not 1 <= len(check_text(f"{backend}: name", name).encode()) <= _NAME_BYTES_MAX:
        raise UsageError(f"{backend}: name={name!r}; 1 to {_NAME_BYTES_MAX} bytes of UTF-8")
    return name, epoch


def _next_epoch() -> int:
    """The time in ns, or one more than the last epoch where that is later.

    The wall clock may be set back between two lives of an engine. So the last epoch of this user's
    engines on this machine is kept in a file.
    """
    global _last_epoch
    try:
        path = own_folder() / "epoch"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except (OSError, UsageError) as error:
        _log.info("epochs need a clock that goes forward: the last one cannot be kept: %s", error)
        _last_epoch = max(time.time_ns(), _last_epoch + 1)
        return _last_epoch
    try:
        kept = int.from_bytes(os.pread(fd, _EPOCH_BYTES, 0), "little")
        kept = kept if kept < _EPOCH_MAX else 0  # nothing of ours
        _last_epoch = max(time.time_ns(), _last_epoch + 1, kept + 1)
        with contextlib.suppress(OSError):  # a full disk: as without the file
            os.pwrite(fd, _last_epoch.to_bytes(_EPOCH_BYTES, "little"), 0)
    finally:
        os.close(fd)
    return _last_epoch


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

"""The places in the tables of shared-memory endpoints, counted, so that none is asked for too many.

The shm provider keeps a table of 256 peers in each endpoint. It does not check that there is room
when a peer connects, and it does not clear what a former peer left in a place that it gives again:
the first command from the 257th name ends the process with a segmentation fault (2.5.1). The one
that connects is the only one that can prevent it. So each endpoint has a file beside its own in
/dev/shm, with the names that its table has seen, one a line; whoever is about to connect writes
down its name first, and stays away if it comes too late.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from tep.base.errors import FabricError

__all__ = ["SEATS", "SUFFIX", "close_seats", "open_seats", "take_seat"]

SEATS: Final = 256
"""Names that one endpoint can meet in its life."""

SUFFIX: Final = ".seats"
_SHM: Final = Path("/dev/shm")  # noqa: S108  # where POSIX shared memory is
_LIST_BYTES_MAX: Final = 1 << 16  # names are 20 bytes or so; later ones came too late anyway


def open_seats(endpoint: str) -> None:
    """Make an endpoint's list, empty. The endpoint's name is that of its file in /dev/shm."""
    path = _SHM / (endpoint + SUFFIX)
    path.unlink(missing_ok=True)  # of a dead process that had the same pid
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise FabricError(f"shm: {path}: {error.strerror}", code="PROVIDER") from error


def close_seats(endpoint: str) -> None:
    """Remove an endpoint's list."""
    with contextlib.suppress(OSError):
        (_SHM / (endpoint + SUFFIX)).unlink()


def take_seat(endpoint: str, name: str) -> bool:
    """Write a name into an endpoint's list; False = its table is full.

    The same name has one seat, however often it asks. An endpoint without a list has closed, or is
    not of tep: that there is room is then not known, and not denied.

    Raises:
        FabricError: the list cannot be read or written, for want of descriptors, say.
    """
    line = name.encode() + b"\n"
    try:
        fd = os.open(_SHM / (endpoint + SUFFIX), os.O_RDWR | os.O_APPEND)
    except FileNotFoundError:
        return True
    except OSError as error:
        raise FabricError(f"shm: seats of {endpoint}: {error.strerror}", code="PROVIDER") from error
    try:
        os.write(fd, line)  # appends are atomic, so that all agree on who came first
        names = os.pread(fd, _LIST_BYTES_MAX, 0).splitlines(keepends=True)
    except OSError as error:
        raise FabricError(f"shm: seats of {endpoint}: {error.strerror}", code="PROVIDER") from error
    finally:
        os.close(fd)
    seated = list(dict.fromkeys(names))[:SEATS]
    return line in seated

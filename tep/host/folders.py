"""Private folders of one user, at paths that other users can predict."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from tep.base.errors import UsageError

__all__ = ["make_own", "own_folder", "unsafe", "usual_folders"]


def own_folder() -> Path:
    """Return the folder of this user's processes on this machine; make it if it is missing.

    Raises:
        UsageError: it belongs to somebody else, or others may open it.
        OSError: it cannot be made.
    """
    return make_own(next(usual_folders(os.geteuid())), "have its owner do so")


def usual_folders(uid: int) -> Iterator[Path]:
    """List the possible places of that folder, the preferred one first."""
    runtime = Path(f"/run/user/{uid}")
    if unsafe(runtime, uid) is None:
        yield runtime / "tep"
    yield Path(f"/tmp/tep-{uid}")  # noqa: S108  # checked for its owner and its mode


def make_own(folder: Path, cure: str) -> Path:
    """Make a folder that nobody else may open, or take the one that is there.

    Args:
        folder: the path; its parent exists.
        cure: advice for the error, if the folder is somebody else's.

    Raises:
        UsageError: it belongs to somebody else, or others may open it.
        OSError: it cannot be made.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if (why := unsafe(folder, os.geteuid())) is not None:
        raise UsageError(f"{why}; remove it, or {cure}")
    return folder


def unsafe(folder: Path, uid: int) -> str | None:
    """Return the reason why a folder is not private to one user; None: it is private."""
    try:
        found = folder.lstat()
    except OSError as error:
        return f"{folder}: {error.strerror}"
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is no folder"
    if found.st_uid != uid or mode & 0o077:
        return f"{folder} belongs to user {found.st_uid} with mode {mode:o}, not to {uid} with 700"
    return None

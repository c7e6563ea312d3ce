"""Whether a process of this machine has ended, which is certain, where silence is not.

A mark names boot, pid namespace, pid and start of a process. For processes of other machines and
namespaces nothing can be said.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["has_ended", "mark_here"]


def mark_here() -> str:
    """The mark of this process; "" where the system does not say."""
    pid = os.getpid()
    start = _start(pid)
    place = _place()
    return f"{place}:{pid}:{start}" if place and start else ""


def has_ended(mark: str) -> bool:
    """Whether a marked process is certain to have ended."""
    place, _, rest = mark.rpartition(":")
    place, _, pid = place.rpartition(":")
    if not (place and place == _place() and pid.isascii() and pid.isdigit() and len(pid) <= 10):
        return False
    return _start(int(pid)) != rest


def _place() -> str:
    """The boot and the pid namespace of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}".replace(":", "")
    except OSError:
        return ""


def _start(pid: int) -> str:
    """When a process began, in ticks since the boot; "" if there is none, or only its corpse."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    fields = stat[stat.rindex(b")") + 2 :].split()
    state, threads, start = fields[0], int(fields[17]), fields[19].decode()
    return "" if state in {b"Z", b"X"} and threads <= 1 else start

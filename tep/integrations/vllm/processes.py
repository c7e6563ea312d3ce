"""Proof that a process of this machine has ended, which its silence would not be.

A mark names boot, pid namespace, pid and start of a process. For processes of other machines and
namespaces nothing can be said.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["has_ended", "mark_here"]


def mark_here() -> str:
    """Return the mark of this process; "" if the system does not say."""
    pid = os.getpid()
    start = _start(pid)
    place = _place()
    return f"{place}:{pid}:{start}" if place and start else ""


def has_ended(mark: str) -> bool:
    """Return True if a marked process is certain to have ended."""
    place, _, rest = mark.rpartition(":")
    place, _, pid = place.rpartition(":")
    if not (place and place == _place() and pid.isascii() and pid.isdigit() and len(pid) <= 10):
        return False
    return _start(int(pid)) != rest


def _place() -> str:
    """Return the boot and the pid namespace of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}".replace(":", "")
    except OSError:
        return ""


def _start(pid: int) -> str:
    """Return a process's start, in ticks since boot; "" if there is none, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    fields = stat[stat.rindex(b")") + 2 :].split()
    state, threads, start = fields[0], int(fields[17]), fields[19].decode()
    return "" if state in {b"Z", b"X"} and threads <= 1 else start

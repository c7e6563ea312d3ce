"""Spoil the guest's network: delay, loss, reordering, pulled cables. Only in the guest."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.vm.kernel import find_tool

_PATIENCE_S = 10.0


@contextmanager
def netem(interfaces: Sequence[str], what: str) -> Iterator[None]:
    """Let `tc netem` treat all that some interfaces send, e.g. "loss 5%" or "delay 20ms"."""
    _each(interfaces, lambda nic: f"qdisc add dev {nic} root netem {what}")
    try:
        yield
    finally:
        _each(interfaces, lambda nic: f"qdisc del dev {nic} root")


@contextmanager
def unplugged(nic: int) -> Iterator[None]:
    """Pull the cable of NIC `nic` out of the switch, and put it back in at the end."""
    _plug(nic, "down")
    try:
        yield
    finally:
        _plug(nic, "up")
        state = Path(f"/sys/class/infiniband/rxe{nic}/ports/1/state")
        end_s = time.monotonic() + _PATIENCE_S
        while "ACTIVE" not in state.read_text():
            if time.monotonic() > end_s:
                raise OSError(f"rxe{nic} has no link again within {_PATIENCE_S} s")
            os.sched_yield()


def _plug(nic: int, what: str) -> None:
    # The far end of the cable: the near one would forget its neighbours.
    command = [find_tool("ip") or "ip", "link", "set", f"port{nic}", what]
    subprocess.run(command, check=True)  # fixed words and a number


def _each(interfaces: Sequence[str], line: Callable[[str], str]) -> None:
    batch = "".join(f"{line(nic)}\n" for nic in interfaces)
    # The words are fixed, the batch is made above.
    done = subprocess.run(
        [find_tool("tc") or "tc", "-batch", "-"],
        input=batch,
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise OSError(f"tc: {done.stderr.strip()}")

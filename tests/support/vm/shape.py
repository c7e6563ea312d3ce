"""Spoil the guest's network: delay, loss, reordering, pulled cables. Only in the guest."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.vm.kernel import find_tool

_SHIFT = 4
_PATIENCE_S = 10.0


def port_band(qpn: int, remote_qpn: int, bands: int) -> int:
    """Return the delay class for the packets of a pair of Soft-RoCE's queue pairs.

    Source: rdma_calc_flow_label and rdma_flow_label_to_udp_sport in <rdma/ib_verbs.h> of Linux 6.1;
    quoted, and seen in the counters of the classes.
    """
    label = qpn * remote_qpn
    label ^= label >> 20
    label ^= label >> 40
    label &= 0xFFFFF
    port = 0xC000 | (label & 0x3FFF ^ label >> 14)
    return (port >> _SHIFT) % bands


@contextmanager
def netem(interfaces: Sequence[str], what: str) -> Iterator[None]:
    """Let `tc netem` treat all that some interfaces send, e.g. "loss 5%" or "delay 20ms"."""
    _each(interfaces, lambda nic: [f"qdisc add dev {nic} root netem {what}"])
    try:
        yield
    finally:
        _each(interfaces, lambda nic: [f"qdisc del dev {nic} root"])


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


@contextmanager
def delay_by_queue_pair(interfaces: Sequence[str], delays_ms: Sequence[int]) -> Iterator[None]:
    """Give the packets of each queue pair one of the 2, 4, 8 or 16 delays.

    Soft-RoCE derives a packet's UDP source port from the numbers of its two queue pairs, and u32
    sorts by four bits of that port, see port_band(). So order holds within a queue pair and is lost
    between them, like on a fabric without message order, if each write may take any queue pair.
    """
    bands = len(delays_ms)
    assert bands in {2, 4, 8, 16}, delays_ms
    priomap = " 0" * 16

    def lines(nic: str) -> list[str]:
        found = [f"qdisc add dev {nic} root handle 1: prio bands {bands} priomap{priomap}"]
        for band, delay_ms in enumerate(delays_ms):
            # Class numbers are hexadecimal.
            found.append(f"qdisc add dev {nic} parent 1:{band + 1:x} netem delay {delay_ms}ms")
            where = f"{band << _SHIFT:#x} {(bands - 1) << _SHIFT:#x}"
            match = f"match ip sport {where} flowid 1:{band + 1:x}"
            found.append(f"filter add dev {nic} parent 1: protocol ip prio 1 u32 {match}")
        return found

    _each(interfaces, lines)
    try:
        yield
    finally:
        _each(interfaces, lambda nic: [f"qdisc del dev {nic} root"])


def _each(interfaces: Sequence[str], lines: Callable[[str], list[str]]) -> None:
    batch = "".join(f"{line}\n" for nic in interfaces for line in lines(nic))
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

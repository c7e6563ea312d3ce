"""One of the two processes of a contestant: does as its control socket says, and times itself.

    python player.py CONTESTANT FOLDER RANK [OPTION=VALUE ...]

Started by ../bench_peers.py, which listens at FOLDER/control; rank 0 sends, rank 1 receives, and
"-" is the rank that mpiexec gave. It needs numpy and what the contestant needs. The clock starts
when the sender submits and stops when the receiver knows; both processes read one monotonic clock.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from contestants import CONTESTANTS

MIB = 1 << 20
BUFFER_BYTES = 256 * MIB
BURST = 20
HALVES_MAX = 2000
PLANS = {
    "weights": (256 * MIB, 1),
    "KV pages": (65536, 1024),
    "small pages": (4096, 16384),
    "tokens": (7168, 1024),
}
"""Name -> bytes a row, rows; targets are scattered. RL's weights are few large writes; KvCache's
pages are many of one size, 4 KiB at the least; a MoE rank sends 128 tokens, each to 8 experts."""


class Link:
    """The socket between the two processes: blobs, and barriers."""

    def __init__(self, fd: int) -> None:
        self.socket = socket.socket(fileno=fd)

    def swap(self, blob: bytes = b"") -> bytes:
        """Send a blob and take the other's."""
        self.socket.sendall(len(blob).to_bytes(4, "little") + blob)
        return self._take(int.from_bytes(self._take(4), "little"))

    def _take(self, nbytes: int) -> bytes:
        found = b""
        while len(found) < nbytes:
            part = self.socket.recv(nbytes - len(found))
            if not part:
                raise EOFError("the other process has ended")
            found += part
        return found


def offsets(page_bytes: int, npages: int) -> tuple[np.ndarray, np.ndarray]:
    """Source pages in order, target pages scattered: offsets in bytes."""
    scattered = np.random.default_rng(npages).permutation(npages)
    return np.arange(npages, dtype=np.int64) * page_bytes, scattered * page_bytes


def bulk(contestant, link: Link, role: str, plan: str) -> dict[str, float]:
    """One transfer of a plan; seconds of wall time and of this process's CPU."""
    page_bytes, npages = PLANS[plan]
    src, dst = offsets(page_bytes, npages)
    contestant.prepare(src, dst, page_bytes)
    link.swap()
    cpu = time.process_time()
    started = time.monotonic_ns()
    if role == "sender":
        contestant.send(src, dst, page_bytes)
        ended = 0
    else:
        contestant.receive(npages)
        ended = time.monotonic_ns()
    cpu = time.process_time() - cpu
    other = int.from_bytes(link.swap((ended or started).to_bytes(8, "little")), "little")
    wall_ns = (ended - other) if role == "receiver" else (other - started)
    return {"wall_s": wall_ns / 1e9, "cpu_s": cpu}


def ping_pong(contestant, link: Link, role: str, budget_s: float) -> dict[str, object]:
    """Half round trips of 8 bytes and a notification, us, and this process's CPU a half trip.

    In bursts, for as long as the budget lasts: who spins on busy cores gets few into it.
    """
    src, dst = np.zeros(1, np.int64), np.zeros(1, np.int64)
    contestant.prepare(src, dst, 8)
    halves: list[float] = []
    cpu, until, more = 0.0, time.monotonic() + budget_s, True
    while more:
        link.swap()
        started_cpu = time.process_time()
        for _ in range(BURST):
            if role == "sender":
                started = time.perf_counter_ns()
                contestant.send(src, dst, 8)
                contestant.receive(1)
                halves.append((time.perf_counter_ns() - started) / 2000)
            else:
                contestant.receive(1)
                contestant.send(src, dst, 8)
                halves.append(0.0)
        cpu += time.process_time() - started_cpu
        late = time.monotonic() > until or len(halves) >= HALVES_MAX
        more = link.swap(b"" if late else b"+") == b"+" and not late
    return {"halves_us": halves[BURST // 2 :], "cpu_us": 1e6 * cpu / len(halves) / 2}


def check(contestant, link: Link, role: str, plan: str) -> bool:
    """One more transfer, of bytes that differ from page to page, compared at the receiver."""
    page_bytes, npages = PLANS[plan]
    src, dst = offsets(page_bytes, npages)
    contestant.prepare(src, dst, page_bytes)
    pages = contestant.buffer[: page_bytes * npages].reshape(npages, page_bytes)
    odd = np.frombuffer(np.random.default_rng(npages).bytes(MIB + 7), np.uint8)
    mine = np.resize(odd, pages.shape)
    pages[:] = mine if role == "sender" else 0
    link.swap()
    good = True
    if role == "sender":
        contestant.send(src, dst, page_bytes)
    else:
        contestant.receive(npages)
        good = np.array_equal(pages[dst // page_bytes], mine)
    link.swap()
    return good


def compute() -> None:
    """Compute in Python for ever."""
    count = 0
    while True:
        count += 1


def main() -> int:
    """Answer one JSON line for each that comes, until they end."""
    name, folder, rank = sys.argv[1:4]
    options = dict(option.split("=", 1) for option in sys.argv[4:])
    number = int(os.environ["OMPI_COMM_WORLD_RANK"] if rank == "-" else rank)
    role = ("sender", "receiver")[number]
    control = socket.socket(socket.AF_UNIX)
    control.connect(f"{folder}/control")
    control.sendall(json.dumps({"rank": number, "pid": os.getpid()}).encode() + b"\n")
    link = Link(socket.recv_fds(control, 1, 1)[1][0])
    if os.environ.get("TEP_BENCH_BUSY"):
        threading.Thread(target=compute, daemon=True).start()
    answers, orders = control.makefile("w"), control.makefile("r")
    try:
        contestant = CONTESTANTS[name](role, link, BUFFER_BYTES, options)
        print(json.dumps({"ready": contestant.about}), file=answers, flush=True)
        for line in orders:
            what, argument = json.loads(line)
            if what == "bulk":
                answer = bulk(contestant, link, role, argument)
            elif what == "ping-pong":
                answer = ping_pong(contestant, link, role, argument)
            else:
                answer = {"good": check(contestant, link, role, argument)}
            print(json.dumps(answer), file=answers, flush=True)
        contestant.close()
    except Exception:  # noqa: BLE001  # told to the bench, which says it and goes on
        print(json.dumps({"error": traceback.format_exc(limit=-3)}), file=answers, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

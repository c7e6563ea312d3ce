"""The whole engine against a plain C loop over libfabric: same provider and settings, in turns.

    python tests/bench/libfabric/bench_libfabric.py [--provider tcp shm] [--runs 7] [--json FILE]

Needs a C compiler and libfabric's headers. Each figure is the median of the runs; runs of C and of
tep take turns, so that other work on the machine meets both. What is timed: from
submit_paged_writes() to the last counted immediate and the transfer's own end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

import tep
from tep.backends import libfabric
from tep.ffi.libfabric import load
from tep.units import KiB, MiB

HERE = Path(__file__).parent
INCLUDE = "/usr/include"
PAIRS = 5
CPU_CASES = {"tcp": (4 * KiB, 64 * KiB, MiB), "shm": (4 * KiB, 64 * KiB, MiB)}
LIMITS = {
    ("cpu", "tcp", 4 * KiB): 1.25,
    ("cpu", "tcp", 64 * KiB): 1.05,
    ("cpu", "tcp", MiB): 1.05,
    ("cpu", "shm", 4 * KiB): 2.5,
    ("lat", "tcp", 8): 2.5,
}


def build(folder):
    """Compile the yardstick against the libfabric that tep itself found."""
    out = Path(folder, "yardstick")
    library = load().found.path
    subprocess.run(
        ["cc", "-O2", str(HERE / "yardstick.c"), "-I", INCLUDE, library, "-o", str(out)]
        + ([f"-Wl,-rpath,{Path(library).parent}"] if "/" in library else ["-lfabric"]),
        check=True,
    )
    return out


def pages(nbytes):
    """Page-aligned memory, written to, as the yardstick's is."""
    memory = np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE), np.uint8)
    memory[:] = 1
    return memory


def say(text):
    """One line, at once: a pipe would keep it back."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Yardstick:
    """The C program; `run()` makes one run."""

    def __init__(self, program, *arguments):
        self.process = subprocess.Popen(
            [str(program), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self):
        print("go", file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def engine(provider, ring=None):
    """One engine with one NIC."""
    opened = libfabric.open_domains(provider=provider, nics=1)
    driver = tep.ThreadDriver(opened.name) if ring is None else tep.InlineDriver(ring)
    return tep.TransferEngine(opened.domains, driver=driver, name=opened.name, epoch=opened.epoch)


class Pair:
    """Both ends in one thread; `run()` gives the CPU time of a write in microseconds."""

    def __init__(self, provider, size, rows):
        self.rows, self.size = rows, size
        ring = []
        self.a, self.b = engine(provider, ring), engine(provider, ring)
        nbytes = rows * max(size, 4 * KiB)
        self.source, self.target = pages(nbytes), pages(nbytes)
        self.mr, _ = self.a.reg_mr(self.source)
        _, self.desc = self.b.reg_mr(self.target)
        self.pages = tep.Pages(np.arange(rows))
        self.run()

    def run(self):
        start = time.process_time_ns()
        got = self.b.expect_imm_count(1, self.rows)
        sent = self.a.submit_paged_writes(
            self.size, (self.mr, self.pages), (self.desc, self.pages), 1
        )
        got.wait(60)
        sent.wait(60)
        return (time.process_time_ns() - start) / self.rows / 1000

    def close(self):
        self.a.close()
        self.b.close()


class Two:
    """Two processes; the other one is this file with --serve."""

    def __init__(self, provider, size, rows, *, lat):
        self.rows, self.size, self.lat = rows, size, lat
        self.ring = []
        self.engine = engine(provider, self.ring)
        self.memory = pages(max(size, 4 * KiB) * (1 if lat else rows))
        self.mr, desc = self.engine.reg_mr(self.memory)
        self.process = subprocess.Popen(
            [
                sys.executable,
                __file__,
                "--serve",
                provider,
                str(size),
                str(rows),
                str(int(lat)),
                desc.to_bytes().hex(),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.desc = tep.MrDesc.from_bytes(bytes.fromhex(self.process.stdout.readline()))
        self.pages = tep.Pages(np.arange(rows))
        self.one = tep.Pages([0])
        self.run()

    def run(self):
        if self.lat:
            return statistics.median(self._ping() for _ in range(self.rows))
        start = time.perf_counter_ns()
        answer = self.engine.expect_imm_count(2, 1)
        sent = self.engine.submit_paged_writes(
            self.size, (self.mr, self.pages), (self.desc, self.pages), 1
        )
        answer.wait(60)
        sent.wait(60)
        return (time.perf_counter_ns() - start) / 1000

    def _ping(self):
        start = time.perf_counter_ns()
        answer = self.engine.expect_imm_count(2, 1)
        self.engine.submit_single_write(self.size, (self.mr, 0), (self.desc, 0), 1)
        answer.wait(60)
        return (time.perf_counter_ns() - start) / 2000

    def close(self):
        self.process.kill()
        self.process.wait()
        self.engine.close()


def serve(provider, size, rows, lat, desc):
    """The other process of Two: count, then answer with one write."""
    target = tep.MrDesc.from_bytes(bytes.fromhex(desc))
    here = engine(provider, [])
    memory = pages(max(size, 4 * KiB) * (1 if lat else rows))
    mr, mine = here.reg_mr(memory)
    say(mine.to_bytes().hex())
    while True:
        here.expect_imm_count(1, 1 if lat else rows).wait(120)
        here.submit_single_write(8, (mr, 0), (target, 0), 2)


def delays(provider, calls=3000):
    """How long a 100 us call of the user's own thread takes, idle and beside a busy engine, us.

    The call drops the interpreter's lock (SHA-256 over a buffer of the right length), as numpy's,
    torch's and file calls do; it needs the lock again to return.
    """
    two = Two(provider, 64 * KiB, 512, lat=False)
    two.engine.close()
    busy = engine(provider)
    mr, _ = busy.reg_mr(two.memory)
    data = bytes(64 * KiB)
    while _timed(hashlib.sha256, data) < 100:
        data += bytes(16 * KiB)
    idle = sorted(_timed(hashlib.sha256, data) for _ in range(calls))
    stop = []

    def again(_):
        if not stop:
            busy.submit_paged_writes(
                64 * KiB, (mr, two.pages), (two.desc, two.pages), 7, on_done=again
            )

    for _ in range(2):
        again(None)
    loaded = sorted(_timed(hashlib.sha256, data) for _ in range(calls))
    stop.append(1)
    two.process.kill()
    two.process.wait()
    busy.close()
    for name, took in (("idle", idle), ("busy", loaded)):
        say(
            f"call  {provider:4} {name}: p50 {took[calls // 2]:.0f} us, "
            f"p99 {took[calls * 99 // 100]:.0f} us, worst {took[-1]:.0f} us"
        )


def _timed(function, *arguments):
    start = time.perf_counter_ns()
    function(*arguments)
    return (time.perf_counter_ns() - start) / 1000


def compare(name, provider, size, ours, theirs, runs):
    """Run both in turns, in several pairs of fresh processes; print and return the medians.

    Fresh ones, because where a process's memory happens to lie changes its figures by a tenth.
    """
    mine, c = [], []
    for _ in range(PAIRS):
        one, other = theirs(), ours()
        one.run()
        for _ in range(runs):
            c.append(one.run())
            mine.append(other.run())
        other.close()
        one.close()
    tep_us, c_us = statistics.median(mine), statistics.median(c)
    limit = LIMITS.get((name, provider, size))
    say(
        f"{name:5} {provider:4} {size:8} B  C {c_us:10.2f} us  tep {tep_us:10.2f} us  "
        f"{tep_us / c_us:5.2f}x  best C {min(c):.2f} tep {min(mine):.2f}"
        + (f"  (at most {limit}x)" if limit else "")
    )
    return {
        "figure": name,
        "provider": provider,
        "bytes": size,
        "c_us": c_us,
        "tep_us": tep_us,
        "ratio": tep_us / c_us,
        "limit": limit,
        "runs": PAIRS * runs,
    }


def main(argv):
    """Measure; 0 if every figure that has a limit keeps it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--provider", nargs="+", default=["tcp", "shm"])
    parser.add_argument("--only", nargs="+", default=["cpu", "lat", "rate", "call"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json")
    arguments = parser.parse_args(argv)
    if not shutil.which("cc") or not Path(INCLUDE, "rdma/fabric.h").exists():
        say("needs a C compiler and libfabric's headers (Debian: gcc, libfabric-dev)")
        return 2
    say(f"{load().describe()}; {platform.machine()}, Python {platform.python_version()}")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        program = build(folder)
        for provider in arguments.provider:
            dc = int(provider != "shm")
            for size in CPU_CASES[provider] if "cpu" in arguments.only else ():
                rows = {4 * KiB: 4096, 64 * KiB: 1024}.get(size, 128)
                window = max(4, min(1024, 4 * MiB // size))
                found.append(
                    compare(
                        "cpu",
                        provider,
                        size,
                        partial(Pair, provider, size, rows),
                        partial(Yardstick, program, "cpu", provider, size, rows, window, dc),
                        arguments.runs,
                    )
                )
            if "lat" in arguments.only:
                ours = partial(Two, provider, 8, 2000, lat=True)
                theirs = partial(Yardstick, program, "lat", provider, 8, 2000, 1, dc)
                found.append(compare("lat", provider, 8, ours, theirs, arguments.runs))
            if "call" in arguments.only:
                delays(provider)
            if "rate" in arguments.only:
                ours = partial(Two, provider, 64 * KiB, 4096, lat=False)
                theirs = partial(Yardstick, program, "rate", provider, 64 * KiB, 4096, 64, dc)
                found.append(compare("rate", provider, 64 * KiB, ours, theirs, arguments.runs))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    return int(any(one["limit"] and one["ratio"] > one["limit"] for one in found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        provider, size, rows, lat, desc = sys.argv[2:]
        serve(provider, int(size), int(rows), int(lat), desc)
    sys.exit(main(sys.argv[1:]))

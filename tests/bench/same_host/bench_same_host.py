"""Two processes of one host: tep's local backend against the limits and against others, in turns.

    python tests/bench/same_host/bench_same_host.py [--rounds 9] [--json FILE]
        [--peer nixl=/path/to/its/venv/bin/python] [--peer ucxx=/path/to/another]

Every contestant is two processes that stay open, and are stopped while others run. A round gives
each of them one transfer of each plan and one ping-pong, so that whatever else this machine does
meets all alike. Shown: medians, the best round, CPU of both processes beside the wall time, and the
median over rounds of the ratio to the limit in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from player import PLANS

HERE = Path(__file__).parent
LIMITS = {"whole": "writev", "64k": "writev", "4k": "writev"}
PINGS_S = 0.5
AIMS = """aims at defaults: 256 MiB 10 GB/s, 1,024 x 64 KiB 7.7 GB/s, 16,384 x 4 KiB 800 thousand
pages/s, 8 B p50 30 us and p99 1 ms, 8 B p50 10 us when spinning"""


def say(line: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{line}\n")


@dataclass
class Entry:
    """One contestant, open."""

    label: str
    processes: list[subprocess.Popen[str]]
    about: str = ""
    error: str = ""
    results: dict[str, list[dict[str, object]]] = field(default_factory=dict)

    def ask(self, what: str, argument: object) -> list[dict[str, object]] | None:
        """Have both processes do something; their answers, or None if one has failed."""
        if self.error:
            return None
        self.signal(signal.SIGCONT)
        try:
            for process in self.processes:
                print(json.dumps([what, argument]), file=process.stdin, flush=True)
        except OSError as error:
            self.error = str(error)
            return None
        found = self.answers()
        self.signal(signal.SIGSTOP)
        return found

    def signal(self, number: int) -> None:
        """Stopped between its turns: the threads of some spin for ever, in everybody's way."""
        for process in self.processes:
            process.send_signal(number)

    def answers(self) -> list[dict[str, object]] | None:
        found = []
        for process in self.processes:
            line = process.stdout.readline()
            answer = json.loads(line) if line else {"error": "a process ended without a word"}
            if "error" in answer:
                self.error = f"{answer['error']}".strip().splitlines()[-1]
                self.close()
                return None
            found.append(answer)
        return found

    def close(self) -> None:
        """End both processes."""
        self.signal(signal.SIGCONT)
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def open_entry(label: str, python: str, name: str, options: list[str]) -> Entry:
    """Start a contestant's two processes and let them meet."""
    ends = socket.socketpair()
    processes = [
        subprocess.Popen(
            [python, str(HERE / "player.py"), name, role, str(end.fileno()), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            pass_fds=[end.fileno()],
            env={**os.environ, "UCX_LOG_LEVEL": "error"},
        )
        for role, end in zip(("sender", "receiver"), ends, strict=True)
    ]
    for end in ends:
        end.close()
    entry = Entry(label, processes)
    answers = entry.answers()
    if answers is not None:
        entry.about = f"{answers[0]['ready']}"
        entry.signal(signal.SIGSTOP)
    return entry


def play(entries: list[Entry], rounds: int) -> None:
    """Rounds of everything, interleaved; each round begins with another contestant."""
    for k in range(rounds + 1):  # the first one warms up
        order = entries[k % len(entries) :] + entries[: k % len(entries)]
        sys.stderr.write(f"round {k} of {rounds}\n")
        for plan in PLANS:
            for entry in order:
                answers = entry.ask("bulk", plan)
                if answers is not None and k:
                    found = {
                        "wall_s": answers[1]["wall_s"],
                        "cpu_s": sum(float(answer["cpu_s"]) for answer in answers),
                    }
                    entry.results.setdefault(plan, []).append(found)
        for entry in order:
            if entry.label == "memcpy":
                continue
            answers = entry.ask("ping-pong", PINGS_S)
            if answers is not None and k:
                halves = sorted(answers[0]["halves_us"])
                found = {
                    "p50_us": halves[len(halves) // 2],
                    "p99_us": halves[len(halves) * 99 // 100],
                    "cpu_us": sum(float(answer["cpu_us"]) for answer in answers),
                }
                entry.results.setdefault("8", []).append(found)


def bulk_figures(entry: Entry, plan: str, limit: Entry) -> dict[str, float]:
    """Medians of one plan, GB/s (10**9), and the ratio to the limit round by round."""
    page_bytes, npages = PLANS[plan]
    rates = [page_bytes * npages / run["wall_s"] / 1e9 for run in entry.results[plan]]
    cpus = [run["cpu_s"] for run in entry.results[plan]]
    beside = [
        theirs["wall_s"] / ours["wall_s"]
        for ours, theirs in zip(entry.results[plan], limit.results[plan], strict=False)
    ]
    return {
        "gbps": statistics.median(rates),
        "gbps_best": max(rates),
        "cpu_ms": 1e3 * statistics.median(cpus),
        "to_limit": statistics.median(beside),
        "kpages": statistics.median(rates) * 1e6 / page_bytes,
        "kpages_best": max(rates) * 1e6 / page_bytes,
    }


def summarize(entries: list[Entry]) -> list[dict[str, object]]:
    """One row a contestant."""
    by_label = {entry.label: entry for entry in entries}
    rows: list[dict[str, object]] = []
    for entry in entries:
        row: dict[str, object] = {"who": entry.label, "about": entry.about, "error": entry.error}
        for plan in PLANS:
            if plan in entry.results:
                row[plan] = bulk_figures(entry, plan, by_label[LIMITS[plan]])
        if "8" in entry.results:
            row["8"] = {
                key: statistics.median(run[key] for run in entry.results["8"])
                for key in ("p50_us", "p99_us", "cpu_us")
            } | {"p50_us_best": min(run["p50_us"] for run in entry.results["8"])}
        rows.append(row)
    return rows


def show(rows: list[dict[str, object]]) -> None:
    """Print a table: median (best) wall figures, CPU of both ends, ratio to the limit."""
    head = (
        "256 MiB GB/s",
        "1,024 x 64 KiB GB/s",
        "16,384 x 4 KiB kpages/s",
        "8 B us p50 (best) p99",
    )
    say(f"{'':14} {head[0]:>26} {head[1]:>26} {head[2]:>28} {head[3]:>28}")
    say(f"{'':14} " + f"{'median (best) cpu ms  ratio':>26} " * 2 + f"{'':28} {'cpu us':>28}")
    for row in rows:
        cells = []
        for plan in PLANS:
            found = row.get(plan)
            if found is None:
                cells.append("-")
                continue
            values = (
                f"{found['kpages']:.0f} ({found['kpages_best']:.0f})"
                if plan == "4k"
                else f"{found['gbps']:.2f} ({found['gbps_best']:.2f})"
            )
            cells.append(f"{values} {found['cpu_ms']:5.1f} {found['to_limit']:5.2f}")
        small = row.get("8")
        cells.append(
            "-"
            if small is None
            else f"{small['p50_us']:.1f} ({small['p50_us_best']:.1f}) {small['p99_us']:.0f} "
            f"{small['cpu_us']:.1f}"
        )
        say(f"{row['who']:14} {cells[0]:>26} {cells[1]:>26} {cells[2]:>28} {cells[3]:>28}")
        if row["error"]:
            say(f"{'':14}   {row['error']}")
    say(AIMS)


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    args = parser.parse_args(argv)
    wanted = [
        ("memcpy", sys.executable, "memcpy", []),
        ("writev", sys.executable, "writev", []),
        ("tep", sys.executable, "tep", []),
        ("tep shared", sys.executable, "tep", ["memory=shared"]),
        ("tep spinning", sys.executable, "tep spinning", []),
        ("tep sh. spin", sys.executable, "tep spinning", ["memory=shared"]),
    ]
    for peer in args.peer:
        name, _, python = peer.partition("=")
        wanted.append((name, python, name, []))
        if name == "nixl":
            wanted.append(("nixl defaults", python, name, ["defaults=1"]))
    entries = [open_entry(*one) for one in wanted]
    try:
        play(entries, args.rounds)
        for entry in entries:
            for plan in PLANS if entry.label != "memcpy" else ():
                answers = entry.ask("check", plan)
                if answers is not None and not answers[1]["good"]:
                    entry.error = f"delivered wrong bytes ({plan})"
    finally:
        for entry in entries:
            if not entry.error:
                entry.close()
    rows = summarize(entries)
    load = os.getloadavg()[0]
    say(
        f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, load "
        f"{load:.1f}, {args.rounds} rounds, {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC"
    )
    show(rows)
    if args.json:
        args.json.write_text(json.dumps({"load": load, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

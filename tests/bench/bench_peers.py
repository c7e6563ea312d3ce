"""Compare tep with other engines between two processes of one host, in turns.

Each contestant is two processes that stay open, and are stopped while others run. A round gives
each of them one transfer of each plan and one ping-pong, so that other work on the machine affects
all alike. Ratios are taken in each round; the result is their median. The programs for each engine
are in tests/bench/same_host.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

from tep.base.errors import UsageError
from tep.cli.show import emit_json, print_table
from tests.bench.figures import machine_of_figures

__all__ = ["PEERS", "PLANS", "Row", "find_peers", "peer_rows"]

PLAYER: Final = Path(__file__).parent / "same_host" / "player.py"

PEERS: Final[Mapping[str, str]] = {
    "nixl": "nixl_cu12._api",
    "mooncake": "mooncake.engine",
    "ucxx": "ucxx",
    "mpi": "mpi4py.MPI",
}
"""Engines that can be compared -> the module that their environment must have."""

PLANS: Final[Mapping[str, tuple[str, int]]] = {
    "weights": ("RL, 256 MiB", 256 << 20),
    "KV pages": ("KvCache, 1,024 x 64 KiB", 64 << 20),
    "small pages": ("KvCache, 16,384 x 4 KiB", 64 << 20),
    "tokens": ("MoE, 1,024 x 7 KiB", 7 << 20),
}
"""Plans of player.py -> title, bytes."""

PING: Final = "8 B, half a round trip"

OURS: Final = (
    ("tep", "tep", ()),
    ("tep, shared memory", "tep", ("memory=shared",)),
    ("tep, spinning", "tep spinning", ()),
    ("limit: memcpy", "memcpy", ()),
    ("limit: process_vm_writev", "writev", ()),
)
_PINGS_S: Final = 0.5
_START_S: Final = 120.0
_ANSWER_S: Final = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contestant in one plan; least and most are over rounds.

    Attributes:
        who: the contestant.
        about: its version.
        what: the plan.
        unit: unit of median, least and most.
        median, least, most: the results; None: it did not take part, see `absent`.
        ratio: ratio to tep in the same round, above 1 if better than tep; median, least, most.
        cpu_ms: CPU of both processes, median; for the ping-pong, of half a round trip.
        absent: the reason why there is no figure.
    """

    who: str
    about: str = ""
    what: str = ""
    unit: str = ""
    median: float | None = None
    least: float | None = None
    most: float | None = None
    ratio: tuple[float, float, float] | None = None
    cpu_ms: float | None = None
    absent: str = ""


@dataclass(slots=True)
class Entry:
    """One contestant, open."""

    label: str
    folder: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    controls: list[tuple[TextIO, TextIO]] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    about: str = ""
    error: str = ""
    values: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def ask(self, what: str, argument: object) -> list[dict[str, Any]] | None:
        """Send both processes a request; return their answers, or None if one has failed."""
        if self.error:
            return None
        self.signal(signal.SIGCONT)
        try:
            for _, orders in self.controls:
                print(json.dumps([what, argument]), file=orders, flush=True)
        except OSError as error:
            self.error = str(error)
            return None
        found = self.answers()
        self.signal(signal.SIGSTOP)
        return found

    def answers(self) -> list[dict[str, Any]] | None:
        """Read one answer of each process."""
        found: list[dict[str, Any]] = []
        for answers, _ in self.controls:
            try:
                line = answers.readline()
            except TimeoutError:
                line = json.dumps({"error": f"no answer within {_ANSWER_S:g} s"})
            answer = json.loads(line) if line else {"error": "a process ended without a word"}
            if "error" in answer:
                self.error = str(answer["error"]).strip().splitlines()[-1]
                self.close()
                return None
            found.append(answer)
        return found

    def signal(self, number: int) -> None:
        """Stop or continue both processes: some spin for ever, and would disturb the others."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """End both processes."""
        self.signal(signal.SIGCONT)
        for files in self.controls:
            for file in files:
                with contextlib.suppress(OSError):
                    file.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def open_entry(label: str, python: str, name: str, options: Sequence[str]) -> Entry:
    """Start a contestant's two processes and let them meet."""
    entry = Entry(label, tempfile.mkdtemp(prefix="tep-peers-"))
    player = [python, str(PLAYER), name, entry.folder]
    commands = [[*player, rank, *options] for rank in ("0", "1")]
    if name == "mpi":
        mpiexec = str(Path(python).with_name("mpiexec"))
        words = ["--allow-run-as-root", "--oversubscribe", "-n", "2"]
        commands = [[mpiexec, *words, *player, "-", *options]]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{entry.folder}/control")
        listener.listen()
        listener.settimeout(_START_S)
        quiet = subprocess.DEVNULL
        env = os.environ | {"UCX_LOG_LEVEL": "error"}
        try:
            for command in commands:
                entry.processes.append(
                    subprocess.Popen(  # the player, in an environment that was named
                        command, stdin=quiet, stdout=quiet, stderr=quiet, env=env
                    )
                )
            with contextlib.ExitStack() as stack:
                ends = [stack.enter_context(end) for end in socket.socketpair()]
                met = sorted(_meet(listener, ends) for _ in range(2))
        except TimeoutError:
            entry.error = f"its two processes did not come within {_START_S:g} s"
        except (OSError, ValueError) as error:  # no mpiexec; or it died before it introduced itself
            entry.error = f"it could not be started: {error}"
    if entry.error:
        entry.close()
        return entry
    entry.controls = [files for _, _, files in met]
    entry.pids = [pid for _, pid, _ in met]
    answers = entry.answers()
    if answers is not None:
        entry.about = str(answers[0]["ready"])
        entry.signal(signal.SIGSTOP)
    return entry


def _meet(
    listener: socket.socket, ends: Sequence[socket.socket]
) -> tuple[int, int, tuple[TextIO, TextIO]]:
    """Read rank and process id of a process that has connected; return them with both streams.

    The process gets its end of the socket between the two processes.
    """
    connection, _ = listener.accept()
    with connection:  # the files keep it open until they are closed
        connection.settimeout(_ANSWER_S)
        files = connection.makefile("r"), connection.makefile("w")
        hello = json.loads(files[0].readline())
        rank = int(hello["rank"])
        socket.send_fds(connection, [b"x"], [ends[rank].fileno()])
    return rank, int(hello["pid"]), files


def find_peers(named: Sequence[str] = (), folder: Path | None = None) -> dict[str, str]:
    """Find the Python of each of PEERS.

    Args:
        named: "nixl=PYTHON", Python of an environment that has it.
        folder: folder of environments: FOLDER/nixl/bin/python; `named` takes precedence.

    Returns:
        Name -> Python; peers without an environment are not in it.

    Raises:
        UsageError: an unknown peer, or a Python that is not there.
    """
    found: dict[str, str] = {}
    for one in named:
        name, _, python = one.partition("=")
        if name not in PEERS or not python:
            raise UsageError(f"--peer {one}: not NAME=PYTHON with a name of: {', '.join(PEERS)}")
        if not Path(python).exists():
            raise UsageError(f"--peer {one}: there is no {python}")
        found[name] = python
    if folder is None:
        return found
    for name in PEERS:
        python = str(folder / name / "bin" / "python")
        if name not in found and Path(python).exists():
            found[name] = python
    return found


def peer_rows(pythons: Mapping[str, str], rounds: int = 9) -> list[Row]:
    """Measure, and make the rows; a peer that is absent, or fails, gets a row with the reason.

    Raises:
        LookupError: this is no checkout.
    """
    if not PLAYER.exists():
        raise LookupError(f"no {PLAYER}: it is in a checkout only")
    wanted = [(label, sys.executable, name, options) for label, name, options in OURS]
    absent: list[Row] = []
    for name, module in PEERS.items():
        why = _why_absent(name, module, pythons.get(name))
        if why:
            absent.append(Row(who=name, absent=why))
            continue
        wanted.append((name, pythons[name], name, ()))
        if name == "nixl":
            wanted.append(("nixl, its defaults", pythons[name], name, ("defaults=1",)))
    entries: list[Entry] = []
    try:
        entries.extend(open_entry(*one) for one in wanted)
        _play(entries, rounds)
        for entry in entries:
            for plan in PLANS if entry.label != "limit: memcpy" else ():
                answers = entry.ask("check", plan)
                if answers is not None and not answers[1]["good"]:
                    entry.error = f"it delivered wrong bytes ({plan})"
    finally:
        for entry in entries:
            entry.close()
    return [row for entry in entries for row in rows_of(entry, entries[0])] + absent


def _why_absent(name: str, module: str, python: str | None) -> str:
    """Return the reason why a peer cannot take part; "" if it can."""
    if python is None:
        return f"no environment: --peer {name}=PYTHON, or --envs FOLDER with {name}/bin/python"
    done = subprocess.run(  # as above
        [python, "-c", f"import numpy, {module}"],
        capture_output=True, text=True, timeout=_START_S, check=False,
    )  # fmt: skip
    return (done.stderr.strip().splitlines() or ["it cannot be imported"])[-1] * (
        done.returncode != 0
    )


def _play(entries: Sequence[Entry], rounds: int) -> None:
    """Run all rounds, interleaved; each round begins with another contestant."""
    for k in range(rounds + 1):  # the first one warms up
        order = [*entries[k % len(entries) :], *entries[: k % len(entries)]]
        for plan, (_, nbytes) in PLANS.items():
            for entry in order:
                answers = entry.ask("bulk", plan)
                if answers is not None and k:
                    rate = nbytes / float(answers[1]["wall_s"]) / 1e9
                    cpu_ms = 1e3 * sum(float(answer["cpu_s"]) for answer in answers)
                    entry.values.setdefault(plan, []).append((rate, cpu_ms))
        for entry in order:
            answers = entry.ask("ping-pong", _PINGS_S) if "memcpy" not in entry.label else None
            if answers is not None and k:
                half_us = statistics.median(answers[0]["halves_us"])
                cpu_ms = sum(float(answer["cpu_us"]) for answer in answers) / 1e3
                entry.values.setdefault(PING, []).append((half_us, cpu_ms))


def rows_of(entry: Entry, ours: Entry) -> list[Row]:
    """Make the rows of a contestant, with the reason for missing results."""
    rows = []
    for what, found in entry.values.items():
        values = [value for value, _ in found]
        theirs = [value for value, _ in ours.values.get(what, ())]
        pairs = zip(values, theirs, strict=False)
        better = [b / a if what == PING else a / b for a, b in pairs]
        rows.append(
            Row(
                who=entry.label,
                about=entry.about,
                what=PLANS[what][0] if what in PLANS else what,
                unit="us" if what == PING else "GB/s",
                median=statistics.median(values),
                least=min(values),
                most=max(values),
                ratio=(statistics.median(better), min(better), max(better)) if better else None,
                cpu_ms=statistics.median(cpu_ms for _, cpu_ms in found),
            )
        )
    if entry.error:
        rows.append(Row(who=entry.label, about=entry.about, absent=entry.error))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    envs = os.environ.get("TEP_PEER_ENVS")
    parser.add_argument("--envs", type=Path, default=envs, help="of peers: ENVS/nixl/bin/python")
    parser.add_argument("--busy", action="store_true", help="a thread computes in each process")
    parser.add_argument("--rounds", type=int, default=9, help="3 or more")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if args.busy:
        os.environ["TEP_BENCH_BUSY"] = "1"  # for the players
    try:
        found = peer_rows(find_peers(args.peer, args.envs and Path(args.envs)), args.rounds)
    except (LookupError, UsageError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    title = "tests.bench.bench_peers"
    if args.json:
        rows = [asdict(row) for row in found]
        machine = machine_of_figures()
        emit_json({"command": title, "machine": machine, "rounds": args.rounds, "rows": rows})
        return 0
    table = (
        {
            "who": row.who,
            "what": row.what,
            "median": None if row.median is None else f"{row.median:.2f} {row.unit}",
            "least": None if row.least is None else f"{row.least:.2f}",
            "most": None if row.most is None else f"{row.most:.2f}",
            "to tep": None if row.ratio is None else "{:.2g} ({:.2g} to {:.2g})".format(*row.ratio),
            "CPU": None if row.cpu_ms is None else f"{row.cpu_ms:.2f} ms",
            "absent": row.absent or None,
        }
        for row in found
    )
    columns = ("who", "what", "median", "least", "most", "to tep", "CPU", "absent")
    print_table(f"{title} ({machine_of_figures()}; wall time)", columns, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

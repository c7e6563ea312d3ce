"""Starting one program on several hosts, by ssh, srun or as processes of this host.

Each copy learns which rank it is as `tep.rendezvous` reads it: RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT and TEP_TOKEN. torchrun sets these itself; of srun's variables `place_here` makes them.
"""

from __future__ import annotations

import os
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from tep.base.errors import RendezvousError, UsageError, WaitTimeout
from tep.rendezvous.place import Place

__all__ = ["METHODS", "launch", "own_address", "place_here"]

METHODS: Final = ("local", "ssh", "srun")
_PORTS: Final = 29_400, 1_000  # the first, and how many; by job, so that two jobs rarely meet
_LOOK_S: Final = 0.1
_END_S: Final = 5.0


def place_here(environ: Mapping[str, str] | None = None) -> Place | None:
    """Which rank this process is, by torchrun's variables or srun's; None: started alone.

    Raises:
        UsageError: some are there, and others are missing or no numbers.
    """
    env = os.environ if environ is None else environ
    if env.get("RANK"):
        return Place.from_env(env)
    if env.get("SLURM_PROCID") is None or env.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None
    job = env.get("SLURM_JOB_ID", "0")
    number = int(job) if job.isdecimal() else 0
    return Place.from_env(
        {
            "RANK": env["SLURM_PROCID"],
            "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
            "MASTER_ADDR": env.get("TEP_MASTER") or _first_host(env),
            "MASTER_PORT": str(_PORTS[0] + number % _PORTS[1]),
            "TEP_TOKEN": env.get("TEP_TOKEN") or f"slurm-{job}",
        }
    )


def _first_host(env: Mapping[str, str]) -> str:
    """The first host of a SLURM step, as scontrol spells the list out."""
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    try:
        done = subprocess.run(  # noqa: S603  # scontrol is SLURM's own
            ["scontrol", "show", "hostnames", hosts],  # noqa: S607  # where SLURM put it
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise UsageError(
            f"launch: scontrol does not say which host of {hosts!r} is the first ({error}); set "
            "TEP_MASTER to its name in all ranks"
        ) from error


def own_address(place: Place) -> str:
    """The address of this host that the other ranks reach: the one on the way to rank 0.

    Raises:
        UsageError: rank 0's host has no address, or no way leads there.
    """
    try:
        target = socket.getaddrinfo(place.host, place.port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(target[0], socket.SOCK_DGRAM) as probe:
            probe.connect(target[4])  # a datagram socket: this asks the routes and sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"launch: no way leads to rank 0 at {place.host!r} ({error}); MASTER_ADDR, or the "
            "first of --hosts, must be a name or an address that every rank reaches"
        ) from error


def launch(
    method: str,
    hosts: Sequence[str],
    command: Sequence[str],
    *,
    port: int = 0,
    timeout_s: float = 600.0,
    out: IO[str] | None = None,
) -> None:
    """Run a command once a host, and wait until all have ended; what rank 0 prints is passed on.

    Args:
        method: "local": processes of this host; "ssh": a shell on each host, in the same folder;
            "srun": one step of SLURM with a task a host.
        hosts: one a rank; the first must be reachable by the others under this name. For srun only
            their number counts.
        command: program and arguments.
        port: where rank 0 listens; 0 = one that is probably free.
        timeout_s: how long all may take; then they are ended.
        out: where rank 0's output goes; None = stdout.

    Raises:
        UsageError: no such method, or no host.
        RendezvousError: a rank ended with an error; the others are ended.
        WaitTimeout: not all have ended in time.
    """
    if method not in METHODS or not hosts:
        raise UsageError(f"launch: method={method!r} hosts={list(hosts)}; {', '.join(METHODS)}")
    port = port or _PORTS[0] + secrets.randbelow(_PORTS[1])
    token = secrets.token_hex(16)
    base = {"WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": hosts[0], "MASTER_PORT": str(port)}
    with tempfile.TemporaryDirectory(prefix="tep-launch-") as folder:
        if method == "srun":
            slurm = ["srun", "--nodes", str(len(hosts)), "--ntasks", str(len(hosts))]
            started = [
                _start(
                    [*slurm, "--ntasks-per-node", "1", *command], {"TEP_TOKEN": token}, folder, 0
                )
            ]
        else:
            started = []
            for rank in range(len(hosts)):
                mine = {**base, "RANK": str(rank), "TEP_TOKEN": token}
                if method == "local":
                    started.append(_start(command, mine, folder, rank))
                else:
                    shell = ["ssh", "-o", "BatchMode=yes", hosts[rank], "sh", "-s"]
                    started.append(_start(shell, {}, folder, rank, _script(command, mine)))
        _await(started, folder, time.monotonic() + timeout_s, out or sys.stdout)


def _script(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """What a remote shell reads on its input: a token on its command line could be read by all."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    lines += [f"cd {shlex.quote(str(Path.cwd()))}", f"exec {shlex.join(command)} < /dev/null"]
    return "\n".join(lines) + "\n"


def _start(
    command: Sequence[str], variables: Mapping[str, str], folder: str, rank: int, text: str = ""
) -> subprocess.Popen[bytes]:
    script = Path(folder, f"in-{rank}")
    script.write_text(text)
    script.chmod(0o600)
    try:
        with script.open("rb") as given, Path(folder, f"out-{rank}").open("wb") as output:
            return subprocess.Popen(  # noqa: S603  # what the user asked for
                command, env={**os.environ, **variables}, stdin=given, stdout=output, stderr=output
            )
    except OSError as error:
        raise RendezvousError(
            f"launch: rank {rank}: {command[0]} cannot be started: {error}"
        ) from error


def _await(
    started: list[subprocess.Popen[bytes]], folder: str, deadline: float, out: IO[str]
) -> None:
    """Pass on what rank 0 prints until all have ended."""
    try:
        with Path(folder, "out-0").open("r", errors="replace") as printed:
            while True:
                ended = [process.poll() for process in started]
                out.write(printed.read())
                out.flush()
                for rank, status in enumerate(ended):
                    if status:
                        tail = Path(folder, f"out-{rank}").read_text(errors="replace")[-2000:]
                        raise RendezvousError(f"launch: rank {rank} ended with {status}:\n{tail}")
                if None not in ended:
                    return
                if time.monotonic() > deadline:
                    late = [rank for rank, status in enumerate(ended) if status is None]
                    raise WaitTimeout(f"launch: ranks {late} have not ended in time")
                _rest(started)
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
        for process in started:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _rest(started: list[subprocess.Popen[bytes]]) -> None:
    """Wait a little, or until one that still runs has ended."""
    running = [process for process in started if process.poll() is None]
    if running:
        try:
            running[0].wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            return

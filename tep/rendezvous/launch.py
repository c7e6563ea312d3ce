"""Starting the ranks of a job: as processes of this machine, by ssh, by srun.

Each rank learns its place as `tep.rendezvous` reads it: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
and TEP_TOKEN. torchrun sets these itself, Ray's ranks are given them, and `place_here` makes them
of srun's variables. So a program that asks `place_here` runs the same, whoever has started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Final, TypeVar

from tep.base.errors import FabricError, RendezvousError, TepError, UsageError, WaitTimeout
from tep.host import ways
from tep.rendezvous.ranks import Place

__all__ = ["METHODS", "RankProcesses", "launch", "own_address", "place_here", "run_rank"]

T = TypeVar("T")

METHODS: Final = ("local", "ssh", "srun")
_PORTS: Final = 29_400, 1_000  # the first, and how many; by job, so that two jobs rarely meet
_LOOK_S: Final = 0.1
_END_S: Final = 5.0
_QUOTED: Final = 2000  # characters of a log


def run_rank(work: Callable[[Place], object]) -> int:
    """Do a rank's work at the place that the environment says; return 1 after a line if it fails.

    Raises:
        UsageError: the environment says no place.
    """
    place = Place.from_env()
    try:
        work(place)
    except TepError as error:
        sys.stderr.write(f"rank {place.rank}: {type(error).__name__}: {error}\n")
        return 1
    return 0


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
        return ways.own_address(place.host)
    except OSError as error:
        raise UsageError(
            f"launch: no way leads to rank 0 at {place.host!r} ({error}); MASTER_ADDR, or the "
            "first of --hosts, must be a name or an address that every rank reaches"
        ) from error


class RankProcesses:
    """The processes of one job, each with a log; needs a running loop.

    Args:
        place: of any rank; gives size, host, port and token.
        folder: for the logs, rank-0.log and so on.
    """

    def __init__(self, place: Place, folder: str | os.PathLike[str]) -> None:
        self._place = place
        self._folder = Path(folder)
        self._processes: dict[int, asyncio.subprocess.Process] = {}

    async def start(self, rank: int, command: Sequence[str], host: str = "") -> None:
        """Start a rank, also again: here, or by ssh in the same folder of a host."""
        variables = dataclasses.replace(self._place, rank=rank).variables()
        if host:
            shell = ["ssh", "-o", "BatchMode=yes", host, "sh", "-s"]
            await self._run(rank, shell, {}, _script(command, variables))
        else:
            await self._run(rank, command, variables)

    async def start_by_srun(self, command: Sequence[str]) -> None:
        """Start all ranks as one step of SLURM, one a host; they count as rank 0 here."""
        size = str(self._place.size)
        slurm = ["srun", "--nodes", size, "--ntasks", size, "--ntasks-per-node", "1"]
        await self._run(0, [*slurm, *command], {"TEP_TOKEN": self._place.token})

    async def _run(
        self, rank: int, command: Sequence[str], variables: Mapping[str, str], text: str = ""
    ) -> None:
        with tempfile.TemporaryFile() as given, self.log(rank).open("ab") as output:
            given.write(text.encode())
            given.seek(0)
            try:
                self._processes[rank] = await asyncio.create_subprocess_exec(
                    *command,
                    env={**os.environ, **variables},
                    stdin=given,
                    stdout=output,
                    stderr=output,
                )
            except OSError as error:
                raise RendezvousError(
                    f"launch: rank {rank}: {command[0]} cannot be started: {error}"
                ) from error

    def log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"

    def last_words(self, rank: int) -> str:
        return self.log(rank).read_text(encoding="utf-8", errors="replace")[-_QUOTED:]

    async def ended(self, rank: int) -> int:
        """Wait until a rank has ended; return its status, negative for a signal."""
        return await self._processes[rank].wait()

    async def unless_ended(self, rank: int, what: str, work: Coroutine[object, object, T]) -> T:
        """Wait for something that a rank does.

        Raises:
            FabricError: the rank's process has ended before; with the end of its log.
        """
        ended = asyncio.ensure_future(self.ended(rank))
        done = asyncio.ensure_future(work)
        try:
            await asyncio.wait({ended, done}, return_when=asyncio.FIRST_COMPLETED)
            if done.done():
                return done.result()
            words = self.last_words(rank)
            raise FabricError(f"{what} has ended, exit {ended.result()}:\n{words}", peer=what)
        finally:
            ended.cancel()
            done.cancel()

    async def kill(self, rank: int) -> None:
        """Kill a rank, as a machine that fails would; return when it has ended."""
        process = self._processes[rank]
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                process.kill()
        await process.wait()

    async def watch(self, timeout_s: float, out: IO[str]) -> None:
        """Wait until all have ended; write to `out` what rank 0 prints meanwhile.

        Raises:
            RendezvousError: a rank ended with an error; the message quotes its log.
            WaitTimeout: not all have ended in time.
        """
        end_s = time.monotonic() + timeout_s
        left = {asyncio.ensure_future(self.ended(rank)): rank for rank in self._processes}
        try:
            with self.log(0).open("r", encoding="utf-8", errors="replace") as printed:
                while left:
                    done, _ = await asyncio.wait(
                        left, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    out.write(printed.read())
                    out.flush()
                    for rank, status in sorted((left.pop(one), one.result()) for one in done):
                        if status:
                            words = self.last_words(rank)
                            raise RendezvousError(
                                f"launch: rank {rank} ended with {status}:\n{words}"
                            )
                    if left and time.monotonic() > end_s:
                        late = sorted(left.values())
                        raise WaitTimeout(f"launch: ranks {late} have not ended in time")
        finally:
            for one in left:
                one.cancel()

    async def close(self, patience_s: float = _END_S, *, terminate: bool = False) -> None:
        """Wait until all have ended; kill those that take longer.

        Args:
            patience_s: how long all may take, seconds.
            terminate: whether they are asked to end.
        """
        running = {k: one for k, one in self._processes.items() if one.returncode is None}
        for process in running.values() if terminate else ():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await asyncio.gather(*map(self.ended, running))
        await asyncio.gather(*map(self.kill, running))


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
    place = Place(rank=0, size=len(hosts), host=hosts[0], port=port, token=secrets.token_hex(16))

    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None] | None]] = []

    async def run() -> None:
        begun.append((asyncio.get_running_loop(), asyncio.current_task()))
        with tempfile.TemporaryDirectory(prefix="tep-launch-") as folder:
            ranks = RankProcesses(place, folder)
            try:
                if method == "srun":
                    await ranks.start_by_srun(command)
                for rank, host in enumerate(hosts) if method != "srun" else ():
                    await ranks.start(rank, command, host if method == "ssh" else "")
                await ranks.watch(timeout_s, out or sys.stdout)
            finally:
                await ranks.close(terminate=True)

    # A notebook's cell runs inside an event loop, which cannot run another one.
    with ThreadPoolExecutor(1) as beside:
        done = beside.submit(asyncio.run, run())
        try:
            done.result()
        except BaseException:  # also an interrupt: the ranks are to end
            for loop, task in begun:
                if task is not None and not done.done():
                    loop.call_soon_threadsafe(task.cancel)
            raise


def _script(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Write what a remote shell reads: all could read a token on its command line."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    lines += [f"cd {shlex.quote(str(Path.cwd()))}", f"exec {shlex.join(command)} < /dev/null"]
    return "\n".join(lines) + "\n"

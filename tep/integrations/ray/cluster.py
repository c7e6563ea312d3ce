"""A Ray cluster's workers: a search through seeds, the calls of a sweep, and jobs of ranks.

Each share of seeds is one task, and so is each call. Each rank of a job is an actor with the
environment that torchrun would set, so that a program which starts under torchrun or srun starts
under Ray too, and meets by `tep.rendezvous`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import tep
from tep.base.distribution import need
from tep.rendezvous import Place
from tep.sim import RowLog
from tep.testing import Finding, Judge, ProtocolJudge, confirm, judge_all

__all__ = ["calls", "connect", "run_ranks", "search"]

_SHARE_MAX: Final = 16
"""Most seeds of a share: it answers in time even if a seed takes half a minute."""

_RETRIES: Final = 4
"""So many times Ray does a share again whose worker was lost."""

_LOOK_S: Final = 5.0
_ROOM_S: Final = 120.0
"""Time to wait until the cluster has room for all ranks, seconds."""

_JUNK: Final = [".git", ".venv", "**/__pycache__", "node_modules"]
"""Names that are not sent with a protocol's folder."""


def connect(address: str, **options: Any) -> tuple[Any, bool]:  # Ray's module
    """Join a Ray cluster, unless this process has joined one.

    Args:
        address: HOST:PORT of a cluster; "auto": the cluster of RAY_ADDRESS or of this machine;
            "local": start one here.
        options: options of `ray.init`.

    Returns:
        The module `ray`, and True if this call has joined.

    Raises:
        BackendUnavailable: Ray is not installed.
        UsageError: there is no cluster at this address.
    """
    ray = need("ray", "ray", "tep.integrations.ray")
    if ray.is_initialized():
        return ray, False
    if address == "local":
        options["include_dashboard"] = False
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise tep.UsageError(
            f"no Ray cluster can be joined at {address!r}: {str(error).strip()[:500]}. Start one "
            "with `ray start --head`, name another as HOST:PORT, or use 'local'"
        ) from error
    return ray, True


@cache
def _code() -> str:
    """Compute a digest of tep's modules: workers with other code would find other bugs."""
    root = Path(tep.__file__).parent
    digest = sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _work(work: Callable[..., Any], *arguments: object) -> tuple[Any, str, str]:
    """Do a task, on a worker; return its result, the digest of the worker's code and its place."""
    return work(*arguments), _code(), tep.__file__


def calls(address: str = "auto") -> Callable[..., None]:
    """Make the calls of a sweep on all CPUs of a Ray cluster: `tep.sim.sweep(..., calls=calls())`.

    Ray makes a call again whose worker was lost. All nodes need the same tep, Ray and the module of
    the function, installed; a function that stands in no module is sent to them.

    Args:
        address: same as for `connect`.
    """

    def make(
        work: Callable[[Any], Any], runs: Sequence[Any], ended: Callable[[Any, Any], object]
    ) -> None:
        with _workers(work, address) as (ray, sent):
            task = ray.remote(_work).options(num_cpus=1, max_retries=_RETRIES)
            running = {task.remote(sent, run): run for run in runs}
            try:
                while running:
                    done, _ = ray.wait(list(running), timeout=_LOOK_S)
                    for ref in done:
                        run = running.pop(ref)
                        ended(run, _answer(ray, ref, f"the call {run.key[:200]}"))
            finally:
                for ref in tuple(running):
                    _drop(ray, ref, running)

    return make


def search(
    judge: Judge,
    seeds: range,
    address: str = "auto",
    *,
    most: int = 1,
    timeout_s: float = 600.0,
    judged: Callable[[int], object] = lambda _count: None,
) -> tuple[Sequence[Finding], RowLog]:
    """Search seeds on all CPUs of a Ray cluster; as `tep.testing.search`, with the same result.

    A share of the seeds is one task. Ray does the share of a lost worker again, and nodes that join
    get work. All need the same tep, and Ray, installed; a protocol's folder is sent to them.

    Args:
        judge: judges one seed; it is pickled.
        seeds: consecutive seeds.
        address: same as for `connect`.
        most: number of findings at which the search ends.
        timeout_s: longest time without an answer of any worker.
        judged: called with the number of seeds of each share that has ended.

    Raises:
        BackendUnavailable: Ray is not installed.
        UsageError: there is no cluster at this address; or the process is in one already, and the
            judge has a protocol; or workers cannot judge.
        RendezvousError: workers were lost again and again while they judged one share.
        WaitTimeout: no worker answered in time.
    """
    findings: list[Finding] = []
    running: dict[Any, range] = {}
    end, answered_s = seeds.stop, time.monotonic()  # seeds from `end` on are not needed
    with _workers(judge, address) as (ray, sent):
        task = ray.remote(_work).options(num_cpus=1, max_retries=_RETRIES)
        size = min(max(len(seeds) // (4 * _cpus(ray)), 1), _SHARE_MAX)
        shares = (seeds[k : k + size] for k in range(0, len(seeds), size))
        try:
            while True:
                while len(running) < _cpus(ray) and (share := next(shares, None)):
                    if share.start < end:
                        running[task.remote(judge_all, sent, share, most)] = share
                if not running:
                    return confirm(judge, findings, seeds)
                done, _ = ray.wait(list(running), timeout=_LOOK_S)
                if done:
                    answered_s = time.monotonic()
                elif time.monotonic() - answered_s >= timeout_s:
                    raise tep.WaitTimeout(_silence(running, timeout_s))
                for ref in done:
                    share = running.pop(ref)
                    said = f"seeds {share.start} to {share[-1]}"
                    findings = sorted([*findings, *_answer(ray, ref, said)])[:most]
                    judged(len(share))
                if len(findings) == most:
                    end = findings[-1].seed + 1
                for ref in [ref for ref, share in running.items() if share.start >= end]:
                    _drop(ray, ref, running)
        finally:
            for ref in tuple(running):
                _drop(ray, ref, running)


@contextlib.contextmanager
def _workers(judge: object, address: str) -> Iterator[tuple[Any, Any]]:
    """Join a cluster, and send it the judge, with the folder of a protocol."""
    options: dict[str, Any] = {}
    if isinstance(judge, ProtocolJudge):
        judge, folder = judge.moved()
        options["runtime_env"] = {"working_dir": str(folder), "excludes": _JUNK}
    ray, joined = connect(address, **options)
    if options and not joined:
        raise tep.UsageError(
            "this process is in a Ray cluster already, and Ray sends a protocol's folder to "
            "workers only when one is joined: call ray.shutdown() before"
        )
    try:
        yield ray, ray.put(judge)
    finally:
        if joined:
            ray.shutdown()


def _silence(running: dict[Any, range], timeout_s: float) -> str:
    first = min(share.start for share in running.values())
    return (
        f"no worker has answered for {timeout_s:g} s; {len(running)} shares are open, the first "
        f"from seed {first} on"
    )


def _cpus(ray: Any) -> int:
    """CPUs that the cluster has now; at least 1, even without a worker."""
    return max(1, int(ray.cluster_resources().get("CPU", 0)))


def _drop(ray: Any, ref: Any, running: dict[Any, Any]) -> None:
    """Cancel a task that nobody needs."""
    del running[ref]
    ray.cancel(ref, force=True)


def _answer(ray: Any, ref: Any, said: str) -> Any:
    """Return the result of a task, which an error calls what is `said`."""
    errors = ray.exceptions
    try:
        found, code, where = ray.get(ref)
    except errors.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, tep.TepError) else None
        raise tep.UsageError(f"a worker fails at {said}: {cause or error}") from error
    except (errors.RuntimeEnvSetupError, errors.TaskUnschedulableError) as error:
        raise tep.UsageError(f"Ray cannot start workers: {error}") from error
    except errors.RayError as error:
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise tep.RendezvousError(
            f"{1 + _RETRIES} workers were lost at {said}, the last because: {why}. Run them alone"
        ) from error
    if code != _code():
        raise tep.UsageError(
            f"a worker has another tep, at {where}: what it finds would not be what this one "
            f"finds. Install tep {tep.__version__} as it is here on all nodes"
        )
    return found


class _Rank:
    """The actor of one rank."""

    def where(self) -> tuple[str, int]:
        """Return this node's address, and a port that is free there now."""
        import ray

        with socket.create_server(("", 0)) as probe:
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def run(
        self, variables: dict[str, str], program: str, arguments: Sequence[str]
    ) -> tuple[int, str, str]:
        """Run a program; return its status, stdout and stderr."""
        os.environ.update(variables)
        room, _, name = program.partition(":")
        main = getattr(importlib.import_module(room), name)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(list(arguments))
        return int(status or 0), out.getvalue(), err.getvalue()


def run_ranks(
    program: str,
    arguments: Sequence[str],
    size: int,
    address: str = "auto",
    *,
    timeout_s: float = 600.0,
) -> tuple[int, str]:
    """Run a program as `size` ranks, each an actor with a CPU, and wait until all have ended.

    Files that the arguments name must be on all nodes. Ranks have RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT and TEP_TOKEN in their environment.

    Args:
        program: MODULE:FUNCTION that takes the arguments and returns an exit status.
        arguments: for the program.
        size: number of ranks.
        address: same as for `connect`.
        timeout_s: time limit for all ranks; then they are ended.

    Returns:
        Status and stdout of rank 0; its stderr goes to stderr.

    Raises:
        BackendUnavailable: Ray is not installed.
        UsageError: no such cluster, or it has no room.
        RendezvousError: a rank was lost, or ended with an error; the others are ended.
        WaitTimeout: not all have ended in time.
    """
    if size < 1:
        raise tep.UsageError(f"run_ranks: size={size}; 1 or more")
    ray, joined = connect(address)
    actors: list[Any] = []
    try:
        rank = ray.remote(_Rank).options(num_cpus=1, max_restarts=0)
        actors = [rank.remote() for _ in range(size)]
        places = [actor.where.remote() for actor in actors]
        ready, _ = ray.wait(places, num_returns=size, timeout=_ROOM_S)
        if len(ready) < size:
            raise tep.UsageError(
                f"{len(ready)} of {size} ranks could start within {_ROOM_S:g} s: the cluster has "
                f"{ray.cluster_resources().get('CPU', 0):g} CPUs, and a rank takes one"
            )
        host, port = ray.get(places[0])
        token, given = secrets.token_hex(16), list(arguments)
        runs = {}
        for k, actor in enumerate(actors):
            place = Place(rank=k, size=size, host=host, port=port, token=token)
            runs[actor.run.remote(place.variables(), program, given)] = k
        return _collect(ray, runs, timeout_s)
    finally:
        for actor in actors:
            ray.kill(actor)
        if joined:
            ray.shutdown()


def _collect(ray: Any, runs: dict[Any, int], timeout_s: float) -> tuple[int, str]:
    """Wait for all; the first rank that fails ends the job."""
    end_s, first = time.monotonic() + timeout_s, (0, "")
    while runs:
        if time.monotonic() >= end_s:
            late = sorted(runs.values())
            raise tep.WaitTimeout(f"ranks {late} have not ended within {timeout_s:g} s")
        done, _ = ray.wait(list(runs), timeout=_LOOK_S)
        for ref in done:
            k = runs.pop(ref)
            try:
                status, out, err = ray.get(ref)
            except ray.exceptions.RayError as error:
                why = f"{type(error).__name__}: {str(error).strip()[-1500:]}"
                raise tep.RendezvousError(f"rank {k} was lost: {why}") from error
            if k == 0:
                sys.stderr.write(err)
                first = status, out
            elif status:
                raise tep.RendezvousError(f"rank {k} ended with {status}:\n{(out + err)[-2000:]}")
    return first

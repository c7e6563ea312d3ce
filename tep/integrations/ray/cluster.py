"""A Ray cluster's workers: the calls of a search or a sweep, and jobs of ranks.

Each call is one task. Each rank of a job is an actor with the environment that torchrun would set,
so that a program which starts under torchrun or srun starts under Ray too, and meets by
`tep.rendezvous`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import math
import os
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import tep
from tep.base.distribution import need
from tep.rendezvous import Place

__all__ = ["calls", "connect", "run_ranks"]

_RETRIES: Final = 4
"""So many times Ray makes a call again whose worker was lost."""

_LOOK_S: Final = 5.0
_ROOM_S: Final = 120.0
"""Time to wait until the cluster has room for all ranks, seconds."""

_JUNK: Final = [".git", ".venv", "**/__pycache__", "node_modules"]
"""Names that are not sent with a folder."""


def connect(address: str, **options: Any) -> tuple[Any, bool]:  # Ray's module
    """Join a Ray cluster, unless this process has joined one.

    Args:
        address: HOST:PORT of a cluster; "auto": the cluster of RAY_ADDRESS or of this machine;
            "local": start one here.
        options: for `ray.init`.

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


def _work(work: Callable[[Any], Any], item: object) -> tuple[Any, str, str]:
    """Make a call on a worker; return its result, the digest of the code there, and its place."""
    return work(item), _code(), tep.__file__


def calls(
    address: str = "auto", *, folder: Path | None = None, timeout_s: float = math.inf
) -> Callable[..., None]:
    """Make calls on all CPUs of a Ray cluster.

    `tep.sim.sweep(..., calls=calls())` and `tep.testing.search(..., calls=calls())` find what they
    find in one process. Ray makes a call again whose worker was lost, and nodes that join get work.
    All nodes need the same tep, Ray and the module of the function, installed; a function that
    stands in no module is sent to them.

    Args:
        address: same as for `connect`.
        folder: sent to the nodes, whose workers then stand in a copy of it.
        timeout_s: longest time without a result.

    Returns:
        A function of a function, of the items that it is called with, and of a function that takes
        each item with its result as it comes, and returns True if that is enough. It raises
        BackendUnavailable: Ray is not installed; UsageError: there is no such cluster, or this
        process is in one already and has a folder to send, or a call fails; RendezvousError:
        workers were lost again and again at one item; WaitTimeout: no result came in time.
    """

    def make(
        work: Callable[[Any], Any], items: Sequence[Any], ended: Callable[[Any, Any], object]
    ) -> None:
        options: dict[str, Any] = {}
        if folder is not None:
            options["runtime_env"] = {"working_dir": str(folder), "excludes": _JUNK}
        ray, joined = connect(address, **options)
        if options and not joined:
            raise tep.UsageError(
                "this process is in a Ray cluster already, and Ray sends a folder to workers only "
                "when one is joined: call ray.shutdown() before"
            )
        try:
            _make_calls(ray, work, items, ended, timeout_s)
        finally:
            if joined:
                ray.shutdown()

    return make


def _make_calls(
    ray: Any,
    work: Callable[[Any], Any],
    items: Sequence[Any],
    ended: Callable[[Any, Any], object],
    timeout_s: float,
) -> None:
    task = ray.remote(_work).options(num_cpus=1, max_retries=_RETRIES)
    sent, left, answered_s = ray.put(work), deque(items), time.monotonic()
    running: dict[Any, Any] = {}
    try:
        while left or running:
            # The cluster may have grown. Even without a worker one call is made, which waits.
            cpus = max(1, int(ray.cluster_resources().get("CPU", 0)))
            while left and len(running) < cpus:
                item = left.popleft()
                running[task.remote(sent, item)] = item
            done, _ = ray.wait(list(running), timeout=_LOOK_S)
            if done:
                answered_s = time.monotonic()
            elif time.monotonic() - answered_s >= timeout_s:
                raise tep.WaitTimeout(
                    f"no worker has answered for {timeout_s:g} s; {len(running)} calls are open, "
                    f"the first is {_shown(next(iter(running.values())))}"
                )
            for ref in done:
                item = running.pop(ref)
                if ended(item, _answer(ray, ref, item)):
                    return
    finally:
        for ref in running:
            ray.cancel(ref, force=True)


def _shown(item: object) -> str:
    return str(item)[:200]


def _answer(ray: Any, ref: Any, item: object) -> Any:
    """Return the result of a call."""
    errors = ray.exceptions
    try:
        found, code, where = ray.get(ref)
    except errors.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, tep.TepError) else None
        raise tep.UsageError(f"a worker fails at {_shown(item)}: {cause or error}") from error
    except (errors.RuntimeEnvSetupError, errors.TaskUnschedulableError) as error:
        raise tep.UsageError(f"Ray cannot start workers: {error}") from error
    except errors.RayError as error:
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise tep.RendezvousError(
            f"{1 + _RETRIES} workers were lost at {_shown(item)}, the last because: {why}. Run it "
            "alone"
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

"""A Ray cluster's workers: a pool for `tep.testing.spread`, and jobs of ranks.

Each share of seeds is one task. Ray does not restart tasks here: the search handles the seeds of a
lost worker. Each rank of a job is an actor with the environment that torchrun would set, so that a
program which starts under torchrun or srun starts under Ray too, and meets by `tep.rendezvous`.
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
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import tep
from tep.base.distribution import need
from tep.rendezvous import Place
from tep.testing import Judge, Judged, ProtocolJudge, Share, judge_share

__all__ = ["RayPool", "connect", "run_ranks"]

_SHARE_S: Final = 2.0
"""Time after which a worker answers, seconds: short, for progress and for losses of workers."""

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


def _work(judge: Judge, share: Share, most: int, share_s: float) -> tuple[Judged, str, str]:
    """Judge a share, on a worker; return the result, the digest of its code and its place."""
    end_s = time.monotonic() + share_s
    found = judge_share(judge, share, most, lambda: time.monotonic() >= end_s)
    return found, _code(), tep.__file__


class RayPool:
    """Workers of a Ray cluster, one a CPU, for `tep.testing.spread`.

    Nodes may come and go while it runs. All need the same tep, and Ray, installed. The folder of a
    protocol's file is sent to them.

    Args:
        judge: the check of each seed.
        address: same as for `connect`.
        most: number of findings after which a share ends.
        share_s: seconds after which a worker answers with its results so far.

    Raises:
        BackendUnavailable: Ray is not installed.
        UsageError: there is no cluster at this address; or the process is in one already, and the
            judge has a protocol.
    """

    def __init__(
        self, judge: Judge, address: str = "auto", *, most: int = 1, share_s: float = _SHARE_S
    ) -> None:
        options: dict[str, Any] = {}
        if isinstance(judge, ProtocolJudge):
            judge, folder = judge.moved()
            options["runtime_env"] = {"working_dir": str(folder), "excludes": _JUNK}
        self._ray, self._joined = connect(address, **options)
        if options and not self._joined:
            raise tep.UsageError(
                "this process is in a Ray cluster already, and Ray sends a protocol's folder to "
                "workers only when one is joined: call ray.shutdown() before"
            )
        self._most, self._share_s = most, share_s
        self._judge = self._ray.put(judge)
        self._task = self._ray.remote(_work).options(num_cpus=1, max_retries=0)
        self._refs: dict[Any, Share] = {}

    def room(self) -> int:
        return max(1, int(self._ray.cluster_resources().get("CPU", 0)))

    def start(self, share: Share) -> None:
        self._refs[self._task.remote(self._judge, share, self._most, self._share_s)] = share

    def ended(self, timeout_s: float) -> list[tuple[Share, Judged | str]]:
        done, _ = self._ray.wait(list(self._refs), timeout=timeout_s)
        return [(self._refs.pop(ref), self._answer(ref)) for ref in done]

    def _answer(self, ref: Any) -> Judged | str:
        """Return a task's result, or the reason why its worker was lost; raise other errors."""
        errors = self._ray.exceptions
        try:
            judged, code, where = self._ray.get(ref)
        except errors.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, tep.TepError) else None
            raise tep.UsageError(f"a worker cannot judge: {cause or error}") from error
        except (errors.RuntimeEnvSetupError, errors.TaskUnschedulableError) as error:
            raise tep.UsageError(f"Ray cannot start workers: {error}") from error
        except errors.RayError as error:
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        if code != _code():
            raise tep.UsageError(
                f"a worker has another tep, at {where}: what it finds would not be what this one "
                f"finds. Install tep {tep.__version__} as it is here on all nodes"
            )
        assert isinstance(judged, Judged)
        return judged

    def drop(self, share: Share) -> None:
        for ref in [ref for ref, its in self._refs.items() if its == share]:
            del self._refs[ref]
            self._ray.cancel(ref, force=True)

    def close(self) -> None:
        """Cancel running tasks, and leave the cluster if the pool has joined it."""
        for share in list(self._refs.values()):
            self.drop(share)
        if self._joined:
            self._ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


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

"""A job of ranks on Ray: each rank is an actor with the environment that torchrun would set.

So a program that starts under torchrun or srun starts under Ray too, and meets by
`tep.rendezvous`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from tep import RendezvousError, UsageError, WaitTimeout
from tep.integrations.ray.search import connect
from tep.rendezvous import Place

__all__ = ["run_ranks"]

_LOOK_S: Final = 5.0
_ROOM_S: Final = 120.0
"""Time to wait until the cluster has room for all ranks, seconds."""


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
        address: same as for `search.connect`.
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
        raise UsageError(f"run_ranks: size={size}; 1 or more")
    ray, joined = connect(address)
    actors: list[Any] = []
    try:
        rank = ray.remote(_Rank).options(num_cpus=1, max_restarts=0)
        actors = [rank.remote() for _ in range(size)]
        places = [actor.where.remote() for actor in actors]
        ready, _ = ray.wait(places, num_returns=size, timeout=_ROOM_S)
        if len(ready) < size:
            raise UsageError(
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
            raise WaitTimeout(f"ranks {late} have not ended within {timeout_s:g} s")
        done, _ = ray.wait(list(runs), timeout=_LOOK_S)
        for ref in done:
            k = runs.pop(ref)
            try:
                status, out, err = ray.get(ref)
            except ray.exceptions.RayError as error:
                why = f"{type(error).__name__}: {str(error).strip()[-1500:]}"
                raise RendezvousError(f"rank {k} was lost: {why}") from error
            if k == 0:
                sys.stderr.write(err)
                first = status, out
            elif status:
                raise RendezvousError(f"rank {k} ended with {status}:\n{(out + err)[-2000:]}")
    return first

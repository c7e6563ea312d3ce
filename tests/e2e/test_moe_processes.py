"""Four real processes: a small MoE layer over libfabric, byte by byte."""

from __future__ import annotations

import contextlib
import signal
import socket
from pathlib import Path

import pytest

from tests.support.here import need_libfabric
from tests.support.ranks import Ended, outcomes, start_rank

NODE = Path(__file__).with_name("moe_node.py")
WORLD = 4


def run_processes(backend: str, *, meetings: int = 1) -> list[Ended]:
    """Start all ranks, which meet so many times; return how they ended."""
    with contextlib.ExitStack() as open_:
        listeners = [
            open_.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(meetings)
        ]
        ranks = []
        for rank in range(WORLD):
            ports, fds = [], []
            for listener in listeners:
                fds += [listener.fileno()] if rank == 0 else []
                ports += [listener.getsockname()[1], listener.fileno() if rank == 0 else -1]
            ranks.append(start_rank(NODE, backend, rank, WORLD, 2, *ports, fds=fds))
        return outcomes(ranks, timeout_s=90)


@pytest.fixture(autouse=True)
def _libfabric() -> None:
    need_libfabric()


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["tcp"])
def test_outputs_equal_the_dense_layer(provider) -> None:
    """Code that works on a simulated clock may break on threads, sockets and real queues."""
    ended = run_processes(f"libfabric:{provider}")

    assert [(0, f"ok rank={rank}\n", "") for rank in range(WORLD)] == ended


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["libfabric:tcp", "local"])
def test_survivors_of_a_killed_process_learn_who_it_was_and_go_on(backend) -> None:
    """A rank that waits for a dead one for ever, or a new group that counts old writes."""
    *survivors, victim = [(status, out) for status, out, _ in run_processes(backend, meetings=2)]

    assert (-signal.SIGKILL, "") == victim
    name = f"r{WORLD - 1}"
    assert [(0, f"DEAD_RANK {name}\nok rank={k}\n") for k in range(WORLD - 1)] == survivors

"""Four real processes: a small MoE layer over libfabric, byte by byte."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.here import need_libfabric
from tests.support.ranks import outcomes, start_rank

NODE = Path(__file__).with_name("moe_node.py")
WORLD = 4


def run_processes(backend: str, *, turns: int = 2) -> list[str]:
    """Start all ranks; return what they said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        ranks = []
        for rank in range(WORLD):
            fd = listener.fileno() if rank == 0 else -1
            arguments = [backend, rank, WORLD, port, fd, turns]
            ranks.append(start_rank(NODE, *arguments, fds=[fd] if fd >= 0 else []))
        ended = outcomes(ranks, timeout_s=90)
    assert [] == [errors for status, _, errors in ended if status]
    return [out.strip() for _, out, _ in ended]


@pytest.fixture(autouse=True)
def _libfabric() -> None:
    need_libfabric()


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["tcp"])
def test_outputs_equal_the_dense_layer(provider) -> None:
    """Code that works on a simulated clock may break on threads, sockets and real queues."""
    said = run_processes(f"libfabric:{provider}")

    assert [f"ok rank={rank}" for rank in range(WORLD)] == said

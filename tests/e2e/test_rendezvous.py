"""Real processes that meet, exchange descriptors and write to each other, over libfabric's tcp."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.here import require

HERE = Path(__file__).parent
TIMEOUT_S = 120


@pytest.fixture(autouse=True)
def tcp():
    """libfabric has to be here."""
    require("tcp")


def start(size, port, *command, fds=()):
    """One process a rank; torchrun's variables say which."""
    env = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TEP_TOKEN": "a secret of this test",
    }
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=fds,
            text=True,
        )
        for rank in range(size)
    ]


def outcome(ranks):
    """(exit status, output, errors) of each."""
    try:
        said = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, said, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [-1, 0, 2])
def test_three_processes_write_in_a_ring_and_miss_who_is_killed(victim) -> None:
    """What an application does first; and a killed rank is named, at once, to the others."""
    listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        port, fd = listener.getsockname()[1], listener.fileno()
        ranks = start(3, port, HERE / "rendezvous_node.py", fd, victim, fds=[fd])
        found = outcome(ranks)

    for rank, (status, out, errors) in enumerate(found):
        assert f"rank {rank} has all of rank {(rank - 1) % 3}\n" in out, (out, errors)
        if rank == victim:
            assert status < 0
            continue
        assert 0 == status, errors
        assert (victim >= 0) == (f"rank {victim} is gone at barrier 3" in out), (out, errors)


def test_the_example_of_two_ranks_runs_as_it_stands() -> None:
    """The README shows it: by its environment alone, and without a word about ports in it."""
    with socket.socket() as kept:
        # Bound and not listening: the port is nobody else's, and rank 0 may still listen there.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        found = outcome(start(2, kept.getsockname()[1], HERE / "two_ranks.py"))

    assert [0, 0] == [status for status, _, _ in found], found
    assert ["", "1048576 bytes are here\n"] == [out for _, out, _ in found]

"""Real processes that meet, exchange descriptors and write to each other, over libfabric's tcp."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.here import require
from tests.support.ranks import outcomes, start_ranks

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def tcp():
    """libfabric has to be here."""
    require("tcp")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [-1, 0, 2])
def test_three_processes_write_in_a_ring_and_miss_who_is_killed(victim) -> None:
    """The first steps of an application must work; a killed rank is named to the others at once."""
    listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        port, fd = listener.getsockname()[1], listener.fileno()
        ranks = start_ranks(3, port, HERE / "rendezvous_node.py", fd, victim, fds=[fd])
        found = outcomes(ranks)

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
        found = outcomes(start_ranks(2, kept.getsockname()[1], HERE / "two_ranks.py"))

    assert [0, 0] == [status for status, _, _ in found], found
    assert ["", "1048576 bytes are here\n"] == [out for _, out, _ in found]

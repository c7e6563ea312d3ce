"""Silent connections to a tcp NIC: few, for a short time, and no peer is taken for one of them."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

import tep
from tep.backends.libfabric import tcp as room
from tep.backends.libfabric.rules import parse
from tep.backends.libfabric.tcp import Strangers
from tests.support.here import require
from tests.support.ranks import outcomes, start_rank

PATIENCE_S = 30.0


@pytest.fixture
def provider() -> str:
    require("tcp")
    return "tcp"


@contextlib.contextmanager
def listening(provider: str) -> Iterator[tuple[tep.TransferEngine, tep.MrDesc, int]]:
    """An engine with a target, and its NIC's port."""
    with tep.TransferEngine.open("libfabric", provider=provider, nics=["127.0.0.1"]) as engine:
        _, desc = engine.reg_mr(np.zeros(64, np.uint8))
        yield engine, desc, port_of(desc, provider)


def port_of(desc: tep.MrDesc, provider: str) -> int:
    return int.from_bytes(parse(desc.addr.domains[0], provider).raw[2:4], "big")


def write(provider: str, desc: tep.MrDesc) -> None:
    with tep.TransferEngine.open("libfabric", provider=provider, nics=["127.0.0.1"]) as peer:
        source, _ = peer.reg_mr(np.ones(64, np.uint8))
        peer.submit_single_write(64, (source, 0), (desc, 0), imm=1).wait(PATIENCE_S)


def hung_up(crowd: list[socket.socket], count: int) -> None:
    """Wait until so many were hung up on."""
    poller = select.poll()
    by_fd = {sock.fileno(): sock for sock in crowd}
    for fd in by_fd:
        poller.register(fd, select.POLLIN)
    ended = 0
    deadline_s = time.monotonic() + PATIENCE_S
    while ended < count:
        assert time.monotonic() < deadline_s, f"{ended} of {count} were hung up on"
        for fd, _ in poller.poll(1000):
            with contextlib.suppress(ConnectionResetError):
                assert b"" == by_fd[fd].recv(1)
            poller.unregister(fd)
            ended += 1


@pytest.mark.slow
def test_silent_strangers_are_few_and_keep_no_peer_out(provider, monkeypatch) -> None:
    """1,000 of them took every descriptor of the process, for ever: no new peer came in."""
    monkeypatch.setattr(room, "STRANGERS_MAX", 8)
    with listening(provider) as (_, desc, port), contextlib.ExitStack() as undo:
        crowd = [
            undo.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(40)
        ]
        hung_up(crowd, 32)
        write(provider, desc)


@pytest.mark.slow
def test_a_silent_stranger_is_hung_up_on_in_time(provider, monkeypatch) -> None:
    """An engine that has nothing to do sleeps: the stranger's time has to wake it."""
    monkeypatch.setattr(room, "STRANGER_S", 0.1)
    with (
        listening(provider) as (_, _, port),
        socket.create_connection(("127.0.0.1", port)) as stranger,
    ):
        hung_up([stranger], 1)


@pytest.mark.slow
def test_a_peer_that_has_said_hello_is_no_stranger(provider, monkeypatch) -> None:
    """A peer that waits for its work would be cut off, and its next rows were lost."""
    looks: list[int] = []
    look = Strangers.look

    def seen(self: Strangers) -> None:
        look(self)
        looks.append(self.refused)

    monkeypatch.setattr(room, "STRANGER_S", 0.1)
    monkeypatch.setattr(Strangers, "look", seen)
    with (
        listening(provider) as (engine, desc, port),
        tep.TransferEngine.open("libfabric", provider=provider, nics=["127.0.0.1"]) as peer,
    ):
        source, _ = peer.reg_mr(np.ones(64, np.uint8))
        peer.submit_single_write(64, (source, 0), (desc, 0), imm=1).wait(PATIENCE_S)
        looks.clear()
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            hung_up([stranger], 1)  # so it has looked
        counted = engine.expect_imm_count(2, 1)
        peer.submit_single_write(64, (source, 0), (desc, 0), imm=2).wait(PATIENCE_S)
        counted.wait(PATIENCE_S)
        assert [(), ()] == [one.stats().faults for one in (peer, engine)]
    assert 1 == max(looks)


def test_the_oldest_strangers_are_hung_up_on_first(monkeypatch) -> None:
    """A peer that has just come says hello in a moment; one that is silent for long never will."""
    ages = {10: 0.1, 11: 0.4, 12: 0.2, 13: 0.3}
    hung: list[int] = []

    def silent_s(_: Strangers, fd: int, *, hang_up: bool = False) -> float:
        if hang_up:
            hung.append(fd)
        return ages[fd]

    monkeypatch.setattr(room, "_descriptors", lambda: list(ages))
    monkeypatch.setattr(room, "_socket", lambda fd: fd)
    monkeypatch.setattr(room, "STRANGERS_MAX", 2)
    monkeypatch.setattr(Strangers, "_silent_s", silent_s)
    with contextlib.closing(Strangers(1)) as strangers:
        strangers.look()

    assert [11, 13] == hung


def test_a_descriptor_that_closes_meanwhile_is_no_stranger() -> None:
    """Another thread may close one between the list and the look at it."""
    with contextlib.closing(Strangers(1)) as strangers:
        strangers.look()
        reader, writer = os.pipe()
        os.close(reader)
        os.close(writer)

        assert 0.0 == strangers._silent_s(reader)


def test_a_socket_at_another_port_is_no_stranger() -> None:
    """Counted as one, each connection of the program would cost a caller his place."""
    with (
        contextlib.closing(Strangers(1)) as strangers,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
    ):
        strangers.look()

        assert [0.0, 0.0] == [strangers._silent_s(sock.fileno()) for sock in (server, ours)]


SHORT = """
import os, resource, sys
import numpy as np, tep
with tep.TransferEngine.open("libfabric", provider="tcp", nics=["127.0.0.1"]) as engine:
    soft = len(os.listdir("/proc/self/fd")) + 40
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    _, desc = engine.reg_mr(np.zeros(64, np.uint8))
    print(desc.to_bytes().hex(), flush=True)
    engine.expect_imm_count(1, 1).wait(60)
    print("counted", flush=True)
"""


@pytest.mark.slow
def test_strangers_that_hold_all_descriptors_keep_no_peer_out() -> None:
    """Without a free descriptor, even the list of one's own descriptors cannot be read."""
    require("tcp")
    victim = start_rank("-c", SHORT)
    try:
        desc = tep.MrDesc.from_bytes(bytes.fromhex(victim.stdout.readline()))
        where = ("127.0.0.1", port_of(desc, "tcp"))
        with contextlib.ExitStack() as undo:
            crowd = [undo.enter_context(socket.create_connection(where)) for _ in range(200)]
            hung_up(crowd, 100)
            write("tcp", desc)
    finally:
        ended = outcomes([victim])

    assert [(0, "counted\n", "")] == ended

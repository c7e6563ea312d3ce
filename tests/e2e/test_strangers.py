"""SECURITY.md's table of a stranger's cost, measured at each listener in a process of its own."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.here import require
from tests.support.ranks import outcomes, start_rank

PAGE = Path(__file__).parents[2] / "SECURITY.md"
LISTENS = r"\.listen\(|start_server\(|create_server\(|HTTPServer"
CROWD = 120
PATIENCE_S = 20.0
SLACK_S = 3.0
"""A machine that is busy with other work may be so late."""

TABLE = {
    row[0]: tuple(int(cell) for cell in row[2:])
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if len(row := [cell.strip() for cell in line.strip("|").split("|")]) == 5
    and row[-1].isdecimal()
}

VICTIM = """
import asyncio, os, socket, sys, threading
import tep
from tep import rendezvous

def measure():
    pages = int(open("/proc/self/statm").read().split()[1])
    return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")

def ready(where):
    print(where, flush=True)
    for _ in sys.stdin:
        print(*measure(), flush=True)
    os._exit(0)

kind = sys.argv[1]
if kind == "rendezvous":
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    place = rendezvous.Place(rank=0, size=2, port=port, token="t")
    run = lambda: rendezvous.join(place, timeout_s=120, listener=listener)
    threading.Thread(target=run, daemon=True).start()
    ready(port)
elif kind == "hub":
    from tep.rendezvous.calls import Listener
    async def main():
        async with Listener("t") as listener:
            await asyncio.to_thread(ready, listener.port)
    asyncio.run(main())
elif kind == "local":
    from tep.backends.local.channel import Address
    engine = tep.TransferEngine.open("local")
    ready(Address.from_bytes(engine.main_address.domains[0]).socket.decode().replace("\\0", "@"))
elif kind == "tcp":
    from tep.backends.libfabric.rules import parse
    engine = tep.TransferEngine.open("libfabric", provider="tcp", nics=["127.0.0.1"])
    ready(int.from_bytes(parse(engine.main_address.domains[0], "tcp").raw[2:4], "big"))
elif kind == "nixl":
    from tep.compat.nixl import nixl_agent, nixl_agent_config
    os.environ["TEP_NIXL_BACKEND"] = "local"
    agent = nixl_agent("a", nixl_agent_config(enable_listen_thread=True, listen_port=0))
    ready(agent.listen_port)
else:
    from tep.host import sight
    engine = tep.TransferEngine.open("local")
    ready(sight.find(os.getpid())[0].path)
"""

SAYS = {
    # All but the last byte of the longest frame that a stranger may send.
    "rendezvous": (4096).to_bytes(4, "little") + bytes(4095),
    "hub": (4096).to_bytes(4, "little") + bytes(4095),
    "nixl": bytes(1 << 15),  # and its end does not come
}
"""The strangers' messages; other strangers are silent, since any message ends them at once."""


def call(where: str) -> socket.socket:
    if where.isdecimal():
        return socket.create_connection(("127.0.0.1", int(where)), timeout=PATIENCE_S)
    kind = socket.SOCK_SEQPACKET if where.startswith("@") else socket.SOCK_STREAM
    sock = socket.socket(socket.AF_UNIX, kind)
    sock.settimeout(PATIENCE_S)
    sock.connect(where.replace("@", "\0"))
    return sock


@contextlib.contextmanager
def victim(kind: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that listens, and where."""
    process = start_rank("-c", VICTIM, kind, stdin=subprocess.PIPE)
    try:
        where = process.stdout.readline().strip()
        assert where, "it did not start"
        yield process, where
    finally:
        process.kill()
        outcomes([process])


def measured(process: subprocess.Popen[str]) -> tuple[int, int]:
    process.stdin.write("\n")
    process.stdin.flush()
    fds, resident = map(int, process.stdout.readline().split())
    return fds, resident


def ended(crowd: list[socket.socket], wait_s: float) -> set[socket.socket]:
    """Wait until all of a crowd were hung up on, so long at most; return which were."""
    poller, left = select.poll(), {sock.fileno(): sock for sock in crowd}
    for fd in left:
        poller.register(fd, select.POLLRDHUP)
    gone: set[socket.socket] = set()
    deadline_s = time.monotonic() + wait_s
    while len(gone) < len(crowd) and (rest_s := deadline_s - time.monotonic()) > 0:
        for fd, _ in poller.poll(rest_s * 1000):
            poller.unregister(fd)
            gone.add(left[fd])
    return gone


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(TABLE))
def test_strangers_cost_what_the_table_says(kind: str) -> None:
    """A listener that keeps whoever connects can be stopped by anybody who reaches it."""
    if kind == "tcp":
        require("tcp")
    most, kib, limit_s = TABLE[kind]
    size = CROWD if most > 1 else 4  # one is served at a time, and the others wait
    with victim(kind) as (process, where), contextlib.ExitStack() as undo:
        if kind in ("rendezvous", "hub"):
            with call(where) as first:
                assert first.recv(1), "it runs"
        elif kind == "sight":
            with call(where) as first:  # what the first one costs its thread is paid once
                assert ended([first], limit_s + SLACK_S)
        before, resident = measured(process)
        crowd = []
        for _ in range(size):
            crowd.append(undo.enter_context(call(where)))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                crowd[-1].sendall(SAYS.get(kind, b""))
        begun_s = time.monotonic()
        fds = size
        while fds > most and time.monotonic() < begun_s + PATIENCE_S:  # it catches up
            fds, now = measured(process)
            fds -= before
        assert fds <= most
        assert (now - resident) / size <= kib * 1024
        each_s = limit_s if most > 1 else limit_s * size
        left = set(crowd) - ended(crowd, begun_s + each_s + SLACK_S - time.monotonic())
        assert not left, f"{len(left)} are still connected"
        begun_s = time.monotonic()
        while measured(process)[0] > before + 1:
            assert time.monotonic() < begun_s + PATIENCE_S, "it keeps their descriptors"


def test_the_table_names_all_listeners() -> None:
    """A new listener that nobody measures would have no limit."""
    assert {"rendezvous", "hub", "local", "tcp", "sight", "nixl"} == TABLE.keys()
    listening = {
        str(path.relative_to(PAGE.parent))
        for path in (PAGE.parent / "tep").rglob("*.py")
        if re.search(LISTENS, path.read_text(encoding="utf-8"))
    }
    assert {
        "tep/rendezvous/wire.py",
        "tep/backends/local/port.py",
        "tep/host/sight.py",
        "tep/compat/nixl/listener.py",
        "tep/integrations/ray/cluster.py",  # looks for a free port, and takes no call
        "tep/integrations/vllm/router.py",  # has no limit: the page says so
    } == listening

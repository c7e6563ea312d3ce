"""The calls of NIXL's own Python tests and examples, with the answers of NIXL 1.5.1."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import pickle
import runpy
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tep.base.errors import TepError
from tep.compat import nixl as tep_nixl
from tep.compat.nixl import bindings, listener, nixl_agent, nixl_agent_config, nixl_thread_sync_t

WAIT_S = 60.0
HERE = "127.0.0.1"
FOLDER = Path(tep_nixl.__file__).with_name("path") / "nixl"


@pytest.fixture
def opened(monkeypatch):
    """Open agents; they are closed at the end."""
    monkeypatch.setenv("TEP_NIXL_BACKEND", "local")
    made = []

    def start(name, **options):
        made.append(nixl_agent(name, nixl_agent_config(**options)))
        return made[-1]

    yield start
    for agent in made:
        agent.close()


@pytest.fixture
def utils():
    return runpy.run_path(str(FOLDER / "_utils.py"))


def until(condition):
    end_s = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < end_s, "it did not come to that"
    return found


def test_the_package_is_nixls(monkeypatch):
    """`import nixl._utils` failed, and with it all of NIXL's tests and examples."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "nixl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    try:
        import nixl
        import nixl._api
        import nixl._bindings
        import nixl._utils
        from nixl.logging import get_logger

        assert bindings is nixl._bindings
        assert nixl.nixl_agent is nixl._api.nixl_agent is nixl_agent
        assert nixl.nixlNotFoundError is bindings.nixlNotFoundError
        assert "nixl.x" == get_logger("_x").name
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "nixl"]:
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("mode", [None, *nixl_thread_sync_t])
@pytest.mark.parametrize("listens", [True, False])
def test_the_configuration_reaches_nixl_agents_own_agent(monkeypatch, opened, mode, listens):
    """Programs put a spy in its place."""
    seen, real = [], bindings.nixlAgent

    def spy(name, config):
        seen.append(config.syncMode)
        return real(name, config)

    monkeypatch.setattr(bindings, "nixlAgent", spy)
    opened("a", sync_mode=mode, enable_listen_thread=listens, listen_port=0)
    usual = bindings.NIXL_THREAD_SYNC_STRICT if listens else bindings.NIXL_THREAD_SYNC_NONE

    assert [usual if mode is None else mode.value] == seen


def test_the_agent_of_cpp(monkeypatch, utils):
    """One transfer, its notification and its telemetry, by numbers and statuses."""
    monkeypatch.setenv("TEP_NIXL_BACKEND", "local")
    monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", "y")
    a, b = (bindings.nixlAgent(name, bindings.nixlAgentConfig()) for name in ("A1", "A2"))
    try:
        backends = [agent.createBackend("UCX", {}) for agent in (a, b)]
        mine, theirs = (utils["malloc_passthru"](256) for _ in "ab")
        utils["ba_buf"](mine, 256)
        lists = [bindings.nixlRegDList(bindings.DRAM_SEG) for _ in "ab"]
        for agent, regs, address, backend in zip((a, b), lists, (mine, theirs), backends):
            regs.addDesc((address, 256, 0, "dead"))
            assert bindings.NIXL_SUCCESS == agent.registerMem(regs, [backend])
        assert b"A2" == a.loadRemoteMD(b.getLocalMD())
        assert bindings.NIXL_SUCCESS == a.checkRemoteMD("A2", lists[1].trim())
        rows = [
            bindings.nixlXferDList(bindings.DRAM_SEG, [(at + 8, 8, 0)]) for at in (mine, theirs)
        ]
        handle = a.createXferReq(bindings.NIXL_WRITE, *rows, "A2", "n\0tification")
        status, told = a.postXferReq(handle), {}
        while status != bindings.NIXL_SUCCESS:
            status = a.getXferStatus(handle)
        until(lambda: b.getNotifs(told))
        utils["verify_transfer"](mine + 8, theirs + 8, 8)
        assert {"A1": [b"n\0tification"]} == told
        found = a.getXferTelemetry(handle)
        assert (1, 8) == (found.descCount, found.totalBytes)
        assert found.startTime > 0
        assert found.xferDuration >= found.postDuration > 0
        assert backends[0] == a.queryXferBackend(handle)
        sides = [a.prepXferDlist(rows[0]), a.prepXferDlist("A2", rows[1])]
        again = a.makeXferReq(bindings.NIXL_READ, sides[0], [0], sides[1], [0])
        a.postXferReq(again)
        until(lambda: a.getXferStatus(again) == bindings.NIXL_SUCCESS)
        for number in (handle, again, *sides):
            a.releaseXferReq(number)
        with pytest.raises(bindings.nixlInvalidParamError):
            a.postXferReq(handle)
        assert bindings.NIXL_SUCCESS == a.genNotif("A2", "x")
        assert bindings.NIXL_SUCCESS == a.deregisterMem(lists[0], backends[:1])
        assert bindings.NIXL_SUCCESS == a.invalidateRemoteMD("A2")
        assert bindings.nixl_status_t.NIXL_ERR_NOT_FOUND == a.invalidateRemoteMD("A2")
        with pytest.raises(bindings.nixlNotFoundError):
            a.getPluginParams("POSIX")
        with pytest.raises(AttributeError):
            a.setXferStatus(1)
        for address in (mine, theirs):
            utils["free_passthru"](address)
    finally:
        for agent in (a, b):
            agent.front.close()


def test_lists_are_nixls(opened):
    """Registration lists passed for transfer lists: they were made from them."""
    agent = opened("a")
    rows = [(1000, 105, 0), (2000, 30, 0), (1010, 20, 0)]
    some = bindings.nixlXferDList(bindings.DRAM_SEG, rows)
    regs = bindings.nixlRegDList(bindings.DRAM_SEG, [(*row, "") for row in rows])

    assert some == agent.deserialize_descs(pickle.dumps(some)) == regs.trim()
    assert not isinstance(regs, bindings.nixlXferDList)
    assert agent.get_xfer_descs(regs) is None
    assert agent.get_reg_descs(some) is None
    assert 1 == some.index(rows[1])
    assert 3 == bindings.nixlXferDList(bindings.DRAM_SEG, 3).descCount()


@pytest.mark.parametrize(
    ("variable", "asked", "given"),
    [(None, True, True), (None, False, False), ("y", False, True), ("no", True, False)],
)
def test_telemetry_by_environment(monkeypatch, opened, variable, asked, given):
    """NIXL_TELEMETRY_ENABLE decides, where it is set."""
    if variable is None:
        monkeypatch.delenv("NIXL_TELEMETRY_ENABLE", raising=False)
    else:
        monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", variable)
    agent, memory = opened("a", capture_telemetry=asked), np.zeros(64, np.uint8)
    at = memory.ctypes.data
    agent.register_memory([(at, 64, 0, "")], "DRAM")
    sides = [agent.get_xfer_descs([(at + k, 8, 0)], "DRAM") for k in (0, 32)]
    handle = agent.initialize_xfer("WRITE", *sides, "a")
    agent.transfer(handle)
    until(lambda: agent.check_xfer_state(handle) == "DONE")
    if given:
        assert agent.get_xfer_telemetry(handle).xferDuration > 0
    else:
        with pytest.raises(bindings.nixlNoTelemetryError):
            agent.get_xfer_telemetry(handle)


@pytest.mark.parametrize("op", ["READ", "WRITE"])
def test_memory_without_bytes(opened, op):
    """Ray sends empty tensors with others: their registration was refused."""
    a, b = opened("A"), opened("B")
    memory = np.arange(64, dtype=np.uint8)
    rows = [(memory.ctypes.data, 32, 0), (memory.ctypes.data + 32, 0, 0)]
    regs = [agent.register_memory([(*row, "") for row in rows], "DRAM") for agent in (a, b)]
    a.add_remote_agent(b.get_agent_metadata())

    def move(some):
        lists = [a.get_xfer_descs(some, "DRAM") for _ in "ab"]
        handle = a.initialize_xfer(op, *lists, "B", b"told")
        state = a.transfer(handle)
        until(lambda: state == "DONE" or a.check_xfer_state(handle) == "DONE")
        until(lambda: b.check_remote_xfer_done("A", b"told"))

    for some in (rows, rows[1:]):
        move(some)
    for agent, reg in zip((a, b), regs):
        agent.deregister_memory(reg)


def test_metadata_over_sockets(opened):
    """The examples of NIXL meet so: their targets waited for ever."""
    a = opened("A", enable_listen_thread=True, listen_port=0)
    b = opened("B", enable_listen_thread=True, listen_port=0)
    memory = np.zeros(128, np.uint8)
    regs = [b.get_reg_descs([(memory.ctypes.data + at, 64, 0, "")], "DRAM") for at in (0, 64)]
    for reg in regs:
        b.register_memory(reg)

    b.send_partial_agent_metadata(regs[0], True, ["UCX"], HERE, a.listen_port)
    until(lambda: a.check_remote_metadata("B", regs[0].trim()))
    assert not a.check_remote_metadata("B", regs[1].trim())
    a.fetch_remote_metadata("B", HERE, b.listen_port)
    until(lambda: a.check_remote_metadata("B", regs[1].trim()))
    a.send_local_metadata(HERE, b.listen_port)
    until(lambda: b.check_remote_metadata("A"))
    b.send_notif("A", b"x")
    until(lambda: a.check_remote_xfer_done("B", b"x"))
    b.invalidate_local_metadata(HERE, a.listen_port)
    until(lambda: not a.check_remote_metadata("B"))


@pytest.mark.slow
def test_a_listener_short_of_descriptors_goes_on(opened, monkeypatch):
    """It took the first error of accept() for its own close, and nobody was told."""
    short = [OSError(errno.EMFILE, "too many open files"), ConnectionAbortedError()]

    class Short(socket.socket):
        def accept(self):
            if short:
                raise short.pop()
            return super().accept()

    made = socket.create_server
    monkeypatch.setattr(
        listener.socket, "create_server", lambda at: Short(fileno=made(at).detach())
    )
    a, b = opened("A", enable_listen_thread=True, listen_port=0), opened("B")
    b.fetch_remote_metadata("A", HERE, a.listen_port)
    until(lambda: b.check_remote_metadata("A"))
    assert not short


def test_a_call_that_is_too_long_is_refused(monkeypatch):
    """A stranger fills the memory of whoever listens."""
    monkeypatch.setattr(listener, "BYTES_MAX", 1000)
    for nbytes, fits in ((1000, True), (1001, False)):
        here, there = socket.socketpair()
        with here, there, contextlib.ExitStack() as fails:
            there.sendall(bytes(nbytes))
            there.shutdown(socket.SHUT_WR)
            if not fits:
                fails.enter_context(pytest.raises(TepError, match="more than 1000 bytes"))
            assert nbytes == len(listener._read(here, 60.0))


@pytest.mark.slow
def test_strangers_do_not_stop_the_listener(opened, monkeypatch):
    """A port is found by whoever looks for one."""
    monkeypatch.setattr(listener, "_WAIT_S", 0.2)
    monkeypatch.setattr(listener, "BYTES_MAX", 1 << 16)
    a, b = opened("A", enable_listen_thread=True, listen_port=0), opened("B")
    silent = socket.create_connection((HERE, a.listen_port))
    for raw in (b"", b"junk", b"GET / HTTP/1.1\r\n\r\n", bytes(1 << 20)):
        with socket.create_connection((HERE, a.listen_port)) as stranger:
            try:
                stranger.sendall(raw)
                stranger.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # it has hung up
    b.fetch_remote_metadata("A", HERE, a.listen_port)
    until(lambda: b.check_remote_metadata("A"))
    silent.close()
    b.fetch_remote_metadata("C", HERE, 1)  # nobody is there: logged, like NIXL
    with pytest.raises(bindings.nixlBackendError, match="listen_port"):
        opened("C", enable_listen_thread=True, listen_port=a.listen_port)


@pytest.fixture
def pair(opened):
    """Two agents with memory that know each other, and the list of it for a transfer."""
    agents, rows, kept = [opened(name) for name in "AB"], [], []
    for agent in agents:
        memory = np.zeros(64, np.uint8)
        kept.append(memory)
        agent.register_memory([(memory.ctypes.data, 64, 0, "")], "DRAM")
        rows.append(agent.get_xfer_descs([(memory.ctypes.data, 64, 0)], "DRAM"))
    agents[0].add_remote_agent(agents[1].get_agent_metadata())
    yield (*agents, rows)
    del kept


def test_whoever_waits_sleeps(pair):
    """A loop of check_xfer_state takes most of a core, as long as it waits."""
    a, b, rows = pair
    started_s, used_s = time.monotonic(), time.thread_time()
    assert {} == b.wait_notifs(0.5)
    assert time.monotonic() - started_s >= 0.5
    assert time.thread_time() - used_s < 0.1

    handle = a.initialize_xfer("WRITE", *rows, "B", b"told")
    with pytest.raises(bindings.nixlNotPostedError):
        a.wait(handle)
    a.transfer(handle)
    assert "DONE" == a.wait(handle, WAIT_S)
    assert {"A": [b"told"]} == b.wait_notifs(WAIT_S)


@pytest.mark.slow
def test_a_wait_ends_with_its_time_or_the_error(pair, monkeypatch):
    """A timeout is no error: the transfer is under way still."""
    a, b, rows = pair
    handle = a.initialize_xfer("WRITE", *rows, "B")
    with monkeypatch.context() as patch:
        patch.setattr(a, "_want_grant", lambda channel: None)  # its first question is lost
        assert "PROC" == a.transfer(handle)
        assert "PROC" == a.wait(handle, 0.01)
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(a.wait_async(handle), 0.01))
    assert "DONE" == a.wait(handle, WAIT_S)
    b.close()

    def again():
        a.transfer(handle)  # raises itself where the loss is known by now
        a.wait(handle, WAIT_S)

    with pytest.raises((bindings.nixlRemoteDisconnectError, bindings.nixlBackendError)):
        again()


def test_many_coroutines_wait_at_once(pair):
    """A server has a transfer for each of its requests."""
    a, _, rows = pair

    async def move():
        handle = a.initialize_xfer("READ", *rows, "B")
        a.transfer(handle)
        return await a.wait_async(handle)

    async def main():
        return await asyncio.gather(*(move() for _ in range(50)))

    assert ["DONE"] * 50 == asyncio.run(main())

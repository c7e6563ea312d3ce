"""A program that knows NIXL only, run on tep in a process of its own, over local and tcp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tep.compat.nixl import bindings, nixl_agent
from tests.support.here import require

NBYTES = 1 << 20  # as in nixl_node.py
WAYS = {"local": {}, "libfabric": {"provider": "tcp", "nics": ["127.0.0.1"]}}


class Node:
    """The other process."""

    def __init__(self):
        program = [sys.executable, str(Path(__file__).with_name("nixl_node.py"))]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tep.compat.nixl", "--", *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.told = self.read()

    def read(self):
        line = self.process.stdout.readline()
        assert line, f"the program ended with {self.process.wait()}"
        return json.loads(line)

    def do(self, *words):
        print(*words, file=self.process.stdin, flush=True)
        return self.read()

    def end(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=WAYS)
def pair(request, monkeypatch):
    """An agent here, the other process, and the agent's memory."""
    if request.param == "libfabric":
        require("tcp")
    monkeypatch.setenv("TEP_NIXL_BACKEND", request.param)
    monkeypatch.setenv("TEP_NIXL_OPTIONS", json.dumps(WAYS[request.param]))
    agent, node, memory = nixl_agent("test"), Node(), np.zeros(NBYTES // 4, np.uint32)
    agent.register_memory([(memory.ctypes.data, NBYTES, 0, "")], "DRAM")
    assert b"node" == agent.add_remote_agent(bytes.fromhex(node.told["metadata"]))
    yield agent, node, memory
    node.end()
    agent.close()


def read_of(agent, node, memory, order):
    """A transfer that reads 4 KiB pages of the other process's memory in an order."""
    n = NBYTES // 4096
    rows = [np.array([[at, 4096, 0, 4096, n]]) for at in (memory.ctypes.data, node.told["at"])]
    mine = agent.prep_xfer_dlist("", rows[0], "DRAM")
    there = agent.prep_xfer_dlist("node", rows[1], "DRAM")
    return agent.make_prepped_xfer("READ", mine, np.arange(n), there, order, b"page list")


def finish(agent, handle):
    state = agent.transfer(handle)
    return agent.wait(handle, 60) if state == "PROC" else state


def test_a_program_of_nixls_runs_unmodified(pair):
    """Read its pages, be written to, and be notified, by a program that imports nixl."""
    agent, node, memory = pair
    order = np.random.default_rng(0).permutation(NBYTES // 4096)
    whole = np.arange(NBYTES // 4, dtype=np.uint32)

    assert "DONE" == finish(agent, read_of(agent, node, memory, order))
    assert (memory.reshape(-1, 1024) == whole.reshape(-1, 1024)[order]).all()
    assert {"test": ["page list"]} == node.do("notifs", 1)
    memory[:] = 0
    assert "test" == node.do("add", agent.get_agent_metadata().hex())
    assert ["DONE", NBYTES] == node.do("write", memory.ctypes.data)
    end_s = time.monotonic() + 60
    while not agent.check_remote_xfer_done("node", b"push"):
        assert time.monotonic() < end_s
    assert (memory == whole).all()


def test_a_program_ends_without_a_crash(pair, capfd):
    """NIXL 1.5.1 ends with a segmentation fault: a good run has a bad exit status."""
    agent, node, memory = pair
    node.do("add", agent.get_agent_metadata().hex())
    node.do("write", memory.ctypes.data)
    print("end", file=node.process.stdin, flush=True)

    assert 0 == node.process.wait(60)
    assert "" == capfd.readouterr().err


def test_a_program_that_is_killed_is_an_error_and_not_a_hang(pair):
    """The reader of a dead prefiller must recompute."""
    agent, node, memory = pair
    handle = read_of(agent, node, memory, np.arange(NBYTES // 4096))
    finish(agent, handle)
    node.end()

    with pytest.raises((bindings.nixlRemoteDisconnectError, bindings.nixlBackendError)):
        finish(agent, handle)
    agent.release_xfer_handle(handle)


def test_the_command_line_says_what_it_needs(capfd):
    """A usage that is not shown is looked up in the source."""
    run = [sys.executable, "-m", "tep.compat.nixl"]

    assert 2 == subprocess.run(run, check=False).returncode
    assert 127 == subprocess.run([*run, "--", "no-such-program"], check=False).returncode
    told = capfd.readouterr().err
    assert "TEP_NIXL_BACKEND" in told
    assert "no-such-program" in told

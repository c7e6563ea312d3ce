"""NIXL's interface on the chaos fabric: a client's own mistakes show, by seed, and again."""

from __future__ import annotations

import numpy as np
import pytest

from tep import UsageError
from tep.compat.nixl import bindings, chaos, nixl_agent
from tep.testing.case import Case
from tep.testing.hunting import Trial

PAGE, NPAGES, PER_TRANSFER = 4096, 24, 4
LOOKS = 20_000


class Prefiller:
    """A client: writes pages in several transfers, and lets the last one's notification stand."""

    waits = True

    def __init__(self) -> None:
        self.agent = nixl_agent("prefiller")
        self.pages = np.random.default_rng(0).integers(1, 256, (NPAGES, PAGE), np.uint8)
        self.agent.register_memory([(self.pages.ctypes.data, self.pages.nbytes, 0, "")], "DRAM")

    def send(self, meta: bytes, address: int) -> None:
        agent = self.agent
        name = agent.add_remote_agent(meta)
        rows = [np.array([[at, PAGE, 0, PAGE, NPAGES]]) for at in (self.pages.ctypes.data, address)]
        mine = agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows[0], "DRAM")
        theirs = agent.prep_xfer_dlist(name, rows[1], "DRAM")
        handles = []
        for first in range(0, NPAGES, PER_TRANSFER):
            which = list(range(first, first + PER_TRANSFER))
            last = first + PER_TRANSFER == NPAGES
            if last and self.waits:
                for handle in handles:
                    assert "DONE" == until_done(agent, handle)
            notif = b"all pages" if last else b""
            handles.append(agent.make_prepped_xfer("WRITE", mine, which, theirs, which, notif))
            agent.transfer(handles[-1])


class Careless(Prefiller):
    """The same with a bug: it does not wait before the last transfer."""

    waits = False


def until_done(agent, handle):
    for _ in range(LOOKS):
        state = agent.check_xfer_state(handle)
        if state != "PROC":
            return state
    return "it did not end"


def run(kind):
    """Send all pages; return whether they were there when the notification said so."""
    prefiller, decoder = kind(), nixl_agent("decoder")
    memory = np.zeros((NPAGES, PAGE), np.uint8)
    decoder.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    prefiller.send(decoder.get_agent_metadata(), memory.ctypes.data)
    for looks in range(LOOKS):
        if decoder.check_remote_xfer_done("prefiller", b"all pages"):
            return bool((memory == prefiller.pages).all()), looks
        prefiller.agent.get_new_notifs()
    return False, LOOKS


@pytest.mark.tep(nodes=2, nics=(1, 2), faults="order", runs=20)
def test_a_correct_client_is_right_on_every_seed(tep_nixl):
    """A tool that accuses everybody is soon switched off."""
    assert run(Prefiller)[0]


@pytest.mark.slow
def test_a_planted_bug_is_found_and_found_again(monkeypatch):
    """Where the last transfer is nearly always the last to land, a test run never sees it."""
    monkeypatch.setenv("TEP_NIXL_BACKEND", "chaos")
    found = {}
    for seed in range(8):
        case = Case.draw(seed, nodes=2, nics=(1, 2), faults="order")
        outcomes = []
        for _ in range(2):
            with Trial(case) as trial, chaos.using(trial):
                outcomes.append(run(Careless))
        assert outcomes[0] == outcomes[1], "another run of the same seed"
        found[seed] = outcomes[0][0]

    assert 2 < sum(not right for right in found.values()), found


@pytest.mark.tep(nodes=2, faults="none", runs=3)
def test_a_dead_peer_is_an_error(tep_nixl):
    """A client's way of recovery is seldom walked otherwise."""
    prefiller, decoder = Prefiller(), nixl_agent("decoder")
    memory = np.zeros((NPAGES, PAGE), np.uint8)
    decoder.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    agent = prefiller.agent
    agent.add_remote_agent(decoder.get_agent_metadata())
    lists = [
        agent.get_xfer_descs([(at.ctypes.data, PAGE, 0)], "DRAM")
        for at in (prefiller.pages, memory)
    ]
    handle = agent.initialize_xfer("WRITE", *lists, "decoder", b"x")
    agent.transfer(handle)
    assert "DONE" == agent.wait(handle, 1.0)
    for nic in range(len(tep_nixl.engines[1].main_address.domains)):
        tep_nixl.kill_nic(1, nic)

    def again():
        agent.transfer(handle)
        agent.wait(handle)

    with pytest.raises((bindings.nixlRemoteDisconnectError, bindings.nixlBackendError)):
        again()


def test_by_environment_alone(monkeypatch):
    """A client's own tests know nothing of fixtures."""
    monkeypatch.setenv("TEP_NIXL_BACKEND", "chaos")
    monkeypatch.setenv("TEP_NIXL_OPTIONS", '{"seed": 7, "nodes": 3}')
    monkeypatch.setattr(chaos, "_used", [])

    assert run(Prefiller)[0]
    assert 3 == len(chaos.nodes().cluster.engines)
    nixl_agent("third")
    with pytest.raises(UsageError, match="3 agents were opened"):
        nixl_agent("fourth")

"""Many peers that connect at the same time: nothing lost, nothing made in vain, no long turn."""

from __future__ import annotations

import time

import pytest

from tep.backends.base import Access, Kind, Status, WriteBatch, new_completions
from tep.backends.verbs import open_domains
from tep.backends.verbs.peers import STEPS_MAX
from tep.memory.source import adapt
from tests.support.verbs_stub import Knob

COMMANDS_A_PAIR = 16  # two queue pairs at each end: made, INIT, RTR, RTS
COMMANDS_A_STEP = 8
DATAGRAMS_A_PAIR = 6  # where both ask at once: REQ, REP and ACK from either
FAST = {
    "sq_depth": 4,
    "imm_recvs": 512,
    "msg_recvs_max": 4,
    "drain_s": 0.2,
    "timeout": 8,
    "resend_s": 60.0,
}


class Storm:
    """`n` ranks that write to each other as soon as they are there."""

    def __init__(self, stub, n, **options):
        options = {**FAST, "handshake_s": 600.0, "library": stub.path, **options}
        self.stub, self.n, self.out = stub, n, new_completions(1024)
        self.ranks = [
            open_domains([f"stub{k % 8}"], name=f"r{k}", **options).domains[0] for k in range(n)
        ]
        self.memory = bytearray(4096)
        self.keys = [
            nic.register(adapt(self.memory), Access.SOURCE_AND_TARGET) for nic in self.ranks
        ]
        self.before = {name: stub.count(name) for name in ("commands", "datagrams")}
        self.lost = stub.count("datagrams_lost")
        self.most = 0  # commands in one call
        self.done, self.arrived, self.statuses = [0] * n, [0] * n, set()

    def call(self, work):
        before = self.stub.count("commands")
        found = work()
        self.most = max(self.most, self.stub.count("commands") - before)
        return found

    def submit(self):
        """Every rank connects to every other one."""
        for k, nic in enumerate(self.ranks):
            for other, there in enumerate(self.ranks):
                if other != k:
                    self.call(lambda nic=nic, there=there: nic.connect(there.address))

    def write(self, k, other):
        nic, key = self.ranks[k], self.keys[k]
        peer = nic.connect(self.ranks[other].address)
        row = (key.base, key.lkey, self.keys[other].base, self.keys[other].rkey)
        batch = WriteBatch(1, peer, *row, 8, 1, 1)
        return self.call(lambda: nic.post(batch, 0, 1))

    def turn(self):
        for k, nic in enumerate(self.ranks):
            for entry in self.out[: self.call(lambda nic=nic: nic.poll(self.out))].tolist():
                if entry[0] == Kind.WRITE:
                    self.statuses.add(entry[1])
                    self.done[k] += entry[2]
                elif entry[0] == Kind.IMM:
                    self.arrived[k] += entry[2]

    def run(self):
        """Connect all, and let each write to all; sq_depth rows at a time."""
        self.submit()
        left = {k: [o for o in range(self.n) if o != k] for k in range(self.n)}
        end_s = time.monotonic() + 240
        while time.monotonic() < end_s:
            for k, others in left.items():
                while others and self.write(k, others[-1]):
                    others.pop()
            self.turn()
            if min(self.arrived) == min(self.done) == self.n - 1:
                return
        pytest.fail(f"not there in time: {min(self.arrived)} of {self.n - 1}")

    def counted(self, name):
        return self.stub.count(name) - self.before[name]

    def close(self):
        for nic in self.ranks:
            nic.close()


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 32, pytest.param(256, marks=pytest.mark.long)])
def test_all_to_all_costs_what_its_pairs_cost(stub, n):
    """Datagrams that get lost are waited for; queue pairs made in vain are seconds of commands."""
    storm = Storm(stub, n)
    storm.run()
    pairs = n * (n - 1) // 2
    commands, datagrams = storm.counted("commands"), storm.counted("datagrams")
    lost, most = stub.count("datagrams_lost") - storm.lost, storm.most
    storm.close()

    assert {Status.OK} == storm.statuses
    assert [n - 1] * n == storm.done == storm.arrived
    assert 0 == lost
    assert pairs * COMMANDS_A_PAIR == commands
    assert datagrams <= pairs * DATAGRAMS_A_PAIR
    assert most <= STEPS_MAX * COMMANDS_A_STEP


@pytest.mark.slow
def test_a_storm_in_which_datagrams_get_lost_ends_as_well(stub):
    """Each third is lost: what is repeated must not be answered by fresh queue pairs for ever."""
    stub.set(Knob.DROP_DATAGRAMS, 3)
    storm = Storm(stub, 12, resend_s=0.001, handshake_s=3.0)
    storm.run()
    commands = storm.counted("commands")
    storm.close()

    assert {Status.OK} == storm.statuses
    assert commands <= 2 * 66 * COMMANDS_A_PAIR


@pytest.mark.slow
def test_a_nic_that_many_ask_gets_on_with_its_rows(stub):
    """Rows to a peer that is connected must not wait for the handshakes of a hundred others."""
    storm = Storm(stub, 100)
    hub, first = storm.ranks[0], storm.ranks[1]
    hub.connect(first.address)
    while not hub.peers.up[0]:
        storm.turn()
    for nic in storm.ranks[2:]:
        nic.connect(hub.address)
        while not nic.peers.table[0].negotiation.attempt:
            nic.poll(storm.out)
    before, turns = stub.count("commands"), 0
    assert storm.write(0, 1)
    while not storm.done[0]:
        turns += 1
        for entry in storm.out[: hub.poll(storm.out)].tolist():
            storm.done[0] += entry[0] == Kind.WRITE
    asked = stub.count("commands") - before
    storm.close()

    assert turns <= 2
    assert asked <= turns * STEPS_MAX * COMMANDS_A_STEP

"""Programs that call the fake EFA device's verbs, and their queue pairs, for its tests. Not a test.

The programs are tests/efa_fake/driver.c: a line is a command, a line is its answer.
"""

from __future__ import annotations

import os
import signal
import subprocess
from typing import NamedTuple

LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ = 1, 2, 4  # verbs.h, enum ibv_access_flags
ALL = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ
SEND, WRITE, WRITE_IMM, READ, INLINE = range(5)  # engine.h, enum op_kind, and one of driver.c
WC_RDMA_WRITE, WC_RDMA_READ = 1, 2  # verbs.h, enum ibv_wc_opcode
WC_RECV, WC_RECV_WRITE_IMM = 128, 129
BAD_ADDRESS, BAD_DEST_QPN, RNR, BAD_LENGTH = 7, 9, 10, 11  # fabric.h, enum status
INVALID_LKEY, LOCAL_LENGTH, UNRESP, UNKNOWN_PEER, UNREACH = 5, 6, 13, 14, 15
FOR_EVER = 7


class Wc(NamedTuple):
    id: int
    status: int
    opcode: int
    imm: int
    nbytes: int


class Program:
    """A process that calls verbs."""

    def __init__(self, run, host=0):
        self.process = subprocess.Popen(
            [run.driver],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | run.environment(host),
        )

    def say(self, *words):
        print(*words, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().split()

    def do(self, *words):
        said = self.say(*words)
        assert said, "the program has ended"
        assert said[0] == "ok", (words, said)
        return [int(word) for word in said[1:]]

    def errno(self, *words):
        said = self.say(*words)
        assert said[0] == "error", (words, said)
        return int(said[1])

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()


class End:
    """A queue pair with its own queue and NIC, and one region of memory."""

    def __init__(
        self, program, nic=0, cqe=1024, sq=256, rq=256, rnr=FOR_EVER, qkey=1, nbytes=1 << 20
    ):
        self.program = program
        self.index, self.qpn, self.host, self.nic_1 = program.do(
            "open", nic, cqe, sq, rq, rnr, qkey, 0
        )
        self.qkey = qkey
        self.mr, self.lkey, self.rkey, self.at = program.do("reg", self.index, nbytes, ALL, 0)
        self.peers = {}

    def meet(self, other):
        """Address handles both ways, as greetings make them."""
        self.know(other)
        other.know(self)
        return self

    def know(self, other):
        (self.peers[other],) = self.program.do("ah", self.index, other.host, other.nic_1)

    def post(self, other, op=WRITE_IMM, count=1, nbytes=8, imm=100, **how):
        """`count` rows, one beside the other; (posted, errno)."""
        at = how.get("at", 0)
        words = [self.index, op, self.peers[other], how.get("qpn", other.qpn)]
        words += [how.get("qkey", other.qkey), how.get("rkey", other.rkey)]
        words += [how.get("raddr", other.at + at), how.get("lkey", self.lkey), self.at + at]
        words += [nbytes, imm, count, int(how.get("chain", True)), nbytes]
        return tuple(self.program.do("post", *words))

    def recv(self, count, nbytes=0):
        return tuple(self.program.do("recv", self.index, count, self.lkey, self.at, nbytes))

    def poll(self, most=1000):
        said = self.program.say("poll", self.index, most)
        return [Wc(*map(int, word.split(":"))) for word in said[1:]]

    def bytes(self, at, nbytes):
        said = self.program.say("peek", self.at + at, nbytes)
        return bytes.fromhex(said[1])

    def fill(self, nbytes, seed):
        self.program.do("fill", self.at, nbytes, seed)
        return bytes((i * seed + i // 256) & 255 for i in range(nbytes))


def until(ends, done, seen=None, turns=200_000):
    """Poll in turn until all that came satisfies `done`; {end: completions}."""
    seen = {end: [] for end in ends} if seen is None else seen
    for _ in range(turns):
        for end in ends:
            seen[end] += end.poll()
        if done(seen):
            return seen
    raise AssertionError(f"it does not come: {seen}")

"""Processes with one engine each, that do what the lines say which they are sent. Not a test.

The lines, and what they do, are in tests/e2e/fabric_node.py.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path

__all__ = ["NICS", "Child", "transfer", "wait_until"]

ROOT = Path(__file__).parents[2]
NICS = {
    "tcp": ["127.0.0.1", "127.0.0.2"],
    "local": 2,
    "efa": 2,
    "srd": 2,  # the backend `efa`
}


@cache
def parent_of(loaded: tuple[tuple[str, str], ...]) -> socket.socket:
    """Start the process that forks children which see these variables of the dynamic loader."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.fabric_node", str(theirs.fileno())],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        env=os.environ | dict(loaded) | {"OPENBLAS_NUM_THREADS": "1"},  # fork() wants one thread
    )
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)  # first: it ends when nobody can ask it any more
    return ours


class Child:
    """A process with one engine; `do` sends it a line and returns the answer.

    It is forked from a process that has imported numpy and tep and opened nothing: the imports take
    0.2 s of CPU, and the fork 2 ms.
    """

    def __init__(self, env=None):
        env = os.environ | (env or {})
        self._parent = parent_of(tuple(item for item in env.items() if item[0].startswith("LD_")))
        stdin, writing = os.pipe()
        reading, stdout = os.pipe()
        self.pid = self._request({"env": env}, stdin, stdout)
        os.close(stdin)
        os.close(stdout)
        self.stdin, self.stdout = os.fdopen(writing, "w"), os.fdopen(reading)
        self._pidfd = os.pidfd_open(self.pid)
        self._status = None

    def _request(self, request, *fds):
        socket.send_fds(self._parent, [json.dumps(request).encode()], fds)
        return int(self._parent.recv(64))

    def do(self, what, **arguments):
        answer = self.ask(what, **arguments)
        assert "ok" in answer, answer
        return answer["ok"]

    def ask(self, what, **arguments):
        self.tell(what, **arguments)
        return self.answer()

    def tell(self, what, **arguments):
        print(json.dumps({"do": what, **arguments}), file=self.stdin, flush=True)

    def answer(self):
        line = self.stdout.readline()
        assert line, f"the process ended with {self.wait()}"
        return json.loads(line)

    def signal(self, number):
        signal.pidfd_send_signal(self._pidfd, number)
        if number == signal.SIGKILL:
            self.wait()
        elif number == signal.SIGSTOP:  # of several threads, some run on until the last has stopped
            self._request({"wait": self.pid, "until": os.WSTOPPED})

    def wait(self, timeout_s=None):
        """Wait for its end; its exit status, or minus the signal that killed it; None: it lives."""
        if self._status is None and select.select([self._pidfd], [], [], timeout_s)[0]:
            self._status = self._request({"wait": self.pid, "until": os.WEXITED})
        return self._status

    def end(self):
        if self.wait(0) is None:
            self.signal(signal.SIGCONT)  # one that was stopped hears nothing else
            self.stdin.close()
            if self.wait(20) is None:
                self.signal(signal.SIGKILL)
        self.stdout.close()
        self.stdin.close()
        os.close(self._pidfd)


def transfer(source, target, desc, *, page_bytes, npages, seed, imm, tag="w"):
    """Write all pages of the source's region in shuffled places: how it ended on both sides."""
    target.do("expect", imm=imm, count=npages)
    source.do("write", tag=tag, desc=desc, page_bytes=page_bytes, npages=npages, seed=seed, imm=imm)
    return source.do("wait", tag=tag), target.do("wait", tag=f"imm{imm}")


def wait_until(done, what, within_s=20.0):
    """Ask again and again, with a pause: else the answers keep two processes busy."""
    start_s = time.monotonic()
    while not done():
        assert time.monotonic() - start_s < within_s, f"waited {within_s} s for {what}"
        threading.Event().wait(0.002)

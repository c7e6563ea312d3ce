"""Processes with one engine each, that do what the lines say which they are sent. Not a test.

The lines, and what they do, are in tests/e2e/fabric_node.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

__all__ = ["NICS", "Child", "transfer", "wait_until"]

ROOT = Path(__file__).parents[2]
NICS = {
    "tcp": ["127.0.0.1", "127.0.0.2"],
    "local": 2,
    "efa": 2,
    "srd": 2,  # the backend `efa`
}


class Child:
    """A process with one engine; `do` sends it a line and returns the answer."""

    def __init__(self, env=None):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.fabric_node"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | (env or {}),
        )

    def do(self, what, **arguments):
        answer = self.ask(what, **arguments)
        assert "ok" in answer, answer
        return answer["ok"]

    def ask(self, what, **arguments):
        print(json.dumps({"do": what, **arguments}), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait()}"
        return json.loads(line)

    def signal(self, number):
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()
        elif number == signal.SIGSTOP:  # of several threads, some run on until the last has stopped
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def end(self):
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)  # one that was stopped hears nothing else
            self.process.stdin.close()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process.stdout.close()
        self.process.stdin.close()


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

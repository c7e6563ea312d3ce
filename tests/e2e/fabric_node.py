"""A process with one engine, driven by lines of JSON on its standard input.

Not a test: tests/support/children.py starts it. Each line is {"do": name, ...}; the answer is
one line {"ok": value} or {"error": type, "text": message}.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

import tep
from tep.backends import efa, libfabric
from tep.backends.libfabric.rules import parse
from tep.base.errors import Cancelled, FabricError, TepError, WaitTimeout
from tests.support.inside import nics_of, worker_of


def noise(nbytes, seed):
    """The bytes that a source with this seed holds."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def shuffled(npages, seed):
    """The order in which pages go to their places."""
    return np.random.default_rng(seed + 1000).permutation(npages)


class Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2, malloc.h: ten counters of size_t."""

    _fields_ = (
        ("arena", ctypes.c_size_t),
        ("counts", ctypes.c_size_t * 3),
        ("mapped", ctypes.c_size_t),
        ("fast", ctypes.c_size_t * 2),
        ("used", ctypes.c_size_t),
        ("unused", ctypes.c_size_t * 2),
    )


def allocated():
    """Bytes that malloc has given out; 0 where the C library does not say."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0
    ask.restype = Mallinfo
    found = ask()
    return found.used + found.mapped


def peer_of(address):
    """The address that travelled as hexadecimal digits."""
    return tep.NetAddr.from_bytes(bytes.fromhex(address))


class Node:
    """The state of a node that the lines act on."""

    def __init__(self):
        self.engine = self.provider = None
        self.memory = None
        # Forked processes have the same addresses. With regions at the same place, a write to the
        # address at the sender instead of that at the target would go unnoticed.
        self.shift = 64 * (os.getpid() % 4096)
        self.region = None
        self.waiting = {}
        self.names = {}
        self.messages = []
        self.events = []
        self.claimed = {}
        self.streaming = False
        self.stream_over = threading.Event()
        self.rounds_done = 0

    def open(self, provider, nics, name, epoch=None, timeout_s=2.0):
        self.provider = provider
        if provider == "local":
            self.engine = tep.TransferEngine.open("local", nics=nics, name=name)
            return self.engine.main_address.to_bytes().hex()
        options = {"nics": nics, "name": name, "epoch": epoch, "peer_timeout_s": timeout_s}
        if provider == "srd":
            opened = efa.open_domains(**options)
        else:
            opened = libfabric.open_domains(**options, provider=provider)
        self.engine = tep.TransferEngine(
            opened.domains,
            driver=tep.ThreadDriver(opened.name),
            name=opened.name,
            epoch=opened.epoch,
        )
        return self.engine.main_address.to_bytes().hex()

    def ports(self):
        """The addresses of the NICs, with their ports, as `open` takes them."""
        return [
            f"{nic}:{int.from_bytes(bytes.fromhex(raw)[2:4], 'big')}" for nic, raw in self.nics()
        ]

    def nics(self):
        return [
            [d.caps.nic, parse(d.address, self.provider).raw.hex()] for d in nics_of(self.engine)
        ]

    def reg(self, nbytes, seed=None, access="SOURCE_AND_TARGET"):
        self.memory = np.zeros(self.shift + nbytes, np.uint8)[self.shift :]
        if seed is not None:
            self.memory[:] = noise(nbytes, seed)
        self.region, desc = self.engine.reg_mr(self.memory, access=tep.Access[access])
        return desc.to_bytes().hex()

    def expect(self, imm, count, sender=None):
        sender = None if sender is None else peer_of(sender)
        self.waiting[f"imm{imm}"] = self.engine.expect_imm_count(imm, count, sender=sender)

    def write(self, tag, desc, page_bytes, npages, seed, imm):
        target = tep.MrDesc.from_bytes(bytes.fromhex(desc))
        self.waiting[tag] = self.engine.submit_paged_writes(
            page_bytes,
            (self.region, tep.Pages(np.arange(npages))),
            (target, tep.Pages(shuffled(npages, seed))),
            imm,
        )

    def cancelled(self, tag, **how):
        """Cancel a transfer before anything of it is posted; the driver waits meanwhile."""

        def both():
            self.write(tag, **how)
            self.cancel(tag)

        self.engine.driver.call(both)
        assert "cancelled" == self.wait(tag)

    def read(self, tag, desc, page_bytes, npages, seed, imm=None):
        """Read pages to where write() with the same arguments would put them."""
        self.waiting[tag] = self.engine.submit_paged_reads(
            page_bytes,
            (tep.MrDesc.from_bytes(bytes.fromhex(desc)), tep.Pages(np.arange(npages))),
            (self.region, tep.Pages(shuffled(npages, seed))),
            imm,
        )

    def watch(self, addresses, every_s, lost_after_s):
        """Watch peers, and begin to write down what on_peer tells."""
        self.engine.on_peer(lambda event: self.events.append((event.peer, event.kind.name)))
        for address in addresses:
            self.engine.watch_peer(peer_of(address), every_s=every_s, lost_after_s=lost_after_s)

    def told(self, peer):
        """Return the events of a peer, in order; its NICs' events apart."""
        return [kind for name, kind in self.events if name == peer and "NIC" not in kind]

    def beats(self, name):
        """Rounds of questions put to a peer, and seconds that the last answer took."""
        known = [
            p for link, p in worker_of(self.engine).members.peers.items() if link.addr.name == name
        ]
        return known[-1].beats, known[-1].round_trip_s

    def meet(self, address):
        self.engine.add_peer_group([peer_of(address)])

    def remove(self, address):
        """Remove a peer; why what it has sent may still land here, or ""."""
        return self.engine.remove_peer(peer_of(address)).wait(20).unfenced

    def spent(self):
        """Turns of the engine, and seconds of CPU that this process has used."""
        return worker_of(self.engine).steps, time.process_time()

    def send(self, tag, address, text):
        self.waiting[tag] = self.engine.submit_send(peer_of(address), text.encode())

    def recvs(self, nbytes, count):
        self.engine.submit_recvs(nbytes, count, lambda view: self.messages.append(bytes(view)))

    def inbox(self):
        return [message.decode() for message in self.messages]

    def wait(self, tag, timeout_s=20.0):
        """Return a handle's end: "done", or the code of its error; or "timeout"."""
        try:
            self.waiting[tag].wait(timeout_s)
        except FabricError as error:
            return error.code
        except WaitTimeout:
            return "timeout"
        except Cancelled:
            return "cancelled"
        return "done"

    def error(self, tag):
        """Return the message of a handle's error."""
        return str(self.waiting[tag].error)

    def cancel(self, tag):
        self.waiting[tag].cancel()

    def stream(self, desc, page_bytes, npages, imm):
        """Write the same pages again and again, until told to stop or until one write fails."""
        pages = tep.Pages(np.arange(npages))
        target = tep.MrDesc.from_bytes(bytes.fromhex(desc))
        self.streaming = True
        self.stream_over.clear()
        self.rounds_done = 0

        def submit():
            self.engine.submit_paged_writes(
                page_bytes, (self.region, pages), (target, pages), imm, on_done=go_on
            )

        def go_on(sent):
            self.rounds_done += sent.ok
            if sent.ok and self.streaming:
                submit()
            else:
                self.waiting["stream"] = sent
                self.stream_over.set()

        submit()

    def rounds(self):
        return self.rounds_done

    def stream_ended(self):
        return self.stream_over.is_set()

    def end_stream(self, timeout_s=20.0, by_itself=False):
        """Return the end of the stream's last write, and the number done. `by_itself`: it fails."""
        self.streaming = self.streaming and by_itself
        if not self.stream_over.wait(timeout_s):
            return "timeout", self.rounds_done
        return self.wait("stream"), self.rounds_done

    def settled(self, tag):
        return self.waiting[tag].finished

    def check(self, page_bytes, npages, seed):
        """Return True if the pages of a source with this seed are all in their places."""
        want = noise(page_bytes * npages, seed).reshape(npages, page_bytes)
        have = self.memory[: page_bytes * npages].reshape(npages, page_bytes)
        return bool((have[shuffled(npages, seed)] == want).all())

    def clear(self):
        self.memory[:] = 0

    def claim(self, imm):
        """From now on count arrivals here: what failed under an immediate makes no difference."""
        self.claimed[imm] = 0

        def add(_, n):
            self.claimed[imm] += n

        self.engine.on_imm(range(imm, imm + 1), add)

    def count(self, imm):
        if imm in self.claimed:
            return self.claimed[imm]
        return dict(self.engine.stats().imms_unexpected).get(imm, 0)

    def remove_imm(self, imm):
        return self.engine.remove_imm(imm)

    def rows(self):
        """Rows that each NIC took."""
        return worker_of(self.engine).group.rows

    def forget_region(self):
        self.engine.deregister(self.region)

    def use(self):
        """Blocks that Python has allocated, KiB that C code has, and open file descriptors."""
        gc.collect()  # a closed engine is a knot of references; its eventfd goes with it
        return [
            sys.getallocatedblocks(),
            allocated() // 1024,
            len(list(Path("/proc/self/fd").iterdir())),
        ]

    def fork_and_close(self):
        """Fork a child that closes everything it inherited; how it ended."""
        child = os.fork()
        if child == 0:
            for domain in nics_of(self.engine):
                domain.close()
            os._exit(0)
        return os.waitpid(child, 0)[1]

    def run(self, code):
        """Run lines of Python; the value that they leave in `_`."""
        self.names["_"] = None
        exec(code, self.names)
        return self.names["_"]

    def spawn(self):
        """Run another program, as users do; its exit status."""
        return subprocess.run([sys.executable, "-c", ""], check=False).returncode

    def close(self):
        if self.engine is not None:
            self.engine.close()
            self.engine = None


def answer_lines():
    """Answer lines until there are no more."""
    node = Node()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": getattr(node, request.pop("do"))(**request)}
        except (TepError, OSError) as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    node.close()


def begin(env, stdin, stdout):
    """Give a forked process its environment and its pipes."""
    os.environ.clear()
    os.environ.update(env)
    for fd, number in ((stdin, 0), (stdout, 1)):
        os.dup2(fd, number)
        os.close(fd)


def main(control):
    """Fork a child for each environment that comes with its pipes; wait for it when asked."""
    gc.freeze()
    while True:
        message, fds, *_ = socket.recv_fds(control, 1 << 20, 2)
        if not message:
            return
        request = json.loads(message)
        if fds:
            answer = os.fork()
            if answer == 0:
                control.close()
                begin(request["env"], *fds)
                answer_lines()
                return
        else:
            found = os.waitid(os.P_PID, request["wait"], request["until"])
            answer = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        for fd in fds:
            os.close(fd)
        control.send(str(answer).encode())


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))

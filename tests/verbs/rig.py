"""Engines and peers for the tests of this folder; no test lives here."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import threading
import time
import traceback

import numpy as np

import tep
from tep.backends.verbs import open_domains
from tep.drivers.threads import InlineDriver, ThreadDriver
from tep.engine import TransferEngine

FAST = {"handshake_s": 1.0, "timeout": 14, "retry_cnt": 5, "drain_s": 0.5}


def buffer(nbytes):
    """Memory of its own mapping: a write that is still under way cannot land in the heap."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def noise(nbytes, seed=0):
    """Pseudo-random bytes in memory of their own."""
    found = buffer(nbytes)
    found[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return found


def engine(name, devices, ring=None, **options):
    """An engine turned by a thread, or by whoever waits if a ring is given."""
    opened = open_domains(devices, name=name, **{**FAST, **options})
    driver = ThreadDriver(name) if ring is None else InlineDriver(ring)
    quick = tep.EngineOptions(probe_first_s=0.1)  # a path that was lost is asked for soon
    return TransferEngine(
        opened.domains, driver=driver, name=opened.name, epoch=opened.epoch, options=quick
    )


@contextlib.contextmanager
def pair(left, right, **options):
    """Two engines on one thread."""
    ring = []
    with engine("left", left, ring, **options) as a, engine("right", right, ring, **options) as b:
        yield a, b


def die(domain):
    """Let a NIC vanish as that of a killed process does: peers are told nothing."""
    domain.peers.say_goodbye = lambda: None
    domain.close()


def turn_until(engine_, done, timeout_s=20.0):
    """Turn an inline engine until something holds."""
    end_s = time.monotonic() + timeout_s
    while not done():
        engine_.driver.turn()
        assert time.monotonic() < end_s, "waited in vain"


class Peer:
    """Another process, forked from this one: `main(pipe)` runs there."""

    def __init__(self, main, *arguments):
        assert threading.active_count() == 1, "fork before any engine has a thread"
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(main, theirs, arguments), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, timeout_s=60.0):
        """Return the peer's next message; raise with its traceback if it fails."""
        assert self.pipe.poll(timeout_s), "the peer says nothing"
        found = self.pipe.recv()
        assert not isinstance(found, str), found
        return found

    def kill(self):
        """End it as a crash does."""
        self.process.kill()
        self.process.join(20)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.pipe.close()
        self.process.join(20)
        if self.process.is_alive():
            self.kill()


def _run(main, pipe, arguments):
    try:
        main(pipe, *arguments)
    except BaseException:  # noqa: BLE001  # whatever it is, the parent shows it
        pipe.send(traceback.format_exc())
    finally:
        pipe.close()
        os._exit(0)


def pages(count):
    """Pages 0 .. count - 1."""
    return tep.Pages(np.arange(count))

"""Entries of the backend `efa` as the fake device reads them: they have to be what was asked for.

The device logs each entry as it read it from its ring. With thread=0 it moves only when it is
called, so that batches lie in the ring until then. Each test runs a program of its own under the
fake libraries: this file, with a name of `_PROGRAMS`.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tep.backends.efa.ways import OP_READ, OP_WRITE
from tep.base.errors import BackendUnavailable, FabricError
from tests.support.fake_efa import fabric
from tests.support.here import need_fake_efa

ROOT = Path(__file__).parents[2]
SAME = ("op", "to", "qpn_to", "len", "nsge", "lkey", "rkey", "raddr", "imm", "inline")
PORT = 0  # the only NIC, which sends to itself
NAMES = {OP_READ: "read", OP_WRITE: "write"}

pytestmark = pytest.mark.slow  # a compiler, processes


class _End:
    """One NIC and its way, without an engine; it sends to itself."""

    def __init__(self, *, send=64, receive=64):
        import ctypes

        from tep.backends.efa.device import Nic, Sizes
        from tep.backends.efa.ways import Columns
        from tep.backends.ffi.efa import load
        from tep.memory.source import adapt

        lib = load()
        self.nic = Nic(lib, lib.devices()[0][0], Sizes(send, receive, 4 * max(send, receive)))
        self.way = Columns(self.nic)
        self.memory = np.zeros(1 << 16, np.uint8)
        self.at = self.memory.ctypes.data
        self.mr = self.nic.hold(adapt(self.memory), 7)  # written, and read, by peers
        self.place = self.nic.place(self.nic.insert(self.nic.raw()))
        self.way.lay_out(self.at, 64, receive, self.mr.lkey)
        self._run = ctypes.CDLL("libibverbs.so.1").fake_efa_run
        self.seen, self.asked = [], []

    def turn(self, turns=1):
        self._run(turns)

    def write(self, n, ids, dst, imm, nbytes, op=OP_WRITE):
        at = self.at + dst
        self.way.write(n, ids, self.ends(op), at, at, nbytes, imm)
        imms = itertools.repeat(None) if imm is None else np.broadcast_to(imm, n).tolist()
        columns = [np.broadcast_to(column, n).tolist() for column in (at, nbytes)]
        for to, length, one in zip(*columns, imms, strict=False):
            self._ask(op, to, length, one)

    def write_one(self, number, dst, imm, nbytes, op):
        at = self.at + dst
        self.way.write_one(number, self.ends(op), at, at, nbytes, imm)
        self._ask(op, at, nbytes, imm)

    def send(self, number):
        self.way.send(number, self.place, self.at, 32, self.mr.lkey)
        self.asked.append(["send", PORT, self.nic.qpn, 32, 1, self.mr.lkey, 0, 0, 0, 0])

    def _ask(self, op, to, length, imm):
        name, told = NAMES[op], 0
        if imm is not None:  # verbs take it in network byte order
            name, told = "write_imm", socket.htonl(imm)
        where = [PORT, self.nic.qpn]
        self.asked.append([name, *where, length, 1, self.mr.lkey, self.mr.rkey, to, told, 0])

    def ends(self, op):
        return self.place, self.mr.lkey, self.mr.rkey, op

    def poll(self, room=1 << 16):
        found = self.way.poll(room)
        entries = [tuple(entry) for entry in found.tolist()]
        self.seen += entries
        return entries


def batches(seed, count, send):
    """Random batches; ids come back before they are given again. What came back, sorted."""
    rng = np.random.default_rng(seed)
    end = _End(send=send)
    free, spare = list(range(send)), 64
    end.way.receive(bytearray(np.arange(64, dtype=np.uint16)))
    kinds = {"rows": 0, "imms": 0, "messages": 0}
    for _ in range(count):
        n, with_imm = int(rng.integers(1, send + 1)), rng.random() < 0.5
        while len(free) < n or (with_imm and spare < n):  # what is posted never depends on timing
            end.turn(8)
            free, spare = _settle(end, free, spare, kinds)
        ids = np.array([free.pop() for _ in range(n)])
        dst = rng.integers(0, 1 << 15, n).astype(np.uint64)
        lengths = rng.integers(0, 200, n).astype(np.uint32) if rng.random() < 0.5 else 48
        imm = None
        if with_imm:
            spare -= n
            imm = rng.integers(0, 1 << 32, n, np.uint64) if rng.random() < 0.7 else 0x01020304
        op = OP_READ if imm is None and rng.random() < 0.4 else OP_WRITE
        if n == 1 and rng.random() < 0.7:
            one = [int(v if isinstance(v, int) else v[0]) for v in (dst, lengths)]
            value = imm if imm is None or isinstance(imm, int) else int(imm[0])
            end.write_one(int(ids[0]), one[0], value, one[1], op)
        else:
            end.write(n, ids, dst, imm, lengths, op)
        if rng.random() < 0.3:
            while not (free and spare):
                end.turn(8)
                free, spare = _settle(end, free, spare, kinds)
            spare -= 1
            end.send(free.pop())
    while len(free) < send:
        end.turn(64)
        free, spare = _settle(end, free, spare, kinds)
    statuses = sorted({entry[1] for entry in end.seen})
    return {"asked": end.asked, "kinds": kinds, "statuses": statuses}


def _settle(end, free, spare, kinds):
    back = []
    for number, status, flags, _, _, _, _, _ in end.poll():
        assert status == 0, (number, status)
        if flags & 2:
            assert number not in free
            free.append(number)
            kinds["rows"] += 1
        else:
            back.append(number)
            kinds["imms" if flags & 0x20 else "messages"] += 1
            assert flags & 0x20 == 0 or flags & 8
    if back:
        end.way.receive(bytearray(np.array(back, np.uint16)))
        spare += len(back)
    return free, spare


def many(seed, count, send):
    """`count` writes as fast as they come back: turns of the ring, flips of the phase."""
    end = _End(send=send)
    free = np.arange(send)
    dst = np.random.default_rng(seed).integers(0, 1 << 15, send).astype(np.uint64)
    posted = back = 0
    while back < count:
        n = min(len(free), count - posted)
        if n:
            end.write(n, free[:n], dst[:n], None, 8)
            free, posted = free[n:], posted + n
        end.turn(1)
        found = end.way.poll(1 << 16)
        assert not found["status"].any()
        free = np.concatenate([free, found["req_id"]])
        back += len(found)
    assert len(set(free.tolist())) == send
    return {"rows": back}


def bells(seed, count, send):
    """Return the number of entries of each doorbell."""
    end = _End(send=send)
    told = [0]

    class Bell:
        def __setitem__(self, _at, value):
            told.append(value)
            true[0] = value

    true, end.way._bell = end.way._bell, Bell()
    rng = np.random.default_rng(seed)
    for _ in range(count):
        n = int(rng.integers(1, send + 1))
        end.write(n, np.arange(n), np.zeros(n, np.uint64), None, 8)
        left = n
        while left:
            end.turn(8)
            left -= len(end.poll())
    steps = [(b - a) & 0xFFFF for a, b in itertools.pairwise(told)]
    return {"most": max(steps), "least": min(steps), "batch_max": end.way.batch_max}


_PROGRAMS = {"batches": batches, "many": many, "bells": bells}


def run(name, seed, count, send=64, **settings):
    """Run a program on a fake device that stands still between calls."""
    need_fake_efa()
    with fabric({"nics": 1, "thread": 0, "seed": seed, **settings}) as fake:
        done = subprocess.run(
            [sys.executable, __file__, name, *map(str, (seed, count, send))],
            env=os.environ | fake.environment() | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=100 if not os.environ.get("TEP_LONG") else 1000,
            check=False,
        )
        assert 0 == done.returncode, done.stderr[-3000:]
        return json.loads(done.stdout), fake.calls(), fake.total()


@pytest.mark.parametrize("settings", [{}, {"entry": 128, "cq_entry": 32}, {"max_batch": 7}])
@pytest.mark.parametrize("seed", range(20 if os.environ.get("TEP_LONG") else 1))
def test_the_device_sees_what_was_asked_for(seed, settings):
    """An entry that differs in one bit is another request, carried out all the same.

    60 batches of up to 64 rows in a ring of 64: they cross its end, fill it, and turn it over.
    """
    said, calls, counters = run("batches", seed, 60, log=1, **settings)
    entries = [call for call in calls if call["call"] == "wr"]
    seen = [[entry["op"], *(int(entry[name]) for name in SAME[1:])] for entry in entries]

    assert said["asked"] == seen
    assert [0] == said["statuses"]
    assert 0 == counters["malformed"] + counters["overruns"]
    assert 500 < counters["wqes"]


X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="not here: a fault tells no read")


@X86
def test_registers_are_written_only():
    """A load of a register is a trip over PCIe, for which the core waits: some 1 us a doorbell."""
    _, calls, counters = run("batches", 0, 60, log=1, mapped=1, max_batch=7)

    assert 0 == counters["mapped_reads"]
    assert 500 < counters["wqes"]
    assert all(0 < int(call["n"]) <= 7 for call in calls if call.get("what") == "bell")


@X86
def test_a_fence_stands_before_and_after_each_doorbell():
    """Before: the device meets an entry that is not there yet. After: more than a batch of them."""
    _, calls, counters = run("batches", 0, 60, log=1, mapped=1, max_batch=7)
    names = {"copy": "c", "fence": "f", "bell": "b"}
    order = "".join(names[call["what"]] for call in calls if call["call"] == "mapped")

    assert (0, 0, 0) == tuple(counters[name] for name in ("unfenced", "overlong", "malformed"))
    assert re.fullmatch("cfb(fcfb)+f?", order), order[:200]


@X86
def test_a_doorbell_that_tells_of_more_than_a_batch_is_refused():
    """A fake that takes what the device does not leaves it to the first day of an instance."""
    said, _, counters = run("overlong", 0, 0, mapped=1, max_batch=16)

    assert {"completed": 16} == said
    assert 1 == counters["overlong"]


def overlong(_seed, _count, send):
    """A batch that the device takes, and one that is longer by one entry."""
    end = _End(send=send)
    for most in (16, 17):
        end.way.batch_max = most
        end.write(most, np.arange(most), np.zeros(most, np.uint64), None, 8)
        end.turn(64)
    return {"completed": len(end.poll())}


def test_no_doorbell_tells_of_more_than_a_batch():
    """A device drops, or stops at, what goes beyond its largest batch."""
    said, _, _ = run("bells", 1, 50, send=256, max_batch=16)

    assert {"most": 16, "least": 1, "batch_max": 16} == said


@pytest.mark.parametrize("send", [64, 4096])
def test_many_rows_turn_the_rings_over(send):
    """16-bit counters wrap, phases flip: 200,000 rows, or ten million in `scripts/test --long`."""
    count = 10_000_000 if os.environ.get("TEP_LONG") else 200_000
    said, _, counters = run("many", 2, count, send=send, segments=0)

    assert {"rows": count} == said
    assert 0 == counters["malformed"] + counters["overruns"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"queries": 0}, "efadv_query_qp_wqs"), ({"entry": 96}, "96 bytes")],
)
def test_queues_that_cannot_be_mapped_are_refused(settings, why):
    """Entries written where the device does not look for them would be lost in silence."""
    said, _, _ = run("refusal", 0, 0, **settings)

    assert why in said["words"]


def refusal(_seed, _count, _send):
    """The words of what opening raises."""
    try:
        _End()
    except (BackendUnavailable, FabricError) as error:
        return {"words": str(error)}
    return {"words": ""}


_PROGRAMS |= {"refusal": refusal, "overlong": overlong}


if __name__ == "__main__":
    name, *numbers = sys.argv[1:]
    sys.stdout.write(json.dumps(_PROGRAMS[name](*map(int, numbers))))

"""A process that is short of something for a while is reached again, or the error says how.

Short of descriptors, of memory, or of the interpreter's lock, at either end. Processes that get no
CPU at all are in test_killed_and_stopped.py; tests/efa plays these here on EFA, too.
"""

from __future__ import annotations

import inspect
import itertools
import json
import pkgutil
import subprocess
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import tep
from tep.backends.ffi.ibverbs import Library
from tep.backends.verbs.device import Device
from tep.base.errors import FabricError
from tests.support.here import need_stub, require
from tests.support.inside import nics_of
from tests.support.ranks import outcomes, start_rank
from tests.unit.backends.test_verbs_paths import Engines

WAIT_S = 60.0

NODE = """
import ctypes, json, os, resource, sys
import numpy as np
import tep
engine = tep.TransferEngine.open(name="node", **json.loads(sys.argv[1]))
mr, desc = engine.reg_mr(np.zeros(64, np.uint8))
print(desc.to_bytes().hex(), flush=True)
files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
space = resource.getrlimit(resource.RLIMIT_AS)[1]
hogs, imm = [], 1000
for line in sys.stdin:
    match line.split():
        case ["descriptors"]:
            soft = len(os.listdir("/proc/self/fd")) + 9
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, files))
            try:
                while True:
                    hogs.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                pass
        case ["memory"]:  # for small things, and for no mapping
            pages = int(open("/proc/self/statm").read().split()[0])
            limit = pages * resource.getpagesize() + (256 << 10)
            resource.setrlimit(resource.RLIMIT_AS, (limit, space))
        case ["lock", seconds]:
            print("ok", flush=True)
            ctypes.PyDLL(None).sleep(int(seconds))
        case ["rich"]:
            resource.setrlimit(resource.RLIMIT_AS, (space, space))
            while hogs:
                os.close(hogs.pop())
        case ["write", there]:
            imm += 1
            target = tep.MrDesc.from_bytes(bytes.fromhex(there))
            try:
                engine.submit_single_write(64, (mr, 0), (target, 0), imm=imm).wait(60)
            except (tep.TepError, MemoryError) as error:
                print(type(error).__name__, str(error).replace(chr(10), " "), flush=True)
                continue
    print("ok", flush=True)
"""

BACKENDS = {
    "local": {"backend": "local"},
    "tcp": {"backend": "libfabric", "provider": "tcp", "nics": ["127.0.0.1"], "peer_timeout_s": 2},
    "efa": {"backend": "libfabric", "provider": "efa", "nics": 1, "peer_timeout_s": 2},
    "srd": {"backend": "efa", "nics": 1, "peer_timeout_s": 2},
}
CURES = {"descriptors": "ulimit -n", "memory": "ulimit -v"}


class Node:
    """A process with an engine, that can be made short of something."""

    def __init__(self, kind: str) -> None:
        options = json.dumps(BACKENDS[kind])
        self.process = start_rank("-c", NODE, options, stdin=subprocess.PIPE)
        self.desc = tep.MrDesc.from_bytes(bytes.fromhex(self.process.stdout.readline()))

    def tell(self, line: str) -> str:
        """Send a line, and return the answer."""
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return str(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        outcomes([self.process])


@pytest.fixture(params=["local", "tcp"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param != "local":
        require(request.param)
    return str(request.param)


@pytest.fixture
def node(kind: str) -> Iterator[Node]:
    found = Node(kind)
    try:
        yield found
    finally:
        found.end()


class Sender:
    """An engine that writes to one target, each time under another immediate."""

    def __init__(self, kind: str, desc: tep.MrDesc) -> None:
        self.engine = tep.TransferEngine.open(**BACKENDS[kind])
        self._mr, _ = self.engine.reg_mr(np.ones(64, np.uint8))
        self._desc, self._imm = desc, 0

    def write(self) -> str:
        """Write once; "", or the error."""
        self._imm += 1
        sent = self.engine.submit_single_write(64, (self._mr, 0), (self._desc, 0), imm=self._imm)
        try:
            sent.wait(WAIT_S)
        except tep.FabricError as error:
            return f"{error.code}: {error}"
        return ""


def until(write: Callable[[], str], good: str) -> None:
    """Write until it goes well: some ask a peer again after a while."""
    for _ in range(5):
        said = write()
        if said == good:
            return
    assert good == said


@pytest.mark.slow
@pytest.mark.parametrize("of", CURES)
def test_a_receiver_that_was_short_is_reached_again(kind, node, of) -> None:
    """A sender that called meanwhile took it for dead, for ever; all others went on."""
    old, new = Sender(kind, node.desc), Sender(kind, node.desc)
    with old.engine, new.engine:
        assert "" == old.write()
        assert "ok\n" == node.tell(of)
        said = new.write()
        if kind == "local" or (kind, of) == ("tcp", "descriptors"):
            assert said.startswith("UNREACHABLE")
        assert CURES[of] in said or kind != "local"
        assert "" == old.write()
        assert "ok\n" == node.tell("rich")
        assert "" == old.write()
        until(new.write, "")
        new.engine.remove_peer(node.desc.addr).wait(WAIT_S)
        assert "" == new.write()


@pytest.mark.slow
@pytest.mark.parametrize("of", CURES)
def test_a_sender_that_was_short_reaches_its_peers_again(kind, node, of) -> None:
    """What it could not open while it was short it has to open later; the old ones stay good."""
    old, new = (tep.TransferEngine.open(**BACKENDS[kind]) for _ in range(2))
    with old, new:
        to_old, to_new = (
            f"write {engine.reg_mr(np.zeros(64, np.uint8))[1].to_bytes().hex()}"
            for engine in (old, new)
        )
        assert "ok\n" == node.tell(to_old)
        assert "ok\n" == node.tell(of)
        said = node.tell(to_new)
        assert "ENOMEM" in said or "EMFILE" in said or kind != "local"
        assert "ok\n" == node.tell(to_old)
        assert "ok\n" == node.tell("rich")
        assert "ok\n" == node.tell(to_old)
        until(lambda: node.tell(to_new), "ok\n")


@pytest.mark.slow
def test_a_peer_that_held_its_interpreters_lock_is_reached_again(kind, node) -> None:
    """Nothing of it runs meanwhile: what waits for its answer is late, or ends as unreachable."""
    sender = Sender(kind, node.desc)
    with sender.engine:
        assert "" == sender.write()
        assert "ok\n" == node.tell("lock 4")
        said = sender.write()
        assert said == "" or (kind != "local" and said.startswith("UNREACHABLE"))
        assert "ok\n" == node.process.stdout.readline()
        until(sender.write, "")


HEAP = """
import json, resource, sys
import numpy as np
import tep
kind, rows = resource.RLIMIT_AS, 4096
limit = resource.getrlimit(kind)[1]
a, b = (tep.TransferEngine.open(name=name, **json.loads(sys.argv[1])) for name in "ab")
mr, _ = a.reg_mr(np.ones((rows, 64), np.uint8))
_, desc = b.reg_mr(target := np.zeros((rows, 64), np.uint8))
pages = tep.Pages(range(rows))
def write(imm):
    a.submit_paged_writes(64, (mr, pages), (desc, pages), imm=imm).wait(60)
write(1)
for hole in range(0, 256 << 10, 4096):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    hogs, size = [], 1 << 16
    resource.setrlimit(kind, (used + (1 << 20), limit))
    while size >= 64:  # no room is left, not for a small array
        try:
            hogs.append(bytearray(size))
        except MemoryError:
            size //= 2
    resource.setrlimit(kind, (used + (1 << 20) + hole, limit))
    try:
        write(2 * hole + 2)
    except (MemoryError, tep.FabricError):
        pass
    resource.setrlimit(kind, (limit, limit))
    hogs.clear()
    write(2 * hole + 3)
    b.expect_imm_count(2 * hole + 3, rows).wait(60)
assert target.all()
print("all went well")
"""


@pytest.mark.slow
def test_an_engine_on_local_goes_on_after_its_heap_was_full() -> None:
    """A MemoryError in a step gave up the only NIC: no transfer ever again, and no word why.

    On other backends it may: then the error says so, see test_scarce.py.
    """
    program = start_rank("-c", HEAP, json.dumps(BACKENDS["local"]))
    ((code, said, complaint),) = outcomes([program])

    assert (0, "all went well") == (code, said.strip()), complaint


PLACES = [
    ("local", "tep.backends.local.sender.total"),
    ("local", "tep.backends.local.sender.part"),
    ("tcp", "tep.backends.libfabric.slots.part"),
    ("tcp", "tep.backends.libfabric.slots.Slots.give_back"),
    ("tcp", "tep.backends.libfabric.slots.Slots.give_back_many"),
    ("tcp", "tep.backends.libfabric.completions.Queue._take_imms"),
    ("tcp", "tep.backends.libfabric.completions.Mailbox.received"),
    ("tcp", "tep.backends.libfabric.frames.encode"),
    ("tcp", "tep.backends.libfabric.frames.decode"),
    ("tcp", "tep.backends.libfabric.tcp.Accepted"),
    ("verbs", "tep.backends.verbs.send._RunRing.fill"),
    ("verbs", "tep.backends.verbs.send._Loose"),
    ("verbs", "tep.backends.verbs.receive.Poller._count_imms"),
    ("verbs", "tep.backends.verbs.messages._Out"),
    ("verbs", "tep.backends.verbs.messages.Datagrams.payload"),
    ("verbs", "tep.backends.verbs.domain.VerbsDomain._progress"),
]
MEETING = {
    "tep.backends.verbs.messages.Datagrams.payload",
    "tep.backends.verbs.domain.VerbsDomain._progress",
}
"""Those of them that are passed while two engines meet."""

PLACES_ON_EFA = [
    "tep.backends.efa.domain.Queue._take_entry",
    "tep.backends.efa.domain.Queue._take_kind",
    "tep.backends.efa.domain.Slots.give_back_many",
    "tep.backends.efa.domain.Mailbox.received",
]


@pytest.mark.parametrize(("kind", "place"), PLACES)
def test_one_failed_allocation_fails_no_transfer(kind, place, monkeypatch) -> None:
    """A MemoryError gave the only NIC up, or its rows were taken and nobody knew of them."""
    if kind == "tcp":
        require(kind)
    rows, where = 600, dict(BACKENDS.get(kind, {}))
    if kind == "verbs":
        where |= {"backend": "verbs", "library": need_stub().path, "nics": 1}
    a, b = (tep.TransferEngine.open(**where) for _ in range(2))
    with a, b:
        source = np.random.default_rng(0).integers(0, 255, (rows, 64), np.uint8)
        target, there = np.zeros_like(source), np.zeros_like(source)
        mr, _ = a.reg_mr(source)
        sink, _ = a.reg_mr(there, access=tep.Access.SINK)
        _, desc = b.reg_mr(target)
        _, readable = b.reg_mr(source.copy(), access=tep.Access.READABLE)
        b.submit_recvs(4096, 8, lambda _: None)
        pages = tep.Pages(range(rows))
        owner, _, name = place.rpartition(".")
        owner = pkgutil.resolve_name(owner)
        healthy, calls = inspect.getattr_static(owner, name), itertools.count()
        called, raised = getattr(healthy, "__func__", healthy), []

        def write(imm: int) -> None:
            sent = [
                a.submit_paged_writes(64, (mr, pages), (desc, pages), imm=imm),
                a.submit_single_write(64, (mr, 0), (desc, 0), imm=imm),
                a.submit_send(b.main_address, b"x" * 4096),
                a.submit_paged_reads(64, (readable, pages), (sink, pages)),
            ]
            for each in sent:
                each.wait(WAIT_S)
            b.expect_imm_count(imm, rows + 1).wait(WAIT_S)

        def scarce(*args: object, **kwargs: object) -> object:
            if next(calls) in (0, 2):
                raised.append(place)
                raise MemoryError
            return called(*args, **kwargs)

        if place not in MEETING:
            write(0)
        kept = staticmethod(scarce) if isinstance(healthy, staticmethod) else scarce
        monkeypatch.setattr(owner, name, kept)
        for imm in range(1, 200):
            write(imm)
            if imm >= 5 and raised:  # how many come at a time is the NIC's matter
                break
        assert raised
        assert (source == target).all()
        assert (source == there).all()
        assert {} == dict(b.stats().imms_unexpected)


@pytest.mark.parametrize("short", ["a", "b", "both"])
def test_peers_meet_once_an_rdma_device_has_memory_again(short, monkeypatch) -> None:
    """ENOMEM of a device that had no queue pair, or no address handle, left for a while."""
    stub = need_stub()
    stub.reset()
    e = Engines(stub)
    try:
        make, make_rc = Library.make, Device.make_rc
        mine = {d.caps.nic for d in nics_of(e.a if short == "a" else e.b)}

        def no_handle(self: Library, name: str, *args: object, **about: object) -> int:
            if name == "ibv_create_ah" and short == "both":
                raise FabricError(f"{name}: ENOMEM", code="PROVIDER")
            return make(self, name, *args, **about)

        def no_queue(self: Device, *args: int) -> int:
            if self.name in mine and short != "both":
                raise FabricError("ibv_create_qp: ENOMEM", code="PROVIDER")
            return make_rc(self, *args)

        monkeypatch.setattr(Library, "make", no_handle)
        monkeypatch.setattr(Device, "make_rc", no_queue)
        with pytest.raises(FabricError, match="ENOMEM|UNREACHABLE"):
            e.write(1).wait(WAIT_S)
        monkeypatch.undo()
        imms = itertools.count(2)
        until_s = time.monotonic() + WAIT_S
        while True:  # a peer that was not reached is asked again after a while
            try:
                e.write(next(imms)).wait(WAIT_S)
                break
            except FabricError:
                assert time.monotonic() < until_s
        assert (e.source == e.target).all()
    finally:
        e.close()
        stub.reset()

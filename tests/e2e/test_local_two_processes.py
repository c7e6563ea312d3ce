"""The local backend between processes: real transfers, sleep, deaths, restarts, refusals.

Each peer is a Python process under remote control: it runs the lines it is sent and answers with
what they leave in `_`. Everything waits for an answer or a handle, nothing for a time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tep
from tep.base.errors import ClosedError, FabricError, WaitTimeout
from tep.base.wire import MrDesc, NetAddr
from tep.engine import TransferEngine
from tests.support.children import Child
from tests.support.descriptors import open_descriptors

PATIENCE_S = 60.0
MIB = 1 << 20

PRELUDE = """
import os
import numpy as np
import tep
from tep import MrDesc, NetAddr, TransferEngine, alloc_shared  # all of it, before setuid()

def engine(nics=1, **options):
    return tep.TransferEngine.open("local", nics=nics, **options)
"""


class Remote:
    """A peer process."""

    def __init__(self, setup: str = "e = engine()") -> None:
        self.child = Child()
        self(PRELUDE)
        self(setup)

    def tell(self, code: str) -> None:
        """Have it run some lines, and do not wait for it."""
        self.child.tell("run", code=code)

    def answer(self):
        """Return the value that the oldest unanswered lines left in `_`."""
        answer = self.child.answer()
        assert "ok" in answer, answer
        return answer["ok"]

    def __call__(self, code: str):
        self.tell(code)
        return self.answer()

    def target(self, nbytes: int, shared: bool = False) -> MrDesc:
        """Have it register a blank buffer `buf`."""
        make = "alloc_shared" if shared else "lambda n: np.zeros(n, np.uint8)"
        code = f"buf = ({make})({nbytes}); mr, desc = e.reg_mr(buf); _ = desc.to_bytes().hex()"
        return MrDesc.from_bytes(bytes.fromhex(self(code)))

    def kill(self) -> None:
        """End it as a crash does."""
        self.child.signal(signal.SIGKILL)

    def close(self) -> None:
        self.child.end()


@pytest.fixture
def remotes() -> Iterator[type[Remote]]:
    """Makes peers, which end with the test."""
    made: list[Remote] = []

    class Kept(Remote):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            made.append(self)

    yield Kept
    for remote in made:
        remote.close()


def engine(nics: int = 1, **options) -> TransferEngine:
    return TransferEngine.open("local", nics=nics, **options)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("page_bytes", "npages"), [(4096, 4096), (65536, 256), (MIB, 16)])
def test_pages_arrive_whole_and_are_counted(remotes, shared, page_bytes, npages) -> None:
    """Two processes, two NICs each: every byte of every page, in random order, and exact counts."""
    nbytes = page_bytes * npages
    remote = remotes("e = engine(2)")
    desc = remote.target(nbytes, shared)
    random = np.random.default_rng(page_bytes)
    src, dst = random.permutation(npages), random.permutation(npages)
    remote.tell(
        f"e.expect_imm_count(7, {npages}).wait({PATIENCE_S}); "
        f"_ = [int(buf.reshape({npages}, -1).astype(np.uint64).sum()), e.remove_imm(7)]"
    )
    with engine(2) as mine:
        source = random.integers(0, 256, nbytes).astype(np.uint8)
        mr, _ = mine.reg_mr(source)
        sent = mine.submit_paged_writes(
            page_bytes, (mr, tep.Pages(src)), (desc, tep.Pages(dst)), imm=7
        )
        sent.wait(PATIENCE_S)
        assert [int(source.astype(np.uint64).sum()), 0] == remote.answer()
        assert all(nic.rows for nic in sent.stats().nics)
        # Back again, by the peer: what comes is compared byte by byte.
        back = np.zeros(nbytes, np.uint8)
        _, home = mine.reg_mr(back)
        remote(
            f"home = MrDesc.from_bytes(bytes.fromhex('{home.to_bytes().hex()}')); "
            f"t = e.submit_single_write({nbytes}, (mr, 0), (home, 0), imm=9); t.wait({PATIENCE_S})"
        )
        mine.expect_imm_count(9, tep.count_imms(tep.Single(nbytes), 2, 2)).wait(PATIENCE_S)

    pages = back.reshape(npages, -1)
    assert np.array_equal(source.reshape(npages, -1)[src], pages[dst])


@pytest.mark.slow
def test_a_ping_pong_at_defaults_does_not_spin(remotes) -> None:
    """Threads that spin for an answer hold the core that the answer needs: milliseconds each.

    CPU time says so on any machine, however busy: a waiter polls for 100 us at the most.
    """
    remote = remotes()
    desc = remote.target(4096)
    rounds = 300
    with engine() as mine:
        mr, home = mine.reg_mr(np.zeros(4096, np.uint8))
        remote.tell(
            f"""
import time
home = MrDesc.from_bytes(bytes.fromhex('{home.to_bytes().hex()}'))
start = time.process_time()
for k in range({rounds}):
    e.expect_imm_count(1, 1).wait({PATIENCE_S})
    e.submit_single_write(8, (mr, 0), (home, 0), imm=2).wait({PATIENCE_S})
_ = time.process_time() - start
"""
        )
        start = time.process_time()
        for _ in range(rounds):
            mine.submit_single_write(8, (mr, 0), (desc, 0), imm=1)
            mine.expect_imm_count(2, 1).wait(PATIENCE_S)
        used_s = time.process_time() - start
        theirs_s = remote.answer()

    assert (used_s + theirs_s) / rounds < 0.002


@pytest.mark.slow
def test_an_idle_engine_costs_no_cpu(remotes) -> None:
    """A connected engine that waits for hours must sleep on its descriptors."""
    remote = remotes()
    desc = remote.target(64)
    with engine() as mine:
        mr, _ = mine.reg_mr(np.zeros(64, np.uint8))
        mine.submit_single_write(8, (mr, 0), (desc, 0), imm=1).wait(PATIENCE_S)
        remote("e.expect_imm_count(1, 1).wait(60)")
        before = time.process_time()
        with pytest.raises(WaitTimeout):
            mine.expect_imm_count(5, 1).wait(0.4)
        used = time.process_time() - before
        theirs = remote(
            "import time; t = time.process_time(); time.sleep(0.4); _ = time.process_time() - t"
        )

    assert used < 0.04
    assert theirs < 0.04


def test_callbacks_and_messages_come_while_nobody_waits(remotes) -> None:
    """The worker turns the engine whenever no thread waits: descriptors travel as messages."""
    remote = remotes(
        """
import threading
e = engine()
seen, enough = [], threading.Event()
def take(view):
    seen.append(bytes(view).decode())
    len(seen) == 50 and enough.set()
e.submit_recvs(64, 2, take)
_ = e.main_address.to_bytes().hex()
"""
    )
    address = NetAddr.from_bytes(bytes.fromhex(remote("_ = e.main_address.to_bytes().hex()")))
    with engine() as mine:
        sent = [mine.submit_send(address, b"message %d" % k) for k in range(50)]
        remote.tell("_ = enough.wait(60) and seen")
        for message in sent:
            message.wait(PATIENCE_S)
        assert [f"message {k}" for k in range(50)] == remote.answer()


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_a_peer_killed_in_the_middle_ends_in_errors(remotes, shared) -> None:
    """Silence from a dead peer is a hang; other peers must not notice at all."""
    victim, other = remotes(), remotes()
    desc, fine = victim.target(64 * MIB, shared), other.target(64)
    with engine() as mine:
        mr, _ = mine.reg_mr(np.ones(64 * MIB, np.uint8))
        mine.submit_single_write(64, (mr, 0), (desc, 0)).wait(PATIENCE_S)
        writes = [mine.submit_single_write(64 * MIB, (mr, 0), (desc, 0), imm=1) for _ in range(40)]
        writes[0].wait(PATIENCE_S)
        victim.kill()
        started = time.monotonic()
        with pytest.raises(FabricError, match="UNREACHABLE"):
            writes[-1].wait(PATIENCE_S)
        for write in writes:
            with contextlib.suppress(FabricError):
                write.wait(PATIENCE_S)
        with pytest.raises(FabricError, match="UNREACHABLE"):
            mine.submit_single_write(64, (mr, 0), (desc, 0), imm=2).wait(PATIENCE_S)
        assert time.monotonic() - started < 20
        assert any(write.ok for write in writes)
        mine.submit_single_write(64, (mr, 0), (fine, 0), imm=1).wait(PATIENCE_S)
        other("e.expect_imm_count(1, 1).wait(60)")


@pytest.mark.slow
def test_a_killed_sender_leaves_its_receiver_well(remotes) -> None:
    """Its writes are counted; its memory and descriptors are released; other senders still work."""
    with engine() as mine:
        target = np.zeros(4096, np.uint8)
        handle, desc = mine.reg_mr(target)
        code = (
            f"desc = MrDesc.from_bytes(bytes.fromhex('{desc.to_bytes().hex()}')); "
            "mr, _ = e.reg_mr(np.full(4096, 3, np.uint8)); "
            "e.submit_paged_writes(8, (mr, tep.Pages(range(500))), (desc, tep.Pages(range(500))), "
            "imm=range(500)).wait(60); _ = None"
        ).replace("imm=range(500)", "imm=np.arange(500, dtype=np.uint32)")
        remotes()(code)
        mine.expect_imm_count(0, 1).wait(PATIENCE_S)
        before = open_descriptors()
        for turn in range(3):
            sender = remotes()
            sender(code)
            sender.kill()
            for imm in range(500):
                mine.expect_imm_count(imm, 1).wait(PATIENCE_S)
            assert 3 == target[turn]
        deadline = time.monotonic() + PATIENCE_S
        most = before + 3 * 3  # two pipes to each peer, and its pidfd
        while open_descriptors() > most and time.monotonic() < deadline:
            mine.remove_imm(0)  # a look at the engine: it lets go when it hears
        assert open_descriptors() <= most
        mine.deregister(handle)


@pytest.mark.slow
def test_a_stopped_peer_holds_back_and_loses_nothing(remotes) -> None:
    """More immediates than any ring holds, to a process that does not run: late, not lost."""
    remote = remotes()
    desc = remote.target(64)
    n = 30_000
    with engine() as mine:
        mr, _ = mine.reg_mr(np.zeros(64, np.uint8))
        mine.submit_single_write(8, (mr, 0), (desc, 0)).wait(PATIENCE_S)
        remote.child.signal(signal.SIGSTOP)
        pages = tep.Pages(np.zeros(n, np.int64), stride=8)
        everywhere = mine.submit_paged_writes(
            0, (mr, pages), (desc, pages), imm=np.arange(n, dtype=np.uint32)
        )
        with pytest.raises(WaitTimeout):
            everywhere.wait(0.2)
        remote.child.signal(signal.SIGCONT)
        remote.tell(
            f"for k in range({n}): e.expect_imm_count(k, 1).wait({PATIENCE_S})\n"
            "_ = e.stats().imms_counted"
        )
        everywhere.wait(PATIENCE_S)
        assert n == remote.answer()


@pytest.mark.slow
def test_a_restarted_peer_is_another(remotes) -> None:
    """Its old descriptors must fail, and its new ones work, under the same name."""
    first = remotes("e = engine(name='phoenix')")
    old = first.target(4096)
    with engine() as mine:
        mr, _ = mine.reg_mr(np.ones(4096, np.uint8))
        mine.submit_single_write(64, (mr, 0), (old, 0)).wait(PATIENCE_S)
        first.kill()
        second = remotes("e = engine(name='phoenix')")
        new = second.target(4096)
        assert new.addr.epoch > old.addr.epoch
        with pytest.raises(FabricError, match="UNREACHABLE"):
            mine.submit_single_write(64, (mr, 0), (old, 0), imm=1).wait(PATIENCE_S)
        mine.submit_single_write(64, (mr, 0), (new, 0), imm=1).wait(PATIENCE_S)
        with pytest.raises(tep.StaleEpoch):
            mine.submit_single_write(64, (mr, 0), (old, 0), imm=1)
        assert [64, 1] == second("e.expect_imm_count(1, 1).wait(60); _ = [int(buf.sum()), 1]")


FORBIDDEN = """
import ctypes, platform, struct
calls = {"x86_64": (310, 311), "aarch64": (270, 271)}[platform.machine()]  # process_vm_*
steps = ((0x20, 0, 0, 0), *((0x15, 1 - k, k, calls[k]) for k in (0, 1)),
         (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000))  # load, compare, EPERM, allow
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 5, ctypes.addressof(code)))
assert 0 == ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
assert 0 == ctypes.CDLL(None).prctl(22, 2, program, 0, 0)  # PR_SET_SECCOMP, a filter
e = engine()
plain, shared = np.zeros(64, np.uint8), alloc_shared(64)
"""
"""A process that may not call process_vm_writev and process_vm_readv, as in some containers."""


def test_in_a_container_without_ptrace_shared_memory_is_written_and_read(remotes) -> None:
    """It says so where the engine opens, and rows to other memory fail with the cure."""
    target, source = remotes(FORBIDDEN), remotes(FORBIDDEN)
    said = source("_ = e.explain()")
    assert "other processes reach memory of tep.alloc_shared() only" in said
    assert "process_vm_readv says EPERM" in said
    registered = (
        "_ = [e.reg_mr(m, access=tep.Access(7))[1].to_bytes().hex() for m in (plain, shared)]"
    )
    plain, shared = target(registered)
    source("mine = np.ones(64, np.uint8); mr, _ = e.reg_mr(mine, access=tep.Access(7)); _ = None")
    wait = "\ntry: t.wait(60)\nexcept tep.FabricError as error: _ = str(error)"
    for imm, (desc, works) in enumerate(((plain, False), (shared, True)), 1):
        source(f"desc = MrDesc.from_bytes(bytes.fromhex('{desc}')); _ = None")
        write = source(f"t = e.submit_single_write(64, (mr, 0), (desc, 0), imm={imm})" + wait)
        source("mine[:] = 0; _ = None")
        read = source("t = e.submit_single_read(64, (desc, 0), (mr, 0))" + wait)
        for error in (write, read):
            assert works == (error is None), error
            assert works or "register memory of tep.alloc_shared()" in error
        assert 64 * works == source("_ = int(mine.sum()); mine[:] = 1")
    assert [0, 64] == target("_ = [int(plain.sum()), int(shared.sum())]")


@pytest.mark.slow
def test_a_peer_that_may_not_be_touched_takes_shared_memory_only(remotes) -> None:
    """If the kernel refuses, the message says what to do, and no byte has changed.

    Yama's scope 1 and a process that may not be dumped are refused alike; root, which is never
    refused, becomes another user for this.
    """
    humble = """
import ctypes
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
"""
    target = remotes(
        f"""{humble}
assert 0 == ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
e = engine()
plain, shared = np.zeros(64, np.uint8), alloc_shared(64)
"""
    )
    plain, shared = target("_ = [e.reg_mr(m)[1].to_bytes().hex() for m in (plain, shared)]")
    sender = remotes(f"{humble}\ne = engine(); mr, _ = e.reg_mr(np.ones(64, np.uint8)); _ = None")
    code = (
        "desc = MrDesc.from_bytes(bytes.fromhex('{}'));"
        "t = e.submit_single_write(64, (mr, 0), (desc, 0), imm={});\n"
        "try: t.wait(60)\n"
        "except tep.FabricError as error: _ = str(error)"
    )
    refused = sender(code.format(plain, 1))
    assert "PROVIDER: process_vm_readv of process" in refused
    assert "kernel.yama.ptrace_scope" in refused
    assert "allow_tracer" in refused
    assert "tep.alloc_shared()" in refused
    assert sender(code.format(shared, 2)) is None
    seen = "e.expect_imm_count(2, 1).wait(60); _ = [int(plain.sum()), int(shared.sum())]"
    assert [0, 64] == target(seen)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_another_user_who_has_the_descriptor_writes_nothing(remotes) -> None:
    """A descriptor that got out let every user of the host write to alloc_shared() memory."""
    target = remotes("e = engine(); plain, shared = np.zeros(64, np.uint8), alloc_shared(64)")
    descs = target("_ = [e.reg_mr(m)[1].to_bytes().hex() for m in (plain, shared)]")
    sender = remotes(
        "os.setgid(65534); os.setuid(65534)\n"
        "e = engine(); mr, _ = e.reg_mr(np.ones(64, np.uint8)); _ = None"
    )
    for imm, desc in enumerate(descs):
        refused = sender(
            f"desc = MrDesc.from_bytes(bytes.fromhex('{desc}'))\n"
            f"t = e.submit_single_write(64, (mr, 0), (desc, 0), imm={imm})\n"
            "try: t.wait(60)\n"
            "except tep.FabricError as error: _ = str(error)"
        )
        assert "PROVIDER: process_vm_readv of process" in refused
        assert "as one user" in refused
    assert [0, 0, 0] == target(
        "_ = [int(plain.sum()), int(shared.sum()), len(e.stats().imms_unexpected)]"
    )


@pytest.mark.slow
def test_nothing_of_it_has_a_name_that_could_be_left_behind(remotes) -> None:
    """A file in /dev/shm outlives a killed process, and fills the machine's memory."""
    remote = remotes()
    desc = remote.target(4096, shared=True)
    with engine() as mine:
        mr, _ = mine.reg_mr(np.ones(4096, np.uint8))
        mine.submit_single_write(64, (mr, 0), (desc, 0), imm=1).wait(PATIENCE_S)
        remote("e.expect_imm_count(1, 1).wait(60)")
        proc = Path(f"/proc/{remote.child.pid}")
        maps = (proc / "maps").read_text()
        files = [str(fd.readlink()) for fd in (proc / "fd").iterdir()]

    assert "memfd:tep-lane" in maps
    assert "memfd:tep-alloc-shared" in maps
    named = "/dev/shm/"  # noqa: S108  # looked for, not written
    assert named not in maps
    assert not [name for name in files if name.startswith(named)]


@pytest.mark.slow
def test_a_forked_child_leaves_its_parent_in_peace(remotes) -> None:
    """A data loader's worker that exits, or even closes, must not end the trainer's traffic."""
    remote = remotes()
    desc = remote.target(64)
    with engine() as mine:
        mr, _ = mine.reg_mr(np.ones(64, np.uint8))
        mine.submit_single_write(8, (mr, 0), (desc, 0), imm=1).wait(PATIENCE_S)
        for close in (False, True):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    mine.submit_single_write(8, (mr, 0), (desc, 0), imm=2).wait(5)
                except ClosedError:
                    code = 0
                    if close:
                        mine.close()
                finally:
                    os._exit(code)
            assert 0 == os.waitpid(child, 0)[1]
            mine.submit_single_write(8, (mr, 0), (desc, 0), imm=1).wait(PATIENCE_S)
        assert 0 == remote(
            "e.expect_imm_count(1, 3).wait(60); _ = dict(e.stats().imms_unexpected).get(2, 0)"
        )


@pytest.mark.slow
def test_joining_and_leaving_leaves_nothing_behind(remotes) -> None:
    """A service whose peers come and go for months must not grow."""
    with engine() as mine:
        target = np.zeros(64, np.uint8)
        _, desc = mine.reg_mr(target)

        def visit() -> None:
            with engine() as guest:
                mr, _ = guest.reg_mr(np.ones(64, np.uint8))
                guest.submit_single_write(8, (mr, 0), (desc, 0), imm=1).wait(PATIENCE_S)
                mine.expect_imm_count(1, 1).wait(PATIENCE_S)

        for _ in range(10):
            visit()
        gc.collect()
        before = open_descriptors()
        mappings = len(Path("/proc/self/maps").read_text().splitlines())
        for _ in range(60):
            visit()
        gc.collect()
        mine.expect_imm_count(2, 0).wait(PATIENCE_S)

        assert open_descriptors() <= before + 12
        assert len(Path("/proc/self/maps").read_text().splitlines()) <= mappings + 40

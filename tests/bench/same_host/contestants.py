"""The contestants: each moves rows from its buffer into the other's, and notifies.

A contestant has `prepare(src, dst, nbytes)`, untimed, once for each shape; `send(src, dst,
nbytes)`, rows by offsets and one notification for all of them; `receive(rows)`, which returns when
those rows are here. Each library is imported only by its own class.
"""

from __future__ import annotations

import ctypes
import os
import time

import numpy as np

__all__ = ["CONTESTANTS"]

PATIENCE_S = 120.0


def blank(nbytes: int) -> np.ndarray:
    """Memory whose pages are there already."""
    buffer = np.empty(nbytes, np.uint8)
    buffer[:] = 1
    return buffer


class Tep:
    """tep over the local backend. Options: memory=plain|shared, driver=thread."""

    inline = False

    def __init__(self, role, link, nbytes, options) -> None:
        import tep

        self.tep = tep
        shared = options.get("memory") == "shared"
        self.buffer = tep.alloc_shared(nbytes) if shared else blank(nbytes)
        driver = tep.ThreadDriver() if options.get("driver") == "thread" else None
        driver = tep.InlineDriver() if self.inline else driver
        self.engine = tep.TransferEngine.open("local", driver=driver)
        self.mr, desc = self.engine.reg_mr(self.buffer)
        self.peer = tep.MrDesc.from_bytes(link.swap(desc.to_bytes()))
        self.about = f"tep {tep.__version__}"

    def prepare(self, src, dst, nbytes) -> None:
        self.src = self.tep.Pages(src // nbytes) if len(src) > 1 else None
        self.dst = self.tep.Pages(dst // nbytes) if len(src) > 1 else None

    def send(self, src, dst, nbytes) -> None:
        engine = self.engine
        if self.src is None:
            done = engine.submit_single_write(nbytes, (self.mr, 0), (self.peer, 0), imm=1)
        else:
            done = engine.submit_paged_writes(
                nbytes, (self.mr, self.src), (self.peer, self.dst), imm=1
            )
        done.wait(PATIENCE_S)

    def receive(self, rows) -> None:
        self.engine.expect_imm_count(1, rows).wait(PATIENCE_S)

    def close(self) -> None:
        self.engine.close()


class TepSpinning(Tep):
    """The same, spinning: this thread turns the engine itself, and looks at what it expects.

    Of a short write it does not wait for the local end before it looks for the answer, but before
    the next write.
    """

    inline = True

    def prepare(self, src, dst, nbytes) -> None:
        super().prepare(src, dst, nbytes)
        self.turn, self.sent = self.engine.driver.turn, None

    def send(self, src, dst, nbytes) -> None:
        if self.src is not None or nbytes > 64:
            super().send(src, dst, nbytes)
            return
        if self.sent is not None and not self.sent.ok:
            self.sent.wait(PATIENCE_S)
        self.sent = self.engine.submit_single_write(nbytes, (self.mr, 0), (self.peer, 0), imm=1)
        self.turn()

    def receive(self, rows) -> None:
        got = self.engine.expect_imm_count(1, rows)
        while not got.finished:
            self.turn()


class Bells:
    """Two eventfds, one for each direction, sent over the link's socket."""

    def __init__(self, link) -> None:
        import socket

        self.mine = os.eventfd(0)
        socket.send_fds(link.socket, [b"x"], [self.mine])
        self.theirs = socket.recv_fds(link.socket, 1, 1)[1][0]

    def ring(self) -> None:
        os.eventfd_write(self.theirs, 1)

    def wait(self) -> None:
        os.eventfd_read(self.mine)


class Writev:
    """A limit: process_vm_writev by ctypes, 1,024 rows a call, and an eventfd to notify."""

    def __init__(self, role, link, nbytes, options) -> None:
        self.buffer = blank(nbytes)
        self.bells = Bells(link)
        theirs = link.swap(f"{os.getpid()} {self.buffer.ctypes.data}".encode())
        self.pid, self.base = map(int, theirs.split())
        self.call = ctypes.CDLL(None, use_errno=True).process_vm_writev
        number, pointer = ctypes.c_ulong, ctypes.c_void_p
        self.call.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
        self.call.restype = ctypes.c_ssize_t
        self.about = f"Linux {os.uname().release}"

    def prepare(self, src, dst, nbytes) -> None:
        n = len(src)
        self.here, self.there = np.empty((n, 2), np.uint64), np.empty((n, 2), np.uint64)

    def send(self, src, dst, nbytes) -> None:
        here, there = self.here, self.there
        here[:, 0] = src + self.buffer.ctypes.data
        there[:, 0] = dst + self.base
        here[:, 1] = there[:, 1] = nbytes
        for at in range(0, len(src), 1024):
            n = min(1024, len(src) - at)
            pointers = here[at:].ctypes.data, n, there[at:].ctypes.data, n
            moved = self.call(self.pid, *pointers, 0)
            if moved != n * nbytes:
                raise OSError(ctypes.get_errno(), f"process_vm_writev moved {moved}")
        self.bells.ring()

    def receive(self, rows) -> None:
        self.bells.wait()

    def close(self) -> None:
        pass


class Memcpy:
    """The limit of limits: numpy copies between two buffers of the sender; nobody is notified."""

    def __init__(self, role, link, nbytes, options) -> None:
        self.buffer = blank(nbytes)
        self.role = role
        self.target = blank(nbytes) if role == "sender" else self.buffer
        self.bells = Bells(link)
        self.about = f"numpy {np.__version__}"

    def prepare(self, src, dst, nbytes) -> None:
        pass

    def send(self, src, dst, nbytes) -> None:
        n = len(src)
        to = self.target[: n * nbytes].reshape(n, nbytes)
        of = self.buffer[: n * nbytes].reshape(n, nbytes)
        if n == 1:
            np.copyto(to, of)
        else:
            to[dst // nbytes] = of
        self.bells.ring()

    def receive(self, rows) -> None:
        self.bells.wait()

    def close(self) -> None:
        pass


class Nixl:
    """NIXL over UCX at its best settings here: no progress thread, no peer error handling.

    Option: defaults=1 leaves NIXL's own settings alone.
    """

    def __init__(self, role, link, nbytes, options) -> None:
        import importlib.metadata

        from nixl_cu12._api import nixl_agent, nixl_agent_config

        defaults = options.get("defaults") == "1"
        self.buffer = blank(nbytes)
        config = nixl_agent_config(backends=[], enable_prog_thread=defaults)
        self.agent = nixl_agent(role, config)
        settings = dict(self.agent.get_plugin_params("UCX"))
        if not defaults:
            settings["ucx_error_handling_mode"] = "none"
        self.agent.create_backend("UCX", settings)
        self.base = self.buffer.ctypes.data
        self.registered = self.agent.register_memory([(self.base, nbytes, 0, "")], "DRAM")
        self.peer_base = int.from_bytes(link.swap(self.base.to_bytes(8, "little")), "little")
        name = self.agent.add_remote_agent(link.swap(self.agent.get_agent_metadata()))
        self.peer = name.decode() if isinstance(name, bytes) else name
        self.lists: dict[tuple[int, int], tuple[object, object, list[int]]] = {}
        self.sent = self.awaited = 0
        self.seen: set[bytes] = set()
        self.about = f"nixl-cu12 {importlib.metadata.version('nixl-cu12')}"
        link.swap()

    def prepare(self, src, dst, nbytes) -> None:
        """Its descriptor lists are made once, as its API intends."""
        if (len(src), nbytes) not in self.lists:
            mine = [(self.base + at, nbytes, 0) for at in src.tolist()]
            theirs = [(self.peer_base + at, nbytes, 0) for at in dst.tolist()]
            self.lists[len(src), nbytes] = (
                self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", mine, "DRAM"),
                self.agent.prep_xfer_dlist(self.peer, theirs, "DRAM"),
                list(range(len(src))),
            )

    def send(self, src, dst, nbytes) -> None:
        mine, theirs, order = self.lists[len(src), nbytes]
        self.sent += 1
        note = b"%d" % self.sent
        handle = self.agent.make_prepped_xfer("WRITE", mine, order, theirs, order, note)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL: {state}")
        self.agent.release_xfer_handle(handle)

    def receive(self, rows) -> None:
        self.awaited += 1
        note = b"%d" % self.awaited
        until = time.monotonic() + PATIENCE_S
        while note not in self.seen:
            for notes in self.agent.get_new_notifs().values():
                self.seen.update(notes)
            if time.monotonic() > until:
                raise TimeoutError("NIXL: no notification")
        self.seen.discard(note)

    def close(self) -> None:
        pass


class Ucxx:
    """ucxx has no one-sided put in Python: a message a row, sent and received by tag."""

    def __init__(self, role, link, nbytes, options) -> None:
        import importlib.metadata

        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array

        self.ucx, self.array = libucxx, Array
        self.buffer = blank(nbytes)
        self.context = libucxx.UCXContext(feature_flags=(libucxx.Feature.TAG,))
        self.worker = libucxx.UCXWorker(self.context)
        address = libucxx.UCXAddress.create_from_buffer(link.swap(self.worker.address.tobytes()))
        self.endpoint = libucxx.UCXEndpoint.create_from_worker_address(
            self.worker, address, endpoint_error_handling=False
        )
        self.tag, self.mask = libucxx.UCXXTag(7), libucxx.UCXXTagMaskFull
        self.shape = None
        self.about = f"ucxx-cu12 {importlib.metadata.version('ucxx-cu12')}"
        link.swap()

    def prepare(self, src, dst, nbytes) -> None:
        """Here the receiver is told the plan beforehand, which flatters it."""
        self.shape = dst, nbytes

    def _finish(self, requests) -> None:
        progress = self.worker.progress
        for request in requests:
            while not request.completed:
                progress()
            request.check_error()

    def send(self, src, dst, nbytes) -> None:
        put, rows = self.endpoint.tag_send, self.buffer
        self._finish([put(self.array(rows[at : at + nbytes]), tag=self.tag) for at in src.tolist()])

    def receive(self, rows) -> None:
        dst, nbytes = self.shape
        take, into = self.endpoint.tag_recv, self.buffer
        self._finish(
            [
                take(self.array(into[at : at + nbytes]), tag=self.tag, tag_mask=self.mask)
                for at in dst.tolist()
            ]
        )

    def close(self) -> None:
        pass


class Mooncake:
    """Mooncake's transfer engine over tcp; 1,024 rows a batch: it refuses 4,096."""

    def __init__(self, role, link, nbytes, options) -> None:
        import importlib.metadata

        from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode

        self.notify, self.write = TransferNotify, TransferOpcode.Write
        self.buffer = blank(nbytes)
        self.base = self.buffer.ctypes.data
        self.engine = TransferEngine()
        self._expect_zero(self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
        self._expect_zero(self.engine.register_memory(self.base, nbytes))
        mine = f"127.0.0.1:{self.engine.get_rpc_port()} {self.base}"
        self.peer, base = link.swap(mine.encode()).decode().split()
        self.peer_base = int(base)
        self.sent = self.awaited = 0
        self.seen: set[str] = set()
        name = "mooncake-transfer-engine-non-cuda"
        self.about = f"{name} {importlib.metadata.version(name)}"
        link.swap()

    def _expect_zero(self, status) -> None:
        if status != 0:
            raise RuntimeError(f"Mooncake: status {status}")

    def prepare(self, src, dst, nbytes) -> None:
        pass

    def send(self, src, dst, nbytes) -> None:
        self.sent += 1
        mine, theirs = (src + self.base).tolist(), (dst + self.peer_base).tolist()
        for at in range(0, len(mine), 1024):
            here, there = mine[at : at + 1024], theirs[at : at + 1024]
            last = at + 1024 >= len(mine)
            note = self.notify("bench", str(self.sent)) if last else None
            self._expect_zero(
                self.engine.batch_transfer_sync(
                    self.peer, here, there, [nbytes] * len(here), self.write, note
                )
            )

    def receive(self, rows) -> None:
        self.awaited += 1
        until = time.monotonic() + PATIENCE_S
        while str(self.awaited) not in self.seen:
            self.seen.update(note.msg for note in self.engine.get_notifies())
            if time.monotonic() > until:
                raise TimeoutError("Mooncake: no notification")
        self.seen.discard(str(self.awaited))

    def close(self) -> None:
        pass


class Mpi:
    """MPI's one-sided writes: a put a row, a flush, and a message to notify; under its mpiexec."""

    def __init__(self, role, link, nbytes, options) -> None:
        from mpi4py import MPI

        self.comm, self.byte = MPI.COMM_WORLD, MPI.BYTE
        self.peer = 1 - self.comm.rank
        self.buffer = blank(nbytes)
        self.window = MPI.Win.Create(self.buffer, 1, comm=self.comm)
        self.window.Lock_all()
        self.note = np.zeros(1, np.uint8)
        self.about = MPI.Get_library_version().split(",")[0].splitlines()[0]
        link.swap()

    def prepare(self, src, dst, nbytes) -> None:
        pass

    def send(self, src, dst, nbytes) -> None:
        put, rows = self.window.Put, self.buffer
        for here, there in zip(src.tolist(), dst.tolist(), strict=True):
            put(rows[here : here + nbytes], self.peer, (there, nbytes, self.byte))
        self.window.Flush(self.peer)
        self.comm.Send(self.note, self.peer)

    def receive(self, rows) -> None:
        self.comm.Recv(self.note, self.peer)
        self.window.Sync()

    def close(self) -> None:
        self.window.Unlock_all()
        self.window.Free()


CONTESTANTS = {
    "tep": Tep,
    "tep spinning": TepSpinning,
    "writev": Writev,
    "memcpy": Memcpy,
    "nixl": Nixl,
    "ucxx": Ucxx,
    "mooncake": Mooncake,
    "mpi": Mpi,
}

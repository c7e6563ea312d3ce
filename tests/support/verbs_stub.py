"""A libibverbs without NICs: tests/verbs_stub/stub.c, built with the C compiler that is here.

It carries writes, messages and datagrams within one process, at the same table of operations as a
real provider. For tests of the verbs backend and for tests/bench; no test lives here.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

from tep.backends.ffi.ibverbs import C
from tep.host.folders import make_own

_INT = ctypes.c_int
_COUNTS: Final = ("overruns", "datagrams", "datagrams_lost", "commands", "sq_bytes")
_SOURCE: Final = Path(__file__).parents[1] / "verbs_stub" / "stub.c"


class Knob:
    """The settings of stub_set, by number; same as in stub.c."""

    SINK = 0  # take and complete writes, deliver nothing
    NO_COPY = 1  # deliver immediates, but no bytes
    DROP_DATAGRAMS = 2  # lose the first of every so many
    FAIL_POST = 3  # errno that a request is refused with, once
    FAIL_AFTER = 4  # how many requests are taken before
    CUT_LINK = 5  # the device, from 1, whose port is down
    LOSE_ACK = 6  # which row or message from now on arrives, and is said not to
    ON_OVERRUN = 7  # 0: an overrun of a completion queue ends the process; 1: it is an event
    POLL_ERROR = 8  # the device, from 1, whose completion queues cannot be read
    PLAIN_QPS = 9  # devices opened from now on have no ibv_create_qp_ex
    NO_READS = 10  # devices say that they cannot read
    HOLD_AH = 11  # ibv_create_ah waits for as long as this stands, at most 5 s, and then fails
    LATE_FORK_INIT = 12  # ibv_fork_init says that memory was registered before

    COUNT = 13


class Seen(ctypes.Structure):
    """One work request as the stub read it."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("wr_id", "raddr", "addr", "qp")),
        *(
            (name, ctypes.c_uint32)
            for name in ("num_sge", "opcode", "flags", "imm_be", "rkey", "length", "lkey", "last")
        ),
    )


class Stub:
    """The built stub, with the calls that only it has."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.lib = ctypes.CDLL(path)
        self.lib.stub_set.argtypes = (ctypes.c_int, ctypes.c_long)
        self.lib.stub_set.restype = ctypes.c_long
        for name in ("posts", "rows", "nseen", *_COUNTS):
            getattr(self.lib, f"stub_{name}").restype = ctypes.c_uint64
        self.lib.stub_device.argtypes = (_INT, _INT, ctypes.c_uint64, ctypes.c_char_p)
        self.lib.stub_event.argtypes = (_INT, _INT, ctypes.c_void_p)
        self.lib.stub_seen.argtypes = (ctypes.c_uint64,)
        self.lib.stub_seen.restype = ctypes.POINTER(Seen)

    def set(self, knob: int, value: int) -> None:
        """Turn a knob."""
        self.lib.stub_set(knob, value)

    def reset(self) -> None:
        """Turn all knobs to 0, and make all devices Ethernet ones again."""
        for knob in range(Knob.COUNT):
            self.set(knob, 0)
        self.lib.stub_reset_devices()

    def device(self, number: int, link: int, subnet: int = 0, folder: str = "") -> None:
        """Make stub<number> a device of another link layer, InfiniBand subnet and sysfs folder."""
        self.lib.stub_device(number, link, subnet, folder.encode())

    def pkeys(self, number: int, *pkeys: int) -> None:
        """Set the partition keys of stub<number>, up to four."""
        for index, pkey in enumerate(pkeys):
            self.lib.stub_pkey(number, index, pkey)

    def count(self, name: str) -> int:
        """So far: "overruns", "datagrams", "datagrams_lost", "commands" about queue pairs; and
        "sq_bytes", what the send queues that exist take.
        """
        assert name in _COUNTS, name
        return int(getattr(self.lib, f"stub_{name}")())

    def posts(self) -> int:
        """Calls of post_send so far."""
        return int(self.lib.stub_posts())

    def rows(self) -> int:
        """Work requests taken with Knob.SINK so far."""
        return int(self.lib.stub_rows())

    def seen(self) -> int:
        """Work requests read so far, other than datagrams."""
        return int(self.lib.stub_nseen())

    def since(self, mark: int) -> list[Seen]:
        """The work requests read since seen() was `mark`, 4,096 at the most."""
        return [self.lib.stub_seen(k).contents for k in range(mark, self.seen())]

    def inject_imms(self, qpn: int, count: int, imm: int, step: int = 0) -> None:
        """Let immediates arrive at a queue pair: imm, imm + step, ..."""
        short = self.lib.stub_inject_imms(qpn, count, imm, step)
        assert not short, f"fewer than {count} receives are posted"

    def event(self, context: int, kind: int, qp: int = 0) -> None:
        """Let the device of a context report an event, of a queue pair perhaps."""
        self.lib.stub_event(C.ibv_context.from_address(context).async_fd, kind, qp)

    def live(self) -> tuple[int, int]:
        """Queue pairs and regions that exist."""
        return int(self.lib.stub_live_qps()), int(self.lib.stub_live_mrs())


@cache
def build() -> Stub:
    """Build the stub, once for each version of its source, and load it.

    Raises:
        LookupError: no C compiler, or no header of libibverbs; says so.
        UsageError: the folder for it belongs to somebody else.
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise LookupError("no C compiler; apt install gcc")
    source = _SOURCE.read_bytes()
    digest = hashlib.sha256(source).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"tep-verbs-stub-{os.getuid()}-{digest}")
    target = folder / "libibverbs_stub.so"
    make_own(folder, "set TMPDIR to a folder of your own")  # what lies in it is run
    if not target.exists():
        part = folder / f"part-{os.getpid()}.so"
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(part), str(_SOURCE), "-lpthread"]
        # The words are made above.
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if re.search(r"fatal error: .*infiniband/verbs\.h", done.stderr):
            raise LookupError("no <infiniband/verbs.h>; apt install libibverbs-dev")
        assert done.returncode == 0, f"the stub does not compile: {done.stderr}"
        part.replace(target)
    return Stub(str(target))

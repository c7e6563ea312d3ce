"""The same calls on Mooncake (tcp) and on tep: the same answers, but for those in BETTER.

The last line on stdout is a JSON object with `ok`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import mooncake.engine as theirs
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tep.compat import mooncake as ours

NBYTES = 1 << 16
WAIT_S = 20.0
NOBODY = "127.0.0.1:1"
BETTER = {"register twice": "0; Mooncake refuses memory that lies in other memory"}


class Half:
    """An engine, its memory, and where others find it."""

    def __init__(self, kind: ModuleType, seed: int) -> None:
        self.e = kind.TransferEngine()
        self.statuses = [self.e.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")]
        self.name = f"127.0.0.1:{self.e.get_rpc_port()}"
        self.memory = np.random.default_rng(seed).integers(0, 256, NBYTES, np.uint8)
        self.at = self.memory.ctypes.data
        self.statuses.append(self.e.register_memory(self.at, NBYTES))


def until_over(a: Half, batch: int) -> int:
    end_s = time.monotonic() + WAIT_S
    while (status := a.e.transfer_check_status(batch)) == 0 and time.monotonic() < end_s:
        pass
    return int(status)


def heard(b: Half) -> list[Any]:
    end_s = time.monotonic() + WAIT_S
    while not (found := b.e.get_notifies()) and time.monotonic() < end_s:
        pass
    return [(one.name, one.msg) for one in found]


def answers(kind: ModuleType) -> dict[str, Any]:
    """Make the calls; errors by their sign alone, since their numbers are internal."""
    a, b = Half(kind, 1), Half(kind, 2)
    e, at, to, where = a.e, a.at, b.at, b.name
    managed = b.e.allocate_managed_buffer(4096)
    write, notify = kind.TransferOpcode.Write, kind.TransferNotify("bench", "7")
    found = {
        "open": a.statuses + b.statuses,
        "first": e.get_first_buffer_address(where) == to,
        "own first": e.get_first_buffer_address(a.name) == at,
        "write": e.transfer_sync_write(where, at, to + 512, 256),
        "written": bool((a.memory[:256] == b.memory[512:768]).all()),
        "read": e.transfer_sync_read(where, at + 4096, to, 128),
        "was read": bool((a.memory[4096:4224] == b.memory[:128]).all()),
        "batch": e.batch_transfer_sync_write(where, [at, at + 100], [to, to + 100], [10, 10]),
        "submit": until_over(a, e.transfer_submit_write(where, at, to, 64)),
        "async": e.get_batch_transfer_status(
            [e.batch_transfer_async_write(where, [at], [to], [64])]
        ),
        "notify": e.batch_transfer_sync(where, [at], [to], [64], write, notify),
        "notified": heard(b),
        "probe": e.send_probe(where),
        "probe nobody": e.send_probe(NOBODY) != 0,
        "write to nobody": e.transfer_sync_write(NOBODY, at, to, 8),
        "outside": e.transfer_sync_write(where, at, to + NBYTES, 8),
        "lists that differ": e.batch_transfer_sync_write(where, [at, at], [to], [8]),
        "no bytes": e.transfer_sync_write(where, at, to, 0),
        "no pieces": e.batch_transfer_sync_write(where, [], [], []),
        "unknown memory": e.unregister_memory(1) != 0,
        "register twice": e.batch_register_memory([at + 8192], [64]),
        "copy in": b.e.write_bytes_to_buffer(managed, b"hello", 5),
        "read later memory": e.transfer_sync_read(where, at, managed, 5),
        "copy out": e.read_bytes_from_buffer(at, 5).decode(),
        "free": b.e.free_managed_buffer(managed, 4096),
        "unregister": e.unregister_memory(at),
        "no etcd": kind.TransferEngine().initialize("h:1", "etcd://127.0.0.1:1", "tcp", "") != 0,
    }
    return {name: json.loads(json.dumps(value)) for name, value in found.items()}


def main() -> int:
    """Compare, and print the result."""
    os.environ.setdefault("TEP_NIXL_BACKEND", "local")
    real, tep = answers(theirs), answers(ours)
    differ = {name: [real[name], tep[name]] for name in real if real[name] != tep[name]}
    ok = differ.keys() <= BETTER.keys()
    found = {"ok": ok, "calls": len(real), "differ": differ}
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()
    os._exit(0 if ok else 1)  # Mooncake's threads do not end


if __name__ == "__main__":
    sys.exit(main())

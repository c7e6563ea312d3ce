"""One rank of test_rendezvous.py: an engine, a ring of paged writes, and a barrier. Not a test.

Its argument is the descriptor of the socket that rank 0 listens on. It prints what it has seen.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

import numpy as np

import tep
from tep.base.errors import RendezvousError

PAGE_BYTES, NPAGES = 4096, 64


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(listener: int, victim: int) -> None:
    rank = int(os.environ["RANK"])
    sock = socket.socket(fileno=listener) if rank == 0 else None
    engine = tep.TransferEngine.open("libfabric", provider="tcp", nics=["127.0.0.1"])
    with engine, tep.rendezvous.join(listener=sock, timeout_s=60) as ranks:
        assert rank == ranks.rank
        source = np.random.default_rng(rank).integers(0, 256, NPAGES * PAGE_BYTES, np.uint8)
        target = np.zeros_like(source)
        mr, _ = engine.reg_mr(source, access=tep.Access.SOURCE)
        _, desc = engine.reg_mr(target)
        descs = [tep.MrDesc.from_bytes(raw) for raw in ranks.all_gather(desc.to_bytes())]
        after, before = (rank + 1) % ranks.size, (rank - 1) % ranks.size
        order = np.random.default_rng(100 + rank).permutation(NPAGES)
        got = engine.expect_imm_count(1000 + before, NPAGES)
        pages = (mr, tep.Pages(order)), (descs[after], tep.Pages(order))
        sent = engine.submit_paged_writes(PAGE_BYTES, *pages, imm=1000 + rank)
        got.wait(60)
        sent.wait(60)
        expected = np.random.default_rng(before).integers(0, 256, NPAGES * PAGE_BYTES, np.uint8)
        assert (expected == target).all()
        ranks.barrier(timeout_s=60)
        say(f"rank {rank} has all of rank {before}")
        if victim == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        if victim >= 0:
            try:
                ranks.barrier(timeout_s=60)
            except RendezvousError as error:
                say(str(error))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

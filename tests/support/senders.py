"""Two senders whose transfers are cut off, and their receiver, in the simulation. Not a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import tep
from tep.backends.base import Access
from tep.base.api import EngineOptions, Pages
from tep.engine import TransferEngine
from tep.sim.cluster import Cluster
from tep.sim.faults import Chaos

PAGE, PAGES = 16, 40


class World:
    """Senders a and b, and a receiver c with a region for both."""

    def __init__(self, cluster: Cluster, *, readable: bool = False) -> None:
        self.cluster = cluster
        self.a, self.b, self.c = cluster.engines
        self.memory = np.zeros(2 * PAGE * PAGES, np.uint8)
        access = Access.SOURCE_AND_TARGET | (Access.READABLE if readable else Access(0))
        self.mr, self.desc = self.c.reg_mr(self.memory, access=access)
        self.mrs = {e.name: e.reg_mr(np.ones(PAGE * PAGES, np.uint8))[0] for e in (self.a, self.b)}

    def write(self, engine: TransferEngine, imm: object = 7, **kw: object) -> tep.Transfer:
        """Write all pages; a NIC takes a few at a time."""
        mr = self.mrs[engine.name]
        pages = Pages(range(PAGES))
        return engine.submit_paged_writes(PAGE, (mr, pages), (self.desc, pages), imm, **kw)

    def cut_off(self, sent: tep.Transfer) -> int:
        """Cancel a transfer in the middle; return how many of its rows arrived."""
        self.cluster.env.run_until(lambda: 0 < sent.stats().rows_back < PAGES // 2)
        sent.cancel()
        with pytest.raises(tep.Cancelled):
            sent.wait()
        return sent.stats().rows_back

    def rest(self) -> None:
        """Let all happen that is going to happen."""
        self.cluster.env.run()


@contextmanager
def world(*, readable: bool = False, **options: object) -> Iterator[World]:
    chaos = Chaos(sq_depth=2)
    with Cluster(3, 2, chaos=chaos, seed=3, options=EngineOptions(**options)) as cluster:
        yield World(cluster, readable=readable)


__all__ = ["PAGE", "PAGES", "World", "world"]

"""Two engines, one of which leases memory to the other. Not a test."""

from __future__ import annotations

import numpy as np

import tep
from tep.api import EngineOptions
from tep.backends.base import Kind, Status
from tep.sim.chaos_nic import ChaosNic
from tep.sim.cluster import Cluster
from tep.sim.faults import Chaos
from tep.wire import Lease

BYTES = 1024


class Pair:
    """An owner a and a writer b on a calm fabric, a region of a, a source of b."""

    def __init__(
        self, nics: int = 2, options: EngineOptions = EngineOptions(), **knobs: object
    ) -> None:
        self.cluster = Cluster(2, nics, chaos=Chaos.calm(**knobs), options=options)
        self.a, self.b = self.cluster.engines
        self.memory = np.zeros(BYTES, np.uint8)
        self.mr, self.desc = self.a.reg_mr(self.memory)
        self.src, _ = self.b.reg_mr(np.full(BYTES, 7, np.uint8))

    def lease(self, for_s: float = 1.0, **kw: int) -> tuple[tep.Grant, Lease]:
        """Grant b a lease, and have it travel."""
        grant = self.a.lease(self.mr, self.b.main_address, for_s=for_s, **kw)
        return grant, Lease.from_bytes(grant.lease.to_bytes())

    def write(self, lease: Lease, nbytes: int = 8, at: int = 0) -> tep.Transfer:
        """Write from b under a lease."""
        return self.b.submit_single_write(nbytes, (self.src, 0), (lease, at))

    def pass_s(self, seconds: float) -> None:
        """Let time pass."""
        end_us = self.cluster.now_us + seconds * 1e6
        self.cluster.at(end_us, lambda: None)
        self.cluster.env.run_until(lambda: self.cluster.now_us >= end_us)


def cannot_fence(self: ChaosNic, _: bytes, ctx: int) -> None:
    """Stand in for a NIC that has no fence."""
    self._cq.push((int(Kind.FENCED), int(Status.PROVIDER), 1, 0, 0, ctx, 0))


__all__ = ["BYTES", "Pair", "cannot_fence"]

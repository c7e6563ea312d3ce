"""Two engines on a calm fabric; one reports on the other. Not a test."""

from __future__ import annotations

import numpy as np

from tep.base.api import EngineOptions, Pages
from tep.sim.cluster import Cluster
from tep.sim.faults import Chaos

US = 1e-6
BEAT, LOST = 10 * US, 40 * US
QUICK = EngineOptions(probe_first_s=20 * US, probe_max_s=160 * US)
CALM = Chaos.calm(dead_after_ps=3_000_000)


def pair(nics=2, chaos: Chaos = CALM, **kw):
    """A calm cluster of two, and the list that engine a's events go to."""
    cluster = Cluster(2, nics, chaos=chaos, options=kw.pop("options", QUICK))
    told = []
    cluster.engines[0].on_peer(lambda e: told.append((cluster.env.now / 1e12, e.kind, e.nic)))
    return cluster, told


def pass_time(cluster, us: float) -> None:
    cluster.env.run(until=cluster.env.now + round(us * 1e6))


def kinds(told):
    return [kind for _, kind, _ in told]


def write(engine, regions, npages=8, imm=7, **kw):
    """A paged write of small pages."""
    pages = Pages(range(npages))
    return engine.submit_paged_writes(64, (regions[0], pages), (regions[1], pages), imm, **kw)


def regions_of(a, b):
    mr, _ = a.reg_mr(np.ones(4096, np.uint8))
    _, desc = b.reg_mr(np.zeros(4096, np.uint8))
    return mr, desc


__all__ = [
    "BEAT",
    "CALM",
    "LOST",
    "QUICK",
    "US",
    "kinds",
    "pair",
    "pass_time",
    "regions_of",
    "write",
]

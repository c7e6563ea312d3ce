"""Simulated faults under NIXL's interface: TEP_NIXL_BACKEND=chaos, for the agents of one process.

Each new agent is the next node of one simulated cluster. Time is simulated: a call that polls lets
2 us of it pass, a call that waits as much as it needs, and nothing else does. So a program of one
thread that makes the same calls has the same run for a seed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from tep import TransferEngine, UsageError
from tep.compat.engines import options_of
from tep.sim import Cluster

__all__ = ["Nodes", "nodes", "using"]

_TURN_PS: Final = 2_000_000
_NODES: Final = 8


class Nodes:
    """The nodes of a cluster, given to agents as they are opened."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._free = iter(tuple(cluster.engines))

    def take(self) -> TransferEngine:
        engine = next(self._free, None)
        if engine is None:
            raise UsageError(
                f"{len(self.cluster.engines)} agents were opened on {self.cluster!r}; give it more "
                "nodes: TEP_NIXL_OPTIONS='{\"nodes\": N}'"
            )
        return engine

    def turn(self) -> None:
        env = self.cluster.env
        end_ps = env.now + _TURN_PS
        env.call_at(end_ps, lambda _: None)
        env.run_until(lambda: False, end_ps)


_used: list[Nodes] = []


def nodes() -> Nodes:
    """Return the nodes in use; the first call makes them, from TEP_NIXL_OPTIONS (seed, nodes)."""
    if not _used:
        _used.append(Nodes(Cluster(**({"nodes": _NODES} | options_of("TEP_NIXL")))))
    return _used[-1]


@contextlib.contextmanager
def using(cluster: Cluster) -> Iterator[None]:
    """Give the agents that are opened meanwhile the nodes of this cluster."""
    _used.append(Nodes(cluster))
    try:
        yield
    finally:
        _used.pop()

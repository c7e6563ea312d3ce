"""The simulated backend: hands the NICs of a simulated node to an engine. No model lives here.

A simulated NIC needs a fabric and a clock that its peers share, so there is nothing to open by name
alone: `tep.sim.Cluster` makes fabric, nodes and engines; this door is for who made the fabric.
"""

from __future__ import annotations

from tep.backends.base import Opened
from tep.base.checks import nearest
from tep.base.errors import BackendUnavailable, UsageError

__all__ = ["open_domains", "probe"]


def open_domains(**options: object) -> Opened:
    """Open the NICs of one simulated node.

    Args:
        **options: node: what a fabric's `node()` returned. env: that fabric's clock.

    Raises:
        UsageError: no node, no clock, or an option besides them.
    """
    for name in sorted(options.keys() - {"node", "env"}):
        near = nearest(name, ("node", "env"))
        raise UsageError(f"sim: no option {name!r}; there are: node, env{near}")
    from tep.sim.clock import FabricEnv
    from tep.sim.driver import SimDriver, SimNode

    env, node = options.get("env"), options.get("node")
    if not isinstance(env, FabricEnv) or not isinstance(node, SimNode):
        raise UsageError(
            f"backend 'sim' needs node= of a fabric and env=, its clock, not {node!r} and {env!r}; "
            "tep.sim.Cluster makes fabric, clock, nodes and engines in one go"
        )
    return Opened(tuple(node.domains), node.epoch, node.name, SimDriver(env, node))


def probe() -> str:
    """Say which simulator is here. Raises BackendUnavailable without simpy."""
    try:
        import simpy
    except ImportError as error:
        raise BackendUnavailable("no simulated fabric", (("import simpy", str(error)),)) from error
    return f"simpy {simpy.__version__}"

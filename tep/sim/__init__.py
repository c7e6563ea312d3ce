"""The simulated fabric: engines on a simulated clock, over a hostile or a calibrated network.

`Cluster` opens engines, `run` runs coroutines in simulated time. Names only; each is imported from
its room when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tep.sim.chaos import ChaosFabric
    from tep.sim.clock import FabricEnv
    from tep.sim.cluster import Cluster
    from tep.sim.driver import SimDriver
    from tep.sim.faults import Chaos, Faults, KillNic, Restart, Revoke
    from tep.sim.loop import current_env, run
    from tep.sim.profile import profile_names as profiles
    from tep.sim.timing import TimingFabric
    from tep.sim.trace import Trace

__all__ = [
    "Chaos",
    "ChaosFabric",
    "Cluster",
    "FabricEnv",
    "Faults",
    "KillNic",
    "Restart",
    "Revoke",
    "SimDriver",
    "TimingFabric",
    "Trace",
    "current_env",
    "profiles",
    "run",
]

_ROOMS = {
    "Chaos": "faults",
    "ChaosFabric": "chaos",
    "Cluster": "cluster",
    "FabricEnv": "clock",
    "Faults": "faults",
    "KillNic": "faults",
    "Restart": "faults",
    "Revoke": "faults",
    "SimDriver": "driver",
    "TimingFabric": "timing",
    "Trace": "trace",
    "current_env": "loop",
    "profiles": "profile",
    "run": "loop",
}
_NAMES = {"profiles": "profile_names"}

if not TYPE_CHECKING:  # a checker that saw __getattr__ would believe in every misspelt name

    def __getattr__(name: str) -> object:
        """Import a public name from its room, once; afterwards it is an ordinary attribute."""
        room = _ROOMS.get(name)
        if room is None:
            raise AttributeError(f"module 'tep.sim' has no attribute {name!r}")
        module = importlib.import_module(f"tep.sim.{room}")
        value = globals()[name] = getattr(module, _NAMES.get(name, name))
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

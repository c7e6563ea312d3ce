"""The simulated fabric: engines on a simulated clock, over a hostile or a calibrated network.

`Cluster` opens engines, `run` runs coroutines in simulated time. Names only; each is imported from
its room when it is first used.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tep.sim.chaos import ChaosFabric
    from tep.sim.clock import FabricEnv
    from tep.sim.cluster import Cluster
    from tep.sim.driver import SimDriver, SimNode
    from tep.sim.faults import (
        Chaos,
        Clog,
        Cut,
        Drift,
        Fault,
        Faults,
        KillNic,
        Mute,
        Pause,
        Restart,
        Revoke,
        Slow,
        Swizzle,
    )
    from tep.sim.loop import current_env, run
    from tep.sim.profile import Profile, load_profile
    from tep.sim.profile import profile_names as profiles
    from tep.sim.programs import Incarnation
    from tep.sim.questions import compare, fault_cost, transfer_time
    from tep.sim.row_log import RowLog
    from tep.sim.sweeps import Table, doubts, interval, sweep
    from tep.sim.timing import TimingFabric

__all__ = [
    "Chaos", "ChaosFabric", "Clog", "Cluster", "Cut", "Drift", "FabricEnv", "Fault", "Faults",
    "Incarnation", "KillNic", "Mute", "Pause", "Profile", "Restart", "Revoke", "RowLog",
    "SimDriver", "SimNode", "Slow", "Swizzle", "Table", "TimingFabric", "compare", "current_env",
    "doubts", "fault_cost", "interval", "load_profile", "profiles", "run", "sweep", "transfer_time",
]  # fmt: skip

_ROOMS = {
    "chaos": ("ChaosFabric",),
    "clock": ("FabricEnv",),
    "cluster": ("Cluster",),
    "driver": ("SimDriver", "SimNode"),
    "faults": (
        *("Chaos", "Clog", "Cut", "Drift", "Fault", "Faults", "KillNic", "Mute", "Pause"),
        *("Restart", "Revoke", "Slow", "Swizzle"),
    ),
    "loop": ("current_env", "run"),
    "profile": ("Profile", "load_profile", "profiles"),
    "programs": ("Incarnation",),
    "questions": ("compare", "fault_cost", "transfer_time"),
    "row_log": ("RowLog",),
    "sweeps": ("Table", "doubts", "interval", "sweep"),
    "timing": ("TimingFabric",),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}
_NAMES = {"profiles": "profile_names"}

_log = logging.getLogger("tep.sim")
if _log.level == logging.NOTSET:
    # Faults of a simulation are its purpose: they are logged for who asks, by setLevel("INFO").
    _log.setLevel(logging.ERROR)

if not TYPE_CHECKING:  # a checker that saw __getattr__ would believe in every misspelt name

    def __getattr__(name: str) -> object:
        """Import a public name from its room, once; afterwards it is an ordinary attribute."""
        room = _ROOM_OF.get(name)
        if room is None:
            raise AttributeError(f"module 'tep.sim' has no attribute {name!r}")
        module = importlib.import_module(f"tep.sim.{room}")
        value = globals()[name] = getattr(module, _NAMES.get(name, name))
        return value


def __dir__() -> list[str]:
    return sorted(__all__)

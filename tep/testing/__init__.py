"""Shipped to users: the contract suite for backends, and what stands on it.

`tep.testing.contract` is the door for authors of backends; `run_scenario` and `scenarios` that for
whoever changes an engine. Each name is imported from its room when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tep.sim.faults import Chaos, KillNic, Restart, Revoke
    from tep.testing.contract import DomainContract
    from tep.testing.oracle import Outcome, replay, run_scenario
    from tep.testing.scenario import Scenario, TransferSpec
    from tep.testing.stage import Violation
    from tep.testing.strategies import chaos, scenarios, transfers
    from tep.testing.world import Ability, Node, OpenWorld, World

__all__ = [
    "Ability",
    "Chaos",
    "DomainContract",
    "KillNic",
    "Node",
    "OpenWorld",
    "Outcome",
    "Restart",
    "Revoke",
    "Scenario",
    "TransferSpec",
    "Violation",
    "World",
    "chaos",
    "replay",
    "run_scenario",
    "scenarios",
    "transfers",
]

_ROOMS = {
    "tep.sim.faults": ("Chaos", "KillNic", "Restart", "Revoke"),
    "tep.testing.contract": ("DomainContract",),
    "tep.testing.oracle": ("Outcome", "replay", "run_scenario"),
    "tep.testing.scenario": ("Scenario", "TransferSpec"),
    "tep.testing.stage": ("Violation",),
    "tep.testing.strategies": ("chaos", "scenarios", "transfers"),
    "tep.testing.world": ("Ability", "Node", "OpenWorld", "World"),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

if "pytest" in sys.modules:
    # Failed assertions of the suite should show their values, as those of a test file do. It has to
    # be said before these rooms are imported, and costs nothing where no test runs.
    sys.modules["pytest"].register_assert_rewrite(
        "tep.testing.clauses_engine",
        "tep.testing.clauses_errors",
        "tep.testing.clauses_imms",
        "tep.testing.clauses_life",
        "tep.testing.clauses_messages",
        "tep.testing.clauses_rows",
        "tep.testing.net",
    )

if not TYPE_CHECKING:  # a checker that saw __getattr__ would believe in every misspelt name

    def __getattr__(name: str) -> object:
        """Import a public name from its room, once; afterwards it is an ordinary attribute."""
        room = _ROOM_OF.get(name)
        if room is None:
            raise AttributeError(f"module 'tep.testing' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(room), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

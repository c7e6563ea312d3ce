"""Shipped to users: hostile fabrics for your protocols, and the contract suite for backends.

Three doors. `run`, `scenarios`, `hunt` and `shrink` are for whoever has a protocol on top of tep:

    from hypothesis import given
    from tep.testing import run, scenarios

    @given(scenarios(nodes=3, nics=(1, 4), faults="all"))
    def test_my_protocol(s):
        run(my_protocol, s)          # async def my_protocol(cluster): ...

As a pytest plugin there is a fixture, `tep_cluster`, with --tep-seed, --tep-runs and --tep-faults;
see `tep.testing.plugin`. `tep.testing.contract` is the door for authors of backends. The proof of
the engine itself, its drawn world and oracle, is in the sources: tests/world. Each name is imported
from its room when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from tep.base.distribution import need

if TYPE_CHECKING:
    from tep.testing.case import Case, Violation, scenarios
    from tep.testing.hunting import Ran, Tried, hunt, run, shrink, story
    from tep.testing.machine import ClusterMachine
    from tep.testing.spreading import Finding, Judge, ProtocolJudge, search

__all__ = [
    "Case", "ClusterMachine", "Finding", "Judge", "ProtocolJudge", "Ran", "Tried", "Violation",
    "hunt", "run", "scenarios", "search", "shrink", "story",
]  # fmt: skip

_ROOMS = {
    "case": ("Case", "Violation", "scenarios"),
    "hunting": ("Ran", "Tried", "hunt", "run", "shrink", "story"),
    "machine": ("ClusterMachine",),
    "spreading": ("Finding", "Judge", "ProtocolJudge", "search"),
}
_ROOM_OF = {name: f"tep.testing.{room}" for room, names in _ROOMS.items() for name in names}

if "pytest" in sys.modules:
    # Failed assertions of the suite should show their values, as those of a test file do. It has to
    # be said before these rooms are imported, and costs nothing where no test runs.
    sys.modules["pytest"].register_assert_rewrite(
        "tep.testing.clauses_life",
        "tep.testing.clauses_messages",
        "tep.testing.clauses_reads",
        "tep.testing.clauses_rows",
        "tep.testing.contract_engine",
        "tep.testing.world",
    )

if not TYPE_CHECKING:  # a checker that saw __getattr__ would believe in every misspelt name

    def __getattr__(name: str) -> object:
        """Import a public name from its room, once; afterwards it is an ordinary attribute."""
        if name not in _ROOM_OF:
            raise AttributeError(f"module 'tep.testing' has no attribute {name!r}")
        if name in ("ClusterMachine", "scenarios"):
            need("hypothesis", "testing", f"tep.testing.{name}")
        value = globals()[name] = getattr(importlib.import_module(_ROOM_OF[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""A state machine of Hypothesis on a cluster in which things go wrong; subclass it.

class Store(ClusterMachine):
faults = "order posting"

def begin(self):
a, b = self.cluster.engines
...

@rule(page=st.integers(0, 3))
def put(self, page): ...

TestStore = Store.TestCase
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from tep.testing.case import Nics, scenarios
from tep.testing.hunting import Trial, verify

__all__ = ["ClusterMachine"]


class ClusterMachine(RuleBasedStateMachine):
    """Rules play on one cluster, whose case Hypothesis draws first and shrinks with the rules.

    A rule waits by `wait()`, which turns the simulated clock. At the end all trouble stops, and
    everything that was submitted must end.

    Attributes:
        nodes, nics, faults: of the cases, as for `scenarios`; a subclass sets its own.
        cluster: the one of this run.
    """

    nodes: ClassVar[int] = 2
    nics: ClassVar[Nics] = (1, 2)
    faults: ClassVar[str | Sequence[str]] = "order posting"
    cluster: Trial

    @initialize(data=st.data())
    def open_cluster(self, data: st.DataObject) -> None:
        """Open the cluster of a drawn case."""
        case = data.draw(scenarios(self.nodes, self.nics, self.faults), label="case")
        self.cluster = Trial(case)
        self.begin()

    def begin(self) -> None:
        """Set up what the rules need; called once the cluster is open."""

    def teardown(self) -> None:
        """End all trouble, and look whether everything that was submitted has ended."""
        if hasattr(self, "cluster"):
            with self.cluster as cluster:
                cluster.heal()
                verify(cluster)

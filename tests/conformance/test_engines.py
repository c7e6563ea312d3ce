"""The engine's share of the contract: on the loopback, inline and threaded, and in simulation."""

from __future__ import annotations

import pytest

import tep
from tep.backends.loopback import Hub
from tep.sim.cluster import Cluster
from tep.testing.contract_engine import EngineContract, Engines, OpenEngines


class LoopbackEngines(OpenEngines):
    """Engines on a hub of their own."""

    can_restart = True

    def __init__(self, make_driver, **options):
        self.hub = Hub()
        self.make_driver = make_driver
        self.options = options
        super().__init__(lambda: self.open(None))

    def open(self, name):
        return tep.TransferEngine.open(
            "loopback",
            nics=2,
            hub=self.hub,
            name=name,
            driver=self.make_driver(),
            **self.options,
        )

    def restart(self, engine):
        engine.close()
        reborn = self.open(engine.name)
        self.opened.append(reborn)
        return reborn


class SimulatedEngines(Engines):
    """The engines of a cluster."""

    def __init__(self, **options):
        self.cluster = Cluster(nodes=2, **options)
        self.can_restart = "profile" not in options
        self.next = iter(self.cluster.engines[:])

    def engine(self):
        return next(self.next)

    def restart(self, engine):
        return self.cluster.restart(engine.name)

    def close(self):
        self.cluster.close()


class TestInline(EngineContract):
    """One thread turns both ends, in order, and with the shuffle over a shallow queue."""

    @pytest.fixture(params=[{"seed": None}, {"seed": 1, "sq_depth": 16}], ids=["order", "shuffle"])
    def engines(self, request):
        ring = []
        with LoopbackEngines(lambda: tep.InlineDriver(ring), **request.param) as engines:
            yield engines


class TestThreads(EngineContract):
    """A worker thread for each engine, as people use it."""

    @pytest.fixture(params=[None, 2])
    def engines(self, request):
        with LoopbackEngines(lambda: None, seed=request.param) as engines:
            yield engines


class TestChaos(EngineContract):
    """The chaos fabric, with knobs drawn from the seed."""

    @pytest.fixture(params=range(3))
    def engines(self, request):
        with SimulatedEngines(seed=request.param) as engines:
            yield engines


class TestTiming(EngineContract):
    """The timing fabric of two NICs."""

    @pytest.fixture
    def engines(self):
        with SimulatedEngines(profile="efa_2x200") as engines:
            yield engines

"""The contract on the loopback: as people get it, with shallow queues, with slow mortal NICs."""

from __future__ import annotations

import pytest

from tep.testing.contract import DomainContract
from tests.support.loopbacks import SlowLoopback
from tests.support.worlds import LoopbackWorld


class TestLoopback(DomainContract):
    """The loopback as people get it."""

    @pytest.fixture
    def world(self):
        with LoopbackWorld() as world:
            yield world


class TestShallowQueue(DomainContract):
    """Queues of three rows: nearly every post is refused in part."""

    @pytest.fixture
    def world(self):
        with LoopbackWorld(sq_depth=3) as world:
            yield world


class TestSlow(DomainContract):
    """The loopback that the planted faults of NICs stand on."""

    @pytest.fixture
    def world(self):
        with LoopbackWorld(SlowLoopback) as world:
            yield world

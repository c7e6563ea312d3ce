"""The contract on the loopback: in order, and shuffled by several seeds."""

from __future__ import annotations

import pytest

from tep.testing.contract import DomainContract
from tests.support.worlds import LoopbackWorld


class TestInOrder(DomainContract):
    """The fast loopback, which promises order and has to keep it."""

    @pytest.fixture
    def world(self):
        with LoopbackWorld(seed=None) as world:
            yield world


class TestShuffled(DomainContract):
    """The loopback as people get it."""

    @pytest.fixture(params=[0, 1, 2])
    def world(self, request):
        with LoopbackWorld(seed=request.param) as world:
            yield world


class TestShallowQueue(DomainContract):
    """Queues of three rows: nearly every post is refused in part."""

    @pytest.fixture
    def world(self):
        with LoopbackWorld(seed=3, sq_depth=3) as world:
            yield world

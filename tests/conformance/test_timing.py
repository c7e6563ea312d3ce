"""The contract on the timing fabric: one ordered and one unordered profile, with real bytes."""

from __future__ import annotations

import pytest

from tep.testing.contract import DomainContract
from tests.support.worlds import TimingWorld


class TestConnectX7(DomainContract):
    """RC as the profile cx7_400 has it."""

    @pytest.fixture
    def world(self):
        with TimingWorld("cx7_400") as world:
            yield world


class TestEfa(DomainContract):
    """SRD as the profile efa_2x200 has it; the jitter is drawn from the seed. Its NICs can die."""

    @pytest.fixture
    def world(self):
        with TimingWorld("efa_2x200", seed=4, mortal=True) as world:
            yield world

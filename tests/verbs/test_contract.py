"""The contract on real libibverbs, over one, two and four NICs a node."""

from __future__ import annotations

import pytest

from tep.testing.contract import DomainContract
from tests.support.worlds import VerbsWorld

# Soft-RoCE takes the timeout once for each try: 67 ms here; a dead peer costs 0.4 s. The guest is
# slow: a peer that is not polled while a burst is posted, or while a busy host does not run the
# guest, must not be given up for it.
FAST = {"handshake_s": 1.0, "timeout": 14, "retry_cnt": 5, "drain_s": 0.5, "imm_recvs": 256}


class OnDevices(DomainContract):
    """Nodes take the first so many devices in turn."""

    first: int

    @pytest.fixture
    def world(self, devices):
        with VerbsWorld(devices[: self.first], **FAST) as world:
            world.quiet_turns = 20
            world.burst_rows = 1000
            yield world


@pytest.mark.long
class TestOneNic(OnDevices):
    """Both nodes on one device: packets go round inside the NIC."""

    first = 1


@pytest.mark.long
class TestTwoNics(OnDevices):
    """One device a node."""

    first = 2


class TestFourNics(OnDevices):
    """Two devices a node, four where a test asks for as many."""

    first = 8

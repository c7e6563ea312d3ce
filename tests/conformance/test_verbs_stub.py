"""The contract on the verbs backend over the stub provider: every clause, without a NIC."""

from __future__ import annotations

import pytest

from tep.testing.contract import DomainContract
from tests.support.here import need_stub
from tests.support.worlds import VerbsWorld


@pytest.fixture(scope="module")
def stub():
    return need_stub()


FAST = {"handshake_s": 0.2, "timeout": 8, "retry_cnt": 2, "drain_s": 0.2}


class TestOneQueuePair(DomainContract):
    """The contract with default options, except for timeouts that suit a test."""

    @pytest.fixture
    def world(self, stub):
        stub.reset()
        with VerbsWorld([f"stub{k}" for k in range(8)], library=stub.path, **FAST) as world:
            yield world


@pytest.mark.slow
class TestLossyAndShallow(DomainContract):
    """Queues of three rows, sixteen receives, and every third handshake datagram is lost."""

    @pytest.fixture
    def world(self, stub):
        stub.reset()
        stub.set(2, 3)
        options = {"library": stub.path, "sq_depth": 3, "imm_recvs": 16, "resend_s": 0.002, **FAST}
        with VerbsWorld([f"stub{k}" for k in range(8)], **options) as world:
            yield world
        stub.reset()

"""A sender that fails says so: an expectation ends in an error at once, and not in a timeout."""

from __future__ import annotations

import numpy as np
import pytest

from tep.errors import BadRequest, FabricError, UsageError
from tep.sim.cluster import Cluster
from tep.sim.faults import Chaos
from tests.support.script import scripted


@pytest.mark.parametrize("loss", [0, 8])
def test_expectations_that_wait_end_in_the_senders_words(loss: int) -> None:
    """Eight of ten immediates came, and nobody says that the others never will."""
    with Cluster(2, 2, chaos=Chaos(message_loss=loss), seed=3) as cluster:
        a, b = cluster.engines
        _, desc = b.reg_mr(np.zeros(64, np.uint8))
        a.submit_barrier([desc] * 2, 7).wait()
        first, second = b.expect_imm_count(7, 3), b.expect_imm_count(7, 2)
        other = b.expect_imm_count(8, 1)
        notice = a.fail(b.main_address, 7, "the GPU is out of memory")
        notice.wait()

        for waits, count in ((first, 3), (second, 2)):
            with pytest.raises(FabricError, match="a .epoch 1. gave it up: the GPU") as caught:
                waits.wait()
            assert f"2 of {count} came" in str(caught.value)
            assert "PEER_FAILED" == caught.value.code
        assert not other.finished
        assert 2 == dict(b.stats().imms_unexpected).get(7, 0), "what came stays counted"
        again = b.expect_imm_count(7, 2)
        again.wait()


FABRICS = pytest.mark.parametrize(
    "fabric", [{"nics": 2}, {"profile": "cx7_400"}], ids=["chaos", "timing"]
)


@FABRICS
def test_an_expectation_that_comes_later_fails_once(fabric) -> None:
    """The word may be quicker than the reader; it must neither be lost nor haunt the next round."""
    with Cluster(2, **fabric) as cluster:
        a, b = cluster.engines
        a.fail(b.main_address, 7, "no").wait()
        cluster.env.run()
        with pytest.raises(FabricError, match="gave it up: no"):
            b.expect_imm_count(7, 1).wait()
        a.fail(b.main_address, 7, "no").wait()
        b.remove_imm(7)
        later = b.expect_imm_count(7, 1)
        cluster.env.run()
        assert not later.finished


def test_a_later_expectation_of_another_sender_is_not_failed() -> None:
    """Who gave an immediate up speaks for itself only, also where nobody waited yet."""
    with Cluster(3, 2) as cluster:
        a, b, c = cluster.engines
        _, desc = b.reg_mr(np.zeros(64, np.uint8))
        c.fail(b.main_address, 7, "not me").wait()
        cluster.env.run()
        mine = b.expect_imm_count(7, 1, sender=a.main_address)
        a.submit_barrier([desc], 7).wait()
        assert mine.wait().ok
        with pytest.raises(FabricError, match="not me"):
            b.expect_imm_count(7, 1, sender=c.main_address).wait()


@FABRICS
def test_the_word_to_a_dead_peer_fails_itself(fabric) -> None:
    """Whoever waits for it must not wait for ever."""
    with Cluster(2, **fabric) as cluster:
        a, b = cluster.engines
        b.close()
        with pytest.raises(FabricError, match="b could not be told that imm 0x7 fails"):
            a.fail(b.main_address, 7, "no").wait()


def test_closing_ends_a_word_on_its_way() -> None:
    """A handle that nobody settles hangs its waiter."""
    with Cluster(2, 2) as cluster:
        a, b = cluster.engines
        notice = a.fail(b.main_address, 7, "no")
        a.close()
        assert notice.finished
        assert not notice.ok


def test_bad_words_are_refused() -> None:
    """A reason must fit into a control message, and some backends have no such messages."""
    with Cluster(2, 1) as cluster:
        a, b = cluster.engines
        for imm, reason in ((-1, "x"), (7, "x" * 61), (7, b"x")):
            with pytest.raises(BadRequest):
                a.fail(b.main_address, imm, reason)
    own = scripted(1)
    with pytest.raises(UsageError, match="no control messages"):
        own.engine.fail(own.engine.main_address, 7, "x")

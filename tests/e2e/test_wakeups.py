"""A verb that changes something and then raises still wakes the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tep
from tep.backends.loopback import Hub, open_domains
from tep.base.errors import FabricError, TepError
from tep.drivers.threads import ThreadDriver
from tep.drivers.turning import TurnDriver
from tep.engine import TransferEngine

WAIT_S = 60.0
BAD = 1 << 60

# Each meets the peer's later incarnation, and then has a reason to raise.
VERBS: dict[str, Callable[[TransferEngine, Any], object]] = {
    "add_peer_group": lambda e, w: e.add_peer_group([w.desc.addr, w.old.addr]),
    "submit_single_write": lambda e, w: e.submit_single_write(8, (w.mr, 0), (w.desc, BAD)),
    "submit_paged_writes": lambda e, w: e.submit_paged_writes(
        8, (w.mr, tep.Pages([0])), (w.desc, tep.Pages([BAD]))
    ),
    "submit_scatter": lambda e, w: e.submit_scatter(w.mr, [tep.ScatterDst(1, 0, (w.desc, BAD))]),
    "submit_barrier": lambda e, w: e.submit_barrier([w.desc, w.old], 1),
    "submit_send": lambda e, w: e.submit_send(w.desc.addr, b"x" * 2_000_000),
    "expect_imm_count": lambda e, w: (
        e.expect_imm_count(900, 1, sender=w.desc.addr),
        e.expect_imm_count(900, 1, sender=w.old.addr),
    ),
}


@pytest.mark.parametrize("driver", [ThreadDriver, TurnDriver])
@pytest.mark.parametrize("verb", sorted(VERBS))
def test_a_verb_that_raises_leaves_nothing_asleep(
    verb: str, driver: Callable[[str], ThreadDriver]
) -> None:
    """Expectations of a peer's former incarnation slept until somebody kicked the engine."""
    hub = Hub(7)

    def engine(name: str, epoch: int) -> TransferEngine:
        opened = open_domains(1, hub=hub, name=name)
        return TransferEngine(opened.domains, driver=driver(name), name=name, epoch=epoch)

    class World:
        pass

    world: Any = World()
    with engine("a", 1) as a, engine("b", 1) as former, engine("b", 2) as later:
        world.mr, _ = a.reg_mr(np.zeros(64, np.uint8))
        _, world.old = former.reg_mr(np.zeros(64, np.uint8))
        _, world.desc = later.reg_mr(np.zeros(64, np.uint8))
        waiting = a.expect_imm_count(7, 1, sender=world.old.addr)
        a.remove_imm(8)  # so that the expectation was taken
        told = threading.Event()
        waiting.add_done_callback(lambda _: told.set())
        with pytest.raises(TepError):
            VERBS[verb](a, world)
        with pytest.raises(FabricError, match="later incarnation"):
            raise_end(waiting, told)


def raise_end(handle: tep.Expectation, told: threading.Event) -> None:
    """Raise a handle's error like wait(), which would step the engine of a TurnDriver itself."""
    assert told.wait(WAIT_S), "it sleeps"
    handle.result()

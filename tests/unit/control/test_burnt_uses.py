"""Several transfers under one immediate, and one of them fails: all bytes arrive, or an error.

Each is a program that a user would write; no fabric fault is needed for the first two.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

import tep

N, PAGE = 16, 4096


class Layers:
    """Two engines, and layers of pages from one to the other under immediate 7."""

    def __init__(self, cluster: tep.sim.Cluster) -> None:
        self.a, self.b = cluster.engines
        self.memory = np.zeros((4 * N, PAGE), np.uint8)
        self.mr, _ = self.a.reg_mr(np.ones_like(self.memory))
        _, self.desc = self.b.reg_mr(self.memory)

    def send(self, layer: int, **more) -> tep.Transfer:
        pages = tep.Pages(range(layer * N, layer * N + N))
        return self.a.submit_paged_writes(PAGE, (self.mr, pages), (self.desc, pages), 7, **more)


@pytest.mark.parametrize("expected", [3, 4])
def test_a_later_layer_does_not_stand_for_a_cancelled_one(expected):
    """The count of three layers was complete with layers 1, 3 and 4, and layer 2 was not there."""
    with tep.sim.Cluster(nodes=2, seed=3) as cluster:
        layers = Layers(cluster)
        got = layers.b.expect_imm_count(7, expected * N)
        refused = []

        def cancelled(_: tep.Transfer) -> None:
            with pytest.raises(tep.BurntImm, match="imm 0x7 is burnt at b"):
                layers.send(3)
            refused.append(3)

        layers.send(0)
        layers.send(1, on_done=cancelled).cancel()
        layers.send(2)
        with pytest.raises(
            tep.FabricError, match="a .epoch 1. gave it up: it was cancelled"
        ) as told:
            got.wait()

        assert "PEER_FAILED" == told.value.code
        assert [3] == refused


def test_an_expectation_that_is_stated_late_fails_at_once():
    """One immediate a request and one expectation of the sum at the end: it waited in vain."""
    with tep.sim.Cluster(nodes=2, seed=3) as cluster:
        layers = Layers(cluster)
        sent = [layers.send(layer) for layer in range(3)]
        sent[1].cancel()
        for transfer in sent:
            with pytest.raises(tep.Cancelled) if transfer is sent[1] else nullcontext():
                transfer.wait()
        cluster.env.run(until=cluster.env.now + 5 * 10**9)
        before_us = cluster.now_us
        with pytest.raises(tep.FabricError, match="is burnt: take a fresh one"):
            layers.b.expect_imm_count(7, 3 * N).wait()

        assert before_us + 1000 > cluster.now_us


@pytest.mark.parametrize("when_us", [4.0, 8.0, 12.0, 16.0])
def test_another_sender_does_not_complete_what_a_dead_one_began(when_us):
    """The arrivals of the dead sender stayed, and stood for pages of the next one."""
    with tep.sim.Cluster(nodes=3, seed=5) as cluster:
        a, b, c = cluster.engines
        memory = np.zeros((64, PAGE), np.uint8)
        pages = tep.Pages(range(64))
        mrs = {engine: engine.reg_mr(np.ones_like(memory))[0] for engine in (a, c)}
        _, desc = b.reg_mr(memory)

        def send(engine: tep.TransferEngine, imm: int) -> None:
            engine.submit_paged_writes(PAGE, (mrs[engine], pages), (desc, pages), imm)

        b.watch_peer(a.main_address, every_s=1e-4, lost_after_s=1e-3)
        got = b.expect_imm_count(7, 64, sender=a.main_address)
        send(a, 7)
        cluster.at(cluster.now_us + when_us, lambda: [cluster.kill_nic(0, k) for k in range(2)])
        with pytest.raises(tep.FabricError, match="its sender a was lost"):
            got.wait()
        with pytest.raises(tep.FabricError, match="is burnt: take a fresh one"):
            b.expect_imm_count(7, 64, sender=c.main_address).wait()
        memory[:] = 0
        again = b.expect_imm_count(8, 64, sender=c.main_address)
        send(c, 8)
        again.wait()

        assert memory.all()

"""Processes on EFA, by libfabric's provider and by the backend `efa`: every byte, and peers that
die, sleep and come back.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tep.apps.kvcache.cluster import Cluster, Shape
from tep.base.units import KiB, MiB
from tests.e2e import test_killed_and_stopped as killed
from tests.e2e import test_passing_conditions as passing
from tests.e2e import test_watched_processes as watched
from tests.e2e.test_kvcache_processes import check, prompts
from tests.e2e.test_moe_processes import WORLD, run_processes
from tests.e2e.test_rl_processes import SMALL, Scenario
from tests.support.children import Child, transfer

LONG = pytest.mark.long
PROVIDERS = ["efa", "srd"]


@pytest.mark.parametrize(
    "test",
    [
        killed.test_a_killed_receiver,
        killed.test_a_killed_sender,
        killed.test_a_stopped_receiver_and_then_a_stopped_sender,
    ],
    ids=["killed receiver", "killed sender", "stopped"],
)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_killed_and_stopped(provider, test):
    """A sender, a receiver and a third process must behave here as on other wires."""
    in_three(provider, test)


@pytest.mark.parametrize("of", passing.CURES)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_short_for_a_while(provider, of):
    """At either end, of memory or of descriptors: a passing condition is not the end."""
    for test in (
        passing.test_a_receiver_that_was_short_is_reached_again,
        passing.test_a_sender_that_was_short_reaches_its_peers_again,
    ):
        node = passing.Node(provider)
        try:
            test(provider, node, of)
        finally:
            node.end()


@pytest.mark.parametrize("place", passing.PLACES_ON_EFA)
def test_one_failed_allocation(place, monkeypatch):
    """Entries that were read, and not sorted for want of memory, were lost."""
    passing.test_one_failed_allocation_fails_no_transfer("srd", place, monkeypatch)


# What the engine does above the seam: once on EFA is enough, where nothing else has to be proved.
def test_the_word_that_it_failed():
    """It goes by control messages, which have their own way on each wire."""
    in_three("efa", killed.test_the_word_that_it_failed)


def in_three(provider, test):
    """Run a test of test_killed_and_stopped.py."""
    three = killed.Three(provider)
    try:
        three.open(*three.all)
        test(three)
    finally:
        three.end()


@pytest.mark.parametrize("provider", ["efa", pytest.param("srd", marks=LONG)])
def test_watched(provider):
    """Heartbeats tell who was lost, is back or was started again, at the address of the dead."""
    nodes = watched.Nodes(provider)
    try:
        watched.test_watched_peers_that_are_stopped_killed_and_started_again(nodes)
    finally:
        nodes.end()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_four_processes_of_four_nics(provider):
    """Each writes to each other, on two hosts: no byte and no immediate goes astray."""
    children = [Child({"TEP_FAKE_EFA_HOST": str(8 + rank // 2)}) for rank in range(4)]
    try:
        for rank, child in enumerate(children):
            child.address = child.do("open", provider=provider, nics=4, name=f"r{rank}")
        for imm, (a, b) in enumerate(itertools.permutations(children, 2), start=1):
            a.do("reg", nbytes=2 * MiB, seed=imm)
            desc = b.do("reg", nbytes=2 * MiB)
            how = {"page_bytes": 4 * KiB, "npages": 512, "seed": imm}
            assert ("done", "done") == transfer(a, b, desc, imm=imm, **how)
            assert b.do("check", **how)
            assert 0 == b.do("count", imm=imm), "more immediates than pages"
        for child in children:
            assert [3 * 128] * 4 == child.do("rows"), "each NIC carries a quarter"
    finally:
        for child in children:
            child.end()


def opening(provider):
    """The backend, and its options, as TransferEngine.open takes them."""
    return ("efa", {}) if provider == "srd" else ("libfabric", {"provider": provider})


@pytest.mark.parametrize("provider", [pytest.param("efa", marks=LONG), "srd"])
def test_kvcache(provider):
    """Two prefillers and two decoders say what one process says alone."""
    asked = prompts([1, 9, 40, 100])

    async def main():
        backend, options = opening(provider)
        shape = Shape(backend=backend, options={**options, "nics": 2}, prefill_tp=1, decode_tp=2)
        async with Cluster(shape) as cluster:
            return await cluster.generate(asked, 10)

    check(asked, asyncio.run(main()))


@pytest.mark.parametrize("provider", [pytest.param("libfabric:efa", marks=LONG), "efa"])
def test_moe(provider):
    """Four ranks dispatch and combine; outputs equal the dense layer's, byte for byte."""
    ended = run_processes(provider)

    assert [(0, f"ok rank={rank}\n", "") for rank in range(WORLD)] == ended


@pytest.mark.parametrize("provider", [pytest.param("efa", marks=LONG), "srd"])
def test_rl(provider, tmp_path):
    """Six processes update a model twice while they serve: every byte and every answer."""

    async def main():
        scenario = Scenario(SMALL, 15, tmp_path, *opening(provider))
        async with scenario.fleet:
            await scenario.updates_under_load()

    asyncio.run(main())

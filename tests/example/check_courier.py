"""The promises of the courier, on fabrics that do their worst."""

from __future__ import annotations

import asyncio
from collections import Counter

import courier
import pytest
from hypothesis import given, settings

import tep
from tep.testing import Violation, hunt, run, scenarios

PARCEL = bytes(range(256)) * 3
IMM = 0x100


async def deliver(cluster: tep.sim.Cluster) -> list[bool]:
    """Node a sends a parcel to all others; what is promised is asserted here."""
    sender, *receivers = cluster.engines
    mr, _ = sender.reg_mr(PARCEL, access=tep.Access.SOURCE)
    nics = len(sender.main_address.domains)
    shelves = [courier.Shelf(engine, len(PARCEL)) for engine in receivers]
    imms = range(IMM, IMM + 16 * len(shelves), 16)
    results = await asyncio.gather(
        *(courier.hand_over(sender, mr, s.desc, imm) for s, imm in zip(shelves, imms)),
        *(s.take(imm, nics) for s, imm in zip(shelves, imms)),
    )
    told, found = results[: len(shelves)], results[len(shelves) :]
    for said, parcel in zip(told, found):
        assert parcel in (None, PARCEL), "a torn parcel was taken for a whole one"
        assert parcel is not None or not said, "handed over, and nobody has it"
    return told


async def believe_the_last_byte(cluster: tep.sim.Cluster) -> None:
    """A wrong courier: when its last byte is there, it takes the parcel to be whole."""
    sender, receiver = cluster.engines
    mr, _ = sender.reg_mr(PARCEL, access=tep.Access.SOURCE)
    shelf = courier.Shelf(receiver, len(PARCEL))
    sender.submit_single_write(len(PARCEL), (mr, 0), (shelf.desc, 0))
    for _ in range(1000):
        await asyncio.sleep(50e-9)
        if shelf.memory[-1] == PARCEL[-1]:
            break
    assert bytes(shelf.memory) == PARCEL


@settings(max_examples=60, derandomize=True, deadline=None)
@given(scenarios(nodes=3, nics=(1, 4)))
def test_parcels_under_any_fault(s) -> None:
    """Whatever breaks, nobody holds a torn parcel, and no sender believes in one that is lost."""
    run(deliver, s)


@settings(max_examples=20, derandomize=True, deadline=None)
@given(scenarios(nodes=2, faults="order posting"))
def test_without_faults_everything_arrives(s) -> None:
    """Disorder alone is no excuse."""
    assert [True] == run(deliver, s, may_fail=False).result


@pytest.mark.tep(nodes=2, nics=(1, 3), faults="order links", runs=5)
def test_parcels_in_a_cluster(tep_cluster, tep_case) -> None:
    """The same with the fixture: one seed a run."""
    assert 2 == len(tep_cluster.engines) == tep_case.nodes
    tep_cluster.run(deliver(tep_cluster))


def test_the_swarm_meets_what_it_should() -> None:
    """A swarm that never saw a NIC die says nothing about a courier whose NIC dies."""
    seen: Counter[str] = hunt(deliver, runs=200, nodes=3)

    for sight in ("KillNic", "Clog", "Mute", "Restart", "post refused", "row UNREACHABLE"):
        assert seen[sight], sight


def test_a_wrong_courier_is_caught() -> None:
    """Tests that find nothing in a wrong protocol would find nothing in this one."""
    with pytest.raises(Violation, match=r"replay: tep sim --protocol check_courier.py:believe"):
        hunt(believe_the_last_byte, runs=50, faults="order")

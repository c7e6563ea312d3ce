"""Leases for reading: what is over is free, and no reader takes its next contents for the old."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

import tep
from tep.backends.base import Access
from tep.errors import BadRequest, LeaseError, TepError
from tep.sim.cluster import Cluster
from tep.sim.faults import Chaos, Clog, KillNic, Mute
from tep.units import PS_PER_US
from tests.support import pairs

NBYTES = 4096
OLD, NEW = 1, 2
US = 1e-6


def play(seed: int) -> Counter[str]:
    """A reader reads under a lease that ends meanwhile; then the owner uses its memory anew."""
    dice = random.Random(seed)
    nics = dice.choice([(1, 1), (2, 2), (2, 1), (3, 2)])
    seen: Counter[str] = Counter()
    chaos = Chaos.draw(seed, late_land=dice.choice([0, 1, 2]))
    with Cluster(2, nics, chaos=chaos, seed=seed) as cluster:
        reader, owner = cluster.engines
        memory, mine = np.full(NBYTES, OLD, np.uint8), np.zeros(8 * NBYTES, np.uint8)
        mr, _ = owner.reg_mr(memory, access=Access.READABLE)
        sink, _ = reader.reg_mr(mine, access=Access.SINK)
        for_s = dice.choice([12 * US, 1e3])
        grant = owner.lease(mr, reader.main_address, for_s=for_s, access=Access.READABLE)
        lease = tep.Lease.from_bytes(grant.lease.to_bytes())
        reads: list[tuple[int, tep.Transfer]] = []

        def reuse(_: object) -> None:
            seen["free" if grant.over.ok else "quarantined"] += 1
            if grant.over.ok:
                memory[:] = NEW

        def submit(k: int) -> None:
            try:
                sent = reader.submit_paged_reads(
                    NBYTES // 8,
                    (lease, tep.Pages(range(8))),
                    (sink, tep.Pages(range(8), offset=k * NBYTES)),
                )
            except TepError as error:
                seen[type(error).__name__] += 1
            else:
                reads.append((k, sent))

        grant.over.add_done_callback(reuse)
        cluster.at(dice.uniform(2, 15), grant.revoke)
        for k in range(8):
            cluster.at(dice.uniform(0, 12), lambda k=k: submit(k))
        for _ in range(dice.choice([0, 1, 2])):
            node = dice.randrange(2)
            name, nic = "ab"[node], dice.randrange(nics[node])
            for_ps = dice.choice([PS_PER_US, 30 * PS_PER_US])
            faults = [Clog(name, nic, for_ps), Mute(name, nic, for_ps), KillNic(name, nic)]
            cluster.at(dice.uniform(0, 3), dice.choice(faults))
        cluster.env.run(until=cluster.env.now + 2 * 10**13)
        for k, sent in reads:
            assert sent.finished, sent.describe()
            part = mine[k * NBYTES : (k + 1) * NBYTES]
            assert not sent.ok or (part == OLD).all(), f"seed {seed}: read {k} brought new contents"
            try:
                sent.result()
                seen["read"] += 1
            except TepError as error:
                seen["late" if isinstance(error, LeaseError) else "failed"] += 1
        assert grant.over.finished, grant.over.describe()
    return seen


@pytest.mark.slow
def test_what_is_read_under_a_lease_is_of_its_time() -> None:
    """The owner's memory is only read, so nothing tells the reader that it was used again."""
    seen: Counter[str] = Counter()
    for seed in range(300):
        seen += play(seed)

    assert {} == {k: seen[k] for k in ("free", "read", "late", "LeaseError") if seen[k] < 50}


@pytest.fixture
def pair():
    with pairs.pair() as found:
        yield found


def test_a_read_that_is_back_after_the_end_fails(pair) -> None:
    """Nobody knows whether its bytes are of before the end or after it."""
    grant = pair.b.lease(pair.dst_mr, pair.a.main_address, for_s=100, access=Access.READABLE)
    sent = pair.a.submit_single_read(64, (grant.lease, 0), (pair.mr, 0), imm=5)
    pair.settle(sent)
    assert sent.ok
    late = pair.a.submit_single_read(64, (grant.lease, 0), (pair.mr, 0), imm=5)
    pair.a._worker.take_all_commands()
    for held in pair.a._worker.held_leases.known.values():
        held.until_s = 0.0  # it runs out while the row is on its way
    pair.turn_until(lambda: late.finished)

    with pytest.raises(LeaseError, match="its bytes came too late: lease 1 .* ran out"):
        late.result()
    pair.turn_until(lambda: not pair.b._machine.busy())
    assert 1 == dict(pair.b.stats().imms_unexpected).get(5, 0), (
        "the owner is told of what was read in time alone"
    )


def test_rights_of_a_lease_are_checked(pair) -> None:
    """A lease for reading is none for writing, whatever its region allows."""
    peer = pair.a.main_address
    reads = pair.b.lease(pair.dst_mr, peer, for_s=100, access=Access.READABLE).lease
    writes = pair.b.lease(pair.dst_mr, peer, for_s=100).lease
    both = pair.b.lease(pair.dst_mr, peer, for_s=100, access=Access.READABLE | Access.TARGET).lease
    with pytest.raises(BadRequest, match="is not for writing"):
        pair.a.submit_single_write(8, (pair.mr, 0), (reads, 0))
    with pytest.raises(BadRequest, match="is not for reading"):
        pair.a.submit_single_read(8, (writes, 0), (pair.mr, 0))
    pair.settle(
        pair.a.submit_single_read(8, (both, 0), (pair.mr, 0)),
        pair.a.submit_single_write(8, (pair.mr, 0), (both, 0)),
        pair.a.submit_single_read(8, (reads, 0), (pair.mr, 0)),
    )
    for access in (Access(0), Access.SINK, Access.SOURCE, Access.TARGET | Access.SINK):
        with pytest.raises(BadRequest, match="a lease is for Access.TARGET, Access.READABLE"):
            pair.b.lease(pair.dst_mr, peer, for_s=100, access=access)
    with pytest.raises(BadRequest, match=r"without Access\.READABLE; nobody may read"):
        pair.a.lease(pair.mr, pair.b.main_address, for_s=1, access=Access.READABLE)

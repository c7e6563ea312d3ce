"""NICs die under transfers on drawn chaos fabrics: what can be done is done, counts are exact."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from tep.api import Pages, Routing, ScatterDst
from tep.core.transfer import Transfer
from tep.errors import TepError
from tep.sim.cluster import Cluster
from tep.sim.faults import Chaos

PAGE = 64
TRANSFERS = 3


@dataclass
class Tale:
    """What happened in one run."""

    done: int = 0
    failed: int = 0
    made_good: int = 0
    errors: list[str] = field(default_factory=list)
    due: Counter[int] = field(default_factory=Counter)


def submit(engine, dice: random.Random, mr, desc, base: int, n: int, k: int) -> tuple:
    """One transfer of n pages at an offset: the handle, and how often each immediate is due."""
    imm = 7 if dice.random() < 0.5 else 7 + k
    lanes = math.lcm(len(engine.main_address.domains), len(desc.addr.domains))
    pages = Pages(range(n), offset=base)
    match dice.choice(["paged", "imms", "single", "slices", "peers", "barrier"]):
        case "paged":
            sent = engine.submit_paged_writes(PAGE, (mr, pages), (desc, pages), imm)
        case "imms":
            imms = list(range(100 * (k + 1), 100 * (k + 1) + n))
            sent = engine.submit_paged_writes(PAGE, (mr, pages), (desc, pages), imms)
            return sent, Counter(imms)
        case "single":
            routing = Routing(num_shards=dice.randint(1, lanes))
            sent = engine.submit_single_write(
                n * PAGE, (mr, base), (desc, base), imm, routing=routing
            )
        case "barrier":
            sent = engine.submit_barrier([desc] * 2, imm)
            return sent, Counter({imm: 2})
        case by:
            routing = Routing(scatter_by="bytes" if by == "slices" else "peers")
            dst = ScatterDst(n * PAGE, base, (desc, base))
            sent = engine.submit_scatter(mr, [dst], imm, routing=routing)
    return sent, Counter({imm: sent.rows})


def run(seed: int, *, loss: int = 0) -> Tale:
    """Three transfers, and one NIC of either side dies; sometimes a second one."""
    dice = random.Random(seed)
    nics = dice.choice([(2, 2), (2, 2), (2, 3), (3, 2), (4, 2), (1, 2), (2, 1)])
    chaos = Chaos.draw(seed, late_land=dice.choice([0, 1, 2]), message_loss=loss)
    tale = Tale()
    with Cluster(2, nics, chaos=chaos, seed=seed) as cluster:
        a, b = cluster.engines
        n = dice.randint(1, 12)
        source = np.random.default_rng(seed).integers(1, 255, TRANSFERS * n * PAGE, np.uint8)
        target = np.zeros(TRANSFERS * n * PAGE, np.uint8)
        mr, _ = a.reg_mr(source)
        _, desc = b.reg_mr(target)
        doomed = [dice.randrange(2)] + [dice.randrange(2)] * (dice.random() < 0.2)
        at_us = dice.uniform(0, 3)
        for side in doomed:
            nic = dice.randrange(nics[side])
            cluster.at(at_us, lambda side=side, nic=nic: cluster.kill_nic(side, nic))
            at_us += dice.uniform(0, 2)
        sends: list[tuple[Transfer, Counter[int], int]] = []
        for k in range(TRANSFERS):
            sends.append((*submit(a, dice, mr, desc, k * n * PAGE, n, k), k))
            tale.due.update(sends[-1][1])
        for sent, _, _ in sends:
            try:
                sent.wait(60)
                tale.done += 1
                tale.made_good += sent.stats().rows_again > 0
            except TepError as error:
                tale.failed += 1
                tale.errors.append(str(error))
        cluster.env.run(until=cluster.env.now + 10**13)
        alive = [sum(engine._worker.group.alive) for engine in (a, b)]
        if min(nics) > 1 and sum(nics) - sum(alive) == 1:
            assert [] == tale.errors, "a NIC lived on either side"
        check(tale, sends, (a, b), (source, target), n)
    return tale


def check(tale: Tale, sends, engines, memory, n: int) -> None:
    """Counts exact where all is done, never too high; bytes there; nothing left over."""
    a, b = engines
    source, target = memory
    counted = Counter(dict(b.stats().imms_unexpected))
    for imm, due in tale.due.items():
        assert counted[imm] <= due, f"imm {imm} came {counted[imm]} times, {due} are due"
        assert tale.failed or counted[imm] == due, f"imm {imm}: {counted[imm]} of {due}"
    for sent, _, k in sends:
        part = slice(k * n * PAGE, (k + 1) * n * PAGE)
        if sent.ok and sent.stats().kind != "barrier":
            assert (source[part] == target[part]).all(), sent.describe()
        assert sent.finished, sent.describe()
    assert (False, False) == (a._machine.busy(), b._machine.busy())
    assert [] == a._worker.group.losses
    assert (0, 0) == (a.stats().rows_backlog, sum(a.stats().rows_outstanding))


def swarm(seeds: range, **kw: int) -> Tale:
    """Many runs, summed up."""
    total = Tale()
    for seed in seeds:
        try:
            tale = run(seed, **kw)
        except AssertionError as error:
            error.add_note(f"again: tests.property.test_failover_swarm.run({seed}, **{kw})")
            raise
        total.done += tale.done
        total.failed += tale.failed
        total.made_good += tale.made_good
        total.errors += tale.errors
    return total


@pytest.mark.slow
def test_transfers_outlive_their_nics() -> None:
    """Half of what is in flight on a node is on each NIC; one cable must not cost all of it."""
    tale = swarm(range(400))
    assert tale.made_good > 200, "the swarm must meet what it is about"
    assert tale.done > 3 * tale.failed


@pytest.mark.slow
def test_lost_notes_are_asked_for_again() -> None:
    """The question about a dead path may die on its way, or the answer may."""
    tale = swarm(range(400), loss=4)
    assert tale.made_good > 200
    assert tale.done > 3 * tale.failed


@pytest.mark.long
def test_transfers_outlive_their_nics_at_length() -> None:
    """The rare orders."""
    tale = swarm(range(1000, 15000), loss=2)
    assert tale.made_good > 5000

"""Shares of paged writes that follow what was seen of the NICs: simulated machines, and by hand."""

from __future__ import annotations

import pytest

import tep
from tep.base.units import KiB, MiB
from tep.base.wire import NetAddr
from tep.core.path import Link, PathEvent, Routes
from tep.drivers.threads import InlineDriver, Machine
from tep.engine import TransferEngine
from tests.support.inside import link_of, worker_of
from tests.support.null import null_pair

PAGE, NPAGES = 64 * KiB, 2048


class Pair:
    """Two nodes with four NICs each, and one list of pages that is written again and again."""

    def __init__(self, cluster: tep.sim.Cluster, *, prepared: bool = False) -> None:
        self.cluster = cluster
        self.a, self.b = cluster.engines
        (self.mr, _), (_, self.desc) = (
            engine.reg_mr((1 << 40, NPAGES * PAGE, "cuda:0")) for engine in cluster.engines
        )
        pages = tep.Pages(range(NPAGES))
        self.args = PAGE, (self.mr, pages), (self.desc, pages)
        self.ready = self.a.prepare_paged_writes(*self.args) if prepared else None
        self.imm = 0

    def submit(self) -> tuple[tep.Expectation, tep.Transfer]:
        self.imm += 1
        got = self.b.expect_imm_count(self.imm, NPAGES)
        if self.ready is not None:
            return got, self.ready.submit(self.imm)
        return got, self.a.submit_paged_writes(*self.args, imm=self.imm)

    def write(self) -> tuple[float, list[int]]:
        """Write it once; return the time, us, and the rows of each NIC."""
        start_us = self.cluster.now_us
        got, sent = self.submit()
        got.wait()
        sent.wait()
        return self.cluster.now_us - start_us, [nic.rows for nic in sent.stats().nics]


def pair(*, mortal: bool = False) -> tep.sim.Cluster:
    return tep.sim.Cluster(nodes=2, profile="efa_4x100", move_bytes=False, mortal=mortal)


@pytest.mark.slow
@pytest.mark.parametrize("prepared", [False, True])
def test_a_slow_nic_gets_less_after_it_was_seen(*, prepared: bool) -> None:
    """Each transfer would take twice the time of its three fast NICs, again and again."""
    with pair() as cluster:
        p = Pair(cluster, prepared=prepared)
        sound_us, rows = p.write()
        assert [NPAGES // 4] * 4 == rows == p.write()[1], "equal NICs have equal shares"
        assert () == link_of(p.a, p.b).weights
        ideal_us = sound_us * 4 / 3.5
        cluster.slow_down("a", 1, 2)
        assert p.write()[0] > 1.6 * ideal_us, "nothing was seen yet"
        p.write()
        third_us, rows = p.write()
        assert third_us < 1.2 * ideal_us
        assert 0.4 < rows[1] / rows[0] < 0.65
        assert NPAGES == sum(rows)


@pytest.mark.slow
def test_a_nic_that_is_fast_again_gets_its_share_back() -> None:
    """What was seen once would weigh for ever, though the link was mended."""
    with pair() as cluster:
        p = Pair(cluster)
        cluster.slow_down("a", 1, 20)
        for _ in range(8):
            _, rows = p.write()
        assert 0 < rows[1] < rows[0] / 4, "it is asked on, but for little"
        cluster.slow_down("a", 1, 1)
        for _ in range(8):
            _, rows = p.write()
        assert max(rows) - min(rows) <= NPAGES // 32


def test_rows_of_a_dead_nic_are_spread_over_those_that_are_left() -> None:
    """One neighbour would carry all of them, while the others are idle."""
    with pair(mortal=True) as cluster:
        p = Pair(cluster)
        sound_us, _ = p.write()
        start_us = cluster.now_us
        got, sent = p.submit()
        cluster.env.run_until(lambda: False, cluster.env.now + int(0.3 * sound_us * 1e6))
        cluster.kill_nic("a", 1)
        got.wait()
        sent.wait()
        _, *left = sorted(nic.rows for nic in sent.stats().nics)
        assert max(left) - min(left) <= NPAGES // 32
        assert cluster.now_us - start_us < 1.45 * sound_us, "1.23 is ideal, 1.72 one neighbour"
        _, rows = p.write()
        assert 0 == rows[1]
        assert max(rows) - min(rows[:1] + rows[2:]) <= 1, "later pages are shared as well"


def link(nics: int = 4) -> Link:
    addresses = tuple(b"%d" % k for k in range(nics))
    routes = Routes()
    routes.alive = [True] * nics
    return Link(NetAddr("loopback", "b", 1, addresses, (1,) * nics), (None,) * nics, routes)


def test_what_was_seen_is_bounded_and_halves() -> None:
    """A NIC that was stuck once must go on to be tried, and one odd transfer must move little."""
    found = link()
    paths = [found.path(k, k) for k in range(4)]
    found.learn([(path, pace) for path, pace in zip(paths, (1.0, 0.8, 0.9, 1.0), strict=True)])
    assert () == found.weights, "noise changes nothing"
    before = found.routes.version
    found.learn([(path, pace) for path, pace in zip(paths, (1.0, 1e-9, 1.0, 1.0), strict=True)])
    assert (8, 4, 8, 8) == found.weights
    assert found.routes.version > before, "prepared writes are laid out anew"
    for _ in range(20):
        found.learn([(path, pace) for path, pace in zip(paths, (1, 1e-9, 1, 1), strict=True)])
    assert (8, 1, 8, 8) == found.weights
    for _ in range(4):
        found.learn([(path, 1.0) for path in paths])
    assert () == found.weights


def test_a_path_that_opens_again_begins_anew() -> None:
    """It was slow because it was dying; now it is another path."""
    found = link(2)
    path = found.path(0, 0)
    for _ in range(9):
        found.learn([(path, 0.1), (found.path(1, 1), 1.0)])
    assert (1, 8) == found.weights
    for event in (PathEvent.LOST, PathEvent.ASKED, PathEvent.FENCED):
        path.to(event)
    assert (0, 8) == found.weigh(), "a path that is not in use has no share"
    path.to(PathEvent.ASKED_BACK)
    path.to(PathEvent.OPENED)
    assert () == found.weigh()


def test_short_writes_are_not_timed() -> None:
    """Of them latency is most; and reading the clock would cost each of them."""
    with tep.sim.Cluster(nodes=2, profile="efa_4x100", move_bytes=False) as cluster:
        p = Pair(cluster)
        cluster.slow_down("a", 1, 8)
        pages = tep.Pages(range(64))
        for _ in range(3):
            p.a.submit_paged_writes(4 * KiB, (p.mr, pages), (p.desc, pages)).wait()
        assert () == link_of(p.a, p.b).weights
        assert {} == worker_of(p.a).group._races


def test_nics_that_are_polled_in_one_step_were_as_fast() -> None:
    """The NIC that is polled first would get more each time, on a machine where all are equal."""
    a, b = null_pair(2)
    ring: list[Machine] = []
    sender, receiver = (
        TransferEngine(nics, driver=InlineDriver(ring), name=name, epoch=1)
        for name, nics in (("a", a), ("b", b))
    )
    (mr, _), (_, desc) = (e.reg_mr((1 << 40, 1 << 30, "cpu")) for e in (sender, receiver))
    pages = tep.Pages(range(1024))
    for _ in range(5):
        sent = sender.submit_paged_writes(4 * KiB, (mr, pages), (desc, pages))
        while not sent.finished:
            for machine in ring:
                machine.step()
        assert [512, 512] == [nic.rows for nic in sent.stats().nics]
    assert () == link_of(sender, receiver).weights
    for engine in (sender, receiver):
        engine.close()


def test_a_prepared_scatter_weighs_no_path() -> None:
    """Its slices go to several peers: what one's NICs took says nothing of another's."""
    with tep.sim.Cluster(nodes=3, profile="efa_4x100", move_bytes=False) as cluster:
        a, *others = cluster.engines
        mr, _ = a.reg_mr((1 << 40, 16 * MiB, "cuda:0"))
        descs = [other.reg_mr((1 << 40, 16 * MiB, "cuda:0"))[1] for other in others]
        sizes = (16 * MiB, KiB)
        slices = [tep.ScatterDst(n, 0, (desc, 0)) for n, desc in zip(sizes, descs, strict=True)]
        ready = a.prepare_scatter(mr, slices, routing=tep.Routing(scatter_by="bytes"))
        for _ in range(12):  # dealt out anew at each cursor, then as before
            ready.submit(3).wait()
        assert [()] * 2 == [link_of(a, other).weights for other in others]

"""Rows that cannot be recovered fail with a reason, and leave nothing behind."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from tep.backends.base import Status
from tep.base.api import EngineOptions, Pages, ScatterDst
from tep.base.errors import ClosedError, FabricError
from tep.core.handles import Transfer
from tep.core.path import Arrivals
from tep.core.posting import Pending
from tep.sim.cluster import Cluster
from tep.sim.faults import Chaos, Mute, Slow
from tests.support.ends import Ends, finish_all
from tests.support.inside import machine_of, worker_of
from tests.support.orders import Fabric
from tests.world.explore import Choices

PAGE = 64
PAGES = 12


class Broken(Cluster):
    """Two engines, a transfer under way, and NIC 0 of the sender about to die."""

    def __init__(self, **kw) -> None:
        super().__init__(2, 2, chaos=Chaos(short_post=False), **kw)
        self.a, self.b = self.engines
        self.source = np.arange(1, PAGES * PAGE + 1).astype(np.uint8)
        self.target = np.zeros(PAGES * PAGE, np.uint8)
        self.mr, _ = self.a.reg_mr(self.source)
        _, self.desc = self.b.reg_mr(self.target)
        self.at(0.3, lambda: self.kill_nic("a", 0))

    def send(self, imm: int | None = 7) -> Transfer:
        pages = Pages(range(PAGES))
        return self.a.submit_paged_writes(PAGE, (self.mr, pages), (self.desc, pages), imm)

    def until_asked(self) -> None:
        """Run until a dead path is known and its rows are held."""
        self.env.run_until(lambda: bool(worker_of(self.a).group.losses), self.env.now + 10**8)
        assert worker_of(self.a).group.losses, "no row was lost"


@pytest.mark.parametrize("imm", [7, 0])
def test_it_is_made_good_where_nothing_is_in_the_way(imm: int) -> None:
    """Else the tests below would show nothing."""
    with Broken() as world:
        sent = world.send(imm)
        got = world.b.expect_imm_count(imm, PAGES)
        sent.wait()
        got.wait()
        assert (world.source == world.target).all()
        assert sent.stats().rows_again > 0
        assert 0 == sent.stats().rows_failed
        assert "a NIC lost" not in sent.describe()
        assert imm not in dict(world.b.stats().imms_unexpected), "no row was counted twice"


def test_without_failover_it_fails_as_ever() -> None:
    """The option is there for those who would rather save the sums."""
    with Broken(options=EngineOptions(failover=False)) as world:
        with pytest.raises(FabricError, match="NIC_DOWN") as caught:
            world.send().wait()
        assert "retransmitted" not in str(caught.value)


@pytest.mark.parametrize("imm", [7, None])
def test_nics_that_cannot_fence_fail_at_once_and_say_so(imm) -> None:
    """Whoever buys two NICs must be told that this wire does not survive the loss of one."""
    e = Ends(2)
    sent = e.pages(12, imm=imm)
    e.own.turn()
    e.nics[0].go_down()
    finish_all(e.own)

    with pytest.raises(FabricError, match="NIC_DOWN.*the script backend cannot fence a dead path"):
        sent.result()


@pytest.mark.parametrize("imm", [7, None])
def test_a_receiver_that_cannot_fence_says_so(imm: int | None) -> None:
    """Anybody can send control messages; no NIC may be told what it does not know."""
    with Broken() as world:
        for domain in machine_of(world.b).domains:
            domain.caps = replace(domain.caps, imm_source=False)
        with pytest.raises(FabricError, match="NIC_DOWN.*b says: no fence: its NIC b/0 cannot"):
            world.send(imm).wait()
        assert 0 == world.mr.inflight


def test_a_receiver_that_has_forgotten_says_so() -> None:
    """A sum that began in the middle must not be taken for one from the beginning."""
    with mock.patch.object(Arrivals, "forgot", return_value="it has forgotten"), Broken() as world:
        with pytest.raises(FabricError, match=r"NIC_DOWN.*b says: it has forgotten"):
            world.send().wait()
        assert 0 == world.mr.inflight


@pytest.mark.parametrize("more", [False, True])
def test_sums_that_contradict_each_other_end_in_an_error(
    more: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guess would hang the reader, or release it early."""
    with Broken() as world:
        sent = world.send()
        world.until_asked()
        (loss,) = worker_of(world.a).group.losses
        loss.path.sums.sent.add(7, 1)
        known = worker_of(world.a).failover.acknowledged

        def counted(*_: object) -> tuple[int]:
            return (known(loss.path, [7])[7] + (len(loss.rows) + 1 if more else -1),)

        monkeypatch.setattr(Arrivals, "sums", counted)
        with pytest.raises(FabricError, match="rows of imm 0x7, which cannot be"):
            sent.wait()
        assert len(loss.rows) == sent.stats().rows_failed
        assert 0 == worker_of(world.a).failover.rows, "none was made good"


def test_lost_rows_fail_where_an_earlier_row_of_their_immediate_may_have_landed() -> None:
    """Its arrival would be taken for theirs: the reader would be released without their bytes."""
    with Broken() as world:
        sent, other = world.send(), world.send(8)
        world.until_asked()
        for loss in worker_of(world.a).group.losses:
            loss.path.sums.unsure.add(7)
        with pytest.raises(FabricError, match="imm 0x7 failed on that path before, and may have"):
            sent.wait()
        assert other.wait().ok, "its immediate is another one"


@pytest.mark.parametrize("landed", ["none", "some", "all"])
def test_of_lost_rows_beside_those_of_a_failed_transfer_all_landed_or_none(
    landed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is unknown which of them landed: a guess would hang the reader, or release it early."""
    with Broken() as world:
        sent, fails = world.send(), world.send()
        group = worker_of(world.a).group
        world.env.run_until(lambda: bool(group.losses) and all(x.asked for x in group.losses))
        fails.failure = FabricError("scripted", code="REMOTE_KEY")
        losses = list(worker_of(world.a).group.losses)
        mixed = [x for x in losses if {r.pending.transfer for r in x.rows} == {sent, fails}]
        assert mixed, "no path lost rows of both"
        known = worker_of(world.a).failover.acknowledged

        def counted(*_: object) -> tuple[int]:
            (loss,) = losses
            came = {"none": 0, "some": 1, "all": len(loss.rows)}[landed]
            return (known(loss.path, [7])[7] + came,)

        monkeypatch.setattr(Arrivals, "sums", counted)
        why = pytest.raises(FabricError, match=r"1 of \d+ rows of imm 0x7 came, \d+ are of failed")
        with why if landed == "some" else nullcontext():
            sent.wait()
        assert (landed == "some") == (7 in losses[0].path.sums.unsure)
        world.env.run()
        assert "scripted" in str(fails.error)


def test_rows_of_a_batch_that_has_not_ended_are_known_to_have_landed() -> None:
    """Their count would be taken for a lost row's, which would then not be written again."""
    chaos = Chaos(short_post=False, sq_depth=64, peer_depth=1)
    with Cluster(3, (1, 2, 1), chaos=chaos, seed=1) as cluster:
        a, *receivers = cluster.engines
        mr, _ = a.reg_mr(np.ones(PAGE, np.uint8))
        b, c = (engine.reg_mr(np.zeros(PAGE, np.uint8))[1] for engine in receivers)
        cluster.at(0, Slow("c", 0, 1_000_000))
        to_b = [ScatterDst(1, 0, (b, at)) for at in range(4)]
        a.submit_single_write(1, (mr, 0), (c, 0))
        first = a.submit_scatter(mr, [*to_b, ScatterDst(1, 0, (c, 1))], imm=7)
        cluster.env.run_until(lambda: first.stats().rows_back == 4)
        cluster.kill_nic("b", 0)
        again = a.submit_scatter(mr, to_b, imm=7)
        again.wait()
        receivers[0].expect_imm_count(7, 8).wait()
        assert again.stats().rows_again > 0
        assert first.stats().rows_posted == 4, "the batch of the first was over"


def test_a_receiver_that_restarts_meanwhile_ends_it() -> None:
    """Nobody is left who knows what had come."""
    with Broken() as world:
        sent = world.send()
        world.until_asked()
        world.restart("b")
        with pytest.raises(FabricError, match=r"NIC_DOWN|STALE_PEER"):
            sent.wait()
        assert [] == worker_of(world.a).group.losses


def test_closing_meanwhile_ends_it() -> None:
    """A held row is with no NIC: nobody else would ever end it."""
    with Broken() as world:
        sent = world.send()
        world.until_asked()
        rows = sum(len(loss.rows) for loss in worker_of(world.a).group.losses)
        assert f"a NIC lost {rows} rows" in sent.describe()
        assert "a NIC lost" in world.a.stall_report()
        world.a.close()
        assert sent.finished
        assert isinstance(sent.error, ClosedError)


def test_closing_ends_a_lost_row_and_those_that_end_behind_it() -> None:
    """They would be kept for an answer that nobody awaits, or name a NIC that is not why."""
    fabric = Fabric(Choices(), (2, 2), ())
    a, b = fabric.engines
    mr, _ = a.reg_mr(np.ones(8, np.uint8))
    _, desc = b.reg_mr(np.zeros(8, np.uint8))
    sent = [a.submit_single_write(8, (mr, 0), (desc, 0), 7) for _ in range(4)]
    fabric.rest()
    lost, behind = (f for f in fabric.flights if f.there is fabric.flights[0].there)
    fabric.die(lost.there)
    fabric.rest()
    fabric.fail(lost)
    fabric.rest()
    a.close()

    assert behind.ended
    assert [1, 3] == [
        sum(isinstance(write.error, kind) for write in sent) for kind in (ClosedError, FabricError)
    ]


def test_closing_before_the_last_immediate_ends_it() -> None:
    """The bytes of a lost row are there again, and its immediate would be queued for ever."""
    fabric = Fabric(Choices(), (2, 2), ())
    a, b = fabric.engines
    mr, _ = a.reg_mr(np.ones(8, np.uint8))
    _, desc = b.reg_mr(np.zeros(8, np.uint8))
    sent = a.submit_single_write(8, (mr, 0), (desc, 0), 7)
    fabric.rest()
    (lost,) = fabric.flights
    batches = worker_of(a).group.batches
    assert [0] == [batch.tries for batch in batches.values()]
    fabric.die(lost.here)
    fabric.rest()
    fabric.fail(lost)
    fabric.rest()
    while len(fabric.flights) == 1:
        events = [fabric.deliver] * bool(fabric.controls) + [fabric.fence] * bool(fabric.fences)
        events[0](0)
        fabric.rest()
    assert [1] == [batch.tries for batch in batches.values()], "it would be tried for ever"
    again = fabric.flights[1]
    fabric.land(again)
    fabric.end(again, Status.OK)
    a.close()

    assert isinstance(sent.error, ClosedError)
    stats = sent.stats()
    assert (1, 2, 2) == (stats.rows_dropped, stats.rows_back, stats.rows_again)


def test_cancel_meanwhile_is_confirmed_once_the_path_is_fenced() -> None:
    """Until then the lost rows may land in memory that is somebody else's by now."""
    with Broken() as world:
        sent = world.send()
        world.until_asked()
        sent.cancel()
        world.env.run()
        assert sent.finished
        assert sent.cancelled or sent.ok
        assert [] == worker_of(world.a).group.losses
        assert 0 == world.mr.inflight


@pytest.mark.parametrize("nics", [(1, 2), (2, 2), (3, 4)])
def test_a_nic_that_is_deaf_is_not_tried_for_ever(nics: tuple[int, int]) -> None:
    """Its rows land and it never hears so: it answers probes, its paths open, and no row ends."""
    chaos = Chaos.calm(dead_after_ps=300_000_000)
    quick = EngineOptions(probe_first_s=20e-6, probe_max_s=40e-6)
    with Cluster(2, nics, chaos=chaos, options=quick) as cluster:
        a, b = cluster.engines
        target = np.zeros(PAGES * PAGE, np.uint8)
        source = np.arange(1, PAGES * PAGE + 1).astype(np.uint8)
        (mr, _), (_, desc), pages = a.reg_mr(source), b.reg_mr(target), Pages(range(PAGES))
        cluster.at(0.1, Mute("a", 0))
        sent = a.submit_paged_writes(PAGE, (mr, pages), (desc, pages), 7)
        got = b.expect_imm_count(7, PAGES)
        watch = b.watch_peer(a.main_address, every_s=20e-6, lost_after_s=1.0)  # turns both engines
        if nics[0] > 1:
            sent.wait(0.02)
            got.wait(0.02)
            assert (source == target).all()
        else:
            with pytest.raises(FabricError, match="on 2 paths before|UNREACHABLE"):
                sent.wait(0.02)
        watch.close()


@pytest.mark.slow
def test_a_path_with_rows_out_is_looked_at_in_constant_time() -> None:
    """While rows of a dead path are awaited each step would scan every posted row: milliseconds."""
    rows, steps = 4096, 50
    fabric = Fabric(Choices(), (1, 2), (), depth=3 * rows)
    a, b = fabric.engines
    mr, _ = a.reg_mr(np.ones(rows, np.uint8))
    _, desc = b.reg_mr(np.zeros(rows, np.uint8))
    pages = Pages(range(rows))
    for imm in range(3):
        a.submit_paged_writes(1, (mr, pages), (desc, pages), imm)
    fabric.rest()
    lost = next(flight for flight in fabric.flights if flight.there is fabric.nics[2])
    fabric.die(lost.there)
    fabric.rest()
    fabric.fail(lost)
    fabric.rest()
    assert worker_of(a).group.losses, "no row was lost"
    looks: list[int] = []
    target = Pending.target

    def counted(self: Pending, row: int) -> tuple:
        looks.append(row)
        return target(self, row)

    with mock.patch.object(Pending, "target", counted):
        for _ in range(steps):
            a.driver.turn()
    assert len(looks) < steps, f"{len(looks)} looks at rows in {steps} steps"


def test_bytes_behind_a_row_without_bytes_are_written_again() -> None:
    """They share an immediate: the reader would be told of bytes that nobody wrote."""
    fabric = Fabric(Choices(), (1, 2), ())
    a, b = fabric.engines
    source, target = np.arange(1, 65).astype(np.uint8), np.zeros(64, np.uint8)
    (mr, _), (_, desc), pages = a.reg_mr(source), b.reg_mr(target), Pages(range(8))
    empty = [a.submit_barrier([desc], 7) for _ in range(2)]
    sent = a.submit_paged_writes(8, (mr, pages), (desc, pages), 7)
    got = b.expect_imm_count(7, 10)
    fabric.rest()
    assert {0, 8} == {f.row.nbytes for f in fabric.flights if f.there is fabric.nics[1]}
    fabric.die(fabric.nics[1])
    fabric.run()
    assert (sent.ok, got.ok, True) == (True, True, all(each.ok for each in empty))
    assert (source == target).all()


def test_no_row_of_a_scatter_is_out_on_a_path_that_is_asked_about() -> None:
    """It could land after it was counted, and be written again over what its reader uses."""
    fabric = Fabric(Choices(), (1, 2), ())
    a, b = fabric.engines
    mr, _ = a.reg_mr(np.ones(64, np.uint8))
    _, desc = b.reg_mr(np.zeros(64, np.uint8))
    for imm in (7, 8):
        a.submit_scatter(mr, [ScatterDst(8, 0, (desc, 8 * k)) for k in range(4)], imm)
    fabric.rest()
    behind = [f for f in fabric.flights if f.there is not fabric.flights[0].there]
    assert 0 not in {f.index for f in behind}
    for flight in fabric.flights:
        if flight not in behind:
            fabric.land(flight)
            fabric.end(flight, Status.OK)
    fabric.die(behind[0].there)
    fabric.rest()
    for flight in behind:
        assert [] == fabric.controls, "asked while a row is out"
        fabric.fail(flight)
        fabric.rest()
    assert fabric.controls

"""NICs, cables, queue pairs and processes that die under real transfers: counts stay exact."""

from __future__ import annotations

import contextlib
import time

import pytest

from tep.base.errors import FabricError
from tep.base.units import KiB, MiB
from tep.base.wire import MrDesc
from tests.support.inside import nics_of, peers_of, worker_of
from tests.support.vm.shape import netem, unplugged
from tests.verbs.rig import Peer, buffer, engine, noise, pages, pair, turn_until

PAGE = 4 * KiB
ROWS = 512


@contextlib.contextmanager
def halfway(devices, before=128):
    """A paged write over two NICs a side, `before` of its rows acknowledged; checked at the end.

    Yields both engines while the other rows wait: the queues are short, so that the kernel does not
    carry everything out while nobody turns the engines.
    """
    with pair(devices[:2], devices[4:6], sq_depth=64) as (a, b):
        source, target = noise(ROWS * PAGE), buffer(ROWS * PAGE)
        (mr, _), (_, desc) = a.reg_mr(source), b.reg_mr(target)
        first = b.expect_imm_count(1, 2)
        a.submit_paged_writes(PAGE, (mr, pages(2)), (desc, pages(2)), imm=1).wait(20)
        first.wait(20)  # both lanes stand
        got = b.expect_imm_count(2, ROWS)
        sent = a.submit_paged_writes(PAGE, (mr, pages(ROWS)), (desc, pages(ROWS)), imm=2)
        turn_until(a, lambda: sent.stats().rows_back >= before)
        assert sent.stats().rows_back < ROWS, "it is over before anything has failed"
        yield a, b
        sent.wait(30)
        got.wait(30)
        turn_until(a, lambda: not worker_of(a).channel.busy)

        assert (source == target).all()
        assert () == b.stats().imms_unexpected


@pytest.mark.parametrize("nic", [0, 5], ids=["ours", "theirs"])
def test_a_write_outlives_a_pulled_cable(soft_devices, nic):
    """A port that stays down is a dead NIC, at either end; the other NIC carries the rest."""
    with halfway(soft_devices) as (a, _), unplugged(nic):
        turn_until(a, lambda: worker_of(a).group.losses or not all(worker_of(a).group.alive))


def test_rows_whose_acknowledgements_are_lost_count_once(soft_devices):
    """They land, and their sender never hears of it: written again, each would count twice."""
    with halfway(soft_devices) as (a, b), netem(["nic4"], "loss 100%"):
        before = b.stats().imms_counted
        turn_until(a, lambda: worker_of(a).failover.rows)

    assert before < ROWS


def test_a_queue_pair_that_dies_at_the_receiver_takes_nothing_along(soft_devices):
    """Under loss, as on a bad day: some rows land and are not acknowledged, some never land."""
    with netem([f"nic{k}" for k in (0, 1, 4, 5)], "loss 2%"), halfway(soft_devices) as (a, b):
        for conn in list(nics_of(b)[0].peers.conns.values()):
            conn.fail(time.monotonic())  # beneath its owner, who is not told
        turn_until(a, lambda: worker_of(a).failover.rows)


def test_a_path_that_lost_rows_is_used_again(soft_devices):
    """A cable that is put back in carries its share, or every bad minute costs bandwidth."""
    with halfway(soft_devices) as (a, b):
        with netem(["nic4"], "loss 100%"):
            turn_until(a, lambda: worker_of(a).failover.rows)
        link = next(iter(peers_of(a).links.values()))
        assert link.shut()
        turn_until(a, lambda: not (link.shut() or link.closed))
        source, target = noise(16 * PAGE, 3), buffer(16 * PAGE)
        (mr, _), (_, desc) = a.reg_mr(source), b.reg_mr(target)
        nics = worker_of(b).arrivals
        before = [sum(count for _, count in each.counted.items()) for each in nics]
        got = b.expect_imm_count(3, 16)
        again = a.submit_paged_writes(PAGE, (mr, pages(16)), (desc, pages(16)), imm=3)
        again.wait(20)
        got.wait(20)
        after = [sum(count for _, count in each.counted.items()) for each in nics]

        assert (source == target).all()
        assert 0 == again.stats().rows_again
        assert [8, 8] == [now - was for now, was in zip(after, before, strict=True)]


def victim(pipe, devices):
    """The other process: offers memory, and is killed."""
    with engine("victim", devices) as here:
        _, desc = here.reg_mr(buffer(MiB))
        pipe.send(desc.to_bytes())
        pipe.recv()  # for ever


@pytest.mark.parametrize("count", [1, 2])
def test_a_killed_process_is_an_error_within_the_promised_time(devices, count):
    """With more NICs there is more to try, and still no time for a hang: nobody is there at all."""
    with Peer(victim, devices[4 : 4 + count]) as peer:
        desc = MrDesc.from_bytes(peer.ask())
        with engine("survivor", devices[:count], drain_s=3.0) as here:
            mr, _ = here.reg_mr(noise(MiB))
            all_pages = pages(64)
            here.submit_paged_writes(PAGE, (mr, all_pages), (desc, all_pages), imm=1).wait(20)
            peer.kill()
            start_s = time.monotonic()
            late = here.submit_paged_writes(PAGE, (mr, all_pages), (desc, all_pages), imm=2)
            with pytest.raises(FabricError) as caught:
                late.wait(20)
            took_s = time.monotonic() - start_s
            bound_s = nics_of(here)[0].caps.peer_timeout_s

    assert "UNREACHABLE" == caught.value.code
    assert took_s < bound_s

"""A peer that takes no messages holds up its own, and nobody else's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest

import tep
from tep.core.outbox import WINDOW, WINDOW_MAX
from tep.engine import TransferEngine
from tests.support.inside import machine_of, peers_of
from tests.support.pairs import pair
from tests.support.script import memory, scripted


def on_loopback(name: str) -> TransferEngine:
    return TransferEngine.open("loopback", name=name)


def on_local(name: str) -> TransferEngine:
    return TransferEngine.open("local", name=name)


@pytest.mark.parametrize("start", [on_loopback, on_local])
def test_a_silent_peer_holds_up_no_other(start: Callable[[str], TransferEngine]) -> None:
    """A worker that has stalled must not cut its scheduler off from all other workers."""
    got: list[bytes] = []
    with start("bp-a") as a, start("bp-silent") as silent, start("bp-b") as b:
        b.submit_recvs(64, 8, lambda view: got.append(bytes(view)))
        a.submit_send(b.main_address, b"first").wait(20)
        stuck = [a.submit_send(silent.main_address, b"x") for _ in range(200)]
        for k in range(20):
            a.submit_send(b.main_address, b"%d" % k).wait(20)
        assert not any(message.finished for message in stuck)
        silent.submit_recvs(64, 8, lambda view: None)
        for message in stuck:  # and what waited for it is not lost
            message.wait(20)
            assert message.ok

    assert sorted([b"first", *(b"%d" % k for k in range(20))]) == sorted(got)


@pytest.mark.parametrize("seed", range(4))
def test_a_silent_peer_holds_up_nobody_on_the_chaos_fabric(seed: int) -> None:
    """Its NICs keep what finds no buffer, and have room for 64 messages in all."""
    got: list[bytes] = []
    chaos = tep.sim.Chaos.calm(seed)
    with tep.sim.Cluster(nodes=3, nics=1, chaos=chaos) as cluster:
        a, silent, b = cluster.engines
        b.submit_recvs(64, 4, lambda view: got.append(bytes(view)))
        stuck = [a.submit_send(silent.main_address, b"x") for _ in range(100)]
        for k in range(40):
            a.submit_send(b.main_address, b"%d" % k).wait()
        assert not any(message.finished for message in stuck)

    assert sorted(b"%d" % k for k in range(40)) == sorted(got)


def test_a_peer_that_takes_messages_may_have_more_at_a_nic() -> None:
    """A small window for ever would make one round trip the price of a few messages."""
    own = scripted()
    nic = own.nics[0]
    sent = [own.engine.submit_send(own.engine.main_address, b"x") for _ in range(200)]
    own.turn(3)
    assert WINDOW == len(nic.sent)
    while len(nic.sent) < 200:
        before = len(nic.sent)
        nic.acknowledge()
        nic.sent.clear()
        own.turn(2)
        assert min(2 * before, WINDOW_MAX) == len(nic.sent), "one more for each that was taken"
        if before == WINDOW_MAX:
            break
    assert WINDOW_MAX == len(nic.sent)
    assert not all(message.finished for message in sent)
    own.engine.close()
    assert all(message.finished for message in sent)


def test_peers_get_equal_turns_where_a_nic_has_little_room() -> None:
    """First come, first served would let one peer's thousand messages delay a single one."""
    own, others = scripted(), [scripted(name=f"p{k}") for k in range(4)]
    own.nics[0].send_room = 0
    for other in others:
        for k in range(6):
            own.engine.submit_send(other.engine.main_address, b"%d" % k)
    for _ in range(8):
        own.nics[0].send_room = 1
        own.turn()
    order = [peer for peer, _, _ in own.nics[0].sent]

    assert sorted([0, 1, 2, 3] * 2) == sorted(order)
    assert len(set(order[:4])) == 4


def test_a_message_is_cancelled_wherever_it_stands() -> None:
    """Behind others, before others, alone; the rest keep their order."""
    own = scripted()
    own.nics[0].send_room = 0
    sent = [own.engine.submit_send(own.engine.main_address, b"%d" % k) for k in range(5)]
    own.turn()
    for k in (2, 0, 4):
        sent[k].cancel()
    own.turn()
    own.nics[0].send_room = 9
    own.turn()

    assert [True, False, True, False, True] == [message.cancelled for message in sent]
    assert [b"1", b"3"] == [payload for _, payload, _ in own.nics[0].sent]


@pytest.mark.parametrize("verb", ["single", "scatter"])
def test_a_write_that_races_with_deregister_is_refused(verb) -> None:
    """Checked before the region was given back, queued after: its key is dead, or another's."""
    own = scripted()
    engine = own.engine
    mr, desc = engine.reg_mr(memory(64))
    _, target = engine.reg_mr(memory(64))
    real = machine_of(engine).submit

    def late(job, on_done) -> tep.Transfer:  # the other thread runs here
        machine_of(engine).submit = real
        engine.deregister(mr)
        return real(job, on_done)

    machine_of(engine).submit = late
    sent = (
        engine.submit_single_write(8, (mr, 0), (target, 0), 1)
        if verb == "single"
        else engine.submit_scatter(mr, [tep.ScatterDst(8, 0, (target, 0))])
    )
    own.turn(2)

    with pytest.raises(tep.ClosedError, match=f"{verb}: the source region 1 was deregistered"):
        sent.result()
    assert [] == own.posted
    assert all(remote.steady is None for remote in peers_of(engine).remotes.values())
    assert desc.region == 1


def test_threads_that_submit_while_another_deregisters() -> None:
    """Each write ends as done or refused; none is posted with a key that is no more."""
    with pair(threads=True) as p:
        for _ in range(20):
            mr, _ = p.a.reg_mr(bytearray(64))
            sent: list[tep.Transfer] = []
            began = threading.Event()

            def submit(mr=mr, sent=sent, began=began) -> None:
                with contextlib.suppress(tep.ClosedError):
                    for _ in range(10_000):
                        sent.append(p.a.submit_single_write(8, (mr, 0), (p.desc, 0)))
                        began.set()
                        sent[-1].wait(20)

            thread = threading.Thread(target=submit)
            thread.start()
            began.wait(20)
            while True:
                try:
                    p.a.deregister(mr)
                except tep.BusyError:
                    continue
                break
            thread.join(60)
            for transfer in sent:
                assert transfer.ok or isinstance(transfer.error, tep.ClosedError)

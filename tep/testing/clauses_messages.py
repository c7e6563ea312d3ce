"""C21 to C23, C34: messages and their pool, wake-ups, and a NIC that dies under its owner."""

from __future__ import annotations

import select
from collections import Counter
from functools import partial

import pytest

from tep.backends.base import Kind, Status
from tep.testing.net import Net, Side
from tep.testing.world import Ability, World, need

__all__ = ["MessagesContract"]


class MessagesContract:
    """Clauses on messages and wake-ups."""

    def test_c21_messages_arrive_whole_and_once(self, world: World) -> None:
        """Descriptors travel as messages: a part of one, or one twice, is garbage."""
        net = Net(world)
        a, b = net.pair()
        b.domains[0].post_recvs(4096, 8)
        sent = [bytes([k]) * n for k, n in enumerate((0, 1, 2, 63, 64, 1000, 4095, 4096))]
        for payload in sent:
            a.send(b, payload)
        net.settle()

        assert Counter(sent) == Counter(b.messages())
        assert 8 == a.acknowledged.total()
        assert [] == a.errors()

    def test_c34_a_message_says_where_it_came_from(self, world: World) -> None:
        """Two peers that are taken for each other get each other's answers."""
        net = Net(world)
        a, b = net.side(nics=2), net.side()
        c = net.side()
        c.domains[0].post_recvs(64, 8)
        sent = [(a, 0), (b, 0), (a, 1), (a, 0), (b, 0)]
        for side, nic in sent:
            side.send(c, b"from %d" % nic, nic=nic)
        net.settle()

        expected = Counter(side.domains[nic].address for side, nic in sent)
        assert expected == Counter(c.senders())
        assert len(sent) == len(c.messages())

    def test_c21_the_payload_is_copied_at_once(self, world: World) -> None:
        """The caller's buffer is its own again when post_send() returns."""
        net = Net(world)
        a, b = net.pair()
        b.domains[0].post_recvs(64, 1)
        payload = bytearray(b"as it was at the call")
        peer = a.peer(b)
        a.sent[7] += 1
        taken = False
        while not taken:
            taken = a.domains[0].post_send(peer, bytes(memoryview(payload)), 7)
            net.turn()
        payload[:] = b"\x00" * len(payload)
        net.settle()

        assert [b"as it was at the call"] == b.messages()

    def test_c21_the_pool_rotates(self, world: World) -> None:
        """Few buffers carry many messages, as long as they are given back."""
        net = Net(world)
        a, b = net.pair()
        b.domains[0].post_recvs(64, 2)
        got: list[bytes] = []
        sent = [b"message %d" % k for k in range(40)]
        for payload in sent:
            a.send(b, payload)
            got += b.messages()

        def collect() -> bool:
            got.extend(b.messages())
            return len(got) == len(sent)

        net.until(collect, "40 messages through 2 buffers")
        net.settle()

        assert Counter(sent) == Counter(got)
        assert 40 == a.acknowledged.total()

    def test_c21_a_buffer_in_use_is_not_overwritten(self, world: World) -> None:
        """The view is valid until recv_done(): the callback reads in place."""
        net = Net(world)
        a, b = net.pair()
        b.domains[0].post_recvs(64, 1)
        a.send(b, b"first, and still being read")
        net.until(lambda: len(b.unread) == 1, "the first message")
        a.send(b, b"second, which has to wait...")
        net.quiet()
        assert 1 == len(b.unread), "there was one buffer, and it is out"

        assert [b"first, and still being read"] == b.messages()
        net.until(lambda: len(b.unread) == 1, "the second message")
        assert [b"second, which has to wait..."] == b.messages()

    def test_c21_immediates_take_no_message_buffer(self, world: World) -> None:
        """The pool's buffers are for messages; a NIC that feeds immediates feeds them itself."""
        net = Net(world)
        a, b = net.pair()
        b.domains[0].post_recvs(64, 1)
        net.write(a.batch(b, src=[0] * 200, dst=0, nbytes=8, imm=1), a)
        a.send(b, b"there is still room for me")
        net.settle()

        assert [b"there is still room for me"] == b.messages()
        assert {1: 200} == b.imms()

    def test_c21_a_message_too_long_for_the_buffer_fails(self, world: World) -> None:
        """Cut short it would decode as garbage; unsaid it would be waited for."""
        net = Net(world)
        a, b = net.pair()
        b.domains[0].post_recvs(64, 2)
        ctx = a.send(b, b"x" * 65)
        net.settle()

        assert [] == b.messages()
        assert [(Kind.SENT, ctx)] == [(seen.kind, seen.ctx) for seen in a.errors()]

    def test_c22_arrival_wakes_a_sleeping_target(self, world: World) -> None:
        """A worker that sleeps on its NIC wakes when an immediate arrives, or never."""
        net = Net(world)
        a, b = net.pair()
        net.write(a.batch(b, imm=1), a)
        calls = _sleep(net, b)
        net.forget(b)
        a.post(a.batch(b, imm=2))
        # The sender's rows are not waited for: some NICs acknowledge only while the target polls.
        for _ in range(net.world.turns_max):
            net.until(partial(_woken, b, calls), "b to be woken")
            b.poll()
            calls = _sleep(net, b)  # it may have been woken without news
            if 2 in b.imms():
                break
        net.sides.append(b)
        net.settle()

        assert {1: 1, 2: 1} == b.imms()

    def test_c22_completion_wakes_a_sleeping_sender(self, world: World) -> None:
        """The sender sleeps too, once it has spun for a while."""
        net = Net(world)
        a, b = net.pair()
        net.write(a.batch(b, imm=1), a)
        calls = _sleep(net, a)
        net.forget(a)
        batch = a.batch(b, imm=2)
        start = 0
        for _ in range(net.world.turns_max):
            start = start or a.try_post(batch, 0, 1)
            net.turn()
            if _woken(a, calls):
                calls.clear()
                a.poll()
            if start and not a.rows_open:
                break
        net.sides.append(a)

        assert {batch.ctx: 1, 1: 1} == a.returned

    def test_c22_a_full_queue_wakes_its_owner_when_there_is_room(self, world: World) -> None:
        """After a refusal the engine waits to be woken; otherwise the rest is never posted."""
        net = Net(world)
        a, b = net.pair()
        net.write(a.batch(b, imm=1), a)
        calls = _sleep(net, a)
        n = 2 * min(a.domains[0].caps.sq_depth, 20_000) + 1
        batch = a.batch(b, src=[0] * n, dst=0, nbytes=8)
        start = 0
        net.forget(a)
        for _ in range(net.world.turns_max):
            taken = 1
            while taken and start < n:
                taken = a.try_post(batch, start, n)
                start += taken
            if start == n:
                break
            a.domains[0].arm()
            net.until(lambda: _woken(a, calls), "the owner of a full queue to be woken")
            calls.clear()
            a.poll()
        net.sides.append(a)
        net.settle()

        assert n == a.returned[batch.ctx]

    def test_c23_a_dead_nic_says_so_and_gives_its_rows_back(self, world: World) -> None:
        """The group moves what it has not posted to other NICs, once it knows."""
        need(world, Ability.FAIL_NIC)
        net = Net(world)
        a, b = net.pair(nics=2)
        net.write(a.batch(b, imm=1), a)
        at = [64 * k for k in range(60)]
        batch = a.batch(b, src=at, dst=at, imm=2)
        a.try_post(batch, 0, batch.n)
        world.fail_nic(a.node, 0)
        net.until(lambda: any(seen.kind == Kind.DOWN for seen in a.seen), "NIC 0 to be reported")
        net.until(lambda: a.rows_open == 0, "the rows of NIC 0")
        net.quiet()

        assert [0] == [seen.nic for seen in a.seen if seen.kind == Kind.DOWN]
        ended = a.rows_ended(batch.ctx)
        assert a.accepted[batch.ctx] == ended.total()
        assert set(ended) <= {Status.OK, Status.NIC_DOWN, Status.FLUSHED}
        net.write(a.batch(b, src=at, dst=at, imm=3, nic=1, remote=1), a, nic=1)
        assert 60 == b.imms()[3], "the other NIC is not concerned"

    def test_c23_a_dying_nic_hands_out_what_its_peers_know_to_be_there(self, world: World) -> None:
        """They write none of it again: an immediate that dies with the NIC never comes."""
        need(world, Ability.FAIL_NIC)
        net = Net(world)
        a, b = net.pair(nics=2)
        net.write(a.batch(b, imm=1), a)
        at = [64 * k for k in range(12)]
        batch = a.batch(b, src=at, dst=at, imm=2)
        net.forget(b)  # so that what arrives is still there when its NIC dies
        a.try_post(batch, 0, batch.n)
        for _ in range(world.quiet_turns):
            net.turn()
        told = a.rows_ended(batch.ctx)[Status.OK]
        world.fail_nic(b.node, 0)
        net.sides.append(b)
        net.until(lambda: any(seen.kind == Kind.DOWN for seen in b.seen), "NIC 0 to be reported")
        before = next(k for k, seen in enumerate(b.seen) if seen.kind == Kind.DOWN)
        late = [seen for seen in b.seen[before:] if seen.kind == Kind.IMM and seen.nic == 0]

        assert told <= b.imms()[2]
        assert [] == late


def _sleep(net: Net, side: Side) -> list[int]:
    """Do what a driver does before it sleeps; return a list that grows with each wake-up."""
    if not all(domain.caps.wakes for domain in side.domains):
        pytest.skip("this NIC wakes nobody: caps.wakes is False")
    calls: list[int] = []
    for domain in side.domains:
        domain.set_waker(lambda: calls.append(1))
    for _ in range(net.world.turns_max):
        side.poll()
        calls.clear()
        if all(domain.arm() for domain in side.domains):
            return calls
        net.turn()
    raise AssertionError("C22: arm() never says that nothing is waiting, on an idle NIC")


def _woken(side: Side, calls: list[int]) -> bool:
    """Whether the waker was called, or a descriptor is readable."""
    fds = [fd for domain in side.domains if (fd := domain.wakeup_fd()) is not None]
    return bool(calls) or bool(fds and select.select(fds, [], [], 0)[0])

"""C21 to C27, C34: messages and their pool, wake-ups, a NIC that dies under its owner; control
messages between engines, where an immediate came from, and fences.

A backend without control messages (caps.control_bytes is 0) is asked for nothing of C24 to C27, one
that cannot name senders (caps.imm_source is False) for C24 only: it has no NIC failover.
"""

from __future__ import annotations

import select
from collections import Counter
from functools import partial
from typing import Final, cast

import pytest

from tep.backends.base import ControlDomain, Kind, Status, WriteBatch
from tep.base.errors import ClosedError
from tep.testing.world import Ability, Net, Seen, Side

__all__ = ["ControlContract", "MessagesContract"]


class MessagesContract:
    """Clauses on messages and wake-ups."""

    def test_c21_messages_arrive_whole_and_once(self, net: Net) -> None:
        """Descriptors travel as messages: a part of one, or one twice, is garbage."""
        a, b = net.pair()
        b.domains[0].post_recvs(4096, 8)
        sent = [bytes([k]) * n for k, n in enumerate((0, 1, 2, 63, 64, 1000, 4095, 4096))]
        for payload in sent:
            a.send(b, payload)
        net.settle()

        assert Counter(sent) == Counter(b.messages())
        assert 8 == a.acknowledged.total()
        assert [] == a.errors()

    def test_c34_a_message_says_where_it_came_from(self, net: Net) -> None:
        """Two peers that are taken for each other get each other's answers."""
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

    def test_c21_the_payload_is_copied_at_once(self, net: Net) -> None:
        """The caller's buffer is its own again when post_send() returns."""
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

    def test_c21_the_pool_rotates(self, net: Net) -> None:
        """Few buffers carry many messages, as long as they are given back."""
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

    def test_c21_a_buffer_in_use_is_not_overwritten(self, net: Net) -> None:
        """The view is valid until recv_done(): the callback reads in place."""
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

    def test_c21_immediates_take_no_message_buffer(self, net: Net) -> None:
        """The pool's buffers are for messages; a NIC that feeds immediates feeds them itself."""
        a, b = net.pair()
        b.domains[0].post_recvs(64, 1)
        net.write(a.batch(b, src=[0] * 200, dst=0, nbytes=8, imm=1), a)
        a.send(b, b"there is still room for me")
        net.settle()

        assert [b"there is still room for me"] == b.messages()
        assert {1: 200} == b.imms()

    def test_c21_a_message_too_long_for_the_buffer_fails(self, net: Net) -> None:
        """Cut short it would decode as garbage; unsaid it would be waited for."""
        a, b = net.pair()
        b.domains[0].post_recvs(64, 2)
        ctx = a.send(b, b"x" * 65)
        net.settle()

        assert [] == b.messages()
        assert [(Kind.SENT, ctx)] == [(seen.kind, seen.ctx) for seen in a.errors()]

    def test_c22_arrival_wakes_a_sleeping_target(self, net: Net) -> None:
        """A worker that sleeps on its NIC wakes when an immediate arrives, or never."""
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

    def test_c22_completion_wakes_a_sleeping_sender(self, net: Net) -> None:
        """The sender sleeps too, once it has spun for a while."""
        a, b = net.pair()
        net.write(a.batch(b, imm=1), a)
        calls = _sleep(net, a)
        net.forget(a)
        batch = a.batch(b, imm=2)
        for _ in range(net.world.turns_max):
            posted = a.offer(batch)
            net.turn()
            if _woken(a, calls):
                calls.clear()
                a.poll()
            if posted and not a.rows_open:
                break
        net.sides.append(a)

        assert {batch.ctx: 1, 1: 1} == a.returned

    def test_c22_a_full_queue_wakes_its_owner_when_there_is_room(self, net: Net) -> None:
        """After a refusal the engine waits to be woken; otherwise the rest is never posted."""
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

    def test_c23_a_dead_nic_says_so_and_gives_its_rows_back(self, net: Net) -> None:
        """The group moves what it has not posted to other NICs, once it knows."""
        net.need(Ability.FAIL_NIC)
        a, b = net.pair(nics=2)
        net.write(a.batch(b, imm=1), a)
        batch = a.batch(b, n=60, imm=2)
        a.try_post(batch, 0, batch.n)
        net.world.fail_nic(a.node, 0)
        net.until(lambda: any(seen.kind == Kind.DOWN for seen in a.seen), "NIC 0 to be reported")
        net.until(lambda: a.rows_open == 0, "the rows of NIC 0")
        net.quiet()

        assert [0] == [seen.nic for seen in a.seen if seen.kind == Kind.DOWN]
        ended = a.rows_ended(batch.ctx)
        assert a.accepted[batch.ctx] == ended.total()
        assert set(ended) <= {Status.OK, Status.NIC_DOWN, Status.FLUSHED}
        net.write(a.batch(b, n=60, imm=3, nic=1, remote=1), a, nic=1)
        assert 60 == b.imms()[3], "the other NIC is not concerned"

    def test_c23_a_dying_nic_hands_out_what_its_peers_know_to_be_there(self, net: Net) -> None:
        """They write none of it again: an immediate that dies with the NIC never comes."""
        net.need(Ability.FAIL_NIC)
        a, b = net.pair(nics=2)
        net.write(a.batch(b, imm=1), a)
        batch = a.batch(b, n=12, imm=2)
        net.forget(b)  # so that what arrives is still there when its NIC dies
        a.try_post(batch, 0, batch.n)
        for _ in range(net.world.quiet_turns):
            net.turn()
        told = a.rows_ended(batch.ctx)[Status.OK]
        net.world.fail_nic(b.node, 0)
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
    """Return True if the waker was called, or a descriptor is readable."""
    fds = [fd for domain in side.domains if (fd := domain.wakeup_fd()) is not None]
    return bool(calls) or bool(fds and select.select(fds, [], [], 0)[0])


_ROWS: Final = 30


def _pair(net: Net, nics: int = 1) -> tuple[Side, Side]:
    a, b = net.pair(nics=nics)
    if not a.domains[0].caps.control_bytes:
        pytest.skip("this backend has no control messages: caps.control_bytes is 0")
    return a, b


def _fencing(net: Net, nics: int = 1) -> tuple[Side, Side]:
    a, b = _pair(net, nics)
    if not a.domains[0].caps.imm_source:
        pytest.skip("this backend neither names senders nor fences: caps.imm_source is False")
    return a, b


def _nic(side: Side, nic: int = 0) -> ControlDomain:
    return cast("ControlDomain", side.domains[nic])


def _fence(net: Net, side: Side, source: bytes, ctx: int, nic: int = 0) -> Seen:
    """Fence a sender off, and wait for the word that it is: a NIC that lives has to be able to."""
    _nic(side, nic).fence(source, ctx)
    found: list[Seen] = []

    def is_there() -> bool:
        found[:] = [seen for seen in side.seen if seen.kind == Kind.FENCED and seen.ctx == ctx]
        return bool(found)

    net.until(is_there, f"the FENCED entry of fence {ctx}", side.domains[nic].caps.peer_timeout_s)
    assert 1 == len(found), f"C26: one entry a fence: {found}"
    text = side.domains[nic].status_text(found[0].status)
    assert Status.OK == found[0].status, f"C26: the fence does not hold: {text}"
    return found[0]


def _unfence(a: Side, b: Side) -> None:
    """Lift b's fence against a, at both ends of the first NICs' pair."""
    _nic(b).unfence(a.domains[0].address)
    _nic(a).unfence(b.domains[0].address)


def _engine_of_each(a: Side, b: Side) -> tuple[set[bytes], set[bytes]]:
    """Return engine_of() of each NIC of a, for all NICs of both."""
    mine, theirs = (
        {_nic(a, k).engine_of(other.address) for k in range(2) for other in side.domains}
        for side in (a, b)
    )
    return mine, theirs


def _ways(a: Side, b: Side) -> tuple[tuple[Side, Side], tuple[Side, Side]]:
    return (a, b), (b, a)


def _write_both_ways(net: Net, a: Side, b: Side, imm: int) -> list[tuple[Side, Side, WriteBatch]]:
    """Write rows from a to b and back, let all come that comes: (from, to, batch) of both."""
    sent = [(side, to, side.batch(to, n=_ROWS, imm=imm)) for side, to in _ways(a, b)]
    for side, _, batch in sent:
        side.post(batch)
    net.settle()
    return sent


def _fence_amid_rows(net: Net, a: Side, b: Side, ctx: int) -> None:
    """Fence a off while it writes, and compare what landed with what was said before the fence."""
    first, first_seen = len(b.seen), len(a.seen)
    for k in range(8):
        batch = a.batch(b, n=_ROWS, imm=100 * ctx + k)
        a.try_post(batch, 0, batch.n)
        net.turn()
        a.poll()
        if k == 3:
            _fence(net, b, a.domains[0].address, ctx)
    net.settle()
    found = b.seen[first:]
    fence = [seen.kind for seen in found].index(Kind.FENCED)
    late = [seen for seen in found[fence:] if seen.kind == Kind.IMM]
    landed = sum(seen.count for seen in found[:fence] if seen.kind == Kind.IMM)
    rows = (seen for seen in a.seen[first_seen:] if seen.kind == Kind.WRITE)
    done = sum(seen.count for seen in rows if not seen.status)

    assert [] == late, "an immediate came after the fence that shut it out"
    assert done <= landed, "an acknowledged row's immediate never came"


class ControlContract:
    """Clauses on what engines need of NICs to make good what another NIC lost."""

    def test_c24_notes_arrive_whole_once_and_name_their_sender(self, net: Net) -> None:
        """An engine answers to the address that a control message came from."""
        a, b = _pair(net, nics=2)
        limit = a.domains[0].caps.control_bytes
        assert 512 <= limit, "a question with one address and a few sums has to fit"
        payloads = [b"", b"x", b"control message" * 40, bytes(range(256)) * 2, b"L" * limit]
        sent = [(nic, k) for nic in range(2) for k in range(len(payloads))]
        for nic, k in sent:
            a.control(b, payloads[k], nic=nic, remote=1 - nic)
        net.settle()

        expected = sorted((1 - nic, payloads[k], a.domains[nic].address) for nic, k in sent)
        assert expected == sorted(b.controls)
        assert [] == a.errors()
        assert [] == b.messages(), "a control message is no message of the user's"

    def test_c24_addresses_say_which_engine_they_are_of(self, net: Net) -> None:
        """Else one engine could ask in another's name, and fence it off."""
        a, b = _pair(net, nics=2)
        mine, theirs = _engine_of_each(a, b)
        assert (1, 1) == (len(mine), len(theirs)), "the NICs of one engine share it"
        assert mine != theirs, "two engines do not"
        for junk in (b"", b"?", b"x" * 40, a.domains[0].address[:-1]):
            assert isinstance(_nic(a).engine_of(junk), bytes)

    def test_c24_notes_need_no_buffer_of_the_users(self, net: Net) -> None:
        """Control messages say that a NIC died; they must not wait for a reader of messages."""
        a, b = _pair(net)
        b.domains[0].post_recvs(64, 1)
        a.send(b, b"takes the only buffer")
        net.until(lambda: len(b.unread) == 1, "the message")
        for k in range(40):
            a.control(b, b"control message %d" % k)
        net.until(lambda: len(b.controls) == 40, "40 control messages beside a message")
        assert [b"takes the only buffer"] == b.messages()

    def test_c24_a_note_to_a_dead_nic_ends_in_an_error(self, net: Net) -> None:
        """A question without end would hold its transfer for ever."""
        net.need(Ability.FAIL_NIC)
        a, b = _pair(net, nics=2)
        a.control(b, b"before")
        net.settle()
        net.world.fail_nic(b.node, 0)
        ctx = a.control(b, b"after")
        timeout_s = a.domains[0].caps.peer_timeout_s
        net.until(lambda: not a.messages_open, "the control message to end", timeout_s)
        ended = [seen.status for seen in a.seen if seen.kind == Kind.SENT and seen.ctx == ctx]
        assert 1 == len(ended)
        assert Status.OK != ended[0]
        a.control(b, b"another way", remote=1)
        net.until(lambda: len(b.controls) == 2, "a control message over the NIC that lives")

    def test_c25_an_immediate_says_which_nic_sent_it(self, net: Net) -> None:
        """Sums by sender and NIC are what a lost acknowledgement is judged by."""
        a, b = _fencing(net, nics=2)
        c = net.side(nics=2)
        lanes = [(side, nic, to) for side in (a, c) for nic in range(2) for to in range(2)]
        for side, nic, to in lanes:
            side.post(side.batch(b, n=5, imm=7, nic=nic, remote=to), nic)
        net.settle()

        for side, nic, to in lanes:
            address = side.domains[nic].address
            mine = [
                seen
                for seen in b.seen
                if seen.kind == Kind.IMM
                and seen.nic == to
                and _nic(b, to).source(seen.ctx) == address
            ]
            assert 5 == sum(seen.count for seen in mine), f"from {address!r} to NIC {to}"
            assert 1 == len({seen.ctx for seen in mine}), "one number for one sender"
            assert all(seen.ctx < 2**32 for seen in mine), "the number has 32 bits"

    def test_c26_nothing_of_a_fenced_sender_lands_any_more(self, net: Net) -> None:
        """A row that lands after the fence was counted as missing, and sent again by then."""
        a, b = _fencing(net, nics=2)
        net.write(a.batch(b, imm=1), a)
        _fence(net, b, a.domains[0].address, 5)
        before = bytes(b.target.data)
        a.post(a.batch(b, dst=512, imm=2))
        a.post(a.batch(b, dst=1024, imm=3, nic=1), 1)
        a.post(a.batch(b, dst=2048, imm=4, remote=1))
        net.settle()

        assert {1: 1, 3: 1, 4: 1} == b.imms(), "only what the fenced pair carried is refused"
        assert before[512:576] == bytes(b.target.data[512:576])
        assert [1] == [seen.count for seen in a.errors()]

    def test_c26_what_landed_is_handed_out_before_the_fence(self, net: Net) -> None:
        """The sums are told when the fence is closed: one that comes later is counted twice."""
        a, b = _fencing(net)
        net.write(a.batch(b, n=_ROWS, imm=0), a)
        _fence_amid_rows(net, a, b, 1)

    def test_c26_a_fence_may_be_repeated_and_may_name_anybody(self, net: Net) -> None:
        """Questions are put again when an answer is lost, also about senders that never wrote."""
        a, b = _fencing(net)
        c = net.side()
        for ctx, side in enumerate((a, a, c), 1):
            assert _fence(net, b, side.domains[0].address, ctx).nic == 0

    def test_c27_rows_land_again_both_ways_and_once(self, net: Net) -> None:
        """A path that is lost for good each time a link flaps leaves two engines without one."""
        a, b = _fencing(net)
        net.write(a.batch(b, imm=0), a)
        both, noticed, paused = (False, False, True, True), (False, True, False, True), (0, 1, 1, 0)
        for ctx, (there_too, row_first, pause) in enumerate(zip(both, noticed, paused), 1):
            _fence(net, b, a.domains[0].address, ctx)
            if there_too:
                _fence(net, a, b.domains[0].address, ctx)
            if row_first:
                net.write(a.batch(b, imm=99), a)
            _nic(b).unfence(a.domains[0].address)
            if pause:
                net.settle()
            _nic(a).unfence(b.domains[0].address)
            for side, to, batch in _write_both_ways(net, a, b, ctx):
                assert {Status.OK: _ROWS} == side.rows_ended(batch.ctx), f"round {ctx}"
                assert _ROWS == to.imms()[ctx]

        assert 0 == b.imms()[99]
        assert 1 == len({seen.ctx for seen in b.seen if seen.kind == Kind.IMM}), "one number (C25)"

    def test_c27_what_failed_before_never_lands(self, net: Net) -> None:
        """Rows that were made good are still on their way when their old path is opened again."""
        a, b = _fencing(net)
        at = [4096 * k for k in range(15)]
        for ctx in range(1, 4):
            for part in (0, 1):  # in flight at the fence, and posted behind it
                src = [offset + 512 * (2 * ctx + part) for offset in at]
                batch = a.batch(b, src=src, dst=at, nbytes=1024, imm=2 * ctx + part)
                a.try_post(batch, 0, batch.n)
                if not part:
                    _fence(net, b, a.domains[0].address, ctx)
            before = bytes(b.target.data), b.imms()
            net.until(lambda: not a.rows_open, "the rows of the fenced pair to end")
            _unfence(a, b)
            net.quiet()
            assert before == (bytes(b.target.data), b.imms()), f"round {ctx}"
        net.write(a.batch(b, imm=99), a)
        assert 1 == b.imms()[99]

    def test_c27_a_new_fence_holds(self, net: Net) -> None:
        """Links flap more than once."""
        a, b = _fencing(net)
        for ctx in (1, 2):
            net.write(a.batch(b, n=_ROWS, imm=ctx), a)
            _fence_amid_rows(net, a, b, ctx)
            _unfence(a, b)

    def test_c27_one_end_alone_loses_nothing(self, net: Net) -> None:
        """The word that the fence is gone takes its time to the other end."""
        a, b = _fencing(net)
        net.write(a.batch(b, imm=0), a)
        for ctx, (first, then) in enumerate(((b, a), (a, b)), 1):
            _fence(net, b, a.domains[0].address, ctx)
            _nic(first).unfence(then.domains[0].address)
            for side, to, batch in _write_both_ways(net, a, b, ctx):
                ended = side.rows_ended(batch.ctx)
                assert ended[Status.OK] <= to.imms()[ctx] <= ended.total() == _ROWS
            _unfence(a, b)
            last = a.batch(b, imm=10 + ctx)
            net.write(last, a)
            assert {Status.OK: 1} == a.rows_ended(last.ctx)
            assert 1 == b.imms()[10 + ctx]

    def test_c27_where_there_is_no_fence_nothing_happens(self, net: Net) -> None:
        """The question is put again when an answer is lost, amid the rows of the new life."""
        a, b = _fencing(net)
        c = net.side()
        _nic(b).unfence(c.domains[0].address)
        _fence(net, b, a.domains[0].address, 1)
        _unfence(a, b)
        for k in range(6):
            for side, to in _ways(a, b):
                batch = side.batch(to, n=_ROWS, imm=k)
                side.post(batch)
                net.turn()
                _nic(to if k % 2 else side).unfence((side if k % 2 else to).domains[0].address)
        net.settle()

        assert [] == a.errors() + b.errors()
        assert dict.fromkeys(range(6), _ROWS) == a.imms() == b.imms()
        net.forget(c)
        c.domains[0].close()
        with pytest.raises(ClosedError):
            _nic(c).unfence(b.domains[0].address)

    def test_c27_other_pairs_stay_as_they_are(self, net: Net) -> None:
        """Another NIC's lost rows are not retried yet: they must not come."""
        a, b = _fencing(net, nics=2)
        for nic in range(2):
            _fence(net, b, a.domains[nic].address, nic)
        _unfence(a, b)
        for nic in range(2):
            a.post(a.batch(b, imm=nic, nic=nic), nic)
        net.settle()

        assert {0: 1} == b.imms()
        assert [1] == [seen.nic for seen in a.errors()]

    def test_c27_a_nic_that_is_down_stays_so(self, net: Net) -> None:
        """The death may come between the two calls."""
        net.need(Ability.FAIL_NIC)
        a, b = _fencing(net)
        _fence(net, b, a.domains[0].address, 1)
        net.world.fail_nic(b.node, 0)
        _unfence(a, b)
        net.quiet()
        batch = a.batch(b, imm=1)
        a.post(batch)
        net.until(lambda: not a.rows_open, "a row to end", a.domains[0].caps.peer_timeout_s)

        assert 0 == a.rows_ended(batch.ctx)[Status.OK]
        assert {} == b.imms()

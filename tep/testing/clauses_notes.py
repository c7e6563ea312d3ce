"""C24 to C26: notes between engines, where an immediate came from, and fences.

A backend without notes (caps.note_bytes is 0) is asked for none of this, one that cannot name
senders (caps.imm_source is False) for C24 only: it has no NIC failover.
"""

from __future__ import annotations

from typing import cast

import pytest

from tep.backends.base import Kind, Noting, Status
from tep.testing.net import Net, Seen, Side
from tep.testing.world import Ability, World, need

__all__ = ["NotesContract"]


def _noting(world: World, nics: int = 1) -> tuple[Net, Side, Side]:
    net = Net(world)
    a, b = net.pair(nics=nics)
    if not a.domains[0].caps.note_bytes:
        pytest.skip("this backend has no notes: caps.note_bytes is 0")
    return net, a, b


def _fencing(world: World, nics: int = 1) -> tuple[Net, Side, Side]:
    net, a, b = _noting(world, nics)
    if not a.domains[0].caps.imm_source:
        pytest.skip("this backend neither names senders nor fences: caps.imm_source is False")
    return net, a, b


def _nic(side: Side, nic: int = 0) -> Noting:
    return cast("Noting", side.domains[nic])


def _fence(net: Net, side: Side, source: bytes, ctx: int, nic: int = 0) -> Seen:
    """Fence a sender off, and wait for the word that it is."""
    _nic(side, nic).fence(source, ctx)
    found: list[Seen] = []

    def is_there() -> bool:
        found[:] = [seen for seen in side.seen if seen.kind == Kind.FENCED and seen.ctx == ctx]
        return bool(found)

    net.until(is_there, f"the FENCED entry of fence {ctx}", side.domains[nic].caps.peer_timeout_s)
    assert 1 == len(found), f"C26: one entry a fence: {found}"
    return found[0]


class NotesContract:
    """Clauses on what engines need of NICs to make good what another NIC lost."""

    def test_c24_notes_arrive_whole_once_and_name_their_sender(self, world: World) -> None:
        """An engine answers to where a note came from; half a note is one that nobody reads."""
        net, a, b = _noting(world, nics=2)
        limit = a.domains[0].caps.note_bytes
        assert 512 <= limit, "a question with one address and a few sums has to fit"
        payloads = [b"", b"x", b"note" * 40, bytes(range(256)) * 2, b"L" * limit]
        sent = [(nic, k) for nic in range(2) for k in range(len(payloads))]
        for nic, k in sent:
            a.note(b, payloads[k], nic=nic, remote=1 - nic)
        net.settle()

        expected = sorted((1 - nic, payloads[k], a.domains[nic].address) for nic, k in sent)
        assert expected == sorted(b.notes)
        assert [] == a.errors()
        assert [] == b.messages(), "a note is no message of the user's"

    def test_c24_notes_need_no_buffer_of_the_users(self, world: World) -> None:
        """Notes say that a NIC died; they must not wait for a reader of messages."""
        net, a, b = _noting(world)
        b.domains[0].post_recvs(64, 1)
        a.send(b, b"takes the only buffer")
        net.until(lambda: len(b.unread) == 1, "the message")
        for k in range(40):
            a.note(b, b"note %d" % k)
        net.until(lambda: len(b.notes) == 40, "40 notes beside a message that nobody reads")
        assert [b"takes the only buffer"] == b.messages()

    def test_c24_a_note_to_a_dead_nic_ends_in_an_error(self, world: World) -> None:
        """A question without end would hold its transfer for ever."""
        need(world, Ability.FAIL_NIC)
        net, a, b = _noting(world, nics=2)
        a.note(b, b"before")
        net.settle()
        world.fail_nic(b.node, 0)
        ctx = a.note(b, b"after")
        within_s = a.domains[0].caps.peer_timeout_s
        net.until(lambda: not a.messages_open, "the note to end", within_s)
        ended = [seen.status for seen in a.seen if seen.kind == Kind.SENT and seen.ctx == ctx]
        assert 1 == len(ended)
        assert Status.OK != ended[0]
        a.note(b, b"another way", remote=1)
        net.until(lambda: len(b.notes) == 2, "a note over the NIC that lives")

    def test_c25_an_immediate_says_which_nic_sent_it(self, world: World) -> None:
        """Sums by sender and NIC are what a lost acknowledgement is judged by."""
        net, a, b = _fencing(world, nics=2)
        c = net.side(nics=2)
        lanes = [(side, nic, to) for side in (a, c) for nic in range(2) for to in range(2)]
        at = [64 * k for k in range(5)]
        for side, nic, to in lanes:
            side.post(side.batch(b, src=at, dst=at, imm=7, nic=nic, remote=to), nic)
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

    def test_c26_nothing_of_a_fenced_sender_lands_any_more(self, world: World) -> None:
        """What lands after the fence was counted as missing, and is sent again: once too often."""
        net, a, b = _fencing(world, nics=2)
        net.write(a.batch(b, imm=1), a)
        fenced = _fence(net, b, a.domains[0].address, 5)
        if fenced.status != Status.OK:
            assert _nic(b).status_text(fenced.status), "it must say why it cannot"
            pytest.skip("this backend cannot fence, and says so")
        before = bytes(b.target.data)
        a.post(a.batch(b, dst=512, imm=2))
        a.post(a.batch(b, dst=1024, imm=3, nic=1), 1)
        a.post(a.batch(b, dst=2048, imm=4, remote=1))
        net.settle()

        assert {1: 1, 3: 1, 4: 1} == b.imms(), "only what the fenced pair carried is refused"
        assert before[512:576] == bytes(b.target.data[512:576])
        assert [1] == [seen.count for seen in a.errors()]

    def test_c26_what_landed_is_handed_out_before_the_fence(self, world: World) -> None:
        """The sums are told when the fence is closed: one that comes later is counted twice."""
        net, a, b = _fencing(world)
        at = [64 * k for k in range(30)]
        net.write(a.batch(b, src=at, dst=at, imm=0), a)
        for ctx in range(1, 9):
            batch = a.batch(b, src=at, dst=at, imm=ctx)
            a.try_post(batch, 0, batch.n)
            net.turn()
            a.poll()
            if ctx == 4 and _fence(net, b, a.domains[0].address, 1).status != Status.OK:
                pytest.skip("this backend cannot fence, and says so")
        net.settle()
        fences = [k for k, seen in enumerate(b.seen) if seen.kind == Kind.FENCED]
        imms = [k for k, seen in enumerate(b.seen) if seen.kind == Kind.IMM]
        landed = sum(b.imms().values())
        done = sum(seen.count for seen in a.seen if seen.kind == Kind.WRITE and not seen.status)

        assert max(imms) < fences[0], "an immediate came after the fence that shut it out"
        assert done <= landed, "an acknowledged row's immediate never came"

    def test_c26_a_fence_may_be_repeated_and_may_name_anybody(self, world: World) -> None:
        """Questions are put again when an answer is lost, also about senders that never wrote."""
        net, a, b = _fencing(world)
        c = net.side()
        for ctx, side in enumerate((a, a, c), 1):
            assert _fence(net, b, side.domains[0].address, ctx).nic == 0

"""C11, C16, C17: what goes wrong is said, about the right row, in time, and harms nothing else."""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np

from tep.backends.base import Kind, Status, WriteBatch
from tep.testing.net import Net, Side
from tep.testing.world import Ability, World, need

__all__ = ["ErrorsContract"]

_GIVEN_UP = {Status.FLUSHED, Status.UNREACHABLE, Status.STALE_PEER, Status.PROVIDER, Status.RNR}

_DEAF_S_MAX = 1.2
"""Real seconds for which a peer is left alone: as long as handshakes of most backends take."""


def _check_bad_row(net: Net, a: Side, b: Side, **bad: int) -> None:
    """Post good rows beside a bad one; check who is told what, and that good rows work again."""
    before = b.imms()
    good_at = [64 * k for k in range(3)]
    good = a.batch(b, src=good_at, dst=good_at, imm=1)
    lone = a.batch(b, src=256, imm=2, **bad)  # type: ignore[arg-type]  # dst, nbytes or rkey
    a.post(good)
    a.post(lone)
    net.settle()
    errors = [seen for seen in a.errors() if seen.ctx == lone.ctx]

    assert [(Kind.WRITE, 0, 1)] == [(error.kind, error.row, error.count) for error in errors]
    assert errors[0].status != Status.FLUSHED, "the row was tried: say why it failed"
    ended = a.rows_ended(good.ctx)
    assert 3 == ended.total()
    assert set(ended) <= {Status.OK, Status.FLUSHED}, "good rows may be flushed, but not blamed"
    assert b.imms()[2] == before[2], "the bad row's immediate arrived"
    assert b.untouched(192)

    again = a.batch(b, src=good_at, dst=good_at, imm=3)
    net.write(again, a)
    assert {Status.OK: 3} == a.rows_ended(again.ctx), "the way to the peer has to be made anew"
    assert b.imms()[3] == before[3] + 3
    assert np.array_equal(a.source.data[:192], b.target.data[:192])


def _offer(side: Side, batch: WriteBatch) -> bool:
    """Post a batch of one row; whether it was taken."""
    return side.try_post(batch, 0, 1) == 1


class ErrorsContract:
    """Clauses on failures."""

    def test_c11_an_unknown_key_is_an_error(self, world: World) -> None:
        """A write under a wrong key that reports success is a page lost without a word."""
        net = Net(world)
        a, b = net.pair()
        _check_bad_row(net, a, b, dst=4096, rkey=b.target.keys[0].rkey ^ 0x5A5A)

    def test_c11_a_withdrawn_key_is_an_error(self, world: World) -> None:
        """Old descriptors stay around at peers long after the memory went to somebody else."""
        net = Net(world)
        a, b = net.pair()
        old = b.buffer(4096)
        batch = a.batch(b, target=old, imm=8)
        old.deregister()
        net.write(batch, a)

        assert 1 == sum(seen.count for seen in a.errors())
        assert Status.OK not in a.rows_ended(batch.ctx)
        assert Counter() == b.imms()
        assert (old.data == 0x5A).all()
        _check_bad_row(net, a, b, dst=4096, rkey=old.keys[0].rkey)

    def test_c11_a_source_is_no_target(self, world: World) -> None:
        """Memory registered as a source only, read-only perhaps, must not change."""
        net = Net(world)
        a, b = net.pair()
        before = b.source.data.copy()
        batch = a.batch(b, target=b.source, imm=8)
        net.write(batch, a)

        assert 1 == sum(seen.count for seen in a.errors())
        assert np.array_equal(before, b.source.data)
        assert Counter() == b.imms()

    def test_c11_beyond_the_end_is_an_error(self, world: World) -> None:
        """The last page of a region, one row too far, is somebody else's memory."""
        net = Net(world)
        a, b = net.pair()
        size = len(b.target.data)
        for dst in (size - 63, size, size + 64):
            _check_bad_row(net, a, b, dst=dst, nbytes=64)

        assert b.target.guards_hold()

    def test_c11_before_the_start_is_an_error(self, world: World) -> None:
        """An offset below zero wraps to an address that may well be mapped."""
        net = Net(world)
        a, b = net.pair()
        base = b.target.keys[0].base
        if base:
            _check_bad_row(net, a, b, dst=-1, nbytes=64)
        _check_bad_row(net, a, b, dst=2**64 - 64 - base, nbytes=64)

        assert b.target.guards_hold()

    def test_c11_the_error_names_its_row(self, world: World) -> None:
        """One bad page of a request of many is found by its row number, or never."""
        net = Net(world)
        a, b = net.pair()
        size = len(b.target.data)
        at = [64 * k for k in range(40)]
        bad = 23
        dst = [*at[:bad], size, *at[bad + 1 :]]
        batch = a.batch(b, src=at, dst=dst, imm=list(range(40)))
        net.write(batch, a)
        ended = a.rows_ended(batch.ctx)

        assert 40 == ended.total()
        blamed = [e for e in a.errors() if e.status != Status.FLUSHED]
        assert [(batch.ctx, bad, 1)] == [(e.ctx, e.row, e.count) for e in blamed]
        # What was flushed besides may or may not have landed; what is OK has landed and counted.
        landed = b.imms()
        assert bad not in landed
        assert landed.total() >= ended[Status.OK]
        assert max(landed.values(), default=0) <= 1
        for row in landed:
            at_row = slice(64 * row, 64 * row + 64)
            assert np.array_equal(a.source.data[at_row], b.target.data[at_row])
        assert b.untouched(64 * bad, 64 * bad + 64)

    def test_c11_a_row_partly_outside_is_found_among_many(self, world: World) -> None:
        """A check of starts only, or of one row's length, lets a page run over its neighbour."""
        net = Net(world)
        a, b = net.pair()
        size, base, rows, bad = len(b.target.data), b.target.keys[0].base, 12, 5
        at = [64 * k for k in range(rows)]
        others = [40 + 2 * k for k in range(rows)]  # no two alike; the last is the longest
        cases: list[tuple[int, int | list[int]]] = [(size - 32, 64), (size - 32, others)]
        cases.append((size - 64, [*others[:bad], 65, *others[bad + 1 :]]))
        if base:
            cases += [(-32, 64), (-32, others)]
        for where, nbytes in cases:
            dst = [*at[:bad], where, *at[bad + 1 :]]
            batch = a.batch(b, src=at, dst=dst, nbytes=nbytes, imm=9)
            net.write(batch, a)
            blamed = [e for e in a.errors() if e.ctx == batch.ctx and e.status != Status.FLUSHED]

            assert rows == a.rows_ended(batch.ctx).total()
            assert [(bad, 1)] == [(e.row, e.count) for e in blamed], (where, nbytes)
            assert b.target.guards_hold()
            assert b.untouched(size - 64), "a part of the bad row has landed"
            again = a.batch(b, src=at, dst=at, imm=3)
            net.write(again, a)
            assert {Status.OK: rows} == a.rows_ended(again.ctx)

    def test_c16_nothing_is_written_after_deregister(self, world: World) -> None:
        """The memory goes back to its owner when deregister() returns, whatever was in flight."""
        net = Net(world)
        a, b = net.pair()
        extra = b.buffer(65536)
        at = [64 * k for k in range(200)]
        batch = a.batch(b, src=at, dst=at, imm=5, target=extra)
        posted = a.try_post(batch, 0, batch.n)
        for turn in range(6):
            if turn == 3:
                extra.deregister()
                frozen = extra.data.copy()
            net.turn()
            posted += a.try_post(batch, posted, batch.n) if posted < batch.n else 0
        net.settle()
        ended = a.rows_ended(batch.ctx)

        assert np.array_equal(frozen, extra.data)
        assert posted == ended.total()
        assert b.imms()[5] <= int((frozen.reshape(-1, 64)[:200] != 0x5A).any(axis=1).sum())

    def test_c17_a_killed_peer_ends_in_errors(self, world: World) -> None:
        """Silence from a dead peer is the hang that every user of RDMA has met."""
        need(world, Ability.KILL)
        net = Net(world)
        a, b = net.pair()
        c = net.side()
        net.write(a.batch(b, imm=1), a)
        at = [64 * k for k in range(50)]
        early = a.batch(b, src=at, dst=at)
        taken = a.try_post(early, 0, early.n)
        net.forget(b)
        world.kill(b.node)
        late = a.batch(b, src=at, dst=at)
        taken_late = a.try_post(late, 0, late.n)
        limit_s = a.domains[0].caps.peer_timeout_s
        net.until(lambda: a.rows_open == 0, "rows to a dead peer to fail", timeout_s=limit_s)

        assert taken == a.rows_ended(early.ctx).total()
        assert set(a.rows_ended(early.ctx)) <= _GIVEN_UP | {Status.OK}
        assert taken_late == a.rows_ended(late.ctx).total()
        assert set(a.rows_ended(late.ctx)) <= _GIVEN_UP
        net.write(a.batch(c, src=at, dst=at, imm=2), a)
        assert {2: 50} == c.imms(), "other peers are not concerned"

    def test_c17_posting_to_a_killed_peer_ends_in_errors(self, world: World) -> None:
        """A refusal for ever, or a success, would both hide that nobody is there."""
        need(world, Ability.KILL)
        net = Net(world)
        a, b = net.pair()
        net.write(a.batch(b, imm=1), a)
        net.forget(b)
        world.kill(b.node)
        limit_s = a.domains[0].caps.peer_timeout_s
        for _ in range(3):
            batch = a.batch(b, imm=2)
            net.until(functools.partial(_offer, a, batch), "room", timeout_s=limit_s)
            net.until(lambda: a.rows_open == 0, "a row to nobody to fail", timeout_s=limit_s)
            assert set(a.rows_ended(batch.ctx)) <= _GIVEN_UP
            assert 1 == a.rows_ended(batch.ctx).total()

    def test_c17_a_message_to_a_killed_peer_fails(self, world: World) -> None:
        """A message that waits for a receive must learn that its reader is gone."""
        need(world, Ability.KILL)
        net = Net(world)
        a, b = net.pair()
        a.send(b, b"nobody will read this")
        net.forget(b)
        world.kill(b.node)
        limit_s = a.domains[0].caps.peer_timeout_s
        net.until(lambda: a.messages_open == 0, "the message to end", timeout_s=limit_s)
        ctx = a.send(b, b"nor this")
        net.until(lambda: a.messages_open == 0, "the message to end", timeout_s=limit_s)

        assert 1 == a.acknowledged[ctx]
        assert ctx in {seen.ctx for seen in a.errors() if seen.kind == Kind.SENT}

    def test_c17_a_closed_peer_ends_in_errors(self, world: World) -> None:
        """An orderly goodbye is no reason for silence either."""
        net = Net(world)
        a, b = net.pair()
        net.write(a.batch(b, imm=1), a)
        net.forget(b)
        for domain in b.domains:
            domain.close()
        batch = a.batch(b, imm=2)
        limit_s = a.domains[0].caps.peer_timeout_s
        net.until(functools.partial(_offer, a, batch), "room", timeout_s=limit_s)
        net.until(lambda: a.rows_open == 0, "a row to a closed peer to fail", timeout_s=limit_s)

        assert set(a.rows_ended(batch.ctx)) <= _GIVEN_UP

    def test_c17_a_peer_that_listens_again_is_reached(self, world: World) -> None:
        """A process that was stopped for a while would be dead to its peers for good."""
        net = Net(world)
        a, b = net.pair()
        net.forget(b)  # it is deaf before it was ever met, and where that matters rows fail
        early = a.batch(b, imm=1)
        _offer(a, early)
        limit_s = a.domains[0].caps.peer_timeout_s
        end_s = world.now_s() + min(limit_s, _DEAF_S_MAX)
        while a.rows_open and world.now_s() < end_s:
            world.doze()
            net.turn()
        net.sides.append(b)
        late = [a.batch(b, imm=2)]

        def reached() -> bool:
            if a.returned[late[-1].ctx]:
                if Status.OK in a.rows_ended(late[-1].ctx):
                    return True
                late.append(a.batch(b, imm=2))
            if not a.accepted[late[-1].ctx]:
                _offer(a, late[-1])
            return False

        net.until(reached, "a row to get there", timeout_s=2 * limit_s)
        net.settle()

        assert set(a.rows_ended(early.ctx)) <= _GIVEN_UP | {Status.OK}
        assert 1 <= b.imms()[2] <= len(late)

"""C11 to C20, C28: errors name the right row, in time, and harm nothing else; addresses, ends,
forks, capabilities, the same seed again.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
from collections import Counter
from collections.abc import Callable

import numpy as np

from tep.backends.base import Access, Kind, Status
from tep.base.errors import BadDescriptor, ClosedError, TepError
from tep.memory.source import adapt
from tep.testing.world import Ability, Net, Seen, Side, World

__all__ = ["ErrorsContract", "LifeContract"]

_ROW_BYTES_MAX = 8 * 1024 * 1024  # longest row that a test may cost


class LifeContract:
    """Clauses on a domain's life."""

    def test_c12_connecting_twice_is_once(self, net: Net) -> None:
        """The engine connects for each descriptor it meets; a second queue pair breaks counts."""
        a, b = net.pair(nics=2)
        first = [a.domains[0].connect(domain.address) for domain in b.domains]
        again = [a.domains[0].connect(bytes(bytearray(d.address))) for d in b.domains]
        net.write(a.batch(b, imm=1), a)
        later = [a.domains[0].connect(domain.address) for domain in b.domains]

        assert first == again == later
        assert 2 == len(set(first)), "two NICs, two peers"
        assert {1: 1} == b.imms()

    def test_c12_both_sides_may_connect_at_once(self, net: Net) -> None:
        """Peers meet each other in the same moment; one connection must not undo the other."""
        a, b = net.pair()
        for _ in range(5):
            a.post(a.batch(b, n=30, imm=1))
            b.post(b.batch(a, n=30, imm=2))
        net.settle()

        assert ({2: 150}, {1: 150}) == (a.imms(), b.imms())

    def test_c28_a_forgotten_peer_is_met_anew(self, net: Net) -> None:
        """An engine that removes a peer meets it again; one that lives is not cut off by it."""
        a, b = net.pair()
        for imm in (1, 2, 3):
            net.write(a.batch(b, imm=imm), a)
            net.write(b.batch(a, imm=imm), b)
            (domain,) = a.domains
            domain.forget(a.peer(b))
            domain.forget(a.peer(b))
            net.write(b.batch(a, imm=10 * imm), b)
            assert domain.connect(b.domains[0].address) == a.peer(b)

        assert {1: 1, 2: 1, 3: 1} == b.imms()
        assert {1: 1, 2: 1, 3: 1, 10: 1, 20: 1, 30: 1} == a.imms()
        assert [] == a.errors() == b.errors()

    def test_c13_addresses_are_bytes_and_unique(self, net: Net) -> None:
        """An address travels inside NetAddr, which takes 1 to 256 bytes a NIC."""
        sides = [net.side(nics=2) for _ in range(3)]
        addresses = [domain.address for side in sides for domain in side.domains]

        assert {bytes} == set(map(type, addresses))
        assert all(1 <= len(address) <= 256 for address in addresses)
        assert 6 == len(set(addresses))

    def test_c13_garbage_is_no_address_and_poisons_nothing(self, net: Net) -> None:
        """Bytes from a peer are hostile; a provider that takes them may refuse good ones after."""
        a, b = net.pair()
        good = b.domains[0].address
        for garbage in (b"", b"\x00", b"\xff" * 16, good[: len(good) // 2], b"\x00" * len(good)):
            assert _raises(BadDescriptor, functools.partial(a.domains[0].connect, garbage)), garbage
        net.write(a.batch(b, imm=4), a)

        assert {4: 1} == b.imms()

    def test_c13_an_old_incarnation_is_not_the_new_one(self, net: Net) -> None:
        """Old keys may be valid again by chance: only the address tells the incarnations apart."""
        net.need(Ability.KILL, Ability.RESTART)
        a, b = net.pair()
        net.write(a.batch(b, imm=1), a)
        net.kill(b)
        reborn = net.side(node=net.world.restart(b.node))
        stale = a.batch(b, n=20, imm=2)
        limit_s = a.domains[0].caps.peer_timeout_s
        net.until(
            lambda: a.offer(stale) and not a.rows_open, "stale rows to fail", limit_s * stale.n
        )
        net.quiet()

        assert reborn.domains[0].address != b.domains[0].address
        assert Status.OK not in a.rows_ended(stale.ctx)
        assert Counter() == reborn.imms()
        assert reborn.untouched()
        net.write(a.batch(reborn, n=20, imm=3), a)
        assert {3: 20} == reborn.imms()

    def test_c14_close_ends_every_row(self, net: Net) -> None:
        """A row that never comes back holds its memory, and its transfer, for ever."""
        a, b = net.pair()
        batch = a.batch(b, n=100, imm=6)
        a.try_post(batch, 0, batch.n)
        a.try_post(a.batch(b, n=100), 0, 100)
        a.close()
        net.until(lambda: a.rows_open == 0, "rows that were open at close() to be handed out")
        net.quiet()

        ended = a.rows_ended(batch.ctx)
        assert a.accepted[batch.ctx] == ended.total()
        assert set(ended) <= {Status.OK, Status.FLUSHED}
        assert b.imms()[6] >= ended[Status.OK]

    def test_c14_close_ends_every_message(self, net: Net) -> None:
        """A message that nobody received is given back like a row."""
        a, b = net.pair()
        ctx = a.send(b, b"there is no receive for this one")
        a.close()
        net.until(lambda: a.messages_open == 0, "the message that was open at close()")

        assert {ctx: 1} == a.acknowledged

    def test_c14_closing_twice_is_once(self, net: Net) -> None:
        """Engines, context managers and finalisers all close; the second time is not an event."""
        a, b = net.pair()
        net.write(a.batch(b, imm=1), a)
        a.close()
        net.quiet()
        seen = len(a.seen)
        a.close()
        net.quiet()

        assert seen == len(a.seen)

    def test_c14_close_leaves_other_domains_alone(self, net: Net) -> None:
        """Two engines of one process share a provider, and must not share an end."""
        a, b = net.pair()
        c = net.side()
        net.write(a.batch(b, imm=1), a)
        c.close()
        net.write(a.batch(b, imm=1), a)

        assert {1: 2} == b.imms()
        assert [] == a.errors()

    def test_c15_use_after_close_is_refused(self, net: Net) -> None:
        """A handle that is gone in the provider is a crash, not an answer."""
        a, b = net.pair()
        batch = a.batch(b)
        peer = a.peer(b)
        domain = a.domains[0]
        memory = adapt(np.zeros(64, np.uint8))
        a.close()
        for use in (
            lambda: domain.post(batch, 0, 1),
            lambda: domain.post_send(peer, b"x", 1),
            lambda: domain.post_recvs(64, 1),
            lambda: domain.connect(b.domains[0].address),
            lambda: domain.register(memory, Access.SOURCE),
        ):
            assert _raises(ClosedError, use)
        domain.deregister(a.source.keys[0])  # harmless: close() took the keys along
        net.quiet()

        assert Counter() == b.imms()
        assert b.untouched()

    def test_c18_limits_are_true(self, net: Net) -> None:
        """The engine plans by these numbers and never asks again."""
        caps = net.side().domains[0].caps
        nbytes = min(caps.max_write_bytes, _ROW_BYTES_MAX)
        a, b = net.pair(nbytes=nbytes)
        net.write(a.batch(b, nbytes=nbytes, imm=1), a)

        assert caps.sq_depth >= 1
        assert caps.link_bps >= 0
        assert caps.peer_timeout_s > 0
        assert caps.moves_bytes
        assert "cpu" in caps.memory_kinds
        assert caps == net.sides[0].domains[0].caps
        assert [] == a.errors()
        assert np.array_equal(a.source.data, b.target.data)

    def test_c18_depth_is_true(self, net: Net) -> None:
        """A NIC that takes more than its depth at once overruns the queue it is made of."""
        a, b = net.pair()
        depth = a.domains[0].caps.sq_depth
        n = min(2 * depth, 40_000)
        batch = a.batch(b, src=[0] * n, dst=0, nbytes=1)
        most = 0
        for _ in range(60):
            before = a.accepted[batch.ctx]
            for _ in range(4):  # no time passes between these
                a.offer(batch)
            most = max(most, a.accepted[batch.ctx] - before)
            net.turn()
        net.settle()

        assert 1 <= most <= depth

    def test_c18_ordered_is_true(self, net: Net) -> None:
        """A NIC that promises order keeps it; without the promise there is nothing to check."""
        a, b = net.pair()
        n = 200
        at = [64 * k for k in range(n)]
        net.write(a.batch(b, src=at, dst=0, imm=list(range(n))), a)
        order = [seen.imm for seen in b.seen if seen.kind == Kind.IMM]
        last = np.array_equal(a.source.data[64 * (n - 1) : 64 * n], b.target.data[:64])

        assert not a.domains[0].caps.ordered or (list(range(n)) == order and last)
        assert sorted(order) == list(range(n))

    def test_c18_an_unknown_kind_of_memory_is_refused(self, net: Net) -> None:
        """A GPU pointer given to a NIC that cannot reach it must not become a host address."""
        domain = net.side().domains[0]
        if "cuda" not in domain.caps.memory_kinds:
            memory = adapt((0x7000_0000_0000, 4096, "cuda:0"))
            assert _raises(TepError, lambda: domain.register(memory, Access.SOURCE))

    def test_c19_a_child_that_exits_harms_nothing(self, net: Net) -> None:
        """A data loader forks, and its children end while the parent transfers."""
        net.need(Ability.FORK)
        a, b = net.pair()
        net.write(a.batch(b, imm=1), a)

        def close() -> None:
            a.close()
            b.close()

        code = _in_child(close)
        net.write(a.batch(b, n=50, imm=2), a)

        assert 0 == code
        assert {1: 1, 2: 50} == b.imms()
        assert [] == a.errors()
        assert np.array_equal(a.source.data[:3200], b.target.data[:3200])

    def test_c19_a_child_cannot_use_the_parents_domains(self, net: Net) -> None:
        """Two processes that ring one doorbell corrupt the queue of both."""
        net.need(Ability.FORK)
        a, b = net.pair()
        batch = a.batch(b, imm=1)

        def use() -> None:
            with contextlib.suppress(ClosedError):
                a.domains[0].post(batch, 0, 1)
            with contextlib.suppress(ClosedError):
                a.domains[0].connect(b.domains[0].address)

        code = _in_child(use)
        net.quiet()

        assert 0 == code
        assert Counter() == b.imms()
        assert b.untouched()
        net.write(a.batch(b, imm=2), a)
        assert {2: 1} == b.imms()

    def test_c20_same_seed_same_trace(self, net: Net) -> None:
        """A failing seed that cannot be run again is a rumour."""
        net.need(Ability.TWIN)
        first, second = _trace(net.world.twin()), _trace(net.world.twin())

        assert first == second
        assert any(seen.kind == Kind.IMM for _, _, seen in first)


def _raises(kind: type[Exception], call: Callable[[], object]) -> bool:
    """Return True if a call raises that kind of exception; others go through."""
    try:
        call()
    except kind:
        return True
    return False


def _trace(world: World) -> list[tuple[int, int, Seen]]:
    """Play one busy scene and write down who saw what, in which order."""
    with world:
        net = Net(world)
        a, b = net.pair(nics=2)
        trace: list[tuple[int, int, Seen]] = []
        b.domains[0].post_recvs(64, 2)
        for scene in range(6):
            nic = scene % 2
            at = [64 * (scene * 20 + k) for k in range(20)]
            a.post(a.batch(b, src=at, dst=at, imm=at, nic=nic, remote=nic), nic)
            b.post(b.batch(a, src=at, dst=at, imm=scene, nic=nic, remote=1 - nic), nic)
            a.send(b, b"scene %d" % scene)
            b.messages()
        net.until(lambda: not b.messages() and a.messages_open == 0, "the messages")
        net.settle()
        for k, side in enumerate(net.sides):
            trace += [(k, at, seen) for at, seen in enumerate(side.seen)]
        return trace


def _in_child(act: Callable[[], object]) -> int:
    """Fork, act, collect garbage, exit; return the child's exit status, 0 if all went well."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)  # a child that hangs is killed, and its status tells
            act()
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


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


class ErrorsContract:
    """Clauses on failures."""

    def test_c11_an_unknown_key_is_an_error(self, net: Net) -> None:
        """A write under a wrong key that reports success is a page lost without a word."""
        a, b = net.pair()
        _check_bad_row(net, a, b, dst=4096, rkey=b.target.keys[0].rkey ^ 0x5A5A)

    def test_c11_a_withdrawn_key_is_an_error(self, net: Net) -> None:
        """Old descriptors stay around at peers long after the memory went to somebody else."""
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

    def test_c11_a_source_is_no_target(self, net: Net) -> None:
        """Memory registered as a source only, read-only perhaps, must not change."""
        a, b = net.pair()
        before = b.source.data.copy()
        batch = a.batch(b, target=b.source, imm=8)
        net.write(batch, a)

        assert 1 == sum(seen.count for seen in a.errors())
        assert np.array_equal(before, b.source.data)
        assert Counter() == b.imms()

    def test_c11_beyond_the_end_is_an_error(self, net: Net) -> None:
        """The last page of a region, one row too far, is somebody else's memory."""
        a, b = net.pair()
        size = len(b.target.data)
        for dst in (size - 63, size, size + 64):
            _check_bad_row(net, a, b, dst=dst, nbytes=64)

        assert b.target.guards_hold()

    def test_c11_before_the_start_is_an_error(self, net: Net) -> None:
        """An offset below zero wraps to an address that may well be mapped."""
        a, b = net.pair()
        base = b.target.keys[0].base
        if base:
            _check_bad_row(net, a, b, dst=-1, nbytes=64)
        _check_bad_row(net, a, b, dst=2**64 - 64 - base, nbytes=64)

        assert b.target.guards_hold()

    def test_c11_the_error_names_its_row(self, net: Net) -> None:
        """One bad page of a request of many is found by its row number, or never."""
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

    def test_c11_a_row_partly_outside_is_found_among_many(self, net: Net) -> None:
        """A check of starts only, or of one row's length, lets a page run over its neighbour."""
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

    def test_c16_nothing_is_written_after_deregister(self, net: Net) -> None:
        """The memory goes back to its owner when deregister() returns, whatever was in flight."""
        a, b = net.pair()
        extra = b.buffer(65536)
        batch = a.batch(b, n=200, imm=5, target=extra)
        a.offer(batch)
        for turn in range(6):
            if turn == 3:
                extra.deregister()
                frozen = extra.data.copy()
            net.turn()
            a.offer(batch)
        net.settle()
        ended = a.rows_ended(batch.ctx)

        assert np.array_equal(frozen, extra.data)
        assert a.accepted[batch.ctx] == ended.total()
        assert b.imms()[5] <= int((frozen.reshape(-1, 64)[:200] != 0x5A).any(axis=1).sum())

    def test_c17_a_killed_peer_ends_in_errors(self, net: Net) -> None:
        """Silence from a dead peer is the hang that every user of RDMA has met."""
        net.need(Ability.KILL)
        a, b = net.pair()
        c = net.side()
        net.write(a.batch(b, imm=1), a)
        early = a.batch(b, n=50)
        a.offer(early)
        net.kill(b)
        late = a.batch(b, n=50)
        a.offer(late)
        net.ended(a, "rows to a dead peer to fail")

        assert a.accepted[early.ctx] == a.rows_ended(early.ctx).total()
        assert set(a.rows_ended(early.ctx)) <= _GIVEN_UP | {Status.OK}
        assert a.accepted[late.ctx] == a.rows_ended(late.ctx).total()
        assert set(a.rows_ended(late.ctx)) <= _GIVEN_UP
        net.write(a.batch(c, n=50, imm=2), a)
        assert {2: 50} == c.imms(), "other peers are not concerned"

    def test_c17_posting_to_a_killed_peer_ends_in_errors(self, net: Net) -> None:
        """A refusal for ever, or a success, would both hide that nobody is there."""
        net.need(Ability.KILL)
        a, b = net.pair()
        net.write(a.batch(b, imm=1), a)
        net.kill(b)
        for _ in range(3):
            ended = net.try_lost(a, a.batch(b, imm=2), "a row to nobody to fail")
            assert set(ended) <= _GIVEN_UP
            assert 1 == ended.total()

    def test_c17_a_message_to_a_killed_peer_fails(self, net: Net) -> None:
        """A message that waits for a receive must learn that its reader is gone."""
        net.need(Ability.KILL)
        a, b = net.pair()
        a.send(b, b"nobody will read this")
        net.kill(b)
        net.ended(a, "the message to end")
        ctx = a.send(b, b"nor this")
        net.ended(a, "the message to end")

        assert 1 == a.acknowledged[ctx]
        assert ctx in {seen.ctx for seen in a.errors() if seen.kind == Kind.SENT}

    def test_c17_a_closed_peer_ends_in_errors(self, net: Net) -> None:
        """An orderly goodbye is no reason for silence either."""
        a, b = net.pair()
        net.write(a.batch(b, imm=1), a)
        net.forget(b)
        b.close()
        ended = net.try_lost(a, a.batch(b, imm=2), "a row to a closed peer to fail")

        assert set(ended) <= _GIVEN_UP

    def test_c17_a_peer_that_listens_again_is_reached(self, net: Net) -> None:
        """A process that was stopped for a while would be dead to its peers for good."""
        a, b = net.pair()
        net.forget(b)  # it is deaf before it was ever met, and where that matters rows fail
        early = a.batch(b, imm=1)
        a.offer(early)
        limit_s = a.domains[0].caps.peer_timeout_s
        end_s = net.world.now_s() + min(limit_s, _DEAF_S_MAX)
        while a.rows_open and net.world.now_s() < end_s:
            net.world.doze()
            net.turn()
        net.sides.append(b)
        late = [a.batch(b, imm=2)]

        def reached() -> bool:
            if a.returned[late[-1].ctx]:
                if Status.OK in a.rows_ended(late[-1].ctx):
                    return True
                late.append(a.batch(b, imm=2))
            if not a.accepted[late[-1].ctx]:
                a.offer(late[-1])
            return False

        net.until(reached, "a row to get there", timeout_s=2 * limit_s)
        net.settle()

        assert set(a.rows_ended(early.ctx)) <= _GIVEN_UP | {Status.OK}
        assert 1 <= b.imms()[2] <= len(late)

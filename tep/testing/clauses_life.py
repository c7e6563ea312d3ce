"""C12 to C15, C18 to C20, C28: addresses, ends, forks, capabilities, the same seed again."""

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
from tep.testing.net import Net, Seen, Side
from tep.testing.world import Ability, World, need

__all__ = ["LifeContract"]

_ROW_BYTES_MAX = 8 * 1024 * 1024  # longest row that a test may cost


def _close(*sides: Side) -> None:
    for side in sides:
        for domain in side.domains:
            domain.close()


class LifeContract:
    """Clauses on a domain's life."""

    def test_c12_connecting_twice_is_once(self, world: World) -> None:
        """The engine connects for each descriptor it meets; a second queue pair breaks counts."""
        net = Net(world)
        a, b = net.pair(nics=2)
        first = [a.domains[0].connect(domain.address) for domain in b.domains]
        again = [a.domains[0].connect(bytes(bytearray(d.address))) for d in b.domains]
        net.write(a.batch(b, imm=1), a)
        later = [a.domains[0].connect(domain.address) for domain in b.domains]

        assert first == again == later
        assert 2 == len(set(first)), "two NICs, two peers"
        assert {1: 1} == b.imms()

    def test_c12_both_sides_may_connect_at_once(self, world: World) -> None:
        """Peers meet each other in the same moment; one connection must not undo the other."""
        net = Net(world)
        a, b = net.pair()
        at = [64 * k for k in range(30)]
        for _ in range(5):
            a.post(a.batch(b, src=at, dst=at, imm=1))
            b.post(b.batch(a, src=at, dst=at, imm=2))
        net.settle()

        assert ({2: 150}, {1: 150}) == (a.imms(), b.imms())

    def test_c28_a_forgotten_peer_is_met_anew(self, world: World) -> None:
        """An engine that removes a peer meets it again; one that lives is not cut off by it."""
        net = Net(world)
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

    def test_c13_addresses_are_bytes_and_unique(self, world: World) -> None:
        """An address travels inside NetAddr, which takes 1 to 256 bytes a NIC."""
        net = Net(world)
        sides = [net.side(nics=2) for _ in range(3)]
        addresses = [domain.address for side in sides for domain in side.domains]

        assert {bytes} == set(map(type, addresses))
        assert all(1 <= len(address) <= 256 for address in addresses)
        assert 6 == len(set(addresses))

    def test_c13_garbage_is_no_address_and_poisons_nothing(self, world: World) -> None:
        """Bytes from a peer are hostile; a provider that takes them may refuse good ones after."""
        net = Net(world)
        a, b = net.pair()
        good = b.domains[0].address
        for garbage in (b"", b"\x00", b"\xff" * 16, good[: len(good) // 2], b"\x00" * len(good)):
            assert _raises(BadDescriptor, functools.partial(a.domains[0].connect, garbage)), garbage
        net.write(a.batch(b, imm=4), a)

        assert {4: 1} == b.imms()

    def test_c13_an_old_incarnation_is_not_the_new_one(self, world: World) -> None:
        """Old keys may be valid again by chance: only the address tells the incarnations apart."""
        need(world, Ability.KILL, Ability.RESTART)
        net = Net(world)
        a, b = net.pair()
        net.write(a.batch(b, imm=1), a)
        net.forget(b)
        world.kill(b.node)
        reborn = net.side(node=world.restart(b.node))
        at = [64 * k for k in range(20)]
        stale = a.batch(b, src=at, dst=at, imm=2)
        limit_s = a.domains[0].caps.peer_timeout_s
        start = 0

        def offer() -> bool:
            nonlocal start
            start += a.try_post(stale, start, stale.n) if start < stale.n else 0
            return start == stale.n and a.rows_open == 0

        net.until(offer, "stale rows to fail", timeout_s=limit_s * stale.n)
        net.quiet()

        assert reborn.domains[0].address != b.domains[0].address
        assert Status.OK not in a.rows_ended(stale.ctx)
        assert Counter() == reborn.imms()
        assert reborn.untouched()
        net.write(a.batch(reborn, src=at, dst=at, imm=3), a)
        assert {3: 20} == reborn.imms()

    def test_c14_close_ends_every_row(self, world: World) -> None:
        """A row that never comes back holds its memory, and its transfer, for ever."""
        net = Net(world)
        a, b = net.pair()
        at = [64 * k for k in range(100)]
        batch = a.batch(b, src=at, dst=at, imm=6)
        a.try_post(batch, 0, batch.n)
        a.try_post(a.batch(b, src=at, dst=at), 0, 100)
        _close(a)
        net.until(lambda: a.rows_open == 0, "rows that were open at close() to be handed out")
        net.quiet()

        ended = a.rows_ended(batch.ctx)
        assert a.accepted[batch.ctx] == ended.total()
        assert set(ended) <= {Status.OK, Status.FLUSHED}
        assert b.imms()[6] >= ended[Status.OK]

    def test_c14_close_ends_every_message(self, world: World) -> None:
        """A message that nobody received is given back like a row."""
        net = Net(world)
        a, b = net.pair()
        ctx = a.send(b, b"there is no receive for this one")
        _close(a)
        net.until(lambda: a.messages_open == 0, "the message that was open at close()")

        assert {ctx: 1} == a.acknowledged

    def test_c14_closing_twice_is_once(self, world: World) -> None:
        """Engines, context managers and finalisers all close; the second time is not an event."""
        net = Net(world)
        a, b = net.pair()
        net.write(a.batch(b, imm=1), a)
        _close(a)
        net.quiet()
        seen = len(a.seen)
        _close(a)
        net.quiet()

        assert seen == len(a.seen)

    def test_c14_close_leaves_other_domains_alone(self, world: World) -> None:
        """Two engines of one process share a provider, and must not share an end."""
        net = Net(world)
        a, b = net.pair()
        c = net.side()
        net.write(a.batch(b, imm=1), a)
        _close(c)
        net.write(a.batch(b, imm=1), a)

        assert {1: 2} == b.imms()
        assert [] == a.errors()

    def test_c15_use_after_close_is_refused(self, world: World) -> None:
        """A handle that is gone in the provider is a crash, not an answer."""
        net = Net(world)
        a, b = net.pair()
        batch = a.batch(b)
        peer = a.peer(b)
        domain = a.domains[0]
        memory = adapt(np.zeros(64, np.uint8))
        _close(a)
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

    def test_c18_limits_are_true(self, world: World) -> None:
        """The engine plans by these numbers and never asks again."""
        net = Net(world)
        caps = net.side().domains[0].caps
        nbytes = min(caps.max_write_bytes, _ROW_BYTES_MAX)
        a, b = net.pair(nbytes=nbytes)
        net.write(a.batch(b, nbytes=nbytes, imm=1), a)

        assert caps.imm_bits >= 32
        assert caps.sq_depth >= 1
        assert caps.link_bps >= 0
        assert caps.peer_timeout_s > 0
        assert caps.moves_bytes
        assert "cpu" in caps.memory_kinds
        assert caps == net.sides[0].domains[0].caps
        assert [] == a.errors()
        assert np.array_equal(a.source.data, b.target.data)

    def test_c18_depth_is_true(self, world: World) -> None:
        """A NIC that takes more than its depth at once overruns the queue it is made of."""
        net = Net(world)
        a, b = net.pair()
        depth = a.domains[0].caps.sq_depth
        n = min(2 * depth, 40_000)
        batch = a.batch(b, src=[0] * n, dst=0, nbytes=1)
        start = most = 0
        for _ in range(60):
            burst = start
            for _ in range(4):  # no time passes between these
                start += a.try_post(batch, start, n) if start < n else 0
            most = max(most, start - burst)
            net.turn()
        net.settle()

        assert 1 <= most <= depth

    def test_c18_ordered_is_true(self, world: World) -> None:
        """A NIC that promises order keeps it; without the promise there is nothing to check."""
        net = Net(world)
        a, b = net.pair()
        n = 200
        at = [64 * k for k in range(n)]
        net.write(a.batch(b, src=at, dst=0, imm=list(range(n))), a)
        order = [seen.imm for seen in b.seen if seen.kind == Kind.IMM]
        last = np.array_equal(a.source.data[64 * (n - 1) : 64 * n], b.target.data[:64])

        assert not a.domains[0].caps.ordered or (list(range(n)) == order and last)
        assert sorted(order) == list(range(n))

    def test_c18_an_unknown_kind_of_memory_is_refused(self, world: World) -> None:
        """A GPU pointer given to a NIC that cannot reach it must not become a host address."""
        net = Net(world)
        domain = net.side().domains[0]
        if "cuda" not in domain.caps.memory_kinds:
            memory = adapt((0x7000_0000_0000, 4096, "cuda:0"))
            assert _raises(TepError, lambda: domain.register(memory, Access.SOURCE))

    def test_c19_a_child_that_exits_harms_nothing(self, world: World) -> None:
        """A data loader forks, and its children end while the parent transfers."""
        need(world, Ability.FORK)
        net = Net(world)
        a, b = net.pair()
        net.write(a.batch(b, imm=1), a)
        code = _in_child(lambda: _close(a, b))
        at = [64 * k for k in range(50)]
        net.write(a.batch(b, src=at, dst=at, imm=2), a)

        assert 0 == code
        assert {1: 1, 2: 50} == b.imms()
        assert [] == a.errors()
        assert np.array_equal(a.source.data[:3200], b.target.data[:3200])

    def test_c19_a_child_cannot_use_the_parents_domains(self, world: World) -> None:
        """Two processes that ring one doorbell corrupt the queue of both."""
        need(world, Ability.FORK)
        net = Net(world)
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

    def test_c20_same_seed_same_trace(self, world: World) -> None:
        """A failing seed that cannot be run again is a rumour."""
        need(world, Ability.TWIN)
        first, second = _trace(world.twin()), _trace(world.twin())

        assert first == second
        assert any(seen.kind == Kind.IMM for _, _, seen in first)


def _raises(kind: type[Exception], call: Callable[[], object]) -> bool:
    """Whether a call raises that kind of exception; others go through."""
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

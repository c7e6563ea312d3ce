"""Leases between engines of one process: drawn turns on a clock of ours, then on real threads."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from tep.backends.loopback import Hub, LoopbackDomain
from tep.control.leases import Grant
from tep.drivers import InlineDriver
from tep.engine import TransferEngine
from tep.errors import LeaseError, TepError
from tep.wire import Lease

RANGE = 64
FREE = 0xEE


class Turned(InlineDriver):
    """A driver whose time passes only when the test says so."""

    time_s = 0.0

    def now_s(self) -> float:
        return Turned.time_s


class World:
    """An owner, two writers, and what the end of each lease left."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.hub, self.ring, self.seen = Hub(token=seed), [], Counter()
        self.seed = seed
        self.owner = self.open("a")
        self.writers = [self.open("b"), self.open("c")]
        self.memory = np.zeros(4 * RANGE, np.uint8)
        self.mr, _ = self.owner.reg_mr(self.memory)
        self.grants: list[Grant] = []
        self.holders: list[tuple[TransferEngine, Lease]] = []
        self.current: dict[int, Grant] = {}
        self.free: dict[int, bool] = {}

    def open(self, name: str) -> TransferEngine:
        shuffle = self.dice.choice([None, self.seed])
        engine = TransferEngine.open(
            "loopback",
            name=name,
            nics=self.dice.choice([1, 2]),
            hub=self.hub,
            driver=Turned(self.ring),
            seed=shuffle,
        )
        engine.source, _ = engine.reg_mr(np.full(RANGE, 7, np.uint8))
        return engine

    def act(self) -> None:
        """One thing that an application, or fate, does."""
        dice = self.dice
        what = dice.choices(
            ["turn", "write", "grant", "revoke", "renew", "time", "fail", "die", "close"],
            [20, 10, 4, 2, 2, 4, 0.3, 0.3, 0.1],
        )[0]
        self.seen[what] += 1
        try:
            getattr(self, what)()
        except TepError as error:
            self.seen[type(error).__name__] += 1

    def turn(self) -> None:
        for _ in range(self.dice.randrange(1, 4)):
            machine = self.dice.choice(self.ring)
            machine.step()
            machine.deliver()
        self.look()

    def look(self) -> None:
        """What is free stays as the owner left it."""
        for k, free in self.free.items():
            part = self.memory[k * RANGE : (k + 1) * RANGE]
            assert not free or (part == FREE).all(), f"range {k} changed after it was free"

    def grant(self) -> None:
        k, who = self.dice.randrange(4), self.dice.choice(self.writers)
        if k in self.current:
            return
        for_s = self.dice.choice([0.5, 3.0])
        found = self.owner.lease(
            self.mr, who.main_address, for_s=for_s, offset=k * RANGE, nbytes=RANGE
        )
        self.grants.append(found)
        self.current[k], self.free[k] = found, False

        def over(_: object) -> None:
            self.seen["fenced" if found.why else "free"] += found.over.ok
            del self.current[k]
            self.memory[k * RANGE : (k + 1) * RANGE] = FREE
            self.free[k] = found.over.ok

        found.over.add_done_callback(over)
        self.holders.append((who, Lease.from_bytes(found.lease.to_bytes())))

    def write(self) -> None:
        if self.holders:
            who, lease = self.dice.choice(self.holders[-8:])
            nbytes = self.dice.choice([1, 8, RANGE])
            who.submit_single_write(nbytes, (who.source, 0), (lease, 0))

    def revoke(self) -> None:
        if self.current:
            self.dice.choice(list(self.current.values())).revoke()

    def renew(self) -> None:
        if self.current:
            self.dice.choice(list(self.current.values())).renew(1.0)

    def time(self) -> None:
        Turned.time_s += self.dice.choice([0.1, 0.5, 2.0])

    def fail(self) -> None:
        engine = self.dice.choice([self.owner, *self.writers])
        domain = self.dice.choice(engine._domains)
        assert isinstance(domain, LoopbackDomain)
        domain.fail()

    def die(self) -> None:
        """A writer is killed, and comes back under its name."""
        old = self.writers.pop(self.dice.randrange(2))
        for domain in old._domains:
            domain.die()
        self.ring.remove(old._machine)
        self.writers.append(self.open(old.name))
        if self.dice.random() < 0.5:
            self.owner.add_peer_group([self.writers[-1].main_address])

    def close(self) -> None:
        old = self.writers.pop(self.dice.randrange(2))
        old.close()
        self.writers.append(self.open(old.name))

    def finish(self) -> None:
        """Everything granted ends, and then nothing moves any more."""
        for _ in range(4000):
            if not self.current and not any(machine.step() for machine in self.ring):
                break
            for machine in list(self.ring):
                machine.step()
                machine.deliver()
            Turned.time_s += 0.01
        assert not self.current, [str(grant.over.describe()) for grant in self.current.values()]
        self.look()
        for engine in (self.owner, *self.writers):
            engine.close()
        self.look()
        assert not self.owner.callback_errors


@pytest.mark.slow
def test_what_is_free_stays_free() -> None:
    """The same as on the chaos fabric, on the backend that users test with."""
    seen: Counter[str] = Counter()
    for seed in range(100):
        world = World(seed)
        try:
            for _ in range(200):
                world.act()
            world.finish()
        except AssertionError as error:
            error.add_note(f"again: World({seed})")
            raise
        seen += world.seen

    assert min(seen[what] for what in ("free", "fenced", "LeaseError", "die", "fail")) > 10, seen


@pytest.mark.slow
def test_threads_that_write_while_the_owner_takes_back() -> None:
    """Engines on threads of their own: the owner's word comes at any point of a submit."""
    hub = Hub(token=5)
    with (
        TransferEngine.open("loopback", name="a", hub=hub) as owner,
        TransferEngine.open("loopback", name="b", hub=hub) as writer,
    ):
        memory = np.zeros(RANGE, np.uint8)
        mr, _ = owner.reg_mr(memory)
        src, _ = writer.reg_mr(np.full(RANGE, 7, np.uint8))
        written = 0
        for _ in range(50):
            grant = owner.lease(mr, writer.main_address, for_s=60)
            lease = Lease.from_bytes(grant.lease.to_bytes())
            writer.submit_single_write(RANGE, (src, 0), (lease, 0)).wait(10)
            grant.revoke()
            try:
                while True:
                    written += 1
                    writer.submit_single_write(RANGE, (src, 0), (lease, 0))
            except LeaseError:
                grant.over.wait(10)
            memory.fill(FREE)
            writer.submit_single_write(0, (src, 0), (mr.desc, 0)).wait(10)  # after all others
            assert {FREE} == set(memory.tolist())
        assert written >= 50

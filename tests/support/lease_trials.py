"""Drawn runs of leases on the chaos fabric, judged by memory alone.

An owner leases ranges to two writers, who write under them and also to plain regions, while NICs
die, links break, workers pause, peers restart, control messages get lost and bytes land late. When
the end of
a lease says that its range is free, the owner writes over it: then nothing may change there.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from unittest import mock

import numpy as np

from tep.api import EngineOptions, Pages, ScatterDst
from tep.backends.base import Kind, Status
from tep.control.leases import Grant, Revocation
from tep.core.transfer import Transfer
from tep.engine import TransferEngine
from tep.errors import BusyError, FabricError, TepError
from tep.sim.chaos import ChaosFabric
from tep.sim.chaos_nic import ChaosNic
from tep.sim.cluster import Cluster
from tep.sim.faults import (
    DRIFTS,
    Chaos,
    Clog,
    Drift,
    Fault,
    KillNic,
    Mute,
    Pause,
    Restart,
    Slow,
    Swizzle,
)
from tep.units import PS_PER_US
from tep.wire import Lease

__all__ = ["Trial", "play"]

RANGE = 480
GAP = 32
LEASES = 4
WRITES = 6
FREE = 0xEE
"""What the owner writes over a range that is free; no source byte has this value."""

HEAL_US = 3000.0
EVENTS_MAX = 400_000


class Trial:
    """One run.

    Attributes:
        seen: what happened, by name.
        wrong: what was found in callbacks.
    """

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.dice = random.Random(seed)
        self.late_dice = random.Random(f"late {seed}")
        self.clock_dice = random.Random(f"clock {seed}")
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.owner, *self.writers = cluster.engines
        self.memory = np.zeros(LEASES * (RANGE + GAP), np.uint8)
        self.mr, _ = self.owner.reg_mr(self.memory)
        self.plain = np.zeros(2 * WRITES * RANGE, np.uint8)
        _, self.plain_desc = self.owner.reg_mr(self.plain)
        self.sources = []
        for writer in self.writers:
            noise = np.random.default_rng(seed).integers(1, FREE, RANGE, np.uint8)
            self.sources.append(writer.reg_mr(noise)[0])
        self.grants: list[Grant] = []
        self.sent: list[Transfer] = []
        self.still: list[tuple[str, np.ndarray, np.ndarray]] = []

    # ------------------------------------------------------------------ the plot

    def draw(self) -> None:
        """Book everything that is to happen."""
        at, dice = self.cluster.at, self.dice
        for k in range(LEASES):
            at(dice.uniform(0.1, 2), lambda k=k: self.lease(k))
        for k in range(2 * WRITES):
            at(dice.uniform(0.1, 6), lambda k=k: self.write_plain(k))
        for _ in range(dice.randrange(4)):
            at(dice.uniform(0.2, 8), self.probe)
        for _ in range(dice.choice([0, 1, 1, 1, 2, 3])):
            at(dice.uniform(0.1, 7), self.fault())
        for engine in self.cluster.engines:  # a lease lasts as long as two clocks say
            drift = self.clock_dice.choice(DRIFTS), self.clock_dice.choice([0, 20_000_000])
            if self.clock_dice.random() < 0.3:
                at(self.clock_dice.uniform(0.1, 7), Drift(engine.name, *drift))
        if dice.random() < 0.2:  # what a crashed writer had sent may still be on its way
            k, at_us = 1 + dice.randrange(2), dice.uniform(0.3, 5)
            nics = len(self.cluster.engines[k].main_address.domains)
            at(at_us, KillNic(self.cluster.engines[k].name, dice.randrange(nics)))
            at(at_us + dice.uniform(0.1, 1.5), lambda: self.reborn(k))
        at(HEAL_US, self.cluster.heal)

    def fault(self) -> Fault | Callable[[], object]:
        """Something that breaks."""
        dice = self.dice
        k = dice.randrange(3)
        engine = self.cluster.engines[k]
        nics = len(engine.main_address.domains)
        name, nic = engine.name, dice.randrange(nics)
        for_ps = round(dice.choice([0.3, 3, 30, 2500]) * PS_PER_US)
        return dice.choice(
            [
                KillNic(name, nic),
                KillNic(name, nic),
                KillNic(name, nic),
                Clog(name, nic, for_ps),
                Clog(name, nic, None),
                Mute(name, nic, for_ps),
                Slow(name, nic, 20, for_ps),
                Swizzle(name, nics, for_ps, nic),
                Pause(name, for_ps),
                Pause(name, 40 * for_ps),
                Restart(name) if k or dice.random() < 0.2 else KillNic(name, nic),
                (lambda: self.reborn(k)) if k else KillNic(name, nic),
                engine.close if k or dice.random() < 0.2 else KillNic(name, nic),
            ]
        )

    def reborn(self, k: int) -> None:
        """A writer restarts, and its owner hears of it."""
        fresh = self.cluster.restart(k)
        self.tried(lambda: self.owner.add_peer_group([fresh.main_address]))

    def tried(self, what: Callable[[], object]) -> object:
        """Do what may be refused."""
        try:
            return what()
        except TepError as error:
            self.seen[type(error).__name__] += 1
            return None

    def lease(self, k: int) -> None:
        """Grant a lease; book how it is used, and how it ends."""
        dice, at = self.dice, self.cluster.at
        who = dice.randrange(2)
        writer = self.writers[who]
        for_us = dice.choice([1, 3, 10, 100])
        is_long = self.late_dice.random() < 0.2
        for_us = 4 * HEAL_US if is_long else for_us
        start = k * (RANGE + GAP)
        found = self.tried(
            lambda: self.owner.lease(
                self.mr,
                writer.main_address,
                for_s=for_us * 1e-6,
                offset=start,
                nbytes=RANGE,
                fence=k > 0,
            )
        )
        if not isinstance(found, Grant):
            return
        self.grants.append(found)
        found.over.add_done_callback(lambda end: self.over(found, end))
        lease = Lease.from_bytes(found.lease.to_bytes())
        now_us = self.cluster.now_us
        for _ in range(WRITES):
            at(now_us + dice.uniform(0, 5), lambda: self.write(who, lease))
        if is_long:  # asked back while its writer is cut off, who writes on when it is back
            at(now_us + self.late_dice.uniform(0, HEAL_US), found.revoke)
            for _ in range(2 * WRITES):
                at(now_us + self.late_dice.uniform(0, 2 * HEAL_US), lambda: self.write(who, lease))
        if dice.random() < 0.3:
            at(now_us + dice.uniform(0, 3), lambda: self.tried(lambda: found.renew(2e-6)))
        for _ in range(dice.choice([0, 1, 1, 2])):
            at(now_us + dice.uniform(0, 6), found.revoke)

    def write(self, who: int, lease: Lease) -> None:
        """Write somewhere under a lease, if that is still allowed."""
        dice, engine, mr = self.dice, self.writers[who], self.sources[who]
        n = dice.choice([1, 40, 200, RANGE])
        at = dice.randrange(RANGE - n + 1)

        def submit() -> Transfer:
            match dice.choice(["single", "paged", "scatter"]):
                case "single":
                    return engine.submit_single_write(n, (mr, 0), (lease, at), 7)
                case "paged":
                    pages = Pages(dice.sample(range(RANGE // 40), 5))
                    return engine.submit_paged_writes(40, (mr, pages), (lease, pages))
                case _:
                    return engine.submit_scatter(mr, [ScatterDst(n, 0, (lease, at))], 9)

        sent = self.tried(submit)
        if isinstance(sent, Transfer):
            self.sent.append(sent)

    def write_plain(self, k: int) -> None:
        """Write to an area of its own, without a lease; watch it if nothing is in doubt."""
        who = k % 2
        area = self.plain[k * RANGE : (k + 1) * RANGE]

        def settled(sent: Transfer) -> None:
            if not sent.in_doubt:
                self.still.append((f"plain write {k} ({sent.describe()})", area, area.copy()))
                self.seen["ended for certain"] += not sent.ok
            else:
                self.seen["in doubt"] += 1
                if isinstance(sent.error, FabricError) and not sent.error.in_doubt:
                    self.wrong.append(f"nothing in doubt, says the error of {sent.describe()}")

        dst = self.plain_desc, k * RANGE
        sent = self.tried(
            lambda: self.writers[who].submit_single_write(
                RANGE, (self.sources[who], 0), dst, on_done=settled
            )
        )
        if isinstance(sent, Transfer):
            self.sent.append(sent)
            if self.dice.random() < 0.2:
                sent.cancel()

    def probe(self) -> None:
        """Try to give the leased region back: only right if no lease is open."""
        open_ones = [grant for grant in self.grants if not grant.over.finished]
        if not open_ones:
            return
        try:
            self.owner.deregister(self.mr)
        except BusyError:
            self.seen["deregister refused"] += 1
        except TepError as error:
            self.seen[type(error).__name__] += 1
        else:
            self.wrong.append(f"deregistered under {open_ones[0]}")

    def over(self, grant: Grant, end: Revocation) -> None:
        """A lease is over: if its range is free, nothing may change there any more."""
        if end.ok:
            self.seen["fenced" if grant.why else "free"] += 1
            mine = self.memory[grant.start : grant.stop]
            mine[:] = FREE
            self.still.append((str(grant), mine, mine.copy()))
            if len(self.grants) == LEASES and all(one.over.ok for one in self.grants):
                self.tried(self.move_in)
            return
        self.seen["quarantined"] += 1
        if self.dice.random() < 0.5:  # try again
            again = grant.revoke()
            if again is not end:
                again.add_done_callback(lambda end: self.over(grant, end))

    def move_in(self) -> None:
        """All leases have ended well: other memory gets the keys, and nobody may write there."""
        if self.owner._machine.closed or self.mr.closed:
            return
        tenant = np.zeros(len(self.memory), np.uint8)
        self.owner.deregister(self.mr)
        self.mr, _ = self.owner.reg_mr(tenant)
        self.still.append(("the next memory with its keys", tenant, tenant.copy()))
        self.seen["keys again"] += 1

    # ------------------------------------------------------------------ the judgement

    def judge(self) -> None:
        """Everything has ended; what was said to be over stayed as it was."""
        assert not self.wrong, self.wrong[0]
        for grant in self.grants:
            assert grant.over.finished, f"never over: {grant.over.describe()}"
        for sent in self.sent:
            assert sent.finished, f"never ended: {sent.describe()}"
        for what, area, before in self.still:
            where = np.flatnonzero(area != before)
            assert not len(where), f"{what}: byte {where[0]} of {len(where)} changed afterwards"
        for engine in {*self.cluster.engines, self.owner, *self.writers}:
            assert not engine.callback_errors, engine.callback_errors[0]
            assert not engine._machine.busy(), engine.stall_report()
            assert 0 == engine.stats().leases
        gaps = self.memory.reshape(LEASES, RANGE + GAP)[:, RANGE:]
        assert not gaps.any(), "bytes outside of the leases changed"
        if not self.owner._machine.closed:
            self.owner.deregister(self.mr)


def play(seed: int, *, fences: bool = True) -> Trial:
    """Play the run of a seed, and judge it. Raises AssertionError, or what the engine raised.

    Args:
        seed: of everything.
        fences: False: no NIC can fence anybody off.
    """
    dice = random.Random(seed)
    nics = [dice.choice([1, 2, 2, 3]) for _ in range(3)]
    late, loss = dice.choice([0, 1, 1, 2]), dice.choice([0, 0, 0, 2, 6])
    chaos = Chaos.draw(seed, late_land=late, message_loss=loss, key_again=True)
    # Control messages that come back later than the next ones go out turn their engine for ever.
    probe_max_s = max(320e-6, 4e-12 * max(chaos.dead_after_ps, chaos.pause_ps))
    options = EngineOptions(probe_first_s=20e-6, probe_max_s=probe_max_s)
    unfenced: AbstractContextManager[object] = nullcontext()
    if not fences:
        unfenced = mock.patch.object(ChaosNic, "fence", _say_that_it_cannot)
    try:
        with unfenced, Cluster(3, nics, chaos=chaos, seed=seed, options=options) as cluster:
            trial = Trial(cluster, seed)
            trial.draw()
            fabric = cluster.fabric
            assert isinstance(fabric, ChaosFabric)
            cluster.env.run_until(lambda: cluster.now_us > 2 * HEAL_US)
            try:
                cluster.env.run_until(repeat(False, EVENTS_MAX).__next__)
            except StopIteration:
                raise AssertionError("it does not come to rest") from None
            trial.judge()
            trial.seen += fabric.seen
            trial.seen["opened again"] += any(map(_has_opened, cluster.engines))
            trial.seen["quarantine in stats"] += trial.owner.stats().bytes_quarantined > 0
    except Exception as error:
        error.add_note(f"again: tests.support.lease_trials.play({seed}, fences={fences})")
        raise
    return trial


def _has_opened(engine: TransferEngine) -> bool:
    """Whether a path of an engine was fenced off, and is in use again."""
    links = engine._peers.links.values()
    return any(path.fences and path.is_up for link in links for path in link.paths())


def _say_that_it_cannot(self: ChaosNic, source: bytes, ctx: int) -> None:
    self._cq.push((int(Kind.FENCED), int(Status.PROVIDER), 1, 0, 0, ctx, 0))

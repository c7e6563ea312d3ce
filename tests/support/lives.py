"""One drawn life of a watched peer, under traffic, and what must hold of it. Not a test."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from tep.api import EngineOptions, Pages
from tep.control.membership import PeerChange, PeerEvent, PeerState
from tep.errors import ClosedError, TepError
from tep.sim.cluster import Cluster
from tep.sim.faults import Chaos
from tep.sim.faults_at import clog, mute, pause

US = 1e-6
BEAT_US, LOST_US, END_US = 20, 100, 1000
OPTIONS = EngineOptions(probe_first_s=30 * US, probe_max_s=120 * US)
PAGE, PAGES = 64, 8

FATES = (
    "none",
    "flap",
    "hold up",
    "short cut",
    "cut",
    "crash",
    "restart",
    "kill nic",
    "silent",
    "deaf",
)
"""What happens to the peer. None of the first four is a reason to call it lost."""


@dataclass
class Life:
    """What happened in one run.

    Attributes:
        events: (us, event) as engine a was told.
        seen: how often what this is about was met.
    """

    fate: str
    events: list[tuple[float, PeerEvent]] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def kinds(self, nic: int | None = None) -> list[PeerChange]:
        return [event.kind for _, event in self.events if event.nic == nic]


def live(seed: int, fates: tuple[str, ...] = FATES, **knobs: object) -> Life:
    """Engine a watches b, writes to it all the time, and perhaps removes it in the middle.

    `knobs` are those of the fabric that are not to be drawn.

    Raises:
        AssertionError: what must hold does not.
    """
    dice = random.Random(seed)
    life = Life(dice.choice(fates))
    nics = dice.choice([(1, 2), (2, 2), (2, 1), (3, 2), (2, 3)])
    loss = dice.choice([0, 0, 2]) if life.fate in {"none", "crash", "cut"} else 0
    dead_after_ps = dice.choice([300_000, 5_000_000])
    fixed = {"pause_ps": 0, "dead_after_ps": dead_after_ps, "message_loss": loss}
    chaos = Chaos.draw(seed, **(fixed | knobs))
    with Cluster(2, nics, chaos=chaos, seed=seed, options=OPTIONS) as cluster:
        run = _Run(cluster, life, dice)
        run.go()
        run.check()
    return life


class _Run:
    def __init__(self, cluster: Cluster, life: Life, dice: random.Random) -> None:
        self.cluster, self.life, self.dice = cluster, life, dice
        self.a, self.b = cluster.engines
        self.nics = len(self.b.main_address.domains)
        self.mr, _ = self.a.reg_mr(np.arange(PAGE * PAGES, dtype=np.uint8))
        self.target = np.zeros(PAGE * PAGES, np.uint8)
        _, self.desc = self.b.reg_mr(self.target)
        self.sends = []
        self.refused = 0
        self.removal = None
        self.back_in = False
        self.at_us = dice.uniform(150, 400)
        self.for_us = 0.0
        self.flaps = 0
        self.a.on_peer(lambda event: life.events.append((cluster.now_us, event)))
        times = {"every_s": BEAT_US * US, "lost_after_s": LOST_US * US}
        self.watch = self.a.watch_peer(self.b.main_address, **times)

    def go(self) -> None:
        """Draw what happens to b, and let time pass, with writes."""
        cluster, dice, at_us = self.cluster, self.dice, self.at_us
        match self.life.fate:
            case "flap":
                nic, self.flaps = dice.randrange(self.nics), dice.randint(1, 3)
                for _ in range(self.flaps):
                    cluster.at(at_us, clog("b", nic, dice.uniform(5, 180)))
                    at_us += 200
                if self.nics == 1:
                    self.life.fate = "flap of the only one"
            case "hold up":
                for _ in range(dice.randint(1, 3)):
                    cluster.at(at_us, pause("a", dice.uniform(5, 4 * LOST_US)))
                    at_us += dice.uniform(20, 200)
            case "short cut" | "cut" as cut:
                short = LOST_US - 2.5 * BEAT_US
                self.for_us = (
                    dice.uniform(5, short) if cut == "short cut" else dice.uniform(300, 500)
                )
                for nic in range(self.nics):
                    cluster.at(at_us, clog("b", nic, self.for_us))
            case "crash":
                cluster.at(at_us, lambda: cluster.fabric.crash("b"))
            case "restart":
                cluster.at(at_us, lambda: cluster.restart("b"))
            case "kill nic":
                cluster.at(at_us, lambda: cluster.kill_nic("b", self.nics - 1))
            case "deaf":
                cluster.at(at_us, mute("a", 0, dice.uniform(20, 300)))
            case "silent":
                cluster.at(at_us, pause("b", dice.uniform(250, 500)))
        if dice.random() < 0.4:
            cluster.at(dice.uniform(100, 600), self._remove)
        while cluster.now_us < END_US:
            self._write()
            cluster.env.run(until=cluster.env.now + round(dice.uniform(2, 16) * 1e6))
        cluster.heal()
        cluster.env.run(until=cluster.env.now + 400_000_000)
        for _ in range(8):
            self._write()
            cluster.env.run(until=cluster.env.now + 100_000_000)
        self.watch.close()
        cluster.env.run(until=cluster.env.now + 10**12)

    def _write(self) -> None:
        # Where it is heartbeats that must find out, no row may do it before them.
        quiet = self.life.fate in {"short cut", "crash", "cut"}
        if quiet and self.at_us - 130 < self.cluster.now_us < self.at_us + 700:
            return
        if sum(not sent.finished for sent in self.sends[-4:]) > 1:
            return
        pages = Pages(range(PAGES))
        try:
            sent = self.a.submit_paged_writes(PAGE, (self.mr, pages), (self.desc, pages), 7)
        except ClosedError:
            assert self.removal is not None
            assert not self.removal.finished
            self.refused += 1
            return
        if self.removal is not None:
            assert self.removal.finished, "a request was let in"
            self.back_in = True
        self.sends.append(sent)

    def _remove(self) -> None:
        self.before = list(self.sends)
        self.removal = self.a.remove_peer(self.b.main_address)
        self.removal.add_done_callback(self._removed)

    def _removed(self, _: object) -> None:
        self.early = [sent.describe() for sent in self.before if not sent.finished]
        self.kept = list(self.a._peers._remotes.values())
        self.life.events.clear()  # from now on it is a stranger

    # ------------------------------------------------------------------ what must hold

    def check(self) -> None:
        """Everything has ended, as it had to; one event a change; no false alarm, no late one."""
        assert all(sent.finished for sent in self.sends)
        assert not self.a._machine.busy()
        self._check_transfers()
        self._check_order()
        self._check_times()
        if self.removal is None:
            self._check_nics()
        else:
            self._check_removal()
        self.life.seen.update(event.kind.value for _, event in self.life.events)
        self.life.seen["refused"] += self.refused
        self.life.seen["met again"] += self.back_in

    def _check_transfers(self) -> None:
        whole = self.life.fate in {"none", "hold up", "silent", "short cut"}
        failed = [sent.error for sent in self.sends if not sent.ok]
        whole = whole or (self.life.fate == "flap" and self.removal is None)
        assert not whole or failed == [], failed
        came = dict(self.cluster.engines[1].stats().imms_unexpected).get(7, 0)
        due = PAGES * len(self.sends)
        if self.life.fate != "restart":
            assert came <= due
            assert failed or came == due
        if self.sends and not failed:
            assert (self.target == np.arange(PAGE * PAGES, dtype=np.uint8)).all()

    def _check_order(self) -> None:
        """One event a change: what is lost comes back before it is lost again."""
        peer = self.life.kinds()
        if PeerChange.RESTARTED in peer:
            assert peer.index(PeerChange.RESTARTED) == len(peer) - 1, peer
            peer = peer[:-1]
        pairs = [PeerChange.LOST, PeerChange.BACK] * len(peer)
        assert peer == pairs[: len(peer)]
        for nic in range(self.nics):
            mine = self.life.kinds(nic)
            assert mine == ([PeerChange.NIC_LOST, PeerChange.NIC_BACK] * len(mine))[: len(mine)]
            if self.life.fate == "flap":
                assert mine.count(PeerChange.NIC_LOST) <= self.flaps, "it came, and went, by itself"

    def _check_times(self) -> None:
        fate, kinds = self.life.fate, self.life.kinds()
        if fate in FATES[:4] and not self.cluster.fabric.chaos.message_loss:  # five can be lost
            assert [] == kinds, "it was there all the time"
        removed_us = END_US if self.removal is None else 0
        lost_us = [us for us, event in self.life.events if event.kind is PeerChange.LOST]
        if fate in {"crash", "cut"} and removed_us:
            assert lost_us, "nobody said that it was lost"
            assert lost_us[0] < self.at_us + LOST_US + BEAT_US + 10
            if not self.cluster.fabric.chaos.message_loss:  # answers may be missing before, too
                assert lost_us[0] > self.at_us + LOST_US - 2 * BEAT_US
        if removed_us:
            ends = {"crash": PeerState.LOST, "restart": PeerState.RESTARTED}
            if self.nics == 1:
                ends["kill nic"] = PeerState.LOST
            # Without a path for rows it stays lost, however it may answer control messages.
            expected = PeerState.ALIVE if self._paths() else PeerState.LOST
            assert ends.get(fate, expected) is self.watch.state

    def _paths(self) -> list[int]:
        """The NICs of b that rows can reach, as far as fences go."""
        link = self.a._peers.links["sim", "b"]
        ours = range(len(self.a.main_address.domains))
        return [j for j in range(self.nics) if any(link.is_up(i, j) for i in ours)]

    def _check_nics(self) -> None:
        """What can be used is used: each NIC that lives, and has a path that is not fenced."""
        if self.life.fate in {"crash", "restart"}:
            return
        for nic, alive in enumerate(self.a._peers.links["sim", "b"].alive):
            dead = self.life.fate == "kill nic" and nic == self.nics - 1
            if nic in self._paths() and not dead:
                assert alive, f"NIC {nic} answers, and is not used"
            if self.life.fate != "kill nic":
                assert not self.a._peers.links["sim", "b"].closed, "a path is not used again"
            if self.life.kinds(nic) and PeerChange.LOST not in self.life.kinds():
                assert alive is (self.life.kinds(nic)[-1] is PeerChange.NIC_BACK)

    def _check_removal(self) -> None:
        assert self.removal.ok
        assert [] == self.early, "removed before its last transfer"
        assert [] == self.kept, "removed, and still known"
        life, book = self.a._machine.life, self.a._peers
        assert [] == life._leaving
        if not self.back_in:
            assert {} == book.links == book._remotes
            assert {} == life._peers == life._nics


def swarm(seeds: range, fates: tuple[str, ...] = FATES) -> Counter[str]:
    """Many lives; what was seen in all of them."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            life = live(seed, fates)
        except (AssertionError, TepError) as error:
            error.add_note(f"again: tests.support.lives.live({seed}, {fates})")
            raise
        seen.update(life.seen)
        seen[life.fate] += 1
    return seen


__all__ = ["FATES", "Life", "live", "swarm"]

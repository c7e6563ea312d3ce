"""Drawn runs of reads on the chaos fabric, with faults, judged byte by byte. Not a test.

The owner's memory changes all the time: version v of a byte is `base + v`. What a read brings must
be of versions that were there between its submit and its end. An owner that gets the immediate of a
read puts FREED into all that was read: no read may bring it. The reader does the same with what a
settled read wrote, and nothing may be written there later, unless it failed and the region was in
quarantine then.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tep.api import GatherSrc, Pages, Read, Routing
from tep.backends.base import Access
from tep.core.plan import count_imms
from tep.core.transfer import Transfer
from tep.errors import TepError
from tep.sim.cluster import Cluster
from tep.sim.faults import Chaos, Clog, Fault, KillNic, Mute, Revoke
from tep.units import PS_PER_US

PAGE = 48
READS = 5
GUARD = 64
FREED, REUSED, BLANK = 255, 254, 253
VERSIONS = 40
WRITTEN = 1000  # the immediate of writes


@dataclass
class Tale:
    """What happened in the runs so far."""

    done: int = 0
    failed: int = 0
    cancelled: int = 0
    again: int = 0
    quarantined: int = 0
    told: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Trial:
    """One read of a run: `owners` are the numbers of the nodes that are read."""

    handle: Transfer
    number: int
    imm: int | None
    owners: tuple[int, ...]
    pieces: list[tuple[int, int, int, int]]  # owner, its byte, our byte, length
    since: int
    until: int = VERSIONS
    reused: bool = False

    @property
    def span(self) -> tuple[int, int]:
        """Our bytes of this read, and more of nobody's."""
        return self.number * SPAN, (self.number + 1) * SPAN


PIECES = 12
SPAN = PIECES * PAGE + 2 * GUARD


class Run:
    """Node 0 reads from nodes 1 and 2; in every other run by prepared transfers, at offsets."""

    def __init__(self, cluster: Cluster, dice: random.Random, seed: int) -> None:
        self.cluster, self.dice, self.prepares = cluster, dice, bool(seed % 2)
        self.version = 0
        base = np.random.default_rng(seed).integers(0, 200, (2, READS * SPAN), np.uint8)
        self.base = [base[0], base[1]]
        self.theirs = [array.copy() for array in base]
        self.mine = np.full(READS * SPAN, BLANK, np.uint8)
        reader, *owners = cluster.engines
        self.reader, self.owners = reader, owners
        access = Access.READABLE | dice.choice([Access.READABLE, Access.SOURCE_AND_TARGET])
        self.descs = [
            owner.reg_mr(memory, access=access)[1]
            for owner, memory in zip(owners, self.theirs, strict=True)
        ]
        sink = dice.choice([Access.SINK, Access.SOURCE_AND_TARGET])
        self.mr, _ = reader.reg_mr(self.mine, access=sink)
        self.freed: list[set[int]] = [set(), set()]
        self.sent: list[tuple[int, Transfer]] = []  # writes beside the reads: (owner, handle)
        source, _ = reader.reg_mr(np.full(PAGE, 7, np.uint8), access=Access.SOURCE)
        self.noise = source, [owner.reg_mr(np.zeros(PAGE, np.uint8))[1] for owner in owners]
        self.trials: list[Trial] = []
        self.wrong: list[str] = []
        self.told: Counter[tuple[int, int]] = Counter()
        for who, owner in enumerate(owners):
            owner.on_imm(range(1, 1 + READS), lambda imm, n, who=who: self.heard(who, imm, n))

    # ------------------------------------------------------------------ what happens

    def change(self) -> None:
        """The owners write to their memory: the next version of all that is not freed."""
        self.version += 1
        for who, memory in enumerate(self.theirs):
            kept = self.base[who] + np.uint8(self.version)
            for number in self.freed[who]:
                kept[number * SPAN : (number + 1) * SPAN] = FREED
            memory[:] = kept

    def heard(self, who: int, imm: int, count: int) -> None:
        """An owner is told that its memory was read: it frees it, at once."""
        trial = self.trials[imm - 1]
        self.told[who, imm] += count
        if who not in trial.owners:
            self.wrong.append(f"read {trial.number}: owner {who} was told, and was not read")
        stats = trial.handle.stats()
        if stats.rows_back < stats.rows + stats.rows_again - len(trial.owners):
            self.wrong.append(f"read {trial.number}: told before all rows are back: {stats}")
        self.freed[who].add(trial.number)
        self.theirs[who][slice(*trial.span)] = FREED

    def settled(self, trial: Trial) -> None:
        """A read has settled: judge its bytes, and use its memory for something else."""
        trial.until = self.version
        start, stop = trial.span
        inside = np.zeros(SPAN, np.bool_)
        for owner, there, here, nbytes in trial.pieces:
            part = slice(here, here + nbytes)
            inside[here - start : here - start + nbytes] = True
            if trial.handle.ok:
                age = self.mine[part] - self.base[owner][there : there + nbytes]
                if not ((trial.since <= age) & (age <= trial.until)).all():
                    self.wrong.append(f"read {trial.number}: versions {set(age.tolist())}")
        if not (self.mine[start:stop][~inside] == BLANK).all():
            self.wrong.append(f"read {trial.number} wrote outside of its rows")
        if trial.handle.ok or not self.mr.quarantined:
            self.mine[start:stop] = REUSED
            trial.reused = True

    def write(self) -> None:
        """A write beside the reads: what a path loses of one way must not disturb the other."""
        mr, descs = self.noise
        who = self.dice.randrange(2)
        sent = self.reader.submit_single_write(PAGE, (mr, 0), (descs[who], 0), WRITTEN)
        self.sent.append((who, sent))

    def submit(self) -> None:
        """One read of a drawn shape."""
        dice, number = self.dice, len(self.trials)
        n = dice.randint(1, PIECES)
        imm = 1 + number if dice.random() < 0.6 else None
        first = number * SPAN + GUARD
        kind = dice.choice(["single", "paged", "strides", "gather", "slices"])
        owner = dice.randrange(2)
        desc, mr, reader = self.descs[owner], self.mr, self.reader
        owners: tuple[int, ...] = (owner,)
        pieces = [(owner, first, first, n * PAGE)]
        # What is prepared reads the span of read 0, and is submitted at the offset of this one.
        off = number * SPAN if self.prepares else 0
        at, routing = first - off, Routing()
        if kind == "single":
            lanes = len(reader.main_address.domains) * len(desc.addr.domains)
            shards = dice.choice([None, 1, lanes]) if lanes in {1, 2, 3} else None
            routing = Routing(num_shards=shards)
            verbs = reader.submit_single_read, reader.prepare_single_read
            args: tuple[Any, ...] = n * PAGE, (desc, at), (mr, at)
        elif kind in {"paged", "strides"}:
            nbytes = PAGE if kind == "paged" else dice.randint(0, PAGE)
            there, here = ([dice.randrange(n) for _ in range(n)], dice.sample(range(n), n))
            pieces = [
                (owner, first + PAGE * there[k], first + PAGE * here[k], nbytes) for k in range(n)
            ]
            verbs = reader.submit_paged_reads, reader.prepare_paged_reads
            lists = [Pages(each, stride=PAGE, offset=at) for each in (there, here)]
            args = nbytes, (desc, lists[0]), (mr, lists[1])
        else:
            owners = tuple(dice.randrange(2) for _ in range(n))
            sizes = [dice.randint(0, PAGE) for _ in range(n)]
            pieces = [(owners[k], first + k, first + PAGE * k, sizes[k]) for k in range(n)]
            slices = [
                GatherSrc(nbytes, here - off, (self.descs[who], there - off))
                for who, there, here, nbytes in pieces
            ]
            routing = Routing(scatter_by="bytes" if kind == "slices" else "peers")
            verbs = reader.submit_gather, reader.prepare_gather
            args = mr, slices
        submit, prepare = verbs
        if self.prepares:
            ready = prepare(*args, routing=routing)
            sent = ready.submit(imm, src_offset=off, dst_offset=off)
        else:
            sent = submit(*args, imm, routing=routing)
        trial = Trial(sent, number, imm, tuple(set(owners)), pieces, self.version)
        self.trials.append(trial)
        sent.add_done_callback(lambda _: self.settled(trial))
        if dice.random() < 0.15:
            self.cluster.at(self.cluster.now_us + dice.uniform(0.01, 2), sent.cancel)

    # ------------------------------------------------------------------ the end

    def judge(self, tale: Tale) -> None:
        """All has settled, and time has passed: what is left must be as it should be."""
        for trial in self.trials:
            sent = trial.handle
            assert sent.finished, sent.describe()
            start, stop = trial.span
            if trial.reused and not (self.mine[start:stop] == REUSED).all():
                self.wrong.append(f"read {trial.number}: written after it had settled")
            if sent.failed and not self.cluster.happened:
                self.wrong.append(f"read {trial.number}: nothing happened, and it failed")
            due = trial.imm is not None and sent.ok
            for who in range(2):
                told = self.told[who, trial.imm or 0] if trial.imm else 0
                wanted = count_imms(Read()) if due and who in trial.owners else 0
                if told < wanted or (told > wanted and sent.ok) or told > 1:
                    self.wrong.append(f"read {trial.number}: owner {who} told {told} times")
                tale.told += told
            tale.done += sent.ok
            tale.failed += sent.failed
            tale.cancelled += sent.cancelled
            tale.again += sent.stats().rows_again
        for who, owner in enumerate(self.owners):
            mine = [sent for to, sent in self.sent if to == who]
            came, ok = owner.imm_counter(WRITTEN).value, sum(sent.ok for sent in mine)
            if not ok <= came <= len(mine):
                self.wrong.append(f"{came} writes came to owner {who}, {ok} of {len(mine)} are ok")
        tale.quarantined += bool(self.mr.quarantined)
        self.wrong += self.cluster.fabric.violations
        assert [] == self.wrong, self.wrong
        stats = self.reader.stats()
        assert (0, 0) == (stats.rows_backlog, sum(stats.rows_outstanding))
        assert 0 == self.mr.inflight


def faults_of(dice: random.Random, nics: list[int], *, harm: bool) -> list[Fault]:
    """What goes wrong in a run."""
    found: list[Fault] = []
    for _ in range(dice.choice([0, 0, 1, 1, 2, 3])):
        node = dice.randrange(3)
        name, nic = "abc"[node], dice.randrange(nics[node])
        for_ps = dice.choice([PS_PER_US // 5, 2 * PS_PER_US])
        kinds: list[Fault] = [Clog(name, nic, for_ps), Mute(name, nic, for_ps)]
        if harm:
            kinds += [KillNic(name, nic), KillNic(name, nic), Revoke(name, nic)]
        found.append(dice.choice(kinds))
    return found


def run(seed: int, tale: Tale | None = None, *, harm: bool = True, **knobs: int) -> Tale:
    """One run; raises AssertionError where something is wrong."""
    tale = Tale() if tale is None else tale
    dice = random.Random(seed)
    nics = dice.choice([[1, 1, 1], [1, 2, 1], [2, 2, 1], [2, 2, 2], [3, 2, 1], [2, 3, 4]])
    chaos = Chaos.draw(seed, **{"late_land": dice.choice([0, 1, 2]), **knobs})
    with Cluster(3, nics, chaos=chaos, seed=seed) as cluster:
        now = Run(cluster, dice, seed)
        for fault in faults_of(dice, nics, harm=harm):
            cluster.at(dice.uniform(0, 3), fault)
        for k in range(VERSIONS):
            cluster.at(0.01 + dice.uniform(0.01, 0.2) * k, now.change)
        for _ in range(READS):
            cluster.at(dice.uniform(0, 2), now.submit)
            cluster.at(dice.uniform(0, 2), now.write)
        cluster.env.run(until=20 * PS_PER_US)
        for handle in [trial.handle for trial in now.trials] + [sent for _, sent in now.sent]:
            try:
                handle.wait(60)
            except TepError as error:
                tale.errors.append(str(error))
        cluster.env.run(until=cluster.env.now + 10**13)
        now.judge(tale)
    return tale


def swarm(seeds: range, *, harm: bool = True, **knobs: int) -> Tale:
    """Many runs, summed up."""
    tale = Tale()
    for seed in seeds:
        try:
            run(seed, tale, harm=harm, **knobs)
        except AssertionError as error:
            error.add_note(f"again: tests.support.read_trials.run({seed}, harm={harm}, **{knobs})")
            raise
    return tale

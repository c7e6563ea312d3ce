"""Drawn runs of transfers that fail and are tried again under the same immediate.

Two senders write to one receiver on the chaos fabric, alone or together under one immediate, while
NICs die, links break, workers pause, control messages get lost and rows land late. A sender whose
transfer fails or is cancelled sends it again, at once or later, with other bytes. A receiver whose
expectation fails states it again. When a count is reached the bytes of each sender must be those of
one attempt; and nobody may be left waiting for what does not come.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import repeat

import numpy as np

from tep.api import EngineOptions, Pages, ScatterDst
from tep.core.transfer import Expectation, Transfer
from tep.engine import TransferEngine
from tep.errors import TepError
from tep.sim.chaos import ChaosFabric
from tep.sim.cluster import Cluster
from tep.sim.faults import Chaos, Clog, Fault, KillNic, Mute, Pause, Slow, Swizzle
from tep.units import PS_PER_US

__all__ = ["Trial", "play"]

PAGE = 16
PAGES = 12
AREA = PAGE * PAGES
ATTEMPTS = 5
ROUNDS = 3
HEAL_US = 3000.0
EVENTS_MAX = 600_000

SENDERS = ((0,), (1,), (0, 1), (0, 1))
"""Who sends under each immediate."""


class Part:
    """What one sender does under one immediate.

    Attributes:
        stamps: how many attempts there were; each writes bytes of its own number.
        first: the first stamp of this round.
        tries: attempts in this round.
        sent: the last attempt.
        stopped: it tries no more.
    """

    def __init__(self, line: Line, who: int, offset: int) -> None:
        self.line = line
        self.who = who
        self.offset = offset
        self.stamps = 0
        self.first = 1
        self.tries = 0
        self.sent: Transfer | None = None
        self.stopped = False


class Line:
    """One immediate: its senders, the round that they are in, and the expectation.

    Attributes:
        reached: whether the count of this round was reached.
        over: nothing more is sent or expected.
        clean: whether no sender failed after the receiver had everything.
    """

    def __init__(self, imm: int, kind: str, rounds: int) -> None:
        self.imm = imm
        self.kind = kind
        self.rounds = rounds
        self.round = 0
        self.parts: list[Part] = []
        self.count = 0
        self.wait: Expectation | None = None
        self.reached = self.over = False
        self.clean = True


class Trial:
    """One run.

    Attributes:
        seen: what happened, by name.
        wrong: what was found in callbacks.
    """

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.dice = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.receiver, *self.senders = cluster.engines
        self.memory = np.zeros(sum(map(len, SENDERS)) * AREA, np.uint8)
        _, self.desc = self.receiver.reg_mr(self.memory)
        stamps = np.repeat(np.arange(64, dtype=np.uint8), AREA)
        self.sources = [sender.reg_mr(stamps.copy())[0] for sender in self.senders]
        self.sent: list[Transfer] = []
        self.lines: list[Line] = []
        offset = 0
        for k, whose in enumerate(SENDERS):
            kind = self.dice.choice(["single", "paged", "paged", "scatter", "bytes"])
            line = Line(100 + k, kind, self.dice.randint(1, ROUNDS))
            for who in whose:
                line.parts.append(Part(line, who, offset))
                offset += AREA
            self.lines.append(line)

    # ------------------------------------------------------------------ the plot

    def draw(self) -> None:
        """Book everything that is to happen."""
        dice, at = self.dice, self.cluster.at
        for line in self.lines:
            self.begin(line)
        for _ in range(dice.choice([0, 1, 1, 1, 2, 3])):
            at(dice.uniform(0.1, 6), self.fault())
        at(HEAL_US, self.cluster.heal)

    def fault(self) -> Fault:
        """Something that breaks."""
        dice = self.dice
        engine = self.cluster.engines[dice.randrange(3)]
        nics = len(engine.main_address.domains)
        name, nic = engine.name, dice.randrange(nics)
        for_ps = round(dice.choice([0.3, 3, 30, 2500]) * PS_PER_US)
        return dice.choice(
            [
                KillNic(name, nic),
                KillNic(name, nic),
                Clog(name, nic, for_ps),
                Clog(name, nic, None),
                Mute(name, nic, for_ps),
                Slow(name, nic, 20, for_ps),
                Swizzle(name, nics, for_ps, nic),
                Swizzle(name, nics, for_ps, nic),
                Pause(name, for_ps),
                Pause(name, 40 * for_ps),
            ]
        )

    def later(self, longest_us: float, what: Callable[[], object]) -> None:
        """Do something soon."""
        self.cluster.at(self.cluster.now_us + self.dice.uniform(0, longest_us), what)

    def begin(self, line: Line) -> None:
        """Begin a round: the senders send, and the receiver expects, in any order."""
        line.round += 1
        line.reached = False
        for part in line.parts:
            part.tries, part.first = 0, part.stamps + 1
            self.later(3, lambda part=part: self.send(part))
        self.later(3, lambda: self.expect(line))

    # ------------------------------------------------------------------ a sender

    def send(self, part: Part) -> None:
        """Try once more, with bytes of this attempt."""
        line, dice = part.line, self.dice
        if line.over or line.reached or part.stopped:
            return
        engine, mr = self.senders[part.who], self.sources[part.who]
        part.stamps += 1
        part.tries += 1
        self.seen["held"] += bool(engine._worker.telling.owed) and part.tries > 1
        src, dst = part.stamps * AREA, part.offset
        try:
            match line.kind:
                case "single":
                    sent = engine.submit_single_write(AREA, (mr, src), (self.desc, dst), line.imm)
                case "paged":
                    pages = range(PAGES)
                    sent = engine.submit_paged_writes(
                        PAGE,
                        (mr, Pages(pages, offset=src)),
                        (self.desc, Pages(pages, offset=dst)),
                        line.imm,
                    )
                case _:
                    slices = [
                        ScatterDst(AREA // 3, src + k, (self.desc, dst + k))
                        for k in range(0, AREA, AREA // 3)
                    ]
                    sent = engine.submit_scatter(mr, slices, line.imm)
        except TepError as error:
            self.stop(part, f"refused: {error}")
            return
        if part.stamps == 1:
            line.count += sent.rows
        part.sent = sent
        self.sent.append(sent)
        sent.add_done_callback(lambda sent: self.ended(part, sent))
        if dice.random() < 0.15:
            self.later(2, sent.cancel)

    def ended(self, part: Part, sent: Transfer) -> None:
        """An attempt has ended."""
        line = part.line
        if sent.ok:
            self.advance(line)
            return
        self.seen["cancelled" if sent.cancelled else "failed"] += 1
        self.seen["in doubt"] += bool(sent.in_doubt)
        if line.reached:
            line.clean = False  # the receiver has it all, and its sender does not know
            self.over(line)
        elif part.tries < ATTEMPTS:
            if self.dice.random() < 0.6:
                self.send(part)
            else:
                self.later(40, lambda: self.send(part))
        else:
            self.stop(part, "too many attempts")

    def stop(self, part: Part, why: str) -> None:
        """Give up for good."""
        self.seen[why.split(":", maxsplit=1)[0]] += 1
        part.stopped = True

    # ------------------------------------------------------------------ the receiver

    def expect(self, line: Line) -> None:
        """Wait for all senders; before they have sent anything nobody knows for how much."""
        if line.over or line.reached:
            return
        if not all(part.stamps for part in line.parts):
            self.later(1, lambda: self.expect(line))
            return
        line.wait = self.receiver.expect_imm_count(
            line.imm, line.count, on_done=lambda wait: self.told(line, wait)
        )

    def told(self, line: Line, wait: Expectation) -> None:
        """An expectation has ended."""
        if not wait.ok:
            error = wait.error
            self.seen[getattr(error, "code", type(error).__name__)] += 1
            if any(part.stopped for part in line.parts):
                self.over(line)
            elif self.dice.random() < 0.6:
                self.expect(line)
            else:
                self.later(20, lambda: self.expect(line))
            return
        self.seen["reached"] += 1
        self.seen["reached after a failure"] += any(part.tries > 1 for part in line.parts)
        line.reached = True
        for part in line.parts:
            area = self.memory[part.offset : part.offset + AREA]
            if not part.first <= area[0] <= part.stamps or (area != area[0]).any():
                stamps = sorted(Counter(area.tolist()).items())
                self.wrong.append(
                    f"imm {line.imm} of sender {part.who} is here in round {line.round}, with "
                    f"bytes of attempts {stamps}; it began with {part.first}"
                )
            if area[0] < part.stamps:  # its sender did not know, and has sent it once more
                line.clean = False
                self.over(line)
        self.advance(line)

    def advance(self, line: Line) -> None:
        """Go on with the next round, once the receiver and all senders are through."""
        ok = all(part.sent is not None and part.sent.ok for part in line.parts)
        if line.reached and ok and not line.over:
            if line.round < line.rounds:
                self.begin(line)
            else:
                self.over(line)

    def over(self, line: Line) -> None:
        line.over = True

    # ------------------------------------------------------------------ the judgement

    def judge(self) -> None:
        """Everything has ended, nobody waits in vain, and no count is left."""
        assert not self.wrong, self.wrong[0]
        for sent in self.sent:
            assert sent.finished, f"never ended: {sent.describe()}"
        for engine in self.cluster.engines:
            assert not engine.callback_errors, engine.callback_errors[0]
            assert not engine._machine.busy(), engine.stall_report()
        for line in self.lines:
            self.judge_line(line)

    def judge_line(self, line: Line) -> None:
        """One immediate."""
        left = self.receiver.imm_counter(line.imm).value
        if line.over and line.clean and not any(part.stopped for part in line.parts):
            assert left == 0, f"{left} of imm {line.imm} are left over"
        if line.wait is None or line.wait.finished:
            return
        if not all(self.reaches(part.who) for part in line.parts):
            self.seen["cut off"] += 1
            return
        what = [part.sent.describe() if part.sent else "not sent" for part in line.parts]
        raise AssertionError(f"{line.wait.describe()}, and waits for ever: {what}; {left} left")

    def reaches(self, who: int) -> bool:
        """Whether a sender and the receiver can still talk."""
        return any(self.receiver._worker.group.alive) and any(self.senders[who]._worker.group.alive)


def play(seed: int) -> Trial:
    """Play the run of a seed, and judge it. Raises AssertionError, or what the engine raised."""
    dice = random.Random(seed)
    nics = [dice.choice([1, 2, 2, 3]) for _ in range(3)]
    late, loss = dice.choice([0, 1, 1, 2, 2]), dice.choice([0, 0, 0, 2, 6])
    chaos = Chaos.draw(seed, late_land=late, message_loss=loss)
    # Control messages that come back later than the next ones go out turn their engine for ever.
    probe_max_s = max(320e-6, 4e-12 * max(chaos.dead_after_ps, chaos.pause_ps))
    options = EngineOptions(probe_first_s=20e-6, probe_max_s=probe_max_s)
    try:
        with Cluster(3, nics, chaos=chaos, seed=seed, options=options) as cluster:
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
            trial.seen["cleared"] += any(map(_has_cleared, cluster.engines))
    except Exception as error:
        error.add_note(f"again: tests.support.telling_trials.play({seed})")
        raise
    return trial


def _has_cleared(engine: TransferEngine) -> bool:
    """Whether a path of an engine was fenced off."""
    links = engine._peers.links.values()
    return any(path.fences for link in links for path in link.paths())

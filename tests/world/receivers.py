"""The receivers of a scenario: they expect, claim, take back, state again, and remove node a.

Here is the check that belongs to the moment in which a count fires.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

from tep.base.errors import FabricError
from tep.core.handles import Expectation, Removal
from tests.world.lab import FREED, USED, Host, Piece
from tests.world.sender import join
from tests.world.specs import RECEIVERS, TransferSpec
from tests.world.stage import Run, Shares, Stage, Wait


class Receivers:
    """Both of them."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._recalling: dict[int, list[Callable[[], None]]] = {}
        env = stage.lab.env
        for place, spec in enumerate(stage.scenario.transfers):
            for host in stage.receivers(spec):
                self._prepare(place, host, 0)
            if spec.recall_ps is not None:
                env.call_at(spec.recall_ps, self._recall, place)
        if stage.scenario.bar_ps is not None:
            env.call_at(stage.scenario.bar_ps, self._bar)

    def restarted(self, host: Host) -> None:
        """A receiver is back, and has to be told of what was not begun before."""
        stage = self.stage
        for place, spec in enumerate(stage.scenario.transfers):
            if takes_part(spec, host) and (place, 0) not in stage.runs:
                self._prepare(place, host, stage.lab.env.now)

    def _prepare(self, place: int, host: Host, now_ps: int) -> None:
        """Claim now, or book the first expectations."""
        spec = self.stage.scenario.transfers[place]
        if spec.silent:
            return
        if spec.claimed:
            self._claim(place, host)
        else:
            t_ps = max(spec.expect_ps, now_ps + 1)
            self.stage.lab.env.call_at(t_ps, self._state, (place, 0, host))

    def _waits(self, place: int, round_: int, host: Host, number: int) -> list[Wait]:
        """Return a receiver's waits; the first of several that share waits for all of them."""
        scenario = self.stage.scenario
        mates = [k for k in scenario.mates(place) if takes_part(scenario.transfers[k], host)]
        if place != mates[0]:
            return []
        dues = {mate: self.stage.dues(mate, number, host.name) for mate in mates}
        parts: list[tuple[int, int, Shares]]
        if len(mates) == 1:
            parts = [(imm, count, ((place, k),)) for k, (imm, count, _) in enumerate(dues[place])]
        else:
            count = sum(count for parts in dues.values() for _, count, _ in parts)
            shares = tuple((mate, len(parts) - 1) for mate, parts in dues.items())
            parts = [(scenario.imm(place), count, shares)]
        return [Wait(host, place, round_, number, *part) for part in parts]

    def _state(self, stated: tuple[int, int, Host]) -> None:
        """State the expectations of one round."""
        place, round_, host = stated
        if not host.live or (round_ and place in self.stage.over):
            return
        spec = self.stage.scenario.transfers[place]
        waits = self._waits(place, round_, host, round_)
        if round_ + 1 < spec.rounds:
            if spec.lined_up:
                for later in range(round_ + 1, spec.rounds):
                    waits += self._waits(place, later, host, later)
            else:
                waits[-1].then = lambda: self._state((place, round_ + 1, host))
        for wait in waits:
            self._expect(wait)

    def _expect(self, wait: Wait) -> None:
        host = wait.host
        if host.ledger.imms[wait.imm] > host.used[wait.imm]:
            self.stage.seen["early immediate"] += 1
        self.stage.waits.append(wait)
        wait.handle = host.engine.expect_imm_count(
            wait.imm, wait.count, on_done=lambda handle: self._reached(wait, handle)
        )

    def _reached(self, wait: Wait, handle: Expectation) -> None:
        wait.settled += 1
        if wait.settled != 1:
            self.stage.blame(f"an expectation of imm {wait.imm:#x} settled twice")
        if handle.cancelled and wait.recalled:
            return
        if not handle.ok:
            if not wait.host.live:
                return  # its engine was closed
            error = handle.error
            if isinstance(error, FabricError) and error.code == "PEER_FAILED":
                self._burnt(wait)
                return
            self.stage.blame(f"an expectation of imm {wait.imm:#x} ended {handle.state.value}")
        used = wait.host.used
        used[wait.imm] += wait.count
        self._fired(wait, used[wait.imm])
        if wait.host.live:
            self.stage.echo.answer(wait.host)
        if wait.then is None:
            return
        if wait.place in self._recalling:
            self._recalling[wait.place].append(wait.then)
        else:
            wait.then()

    def _burnt(self, wait: Wait) -> None:
        """The sender says that its immediates do not come: expect its next try, if it makes one."""
        stage, host = self.stage, wait.host
        stage.seen["told"] += 1
        if not stage.failed_under(wait.imm, host) and stage.sender.live:
            stage.blame(f"imm {wait.imm:#x} at {host.name} is said to fail, and nothing of it did")
        spec = stage.scenario.transfers[wait.place]
        if wait.number - wait.round < spec.again and wait.place not in stage.over:
            env = stage.lab.env
            env.call_at(env.now + spec.restate_ps, self._expect_next, wait)

    def _expect_next(self, wait: Wait) -> None:
        if wait.host.live and wait.place not in self.stage.over:
            (fresh,) = self._waits(wait.place, wait.round, wait.host, wait.number + 1)
            fresh.then = wait.then
            self._expect(fresh)

    def _fired(self, wait: Wait, used: int) -> None:
        """A count was reached: its immediates and bytes must be here."""
        stage, host = self.stage, wait.host
        here = host.ledger.imms[wait.imm]
        if used > here:
            stage.blame(
                f"imm {wait.imm:#x} at {host.name}: {used} were used up, but {here} arrived"
            )
        elif here > used:
            stage.seen["surplus"] += 1
        stage.seen["sum of several"] += len(wait.shares) > 1
        for (place, part), run in zip(wait.shares, stage.awaited(wait)):
            stage.reached.add((place, wait.round))
            if run is None:
                stage.blame(
                    f"imm {wait.imm:#x} at {host.name} fired for transfer {place}, "
                    "which sent nothing there"
                )
                continue
            pieces = stage.dues(place, run.number, host.name)[part][2]
            if stage.lab.landed(host, pieces):
                self._use_up(host, pieces, run)
            else:
                stage.blame(
                    f"imm {wait.imm:#x} at {host.name} fired before all bytes of {run} were there"
                )

    def _use_up(self, host: Host, pieces: tuple[Piece, ...], run: Run) -> None:
        """Do with the bytes what a reader may do: they are his, and nobody writes there again."""
        for _, dst, n in pieces:
            if host.memory[dst : dst + n] != FREED * n:
                host.memory[dst : dst + n] = USED * n
                run.used.append((host, dst, n))
        if run.snapshot:
            run.take_snapshot()

    def _recall(self, place: int) -> None:
        """Take all open expectations of a transfer back; once that is confirmed, restate them."""
        found = [
            wait
            for wait in self.stage.waits
            if wait.place == place and wait.host.live and not wait.settled and not wait.claimed
        ]
        left = len(found)
        if not found:
            return
        # What is expected next must not get in line before what is taken back.
        waiting = self._recalling.setdefault(place, [])
        # The last in line goes first: else those behind could fire on what the first waited for.
        for wait in reversed(found):
            assert wait.handle is not None

            def gone(_: Expectation) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    self._restate(found)
                    del self._recalling[place]
                    for then in waiting:
                        then()

            wait.recalled = True
            wait.handle.add_done_callback(gone)
            wait.handle.cancel()

    def _restate(self, waits: list[Wait]) -> None:
        for wait in waits:
            assert wait.handle is not None
            if wait.handle.cancelled and wait.host.live:
                self.stage.seen["recalled"] += 1
                self._expect(replace(wait, settled=0, recalled=False))

    def _bar(self, _: object) -> None:
        """Node b lets go of node a, and uses its memory for something else once that is safe."""
        stage, host = self.stage, self.stage.lab.hosts[RECEIVERS[0]]
        if not host.live:
            return
        senders = {run.sender.desc.addr: run.sender for run in stage.runs.values()}
        senders[stage.sender.desc.addr] = stage.sender
        removals = [host.engine.remove_peer(addr) for addr in senders]
        stage.barred.add(host)

        def removed(_: Removal) -> None:
            if not host.live or not all(removal.ok for removal in removals):
                return
            unfenced = [removal.unfenced for removal in removals if removal.unfenced]
            if unfenced:
                stage.seen["barred: not fenced"] += 1
                if not stage.scenario.chaos.fence_fails and not stage.broken:
                    stage.blame(f"a fence failed without a cause: {unfenced[0]}")
                return
            stage.seen["barred"] += 1
            host.memory[:] = FREED * len(host.memory)
            host.freed = [(0, len(host.memory))]
            for run in stage.runs.values():
                if run.snapshot and host in run.hosts:
                    run.take_snapshot()
            join(host, [stage.sender.desc.addr])  # for messages: its fences stay

        for removal in removals:
            removal.add_done_callback(removed)

    def _claim(self, place: int, host: Host) -> None:
        rounds = self.stage.scenario.transfers[place].rounds
        each = (self._waits(place, round_, host, round_) for round_ in range(rounds))
        waits = list(chain.from_iterable(each))
        for wait in waits:
            wait.claimed = True
        self.stage.waits += waits
        for imm in dict.fromkeys(wait.imm for wait in waits):
            host.engine.on_imm(
                range(imm, imm + 1), lambda imm, count: self._arrived(place, host, imm, count)
            )

    def _arrived(self, place: int, host: Host, imm: int, count: int) -> None:
        """Claimed immediates came in; where they complete a round, its bytes must be there."""
        self.stage.seen["claimed"] += 1
        host.used[imm] += count
        left = host.used[imm]
        for wait in self.stage.waits:
            if wait.imm == imm and wait.place == place and wait.host is host:
                left -= wait.count
                if left >= 0 and not wait.settled:
                    wait.settled = 1
                    self._fired(wait, host.used[imm] - left)


def takes_part(spec: TransferSpec, host: Host) -> bool:
    """Return True if a node is a receiver of a transfer."""
    return spec.wide or host.name == RECEIVERS[0]

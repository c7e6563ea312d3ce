"""Answers: receivers tell the sender of each count that fired, by an empty write with an immediate.

So all engines send and receive at once, and completions of both kinds meet in one queue. Plays the
answers and judges them: each that is done was counted once, and none that was not sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tep.core.handle import State
from tep.core.transfer import Transfer
from tep.testing.lab import Host
from tep.testing.tap import Mover

if TYPE_CHECKING:
    from tep.testing.stage import Stage

__all__ = ["ECHO_IMM", "Echo"]

ECHO_IMM: Final = 0xEC40


@dataclass(slots=True, eq=False)
class _Answers(Mover):
    """All answers of one incarnation."""

    host: Host
    handles: list[Transfer] = field(default_factory=list)


class Echo:
    """The answers of one run."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._of: dict[str, _Answers] = {}
        self._all: list[_Answers] = []
        sender = stage.sender
        if stage.scenario.echo:
            _, self._inbox = sender.engine.reg_mr(bytearray(8))
            sender.engine.on_imm(range(ECHO_IMM, ECHO_IMM + 1), self._heard)

    def _heard(self, imm: int, count: int) -> None:
        self._stage.seen["answer"] += count
        self._stage.sender.used[imm] += count

    def answer(self, host: Host) -> None:
        """A count fired at this receiver: say so."""
        if self._stage.scenario.echo:
            handle = host.engine.submit_barrier([self._inbox], ECHO_IMM)
            self.answers(host).handles.append(handle)

    def answers(self, host: Host) -> _Answers:
        """The answers of a receiver's incarnation."""
        found = self._of.get(host.name)
        if found is None or found.host is not host:
            found = self._of[host.name] = _Answers(host)
            self._all.append(found)
        return found

    def states(self, host: Host) -> list[str]:
        """How the answers of an incarnation ended."""
        found = self._of.get(host.name)
        mine = found.handles if found is not None and found.host is host else ()
        return [handle.state.value for handle in mine]

    def judge(self) -> None:
        """Look at all answers once all is quiet."""
        stage = self._stage
        may_fail = stage.harmed
        handles = [handle for answers in self._all for handle in answers.handles]
        done = sum(handle.ok for handle in handles)
        heard = stage.sender.ledger.imms[ECHO_IMM]
        if stage.sender.live and not done <= heard <= len(handles):
            stage.blame(f"{heard} answers arrived, of {len(handles)}, {done} of which are done")
        for answers in self._all:
            for handle in answers.handles if answers.host.live else ():
                if not handle.finished:
                    stage.blame(f"an answer of {answers.host.name} never ended")
                if handle.state is State.FAILED and not may_fail:
                    stage.blame(f"an answer failed without a cause: {handle.error}")

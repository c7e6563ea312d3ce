"""The sums of both ends of a path stay short: what was acknowledged is subtracted from both.

A failover compares the sender's sums with the receiver's, so that only their difference matters,
and subtracting the same from both changes nothing. The sender writes a list of (value, count), all
of them acknowledged, and gives it the next generation of this sums. The receiver subtracts it if it
is the generation after its last, and answers; only then the sender subtracts it too. An answer to a
failover's question names the generation that its sums stand at.

Rule 1: a list that was asked for never changes, and no other has its generation: its message may
come late or twice. Rule 2: the receiver subtracts a list whole or not at all, and once. Rule 3:
what was told of a fenced path is not pruned before the path is open again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from tep.control.channel import Channel
from tep.control.messages import PRUNED_MAX, Answer, Prune, runs_max
from tep.core.group import DomainGroup
from tep.core.path import Path
from tep.core.sums import PathSums, Run, runs_of

__all__ = ["Pruning"]

_RETRY_S: Final = 0.01
"""From a refusal to the next try: most often the receiver has not counted all of it yet."""


class Pruning:
    """The sender's half, for one engine; the receiver's is `fencing`.

    Args:
        group: its NICs.
        channel: to the peers' engines.
        now_s: the clock.

    Attributes:
        large: paths that hold many values; step() is wanted while there are some.
    """

    def __init__(self, group: DomainGroup, channel: Channel, now_s: Callable[[], float]) -> None:
        self._group, self._channel, self._now_s = group, channel, now_s
        self.large: dict[Path, None] = {} if group.acks is None else group.acks.large

    def step(self) -> bool:
        """Ask for what is due on the paths that hold many values; True if anything was."""
        work, now_s = False, self._now_s()
        for path in tuple(self.large):
            sums = path.sums
            if not path.link.current or sums.sent.forgot or not self._channel.able:
                del self.large[path]
            elif not sums.asking and sums.retry_s <= now_s:
                work = True
                self._ask(path, sums)
        return work

    def _ask(self, path: Path, sums: PathSums) -> None:
        if not sums.waiting:
            runs = runs_of(sums.sent.items(), PRUNED_MAX)
            sums.waiting.extend(_lists(runs, runs_max(self._channel.note_bytes)))
            if not sums.waiting:  # all of it was pruned meanwhile
                self._rest(path, sums)
                return
        generation, runs_now = sums.pruned + 1, sums.waiting[0]
        source, nic = self._group.domains[path.domain].address, path.nic

        def told(answer: Answer) -> None:
            sums.asking = False
            sums.why = answer.why
            if answer.why:
                sums.retry_s = self._now_s() + _RETRY_S
            elif sums.pruned < generation:  # else a failover has heard of it earlier
                sums.prune(generation)
                self._rest(path, sums)

        def lost(why: str) -> None:
            sums.asking, sums.why = False, why
            sums.retry_s = self._now_s() + _RETRY_S

        sums.asking = True
        self._channel.ask(
            path.link, lambda n: Prune(n, source, nic, generation, runs_now), told, lost
        )

    def _rest(self, path: Path, sums: PathSums) -> None:
        """Wait until there are many values again, once all lists are through."""
        if not sums.waiting:
            sums.sent.calm()
            self.large.pop(path, None)


def _lists(runs: Iterable[Run], longest: int) -> Iterator[tuple[Run, ...]]:
    """Cut runs into lists for one message each."""
    part: list[Run] = []
    values = 0
    for run in runs:
        if len(part) == longest or values + run[1] > PRUNED_MAX:
            yield tuple(part)
            part, values = [], 0
        part.append(run)
        values += run[1]
    if part:
        yield tuple(part)

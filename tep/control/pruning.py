"""Keep the sums of both ends of a path short: both subtract what was acknowledged.

A failover needs only the difference between the sender's sums and the receiver's, and subtracting
the same counts from both does not change it. The sender makes a list of acknowledged (value, count)
pairs and gives it the next generation number of the path. The receiver subtracts the list if its
generation follows the last one, and answers; the sender subtracts it only after that answer. The
answer to a failover's question names the generation of its sums.

Rule 1: a list that was sent never changes, and no other list has its generation, because its
message may arrive late or twice. Rule 2: the receiver subtracts a list once, and either all of it
or nothing. Rule 3: the sums of a fenced path are not pruned before the path is open again.
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
"""Time from the first refusal to the next try; the receiver may not have counted everything yet."""

_RETRY_MAX_S: Final = 60.0
"""The longest time to the next try: it doubles from one to the next that does not succeed."""


class Pruning:
    """The sender's half, for one engine; the receiver's is `fencing`.

    Args:
        group: its NICs.
        channel: control messages to the peers' engines.
        now_s: the clock.

    Attributes:
        large: paths that hold many values; step() must be called while there are some.
    """

    def __init__(self, group: DomainGroup, channel: Channel, now_s: Callable[[], float]) -> None:
        self._group, self._channel, self._now_s = group, channel, now_s
        self.large: dict[Path, None] = {} if group.acks is None else group.acks.large

    def step(self) -> bool:
        """Ask the peers of paths with many values to prune; True if a question was sent."""
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
            sums.waiting.extend(_lists(runs, runs_max(self._channel.control_bytes)))
            if not sums.waiting:  # all of it was pruned meanwhile
                self._rest(path, sums)
                return
        generation, runs_now = sums.pruned + 1, sums.waiting[0]
        source, nic = self._group.domains[path.domain].address, path.nic

        def told(answer: Answer) -> None:
            if answer.why:
                again(answer.why)
                return
            sums.asking, sums.why, sums.wait_s = False, "", 0.0
            if sums.pruned < generation:  # else the answer to a failover said so earlier
                sums.prune(generation)
                self._rest(path, sums)

        def again(why: str) -> None:
            sums.asking, sums.why = False, why
            sums.wait_s = min(2 * sums.wait_s or _RETRY_S, _RETRY_MAX_S)
            sums.retry_s = self._now_s() + sums.wait_s

        sums.asking = True
        self._channel.ask(
            path.link, lambda n: Prune(n, source, nic, generation, runs_now), told, again
        )

    def _rest(self, path: Path, sums: PathSums) -> None:
        """After the last list, wait until the path has many values again."""
        if not sums.waiting:
            sums.sent.calm()
            self.large.pop(path, None)


def _lists(runs: Iterable[Run], longest: int) -> Iterator[tuple[Run, ...]]:
    """Divide runs into lists, each of which fits into one message."""
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

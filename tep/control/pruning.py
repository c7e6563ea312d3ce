"""The sums of both ends of a lane stay short: what was acknowledged is subtracted from both.

A failover compares the sender's sums with the receiver's, so that only their difference matters,
and subtracting the same from both changes nothing. The sender writes a list of (value, count), all
of them acknowledged, and gives it the next generation of this lane. The receiver subtracts it if it
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
from tep.core.region import Link
from tep.core.sums import Lane, Run, runs_of

__all__ = ["Pruning"]

_RETRY_S: Final = 0.01
"""From a refusal to the next try: most often the receiver has not counted all of it yet."""


class Pruning:
    """The sender's half, for one engine; the receiver's is `audit`.

    Args:
        group: its NICs.
        mail: to the peers' engines.
        now_s: the clock.
    """

    def __init__(self, group: DomainGroup, mail: Channel, now_s: Callable[[], float]) -> None:
        self._group, self._channel, self._now_s = group, mail, now_s
        self._large: dict[tuple[Link, int, int], None] = {}

    def step(self) -> bool:
        """Ask for what is due on the lanes that hold many values; True if anything was."""
        assert self._group.acks is not None
        self._large = self._group.acks.large
        work, now_s = False, self._now_s()
        for key in tuple(self._large):
            link, domain, nic = key
            lane = link.lane(domain, nic)
            if not link.current or lane.sent.forgot or not self._channel.able:
                del self._large[key]
            elif not lane.asking and lane.retry_s <= now_s:
                work = True
                self._ask(key, lane)
        return work

    def _ask(self, key: tuple[Link, int, int], lane: Lane) -> None:
        link, domain, nic = key
        if not lane.waiting:
            runs = runs_of(lane.sent.items(), PRUNED_MAX)
            lane.waiting.extend(_lists(runs, runs_max(self._channel.note_bytes)))
            if not lane.waiting:  # all of it was pruned meanwhile
                self._rest(key, lane)
                return
        generation, runs_now = lane.pruned + 1, lane.waiting[0]
        source = self._group.domains[domain].address

        def told(answer: Answer) -> None:
            lane.asking = False
            lane.why = answer.why
            if answer.why:
                lane.retry_s = self._now_s() + _RETRY_S
            elif lane.pruned < generation:  # else a failover has heard of it earlier
                lane.prune(generation)
                self._rest(key, lane)

        def lost(why: str) -> None:
            lane.asking, lane.why = False, why
            lane.retry_s = self._now_s() + _RETRY_S

        lane.asking = True
        self._channel.ask(link, lambda n: Prune(n, source, nic, generation, runs_now), told, lost)

    def _rest(self, key: tuple[Link, int, int], lane: Lane) -> None:
        """Wait until there are many values again, once all lists are through."""
        if not lane.waiting:
            lane.sent.calm()
            self._large.pop(key, None)


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

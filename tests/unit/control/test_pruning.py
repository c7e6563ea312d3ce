"""Sums of a lane stay short however many immediates go over it; failover is exact afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from unittest import mock

import numpy as np
import pytest

import tep
from tep.backends.loopback import Hub
from tep.base.api import EngineOptions, Pages
from tep.control.failover import Pruning
from tep.control.messages import PRUNED_MAX, Answer, Prune, decode, encode, runs_max
from tep.core import path as paths
from tep.core.path import Arrivals, PathSums, Sums, expand, runs_of
from tep.core.stats import Failover
from tests.support.inside import machine_of, peers_of, worker_of
from tests.support.loopbacks import MortalLoopback, open_made

PAGES = 512


class Lanes:
    """Engine a writes to b, each page with an immediate of its own."""

    def __init__(self, **kw: object) -> None:
        hub = Hub()
        self.a, self.b = (
            tep.TransferEngine(
                opened.domains, driver=tep.InlineDriver(), name=name, epoch=opened.epoch, **kw
            )
            for name in "ab"
            for opened in [open_made(MortalLoopback, 2, hub=hub, name=name)]
        )
        self.mr, _ = self.a.reg_mr(np.ones(PAGES, np.uint8))
        _, self.desc = self.b.reg_mr(np.zeros(PAGES, np.uint8))
        self.at = 0

    def turn(self, times: int = 4) -> None:
        for _ in range(times):
            self.a.driver.turn()
            self.b.driver.turn()

    def send(self, imms: np.ndarray | int) -> tep.Transfer:
        pages = Pages(range(PAGES))
        return self.a.submit_paged_writes(1, (self.mr, pages), (self.desc, pages), imm=imms)

    def go_on(self, values: int) -> None:
        """Use so many further immediates, and take their counts."""
        for first in range(self.at, self.at + values, PAGES):
            sent = self.send(np.arange(first, first + PAGES, dtype=np.uint32))
            while not sent.finished:
                self.turn(1)
            self.turn(1)
            assert sent.ok
            for imm in range(first, first + PAGES):
                worker_of(self.b).imms.counts.pop(imm)
        self.at += values

    def sums(self) -> int:
        """Values that both ends hold."""
        lanes = [
            path.sums.sent for link in peers_of(self.a).links.values() for path in link.paths()
        ]
        ends = [arrivals.counted for arrivals in worker_of(self.b).arrivals]
        return sum(len(end.items()) for end in (*lanes, *ends))

    def fail_over(self, values: int = 7) -> None:
        """A NIC of b dies under rows, with so many values that were used before."""
        again = np.arange(PAGES, dtype=np.uint32) % values
        sent = self.send(again)
        machine_of(self.b).domains[0].fail()
        for _ in range(400):
            self.turn(1)
        assert sent.ok, sent.error or sent.describe()
        assert sent.stats().rows_again > 0, "no row was lost: this shows nothing"
        left = dict(self.b.stats().imms_unexpected)
        assert left == {v: int((again == v).sum()) for v in range(values)}


@pytest.mark.slow
@pytest.mark.parametrize("limit", [256, 1])
def test_sums_stay_short_and_failover_exact(limit: int) -> None:
    """A server takes a new immediate for each request: it would run out of failover in a day."""
    with (
        mock.patch.object(paths, "PRUNE_AT", limit),
        mock.patch.object(paths, "_ROWS_MAX", 64),
    ):
        lanes = Lanes()
        for _ in range(4):
            lanes.go_on(20 * PAGES)
            assert lanes.sums() < 5000, "they grow"
        assert lanes.a.stats().failover is lanes.b.stats().failover is Failover.AVAILABLE
        assert "failover: available" in lanes.a.explain()
        lanes.fail_over()


def test_sums_that_only_the_receiver_has_pruned_are_pruned_by_a_failover() -> None:
    """Its answer was lost: sums pruned at one end look like rows that did not land."""
    lanes = Lanes()
    lanes.go_on(PAGES)
    for path in next(iter(peers_of(lanes.a).links.values())).paths():
        runs = tuple(runs_of(path.sums.sent.items(), PAGES))
        path.sums.waiting.append(runs)
        source, nic = (
            machine_of(lanes.a).domains[path.domain].address,
            machine_of(lanes.b).domains[path.nic],
        )
        assert worker_of(lanes.b).arrivals[path.nic].prune(nic, source, 1, runs) is None
    lanes.fail_over()


def test_few_values_cost_no_message() -> None:
    """Most paths never hold thousands of values: their control messages do not change."""
    lanes = Lanes()
    lanes.go_on(4 * PAGES)
    assert lanes.sums() == 8 * PAGES
    assert not worker_of(lanes.a).channel.busy


def test_what_cannot_be_pruned_is_forgotten_and_said() -> None:
    """A failover that is not there any more must be known before the NIC dies."""
    lanes = Lanes()
    lanes.go_on(PAGES)
    with mock.patch.object(Arrivals, "prune", return_value="not today"):
        link = next(iter(peers_of(lanes.a).links.values()))
        for path in link.paths():
            path.sums.sent._mark, path.sums.sent._limit = 1, 2 * PAGES
        with mock.patch.object(paths, "_ROWS_MAX", 64):
            lanes.go_on(20 * PAGES)
    assert lanes.a.stats().failover is Failover.PARTIAL
    assert "did not prune them (not today)" in lanes.a.explain()
    with pytest.raises(AssertionError, match=r"sums are forgotten"):
        lanes.fail_over()


def test_lists_are_pruned_one_after_the_other_for_ever() -> None:
    """A path lives for months: what is refused once makes its receiver forget all."""
    arrivals, nic = Arrivals(), mock.Mock(source=lambda number: b"a")
    arrivals.add(3, 7, 302)
    for generation in range(1, 301):
        assert arrivals.prune(nic, b"a", generation, ((7, 1, 1),)) is None
        assert arrivals.prune(nic, b"a", generation, ((7, 1, 1),)) is None, "twice is once"
    words = "generation 300 was pruned last, 302 cannot follow"
    assert words == arrivals.prune(nic, b"a", 302, ((7, 1, 1),))
    assert (2,) == arrivals.sums(nic, b"a", (7,))


def test_a_sender_prunes_what_the_receiver_has_pruned_and_nothing_else() -> None:
    """Sums that differ at the ends make a failover count rows that never came."""
    mine = PathSums()
    mine.sent.add(7, 5)
    mine.waiting.extend((((7, 1, 2),), ((7, 1, 1),), ((8, 1, 1),)))
    answers = [mine.prune(generation) for generation in (0, 2, 1, 1, 0, 2)]

    assert [True, False, True, True, False, True] == answers
    assert [(7, 2)] == mine.sent.items()
    assert not mine.prune(3), "8 was never sent"
    assert not mine.prune(3), "nothing more waits"
    assert (2, [(7, 2)]) == (mine.pruned, mine.sent.items())


def test_why_there_is_none_at_all() -> None:
    """Whoever relies on it asks before."""
    off = Lanes(options=EngineOptions(failover=False))
    assert off.a.stats().failover is Failover.OFF
    assert "failover: no, because EngineOptions(failover=False)" in off.a.explain()


def test_one_sender_uses_up_nobody_elses_room() -> None:
    """A peer that sends ever new values loses its own failover, and no other's."""
    arrivals = Arrivals()
    arrivals.counted._limit = arrivals.counted._mark = 100
    arrivals.add(1, 7, 3)
    for value in range(1000):
        arrivals.add(2, value, 1)
    nic = mock.Mock()
    nic.source = lambda number: b"xy"[number - 1 : number]
    assert 1 == len(arrivals.forgotten)
    assert arrivals.forgot(nic, b"x") is None
    assert "forgotten" in arrivals.forgot(nic, b"y")
    assert (3,) == arrivals.sums(nic, b"x", (7,))


def test_runs_say_what_the_sums_are_and_fit_into_a_message() -> None:
    """A value that two runs name, or none does, is a sum that is wrong at one end."""
    rng = np.random.default_rng(1)
    sums = {int(v): int(n) for v, n in zip(rng.integers(0, 90, 60), rng.integers(1, 3, 60))}
    sums |= dict.fromkeys(range(100, 200), 5) | {2**32 - 1: 2**62}
    runs = list(runs_of(sums.items(), 16))
    assert dict(expand(runs)) == sums
    assert max(n for _, n, _ in runs) == 16
    worst = ((2**32 - 2, 1, 2**62),) * runs_max(512)
    assert len(encode(Prune(2**62, b"x" * 256, 63, 2**62, worst[:1]))) < 512
    whole = Sums()
    for value, n in sums.items():
        whole.add(value, n)
    assert not whole.take([(100, 6)])
    assert whole.take(expand(runs))
    assert 0 == len(whole)


@pytest.mark.parametrize(("room", "runs"), [(200, 1), (355, 1), (356, 2), (512, 10), (4096, 209)])
def test_a_message_has_as_many_runs_as_surely_fit(room: int, runs: int) -> None:
    """Fewer cost more messages; more are refused, of a NIC with short messages each time."""
    assert runs == runs_max(room)


@pytest.mark.parametrize("runs", [((5, 3, 1), (7, 1, 1)), ((2**32 - 1, 2, 1),), ((0, 0, 1),), ()])
def test_runs_that_cannot_be_are_refused(runs: tuple) -> None:
    """They would have the receiver subtract a value twice, or count up to the moon."""
    with pytest.raises(ValueError):  # by the type, or when it is decoded
        decode(encode(Prune(1, b"x", 0, 1, runs)))


def test_each_list_fits_into_a_message_and_together_they_are_the_sums() -> None:
    """A message that is too long is refused each time: the sums of that path are never pruned."""
    short = PathSums()
    alike = range(1000, 1000 + 2 * PRUNED_MAX)
    alone = (0, *range(alike.stop, alike.stop + 500, 2))
    for value in (*alone, *alike):
        short.sent.add(value, 3 if value in alike else 1)
    wanted = dict(short.sent.items())
    path = mock.Mock(sums=short, domain=0, nic=0)
    channel, asked = mock.Mock(control_bytes=512), []
    channel.ask = lambda _link, make, told, _lost: asked.append((make(9), told))
    large = {path: None}
    group = mock.Mock(acks=mock.Mock(large=large), domains=[mock.Mock(address=b"x" * 256)])
    pruning = Pruning(group, channel, lambda: 0.0)
    found: dict[int, int] = {}
    for generation in range(1, 100):
        if not pruning.step():
            break
        assert not pruning.step(), "one list at a time"
        message, told = asked.pop()
        assert generation == message.generation
        assert message == decode(encode(message))
        assert len(encode(message)) <= 512
        found |= dict(expand(message.runs))
        told(Answer(9, "", (), 0))
    assert wanted == found
    assert ({}, {}) == (large, dict(short.sent.items()))


@pytest.mark.slow
@pytest.mark.parametrize("silent", [True, False])
def test_a_peer_that_does_not_prune_is_asked_less_and_less_often(*, silent: bool) -> None:
    """It was asked a hundred times a second for ever, over all paths to it.

    Found by searches of drawn runs, which had no end: a peer did not answer, or had fenced a path,
    and refused.
    """
    lost: list[Callable[[], None]] = []
    clock_s = 0.0
    short = PathSums()
    short.sent.add(7, 3)
    path = mock.Mock(sums=short, domain=0, nic=0)
    channel = mock.Mock(control_bytes=340)
    refusal = Answer(1, "this path is fenced off", (), 0)
    channel.ask = lambda _link, _make, told, gone: lost.append(
        partial(gone, "nobody is there") if silent else partial(told, refusal)
    )
    group = mock.Mock(acks=mock.Mock(large={path: None}), domains=[mock.Mock()])
    pruning = Pruning(group, channel, lambda: clock_s)
    asked_s = []
    while clock_s < 600:
        if pruning.step():
            asked_s.append(clock_s)
            lost.pop()()
        clock_s += 0.01
    assert 10 < len(asked_s) < 30
    assert asked_s[1] < 0.03, "what arrives soon is pruned soon"


@pytest.mark.parametrize("why", ["removed", "forgot", "closing"])
def test_a_peer_is_not_asked_for_what_is_of_no_use(why: str) -> None:
    """A path of a peer that is gone would be looked at in every step, for ever."""
    short = PathSums(forgot=why == "forgot")
    path = mock.Mock(sums=short, domain=0, nic=0)
    path.link.current = why != "removed"
    channel = mock.Mock(control_bytes=340, able=why != "closing")
    large = {path: None}
    group = mock.Mock(acks=mock.Mock(large=large), domains=[mock.Mock()])
    assert not Pruning(group, channel, lambda: 0.0).step()
    assert not channel.ask.called
    assert {} == large


def test_sums_of_two_generations_are_not_compared() -> None:
    """Sums pruned between two answers about one path would look like rows that did not land."""
    lanes = Lanes()
    with (
        mock.patch("tep.control.failover.values_max", return_value=100),
        mock.patch.object(Arrivals, "pruned", side_effect=count()),
        pytest.raises(AssertionError, match="b has pruned its sums meanwhile"),
    ):
        lanes.fail_over(PAGES)

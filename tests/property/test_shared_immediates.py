"""Shared immediates: senders, layers and rounds under one, cancels, deaths, late expectations.

What must hold on every fabric: a count that is complete has all bytes of all its transfers, and
every expectation ends. Once something has failed, neither end takes the immediate any more, and
the program goes on under a fresh one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import pytest
from _pytest.outcomes import Failed
from hypothesis import given, settings
from hypothesis import strategies as st

import tep
from tep.control.channel import Notices
from tep.core.imm import ImmTable
from tep.engine import machine, worker
from tests.support.effort import effort

PAGE = 64
BLANK = 0xEE
WAIT_S = 20.0


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        layers: pages of each layer, for each sender.
        rounds: how often all of it is sent, each time after the round before was complete.
        cancels: (round, sender, layer) of the transfers that are cancelled after their submit.
        dies: (round, sender): the sender that is named by the expectation ends in this round.
        after: whether the expectation of a round is stated only when its transfers have ended.
        whole: whether the cancels of a round follow all its submits, or each its own.
        seed: of the fabric.
    """

    layers: tuple[tuple[int, ...], ...]
    rounds: int
    cancels: frozenset[tuple[int, int, int]]
    dies: tuple[int, int] | None
    after: bool
    whole: bool
    seed: int

    @property
    def pages(self) -> int:
        return sum(map(sum, self.layers))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw any run; shrinks to one sender with one layer of one page, without failures."""
    layer = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
    layers = tuple(draw(st.lists(layer, min_size=1, max_size=3)))
    rounds = draw(st.integers(1, 3))
    every = [
        (r, s, k) for r in range(rounds) for s, mine in enumerate(layers) for k in range(len(mine))
    ]
    deaths = st.none() | st.tuples(st.integers(0, rounds - 1), st.integers(0, len(layers) - 1))
    return Case(
        layers,
        rounds,
        draw(st.frozensets(st.sampled_from(every), max_size=2)),
        draw(deaths),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 2**16)),
    )


class Play:
    """One run between a receiver and its senders."""

    def __init__(
        self,
        case: Case,
        senders: list[tep.TransferEngine],
        receiver: tep.TransferEngine,
        end: Callable[[int], object],
    ) -> None:
        self.case, self.receiver, self.end = case, receiver, end
        self.senders: dict[int, tep.TransferEngine] = dict(enumerate(senders))
        nbytes = case.pages * PAGE
        self.memory = np.full((case.pages, PAGE), BLANK, np.uint8)
        _, self.desc = receiver.reg_mr(self.memory)
        self.sources = [np.zeros((case.pages, PAGE), np.uint8) for _ in senders]
        self.mrs = [one.reg_mr(src)[0] for one, src in zip(senders, self.sources, strict=True)]
        assert nbytes == self.memory.nbytes
        for sender in senders:
            receiver.watch_peer(sender.main_address, every_s=0.02, lost_after_s=0.1)
        self.imms = itertools.count(7)

    def run(self) -> None:
        imm = next(self.imms)
        for number in range(self.case.rounds):
            if not self.round(number, imm):
                imm = next(self.imms)

    def round(self, number: int, imm: int) -> bool:
        """Send everything once; return whether the immediate may be used again."""
        case, places = self.case, iter(range(self.case.pages))
        mine = [
            (sender, layer, [next(places) for _ in range(n)])
            for sender, layers in enumerate(case.layers)
            for layer, n in enumerate(layers)
        ]
        present = [part for part in mine if part[0] in self.senders]
        wanted = sum(len(pages) for *_, pages in present)
        dies = case.dies if case.dies is not None and case.dies[0] == number else None
        named = None
        if dies is not None and dies[1] in self.senders:
            named = self.senders[dies[1]].main_address

        def expect() -> tep.Expectation:
            return self.receiver.expect_imm_count(imm, wanted, sender=named)

        value = 1 + number
        got = None if case.after else expect()
        sent, failed = self.submit(number, imm, present)
        if dies is not None and dies[1] in self.senders:
            self.end(dies[1])
            del self.senders[dies[1]]
        for sender, transfer in sent:
            if sender not in self.senders:
                continue
            try:
                transfer.wait(WAIT_S)
            except (tep.Cancelled, tep.FabricError, tep.BurntImm):
                failed.add(sender)
        if got is None:
            got = expect()
        error = None
        try:
            got.wait(WAIT_S)
        except tep.FabricError as found:
            error = found
        if error is not None:
            assert error.code in {"PEER_FAILED", "PEER_LOST"}, error
            assert failed or dies is not None, f"nothing had failed: {error}"
            self.refused(imm, failed)
            return False
        here = [page for *_, some in present for page in some]
        assert (self.memory[here] == value).all(), "the count was complete before its bytes"
        return not failed and dies is None

    def submit(
        self, number: int, imm: int, present: list[tuple[int, int, list[int]]]
    ) -> tuple[list[tuple[int, tep.Transfer]], set[int]]:
        """Send the layers, some of them cancelled; return transfers, and whose was refused."""
        case, sent, failed = self.case, [], set[int]()
        for sender, layer, pages in present:
            self.sources[sender][:] = 1 + number
            lists = tep.Pages(pages), tep.Pages(pages)
            try:
                transfer = self.senders[sender].submit_paged_writes(
                    PAGE, (self.mrs[sender], lists[0]), (self.desc, lists[1]), imm
                )
            except tep.BurntImm:  # a layer before this one was cancelled
                failed.add(sender)
                continue
            sent.append((sender, layer, transfer))
            if not case.whole and (number, sender, layer) in case.cancels:
                transfer.cancel()
        for sender, layer, transfer in sent:
            if case.whole and (number, sender, layer) in case.cancels:
                transfer.cancel()
        return [(sender, transfer) for sender, _, transfer in sent], failed

    def refused(self, imm: int, failed: set[int]) -> None:
        """Neither end takes the immediate any more."""
        with pytest.raises(tep.FabricError, match="is burnt"):
            self.receiver.expect_imm_count(imm, 1).wait(WAIT_S)
        for sender in failed & self.senders.keys():
            with pytest.raises(tep.BurntImm, match=f"imm {imm:#x} is burnt at"):
                self.senders[sender].submit_single_write(
                    8, (self.mrs[sender], 0), (self.desc, 0), imm
                )


def on_chaos(case: Case) -> None:
    """Play a case on the simulator's adversarial fabric."""
    names = [f"s{k}" for k in range(len(case.layers))]
    chaos = replace(tep.sim.Chaos.draw(case.seed), rnr_retries=-1)
    names.append("r")
    with tep.sim.Cluster(len(names), nics=2, names=names, chaos=chaos, seed=case.seed) as cluster:
        *senders, receiver = cluster.engines

        def end(number: int) -> None:
            for nic in range(2):
                cluster.kill_nic(number, nic)

        Play(case, senders, receiver, end).run()


@settings(max_examples=effort(300, 15))
@given(cases())
def test_complete_means_all_bytes_on_the_chaos_fabric(case: Case) -> None:
    """A reader that is let in early reads another round's page; one that is not told waits."""
    on_chaos(case)


@settings(max_examples=effort(60, 5), deadline=None)
@given(cases())
def test_complete_means_all_bytes_on_local(case: Case) -> None:
    """The same between real engines of one host, each turned by its own thread."""
    with ExitStack() as stack:
        opened = [
            stack.enter_context(tep.TransferEngine.open("local", name=f"{name}-{case.seed}"))
            for name in (*(f"s{k}" for k in range(len(case.layers))), "r")
        ]
        *senders, receiver = opened
        Play(case, senders, receiver, lambda number: senders[number].close()).run()


def forgets_to_refuse(patch: pytest.MonkeyPatch) -> None:
    """The sender takes requests under a burnt immediate."""
    for room in (machine, worker):
        patch.setattr(room, "refuse_burnt", lambda *_: None)


def forgets_what_it_was_told(patch: pytest.MonkeyPatch) -> None:
    """The receiver fails who waits, and lets later expectations in."""
    burn = ImmTable.burn

    def forgets(self: ImmTable, imm: int, *rest: object) -> object:
        found = burn(self, imm, *rest)
        self.burnt.remove(imm)
        return found

    patch.setattr(ImmTable, "burn", forgets)


def tells_nobody(patch: pytest.MonkeyPatch) -> None:
    """The sender's targets are not told."""
    patch.setattr(Notices, "_tell", lambda *_: None)


@pytest.mark.slow
@pytest.mark.parametrize("bug", [forgets_to_refuse, forgets_what_it_was_told, tells_nobody])
def test_a_planted_bug_is_found(bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that no mistake fails is none."""
    bug(monkeypatch)
    late = Case(((2, 3), (2,)), 2, frozenset({(0, 0, 0)}), None, True, False, 3)

    with pytest.raises((AssertionError, tep.TepError, Failed)):
        on_chaos(late)

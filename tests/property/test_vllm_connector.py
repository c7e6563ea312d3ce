"""The vLLM connector's halves on a hostile fabric, under a scheduler that keeps vLLM's contract.

Drawn runs are clean; with a planted bug, drawn runs show it. The runs are in
tests/support/vllm_trials.py.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tep.apps.kvcache import KvLoad
from tep.integrations.vllm import holds, scheduler, terms
from tep.integrations.vllm.holds import Holds
from tep.integrations.vllm.loads import Loads
from tep.integrations.vllm.scheduler import Scheduler
from tests.support.effort import fresh
from tests.support.planted import PlantedBugs, first_shown
from tests.support.vllm_trials import Case, run_case

SEEDS = 200
bug = PlantedBugs()


def play(seed: int) -> None:
    """One drawn run finds nothing."""
    assert [] == run_case(Case.draw(random.Random(seed))).violations


@pytest.mark.slow
@settings(max_examples=min(settings().max_examples, 30))
@given(st.randoms(use_true_random=False))
def test_answers_are_right_blocks_come_back_and_nobody_waits_in_vain(dice):
    """A stale block is a wrong answer with status 200; a lost one makes the instance smaller."""
    case = Case.draw(dice)

    assert [] == run_case(case).violations, case


@pytest.mark.slow
@pytest.mark.parametrize("tp", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_without_trouble_prompts_are_loaded_and_not_computed_twice(tp):
    """A connector that always computes again would pass every other test."""
    loaded = 0
    for seed in range(4):
        case = Case.draw(random.Random(f"{tp} {seed}"), trouble=False)
        case.tp = tp
        found = run_case(case)
        loaded += found.loaded

        assert [] == found.violations, case
    assert loaded > 0


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_hundreds_of_schedules(part):
    """A fault that is rare in a hundred runs is a wrong answer a day in a cluster."""
    for seed in fresh(600)[part::4]:
        case = Case.draw(random.Random(seed))
        assert [] == run_case(case).violations, (seed, case)


@bug
def blocks_are_freed_while_they_are_read(patch):
    patch.setattr(holds._Held, "still", True)


@bug
def a_prompt_is_taken_for_another(patch):
    for room in (scheduler, terms):
        patch.setattr(room, "digest_of", lambda _: "another")


@bug
def an_aborted_prefill_keeps_its_blocks(patch):
    patch.setattr(Holds, "end", lambda *_: None)


@bug
def what_nobody_asks_for_is_kept_for_ever(patch):
    def hold(self, order):
        method(self, order)
        if (held := self.held.get(order.key)) is not None:
            held.until_s = float("inf")

    method = Holds.hold
    patch.setattr(Holds, "hold", hold)


@bug
def the_decoder_does_not_learn_that_it_expired(patch):
    def answer(self, peer, want):
        told = method(self, peer, want)
        return told if told.state != "gone" else holds.Told(want.number, want.key, "kept")

    method = Holds.answer
    patch.setattr(Holds, "answer", answer)


@bug
def a_transfer_cannot_be_aborted(patch):
    patch.setattr(KvLoad, "cancel", lambda *_: None)


@bug
def blocks_in_doubt_are_used_again(patch):
    def reported(self, report, received):
        report.doubt.clear()
        method(self, report, received)

    method = Scheduler.reported
    patch.setattr(Scheduler, "reported", reported)
    patch.setattr(KvLoad, "finished", property(lambda self: self.state != "open"))


@bug
def blocks_in_doubt_never_come_back(patch):
    def reported(self, report, received):
        report.certain.clear()
        method(self, report, received)

    method = Scheduler.reported
    patch.setattr(Scheduler, "reported", reported)


@bug
def a_preempted_prefill_is_still_read(patch):
    patch.setattr(Holds, "stop", lambda *_: True)


@bug
def a_layer_is_sent_before_it_is_computed(patch):
    def step(self, order):
        method(self, order)
        for layer in self.sender.layers:
            self.layer_saved(order, layer)

    method = Holds.step
    patch.setattr(Holds, "step", step)


@bug
def a_failed_load_counts_as_whole(patch):
    def poll(self, report):
        method(self, report)
        report.bad.clear()
        report.failed.clear()

    method = Loads.poll
    patch.setattr(Loads, "poll", poll)


@bug
def a_failed_load_is_never_reported(patch):
    def poll(self, report):
        method(self, report)
        if report.bad or report.failed:
            report.received.clear()

    method = Loads.poll
    patch.setattr(Loads, "poll", poll)


@bug
def the_death_of_a_prefiller_is_not_noticed(patch):
    patch.setattr(Loads, "lost", lambda *_: None)


@bug
def nothing_is_asked_twice(patch):
    def say(self, ask):
        if ask.told_s < 0:
            method(self, ask)

    method = Loads._say
    patch.setattr(Loads, "_say", say)


@bug
def the_wrong_blocks_of_a_prompt_are_wanted(patch):
    def matched(self, request, ncomputed):
        found = method(self, request, ncomputed)
        self._matched[request.request_id] = 0
        return found

    method = Scheduler.matched
    patch.setattr(Scheduler, "matched", matched)


SLOW = {"a_transfer_cannot_be_aborted", "blocks_in_doubt_never_come_back"}
"""Bugs that show as a wait, whose run takes half a minute."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.long] * (one in SLOW)) for one in bug]
)
def test_planted_bug_is_found(name, monkeypatch):
    """A bug that no drawn run shows is one that could be in the product."""
    bug[name](monkeypatch)

    assert first_shown(name, play, range(SEEDS)) is not None

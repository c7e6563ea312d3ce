"""KvSender and KvReceiver on a hostile fabric: any two layouts, any two degrees, any ends.

Drawn runs are clean; with a planted bug, drawn runs show it. The runs are in
tests/support/kv_blocks.py.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tep.apps.kvcache.blocks import sender
from tep.apps.kvcache.blocks.receiver import ImmSpace, KvReceiver
from tep.apps.kvcache.blocks.sender import KvSender, _Claim
from tests.support.kv_blocks import Case, run_case
from tests.support.planted import PlantedBugs, first_shown

SEEDS = 150
bug = PlantedBugs()


def play(seed: int) -> None:
    """One drawn run finds nothing."""
    assert [] == run_case(Case.draw(random.Random(seed))).violations


@pytest.mark.slow
@settings(max_examples=settings().max_examples * 2 // 5)  # each takes long
@given(st.randoms(use_true_random=False))
def test_bytes_equal_the_reference_and_no_block_is_written_after_it_was_given_back(dice):
    """A wrong byte is a wrong answer of the model; a late one is another request's wrong answer."""
    case = Case.draw(dice)
    found = run_case(case)

    assert [] == found.violations, case


@pytest.mark.slow
@pytest.mark.parametrize("tp", [(1, 8), (8, 1), (4, 2), (2, 4), (8, 8)])
def test_without_trouble_every_request_is_complete(tp):
    """Unequal parallelism that loses a head, or brings one twice, never completes."""
    for seed in range(4):
        case = Case.draw(random.Random(f"{tp} {seed}"), trouble=False)
        case.tp = tp
        found = run_case(case)

        assert [] == found.violations, case
        assert case.requests == found.done


@pytest.mark.slow
@pytest.mark.parametrize("checksums", [True, False])
def test_a_bit_that_a_nic_turns_is_a_failed_load_with_checksums_alone(checksums):
    """Nothing else notices it: without them the model answers with garbage, and says nothing."""
    wrong, failed = [], 0
    for seed in range(40):
        case = Case.draw(random.Random(f"corrupt {seed}"))
        if case.checksums is checksums:
            case.corrupt = 16
            found = run_case(case)
            wrong += found.violations
            failed += found.failed

    assert checksums is not bool(wrong), wrong
    assert failed


@bug
def blocks_are_free_before_the_sender_has_ended(patch):
    def settle(self, load, grant):
        if load.state == "failed":
            grant.settled = True
        method(self, load, grant)

    method = KvReceiver._settle_grant
    patch.setattr(KvReceiver, "_settle_grant", settle)


@bug
def the_end_is_told_while_rows_are_under_way(patch):
    def settle(self, send):
        for claim in send._claims:
            if claim.why and not claim.ended:
                claim.ended = True
                self._tell(claim)
        method(self, send)

    method = KvSender._settle
    patch.setattr(KvSender, "_settle", settle)


@bug
def one_immediate_serves_all(patch):
    patch.setattr(ImmSpace, "take", lambda self: self._numbers.start)
    patch.setattr(ImmSpace, "end", lambda _self, _imm: None)
    patch.setattr(ImmSpace, "burn", lambda _self, _imm: None)


@bug
def heads_are_read_from_the_first(patch):
    served = sender.served_heads
    patch.setattr(sender, "served_heads", lambda *args: (0, *served(*args)[1:]))


@bug
def rows_are_as_long_as_the_source_is_contiguous(patch):
    def rows(src, dst, served):
        heads = served[2]
        if src.token_stride == src.tensor.run:
            length = src.tensor.run * src.tensor.tokens
            steps = np.arange(heads)
            return (
                length,
                (served[0] + steps) * src.head_stride,
                (served[1] + steps) * dst.head_stride,
            )
        return rows_of(src, dst, served)

    rows_of = sender.rows_of
    patch.setattr(sender, "rows_of", rows)


@bug
def unfinished_chunks_are_sent(patch):
    patch.setattr(KvSender, "_ready", staticmethod(lambda claim, group, *_: len(claim.dst[group])))


@bug
def the_last_block_of_a_chunk_counts_as_whole(patch):
    ready = KvSender._ready

    def round_up(claim, group, tokens, done):
        return ready(claim, group, tokens, done + tokens - 1)

    patch.setattr(KvSender, "_ready", staticmethod(round_up))


@bug
def the_target_gets_the_first_blocks(patch):
    def init(self, send, *args):
        method(self, send, *args)
        pairs = zip(send.blocks, self.dst, strict=True)
        self.src = [np.array(ids[: len(dst)], np.int64) for ids, dst in pairs]

    method = _Claim.__init__
    patch.setattr(_Claim, "__init__", init)


@bug
def the_first_sender_speaks_for_all(patch):
    def covered(self, load, message):
        found = method(self, load, message)
        load._uncovered.clear()
        load._uncovered.update(found[0])
        return found

    method = KvReceiver._covered
    patch.setattr(KvReceiver, "_covered", covered)


@bug
def all_failed_blocks_count_as_good(patch):
    patch.setattr(KvReceiver, "_failed_blocks", lambda _self, load: tuple(() for _ in load.blocks))


@bug
def sources_are_free_while_they_are_read(patch):
    def fail(self, send, reason):
        method(self, send, reason)
        if send.state == "failed":
            send._to("free")
            self._open.discard(send)

    method = KvSender._fail
    patch.setattr(KvSender, "_fail", fail)


@bug
def nothing_is_said_twice(patch):
    def once(method):
        def turn(self):
            for one in getattr(self, "_claims", {}).values():
                if one.told_s >= 0:
                    one.told_s = float("inf")
            for load in getattr(self, "_loads", {}).values():
                if load._told_s >= 0:
                    load._told_s = float("inf")
            return method(self)

        return turn

    for side in (KvSender, KvReceiver):
        patch.setattr(side, "turn", once(side.turn))


@bug
def a_cancel_is_not_heard(patch):
    patch.setattr(KvReceiver, "_cancel", lambda *_: None)
    patch.setattr(sender.KvSender, "_tell", lambda *_: None)


@bug
def failed_rows_count_as_written(patch):
    def written(self, claim, run, span, transfer):
        method(self, claim, run, span, transfer)
        if not transfer.ok:
            claim.missing[run.group][slice(*span)] -= len(run.rows)

    method = KvSender._written
    patch.setattr(KvSender, "_written", written)


@bug
def an_end_frees_the_immediate_at_once(patch):
    def end(self, imm):
        self.live.discard(imm)
        self._next = imm

    patch.setattr(ImmSpace, "burn", end)


@bug
def a_dead_sender_is_waited_for(patch):
    patch.setattr(KvReceiver, "fenced", lambda *_: None)


@pytest.mark.slow
@pytest.mark.parametrize("name", bug)
def test_planted_bug_is_found(name, monkeypatch):
    """A bug that no drawn run shows is one that could be in the product."""
    bug[name](monkeypatch)

    assert first_shown(name, play, range(SEEDS)) is not None

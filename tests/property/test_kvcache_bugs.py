"""Bugs planted in the system of scheduler, prefillers and decoders, each found by drawn scenarios.

Without one they are clean. A bug is a patch of one method; the product has no switch for it. Bugs
of the transfer itself are in test_kvcache_blocks.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from tep.apps.kvcache.blocks import KvLoad, KvReceiver, KvSend
from tep.apps.kvcache.blocks import sender as block_sender
from tep.apps.kvcache.blocks.receiver import ImmSpace
from tep.apps.kvcache.decoder import Decoder
from tep.apps.kvcache.prefiller import _Job
from tep.base.errors import StallError
from tests.support.kv_trial import Trial, run_trial
from tests.support.planted import PlantedBugs, first_shown

SEEDS = 120
bug = PlantedBugs()


def around(patch: pytest.MonkeyPatch, cls: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by wrapper(the method, self, *args)."""
    method = getattr(cls, name)
    patch.setattr(cls, name, lambda self, *args, **more: wrapper(method, self, *args, **more))


@bug
def failed_pages_are_used_again_at_once(patch: pytest.MonkeyPatch) -> None:
    def fail(method: Callable[..., None], side: Decoder, attempt: Any, reason: str) -> None:
        method(side, attempt, reason)
        if attempt.ended.result() and side._open.get(attempt.order.serial) is attempt:
            side._give_back(attempt)
            side._forget(attempt)

    around(patch, Decoder, "_fail", fail)


@bug
def pages_are_freed_while_they_are_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Job, "still", property(lambda _: True))


@bug
def next_layer_is_sent_instead(patch: pytest.MonkeyPatch) -> None:
    def done(method: Callable[..., None], send: KvSend, layer: int, *rest: Any) -> None:
        method(send, (layer + 1) % (max(send._sender.layers) + 1), *rest)

    around(patch, KvSend, "layer_done", done)


@bug
def chunks_are_sent_whole(patch: pytest.MonkeyPatch) -> None:
    def done(method: Callable[..., None], send: KvSend, layer: int, *_: Any) -> None:
        method(send, layer)

    around(patch, KvSend, "layer_done", done)


@bug
def the_tail_is_not_expected(patch: pytest.MonkeyPatch) -> None:
    def expect(method: Callable[..., KvLoad], side: KvReceiver, name: str, ids: Any) -> KvLoad:
        return method(side, name, [ids[0], []])

    around(patch, KvReceiver, "expect", expect)


@bug
def one_immediate_serves_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ImmSpace, "take", lambda self: self._numbers.start)
    patch.setattr(ImmSpace, "end", lambda _self, _imm: None)
    patch.setattr(ImmSpace, "burn", lambda _self, _imm: None)


@bug
def immediates_come_back_at_once(patch: pytest.MonkeyPatch) -> None:
    def end(self: ImmSpace, imm: int) -> None:  # as burn
        self.live.remove(imm)
        self._next = imm

    patch.setattr(ImmSpace, "burn", end)


@bug
def one_rank_speaks_for_all(patch: pytest.MonkeyPatch) -> None:
    def look(method: Callable[..., None], side: Decoder, attempt: Any) -> None:
        loads = attempt.loads
        if any(one.ok for one in loads) and not attempt.ended.done():
            attempt.loads = [one for one in loads if one.ok]
        method(side, attempt)
        attempt.loads = loads

    around(patch, Decoder, "_look", look)


@bug
def heads_are_read_from_the_first(patch: pytest.MonkeyPatch) -> None:
    served = block_sender.served_heads
    patch.setattr(block_sender, "served_heads", lambda *args: (0, *served(*args)[1:]))


@bug
def pages_of_failed_attempts_never_come_back(patch: pytest.MonkeyPatch) -> None:
    def look(method: Callable[..., None], side: Decoder, attempt: Any) -> None:
        if not (attempt.ended.done() and attempt.ended.result()):
            method(side, attempt)

    around(patch, Decoder, "_look", look)


@bug
def a_request_that_was_given_up_is_not_taken_back(patch: pytest.MonkeyPatch) -> None:
    def fail(method: Callable[..., None], side: Decoder, attempt: Any, reason: str) -> None:
        loads, attempt.loads = attempt.loads, []
        method(side, attempt, reason)
        attempt.loads = loads

    around(patch, Decoder, "_fail", fail)


FIXED: dict[str, dict[str, Any]] = {
    "a_request_that_was_given_up_is_not_taken_back": {"requests": 10, "cancels": 0.6},
}
"""Fields that are not drawn: some bugs need what drawn scenarios have too seldom."""


def violations_of(seed: int, setting: str = "") -> list[str]:
    """The findings of the oracle; an assertion of the product counts as well."""
    try:
        return run_trial(Trial.draw(seed, **FIXED.get(setting, {}))).violations
    except (AssertionError, StallError) as error:
        return [f"{type(error).__name__}: {error}"]


@pytest.mark.slow
@pytest.mark.parametrize("name", bug)
def test_planted_bugs_are_caught(name: str) -> None:
    """Scenarios that would not notice this bug would not notice its like either."""

    def play(seed: int) -> None:
        assert [] == violations_of(seed, name)

    with pytest.MonkeyPatch.context() as patch:
        bug[name](patch)
        caught = first_shown(name, play, range(SEEDS))

    assert caught is not None, f"{name} escaped {SEEDS} scenarios"
    assert [] == violations_of(caught, name), "the scenario finds fault with the system itself"


@pytest.mark.slow
def test_the_system_itself_is_clean() -> None:
    """An oracle that cries wolf hides what it is there to find."""
    found = {seed: violations_of(seed) for seed in range(12 if "TEP_LONG" in os.environ else 3)}

    assert {} == {seed: violations for seed, violations in found.items() if violations}

"""Planted bugs: mistakes that are easily made in an all-to-all, each found by few chaos runs.

They are patches made here; the product knows nothing of them. `test_correct_code_is_clean` runs the
same seeds without a bug: a suite that cries wolf would find anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from tep.apps.moe import payload as payload_room
from tep.apps.moe import proxy as proxy_room
from tep.apps.moe.alltoall import AllToAll
from tep.apps.moe.config import Format, Routes
from tep.apps.moe.group import NvlinkPort
from tep.apps.moe.payload import Payload, weighted_sum
from tep.apps.moe.proxy import DISPATCHED, Proxy
from tep.apps.moe.trial import Trial, run_trial
from tests.gate.registry import Change, changed
from tests.support.planted import first_shown

BUDGET = 60
BUGS: dict[str, tuple[Callable[[], list[Change]], dict[str, object]]] = {}


def bug(**shape: object):
    """Register a bug; `shape` says which layers show it, on top of what is drawn."""

    def register(plant: Callable[[], list[Change]]) -> Callable[[], list[Change]]:
        BUGS[plant.__name__] = plant, shape
        return plant

    return register


def trial(seed: int, shape: dict[str, object]) -> Trial:
    """A layer of many copies and little memory, so that places and counts are all in use."""
    drawn = {
        "world": 4,
        "private_tokens": seed % 4,
        "max_tokens": 8,
        "topk": 3,
        "num_experts": 8,
        "turns": 3,
        "routing": ("even", "skewed", "one_rank")[seed % 3],
        "expert_padding": 1 + seed % 2,
    }
    return Trial(seed=seed, **(drawn | shape))


# ---------------------------------------------------------------- counting


@bug()
def count_from_stale_routes() -> list[Change]:
    """The immediates of a turn are computed from the routes of the turn before."""
    count, last = Proxy.dispatch_imms, {}

    def stale(self, routes):
        before = last.get(self, routes)
        last[self] = routes
        return count(self, before)

    return [(Proxy, "dispatch_imms", stale)]


@bug()
def payload_count_one_short() -> list[Change]:
    """The receive kernel starts one write too early."""
    count = Proxy.dispatch_imms
    return [(Proxy, "dispatch_imms", lambda self, routes: max(0, count(self, routes) - 1))]


@bug()
def result_count_one_short() -> list[Change]:
    """The sum starts one write too early."""
    count = Proxy.combine_imms
    return [(Proxy, "combine_imms", lambda self, routes: max(0, count(self, routes) - 1))]


@bug(nics=2, hidden=4096)
def shards_not_counted() -> list[Change]:
    """A write by bytes over several NICs is taken for one immediate."""
    return [(proxy_room, "_imms", lambda nbytes, nics: int(nbytes > 0))]


@bug()
def routes_not_waited_for() -> list[Change]:
    """Places are computed from the routes that happen to be here."""
    expect = Proxy._expect

    def hasty(self, turn, kind, count):
        return expect(self, turn, kind, count if kind else max(0, count - 1))

    return [(Proxy, "_expect", hasty)]


# ---------------------------------------------------------------- places


@bug()
def private_overflow_by_one() -> list[Change]:
    """The first burst is one copy longer than the private area."""

    def longer(peers, layout, copies):
        there = area(peers, layout, 0)[1]
        return min(copies, peers.config.private_tokens + 1), there

    area = proxy_room.private_area
    return [(proxy_room, "private_area", longer)]


@bug()
def rest_lands_at_the_start() -> list[Change]:
    """Every source believes to be alone in the shared area."""
    init = Routes.__init__

    def alone(self, config, counts):
        init(self, config, counts)
        self.shared_at = np.zeros_like(self.shared_at)

    return [(Routes, "__init__", alone)]


@bug()
def reader_takes_private_for_shared() -> list[Change]:
    """The copy behind the private area's end is looked for inside it."""
    where = Payload.where

    def off_by_one(self, routes, arrivals):
        found = where(self, routes, arrivals)
        limit = self.config.sent_copies_max + self.config.world * self.config.private_tokens
        return np.where(found >= limit, found - 1, found)

    return [(Payload, "where", off_by_one)]


@bug()
def results_in_order_of_arrival() -> list[Change]:
    """Results go back in the order of the experts' rows, not of the copies."""
    stage = Payload.stage_results

    def by_row(self, routes, arrivals, results):
        stage(self, routes, arrivals._replace(row=np.sort(arrivals.row)[::-1]), results)

    return [(Payload, "stage_results", by_row)]


@bug(routing="holes")
def nobody_is_summed() -> list[Change]:
    """A choice that nobody answers takes whatever lies in the first slot."""

    def careless(results, place, weights, fmt, width):
        return weighted_sum(results, np.maximum(place, 0), weights, fmt, width)

    return [(payload_room, "weighted_sum", careless)]


# ---------------------------------------------------------------- order and reuse


@bug(topk=4, hidden=64, combine_format=Format.FP32)
def combine_order() -> list[Change]:
    """Results are summed in another order than the choices': f32 is not associative."""

    def backwards(results, place, weights, fmt, width):
        return weighted_sum(results, place[:, ::-1], weights[:, ::-1], fmt, width)

    return [(payload_room, "weighted_sum", backwards)]


# Ranks that have no tokens for each other are held together by the barriers alone.
LOOSE = {"world": 6, "topk": 1, "num_experts": 6, "max_tokens": 2, "turns": 8, "routing": "even"}


@bug(**LOOSE)
def barrier_missing() -> list[Change]:
    """Nobody says, or waits for, that buffers are free."""

    async def nothing(self, turn, kind):
        await asyncio.gather(*())

    return [(Proxy, "_barrier", nothing)]


@bug(**LOOSE)
def buffer_reuse_one_step_early() -> list[Change]:
    """The next turn begins while the barrier of this one is under way."""

    async def at_once(self, what):
        return False

    return [(AllToAll, "_await_free", at_once)]


@bug(**LOOSE)
def barrier_before_reading() -> list[Change]:
    """Others are told that buffers are free before the receive kernel has read them."""
    dispatch, early = Proxy.dispatch, {}

    async def with_barrier(self, turn):
        task = early[self] = asyncio.ensure_future(self._barrier(turn, DISPATCHED))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # taken note of
        await dispatch(self, turn)

    async def nothing_more(self, turn):
        await early[self]

    return [(Proxy, "dispatch", with_barrier), (Proxy, "dispatched", nothing_more)]


@bug(node_size=2)
def flag_before_push() -> list[Change]:
    """Peers of the node are told of tokens that are still on their way."""
    push = AllToAll._push

    async def early(self, moves, peers, flag):
        if self._link is not None and peers:
            self._link.signal(peers, flag)
            await self._link.move(moves, pushes=True)
            return 0.0
        return await push(self, moves, peers, flag)

    return [(AllToAll, "_push", early)]


@bug(node_size=4, private_tokens=0)
def pull_without_flag() -> list[Change]:
    """The rest is loaded from a peer's buffer before it is there."""

    def expect(self, flag, count):
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    return [(NvlinkPort, "expect", expect)]


@bug()
def tokens_staged_after_the_word() -> list[Change]:
    """The proxy is told before the copies are in the send buffer."""
    spawn = AllToAll._spawn

    def eager(self, work, turn=None):
        if turn is not None:
            self._proxy.staged.store(turn.number)
        return spawn(self, work, turn)

    stage = Payload.stage

    def late(self, turn, batch, given, w):
        asyncio.get_running_loop().call_later(2e-6, stage, self, turn, batch, given, w)

    return [(AllToAll, "_spawn", eager), (Payload, "stage", late)]


# ---------------------------------------------------------------- the search


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name) -> None:
    """A suite that this mistake slips through would let it into the product as well."""
    plant, shape = BUGS[name]

    def play(seed: int) -> None:
        with changed(plant()):
            run_trial(trial(seed, shape))

    assert first_shown(name, play, range(BUDGET)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_correct_code_is_clean(name) -> None:
    """The same layers without the bug: else it is not the bug that was found."""
    for seed in range(2):
        run_trial(trial(seed, BUGS[name][1]))

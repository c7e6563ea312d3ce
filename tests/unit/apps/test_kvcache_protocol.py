"""One decoder and its prefillers: orders, count, cancel, silence, fences."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tep
import tep.sim
from tep.apps.kvcache.blocks import Patience
from tep.apps.kvcache.decoder import Decoder
from tep.apps.kvcache.instance import Beat
from tep.apps.kvcache.layout import KvBuffer, KvLayout
from tep.apps.kvcache.memory import SideOptions, no_memory
from tep.apps.kvcache.model import Completion, PrefillWork, Request
from tep.apps.kvcache.prefiller import Prefiller
from tep.apps.kvcache.scheduler import Scheduler
from tep.apps.kvcache.simulate import World
from tests.support.kv_check import LAYOUT, CheckedModel, PaintedWorld

PATIENCE = Patience(beat_s=1e-4, silent_s=2e-3, cancel_s=1e-3, request_s=0.1, linger_s=0.01)
SIDE = SideOptions(npages=16, tail_slots=4, tail_bytes=32, patience=PATIENCE)
IDS = np.arange(10, dtype=np.int32)


class Held(CheckedModel):
    """A model that stops after some layers until it is let go."""

    def __init__(self, layers: int) -> None:
        super().__init__(lambda _: 1e-6)
        self.layers, self.go, self.reached = layers, asyncio.Event(), asyncio.Event()

    async def prefill(self, work: PrefillWork) -> bytes:
        advance = work.advance

        def count(done: int) -> None:
            advance(done)
            if done == self.layers:
                self.reached.set()

        work.advance = count
        prefill = asyncio.create_task(super().prefill(work))
        try:
            await self.reached.wait()
            if not self.go.is_set():
                prefill.cancel()
                await self.go.wait()
            return await prefill
        finally:
            prefill.cancel()


def world(model: CheckedModel, **more: Any) -> World:
    env = tep.sim.FabricEnv()
    fabric = tep.sim.ChaosFabric(env, tep.sim.Chaos(seed=3, poll_delay_ps=20_000))
    kind, side = more.pop("kind", PaintedWorld), more.pop("side", SIDE)
    return kind(fabric, model, side, **more)


def run(model: CheckedModel, main: Any, **more: Any) -> Any:
    async def whole(one: World) -> Any:
        return await main(one)

    with world(model, **more) as one:
        coroutine: Coroutine[Any, Any, Any] = whole(one)
        found = one.run(coroutine)
        for member in one.everybody if isinstance(one, PaintedWorld) else ():
            one.paint(member).look(np.flatnonzero(~member.side.pool._held))
            assert [] == one.paint(member).violations + one.violations
        assert [] == model.violations
        return found


def couple(one: World) -> tuple[Prefiller, Decoder]:
    return one.add_prefiller("p", 1), one.add_decoder("d", 1)


def ask(decoder: Decoder, prefiller: Prefiller, name: str = "r") -> Coroutine[Any, Any, Completion]:
    """Have a request of three pages computed by this prefiller."""
    return decoder.generate(Request(name, 10, IDS), prefiller.card)


async def caught(one: World, model: Held) -> tuple[Prefiller, Decoder, asyncio.Task[Completion]]:
    """A request that stands still where its model does."""
    one.model = model
    prefiller, decoder = couple(one)
    task = asyncio.create_task(ask(decoder, prefiller))
    await model.reached.wait()
    return prefiller, decoder, task


def test_the_count_is_pages_times_layers_and_one() -> None:
    """No message says that a transfer is over: one immediate more or less hangs or starts early."""

    async def main(one: World) -> int:
        prefiller, decoder = couple(one)
        done = await ask(decoder, prefiller)
        assert done.ok
        assert (3,) == done.tokens  # three pages had the right bytes
        await prefiller.leave()
        return prefiller.senders[0].rows

    assert 3 * 3 * 2 + 1 == run(CheckedModel(lambda _: 1e-6), main)


class Tensor:
    """A tensor of torch as registration sees it: float32, and DLPack alone."""

    def __init__(self, nbytes: int) -> None:
        self.data = np.zeros(nbytes // 4, np.float32)

    def __dlpack__(self, *, stream: object = None) -> object:
        return self.data.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.data.__dlpack_device__()


def test_tensors_of_other_libraries_are_caches_as_well() -> None:
    """An inference engine has its cache in tensors of its own; it will not copy it to numpy's."""
    side = replace(SIDE, allocate=lambda _rank, _name, nbytes: Tensor(nbytes))

    async def main(one: World) -> None:
        prefiller, decoder = couple(one)
        done = await ask(decoder, prefiller)
        assert (3,) == done.tokens
        assert decoder.memory.pages(0, 0).any()

    run(CheckedModel(lambda _: 1e-6), main, side=side)


def test_memory_that_is_none_is_not_looked_at() -> None:
    """A view of a made-up address ends the process."""

    async def main(one: World) -> None:
        decoder = one.add_decoder("d", 1)
        with pytest.raises(tep.UsageError, match="cannot be looked at as a numpy array"):
            decoder.memory.tail(0)

    side = replace(SIDE, allocate=no_memory)
    run(CheckedModel(), main, side=side, kind=World)


def test_mismatched_layouts_are_refused_with_both_shown() -> None:
    """Two releases with different pages would exchange noise behind a 200 OK."""

    async def main(one: World) -> str:
        prefiller = one.add_prefiller("p", 1)
        one.model = CheckedModel(layout=KvLayout("m", 8, LAYOUT.buffers))
        decoder = one.add_decoder("d", 1)
        done = await one.scheduler.submit(Request("r", 10, IDS))
        assert not done.ok
        assert 6 == done.attempts
        assert 0 == prefiller.njobs
        assert 16 == decoder.pool.nfree
        return done.reason

    reason = run(CheckedModel(), main)

    assert "d.0 has another KV cache" in reason
    assert "tokens=4" in reason
    assert "tokens=8" in reason


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (
            KvLayout("n", 4, LAYOUT.buffers),
            "lacks ['tail of m bfloat16'], and has ['tail of n bfloat16']",
        ),
        (
            KvLayout("m", 4, (*LAYOUT.buffers, KvBuffer("x", 1, 1, 8))),
            "and has ['x.0'] besides",
        ),
    ],
)
def test_a_cache_of_another_model_is_refused(layout: KvLayout, why: str) -> None:
    """Pages of equal size of another model are noise, and a tensor more would never come."""

    async def main(one: World) -> str:
        one.add_prefiller("p", 1)
        one.model = CheckedModel(layout=layout)
        one.add_decoder("d", 1)
        return (await one.scheduler.submit(Request("r", 10, IDS))).reason

    assert why in run(CheckedModel(), main)


def test_cancelled_pages_are_used_again_only_after_the_prefiller_confirms() -> None:
    """A write that lands after the reuse corrupts a request that has nothing to do with it."""

    async def main(one: World) -> None:
        model = Held(2)
        prefiller, decoder, task = await caught(one, model)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert 13 == decoder.pool.nfree
        await decoder.settled()
        assert 16 == decoder.pool.nfree
        assert 0 == len(decoder.receivers[0].imms.live)
        await prefiller.leave()
        assert 16 == prefiller.pool.nfree

    run(CheckedModel(), main)


def test_a_silent_prefiller_costs_its_request_an_attempt_and_its_pages_come_back() -> None:
    """A prefiller whose loop hangs is asked to stop by its engine, which answers all the same."""

    async def main(one: World) -> None:
        model = Held(1)
        one.model = model
        prefiller, decoder = couple(one)
        one.model = CheckedModel(lambda _: 1e-6)
        one.add_prefiller("q", 1)
        task = asyncio.create_task(one.scheduler.submit(Request("r", 10, IDS)))
        await model.reached.wait()
        prefiller._closed = True  # deaf from here on
        done = await task
        assert done.ok
        assert ("q", 2) == (done.prefiller, done.attempts)
        await decoder.settled()
        assert 16 == decoder.pool.nfree
        assert 1 == len(decoder.receivers[0].imms.burnt)
        prefiller._closed = False

    run(CheckedModel(lambda _: 1e-6), main)


def test_pages_of_a_dead_prefiller_are_used_again_once_it_is_fenced() -> None:
    """Silence is no proof of death: pages may be written until somebody is certain."""
    patience = replace(PATIENCE, linger_s=1e3)  # the engine is never asked to fence it off

    async def main(one: World) -> None:
        model = Held(1)
        prefiller, decoder, task = await caught(one, model)
        one.crash("p")
        assert not (await task).ok
        await asyncio.sleep(0.05)
        assert 13 == decoder.pool.nfree
        decoder.fenced("p", prefiller.card.epoch)
        await decoder.settled()
        assert 16 == decoder.pool.nfree

    run(CheckedModel(), main, side=replace(SIDE, patience=patience), fence_s=1e3)


def test_a_fence_counts_for_attempts_that_come_after_it() -> None:
    """A lease can be older than the fence: nobody would ever confirm the end of its attempt."""

    async def main(one: World) -> str:
        prefiller, decoder = couple(one)
        card = prefiller.card
        assert (await decoder.generate(Request("r", 10, IDS), card)).ok
        one.crash("p")
        decoder.fenced("p", prefiller.card.epoch)
        done = await decoder.generate(Request("s", 10, IDS), card)
        await decoder.settled()
        assert 16 == decoder.pool.nfree
        return done.reason

    assert "prefiller p is dead" in run(CheckedModel(lambda _: 1e-6), main)


def test_a_dead_decoder_frees_the_prefillers_pages() -> None:
    """A prefiller that keeps pages for decoders that are gone is full after a day."""

    async def main(one: World) -> None:
        model = Held(2)
        prefiller, _, task = await caught(one, model)
        assert 13 == prefiller.pool.nfree
        one.crash("d")
        done = await task
        assert "was closed" in done.reason
        await asyncio.sleep(20e-3)
        assert (16, 0) == (prefiller.pool.nfree, prefiller.njobs)

    run(CheckedModel(), main)


def test_a_restarted_decoder_orphans_what_it_had_asked_for() -> None:
    """The new incarnation has other memory behind the same name: nothing old may be sent there."""

    async def main(one: World) -> None:
        model = Held(2)
        prefiller, _, task = await caught(one, model)
        model.go.set()
        one.restart("d")
        await task
        again = one.members["d"].side
        assert isinstance(again, Decoder)
        done = await ask(again, prefiller, "s")
        assert done.ok
        await prefiller.leave()
        assert (16, 0) == (prefiller.pool.nfree, prefiller.njobs)

    run(CheckedModel(lambda _: 1e-6), main)


def test_a_leaving_prefiller_finishes_what_it_has_and_takes_no_more() -> None:
    """Scaling down must lose nothing, and nobody should have to wait for a time-out."""

    async def main(one: World) -> None:
        model = CheckedModel(lambda _: 50e-6)
        one.model = model
        prefiller, decoder = couple(one)
        card = prefiller.card
        first = asyncio.create_task(decoder.generate(Request("r", 10, IDS), card))
        await asyncio.sleep(100e-6)
        leaving = asyncio.create_task(prefiller.leave())
        await asyncio.sleep(0)
        second = await decoder.generate(Request("s", 10, IDS), card)
        assert "prefiller p is leaving" in second.reason
        assert (await first).ok
        await leaving
        await decoder.settled()
        assert 16 == decoder.pool.nfree

    run(CheckedModel(), main)


def test_a_model_that_raises_fails_its_request_and_nothing_else() -> None:
    """One prompt that breaks the model must not take its prefiller along."""

    class Broken(CheckedModel):
        async def prefill(self, work: PrefillWork) -> bytes:
            if work.request.name == "bad":
                raise ValueError("no such token")
            return await super().prefill(work)

    async def main(one: World) -> None:
        prefiller, decoder = couple(one)
        card = prefiller.card
        bad = await decoder.generate(Request("bad", 10, IDS), card)
        good = await decoder.generate(Request("good", 10, IDS), card)
        await decoder.settled()
        await prefiller.leave()
        assert "ValueError: no such token" in bad.reason
        assert good.ok
        assert (16, 16) == (prefiller.pool.nfree, decoder.pool.nfree)

    run(Broken(lambda _: 1e-6), main)


def test_a_lost_order_is_sent_again() -> None:
    """A message that is lost costs a moment; an attempt costs the whole prompt."""

    async def main(one: World) -> tuple[int, int]:
        prefiller, decoder = couple(one)
        engine, lost = decoder.memory.engines[0], []
        send = engine.submit_send

        def lose(peer: Any, payload: bytes, **more: Any) -> Any:
            if b"Order" in payload and len(lost) < 2:
                lost.append(payload)
                raise tep.FabricError("lost")
            return send(peer, payload, **more)

        engine.submit_send = lose  # type: ignore[method-assign]  # a network that loses two
        done = await ask(decoder, prefiller)
        assert done.ok
        assert lost[0] == lost[1]
        return done.attempts, len(lost)

    assert (1, 2) == run(CheckedModel(lambda _: 1e-6), main)


def test_beats_do_not_pile_up_in_front_of_a_dead_peer() -> None:
    """An error can take half a second; a queue of beats would hold up what others wait for."""

    async def main(one: World) -> int:
        decoder = one.add_decoder("d", 1)
        waiting: list[Any] = []
        engine = decoder.memory.engines[0]
        silence = lambda *args, **more: waiting.append(args)  # noqa: E731  # takes any arguments
        engine.submit_send = silence  # type: ignore[method-assign]  # nobody answers
        for _ in range(9):
            decoder._send(decoder.addr, Beat(), 0)
        return len(waiting)

    assert 3 == run(CheckedModel(), main)


def test_a_scheduler_without_members_says_so() -> None:
    """A request that waits for a cluster which never comes must end with that reason."""

    async def main() -> str:
        scheduler = Scheduler(wait_s=2.0)
        with pytest.raises(tep.WaitTimeout, match="no prefiller has joined within 2.0 s"):
            await scheduler._pick("prefiller", scheduler._prefillers, ())
        return (await scheduler.submit(Request("r", 1))).reason

    assert "no decoder has joined within 2.0 s" in tep.sim.run(main())


def test_a_refusal_that_is_lost_is_said_again() -> None:
    """A decoder that has not heard of it would wait for as long as a request may take."""

    class Broken(CheckedModel):
        async def prefill(self, work: PrefillWork) -> bytes:
            raise ValueError("no such token")

    async def main(one: World) -> str:
        prefiller, decoder = couple(one)
        engine, lost = prefiller.memory.engines[0], []
        send = engine.submit_send

        def lose(peer: Any, payload: bytes, **more: Any) -> Any:
            if b"too many" in payload and not lost:
                lost.append(payload)
                raise tep.FabricError("lost")
            return send(peer, payload, **more)

        async def fail(*_: Any) -> Any:
            raise tep.UsageError("too many")

        engine.submit_send = lose  # type: ignore[method-assign]  # a network that loses it
        prefiller.pool.acquire = fail  # type: ignore[method-assign]  # before anything is begun
        done = await ask(decoder, prefiller)
        assert lost
        await decoder.settled()
        return done.reason

    assert "too many" in run(Broken(), main)

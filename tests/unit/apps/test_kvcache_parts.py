"""The parts of the KV cache that need no peer: pages, immediates, messages, chunks."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tep.sim
from tep import BadDescriptor, BusyError, ClosedError, UsageError
from tep.apps.kvcache.blocks import Patience
from tep.apps.kvcache.blocks.receiver import ImmSpace
from tep.apps.kvcache.decoder import Decoder
from tep.apps.kvcache.instance import Answer, Beat, Order, decode, encode
from tep.apps.kvcache.layout import KvBuffer, KvLayout
from tep.apps.kvcache.memory import PagePool
from tep.apps.kvcache.model import cut_chunks

LAYOUT = KvLayout("m", 4, (KvBuffer("kv", 1, 1, 8),))


# ---------------------------------------------------------------------- pages


def test_pages_are_handed_out_in_the_order_of_asking() -> None:
    """A large request that small ones may overtake starves."""

    async def main() -> list[str]:
        pool, order = PagePool(4), []
        held = await pool.acquire(4)

        async def want(name: str, n: int) -> None:
            pages = await pool.acquire(n)
            order.append(name)
            pool.free(pages)

        tasks = [asyncio.create_task(want("large", 4)), asyncio.create_task(want("small", 1))]
        await asyncio.sleep(0)
        pool.free(held[:1])  # enough for the small one only
        await asyncio.sleep(0)
        assert [] == order
        pool.free(held[1:])
        await asyncio.gather(*tasks)
        assert 4 == pool.nfree
        return order

    assert ["large", "small"] == tep.sim.run(main())


def test_who_gives_up_waiting_takes_nothing() -> None:
    """Pages handed to a request that was cancelled at that moment would be lost for good."""

    async def main() -> None:
        pool = PagePool(2)
        held = await pool.acquire(2)
        waits = [asyncio.create_task(pool.acquire(2)) for _ in range(2)]
        await asyncio.sleep(0)
        pool.free(held)  # the first has its pages now, and is cancelled before it sees them
        waits[0].cancel()
        pages = await waits[1]
        assert 2 == len(pages)
        pool.free(pages)
        assert 2 == pool.nfree

    tep.sim.run(main())


def test_a_page_freed_twice_is_a_bug() -> None:
    """The second free gives a page to two requests."""

    async def main() -> None:
        pool = PagePool(2)
        pages = await pool.acquire(1)
        pool.free(pages)
        with pytest.raises(AssertionError, match="freed twice"):
            pool.free(pages)

    tep.sim.run(main())


def test_a_closed_pool_tells_those_who_wait() -> None:
    """A request that waits for pages of a dead instance would wait for ever."""

    async def main() -> None:
        pool = PagePool(1)
        await pool.acquire(1)
        waits = asyncio.create_task(pool.acquire(1))
        await asyncio.sleep(0)
        pool.close()
        with pytest.raises(ClosedError):
            await waits
        with pytest.raises(ClosedError):
            await pool.acquire(1)

    tep.sim.run(main())


def test_more_pages_than_there_are_is_refused() -> None:
    """It could never be served, and would block all behind it."""

    async def main() -> None:
        with pytest.raises(UsageError, match="9 pages wanted of a pool of 4"):
            await PagePool(4).acquire(9)

    tep.sim.run(main())


@given(st.lists(st.integers(1, 5), max_size=20), st.integers(0, 2**32))
def test_no_page_is_held_twice(sizes: list[int], seed: int) -> None:
    """Two requests on one page read each other's cache."""

    async def main() -> None:
        dice, pool = np.random.default_rng(seed), PagePool(12)
        held: list[np.ndarray] = []
        for n in sizes:
            if pool.nfree < n:
                pool.free(held.pop(int(dice.integers(len(held)))))
            else:
                held.append(await pool.acquire(n))
            together = np.concatenate([*held, np.zeros(0, np.int64)])
            assert len(together) == len(set(together.tolist()))
            assert pool.npages == pool.nfree + len(together)

    tep.sim.run(main())


def test_chunks_end_with_pages() -> None:
    """A page sent before it is full is sent wrong, and only once."""
    chunks = cut_chunks(21, 8, 4)

    assert [(0, 8), (8, 16), (16, 21)] == [(c.start, c.stop) for c in chunks]
    with pytest.raises(UsageError, match="chunk_tokens=6 is no multiple of page_tokens=4"):
        cut_chunks(21, 6, 4)


# ---------------------------------------------------------------------- immediates


def test_live_immediates_are_all_different() -> None:
    """Two requests with one immediate complete each other."""
    space = ImmSpace(range(10, 14))
    taken = [space.take() for _ in range(4)]

    assert {10, 11, 12, 13} == set(taken)
    with pytest.raises(BusyError, match="all 4 immediates are in use: 4 live"):
        space.take()
    space.end(12)
    assert 12 == space.take()


def test_an_immediate_of_a_request_that_ended_early_is_never_used_again() -> None:
    """Its rows may still be counted; and neither engine takes it any more."""
    space = ImmSpace(range(2))
    space.burn(space.take())

    assert [1] == [space.take()]
    with pytest.raises(BusyError, match="1 burnt"):
        space.take()


# ---------------------------------------------------------------------- messages


def test_messages_survive_their_bytes() -> None:
    """A field that is lost on the way is a page that is lost on the way."""
    for message in (
        Order(2**63 - 1, (b"one", b"two"), "r", (b"t", b""), 17, b"\1\0\0\0"),
        Answer(3, "why"),
        Beat((1, 2**40)),
        Beat(),
    ):
        assert message == decode(encode(message))


@given(st.binary(max_size=80))
def test_garbage_is_no_message(data: bytes) -> None:
    """A stranger's message must not become an order, nor stop the receiver."""
    found = None
    with contextlib.suppress(BadDescriptor):
        found = decode(data)

    if found is not None:
        assert found == decode(encode(found))


def test_times_that_contradict_each_other_are_refused() -> None:
    """A peer that is silent between two beats would be given up at every beat."""
    with pytest.raises(UsageError, match="silent_s is longer than beat_s"):
        Patience(beat_s=1.0, silent_s=0.5)


@pytest.mark.parametrize("error", [asyncio.CancelledError, tep.FabricError])
def test_a_decoder_is_drained_once_its_requests_have_ended(error: type[BaseException]) -> None:
    """A node that is to be taken out of service would be waited for, for ever."""

    async def attempt(*_: object) -> None:
        await asyncio.sleep(0)
        raise error("it fails")

    async def main() -> None:
        decoder = SimpleNamespace(_busy=0, _open={}, _changed=asyncio.Event())
        decoder._loop, decoder._attempt = asyncio.get_running_loop(), attempt
        decoder._until = lambda condition: Decoder._until(decoder, condition)
        wanted = SimpleNamespace(name="r")
        request = asyncio.ensure_future(Decoder.generate(decoder, wanted, None))
        drained = asyncio.ensure_future(Decoder.drained(decoder))
        await asyncio.wait({request})
        await asyncio.wait_for(drained, 20.0)
        assert request.cancelled() == (error is asyncio.CancelledError)

    asyncio.run(main())

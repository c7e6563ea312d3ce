"""Prefillers and decoders as real processes: a real transformer's tokens, and a process killed."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tep.apps.kvcache.launch import Cluster, Shape
from tep.apps.kvcache.model import Completion
from tep.apps.kvcache.transformer import PlainCache, TinyConfig, TinyTransformer
from tests.support.here import require


def options(backend: str) -> dict[str, Any]:
    """How to open a backend; skips where there is no libfabric."""
    if backend != "libfabric":
        return {}
    require("tcp")
    return {"provider": "tcp"}


def prompts(lengths: list[int]) -> list[np.ndarray]:
    dice = np.random.default_rng(7)
    return [dice.integers(0, 256, n).astype(np.int32) for n in lengths]


def check(asked: list[np.ndarray], done: list[Completion]) -> None:
    model = TinyTransformer(TinyConfig())
    for ids, one in zip(asked, done, strict=True):
        assert one.ok, one.reason
        assert model.alone(ids, 10) == list(one.tokens or ())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "degrees"),
    [("libfabric", (2, 4)), pytest.param("local", (1, 1), marks=pytest.mark.long)],
    ids=["tcp, TP2 to TP4", "local, TP1 to TP1"],
)
def test_tokens_are_those_of_one_place(backend: str, degrees: tuple[int, int]) -> None:
    """2 prefillers and 2 decoders must say, token by token, what one process says alone."""
    asked = prompts([1, 7, 8, 9, 16, 40, 61, 100])

    async def main() -> tuple[list[Completion], list[str]]:
        shape = Shape(
            backend=backend,
            options=options(backend),
            prefill_tp=degrees[0],
            decode_tp=degrees[1],
        )
        async with Cluster(shape) as cluster:
            found = await cluster.generate(asked, 10)
            return found, cluster.scheduler.prefillers

    done, names = asyncio.run(main())

    check(asked, done)
    assert {"p0", "p1"} == set(names)
    assert [1, 1, 1, 2, 2, 5, 8, 13] == [one.pages_sent for one in done]


@pytest.mark.slow
def test_a_killed_prefiller_costs_no_request() -> None:
    """SIGKILL is what the kernel sends to a prefiller that is out of memory."""
    asked = prompts([100 + 11 * k for k in range(10)])

    async def main() -> list[Completion]:
        shape = Shape(options=options("libfabric"), npages=512, silent_s=2.0)
        async with Cluster(shape) as cluster:
            busy, lease = asyncio.Event(), cluster.scheduler.lease

            async def note(*args: Any) -> Any:
                found = await lease(*args)
                if found.card.name == "p0":
                    busy.set()
                return found

            cluster.scheduler.lease = note  # type: ignore[method-assign]  # to see when p0 has work
            work = asyncio.create_task(cluster.generate(asked, 10))
            await busy.wait()
            cluster.kill("p0")
            return await work

    check(asked, asyncio.run(main()))


def test_what_is_generated_depends_on_the_whole_cache() -> None:
    """If a wrong page changed no token, equal tokens would prove nothing."""
    model = TinyTransformer(TinyConfig())
    (ids,) = prompts([64])
    right = model.alone(ids, 16)
    changed = 0
    for page in range(8):
        cache = PlainCache(model.config, 80)
        logits = np.zeros(0, np.float32)
        for start in range(0, 64, 16):
            logits = model.forward(ids[start : start + 16], start, cache)
        cache._kv[:, :, 8 * page : 8 * page + 8] = cache._kv[:, :, ::-1][:, :, :8]
        changed += model.generate(logits, 64, 16, cache) != right

    assert changed >= 6

"""Prefillers and decoders as real processes: a real transformer's tokens, and a process killed."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from typing import Any

import numpy as np
import pytest

import tep
from tep.apps.kvcache.cluster import Cluster, RankedCluster, Shape, work_as_rank
from tep.apps.kvcache.model import Completion
from tep.apps.kvcache.transformer import PlainCache, TinyConfig, TinyTransformer
from tep.base.errors import UsageError
from tep.rendezvous import Place
from tep.rendezvous.calls import Caller, Hello, connect
from tep.rendezvous.launch import launch
from tep.rendezvous.proof import enter
from tests.support.here import require

TOKEN = "t"  # noqa: S105  # no secret


def options(backend: str) -> dict[str, Any]:
    """Return the options that open a backend; skip without libfabric."""
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


class Mortal(Cluster):
    """A cluster whose processes die."""

    async def kill(self, name: str) -> None:
        await self._processes.kill(self._ranks[name])


@pytest.mark.slow
def test_a_killed_prefiller_costs_no_request() -> None:
    """SIGKILL is what the kernel sends to a prefiller that is out of memory."""
    asked = prompts([100 + 11 * k for k in range(10)])

    async def main() -> list[Completion]:
        shape = Shape(options=options("libfabric"), npages=512, silent_s=2.0)
        async with Mortal(shape) as cluster:
            busy, lease = asyncio.Event(), cluster.scheduler.lease

            async def note(*args: Any) -> Any:
                found = await lease(*args)
                if found.card.name == "p0":
                    busy.set()
                return found

            cluster.scheduler.lease = note  # type: ignore[method-assign]  # to see when p0 has work
            work = asyncio.create_task(cluster.generate(asked, 10))
            await busy.wait()
            await cluster.kill("p0")
            return await work

    check(asked, asyncio.run(main()))


@pytest.mark.slow
def test_ranks_that_others_have_started() -> None:
    """Under torchrun, srun and Ray nobody starts the members: they must find their launcher."""
    require("tcp")
    program = [sys.executable, "-c", "import sys; from tep.cli import main; sys.exit(main())"]
    options = ["--fabric", "tcp", "-p", "1", "-d", "1", "--prompts", "4", "--json"]
    out = io.StringIO()

    launch("local", ["127.0.0.1"] * 3, [*program, "kvcache", *options], timeout_s=120, out=out)

    assert [True] * 4 == [row["same tokens"] for row in json.loads(out.getvalue())["rows"]]


def test_a_wrong_number_of_ranks_is_refused() -> None:
    """A rank too few would be waited for, a rank too many would wait."""
    shape = Shape(prefillers=1, decoders=1)
    with pytest.raises(UsageError, match="2 processes were started, and the cluster takes 3"):
        RankedCluster(shape, Place(rank=0, size=2, token=TOKEN))
    with pytest.raises(UsageError, match="not the launcher"):
        RankedCluster(shape, Place(rank=1, size=3, token=TOKEN))
    with pytest.raises(UsageError, match="4 processes were started"):
        work_as_rank(shape, Place(rank=1, size=4, token=TOKEN))
    with pytest.raises(UsageError, match="rank 0 is the launcher"):
        work_as_rank(shape, Place(rank=0, size=3, token=TOKEN))


class Witness:
    """A decoder that notes what it is told."""

    name = "d0"

    def __init__(self) -> None:
        self.fences: list[tuple[str, int]] = []

    async def generate(self, *_: object) -> Completion:
        raise NotImplementedError

    def fenced(self, prefiller: str, epoch: int) -> None:
        self.fences.append((prefiller, epoch))


class Member:
    """A member that starts at once."""

    def __init__(self, addr: bytes) -> None:
        self.addr = addr

    async def start(self) -> tuple[bytes, ...]:
        return (self.addr,)


@pytest.mark.parametrize("proven", [True, False], ids=["hung up", "timed out"])
def test_strangers_stay_out_and_only_a_proven_end_is_fenced(proven: bool) -> None:
    """A stranger admitted without the secret would take a rank's place; the pages of a process
    that is fenced while it still writes would be given to others.
    """

    async def main(addr: bytes, epoch: int) -> None:
        listens: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        class Watched(RankedCluster):
            async def _start(self) -> None:
                listens.set_result(self.port)

        place = Place(rank=0, size=2, token=TOKEN)
        cluster = Watched(Shape(prefillers=1, decoders=0), place)
        entering = asyncio.create_task(cluster.__aenter__())
        host, port = place.host, await listens

        async def come() -> Caller:
            return await connect(Member(addr), host, port, TOKEN, Hello("prefiller", "p0"))

        async with asyncio.timeout(60):
            for token, who in (
                ("wrong", ("worker", "prefiller", "p0")),
                (TOKEN, ("worker", "prefiller", "p9")),
                (TOKEN, ("worker", "decoder", "p0")),
                (TOKEN, ()),
            ):
                with pytest.raises(UsageError):
                    await enter(host, port, token, who, 60.0)
            silent = [await asyncio.open_connection(host, port) for _ in range(65)]
            await silent[0][0].read()
            member = await come()
            await entering
            with pytest.raises(UsageError, match="is here already"):
                await come()
            assert ["p0"] == cluster.scheduler.prefillers

            witness, child = Witness(), cluster._children["p0"]
            cluster.scheduler.join_decoder(witness)
            if proven:
                await member.close()
            else:
                child.caller._peer._reader.set_exception(TimeoutError("no answer"))
            assert ("has ended" if proven else "was lost: no answer") in await child.over
            assert [] == cluster.scheduler.prefillers
            assert [("p0", epoch)] * proven == witness.fences
            await cluster.close()
            await member.close()
            for reader, _ in silent:
                await reader.read()
        for _, writer in silent:
            writer.transport.abort()

    with tep.TransferEngine.open("loopback") as engine:
        asyncio.run(main(engine.main_address.to_bytes(), engine.main_address.epoch))


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

"""Prefillers and decoders as real processes: a toy model's tokens, and a process killed."""

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
from tep.apps.kvcache.scheduler import PrefillerCard
from tep.apps.kvcache.toy import ToyModel
from tep.base.errors import UsageError
from tep.base.wire import NetAddr
from tep.rendezvous import Place
from tep.rendezvous.calls import Caller, Hello, connect
from tep.rendezvous.launch import launch
from tep.rendezvous.wire import enter
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
    model = ToyModel()
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
            busy, pick = asyncio.Event(), cluster.scheduler._pick

            async def note(*args: Any) -> Any:
                found = await pick(*args)
                if found.name == "p0":
                    busy.set()
                return found

            cluster.scheduler._pick = note  # type: ignore[method-assign]  # to see p0 get work
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

    def __init__(self, addr: NetAddr) -> None:
        self.addr = addr

    async def start(self) -> PrefillerCard:
        return PrefillerCard("p0", (self.addr,))


@pytest.mark.parametrize("proven", [True, False], ids=["hung up", "timed out"])
def test_strangers_stay_out_and_only_a_proven_end_is_fenced(proven: bool) -> None:
    """A stranger admitted without the secret would take a rank's place; the pages of a process
    that is fenced while it still writes would be given to others.
    """

    async def main(addr: NetAddr) -> None:
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
            assert [("p0", addr.epoch)] * proven == witness.fences
            await cluster.close()
            await member.close()
            for reader, _ in silent:
                await reader.read()
        for _, writer in silent:
            writer.transport.abort()

    with tep.TransferEngine.open("loopback") as engine:
        asyncio.run(main(engine.main_address))


def test_what_is_generated_depends_on_every_byte_of_the_cache() -> None:
    """If a wrong byte changed no token, equal tokens would prove nothing."""
    model, dice = ToyModel(), np.random.default_rng(3)
    (ids,) = prompts([64])
    right = model.alone(ids, 16)
    for _ in range(200):
        cache = model.plain_cache(80)
        *_, state = model.compute(ids, 0, cache)
        view = cache._views[0][1][..., :64, :]  # of the prompt
        at = tuple(dice.integers(view.shape))
        view[at] ^= 1 << dice.integers(32)
        assert model.generate(state, 64, 16, cache) != right, at


def test_what_is_generated_depends_on_the_order_of_the_pages() -> None:
    """Pages in each other's places are the mistake that a wrong list of blocks makes."""
    model = ToyModel()
    (ids,) = prompts([64])
    cache = model.plain_cache(80)
    *_, state = model.compute(ids, 0, cache)
    view = cache._views[0][1]
    view[..., :16, :] = np.roll(view[..., :16, :], 8, axis=-2)

    assert model.alone(ids, 16) != model.generate(state, 64, 16, cache)


def test_seeds_of_any_size_are_other_models() -> None:
    """A seed that is a date or a hash ended in an OverflowError, deep inside the first layer."""
    (ids,) = prompts([64])
    seeds = (0, 1, 1 << 16, 20261128)

    assert len(seeds) == len({tuple(ToyModel(seed=seed).alone(ids, 16)) for seed in seeds})

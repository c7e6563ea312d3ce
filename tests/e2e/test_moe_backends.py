"""One MoE layer over real threads and real backends in one process, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

import tep
from tep.apps.moe.config import Format
from tep.apps.moe.trial import Trial, Wrong, run_ranks, run_turn
from tests.support.here import need_stub

TRIAL = Trial(hidden=256, turns=3, nics=2, timeout_s=30.0, combine_format=Format.FP32)


def run_over(opened: list[tep.TransferEngine]) -> list[Wrong]:
    """All turns on engines in real time; what differed from the dense reference."""
    wrong: list[Wrong] = []

    async def work(alltoall) -> None:
        for turn in range(TRIAL.turns):
            found = await run_turn(TRIAL, alltoall, turn)
            if found is not None:
                wrong.append(found)

    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(engine) for engine in opened]
        asyncio.run(run_ranks(TRIAL, engines, work))
    return wrong


def test_over_loopback() -> None:
    """The plainest backend with threads: what only a simulated clock kept apart would meet here."""
    names = [f"moe{rank}" for rank in range(TRIAL.world)]

    assert [] == run_over([tep.TransferEngine.open("loopback", name=n, nics=2) for n in names])


@pytest.fixture(scope="module")
def stub():
    return need_stub()


def test_over_verbs(stub) -> None:
    """The verbs backend over a provider without NICs: queue pairs, receives for immediates."""
    stub.reset()
    options = {"library": stub.path, "handshake_s": 0.5, "timeout": 8}
    nics = [["stub0", "stub1"], ["stub2", "stub3"], ["stub4", "stub5"], ["stub6", "stub7"]]

    assert [] == run_over(
        [
            tep.TransferEngine.open("verbs", nics=names, name=f"moe{rank}", **options)
            for rank, names in enumerate(nics)
        ]
    )

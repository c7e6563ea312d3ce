"""Progress callbacks of long transfers."""

from __future__ import annotations

import asyncio
import inspect
import math
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import tep
import tep.core.progress
from tep.core.progress import Meter, Told
from tests.support.pairs import pair
from tests.support.script import memory, scripted


def test_a_long_transfer_tells_how_far_it_is() -> None:
    """A bar that jumps from nothing to the end tells no more than the end."""
    own = scripted()
    mr, desc = own.engine.reg_mr(memory(1 << 20))
    sent = own.engine.submit_paged_writes(
        1024, (mr, tep.Pages(range(8))), (desc, tep.Pages(range(8)))
    )
    seen: list[tep.Progress] = []

    def look(progress: tep.Progress) -> None:
        seen.append(progress)
        if len(seen) == 2:
            own.nics[0].finish()

    assert sent is sent.wait(30, on_progress=look, every_s=0.001)
    assert (0, 8192, 0.0) == seen[0][:3]
    assert float("inf") == seen[0].left_s
    assert (8192, 0.0) == (seen[-1].nbytes, seen[-1].left_s)
    assert [p.elapsed_s for p in seen] == sorted(p.elapsed_s for p in seen)
    assert seen[-1].bytes_per_s > 0


def test_the_timeout_and_its_report_are_those_of_wait() -> None:
    """Who asks for progress must not wait for ever."""
    own = scripted()
    mr, desc = own.engine.reg_mr(memory(1 << 20))
    sent = own.engine.submit_single_write(8, (mr, 0), (desc, 0))
    seen: list[tep.Progress] = []
    with pytest.raises(tep.WaitTimeout, match="pending; .* after 0.01 s\nengine a: 1 open"):
        sent.wait(0.01, on_progress=seen.append, every_s=0.002)
    assert seen
    with pytest.raises(tep.BadRequest, match="wait: every_s="):
        sent.wait(0.01, on_progress=seen.append, every_s=0)
    with pytest.raises(ZeroDivisionError):
        sent.wait(1, on_progress=lambda _: 1 // 0, every_s=0.001)


def test_coroutines_have_it() -> None:
    """A server shows progress without blocking its loop."""

    async def main(p) -> None:
        seen: list[tep.Progress] = []
        sent = p.a.submit_single_write(65536, (p.mr, 0), (p.desc, 0))
        assert sent is await sent.wait_async(20, on_progress=seen.append, every_s=0.01)
        assert [] == seen or 65536 == seen[-1].nbytes
        with pytest.raises(tep.BadRequest, match="wait: every_s="):
            await sent.wait_async(1, on_progress=seen.append, every_s=-1)

    with pair(threads=True) as p:
        asyncio.run(main(p))


def test_simulated_time_is_the_clock_in_a_simulation() -> None:
    """A rate in real seconds would say how fast the simulator is."""
    with tep.sim.Cluster(nodes=2, profile="efa_2x200", seed=1) as cluster:
        a, b = cluster.engines
        n = 1 << 26
        mr, _ = a.reg_mr(bytearray(n))
        _, desc = b.reg_mr(bytearray(n))
        pages = tep.Pages(range(n >> 12))
        sent = a.submit_paged_writes(1 << 12, (mr, pages), (desc, pages))
        seen: list[tep.Progress] = []
        sent.wait(on_progress=seen.append, every_s=0.0002)
        assert len(seen) > 3
        assert [p.nbytes for p in seen] == sorted(p.nbytes for p in seen)
        assert len({p.nbytes for p in seen}) > 3
        assert n == seen[-1].nbytes
        assert 1e9 < n / seen[-1].elapsed_s < 50e9, "two NICs of 200 Gb/s"


def test_no_end_is_foretold_while_rows_are_sent_again() -> None:
    """Fewer bytes are back than before: the time that is left would be negative."""
    stats = {"rows": 4, "nbytes": 400, "rows_back": 2, "rows_failed": 0}
    first = SimpleNamespace(**stats, rows_again=0, elapsed_s=400.0)
    then = SimpleNamespace(**stats, rows_again=1, elapsed_s=401.0)
    transfer = Mock(**{"stats.side_effect": [first, then]})
    meter = Meter(transfer)

    told = [meter.read(), meter.read()]
    assert [400.0, math.inf] == [each.left_s for each in told]
    assert [200, 160] == [each.nbytes for each in told], "2 of 4 rows, then of 5"


def test_it_is_told_once_a_second_unless_asked_otherwise() -> None:
    """A log would grow by a line at each turn of the engine."""
    waits = tep.Transfer.wait, tep.Transfer.wait_async
    assert [1.0] * 2 == [inspect.signature(wait).parameters["every_s"].default for wait in waits]


@pytest.mark.parametrize("coroutine", [False, True])
def test_it_is_told_as_often_as_asked_for(*, coroutine: bool, monkeypatch) -> None:
    """A bar that moves once a second, or once after the timeout, is of no use."""
    waits: list[float] = []
    seen: list[tep.Progress] = []

    def turn(seconds: float) -> bool:
        waits.append(seconds)
        return False

    async def late(_: object, seconds: float) -> None:
        turn(seconds)
        raise tep.WaitTimeout

    clock, never = SimpleNamespace(now_s=lambda: sum(waits)), SimpleNamespace(finished=False)
    told = Told("wait", never, [], clock, 2.0, 0.5, seen.append)
    if coroutine:
        monkeypatch.setattr(tep.core.progress, "wait_for", late)
        with pytest.raises(tep.WaitTimeout):
            asyncio.run(told.wait_async())
    else:
        assert not told.wait(turn)
    assert ([0.5] * 4, 3) == (waits, len(seen))

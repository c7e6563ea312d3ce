"""The flow fabric: the seam's clauses that it owes, and its times against the timing fabric."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tep
import tep.sim
from tep.apps.kvcache.simulate import Load, Plant, simulate
from tep.sim.flow import FlowFabric
from tep.sim.profile import load_profile

PAGE = 32768


def engines(fabric: Any, n: int) -> list[tep.TransferEngine]:
    found = []
    for index in range(n):
        node = fabric.node(f"n{index}")
        driver = tep.sim.SimDriver(fabric.env, node)
        found.append(
            tep.TransferEngine(node.domains, driver=driver, name=node.name, epoch=node.epoch)
        )
    return found


def timed(
    make: Callable[[tep.sim.FabricEnv], Any], senders: int, writes: int, gap_s: float
) -> float:
    """Simulated us until `writes` paged writes from each sender to one receiver are counted."""
    env = tep.sim.FabricEnv()
    fabric = make(env)
    *sources, sink = engines(fabric, senders + 1)
    _, desc = sink.reg_mr((1 << 44, PAGE * 4096, "cpu"))
    pages = tep.Pages(np.random.default_rng(0).permutation(4096)[:256])

    async def main() -> float:
        got = sink.expect_imm_count(1, 256 * writes * senders)

        async def send(engine: tep.TransferEngine) -> None:
            mr, _ = engine.reg_mr((1 << 45, PAGE * 4096, "cpu"))
            for _ in range(writes):
                engine.submit_paged_writes(PAGE, (mr, pages), (desc, pages), imm=1)
                await asyncio.sleep(gap_s)

        await asyncio.gather(*(send(engine) for engine in sources))
        await got
        return env.now / 1e6

    found = tep.sim.run(main(), env)
    for engine in (*sources, sink):
        engine.close()
    return found


@pytest.mark.parametrize("profile", ["cx7_400", "efa_2x200", "efa_4x100"])
@pytest.mark.parametrize(("senders", "writes", "gap_s"), [(1, 8, 1e-6), (1, 3, 4e-4), (3, 4, 1e-6)])
def test_times_are_the_timing_fabrics(
    profile: str, senders: int, writes: int, gap_s: float
) -> None:
    """A cheap model that answers something else sizes clusters wrongly, quickly."""
    machine = replace(load_profile(profile), poll_ps=0)  # which flows do not have

    def timing(env: tep.sim.FabricEnv) -> Any:
        return tep.sim.TimingFabric(env, machine, move_bytes=False)

    exact = timed(timing, senders, writes, gap_s)
    cheap = timed(lambda env: FlowFabric(env, machine), senders, writes, gap_s)

    # Pages go to four NICs in turns of `turn_rows`, which flows do not know.
    assert exact == pytest.approx(cheap, rel=0.04 if profile == "efa_4x100" else 0.02)


def test_rows_beyond_the_queue_wait_and_are_all_counted() -> None:
    """A prefix that is taken, and a rest that is forgotten, hang a decoder."""
    assert timed(lambda env: FlowFabric(env, "cx7_400"), 1, 40, 0.0) > 0


def test_gathered_completions_do_not_hold_a_full_queue_up() -> None:
    """News that waits for company must not wait while rows wait for room."""

    def lazy(env: tep.sim.FabricEnv) -> FlowFabric:
        return FlowFabric(env, "cx7_400", ack_gather_s=1.0)

    prompt = timed(lambda env: FlowFabric(env, "cx7_400"), 1, 60, 1e-4)

    assert prompt == pytest.approx(timed(lazy, 1, 60, 1e-4), rel=1e-3)


def test_a_closed_receiver_ends_in_errors_and_a_closed_sender_in_flushes() -> None:
    """Silence would keep pages for ever."""
    env = tep.sim.FabricEnv()
    a, b, c = engines(FlowFabric(env, "cx7_400"), 3)
    mr, _ = a.reg_mr((1 << 44, PAGE, "cpu"))
    _, desc_b = b.reg_mr((1 << 45, PAGE, "cpu"))
    _, desc_c = c.reg_mr((1 << 46, PAGE, "cpu"))
    one = tep.Pages([0])
    b.close()
    lost = a.submit_paged_writes(PAGE, (mr, one), (desc_b, one), imm=1)
    with pytest.raises(tep.FabricError, match="UNREACHABLE"):
        lost.wait(5.0)
    flushed = a.submit_paged_writes(PAGE, (mr, one), (desc_c, one), imm=1)
    env.run(env.now + 2_000_000)
    a.close()
    with pytest.raises(tep.FabricError, match="FLUSHED"):
        flushed.wait(1.0)


def test_messages_that_wait_at_a_receiver_that_closes_end() -> None:
    """The sender of a message to a peer that then leaves would wait for ever."""
    env = tep.sim.FabricEnv()
    a, b = engines(FlowFabric(env, "cx7_400"), 2)
    sent = a.submit_send(b.main_address, b"nobody has a buffer for it")
    env.run(env.now + 1_000_000_000)
    assert not sent.finished
    b.close()
    with pytest.raises(tep.FabricError, match="UNREACHABLE"):
        sent.wait(5.0)


def test_a_key_that_was_given_back_is_refused() -> None:
    """A decoder that registers anew relies on old keys being worth nothing."""
    env = tep.sim.FabricEnv()
    a, b = engines(FlowFabric(env, "cx7_400"), 2)
    mr, _ = a.reg_mr((1 << 44, PAGE, "cpu"))
    theirs, desc = b.reg_mr((1 << 45, PAGE, "cpu"))
    b.deregister(theirs)
    one = tep.Pages([0])
    with pytest.raises(tep.FabricError, match="REMOTE_KEY"):
        a.submit_paged_writes(PAGE, (mr, one), (desc, one), imm=1).wait(5.0)


def test_messages_wait_for_buffers_and_arrive_whole() -> None:
    """Dispatches and cancels travel this way."""
    env = tep.sim.FabricEnv()
    a, b = engines(FlowFabric(env, "efa_2x200"), 2)
    got: list[bytes] = []
    first = a.submit_send(b.main_address, b"early")
    env.run(env.now + 10**9)
    assert not first.finished
    b.submit_recvs(16, 2, lambda view: got.append(bytes(view)))
    sent = [a.submit_send(b.main_address, bytes([k]) * k) for k in range(5)]
    for one in (first, *sent):
        one.wait(1.0)
    with pytest.raises(tep.FabricError, match="LENGTH"):
        a.submit_send(b.main_address, bytes(17)).wait(1.0)

    assert [b"early", b"", b"\1", b"\2\2", b"\3\3\3", b"\4\4\4\4"] == got


def test_a_message_on_its_way_is_flushed_when_its_sender_closes() -> None:
    """Without its end the engine cannot close: a crash in a KvCache run ended in an assertion."""
    env = tep.sim.FabricEnv()
    a, b = engines(FlowFabric(env, "efa_2x200"), 2)
    waits = a.submit_send(b.main_address, b"no buffer is there")
    env.run(env.now + 10**9)
    a.close()
    b.close()

    with pytest.raises(tep.FabricError, match="FLUSHED"):
        waits.result()


def test_a_cluster_under_load_completes_everything() -> None:
    """A run that lost requests would give the numbers of another cluster."""
    plant = Plant(prefillers=2, decoders=2, profile="cx7_400")
    found = simulate(plant, Load(rate=2.0, duration_s=2.0, ntokens=(4096, 8192), seed=5))

    assert [] == found.failed
    assert len(found.completions) >= 2
    pages = sum(plant.model.layout.npages(4096) for _ in range(1))
    assert found.rows % (8 * 94 * pages) in range(1, 1 + len(found.completions))
    assert 0 < found.ttft_s(0.5) <= found.ttft_s(0.99)


def test_flow_and_timing_fabric_agree_on_a_cluster() -> None:
    """The whole protocol on both: what the cheap model leaves out must not matter here."""
    load = Load(rate=3.0, duration_s=1.0, ntokens=(4096,), seed=1, max_tokens=1)
    shape = {"prefillers": 1, "decoders": 1, "prefill_tp": 1, "decode_tp": 1}
    cheap = simulate(Plant(**shape, fabric="flow"), load)  # type: ignore[arg-type]  # numbers
    exact = simulate(Plant(**shape, fabric="timing"), load)  # type: ignore[arg-type]  # numbers

    assert len(cheap.completions) == len(exact.completions) > 0
    assert exact.ttft_s(0.5) == pytest.approx(cheap.ttft_s(0.5), rel=0.002)

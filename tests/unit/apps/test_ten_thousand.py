"""Ten thousand of anything cost each what one of a hundred costs: counted, not timed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tep
from tep.apps.rl import RolloutMeta, SourceShard, TrainMeta, lay_out, mesh_groups
from tep.apps.rl.schedule import make_schedule, ring_layout
from tep.base.units import MiB
from tep.base.wire import NetAddr
from tep.compat.nixl import nixl_agent
from tep.compat.nixl.wire import Region, find_regions
from tests.support.inside import machine_of
from tests.support.opcodes import Opcodes
from tests.support.script import memory, scripted

SPREAD = 1.5
"""So much more may one of many cost: tables that grow, and the last of them half empty."""


class Counted(str):
    """A name whose comparisons are counted, those too that a set or a list makes."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        return str.__hash__(self)


def registering(n: int) -> int:
    big = np.zeros((n, 64), np.uint8)
    with tep.TransferEngine.open("loopback") as engine:
        with Opcodes() as opcodes:
            regions = [engine.reg_mr(row)[0] for row in big]
            for region in regions[::2] + regions[1::2]:
                engine.deregister(region)
        return opcodes.count


def nixl_memory(n: int) -> int:
    agent = nixl_agent("a")
    big = np.zeros((n, 64), np.uint8)
    rows = [(big.ctypes.data + 64 * k, 64, 0, "") for k in range(n)]
    with Opcodes() as opcodes:
        descs = agent.register_memory(rows, "DRAM")
        agent.get_agent_metadata()
        agent.prep_xfer_dlist("", [row[:3] for row in rows], "DRAM")
        agent.deregister_memory(descs)
    agent.close()
    return opcodes.count


def planning(n: int) -> int:
    own, peer = scripted(2), scripted(2, name="b")
    mr, _ = own.engine.reg_mr(memory(64 * n))
    _, desc = peer.engine.reg_mr(memory(64 * n))
    with Opcodes() as opcodes:
        pages = tep.Pages(range(n))
        own.engine.submit_paged_writes(64, (mr, pages), (desc, pages), imm=1)
        machine_of(own.engine).step()
    own.engine.close()
    peer.engine.close()
    return opcodes.count


def connecting(n: int) -> int:
    own = scripted()
    addrs = [NetAddr("script", f"p{k}", 1, (b"p%d" % k,), (0,)) for k in range(n)]
    with Opcodes() as opcodes:
        for addr in addrs:
            own.engine.add_peer_group([addr])
        own.engine.add_peer_group(addrs)
    own.engine.close()
    return opcodes.count


def first_version(n: int) -> int:
    names = [Counted(f"layer{k}.weight") for k in range(n)]
    box = ((0, 4), (0, 8))
    held = {name: [box] for name in names}
    shards = tuple(SourceShard(name, box) for name in names)
    wanted = [(f"t{k}", "fp32", (shard,)) for k, shard in enumerate(shards)]
    with Opcodes() as opcodes:
        groups = mesh_groups([held, held], [([name], False) for name in names])
        trains = [
            TrainMeta(rank, 1, shards, dict.fromkeys(names, "fp32"), groups) for rank in range(2)
        ]
        rollouts = [RolloutMeta("r", 1, *lay_out(wanted))]
        make_schedule(trains, rollouts, watermark_bytes=MiB)
    return opcodes.count


WORK = [registering, nixl_memory, planning, connecting, first_version]

CASES = [
    *((work, n) for work in WORK for n in (100, 1_000)),
    *(pytest.param(work, 10_000, marks=pytest.mark.long) for work in WORK),
]


@pytest.mark.slow
@pytest.mark.parametrize(("work", "n"), CASES)
def test_work_is_linear(work: Callable[[int], int], n: int, monkeypatch) -> None:
    """A list of tensors, a pool of blocks, a model of experts: each has 10^4 of them."""
    monkeypatch.setenv("TEP_NIXL_BACKEND", "loopback")
    work(10)  # see Opcodes
    few = work(n // 10 or 1) if n > 100 else work(100)

    assert work(n) <= SPREAD * few * (10 if n > 100 else 1)


def test_the_count_sees_what_is_not_linear() -> None:
    """A count that misses searches in C would hold any of the above for linear."""

    def searching(n: int) -> int:
        names = [Counted(k) for k in range(n)]
        with Opcodes() as opcodes:
            for name in names:
                set(names)
                names.index(name)
        return opcodes.count

    assert searching(100) > SPREAD * 10 * searching(10)


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(0, 20)), max_size=8),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(0, 1)), max_size=8),
)
def test_a_row_is_found_in_a_region_that_holds_it(regions, rows) -> None:
    """Regions may lie in each other: the one that begins last before a row may be too short."""
    known = [Region(1, start, nbytes, device, b"") for device, start, nbytes in regions]
    known.append(Region(2, 0, 100, 0, b""))
    most = (1 << 63) - 1  # what a peer may name at most
    known.append(Region(1, most, most, 0, b""))
    asked = np.array(rows, np.int64).reshape(-1, 3)
    for where, (start, nbytes, device) in zip(find_regions(known, 1, asked), rows, strict=True):
        holds = [
            one.mem == 1 and one.device == device and one.start <= start
            and start + nbytes <= one.start + one.nbytes
            for one in known
        ]  # fmt: skip
        assert any(holds) == (where >= 0)
        assert where < 0 or holds[where]


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(9, 25))
def test_a_ring_waits_for_what_lies_in_the_way(sizes: list[int], capacity: int) -> None:
    """One that is used too early overwrites staging that is still read; one that looks at all that
    is live takes the square of the tasks.
    """
    offsets, after = ring_layout(tuple(sizes), capacity)
    live: dict[int, tuple[int, int]] = {}
    latest = -1
    for k, (size, start) in enumerate(zip(sizes, offsets, strict=True)):
        assert start + size <= capacity
        crossed = [j for j, (low, high) in live.items() if low < start + size and start < high]
        latest = max([latest, *crossed])
        assert latest == after[k]
        live = {j: span for j, span in live.items() if j > latest}
        if size:
            live[k] = start, start + size

"""The pieces of the all-to-all alone: configuration, formats, group, link, guard, words."""

from __future__ import annotations

import asyncio
import itertools

import ml_dtypes
import numpy as np
import pytest

import tep
from tep.apps import moe
from tep.apps.moe.config import sort_copies
from tep.apps.moe.group import Board, Move
from tep.apps.moe.kernels import HOST, gpu_numbers, load_gpu
from tep.apps.moe.payload import as_rows, from_f32, like, to_f32, weighted_sum
from tep.apps.moe.proxy import Guard, Word, call_imms, cut, imm_of, parts_of
from tests.support.tensors import TORCHES, get_torch

SMALL = {"num_experts": 8, "topk": 2, "hidden": 16, "max_tokens": 4, "world": 4}

# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_experts": 0}, "num_experts=0; 1 at the least"),
        ({"num_experts": 6}, "num_experts=6 is no multiple of world=4"),
        ({"topk": 9}, "topk=9 of num_experts=8 distinct experts"),
        ({"max_tokens": -1}, "max_tokens=-1; 0 at the least"),
        ({"node_size": 3}, "world=4 is no multiple of node_size=3"),
        ({"world": 2048, "num_experts": 2048}, "world=2048; 1024 ranks at the most"),
        ({"combine_format": moe.Format.FP8}, "combine_format fp8"),
        ({"imm_base": 0x8000_0001}, "imm_base=0x80000001; only its highest four bits"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(changes, text) -> None:
    """Found late, it is a hang on a thousand ranks."""
    with pytest.raises(tep.UsageError) as caught:
        moe.MoeConfig(**(SMALL | changes))

    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        (np.zeros((5, 2), int), "5 tokens, but max_tokens=4"),
        (np.zeros((2, 3), int), "integers [tokens, 2]"),
        (np.zeros((2, 2), float), "integers [tokens, 2]"),
        (np.array([[0, 8]]), "experts are 0 to 7"),
        (np.array([[0, -2]]), "-1 is none"),
        (np.array([[1, 2], [3, 3]]), "token 1 chooses expert 3 more than once"),
    ],
)
def test_indices_that_cannot_be_are_refused(indices, text) -> None:
    """A duplicate breaks the bound that buffers are sized by; an unknown expert has no rank."""
    with pytest.raises(tep.BadRequest) as caught:
        sort_copies(indices, moe.MoeConfig(**SMALL))

    assert text in str(caught.value)


# ---------------------------------------------------------------- formats


def test_bf16_rounds_as_ml_dtypes_does() -> None:
    """Another rounding than everybody's makes results differ from the dense layer's."""
    rng = np.random.default_rng(0)
    bits = np.concatenate(
        [
            rng.integers(0, 2**32, 20_000).astype(np.uint32),
            np.array([0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000], np.uint32),
        ]
    )
    values = bits.view(np.float32).reshape(-1, 5)
    values = values[~np.isnan(values).any(axis=1)]
    with np.errstate(over="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)

    assert expected.tobytes() == from_f32(values, moe.Format.BF16).tobytes()
    back = to_f32(expected.view(np.uint8), moe.Format.BF16)
    assert expected.astype(np.float32).tobytes() == back.tobytes()


def test_nan_stays_nan() -> None:
    """A NaN that rounds to infinity hides where it came from."""
    odd = np.array([[0x7F800001, 0x7FFFFFFF]], np.uint32).view(np.float32)

    assert np.isnan(to_f32(from_f32(odd, moe.Format.BF16), moe.Format.BF16)).all()


def test_types_come_back_as_they_went() -> None:
    """Experts compute on fp8 or bf16 arrays, not on bytes."""
    x = np.arange(6).reshape(2, 3).astype(ml_dtypes.float8_e4m3fn)
    rows = as_rows(x, 3, 1, "x")

    assert ml_dtypes.float8_e4m3fn == like(rows, x, moe.Format.FP8).dtype
    assert np.float32 == like(np.zeros((2, 8), np.uint8), None, moe.Format.FP32).dtype
    with pytest.raises(tep.BadRequest, match="x: float8_e4m3fn of shape"):
        as_rows(x, 3, 2, "x")


@pytest.fixture(params=TORCHES)
def torch(request, monkeypatch):
    return get_torch(request.param, monkeypatch)


def test_torch_tensors_come_back_as_tensors(torch) -> None:
    """Experts are torch modules; half as many bytes as promised would land as other tokens."""
    x = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.bfloat16, requires_grad=True)
    rows = as_rows(x, 3, 2, "x")
    back = like(rows, x, moe.Format.BF16)

    assert [[1, 2, 3], [4, 5, 6]] == to_f32(rows, moe.Format.BF16).tolist()
    assert isinstance(back, torch.Tensor)
    assert torch.bfloat16 == back.dtype
    assert rows.tobytes() == back.view(torch.uint8).numpy().tobytes()
    assert torch.uint8 == like(rows, x, moe.Format.FP8).dtype, "no type of x's fits"
    for wrong in (x.detach().view(torch.uint8), x.detach().view(torch.int16)[0]):
        with pytest.raises(tep.BadRequest, match=r"x: .* of shape .*\[n, 3\] of 2 bytes each"):
            as_rows(wrong, 3, 2, "x")


def test_the_weighted_sum_has_a_fixed_order() -> None:
    """f32 is not associative: 1e8 - 1e8 + 1 is 1 in one order and 0 in another."""
    results = np.array([[1e8], [-1e8], [1.0]], np.float32).view(np.uint8)
    weights = np.ones((2, 3), np.float32)
    place = np.array([[0, 1, 2], [2, 0, 1]])
    found = weighted_sum(results, place, weights, moe.Format.FP32, 1)

    assert [[1.0], [0.0]] == found.tolist()


# ---------------------------------------------------------------- slices and immediates


@pytest.mark.parametrize("nics", [1, 2, 3, 4])
@pytest.mark.parametrize("nbytes", [0, 1, 8191, 8192, 16_384, 100_001, 1 << 22])
def test_parts_tile_a_slice(nbytes, nics) -> None:
    """A gap is a byte that never arrives, an overlap one that is sent twice."""
    parts = parts_of(nbytes, nics)
    ends = [cut(nbytes, parts, k) for k in range(parts)]

    assert 0 == ends[0][0]
    assert nbytes == ends[-1][1]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ends))
    assert parts == 1 or min(stop - start for start, stop in ends) >= 8192 - 64


def test_immediates_of_different_meaning_differ() -> None:
    """An immediate that means two things is counted for the wrong one."""
    base = 0x8000_0000
    found = [imm_of(base, turn, kind) for turn in (1, 2, 77, (1 << 23) - 1) for kind in range(5)]
    found += [call_imms(base)[0], call_imms(base)[-1]]

    assert len(found) == len(set(found))
    assert all(base <= imm < base + (1 << 28) for imm in found)


# ---------------------------------------------------------------- group, link, guard


def test_a_node_needs_a_link() -> None:
    """Without one half of the payload would go nowhere."""
    board = Board(2)
    with pytest.raises(tep.UsageError, match="node_size=2 needs a link"):
        moe.Group(rank=0, world=2, exchange=lambda data: board.exchange(0, data), node_size=2)
    with pytest.raises(tep.UsageError, match="rank=2 world=2"):
        moe.Group(rank=2, world=2, exchange=lambda data: board.exchange(2, data))


def test_nvlink_ports_are_shared_and_switch_is_not() -> None:
    """Two pushes out of one port take turns; two between four ports do not."""

    async def main() -> tuple[float, float]:
        link = moe.Nvlink(bytes_s=1e9)
        ports = [link.port(rank) for rank in range(4)]
        loop = asyncio.get_running_loop()
        start = loop.time()
        await asyncio.gather(
            ports[0].move([Move(1, 0, 0, 1000)], pushes=True),
            ports[0].move([Move(2, 0, 0, 1000)], pushes=True),
        )
        same, start = loop.time() - start, loop.time()
        await asyncio.gather(
            ports[0].move([Move(1, 0, 0, 1000)], pushes=True),
            ports[2].move([Move(3, 0, 0, 1000)], pushes=True),
        )
        return same, loop.time() - start

    same, apart = tep.sim.run(main())

    assert 2e-6 == pytest.approx(same)
    assert 1e-6 == pytest.approx(apart)


def test_a_flag_comes_behind_what_was_pushed() -> None:
    """Release and acquire: this is all that readers on the node rely on."""

    async def main(seed: int) -> bool:
        link = moe.Nvlink(chaos=seed)
        ports = [link.port(rank) for rank in range(2)]
        for port, fill in zip(ports, (7, 0), strict=True):
            port.arena = np.full(4096, fill, np.uint8)
        await ports[0].move([Move(1, 0, 0, 4096)], pushes=True)
        ports[0].signal([1], 5)
        early = ports[1].arena.copy()
        await ports[1].expect(5, 1)
        return bool((ports[1].arena == 7).all()) and early is not None

    assert all(tep.sim.run(main(seed)) for seed in range(10))


def test_a_guard_calls_waits_off_and_says_why() -> None:
    """A rank that waits for a dead one must learn of it while it waits."""

    async def main() -> list[str]:
        loop, said = asyncio.get_running_loop(), []
        guard = Guard(1.0, "rank 3")
        for act in (None, lambda: guard.alarm(tep.FabricError("wire cut"))):
            never = loop.create_future()
            if act is not None:
                loop.call_later(0.1, act)
            try:
                await guard.wait(never, "the impossible")
            except tep.TepError as error:
                said.append(str(error))
            assert never.cancelled()
        with pytest.raises(tep.FabricError, match="wire cut"):
            await guard.wait(loop.create_future(), "anything later")
        return said

    assert ["rank 3: the impossible: not within 1.0 s", "wire cut"] == tep.sim.run(main())


def test_a_word_is_seen_whether_it_is_stored_before_or_after() -> None:
    """The kernel does not know whether its proxy looks already."""

    async def main(engine: tep.TransferEngine) -> None:
        word = Word(engine)
        word.store(1)
        await word.reach(1)
        waiting = word.reach(2)
        word.store(2)
        await waiting
        word.close()
        word.close()

    with tep.sim.Cluster(1) as cluster:
        cluster.run(main(cluster.engines[0]))


# ---------------------------------------------------------------- kernels


def test_a_host_adds_no_time() -> None:
    """On real machines numpy takes its own time; a model on top would be a lie."""
    host = HOST
    times = [host.launch_s(), host.watch_s(), host.flag_s(), host.routes_s(9, 9), host.copy_s(9, 9)]
    times += [host.send_rest_s("combine", 1.0), host.receive_launch_s("dispatch")]

    assert {0.0} == {*times, host.sum_s(9, 9, 9)}


def test_every_number_has_a_source() -> None:
    """A number without a source cannot be checked, nor replaced by a better one."""
    for table in gpu_numbers().values():
        for number in table.values():
            assert len(number["source"]) > 20
            assert number["confidence"] in {"measured", "quoted", "fitted", "guessed"}
    with pytest.raises(tep.UsageError, match="there are: cx7, efa"):
        load_gpu("token ring")

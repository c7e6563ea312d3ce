"""Many open transfers cost as much each as one does, also to end them: counted, not timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import tep
from tep.core.handles import Handle
from tests.bench.bench_open import KINDS, measure
from tests.support.inside import machine_of
from tests.support.opcodes import Opcodes
from tests.support.pairs import Pair, pair


def writes(p: Pair, n: int) -> list[Handle]:
    return [p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), imm=1) for _ in range(n)]


def messages(p: Pair, n: int) -> list[Handle]:
    return [p.a.submit_send(p.b.main_address, b"x") for _ in range(n)]


def expectations(p: Pair, n: int) -> list[Handle]:
    return [p.a.expect_imm_count(7, 1) for _ in range(n)]


def in_order(handles: list[Handle]) -> Iterator[Handle]:
    return iter(handles)


def backwards(handles: list[Handle]) -> Iterator[Handle]:
    return reversed(handles)


def at_random(handles: list[Handle]) -> Iterator[Handle]:
    return (handles[k] for k in np.random.default_rng(0).permutation(len(handles)))


def cost(monkeypatch, n: int, make, end: Callable[[Pair, list[Handle]], None]) -> int:
    """Count the bytecodes of ending n handles; at most a few dozen have made progress."""
    with pair(sq_depth=1) as p:
        handles = make(p, n)
        for _ in range(n // 100):  # the commands are taken, the NIC is full
            machine_of(p.a).step()
        with monkeypatch.context() as moment, Opcodes() as opcodes:
            for kind in (tep.Transfer, tep.Message, tep.Expectation):
                moment.setattr(kind, "__eq__", lambda self, other: self is other)
            end(p, handles)
        p.a.close()
        assert all(handle.finished for handle in handles)
        assert sum(handle.cancelled or handle.error is not None for handle in handles) > n - 100
    return opcodes.count


@pytest.mark.slow
@pytest.mark.parametrize("make", [writes, messages, expectations])
def test_closing_is_linear_in_what_is_open(monkeypatch, make) -> None:
    """A server with 10^4 open transfers that shuts down must not take minutes for it."""
    sizes = (100, 1_000, 2_000)  # the first: see Opcodes
    _, half, whole = (cost(monkeypatch, n, make, lambda p, _: p.a.close()) for n in sizes)

    assert whole < 2.2 * half


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    [in_order, at_random, backwards],
)
@pytest.mark.parametrize("make", [writes, messages, expectations])
def test_cancelling_is_linear_in_what_is_open(monkeypatch, make, order) -> None:
    """A request that timed out cancels what it had queued, while others queue behind it."""

    def cancel(p: Pair, handles: list[Handle]) -> None:
        for handle in order(handles):
            handle.cancel()
        for _ in range(len(handles) // 100):
            machine_of(p.a).step()
            machine_of(p.a).deliver()
        assert sum(handle.cancelled for handle in handles) > len(handles) - 100

    _, half, whole = (cost(monkeypatch, n, make, cancel) for n in (100, 500, 1_000))

    assert whole < 2.3 * half


@pytest.mark.slow
@pytest.mark.parametrize("what", KINDS)
def test_a_transfer_costs_the_same_however_many_are_open(what: str) -> None:
    """A server with 10^5 requests in flight would get slower with each of them."""
    few, many = (measure(what, n).calls for n in (200, 3_000))

    assert many < 1.05 * few

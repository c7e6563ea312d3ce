"""The registry's answers and the seam's own small helpers; no backend is opened."""

from __future__ import annotations

import os
import select

import numpy as np
import pytest

from tep import backends
from tep.backends.base import (
    COMPLETION,
    COMPLETION_BYTES,
    Access,
    ReadBatch,
    ReadRow,
    Row,
    WriteBatch,
    first_completions,
    new_completions,
    put_completion,
)
from tep.backends.common import Sleeper
from tep.base.errors import BackendUnavailable, FabricError, UsageError


def test_unknown_backend_lists_the_known_ones() -> None:
    """A misspelt name must not end in an ImportError of some module."""
    with pytest.raises(UsageError, match="backend 'verb' is unknown; there are: .*local, loopback"):
        backends.load_backend("verb")
    with pytest.raises(UsageError, match="backend 'verb' is unknown"):
        backends.open_backend("verb", nics=2)


def test_a_backend_that_cannot_be_imported_says_what_would_bring_it(monkeypatch) -> None:
    """On a machine without a library the user must read what to install, and what was tried."""
    spec = backends.BackendSpec(
        module="tep.backends.not_there", summary="nothing", cure="pip install something"
    )
    monkeypatch.setattr(backends, "BACKENDS", {"ghost": spec})

    with pytest.raises(BackendUnavailable) as caught:
        backends.load_backend("ghost")

    assert (
        "backend 'ghost' cannot be imported; pip install something\n"
        "  tried import tep.backends.not_there: No module named 'tep.backends.not_there'"
    ) == str(caught.value)
    assert 1 == len(caught.value.tried)
    assert isinstance(caught.value.__cause__, ImportError)


@pytest.mark.parametrize("name", sorted(backends.BACKENDS))
def test_every_registered_backend_has_its_two_functions(name: str) -> None:
    """`tep info` asks each for probe(), the engine for open_domains()."""
    module = backends.load_backend(name)

    assert callable(module.open_domains)
    assert callable(module.probe)
    try:
        told: object = module.probe()
    except BackendUnavailable as error:
        told = error.tried  # a missing backend says what was looked for
    assert told


def test_the_registry_cannot_be_changed_by_accident() -> None:
    """Two tests that register a backend each would depend on their order."""
    with pytest.raises(TypeError):
        backends.BACKENDS["mine"] = backends.BACKENDS["loopback"]


def test_fabric_error_carries_its_facts() -> None:
    """Retry policy reads the fields, people read the message."""
    error = FabricError("row 3 failed", code="REMOTE_KEY", domain=1, peer="b@sim", row=3)

    assert "row 3 failed" == str(error)
    assert ("REMOTE_KEY", 1, "b@sim", 3) == (error.code, error.domain, error.peer, error.row)


def test_write_batch_rows_mix_columns_and_scalars() -> None:
    """A backend that works row by row must see the same writes as one that works by columns."""
    batch = WriteBatch(
        n=4,
        peer=2,
        src=np.array([10, 20, 30, 40], np.uint64),
        lkey=7,
        dst=np.array([0, 2**63, 2**64 - 1, 5], np.uint64),
        rkey=9,
        nbytes=16,
        imm=np.array([0, 1, 2**32 - 1, 3], np.uint32),
        ctx=99,
    )

    assert [
        Row(2, 20, 7, 2**63, 9, 16, 1),
        Row(2, 30, 7, 2**64 - 1, 9, 16, 2**32 - 1),
    ] == list(batch.rows(1, 3))
    assert all(type(field) is int for row in batch.rows(0, 4) for field in row)


def test_write_batch_rows_without_an_immediate() -> None:
    """None is not the immediate 0."""
    batch = WriteBatch(2, 0, 1, 2, 3, 4, 5, None, 6)

    assert [Row(0, 1, 2, 3, 4, 5, None)] * 2 == list(batch.rows(0, 2))


def test_read_batch_rows_turn_the_columns_round() -> None:
    """A backend that mixed up the two ends would write where it is to read."""
    remote = np.array([1, 2**64 - 1, 5], np.uint64)
    batch = ReadBatch(3, 2, 100, 7, remote, 9, 16, None, 99)

    assert [ReadRow(2, 100, 7, 2**64 - 1, 9, 16), ReadRow(2, 100, 7, 5, 9, 16)] == list(
        batch.rows(1, 3)
    )


def test_access_says_who_may_do_what() -> None:
    """A right that comes along with another is one that nobody asked for."""
    rights = {a: (a.target, a.readable, a.sink) for a in Access}

    assert {
        Access.SOURCE: (False, False, False),
        Access.TARGET: (True, False, True),
        Access.READABLE: (False, True, False),
        Access.SINK: (False, False, True),
    } == rights
    both = Access.SOURCE_AND_TARGET | Access.READABLE
    assert (True, True, True) == (both.target, both.readable, both.sink)
    assert Access.SOURCE_AND_TARGET is Access.SOURCE | Access.TARGET


def test_completions_start_empty_and_keep_their_layout() -> None:
    """Backends fill this array by field name; the engine counts on the widths."""
    found = new_completions(3)

    assert COMPLETION == found.dtype
    assert 0 == int(found.view(np.uint8).sum())
    sizes = {name: COMPLETION[name].itemsize for name in COMPLETION.names}
    assert {
        "kind": 1,
        "status": 1,
        "count": 4,
        "imm": 4,
        "row": 4,
        "ctx": 8,
        "nbytes": 8,
    } == sizes


def test_the_first_completions_are_what_the_array_holds() -> None:
    """They are read by a layout of their own: one field off, and counts go to other batches."""
    out = new_completions(4)
    for k in range(4):
        put_completion(out, k * COMPLETION_BYTES, 1 + k, 2, 3, 2**32 - 4 - k, 5, 2**64 - 6, 7 + k)
    assert out[:3].tolist() == first_completions(out, 3)


def test_a_sleeper_wakes_for_its_descriptors_and_at_its_time_and_is_quiet_after() -> None:
    """One that stays readable turns a core; one that does not become so hangs the engine."""
    bells = [os.eventfd(0), os.eventfd(0)]
    sleeper = Sleeper(*bells)

    def woken(wait_s: float = 0.0) -> bool:
        return select.select([sleeper.fd], [], [], wait_s)[0] != []

    assert not woken()
    sleeper.wake_in(0.001)
    assert woken(60.0)
    sleeper.wake_in(3600.0)
    assert not woken(), "the new time stands in place of the old one"
    sleeper.wake_in(0.001)
    sleeper.wake_in(None)
    assert not woken(0.05)
    os.eventfd_write(bells[1], 1)
    assert woken()
    sleeper.ignore(bells[1])
    assert not woken()
    sleeper.close()
    for bell in bells:
        os.close(bell)

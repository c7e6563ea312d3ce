"""Sums of immediates at both ends of a lane: exact, in bounded memory, and honest about it."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import numpy as np
import pytest

from tep.backends.base import WriteBatch
from tep.base.errors import BadDescriptor
from tep.control.messages import Answer, FenceOff, decode, encode, values_max
from tep.core import path as path_module
from tep.core.path import Acks, Arrivals, Sums
from tep.core.posting import Pending
from tests.support.ends import Ends
from tests.support.inside import peers_of


def test_columns_and_single_keys_make_one_sum() -> None:
    """A burst that is summed up apart from the rest would be missing in the answer."""
    found = Sums()
    found.add(7, 2)
    found.add_many(np.array([7, 8, 7], np.uint64))
    found.add(7, -1)
    assert (3, 1, 0) == (found.sum(7), found.sum(8), found.sum(9))
    assert [(7, 3), (8, 1)] == sorted(found.items())


@pytest.mark.parametrize("halves", [False, True])
def test_many_columns_are_folded_before_they_are_asked_for(*, halves) -> None:
    """Columns that only pile up would be a leak."""
    found = Sums()
    for _ in range(40):
        if halves:
            found.add_lows(0, np.arange(4096, dtype=np.uint32).tobytes())
        else:
            found.add_many(np.arange(4096, dtype=np.uint64))
    assert len(found) < 20 * 4096
    assert 40 == found.sum(4095)
    assert 4096 == len(found)


@pytest.mark.parametrize("spread", [1, 1 << 20])
def test_bursts_of_one_upper_half_are_summed_with_the_rest(spread) -> None:
    """Near keys are counted in cells, far ones sorted: a key in the wrong cell is a wrong sum."""
    found = Sums()
    lows = np.arange(300, dtype=np.uint32) % 7 * np.uint32(spread) + np.uint32(5)
    for high in (0, 3, 9):
        found.add_lows(high, lows.tobytes())
    found.add_many(np.array([3 << 32 | 5, (1 << 64) - 1], np.uint64)[: 1 + (spread > 1)])
    expected = Counter(high << 32 | low for high in (0, 3, 9) for low in lows.tolist())
    expected[3 << 32 | 5] += 1
    if spread > 1:
        expected[(1 << 64) - 1] += 1
    assert expected == Counter(dict(found.items()))


def test_too_many_keys_are_forgotten_and_that_is_remembered() -> None:
    """A sum that began in the middle looks like a sum from the beginning."""
    found = Sums(limit=3)
    for key in range(4):
        found.add(key, 1)
    assert found.forgot
    assert not found.large, "what is empty would be pruned"
    assert 0 == found.sum(0)
    columns = Sums(limit=3)
    columns.add_many(np.arange(70_000, dtype=np.uint64))
    assert columns.forgot


def test_one_row_of_a_column_counts_as_one() -> None:
    """The receiver would answer that an immediate of a single row never came."""
    found = Sums(large_at=2)
    for low in (7, 8):
        found.add_lows(3, np.array([low], np.uint32).tobytes())
    assert 2 == len(found)
    assert (1, 1) == (found.sum(3 << 32 | 7), found.sum(3 << 32 | 8))
    assert not found.large, "it has no more than two"
    found.add_lows(3, np.array([9], np.uint32).tobytes())
    assert (1, True) == (found.sum(3 << 32 | 9), found.large)


def test_calm_sums_are_large_again_at_the_next_key() -> None:
    """A sender prunes what is large: one that stays so is asked about without end."""
    found = Sums(limit=100, large_at=3)
    for key in range(4):
        assert not found.large
        found.add(key, 1)
    assert found.large
    found.calm()
    assert not found.large
    found.add(4, 1)
    assert found.large
    assert 5 == len(found)
    assert not found.forgot


class _Nic:
    """Says which address stands behind a number."""

    def source(self, number: int) -> bytes:
        return b"ab"[number % 2 : number % 2 + 1]


def test_arrivals_are_summed_by_address() -> None:
    """A sender that connected twice has two numbers and is one sender."""
    arrivals = Arrivals()
    arrivals.add(0, 7, 5)
    arrivals.add(1, 7, 3)
    arrivals.add(2, 7, 1)
    imms = np.full(4, 7, np.uint32).tobytes()
    arrivals.add_columns(np.zeros(4, np.uint64), imms)
    arrivals.add_columns(np.array([0, 1, 0, 1], np.uint64), imms)
    arrivals.add_columns(np.zeros(2, np.uint64), np.array([7, 2**32 - 1], np.uint32).tobytes())

    assert (13, 1, 0) == arrivals.sums(_Nic(), b"a", (7, 2**32 - 1, 9))
    assert (5,) == arrivals.sums(_Nic(), b"b", (7,))
    arrivals.forget(_Nic(), (b"a",))
    assert [(1 << 32 | 7, 5)] == arrivals.counted.items(), "what is forgotten takes no room"


def test_a_sender_that_comes_in_mixed_columns_only_is_known() -> None:
    """Its sums would be 0 in every answer, and rows that landed would be written again."""
    arrivals, imms = Arrivals(), np.array([7, 8, 7], np.uint32).tobytes()
    for first in (0, 2):
        arrivals.add_columns(np.array([first, first + 1, first], np.uint64), imms)
        assert (first + 2, 0) == arrivals.sums(_Nic(), b"a", (7, 8))
    assert (0, 2) == arrivals.sums(_Nic(), b"b", (7, 8))
    assert arrivals.prune(_Nic(), b"b", 1, ((7, 1, 1),)) == "not all of these have been counted"
    assert arrivals.prune(_Nic(), b"a", 1, ((7, 1, 2),)) is None
    assert (2, 0) == arrivals.sums(_Nic(), b"a", (7, 8))
    arrivals.forget(_Nic(), (b"a",))
    assert (0, 0) == arrivals.sums(_Nic(), b"a", (7, 8))
    assert (0, 2) == arrivals.sums(_Nic(), b"b", (7, 8))


def test_control_messages_come_back_as_they_were_and_junk_is_none() -> None:
    """Bytes from a peer must not be able to stop the worker."""
    messages = (FenceOff(3, b"x" * 256, 63, (0, 2**32 - 1)), Answer(2**40, "why", (2**63 - 1, 0)))
    assert messages == tuple(decode(encode(message)) for message in messages)
    for junk in (b"", b"\xc1", b"\x00", encode(messages[0])[:-1], encode(messages[1]) + b"x"):
        with pytest.raises(BadDescriptor, match="is no control message"):
            decode(junk)
    with pytest.raises(BadDescriptor, match="length >= 1"):
        decode(b"\x95\x01\x03\xc4\x00\x00\x90")  # an address of no bytes


def test_a_question_and_its_answer_fit_into_a_note() -> None:
    """One that does not fit is refused by the NIC, and the transfer fails for a number's sake."""
    for control_bytes in (512, 4096):
        n = values_max(control_bytes)
        assert control_bytes >= len(encode(FenceOff(2**62, b"x" * 256, 63, (2**32 - 1,) * n)))
        assert control_bytes >= len(encode(Answer(2**62, "", (2**63 - 1,) * n)))


def test_of_a_batch_to_several_peers_each_path_is_told_what_arrived() -> None:
    """A lost row would be taken for one that arrived, or the reverse, and sent twice or never."""
    e = Ends(1, (1, 1, 1, 1))
    remotes = [peers_of(e.engine).resolve(desc, "test") for desc in e.descs]
    acks = Acks()
    some = np.array([7, 8, 7, 7], np.uint32)
    for imm, lost in ((7, 2), (7, None), (some, 2), (some, None)):
        with mock.patch.object(path_module, "PRUNE_AT", 1):
            batch = WriteBatch(4, 0, 0, 0, 0, 0, 0, imm, 0)
            pending = Pending(mock.Mock(), 0, batch, remotes, [0] * 4)
            if lost is not None:
                pending.lose(lost)
            pending.stop = 3  # the last one was never posted
            acks.add(pending)
    acks.fold()
    paths = [remote.link.path(0, 0) for remote in remotes]
    assert [paths[1]] == list(acks.large), "the one with two values is to be pruned"

    assert [4, 2, 2, 0] == [path.sums.sent.sum(7) for path in paths]
    assert 2 == paths[1].sums.sent.sum(8)


def test_what_is_counted_as_a_whole_is_counted_as_often_as_it_came() -> None:
    """Sums that are too large name rows as arrived that were lost, and nobody writes them again."""
    e = Ends(1, (1, 1))
    remotes = [peers_of(e.engine).resolve(desc, "test") for desc in e.descs]
    acks, nics = Acks(), [0, 0]
    for _ in range(3):
        batch = WriteBatch(2, 0, 0, 0, 0, 0, 0, 7, 0)
        pending = Pending(mock.Mock(), 0, batch, remotes, nics)
        pending.stop = 2
        acks.add(pending)
    acks.miss(pending, 1)
    acks.fold()
    paths = [remote.link.path(0, 0).sums for remote in remotes]

    assert [3, 3] == [sums.sent.sum(7) for sums in paths]
    assert [set(), {7}] == [sums.unsure for sums in paths]

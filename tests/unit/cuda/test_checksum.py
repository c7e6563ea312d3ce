"""Checksums of rows in host memory; those on GPUs are in tests/cuda."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

import tep
from tep import BadRequest, ClosedError, TransferEngine


@pytest.fixture
def region():
    """A region of bytes that all differ from their neighbours, and its engine."""
    array = np.arange(4096).astype(np.uint8)
    with TransferEngine.open("loopback") as engine:
        yield array, engine.reg_mr(array)[0], engine


def test_it_is_the_sum_of_the_rows_crcs_each_begun_with_its_place(region):
    """Both ends, which may run other releases, must agree on every bit of it."""
    array, mr, _ = region
    rows = {8: 100, 1000: 7}
    expected = sum(zlib.crc32(array[at : at + 64].tobytes(), place) for at, place in rows.items())

    assert expected & 0xFFFFFFFF == tep.checksum(mr, [8, 1000], 64, places=[100, 7])
    assert tep.checksum(mr, [8, 1000], 64) == tep.checksum(mr, [1000, 8], 64)
    assert 0 == tep.checksum(mr, [], 64)


@pytest.mark.parametrize("spoil", ["a bit", "two rows change places", "a row is old"])
def test_what_differs_has_another_checksum(region, spoil):
    """Swapped rows have the same CRCs; only their places tell."""
    array, mr, _ = region
    before = tep.checksum(mr, [0, 64, 100], 32)
    if spoil == "a bit":
        array[70] ^= 4
    elif spoil == "a row is old":
        array[64:96] = 0
    else:
        array[:32], array[64:96] = array[64:96].copy(), array[:32].copy()

    assert before != tep.checksum(mr, [0, 64, 100], 32)


def test_rows_beyond_the_region_are_refused(region):
    """It would read memory of others, or end the process."""
    _, mr, engine = region
    for offsets in ([4096 - 63], [-1], [0, 5000]):
        with pytest.raises(BadRequest, match="do not lie in a region of 4096 bytes"):
            tep.checksum(mr, offsets, 64)
    with pytest.raises(BadRequest, match="2 places for 1 rows"):
        tep.checksum(mr, [0], 64, places=[0, 1])
    engine.deregister(mr)
    with pytest.raises(ClosedError, match="given back"):
        tep.checksum(mr, [0], 64)


def test_read_only_memory_has_a_checksum():
    """Weights that are mapped from a file are sources too."""
    raw = bytes(range(256))
    with TransferEngine.open("loopback") as engine:
        mr, _ = engine.reg_mr(raw, access=tep.Access.SOURCE)
        assert zlib.crc32(raw) == tep.checksum(mr, [0], 256)

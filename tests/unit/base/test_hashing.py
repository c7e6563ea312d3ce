"""Counter-based randomness: scalar and vector forms, golden values, and that it looks random."""

from __future__ import annotations

import numpy as np

from tep.base.hashing import below, below_array, draw, draw_array, stream_key
from tep.sim.draws import Stream

_EDGES = (0, 1, 2, 2**31, 2**32 - 1, 2**63, 2**64 - 1)


def hash64(seed: int, stream: int, entity: int, index: int = 0) -> int:
    return draw(stream_key(seed, stream), entity, index)


def test_scalar_and_vector_are_equal() -> None:
    """Both fabrics draw for the same rows; a difference would be two different machines."""
    entities = np.arange(500, dtype=np.uint64) * np.uint64(2**53 + 7)
    for seed in _EDGES:
        for index in _EDGES:
            key = stream_key(seed, Stream.FRAGMENT)
            expected = [draw(key, int(e), index) for e in entities]
            assert expected == draw_array(key, entities, index).tolist()
            assert expected == [hash64(seed, Stream.FRAGMENT, int(e), index) for e in entities]
    indices = np.arange(9, dtype=np.uint64)
    assert [draw(7, 3, i) for i in range(9)] == draw_array(7, 3, indices).tolist()
    assert [draw(7, 3, 4)] == draw_array(7, 3, 4).tolist()


def test_below_is_equal_and_in_range() -> None:
    """A delay beyond its spread would break the promises that are built on it."""
    bits = draw_array(stream_key(1, 1), np.arange(2000, dtype=np.uint64))
    for n in (1, 2, 3, 1000, 2**31, 2**32):
        found = below_array(bits, n)
        assert [below(int(b), n) for b in bits] == found.tolist()
        assert 0 <= found.min() <= found.max() < n


def test_golden_values() -> None:
    """Recorded seeds in bug reports must mean the same run for ever."""
    assert 0x94491C336FDC4B3B == hash64(0, Stream.ROW, 0)
    assert 0x4848CA073DF7FA18 == hash64(7, Stream.FRAGMENT, 123456789, 3)


def test_no_argument_is_ignored_and_bits_are_even() -> None:
    """A stream that repeats another's draws would make two faults come always together."""
    names = [
        (s, st, e, i) for s in range(6) for st in range(6) for e in range(20) for i in range(5)
    ]
    found = np.array([hash64(*name) for name in names], np.uint64)
    ones = np.unpackbits(found.view(np.uint8)).reshape(len(found), 64).mean(axis=0)

    assert len(names) == len(set(found.tolist()))
    assert (abs(ones - 0.5) < 0.04).all(), "each bit is set in about half of 3600 draws"

"""The nouns a user writes: what they hold, what they refuse, and that they are values."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tep.base.api import (
    Barrier,
    EngineOptions,
    Paged,
    Pages,
    Routing,
    Scatter,
    ScatterDst,
    Single,
)
from tep.base.errors import BadRequest


@pytest.mark.parametrize(
    "indices",
    [
        [3, 1, 2],
        (3, 1, 2),
        range(3, 0, -1),
        np.array([3, 1, 2], np.int32),
        np.array([3, 1, 2], np.uint64),
        np.array([0, 3, 9, 1, 9, 2])[1::2],
    ],
)
def test_pages_take_any_integers(indices: object) -> None:
    """Page lists come from block tables of every integer type, sliced or not."""
    pages = Pages(indices)

    assert np.uint64 == pages.indices.dtype
    assert pages.indices.flags.c_contiguous
    assert len(indices) == len(pages)
    assert max(indices) == pages.index_max


def test_pages_copy_their_indices_and_freeze_them() -> None:
    """A block table is changed while the transfer is still in flight."""
    indices = np.array([1, 2, 3], np.uint64)
    pages = Pages(indices, stride=64, offset=8)
    indices[0] = 99

    assert [1, 2, 3] == pages.indices.tolist()
    with pytest.raises(ValueError, match="read-only"):
        pages.indices[0] = 5
    assert (64, 8) == (pages.stride, pages.offset)


def test_starts_follow_every_change_of_stride_and_start() -> None:
    """The last column is kept; a stale one sends pages from or to another region."""
    pages = Pages([3, 0, 2**40])
    for stride, first in ((8, 0), (8, 100), (8, 2**63), (8, 5), (16, 5), (16, 5), (8, 0)):
        expected = [(first + index * stride) % 2**64 for index in (3, 0, 2**40)]
        assert expected == pages.starts(stride, first).tolist()


def test_pages_describe_themselves_shortly() -> None:
    """A repr of 16,384 indices would fill the screen of whoever prints it."""
    assert "Pages(3 pages, largest index 9, stride=None, offset=0)" == repr(Pages([9, 1, 2]))


@pytest.mark.parametrize(
    ("indices", "options", "message"),
    [
        ([], {}, r"Pages: indices of shape \(0,\); one dimension and one page at the least"),
        (5, {}, r"Pages: indices of shape \(\)"),
        ([[1, 2]], {}, r"Pages: indices of shape \(1, 2\)"),
        ([[1], [2, 3]], {}, "are no one-dimensional list of integers"),
        ([1.0, 2.0], {}, "Pages: indices are float64, not integers"),
        ([True, False], {}, "Pages: indices are bool, not integers"),
        (["1"], {}, "not integers"),
        ([2**64], {}, "not integers"),
        ([3, -1], {}, "Pages: index -1 is negative"),
        (np.array([-(2**63)]), {}, "is negative"),
        ([1], {"offset": -1}, "Pages: offset=-1 is outside 0 .. "),
        ([1], {"stride": -4}, "Pages: stride=-4 is outside 0 .. "),
    ],
)
def test_pages_refuse_by_message(indices: object, options: dict, message: str) -> None:
    """A wrong page list is caught where it is written, with its values."""
    with pytest.raises(BadRequest, match=message):
        Pages(indices, **options)


@pytest.mark.parametrize(
    "value", [Routing(), Single(3), Paged(3), Scatter(3), Barrier(), EngineOptions()]
)
def test_values_are_frozen_and_equal_by_content(value: object) -> None:
    """Shapes and routings are keys of the planner's cache."""
    assert dataclasses.replace(value) == value
    assert hash(dataclasses.replace(value)) == hash(value)
    assert not hasattr(value, "__dict__")
    for field in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, None)


def test_routing_is_keyword_only() -> None:
    """`Routing(2)` could mean two shards or NIC 2."""
    with pytest.raises(TypeError):
        Routing(2)


def test_scatter_slices_unzip_to_columns() -> None:
    """A scatter to 63 peers is turned into columns by one zip."""
    slices = [ScatterDst(10, 0, ("a", 5)), ScatterDst(20, 10, ("b", 6))]

    assert [(10, 20), (0, 10), (("a", 5), ("b", 6))] == list(zip(*slices, strict=True))

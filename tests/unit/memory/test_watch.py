"""Watched words: allocate, write, notice, close."""

from __future__ import annotations

import ctypes

import pytest

from tep.base.errors import BusyError, ClosedError, UsageError
from tep.memory.watch import WORDS, WatchPage
from tests.support.inside import machine_of
from tests.support.script import scripted


def test_changes_are_reported_with_old_and_new() -> None:
    """A GPU kernel counts up; the reader must see how far it came since the last look."""
    own = scripted()
    seen: list[tuple[int, int]] = []
    word = own.engine.alloc_uvm_watcher(lambda old, new: seen.append((old, new)))
    own.turn(2)
    assert [] == seen
    word.word[0] = 3
    own.turn(2)
    word.store(2**64 - 1)
    own.turn()
    assert [(0, 3), (3, 2**64 - 1)] == seen


def test_values_between_two_looks_are_missed_and_equal_ones_are_no_change() -> None:
    """The promise is the latest value, no more: callers must not count calls."""
    own = scripted()
    seen: list[tuple[int, int]] = []
    word = own.engine.alloc_uvm_watcher(lambda old, new: seen.append((old, new)))
    for value in (1, 2, 3):
        word.store(value)
    own.turn()
    word.store(9)
    word.store(3)
    own.turn()
    assert [(0, 3)] == seen


def test_pointer_is_the_words_address() -> None:
    """A GPU, or another process, writes there."""
    own = scripted()
    seen: list[int] = []
    own.engine.alloc_uvm_watcher(print)
    word = own.engine.alloc_uvm_watcher(lambda _, new: seen.append(new))
    assert 0 == word.ptr % 8
    ctypes.c_uint64.from_address(word.ptr).value = 77
    own.turn()
    assert [77] == seen


def test_closed_watcher_is_silent_and_its_word_is_used_anew_from_zero() -> None:
    """A callback after close would touch what its owner has freed."""
    own = scripted()
    seen: list[int] = []
    with own.engine.alloc_uvm_watcher(lambda _, new: seen.append(new)) as word:
        word.store(5)
    word.close()
    own.turn()
    assert [] == seen
    assert not machine_of(own.engine).watching()
    with pytest.raises(ClosedError, match="this watcher is closed"):
        word.store(1)
    with pytest.raises(ClosedError, match="this watcher is closed"):
        word.word  # noqa: B018  # reading it is the test
    fresh = own.engine.alloc_uvm_watcher(lambda old, new: seen.append(100 * old + new))
    assert word.ptr == fresh.ptr
    own.turn()
    fresh.store(4)
    own.turn()
    assert [4] == seen


def test_callback_may_close_its_neighbour_in_the_same_look() -> None:
    """Both words changed; the second owner is gone by the time its turn comes."""
    own = scripted()
    seen: list[str] = []
    first = own.engine.alloc_uvm_watcher(lambda *_: (seen.append("first"), second.close()))
    second = own.engine.alloc_uvm_watcher(lambda *_: seen.append("second"))
    first.store(1)
    second.store(1)
    own.turn(2)
    assert ["first"] == seen


def test_word_reused_in_the_same_look_does_not_inherit_the_change() -> None:
    """The new owner would be told of a value that was never written for it."""
    own = scripted()
    seen: list[tuple[int, int]] = []
    made = []

    def swap(*_: int) -> None:
        second.close()
        made.append(own.engine.alloc_uvm_watcher(lambda old, new: seen.append((old, new))))

    first = own.engine.alloc_uvm_watcher(swap)
    second = own.engine.alloc_uvm_watcher(print)
    first.store(1)
    second.store(9)
    own.turn(3)
    assert [] == seen
    assert 1 == len(made)


def test_watcher_closed_by_another_thread_between_look_and_call_is_skipped() -> None:
    """A lookup that fails there would stop the worker."""
    page = WatchPage()
    index = page.allocate(print)
    page.words[index] = 1
    look = page.look()
    page.free(index)
    assert [] == list(look)


def test_all_words_of_the_page_can_be_used_and_no_more() -> None:
    """A word handed out twice has two owners."""
    page = WatchPage()
    assert list(range(WORDS)) == sorted(page.allocate(print) for _ in range(WORDS))
    with pytest.raises(BusyError, match="all 512 words are in use; close some watchers"):
        page.allocate(print)
    page.free(17)
    assert 17 == page.allocate(print)


@pytest.mark.parametrize("value", [-1, 2**64])
def test_values_beyond_64_bits_are_refused(value) -> None:
    """Cut to 64 bits it would be another value."""
    word = scripted().engine.alloc_uvm_watcher(print)
    with pytest.raises(UsageError, match=rf"store: value={value} is outside 0 .. 2\*\*64 - 1"):
        word.store(value)

"""Exceptions that are not of an argument: a signal handler's, or that memory is short."""

from __future__ import annotations

import fractions
import warnings

import numpy as np
import pytest

import tep
from tep.base.checks import check_int, check_seconds
from tests.support.script import memory, scripted


class Alarm(Exception):
    """The exception of a program's SIGALRM handler."""


class Three(fractions.Fraction):
    """A number during whose conversion something else happens."""

    def __new__(cls, error: BaseException) -> Three:
        made = super().__new__(cls, 3)
        made.error = error
        return made

    def __float__(self) -> float:
        raise self.error

    def __index__(self) -> int:
        raise self.error


class Many:
    """An array during whose conversion something else happens."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __array__(self, *_: object, **__: object) -> object:
        raise self.error


@pytest.mark.parametrize("error", [Alarm("time is over"), MemoryError("short")], ids=repr)
def test_what_is_not_of_the_argument_reaches_the_caller(error) -> None:
    """A time-out by SIGALRM became "timeout_s=3 is not a number of seconds"."""
    with pytest.raises(type(error)):
        check_seconds("timeout_s", Three(error))
    with pytest.raises(type(error)):
        check_int("count", Three(error))
    with pytest.raises(type(error)):
        tep.Pages(Many(error))


@pytest.mark.parametrize("error", [TypeError("no"), ValueError("no"), ZeroDivisionError("no")])
def test_what_is_of_the_argument_is_refused_by_name(error) -> None:
    """A raw TypeError says neither which argument nor which value."""
    with pytest.raises(tep.UsageError, match="timeout_s=.* is not a number"):
        check_seconds("timeout_s", Three(error))
    with pytest.raises(tep.UsageError, match="count=.* is not an integer"):
        check_int("count", Three(error))
    with pytest.raises(tep.UsageError, match="no one-dimensional list"):
        tep.Pages(Many(error))


def test_plain_integers_are_times_of_any_size() -> None:
    """10**400 seconds are no float; they mean never, or too long."""
    assert 3.0 == check_seconds("t", 3)
    assert 1e9 == check_seconds("t", 10**400, never=True)
    for value in (10**400, -(10**400)):
        with pytest.raises(tep.UsageError, match="outside"):
            check_seconds("t", value)


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.uint64])
def test_lengths_in_numpys_integers_are_summed_without_a_warning(kind) -> None:
    """Three slices of 100 bytes as uint8 are 300 bytes; numpy warns that they are 44."""
    own, peer = scripted(), scripted(name="b")
    mr, _ = own.engine.reg_mr(memory(4096))
    _, desc = peer.engine.reg_mr(memory(4096))
    slices = [tep.ScatterDst(kind(100), 0, (desc, 200 * k)) for k in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sent = own.engine.submit_scatter(mr, slices)
    assert "300 bytes" in sent.describe()
    own.engine.close()

"""The limits of control messages: the longest that an engine may send is read by its peers."""

from __future__ import annotations

import msgspec
import pytest

from tep.control.messages import (
    NICS_MAX,
    PRUNED_MAX,
    REASON_MAX,
    WHY_MAX,
    Answer,
    ControlMessage,
    Ended,
    Failed,
    FenceOff,
    Missing,
    Ping,
    Pong,
    Prune,
    Renewed,
    Reopen,
    decode,
    encode,
)
from tep.errors import BadDescriptor

ADDRESS, IMM, COUNT, NAME, DAYS = b"x" * 256, 2**32 - 1, 2**63 - 1, "n" * 200, 10**18
LAST = NICS_MAX - 1

LARGEST = [
    FenceOff(COUNT, ADDRESS, LAST, (0, IMM)),
    Answer(COUNT, "y" * WHY_MAX, (0, COUNT), COUNT),
    Failed(COUNT, NAME, IMM, "y" * REASON_MAX),
    Missing(COUNT, COUNT, COUNT, NAME, "y" * WHY_MAX, COUNT, ((IMM, 1, COUNT, COUNT, COUNT, -1),)),
    Missing(0, 0, 0, "", "", 0, ((0, PRUNED_MAX, 0, 0, 0, COUNT),)),
    Ended(COUNT, ADDRESS, COUNT),
    Renewed(COUNT, ADDRESS, COUNT, COUNT, DAYS),
    Renewed(0, b"x", 0, 0, 1),
    Reopen(COUNT, ADDRESS, LAST),
    Prune(COUNT, ADDRESS, LAST, COUNT, ((0, 1, 1), (2, PRUNED_MAX - 2, COUNT), (IMM, 1, COUNT))),
    Prune(0, b"x", 0, 1, ((0, 1, 1), (1, 1, 2))),
]

TOO_LARGE = [
    Ping(-1),
    FenceOff(0, ADDRESS + b"x", 0, ()),
    FenceOff(0, b"", 0, ()),
    FenceOff(0, b"x", NICS_MAX, ()),
    FenceOff(0, b"x", 0, (IMM + 1,)),
    Answer(0, "y" * (WHY_MAX + 1), ()),
    Answer(0, "", (-1,)),
    Failed(0, NAME + "n", 0, ""),
    Failed(0, "", 0, "y" * (REASON_MAX + 1)),
    Renewed(0, b"x", 0, 0, DAYS + 1),
    Renewed(0, b"x", 0, 0, 0),
]

NIC = b"nic9"
GOLDEN = [
    (FenceOff(1, NIC, 2, (7, IMM)), "950101c4046e696339029207ceffffffff"),
    (Answer(1, "why", (5,), 3), "950201a3776879910503"),
    (Failed(1, "a", 7, "gone"), "950301a16107a4676f6e65"),
    (Ping(9), "920409"),
    (Pong(9), "920509"),
    (Ended(1, NIC, 4), "940801c4046e69633904"),
    (Renewed(1, NIC, 4, 2, 10**9), "960901c4046e6963390402ce3b9aca00"),
    (Reopen(1, NIC, 2), "940a01c4046e69633902"),
    (Prune(1, NIC, 2, 3, ((7, 2, 5),)), "960b01c4046e69633902039193070205"),
    (
        Missing(1, 2, 3, "a", "gone", 4, ((7, 2, 5, 4, 0, -1),)),
        "980c010203a161a4676f6e650491960702050400ff",
    ),
]


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=lambda x: type(x).__name__)
def test_golden_bytes(message: ControlMessage, golden: str) -> None:
    """Another release must read what this one says; another layout needs a new wire.VERSION."""
    assert golden == encode(message).hex()
    assert message == decode(bytes.fromhex(golden))


@pytest.mark.parametrize("message", LARGEST, ids=lambda message: type(message).__name__)
def test_the_largest_values_arrive(message) -> None:
    """A peer that refuses them is asked again and again, and never answers."""
    assert message == decode(encode(message))


@pytest.mark.parametrize("message", TOO_LARGE, ids=lambda message: type(message).__name__)
def test_larger_ones_are_refused(message) -> None:
    """A hostile peer chooses what engines keep for it."""
    data = encode(message)
    with pytest.raises(BadDescriptor, match="is no control message") as caught:
        decode(data)
    assert str(caught.value).startswith(f"{data[:16]!r}... ({len(data)} bytes)")


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ([(0, PRUNED_MAX, 1), (PRUNED_MAX, 1, 1)], "runs of 16385 immediates up to 16384"),
        ([(IMM, 2, 1)], "runs of 2 immediates up to 4294967296"),
        ([(5, 2, 1), (6, 1, 1)], "run at 6 begins before the end of the last, 7"),
        ([(0, 0, 1)], "Expected `int` >= 1"),
        ([(0, 1, 0)], "Expected `int` >= 1"),
        ([], "length >= 1"),
    ],
)
def test_runs_that_contradict_each_other_are_refused(runs, why) -> None:
    """One immediate of two runs would be subtracted twice, and rows count as lost for ever."""
    good = encode(Prune(0, b"x", 0, 1, ((0, 1, 1),)))
    with pytest.raises(BadDescriptor, match=why):
        decode(good[:-5] + msgspec.msgpack.encode(runs))

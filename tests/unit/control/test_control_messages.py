"""The limits of control messages: the longest that an engine may send is read by its peers."""

from __future__ import annotations

import msgspec
import pytest

from tep.base.errors import BadDescriptor
from tep.control.messages import (
    IMM_RUN_BYTES,
    NICS_MAX,
    PRUNED_MAX,
    VALUES_MAX,
    WHO_MAX,
    WHY_MAX,
    Answer,
    ControlMessage,
    Failed,
    FenceOff,
    Ping,
    Pong,
    Prune,
    Reopen,
    decode,
    encode,
)

ADDRESS, IMM, COUNT = b"x" * 256, 2**32 - 1, 2**63 - 1
WHO, WHY = "n" * WHO_MAX, "y" * WHY_MAX
LAST = NICS_MAX - 1

LARGEST = [
    FenceOff(COUNT, ADDRESS, LAST, (0, IMM)),
    Answer(COUNT, WHY, (0, COUNT), COUNT),
    Failed(COUNT, COUNT, WHO, WHY, ((0, 1), (2, PRUNED_MAX - 2), (IMM, 1))),
    Failed(0, 0, "", "", ((IMM + 1 - PRUNED_MAX, PRUNED_MAX),)),
    Failed(0, 0, "", "", tuple((2 * imm, 1) for imm in range(VALUES_MAX))),
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
    Answer(0, WHY + "y", ()),
    Answer(0, "", (-1,)),
    Failed(0, -1, "", "", ((0, 1),)),
    Failed(0, 0, WHO + "n", "", ((0, 1),)),
    Failed(0, 0, "", WHY + "y", ((0, 1),)),
]

NIC = b"nic9"
GOLDEN = [
    (FenceOff(1, NIC, 2, (7, IMM)), "950101c4046e696339029207ceffffffff"),
    (Answer(1, "why", (5,), 3), "950201a3776879910503"),
    (Failed(1, 4, "a", "gone", ((7, 2), (IMM, 1))), "96030104a161a4676f6e659292070292ceffffffff01"),
    (Ping(9), "920409"),
    (Pong(9), "920509"),
    (Reopen(1, NIC, 2), "940a01c4046e69633902"),
    (Prune(1, NIC, 2, 3, ((7, 2, 5),)), "960b01c4046e69633902039193070205"),
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


RUNS = [
    ([(0, PRUNED_MAX), (PRUNED_MAX, 1)], "runs of 16385 immediates up to 16384"),
    ([(IMM, 2)], "runs of 2 immediates up to 4294967296"),
    ([(5, 2), (6, 1)], "run at 6 begins before the end of the last, 7"),
    ([(6, 1), (5, 1)], "run at 5 begins before the end of the last, 7"),
    ([(0, 0)], "Expected `int` >= 1"),
    ([], "length >= 1"),
]


@pytest.mark.parametrize(("runs", "why"), RUNS)
def test_runs_that_contradict_each_other_are_refused(runs: list, why: str) -> None:
    """One immediate of two runs would be subtracted twice; a long run would burn them all."""
    prune = encode(Prune(0, b"x", 0, 1, ((0, 1, 1),)))
    with pytest.raises(BadDescriptor, match=why):
        decode(prune[:-5] + msgspec.msgpack.encode([(*run, 1) for run in runs]))
    failed = encode(Failed(0, 0, "", "", ((0, 1),)))
    with pytest.raises(BadDescriptor, match=why):
        decode(failed[:-4] + msgspec.msgpack.encode(runs))


def test_a_count_of_nothing_is_refused() -> None:
    """A run of it would take room, and say nothing."""
    good = encode(Prune(0, b"x", 0, 1, ((0, 1, 1),)))
    with pytest.raises(BadDescriptor, match="Expected `int` >= 1"):
        decode(good[:-5] + msgspec.msgpack.encode([(0, 1, 0)]))


def test_a_run_of_immediates_takes_no_more_than_it_is_said_to() -> None:
    """A notice with one run too many does not fit into a message, and is never sent."""
    longest = max(len(msgspec.msgpack.encode((IMM, n))) for n in (1, PRUNED_MAX))
    assert IMM_RUN_BYTES >= longest

"""The rings of the local backend: what one side puts in comes out at the other, once, in order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tep.backends.common import new_fence
from tep.backends.local import memory as rings
from tep.backends.local.memory import (
    ACKS,
    EVENTS,
    LANE_BYTES,
    LaneReader,
    LaneWriter,
    SharedMap,
    new_memfd,
)
from tests.support.effort import effort


@contextmanager
def lane() -> Iterator[tuple[LaneWriter, LaneReader]]:
    """Both ends of one lane, each with a mapping of its own."""
    writer = LaneWriter(new_fence())
    reader = LaneReader(writer.fd, new_fence())
    try:
        yield writer, reader
    finally:
        os.close(writer.fd)
        writer.close()
        reader.close()


def publish(writer: LaneWriter, reader: LaneReader) -> None:
    """Publish a ring, like the port's board."""
    reader.tail, reader.mtail = writer.tail, writer.mtail


IMMS = st.integers(0, 2**32 - 1)


@settings(max_examples=effort(30, 7))
@given(st.lists(st.tuples(st.integers(1, 6000), st.integers(0, 6000)), max_size=12), IMMS)
def test_events_come_out_once_and_in_order_whatever_the_bursts(bursts, first) -> None:
    """Bursts wrap around the ring's end at any place, on both sides, and never overtake it."""
    sent: list[int] = []
    got: list[int] = []
    with lane() as (writer, reader):
        for put, take in [*bursts, (1, EVENTS), (1, EVENTS)]:
            n = min(put, writer.room(look=True))
            imms = (np.arange(n, dtype=np.uint64) * 2_654_435_761 + first + len(sent)) % 2**32
            if n == 1:
                writer.put_event(int(imms[0]), 1)
            elif n:
                writer.put_events(imms.astype(np.uint32))
            sent += imms.tolist()
            publish(writer, reader)
            n = min(take, reader.tail - reader.head)
            if n > 3:
                imms, counts = (part.tolist() for part in reader.take_events(n))
            else:
                words = [reader.take_event() for _ in range(n)]
                imms, counts = [w & 2**32 - 1 for w in words], [w >> 32 for w in words]
            got += imms
            assert counts == [1] * n

    assert sent == got


def test_one_event_stands_for_a_burst_of_equal_immediates() -> None:
    """16,384 pages under one immediate must not cost 16,384 entries."""
    with lane() as (writer, reader):
        writer.put_event(2**32 - 1, 1024)
        publish(writer, reader)
        word = reader.take_event()

    assert (2**32 - 1, 1024) == (word & 2**32 - 1, word >> 32)


def test_a_full_ring_has_no_room_until_something_is_taken() -> None:
    """An event too many would overwrite the oldest: an immediate lost, and one doubled."""
    with lane() as (writer, reader):
        writer.put_events(np.arange(EVENTS, dtype=np.uint32))
        publish(writer, reader)
        assert 0 == writer.room()
        assert 0 == reader.take_event() & 2**32 - 1
        assert 1 == writer.room()


@settings(max_examples=effort(40, 10))
@given(st.lists(st.tuples(st.binary(max_size=200), st.integers(1, 900)), max_size=40))
def test_messages_come_out_whole_and_are_acknowledged_in_order(script) -> None:
    """Messages of any length wrap anywhere; each is acknowledged once, with its own status."""
    sent: list[bytes] = []
    got: list[bytes] = []
    acks: list[int] = []
    with lane() as (writer, reader):
        for k, (payload, times) in enumerate(script):
            message = payload * times
            if writer.put_message(message):
                sent.append(message)
            publish(writer, reader)
            if k % 3 == 0:
                while (nbytes := reader.next_message()) is not None:
                    into = bytearray(nbytes)
                    reader.take_message(nbytes, into, len(got) % 7)
                    got.append(bytes(into))
            acks += writer.take_acks()
        publish(writer, reader)
        while (nbytes := reader.next_message()) is not None:
            into = bytearray(nbytes)
            reader.take_message(nbytes, into, len(got) % 7)
            got.append(bytes(into))
        acks += writer.take_acks()

    assert sent == got
    assert [k % 7 for k in range(len(sent))] == acks


def test_messages_find_no_room_beyond_the_ring_or_the_acknowledgements() -> None:
    """A message over an unread one is garbage for its reader; an ack over an ack likewise."""
    with lane() as (writer, reader):
        for _ in range(ACKS):
            assert writer.put_message(b"x")
        assert not writer.put_message(b"x"), "all acknowledgements are on their way"
        publish(writer, reader)
        assert reader.next_message() == 1
        reader.take_message(1, bytearray(1), 0)
        assert [0] == writer.take_acks()
        big = bytes(rings.MESSAGE_BYTES_MAX)
        assert writer.put_message(big)
    with lane() as (writer, _):
        taken = [writer.put_message(bytes(rings.MESSAGE_BYTES_MAX)) for _ in range(5)]
    assert taken[:3] == [True] * 3
    assert not taken[-1]


def test_a_bell_is_asked_for_once_and_rung_once() -> None:
    """A sender that waits for room sleeps until the receiver says that there is some."""
    with lane() as (writer, reader):
        assert not reader.wanted()
        writer.want()
        assert reader.wanted()
        assert not reader.wanted()


def test_memory_that_could_shrink_is_not_mapped() -> None:
    """Touching a mapping beyond its file's end kills the process that touches it."""
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, LANE_BYTES)
    with pytest.raises(OSError, match="with seals 0x0"):
        LaneReader(fd, new_fence())
    os.close(fd)
    small = new_memfd("small", 4096)
    with pytest.raises(OSError, match="a shared memory of 4096 bytes"):
        SharedMap(small, LANE_BYTES)
    os.close(small)


def test_the_table_of_the_lane_is_what_the_code_does() -> None:
    """The layout is a protocol between two processes; its page is what a reader trusts."""
    with lane() as (writer, _):
        words = writer.words
        writer.put_event(7, 3)
        writer.want()
        words[rings.COPYING] = 1
        assert (3 << 32 | 7) == words[512]
        assert writer.put_message(b"hello")
        assert 5 == words[8704]
        assert b"hello\0\0\0" == bytes(words[8705:8706])
        assert (1, 1) == (words[8], words[32])
        assert 8 * 8704 + 2**20 == LANE_BYTES == 8 * len(words)

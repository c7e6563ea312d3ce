"""Request ids of the backend `efa`: 16 bits, handed out in turn, never one that is in flight."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tep.backends.base import WriteBatch
from tep.backends.efa.domain import Slots
from tep.backends.libfabric.slots import Ticket

WINDOW = 24


class _Way:
    """Keeps the ids that it is given."""

    def __init__(self):
        self.ids = []

    def write(self, n, ids, *_):
        assert n == len(ids)
        self.ids += ids.tolist()

    def write_one(self, number, *_):
        self.ids.append(number)


def _ticket(n):
    peer = SimpleNamespace(number=1, open=0, adrift=0, heard=False)
    region = SimpleNamespace(desc=5, open=0)
    column = np.arange(n, dtype=np.uint64)
    return Ticket(WriteBatch(n, 0, column, 1, column, 2, 8, None, 7), 0, peer, region, 0.0)


@pytest.mark.slow
@settings(max_examples=80)
@given(data=st.data())
def test_no_id_is_given_twice_at_a_time(data):
    """A completion of an id that two rows have ends the wrong one, and frees its source early."""
    way = _Way()
    slots = Slots(WINDOW, way, SimpleNamespace(place=lambda _number: None))
    live: dict[int, Ticket] = {}
    given_up: set[int] = set()
    for _ in range(data.draw(st.integers(1, 60))):
        way.ids.clear()
        n = data.draw(st.integers(0, slots.room))
        if n:
            ticket = _ticket(n)
            if n == 1 and data.draw(st.booleans()):
                taken = slots.post_row(None, None, ticket, 0, 0, 2, 8, None)
            else:
                taken = slots.post(None, None, ticket, n)
            assert 1 <= taken == len(way.ids) == len(set(way.ids))
            assert not set(way.ids) & (live.keys() | given_up)
            assert list(ticket.slots) == way.ids
            live |= dict.fromkeys(way.ids, ticket)
        if live and data.draw(st.integers(0, 9)) == 0:  # a peer is over: its rows are given up
            ticket = data.draw(st.sampled_from(list(live.values())))
            mine = {number for number, one in live.items() if one is ticket}
            rows = [row for row, number in enumerate(ticket.slots) if number in mine]
            assert slots.give_up(ticket, gone=False) == rows
            given_up |= mine
            for number in mine:
                del live[number]
        back = data.draw(st.sets(st.sampled_from(sorted(live | dict.fromkeys(given_up)) or [0])))
        back &= live.keys() | given_up
        if not back:
            continue
        if data.draw(st.booleans()):
            order = data.draw(st.permutations(sorted(back)))
            found = slots.give_back_many(np.array(order, np.uint16))
            assert sum(found.values()) == len(back & live.keys())
        else:
            for number in sorted(back):
                failed = slots.take_failed(64 * number)
                if number in live:
                    ticket = live[number]
                    assert failed == (ticket, list(ticket.slots).index(number))
                else:
                    assert failed is None
        for number in back:
            live.pop(number, None)
        given_up -= back
        assert len(live) == slots.open
        assert len(given_up) == slots.adrift
    slots._mark()
    assert set(np.flatnonzero(slots._owner).tolist()) == live.keys() | given_up

"""Credit and ECN on the timing fabric: against an event for each quantum, and closed forms."""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tep.base.errors import UsageError
from tep.sim.machines import Network
from tep.sim.queues import Rate
from tests.unit.sim.test_timing import POSTS
from tests.unit.sim.test_timing_paths import landings
from tests.unit.sim.timing_seam import PLAIN, US, _ps, held, latency_of, of, ready_rows, slow_model

MiB = 1 << 20
FULL = 1 << 20
ECN = {"ecn_bytes": 1, "ecn_every_ps": 50 * US, "ecn_recover_ps": 55 * US, "ecn_grow_bps": 10**9}
CREDITS = st.fixed_dictionaries({"credit_bytes": st.sampled_from([1, 100_000, 300_000, 1 << 40])})
MARKED = st.fixed_dictionaries(
    {
        "ecn_bytes": st.sampled_from([1, 65_536, 400_000]),
        "ecn_every_ps": st.sampled_from([0, 5 * US, 50 * US]),
        "ecn_recover_ps": st.sampled_from([1 * US, 55 * US]),
        "ecn_grow_bps": st.sampled_from([10**9, 10**11]),
        "credit_bytes": st.sampled_from([0, 200_000]),
    }
)


class Sender:
    """A NIC that holds its queue pairs back, one event after the other."""

    def __init__(self, machines, source, rows) -> None:
        self.profile = profile = of(machines, source)
        self.free, self.turn = 0, len(rows)
        self.waiting, self.place = {}, {}
        for place, (ready, target, nbytes, number) in enumerate(rows):
            left, first = nbytes, True
            while True:
                size = min(left, profile.quantum_bytes)
                left -= size
                hold = held(of(machines, target), size, first)
                quantum = (ready, held(profile, size, first), number, left == 0, size, hold)
                self.waiting.setdefault(target, []).append(quantum)
                self.place.setdefault(target, place)
                first = False
                if not left:
                    break
        zero = dict.fromkeys(self.waiting, 0)
        self.ended, self.freed, self.paced = dict.fromkeys(zero, -1), {**zero}, {**zero}
        self.open, self.since, self.steps = {**zero}, {**zero}, {**zero}
        self.rate, self.goal = dict.fromkeys(zero, FULL), dict.fromkeys(zero, FULL)

    def next(self):
        """(start, target) of the next quantum, if nothing is heard before; None: none may leave."""
        found = []
        for target, queue in self.waiting.items():
            if not queue or self.is_held(target):
                continue
            head = max(queue[0][0], self.paced[target], self.freed[target])
            joined = max(head, self.ended[target])
            found.append((joined, head <= self.ended[target], self.place[target], target))
        return (max(min(found)[0], self.free), min(found)[3]) if found else None

    def is_held(self, target) -> bool:
        credit, queue, held = self.profile.credit_bytes, self.waiting[target], self.open[target]
        return bool(queue and credit and held and held + queue[0][4] > credit)

    def send(self, start, target):
        quantum = self.waiting[target].pop(0)
        self.recover(target, start)
        self.paced[target] = start + quantum[1] * FULL // self.rate[target]
        self.free = self.ended[target] = start + quantum[1]
        self.open[target] += quantum[4]
        self.turn += 1
        self.place[target] = self.turn
        return quantum

    def hear(self, now, target, size, marked) -> None:
        if self.is_held(target):
            self.freed[target] = now
        self.open[target] -= size
        if marked:
            self.recover(target, now)
            self.goal[target] = self.rate[target]
            self.rate[target] = max(FULL >> 10, self.rate[target] // 2)
            self.steps[target], self.since[target] = 0, now

    def recover(self, target, now) -> None:
        grow = self.profile.ecn_grow_bps * FULL // self.profile.wire_bps
        if self.rate[target] == FULL:
            return
        while self.since[target] + self.profile.ecn_recover_ps <= now:
            self.since[target] += self.profile.ecn_recover_ps
            self.steps[target] += 1
            if self.steps[target] > 5:
                self.goal[target] = min(FULL, self.goal[target] + grow)
            self.rate[target] = (self.rate[target] + self.goal[target] + 1) // 2


def slow_pacing(machines, posts) -> list[int]:
    """When rows land: all NICs in one loop, always the earliest thing that happens anywhere."""
    rows = ready_rows(machines, posts)
    senders = [Sender(machines, k, rows.get(k, [])) for k in range(4)]
    landed = [0] * sum(map(len, rows.values()))
    news, wire, free, told = [], [], {}, {}
    while True:
        starts = [(found[0], k, found[1]) for k, one in enumerate(senders) if (found := one.next())]
        first = min(starts, default=(1 << 62, 0, 0))
        if wire and wire[0][0] <= min([first[0], *(one[0] for one in news[:1])]):
            arrive, k, _, target, work, hold, row, last, size = heappop(wire)
            profile = of(machines, target)
            done = max(arrive + work, max(arrive, free.get(target, arrive)) + hold)
            free[target] = max(arrive, free.get(target, arrive)) + hold
            waits = done - arrive - max(work, hold) > _ps(profile.ecn_bytes, profile.wire_bps)
            due = done >= told.get((k, target), -(1 << 60)) + profile.ecn_every_ps
            marked = bool(profile.ecn_bytes and due and waits)
            if marked:
                told[k, target] = done
            back = latency_of(machines, target, k)
            heappush(news, (done + back, k, target, size, marked))
            if last:
                landed[row] = done
        elif news and news[0][0] <= first[0]:
            now, source, *said = heappop(news)
            senders[source].hear(now, *said)
        elif starts:
            start, k, target = first
            _, work, row, last, size, hold = senders[k].send(start, target)
            arrive = start + latency_of(machines, k, target)
            heappush(wire, (arrive, k, start, target, work, hold, row, last, size))
        else:
            return landed


@given(POSTS, st.one_of(CREDITS, MARKED))
def test_lands_when_the_slow_model_says(posts, knobs) -> None:
    """Plans made up to one latency ahead must equal an event for each quantum."""
    profile = replace(PLAIN, **knobs)
    columns = [(t, who, [r[0] for r in rows], [r[1] for r in rows]) for t, who, rows in posts]

    assert dict(enumerate(slow_pacing(profile, sorted(columns)))) == landings(None, posts, profile)


@given(POSTS, st.booleans())
@example([(149, 1, [(3, 70_000)]), (12_510_685, 1, [(0, 70_000)])], True)
def test_who_is_never_held_back_sends_as_ever(posts, far) -> None:
    """With more credit than bytes the plan must equal the plain NIC's."""
    profile = replace(PLAIN, credit_bytes=1 << 50)
    network = Network(leaf_nodes=2, uplink_bps=50 * 10**9) if far else None
    columns = [(t, who, [r[0] for r in rows], [r[1] for r in rows]) for t, who, rows in posts]
    expected = slow_model(PLAIN, sorted(columns), network)

    assert dict(enumerate(expected)) == landings(network, posts, profile)


@pytest.mark.parametrize("quanta", [1, 2, 4])
def test_a_lone_flow_with_little_credit_sends_that_much_a_round_trip(quanta) -> None:
    """Closed form: every quantum waits for the credit of the one `quanta` before it."""
    profile = replace(PLAIN, credit_bytes=quanta * PLAIN.quantum_bytes)
    nbytes, size = 64 * PLAIN.quantum_bytes, PLAIN.quantum_bytes
    work = int(Rate(profile.wire_bps).ps(size))
    turn = max(work + 2 * profile.latency_ps, quanta * work)
    plain = landings(None, [(0, 0, [(1, size)])])[0]

    found = landings(None, [(0, 0, [(1, nbytes)])], profile)[0]
    first = plain + _ps(profile.fill_bytes, profile.dma_bps) - _ps(size, profile.dma_bps)
    full, rest = divmod(63, quanta)
    assert pytest.approx(first + full * turn + rest * work, abs=profile.op_ps + 1_000_000) == found


def test_marked_senders_leave_room_at_an_uplink_too() -> None:
    """Two flows into one port: without ECN both NICs send at full rate, with it they share."""
    posts = [(0, 0, [(2, 32 * MiB)]), (0, 1, [(2, 32 * MiB)]), (400 * US, 3, [(2, 4096)])]
    for network in (None, Network(leaf_nodes=2, uplink_bps=2 * PLAIN.wire_bps)):
        plain = landings(network, posts)
        paced = landings(network, posts, replace(PLAIN, **ECN))
        wire_ps = 64 * MiB * 8e12 / PLAIN.wire_bps
        # The late row finds a queue of half of what was sent, and with ECN a short one.
        assert plain[2] - 400 * US > 350 * US
        assert paced[2] - 400 * US < 100 * US
        assert max(paced.values()) < 1.6 * wire_ps


def test_a_rate_that_never_comes_back_is_refused() -> None:
    """One mark would halve a flow for good."""
    with pytest.raises(UsageError, match="would never come back"):
        replace(PLAIN, ecn_bytes=1)

"""A slow NIC on the timing fabric: what it delays, and what it must not."""

from __future__ import annotations

import pytest

from tep.base.errors import UsageError
from tests.unit.sim.timing_seam import PLAIN, Seam, watch_landings

MiB = 1 << 20
WIRE_PS = MiB * 8e12 / PLAIN.wire_bps  # one MiB at the wire's rate


def landings(slow: dict[int, float], posts: list[tuple[int, int]]) -> list[int]:
    """When one MiB of each (from, to) lands; all posted at once, in this order."""
    seam = Seam(PLAIN, 4)
    landed = watch_landings(seam.owners)
    for number, times in slow.items():
        seam.fabric.slow_down(f"n{number}", 0, times)
    for source, target in posts:
        seam.owners[source].post([seam.owners[target]], [MiB])
    seam.run()
    return [landed[row] for row in range(len(posts))]


@pytest.mark.parametrize("which", [0, 1])
def test_a_slow_end_stretches_the_wire_time_and_nothing_else(which) -> None:
    """A lone write does not show which end is slow; latency and CPU do not change."""
    (sound,), (slow,) = landings({}, [(0, 1)]), landings({which: 3.0}, [(0, 1)])

    assert 2 * WIRE_PS == pytest.approx(slow - sound, rel=1e-4)


def test_of_two_slow_ends_the_slower_counts() -> None:
    """Both ends work at the same time: their delays do not add up."""
    (both,), (one,) = landings({0: 3.0, 1: 2.0}, [(0, 1)]), landings({0: 3.0}, [(0, 1)])

    assert one == pytest.approx(both, rel=1e-4)


def test_a_slow_sender_does_not_hold_up_its_neighbours_at_the_receiver() -> None:
    """The receiver has time for others while a slow sender's bytes trickle in."""
    slow, neighbour = landings({0: 8.0}, [(0, 2), (1, 2)])
    _, alone = landings({}, [(0, 2), (1, 2)])

    assert neighbour <= alone + WIRE_PS / 8
    assert slow > neighbour + 5 * WIRE_PS


def test_a_slow_receiver_holds_up_all_who_write_to_it_and_no_others() -> None:
    """Incast at a bad cable is what a straggler looks like from outside."""
    posts = [(0, 2), (1, 2), (2, 3)]
    sound, slow = landings({}, posts), landings({2: 4.0}, posts)

    assert max(slow[:2]) - max(sound[:2]) == pytest.approx(6 * WIRE_PS, rel=1e-3)
    assert slow[2] - sound[2] == pytest.approx(3 * WIRE_PS, rel=1e-3)  # it sends slowly, too


def test_times_one_changes_nothing() -> None:
    """A NIC that is made sound again must meet the fast path's times to the picosecond."""
    posts = [(0, 1), (2, 1), (1, 3)]

    assert landings({}, posts) == landings({0: 1.0, 1: 1.0}, posts)


def test_a_nic_that_is_not_there_cannot_be_slow() -> None:
    """A misspelt name would leave the cluster sound, and the study wrong."""
    fabric = Seam(PLAIN, 2).fabric
    for name, index, times in (("n7", 0, 2.0), ("n0", 1, 2.0), ("n0", 0, 0.0)):
        with pytest.raises(UsageError, match="slow_down"):
            fabric.slow_down(name, index, times)

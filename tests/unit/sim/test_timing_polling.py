"""A worker that pays for polling, against a loop."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tep.sim.queues import Rate
from tests.unit.sim.timing_seam import PLAIN, Seam, watch_landings


def refill(profile, rows: int, nbytes: int) -> list[int]:
    """When rows land whose sender posts the next ones as soon as it learns that there is room."""
    seam = Seam(profile, 2)
    a, b = seam.owners
    landed = watch_landings(seam.owners)
    left = [rows]

    def turn() -> None:
        a.poll()
        while left[0] and (taken := a.post([b] * left[0], [nbytes] * left[0])):
            left[0] -= taken

    a.nics[0].set_waker(turn)
    seam.env.call_at(0, lambda _: turn())
    seam.run()
    return [landed[number] for number in range(rows)]


@given(
    st.integers(1, 20),
    st.sampled_from([0, 1, 4096, 65_536]),
    st.sampled_from([0, 1, 250_000, 9_000_000]),
)
def test_a_completion_takes_its_cpu(rows, nbytes, poll) -> None:
    """The loop: a row is posted once the one before is acknowledged, and that was polled."""
    profile = replace(PLAIN, sq_depth=1, poll_ps=poll)
    wire, dma = Rate(profile.wire_bps), Rate(profile.dma_bps)
    service = max(int(wire.ps(nbytes)), profile.op_ps + int(dma.ps(nbytes)))
    cpu = free = 0
    expected: list[int] = []
    for k in range(rows):
        if k:
            cpu = max(cpu, expected[-1] + profile.ack_ps) + poll
        cpu += profile.post_first_ps
        free = max(free, cpu + int(dma.ps(min(nbytes, profile.fill_bytes)))) + service
        expected.append(free + profile.latency_ps)

    assert expected == refill(profile, rows, nbytes)

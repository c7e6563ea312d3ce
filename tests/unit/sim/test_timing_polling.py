"""A worker that pays for the immediates that it takes."""

from __future__ import annotations

from dataclasses import replace

from tep.backends.base import Kind
from tests.unit.sim.timing_seam import PLAIN, Seam


def test_an_immediate_puts_off_what_the_worker_has_still_to_post() -> None:
    """Where each rank hears from all others, these times are what its own rows wait for."""
    posted = {}
    for poll in (0, 700_000):
        seam = Seam(replace(PLAIN, poll_ps=poll, post_next_ps=10**7), 2)
        a, b = seam.owners
        b.nics[0].set_waker(lambda: None)  # it looks once all are there
        a.post([b] * 100, [0] * 100)
        seam.env.call_at(2 * 10**9, lambda _, a=a, b=b: b.post([a] * 50, [0] * 50, ctx=2))
        seam.env.call_at(2 * 10**9, lambda _, b=b: b.poll())
        seam.env.call_at(2 * 10**9 + 1, lambda _, a=a, b=b: b.post([a] * 50, [0] * 50, ctx=3))
        seam.run()
        posted[poll] = a.of(Kind.IMM)[-1][0]

    assert 101 * 700_000 == posted[700_000] - posted[0], "a's own immediate is one more"


def test_an_immediate_costs_an_idle_workers_rows_nothing() -> None:
    """It was taken before it was seen: charged again, what it lets start would start late."""
    posted = {}
    for poll in (0, 700_000):
        seam = Seam(replace(PLAIN, poll_ps=poll), 2)
        a, b = seam.owners
        b.nics[0].set_waker(lambda: None)
        a.post([b] * 100, [0] * 100)
        seam.env.call_at(10**9, lambda _, b=b: b.poll())
        seam.env.call_at(10**9, lambda _, a=a, b=b: b.post([a], [0], ctx=2))
        seam.run()
        posted[poll] = a.of(Kind.IMM)[0][0]

    assert 700_000 == posted[700_000] - posted[0], "a's own immediate"


def test_immediates_are_taken_one_behind_the_other() -> None:
    """A hundred that land at once are there for the program as fast as one worker takes them."""
    seen = {}
    for poll in (0, 700_000):
        seam = Seam(replace(PLAIN, poll_ps=poll), 2)
        a, b = seam.owners
        a.post([b] * 100, [0] * 100)
        seam.run()
        seen[poll] = b.of(Kind.IMM)[-1][0]

    assert 85 * 700_000 < seen[700_000] - seen[0] < 100 * 700_000

"""A search that is spread over workers finds what one loop finds, whoever dies."""

from __future__ import annotations

import pickle
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tep.base.errors import RendezvousError, UsageError, WaitTimeout
from tep.rendezvous import Place, join
from tep.testing import spreading
from tep.testing.spreading import (
    Finding,
    Judged,
    ProtocolJudge,
    Share,
    confirm,
    judge_share,
    search,
    spread,
)
from tests.support.effort import effort

FIRST = 1000
TOKEN = "t"  # noqa: S105  # no secret


class Bad:
    """A judge: these seeds break a promise, and each run is written down."""

    def __init__(self, seeds) -> None:
        self.seeds = frozenset(seeds)

    def __call__(self, seed, row_log=None):
        return f"broken by {seed}" if seed in self.seeds else None


class FakePool:
    """Workers that end in any order, answer early, and die before or after they have judged."""

    def __init__(self, draw, judge, most, losses) -> None:
        self.draw, self.judge, self.most, self.losses = draw, judge, most, losses
        self.open: list[Share] = []
        self.taken: list[tuple[int, int]] = []
        self.deaths: dict[int, int] = {}

    def room(self):
        return self.draw(st.integers(1, 5))

    def start(self, share):
        assert share not in self.open
        self.open.append(share)

    def ended(self, timeout_s):
        ended = self.draw(st.lists(st.sampled_from(self.open), min_size=1, unique=True))
        return [(share, self._end(share)) for share in ended]

    def _end(self, share):
        self.open.remove(share)
        alone = share.count == 1
        if self.deaths.get(share.first, 0) < self.losses and self.draw(st.booleans()):
            self.deaths[share.first] = self.deaths.get(share.first, 0) + alone
            return "the worker died"
        stop = self.draw(st.integers(1, share.count))
        left = iter(range(1, stop))
        answer = judge_share(self.judge, share, self.most, lambda: next(left, None) is None)
        assert 1 <= answer.count <= stop
        self.taken.append((share.first, share.first + answer.count))
        return answer

    def drop(self, share):
        self.open.remove(share)


@given(st.data())
def test_a_spread_search_finds_what_one_loop_finds(data) -> None:
    """A seed that nobody judged again after a worker's death would be a bug that nobody sees."""
    runs = data.draw(st.integers(0, 120), "runs")
    bad = data.draw(st.sets(st.integers(FIRST, FIRST + 130), max_size=12), "bad")
    most = data.draw(st.integers(1, 5), "most")
    judge, seeds = Bad(bad), range(FIRST, FIRST + runs)
    pool = FakePool(data.draw, judge, most, spreading.LOSSES_MAX - 1)
    moved: list[int] = []

    found = spread(seeds, pool, most=most, judged=moved.append)

    alone = [Finding(seed, f"broken by {seed}") for seed in sorted(bad) if seed in seeds][:most]
    assert alone == list(found.findings) == list(search(judge, seeds, most=most)[0])
    once = [seed for first, stop in pool.taken for seed in range(first, stop)]
    end = alone[-1].seed + 1 if len(alone) == most else seeds.stop
    assert len(set(once)) == len(once), "a seed was judged and taken in twice"
    assert set(range(FIRST, end)) <= set(once) <= set(seeds)
    assert len(once) == sum(moved)
    assert not pool.open, "workers still judge what nobody waits for"


class Deaf:
    """Workers that all die, or never answer."""

    def __init__(self, answer) -> None:
        self.answer, self.open = answer, []

    def room(self):
        return 2

    def start(self, share):
        self.open.append(share)

    def ended(self, timeout_s):
        if self.answer is None:
            return []
        return [(self.open.pop(0), self.answer)]

    def drop(self, share):
        self.open.remove(share)


def test_nobody_answers() -> None:
    """A cluster without workers must end a search, not hang it."""
    pool = Deaf(None)

    with pytest.raises(
        WaitTimeout, match=r"2 shares are open: seeds 0 to 1, seeds 2 to 3; found so far"
    ):
        spread(range(18), pool, timeout_s=0.5)
    assert not pool.open


def test_a_seed_that_kills_its_workers() -> None:
    """It is named, so that somebody can run it alone, and does not kill workers for ever."""
    with pytest.raises(RendezvousError, match=r"5 workers .* seed 0, the last because: killed"):
        spread(range(40), Deaf("killed"))


def test_findings_are_confirmed() -> None:
    """A finding that cannot be played again here would send somebody after a bug that is none."""
    assert [Finding(3, "broken by 3")] == confirm(Bad({3}), [Finding(3, "there")], range(9))[0]
    with pytest.raises(UsageError, match="seed 4 breaks no promise in this process"):
        confirm(Bad(()), [Finding(4, "there")], range(9))


def test_judges_travel(tmp_path, monkeypatch) -> None:
    """A protocol goes to the workers as a place, since they load it from a copy of its folder."""
    source = "async def wrong(cluster):\n    assert cluster.now_us < 0, 'it is late'\n"
    tmp_path.joinpath("my_protocol.py").write_text(source, encoding="utf-8")
    judge = ProtocolJudge(f"{tmp_path}/my_protocol.py:wrong", nics=(1, 2), faults="order")
    moved, folder = judge.moved()
    monkeypatch.chdir(tmp_path)
    there = pickle.loads(pickle.dumps(moved))  # noqa: S301  # our own

    assert (tmp_path, "my_protocol.py:wrong") == (folder, there.place)
    assert judge.case(5) == there.case(5)
    assert judge(5) == there(5)
    assert "it is late" in there(5)
    with pytest.raises(UsageError, match=r"FILE.py:NAME"):
        ProtocolJudge("my_protocol.py")


def test_one_share_is_judged_as_a_search_does() -> None:
    """Both ways to go through the seeds of a protocol end with the same rows."""
    example = Path(__file__).parents[1] / "example" / "puller.py"
    judge = ProtocolJudge(f"{example}:pull", faults="order control restarts")

    assert Judged(3, ()) == judge_share(judge, Share(7, 3), 1)
    found, record = search(judge, range(7, 10))
    assert not found
    assert record.digest() == confirm(judge, (), range(7, 10))[1].digest()


@given(
    bad=st.sets(st.integers(FIRST, FIRST + 40), max_size=8),
    n=st.integers(1, 40),
    ranks=st.integers(1, 4),
    most=st.integers(1, 3),
)
@settings(max_examples=effort(12, 4), deadline=None)
def test_ranks_of_torchrun_find_what_one_loop_finds(bad, n, ranks, most) -> None:
    """The first finding may not be the fastest rank's, and a rank without seeds keeps up."""
    seeds = range(FIRST, FIRST + n)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def rank(number: int) -> list[Finding]:
        place = Place(rank=number, size=ranks, port=port, token=TOKEN)
        with join(place, listener=None if number else listener) as group:
            found, _ = search(Bad(bad), seeds, group=group, most=most, timeout_s=30.0)
            return list(found)

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(rank, range(ranks)))

    alone, _ = search(Bad(bad), seeds, most=most)
    assert [list(alone)] * ranks == found

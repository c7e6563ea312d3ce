"""A search that is spread over workers finds what one loop finds."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tep.base.errors import UsageError
from tep.sim.row_log import RowLog
from tep.testing.spreading import Finding, ProtocolJudge, search
from tests.support.effort import effort

FIRST = 1000


class Bad:
    """A judge: these seeds break a promise, and each run is written down."""

    def __init__(self, seeds) -> None:
        self.seeds = frozenset(seeds)

    def __call__(self, seed, row_log=None):
        return f"broken by {seed}" if seed in self.seeds else None


def test_findings_are_confirmed() -> None:
    """A finding that cannot be played again here would send somebody after a bug that is none."""

    def elsewhere(_work, shares, ended) -> None:
        for share in shares:
            ended(share, [Finding(3, "there")] if 3 in share else [])

    assert [Finding(3, "broken by 3")] == search(Bad({3}), range(9), calls=elsewhere)[0]
    with pytest.raises(UsageError, match="seed 3 breaks no promise in this process"):
        search(Bad(()), range(9), calls=elsewhere)


def test_judges_travel(tmp_path, monkeypatch) -> None:
    """A protocol goes to the workers as a place, since they load it from a copy of its folder."""
    source = "async def wrong(cluster):\n    assert cluster.now_us < 0, 'it is late'\n"
    tmp_path.joinpath("my_protocol.py").write_text(source, encoding="utf-8")
    judge = ProtocolJudge(f"{tmp_path}/my_protocol.py:wrong", nics=(1, 2), faults="order")
    monkeypatch.chdir(tmp_path)
    there = pickle.loads(pickle.dumps(judge))  # noqa: S301  # our own

    assert (tmp_path, "my_protocol.py:wrong") == (judge.folder, there.place)
    assert judge.case(5) == there.case(5)
    assert judge(5) == there(5)
    assert "it is late" in there(5)
    with pytest.raises(UsageError, match=r"FILE.py:NAME"):
        ProtocolJudge("my_protocol.py")


def test_a_search_without_findings_ends_with_the_rows_of_the_last_seed() -> None:
    """A search on a cluster plays that seed again here, and must end with the same rows."""
    example = Path(__file__).parents[1] / "example" / "puller.py"
    judge = ProtocolJudge(f"{example}:pull", faults="order control restarts")

    found, record = search(judge, range(7, 10))
    last = RowLog()
    judge(9, last)
    assert not found
    assert record.digest() == last.digest()


@given(
    bad=st.sets(st.integers(FIRST, FIRST + 400), max_size=8),
    n=st.integers(1, 400),
    most=st.integers(1, 3),
    data=st.data(),
)
@settings(max_examples=effort(50, 15), deadline=None)
def test_the_findings_are_those_with_the_lowest_seeds(bad, n, most, data) -> None:
    """The first finding may not be that of the fastest worker, and a share may take longest."""
    seeds = range(FIRST, FIRST + n)

    def mixed(work, shares, ended) -> None:
        for share in data.draw(st.permutations(shares)):
            if ended(share, work(share)):
                return

    found, _ = search(Bad(bad), seeds, most=most, calls=mixed)
    assert [Finding(k, f"broken by {k}") for k in sorted(bad & {*seeds})[:most]] == found
    assert found == search(Bad(bad), seeds, most=most)[0]

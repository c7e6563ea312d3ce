"""A search that is spread over ranks finds what one loop finds."""

from __future__ import annotations

import pickle
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tep.base.errors import UsageError
from tep.rendezvous import Place, join
from tep.testing.spreading import Finding, ProtocolJudge, confirm, search
from tests.support.effort import effort

FIRST = 1000
TOKEN = "t"  # noqa: S105  # no secret


class Bad:
    """A judge: these seeds break a promise, and each run is written down."""

    def __init__(self, seeds) -> None:
        self.seeds = frozenset(seeds)

    def __call__(self, seed, row_log=None):
        return f"broken by {seed}" if seed in self.seeds else None


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


def test_a_search_without_findings_ends_with_the_rows_of_the_last_seed() -> None:
    """A search on a cluster plays that seed again here, and must end with the same rows."""
    example = Path(__file__).parents[1] / "example" / "puller.py"
    judge = ProtocolJudge(f"{example}:pull", faults="order control restarts")

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

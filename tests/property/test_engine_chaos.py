"""Faults that a search of drawn runs found in the engine, each as its smallest run."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tep.sim import faults
from tep.sim.faults import Chaos, Clog, Cut, KillNic, Revoke
from tests.support.effort import effort
from tests.world.oracle import run_scenario
from tests.world.scenario import Scenario
from tests.world.specs import ReadSpec, TransferSpec


def test_scenario_prints_as_itself() -> None:
    """A failing scenario is reported as a literal; one that reads otherwise replays another run."""
    records = {"Scenario": Scenario, "TransferSpec": TransferSpec, "ReadSpec": ReadSpec}
    for seed in range(effort(400, 40)):
        scenario = Scenario.draw(seed)
        assert scenario == eval(repr(scenario), vars(faults) | records)  # noqa: S307  # our own


@pytest.mark.parametrize("first", [{"reads": (ReadSpec(kind="paged", pages=2),)}, {"messages": 1}])
def test_writes_that_another_error_flushed_are_made_good(first: dict[str, Any]) -> None:
    """One path is cut, another lives. A read or message there had no answer, and the writes failed.

    Found by a search of drawn runs. The connection flushes what is behind the error.
    """
    tame = Chaos(
        ordered=True, flush_on_error=True, reorder_ps=0, fragments=1, poll_delay_ps=10_000, kept=()
    )
    for here in range(2):
        run_scenario(
            Scenario(
                nics=(2, 1, 1),
                transfers=(TransferSpec(kind="paged", pages=2, start_ps=3),),
                chaos=tame,
                faults=((1, Cut("b", 0, peer="a", peer_nic=here)),),
                **first,
            )
        )


@pytest.mark.parametrize("seed", range(6))
def test_the_only_path_that_is_left_is_found_from_the_same_nic(seed: int) -> None:
    """Three of four paths are cut. The last was passed over, as both NICs of the peer had failed.

    Found by a search of drawn runs.
    """
    cuts = [(1, 0), (0, 1), (1, 1)]
    run_scenario(
        Scenario(
            nics=(2, 2, 1),
            transfers=(TransferSpec(kind="paged", pages=5),),
            chaos=Chaos(seed=seed, sq_depth=1, refuse_post=True, short_post=False),
            faults=tuple((1, Cut("b", there, peer="a", peer_nic=here)) for there, here in cuts),
        )
    )


def test_a_nic_that_only_one_of_ours_misses_is_used_by_the_other() -> None:
    """One NIC of the peer dies, the other cannot be reached from one of ours: one path is left.

    Found by a search of drawn runs: both of its NICs were marked down, and their paths passed over.
    """
    cut = Cut("b", 1, peer="a", peer_nic=0)
    tame = Chaos(
        peer_depth=1, reorder_ps=0, fragments=1, poll_delay_ps=10_000, short_post=False, kept=()
    )
    run_scenario(
        Scenario(
            nics=(2, 2, 1),
            transfers=(TransferSpec(), TransferSpec(kind="per_page", pages=4, pinned=True)),
            reads=(ReadSpec(told=True),),
            chaos=tame,
            faults=((1, cut), (210_407, KillNic("b", 0))),
        )
    )


def test_an_immediate_does_not_stand_for_a_row_that_was_not_written_again() -> None:
    """Two transfers share a path and the immediate; one of their rows landed, and one fails later.

    Found by a search of drawn runs: the other one's immediate completed the count, and the bytes of
    the one that had failed were not there. `test_burnt_bugs` makes the mistake on purpose.
    """
    scenario = Scenario(
        nics=(3, 3, 1),
        transfers=(
            TransferSpec(shards=2, start_ps=1446, shared=True),
            TransferSpec(),
            TransferSpec(kind="scatter", pinned=True, start_ps=1448, shared=True),
        ),
        reads=(ReadSpec(kind="paged", pages=3),),
        chaos=Chaos(
            seed=1611411,
            reorder_ps=340_933,
            fragments=1,
            late_read=False,
            short_post=False,
            sq_depth=2,
            imm_credits=1000,
            poll_delay_ps=34_636,
            cqe_limit=64,
        ),
        faults=(
            (1, Revoke(node="c", nic=None)),
            (443_476, Clog(node="b", nic=0, for_ps=None)),
            (451_985, Clog(node="a", nic=2, for_ps=2_000_000)),
            (519_259, Clog(node="a", nic=1, for_ps=4_000_000)),
        ),
    )
    assert (("failed",), ("done",), ("failed",)) == run_scenario(scenario).states


def test_drawn_faults_are_not_reported_on_stderr(monkeypatch, capsys) -> None:
    """Each NIC that a run takes away printed a traceback, and what was found stood between them."""
    monkeypatch.setattr(logging.getLogger("tep"), "propagate", False)  # away from pytest's handlers
    dying = Chaos(post_fails=8)
    transfers = (TransferSpec(kind="paged", pages=12),)
    seen = run_scenario(Scenario(nics=(4, 1, 1), transfers=transfers, chaos=dying)).seen

    assert seen["post failed"]
    assert "" == capsys.readouterr().err


@pytest.mark.parametrize(("pages", "seed"), [(5, 27), (10, 23), (10, 3)])
def test_rows_that_were_queued_for_a_path_are_not_posted_on_it_once_it_failed(
    pages: int, seed: int
) -> None:
    """They landed before the peer fenced the path, and were taken for the rows lost on it.

    Found by a search of drawn runs: a transfer was complete without the bytes of one page. A NIC
    that is full, or refuses a post, has rows left in its queue.
    """
    cut = Cut("b", 0, peer="a", peer_nic=1, one_way=True)
    transfers = [
        TransferSpec(kind="paged", pages=pages, start_ps=1 + 300_000 * k) for k in range(2)
    ]
    chaos = Chaos(seed=seed, refuse_post=True, sq_depth=2, poll_delay_ps=400_000)
    for number in (1, 2):
        run_scenario(
            Scenario(
                nics=(2, 1, 1),
                transfers=tuple(transfers[:number]),
                chaos=chaos,
                faults=((1, cut),),
            )
        )

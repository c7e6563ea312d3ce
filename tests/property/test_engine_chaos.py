"""The engine under any mixture of transfers, chaos and faults that Hypothesis can think of."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given

import tep.testing
from tep.sim.faults import Chaos, Cut, KillNic
from tep.testing import ReadSpec, Scenario, TransferSpec, engine_scenarios, run_scenario


@given(engine_scenarios())
def test_engine_keeps_its_promises(scenario: Scenario) -> None:
    """Whatever is asked, and whatever breaks: the promises listed in tep.testing.oracle hold."""
    run_scenario(scenario)


@given(engine_scenarios())
def test_scenario_prints_as_itself(scenario: Scenario) -> None:
    """A failing scenario is reported as a literal; one that reads otherwise replays another run."""
    names = {name: getattr(tep.testing, name) for name in tep.testing.__all__}
    assert scenario == eval(repr(scenario), names)  # noqa: S307  # a literal of our own records


def test_writes_that_a_read_without_an_answer_flushed_are_made_good() -> None:
    """One path is cut, another lives; the read was repeated there, and the writes failed.

    Found by a search of drawn runs. The connection flushes what is behind the error of the read.
    """
    run_scenario(
        Scenario(
            nics=(2, 1, 1),
            transfers=(TransferSpec(kind="paged", pages=2),),
            reads=(ReadSpec(kind="paged", pages=2),),
            chaos=Chaos(ordered=True, flush_on_error=True, short_post=False, reorder_ps=0),
            faults=((1, Cut("b", 0, peer="a", peer_nic=1)),),
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


def test_drawn_faults_are_not_reported_on_stderr(monkeypatch, capsys) -> None:
    """Each NIC that a run takes away printed a traceback, and what was found stood between them."""
    monkeypatch.setattr(logging.getLogger("tep"), "propagate", False)  # away from pytest's handlers
    dying = Chaos(post_fails=8)
    transfers = (TransferSpec(kind="paged", pages=12),)
    seen = run_scenario(Scenario(nics=(4, 1, 1), transfers=transfers, chaos=dying)).seen

    assert seen["post failed"]
    assert "" == capsys.readouterr().err

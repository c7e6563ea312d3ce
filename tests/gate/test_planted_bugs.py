"""The gate: each planted bug is found by the seeds, and the engine as it is by none of them."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from unittest import mock

import pytest

from tep.base.units import PS_PER_MS
from tep.core.group import DomainGroup
from tep.core.path import TRANSITIONS, Path, PathEvent
from tep.core.posting import Pending
from tep.engine.worker import Worker
from tep.sim.faults import Chaos, Clog, Cut, Fault, Mute, Slow, Swizzle
from tep.sim.row_log import RowLog
from tep.testing import Violation
from tests.gate import (
    bugs_counting,
    bugs_ending,
    bugs_failing,
    bugs_failover,
    bugs_fairness,
    bugs_posting,
)
from tests.gate.planted import BUGS, planted
from tests.gate.registry import Change, changed
from tests.support.effort import fresh
from tests.support.planted import first_shown, shows
from tests.world.oracle import replay, run_scenario
from tests.world.scenario import Scenario
from tests.world.specs import TransferKind, TransferSpec

ORIGINAL_CANCEL = Worker.cancel
SEEDS = 2_000


def first_found(
    seeds: range,
    weaken: Callable[[Scenario], Scenario] = lambda s: s,
) -> str | None:
    """Say what the first violation among these seeds was."""
    for seed in seeds:
        try:
            run_scenario(weaken(Scenario.draw(seed)))
        except Violation as found:
            return str(found)
    return None


def search(name: str, budget: int, wanted: Callable[[Scenario], bool] | None = None) -> int | None:
    """The seed whose scenario shows a planted bug; those not `wanted` cannot show it."""

    def play(seed: int) -> None:
        scenario = Scenario.draw(seed)
        if wanted is None or wanted(scenario):
            run_scenario(scenario)

    return first_shown(name, play, range(budget))


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_found(name: str) -> None:
    """A bug that survives the search could be in the product, and nobody would know."""
    bug = BUGS[name]
    of_failover = bug.plant.__module__ == bugs_failover.__name__
    with planted(name):
        found = search(name, bug.budget, bugs_failover.can_show if of_failover else None)

    assert found is not None, f"{name} survived {bug.budget} seeds"


def test_bugs_are_many_and_described() -> None:
    """The gate is worth as much as the mistakes it knows; each must say what the mistake is."""
    assert len(BUGS) >= 32 + 20
    assert [] == [name for name, bug in BUGS.items() if not bug.plant.__doc__]


def test_planting_leaves_nothing_behind() -> None:
    """A patch that stays would make every later test one of a broken engine."""
    seeds = range(40)
    for name in BUGS:
        with planted(name):
            pass

    assert first_found(seeds) is None


def one_row_each(_: object, pendings: list[Pending]) -> list[Pending]:
    """Cut batches in rows, and change nothing else."""
    return [
        bugs_posting.part(p, row, row + 1, p.batch.imm)
        for p in pendings
        for row in range(p.batch.n)
    ]


HARMLESS: dict[str, list[Change]] = {
    "settles_when": bugs_ending.settles_when(lambda *_: False),
    "changes_rows": bugs_posting.changes_rows(one_row_each),
    "counts_as": bugs_posting.counts_as(lambda count, _: count),
    "posts": bugs_posting.posts(lambda taken, _: taken, lambda pending, _: pending.at),
    "moves_with": bugs_failing.moves_with(lambda *_: None),
    "with_queues": bugs_fairness.with_queues(deque),
    "cancels": bugs_ending.cancels(ORIGINAL_CANCEL),
    "expects": bugs_counting.expects(lambda *_: None),
}


@pytest.mark.parametrize("tool", HARMLESS)
def test_tools_of_the_planters_are_harmless(tool: str) -> None:
    """A bug that is found for the patch around it, and not for itself, proves nothing."""
    with changed(HARMLESS[tool]):
        assert first_found(range(SEEDS // 50)) is None


@pytest.mark.parametrize("patch", [lambda _: [].gone, lambda _: re.sub("a", lambda: "", "a")])
def test_a_patch_that_breaks_is_no_finding(patch: Callable[[int], object]) -> None:
    """Its bug would be found for ever, and the product never asked."""

    def play(seed: int) -> None:
        patch(seed)

    with pytest.raises(pytest.fail.Exception, match="the patch that plants this bug is broken"):
        shows(play, 0)


# ---------------------------------------------------------------------- the engine as it is


@contextmanager
def counted(seen: Counter[str], owner: type, name: str, what: Callable[..., str]) -> Iterator[None]:
    """Count the calls of a method under what(*its arguments)."""
    original = getattr(owner, name)

    def count(*args: object, **knobs: object) -> object:
        seen[what(*args)] += 1
        return original(*args, **knobs)

    with mock.patch.object(owner, name, count):
        yield


def transition(path: Path, event: PathEvent) -> str:
    """Return what is counted of an event on a path."""
    return f"transition {path.state.name} {event.name}"


@cache
def sights() -> Counter[str]:
    """Return the coverage of the suite's seeds; none of them may find anything wrong."""
    seen: Counter[str] = Counter()
    with (
        counted(seen, DomainGroup, "_moved", lambda *_: "row moved to another NIC"),
        counted(seen, DomainGroup, "repost", lambda *_: "row written again"),
        counted(seen, Path, "to", transition),
    ):
        for seed in range(SEEDS):
            row_log = RowLog() if seed < SEEDS // 10 else None
            outcome = replay(seed, row_log=row_log)
            seen.update(outcome.seen)
            for states in outcome.states:
                seen.update(states)
            if row_log is not None:
                seen["immediate overtook another"] += row_log.overtakes()
    return seen


WANTED = [
    "early immediate",
    "surplus",
    "sum of several",
    "claimed",
    "recalled",
    "short post",
    "post refused",
    "turn among others",
    "immediate overtook another",
    "row without a receive",
    "cancelled in the queue",
    "NIC down",
    "row moved to another NIC",
    "failover",
    "row written again",
    "path opened again",
    "NIC back",
    "went on",
    "KillNic",
    "Revoke",
    "Restart",
    "Slow",
    "Clog",
    "Cut",
    "Drift",
    "Mute",
    "Pause",
    "Swizzle",
    "completion queue overrun",
    "message lost",
    "control message doubled",
    "landed after its error",
    "row NIC_DOWN",
    "row UNREACHABLE",
    "row STALE_PEER",
    "row REMOTE_KEY",
    "row LOCAL_KEY",
    "read done",
    "read failed",
    "read cancelled",
    "read NIC_DOWN",
    "read GIVEN_UP",
    "read STALE_PEER",
    "read placed after its end",
    "read again by another NIC",
    "owner told",
    "row FLUSHED",
    "row PROVIDER",
    "answer",
    "deregister refused",
    "restart",
    "stale descriptor refused",
    "closed",
    "post failed",
    "post interrupted",
    "connect failed",
    "register failed",
    "told",
    "tried again",
    "refused: its immediate is burnt",
    "barred",
    "barred: not fenced",
    "fence failed",
    "sender restarted",
    "watched: alive",
    "watched: lost",
    "watched: restarted",
    "peer back",
    "removed",
    "refused during a removal",
    "met again",
    "steady",
    "more than three nodes",
    "all paths used again",
]
"""The cases that the seeds must meet: a suite that never met a case says nothing about it."""


EXCUSED = {
    "no failover": 366,
    "its receiver removed node a": 181,
    "an engine was closed": 136,
    "Restart": 125,
    "a transfer was cancelled": 89,
    "all NICs of one end were in trouble": 83,
    "messages are lost": 69,
    "Revoke": 48,
    "a peer was removed": 45,
    "an error of the provider's": 15,
    "Cut": 12,
    "Swizzle": 12,
    "no connection": 5,
    "a fence failed": 4,
    "its immediate is burnt": 3,
    "another under its immediate failed": 3,
}
"""The most transfers of a thousand seeds that may fail for each reason: the result of 8,000, and
a seventh more. Slow links and pauses are no reason, nor NICs that died or were cut off while
another path was there. A number may be lowered, and not raised: an oracle that excuses much sees
little, and nobody would notice that it excuses more. Tries count as well as first transfers.
"""


def test_engine_is_clean_over_all_seeds() -> None:
    """A seed that finds something has its replay line in the error; here the rest is looked at."""
    seen = sights()
    rare = {what: n for what in WANTED if (n := seen[what]) < SEEDS // 1000}

    assert seen["done"] > SEEDS
    assert {} == rare, f"of {SEEDS} seeds so few met it"
    excused = {what.removeprefix("excused: "): seen[what] for what in seen if "excused: " in what}
    assert {} == {
        what: n for what, n in excused.items() if n > EXCUSED.get(what, 0) * SEEDS // 1000
    }


def test_runs_obey_the_table_of_paths() -> None:
    """A transition that is missing stops a run; one that no run makes is tested by none."""
    seen = {what.removeprefix("transition ") for what in sights() if "transition " in what}
    table = {f"{state.name} {event.name}" for state, event in TRANSITIONS}
    rare = {
        "SUSPECT FENCED",
        "SUSPECT UNANSWERED",
        "FENCING ASKED",
        "FENCED UNANSWERED",
        "FENCED LOST",
        "REOPENING LOST",
    }
    assert set() == seen - table
    assert set() == table - seen - rare


PARTS = 4


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_no_seed_that_was_never_tried_finds_anything(part: int) -> None:
    """The suite's own seeds find what they found the last time; these look where nobody has."""
    assert first_found(fresh(20_000)[part::PARTS]) is None


@pytest.mark.parametrize("seed", [6209, 8353])
def test_a_nic_that_is_heard_again_is_posted_to_again(seed: int) -> None:
    """An oracle that does not know of its return calls every row to it a mistake."""
    assert replay(seed).seen["NIC back"]


def test_a_read_fails_if_its_owner_cannot_be_told() -> None:
    """The immediate after a read is a row: an oracle that forgets its errors is wrong, and was."""
    assert replay(64660).seen["row PROVIDER"]


def test_a_row_whose_path_died_before_its_engine_closed_may_land() -> None:
    """It comes back FLUSHED, not UNREACHABLE: an oracle that calls it a stray write is wrong."""
    held_up = Clog(node="b", nic=0, for_ps=521510)
    chaos = Chaos.calm(31059)
    chaos = replace(chaos, imm_credits=1000, late_land=1, kept=((4, 274877906945, 0),))
    found = run_scenario(
        Scenario(
            transfers=(TransferSpec(),),
            chaos=chaos,
            faults=((1, held_up),),
            close=(517257, "a"),
        )
    )
    assert found.seen["landed after its error"]


def test_a_row_without_a_receive_may_fail_though_nics_live() -> None:
    """Another NIC is no cure for it: an oracle that asks for one is wrong, and was."""
    late = TransferSpec(size=0, kind="per_page", gap=8, start_ps=69418, claimed=True, probe=True)
    first = TransferSpec(kind="paged", size=0, pages=4, start_ps=139, claimed=True, rounds=2)
    long = TransferSpec(kind="per_page", size=24, pages=12, start_ps=5288, claimed=True, rounds=3)
    chaos = Chaos.draw(95526, ordered=True, rnr_retries=0, imm_credits=1, pause_ps=3 * PS_PER_MS)
    found = run_scenario(
        Scenario(nics=(1, 2, 2), transfers=(late, first, long), chaos=chaos, echo=True)
    )
    assert found.seen["row RNR"]


@contextmanager
def by_columns() -> Iterator[None]:
    """Have completions counted by columns, however few there are."""
    with (
        mock.patch("tep.engine.worker._SCALAR_MAX", 0),
        mock.patch("tep.core.imm._SCALAR_MAX", 0),
    ):
        yield


def test_engine_is_clean_by_columns() -> None:
    """Completions are counted row by row or by columns; small runs would never try the columns."""
    with by_columns():
        assert first_found(range(100_000, 100_000 + SEEDS // 10)) is None


@pytest.mark.long
def test_no_seed_that_was_never_tried_finds_anything_by_columns() -> None:
    """The columns meet rare orders as seldom as the rows do."""
    with by_columns():
        assert first_found(fresh(2_000)) is None


@pytest.mark.parametrize("kind", ["single", "paged", "per_page", "scatter"])
@pytest.mark.parametrize("late", [1, 3_000_000])
def test_a_bit_that_is_turned_on_its_way_is_found(kind: TransferKind, late: int) -> None:
    """No engine looks at bytes: an oracle that does not, either, would pass wrong ones."""
    spec = TransferSpec(kind=kind, pages=5 if "page" in kind else 1, expect_ps=late)
    scenario = Scenario(nics=(2, 2, 2), transfers=(spec,), chaos=Chaos(corrupt=256))

    with pytest.raises(Violation, match="before all bytes|bytes at b differ|bytes at c differ"):
        run_scenario(scenario)
    run_scenario(replace(scenario, chaos=Chaos()))


LINKS = Clog | Cut | Mute | Slow | Swizzle

WEAKER: dict[str, Callable[[Scenario], Scenario]] = {
    "in order": lambda s: replace(
        s, chaos=replace(s.chaos, ordered=True, reorder_ps=0, last_late_ps=0)
    ),
    "unordered": lambda s: replace(s, chaos=replace(s.chaos, ordered=False)),
    "whole rows": lambda s: replace(s, chaos=replace(s.chaos, fragments=1, dup_place=False)),
    "no skew": lambda s: replace(s, chaos=replace(s.chaos, skew_ps=(0,), burst_ps=0)),
    "no reads": lambda s: replace(s, reads=()),
    "early read": lambda s: replace(s, chaos=replace(s.chaos, late_read=False)),
    "deep queues": lambda s: replace(
        s, chaos=replace(s.chaos, sq_depth=64, short_post=False, refuse_post=False)
    ),
    "one NIC": lambda s: replace(s, nics=(1, 1, 1), faults=tuple(map(on_first_nic, s.faults))),
    "no faults": lambda s: replace(
        s, faults=(), close=None, chaos=replace(s.chaos, cq_depth=0, message_loss=0)
    ),
    "no failover": lambda s: replace(
        s, failover=False, transfers=tuple(replace(t, again=0) for t in s.transfers)
    ),
    "no link trouble": lambda s: replace(
        s, faults=tuple(f for f in s.faults if not isinstance(f[1], LINKS))
    ),
    "enough of everything": lambda s: replace(
        s,
        chaos=replace(s.chaos, post_fails=0, connect_fails=0, register_fails=0, fence_fails=0),
    ),
    "nothing lands late": lambda s: replace(s, chaos=replace(s.chaos, late_land=0)),
    "no cancel": lambda s: replace(
        s, transfers=tuple(replace(t, cancel_ps=None, recall_ps=None) for t in s.transfers)
    ),
    "early expectations": lambda s: replace(
        s, transfers=tuple(replace(t, expect_ps=1) for t in s.transfers)
    ),
}


def on_first_nic(booked: tuple[int, Fault]) -> tuple[int, Fault]:
    t_ps, fault = booked
    if isinstance(fault, Swizzle):
        return t_ps, replace(fault, nics=1)
    if isinstance(fault, Cut):
        return t_ps, replace(fault, nic=0, peer_nic=0)
    return t_ps, replace(fault, nic=0) if hasattr(fault, "nic") else fault


@pytest.mark.parametrize("ability", WEAKER)
def test_no_false_alarm_on_a_weaker_fabric(ability: str) -> None:
    """An oracle that cries out over a tamer fabric has found bugs of its own, not the engine's."""
    assert first_found(range(SEEDS // 40), WEAKER[ability]) is None


# ---------------------------------------------------------------------- what a finding looks like


def test_finding_names_the_seed() -> None:
    """Without its line a failure in CI cannot be looked at again."""
    with planted("done_at_post"):
        found = first_found(range(50))
        assert found is not None
        what, line = found.splitlines()
        assert line.startswith("replay: python -m tests.world ")
        with pytest.raises(Violation) as again:
            replay(int(line.split()[-1]))

    assert found == str(again.value)
    assert what


def test_finding_prints_what_was_not_drawn() -> None:
    """A scenario that no seed draws, as a shrunk one: its literal is the line."""
    with planted("done_at_post"), pytest.raises(Violation, match=r"run_scenario\(Scenario\(nics="):
        run_scenario(replace(Scenario.draw(0), nics=(4, 3, 2)))

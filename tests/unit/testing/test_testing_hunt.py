"""Running, hunting and shrinking protocols: what counts as a finding, and how it is told."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given

import tep
from tep.base.errors import UsageError
from tep.sim import Chaos, Clog, Cluster, Faults, KillNic, Restart, RowLog
from tep.testing import Case, Violation, hunt, run, scenarios, shrink, story
from tests.gate.planted import planted
from tests.world.oracle import replay, run_scenario
from tests.world.scenario import Scenario

CALM = Case(nics=(2, 2))
KILLED = Case(nics=(1, 1), faults=Faults(((1, KillNic("b", 0)),), Chaos.calm()))


async def one_write(cluster: Cluster, nbytes: int = 64) -> float:
    """A correct protocol, as far as it goes: it raises what its transfer raises."""
    a, b = cluster.engines[:2]
    (mr, _), (_, desc) = a.reg_mr(bytes(nbytes), access=tep.Access.SOURCE), b.reg_mr(bytearray(64))
    await a.submit_single_write(nbytes, (mr, 0), (desc, 0), imm=1)
    return cluster.now_us


async def wrong_from_the_start(cluster: Cluster) -> None:
    """Asserts what is never true."""
    assert len(cluster.engines) == 0, "there are engines"


async def waits_for_nothing(cluster: Cluster) -> None:
    """Nobody ever sends this."""
    await cluster.engines[0].expect_imm_count(5, 1)


async def never_ends(cluster: Cluster) -> None:
    """Something always happens, and it never ends."""
    while True:  # noqa: ASYNC110  # the mistake this is about
        await asyncio.sleep(0.5)


async def callback_raises(cluster: Cluster) -> None:
    """The engine catches what callbacks raise; a test must not overlook it."""
    a, b = cluster.engines
    a.submit_barrier([b.reg_mr(bytearray(8))[1]], 3, on_done=lambda _: 1 / 0)
    await asyncio.sleep(1e-3)


async def flag_last(cluster: Cluster) -> None:
    """The data, and a flag behind it: order is assumed."""
    a, b = cluster.engines
    target = bytearray(64)
    (mr, _), (_, desc) = a.reg_mr(b"\7" * 64, access=tep.Access.SOURCE), b.reg_mr(target)
    a.submit_single_write(63, (mr, 0), (desc, 0))
    a.submit_single_write(1, (mr, 63), (desc, 63), imm=9)
    await b.expect_imm_count(9, 1)
    assert bytes(target) == b"\7" * 64, "the flag came first"


def test_a_correct_run_tells_what_it_saw() -> None:
    """Green says little where nobody knows what happened in it."""
    ran = run(one_write, CALM)
    assert (None, True) == (ran.error, 0 < ran.result <= ran.end_us)
    ran = run(one_write, KILLED)
    assert ran.error is not None
    assert 1 == ran.seen["KillNic"]
    assert 1 <= ran.seen["row UNREACHABLE"]  # and what tells the target of it, again and again


@pytest.mark.parametrize(
    ("protocol", "case", "what"),
    [
        (wrong_from_the_start, CALM, "AssertionError: there are engines"),
        (waits_for_nothing, CALM, "it has not ended 60.000 simulated seconds"),
        (never_ends, CALM, "it has not ended 60.000 simulated seconds after its start"),
        (callback_raises, CALM, "raised ZeroDivisionError: division by zero"),
        (lambda c: one_write(c, 65), CALM, "it ended in BadRequest, which no fault excuses"),
        (lambda c: asyncio.sleep(1, c.nope), CALM, "AttributeError"),
    ],
)
def test_what_counts_as_a_finding(protocol, case: Case, what: str) -> None:
    """A hang, an error without a cause and a callback's exception are bugs as an assertion is."""
    with pytest.raises(Violation, match=re.escape(what)) as found:
        run(protocol, case)
    assert found.value.case == case
    assert str(found.value).splitlines()[-1].startswith(("replay: tep", "replay: import tep"))


def test_an_error_with_a_cause_is_no_finding_unless_asked() -> None:
    """A protocol that must survive a dead NIC asks for it."""
    run(one_write, KILLED)
    with pytest.raises(Violation, match="it ended in FabricError: single to b"):
        run(one_write, KILLED, may_fail=False)


async def _fail_late(cluster: Cluster, error: BaseException) -> None:
    await asyncio.sleep(1e-6)
    raise error


@pytest.mark.parametrize(
    "error",
    [tep.BadRequest("x"), tep.BusyError("x"), tep.ClosedError("x"), tep.BadDescriptor("x")],
    ids=lambda error: type(error).__name__,
)
def test_programming_errors_are_never_excused(error: tep.TepError) -> None:
    """A recovery path that always makes a wrong call survived while any fault excused it."""
    for one in (error, ExceptionGroup("tasks", [tep.WaitTimeout("late"), error])):
        with pytest.raises(Violation, match="which no fault excuses: .*: x"):
            run(lambda c, one=one: _fail_late(c, one), KILLED)


def test_what_faults_cause_is_excused_also_in_a_task_group() -> None:
    """TaskGroup wraps errors; that is no mistake of the protocol."""
    group = ExceptionGroup("tasks", [tep.FabricError("x"), tep.WaitTimeout("late")])
    assert group is run(lambda c: _fail_late(c, group), KILLED).error
    crashed = Case(nics=(1, 1), faults=Faults(((1, Restart("b")),), Chaos.calm()))
    assert run(lambda c: _fail_late(c, tep.ClosedError("x")), crashed).error is not None


def test_after_healing_a_protocol_can_end() -> None:
    """Safety first, then liveness: a clogged link is free again when the case says so."""
    clogged = Faults(((1, Clog("b", 0)),), Chaos.calm(dead_after_ps=10**9))
    ran = run(one_write, Case(nics=(1, 1), faults=clogged, heal_us=25.0))

    assert 25 < ran.result < 30
    assert ran.error is None


@pytest.mark.slow
def test_seeds_find_and_the_line_replays() -> None:
    """The last line of a finding must lead straight back to it, in a shell too."""
    with pytest.raises(Violation, match="the flag came first") as found:
        hunt(flag_last, runs=50, faults="order", nics=(1, 2), seed=1)
    case = found.value.case
    assert case is not None
    assert case == Case.draw(case.seed, nics=(1, 2), faults="order")
    line = str(found.value).splitlines()[-1]
    assert line.startswith("replay: tep sim --protocol ")
    argv = shlex.split(line.removeprefix("replay: "))
    for command in (argv, [*argv[:4], "--case", repr(case)]):
        code = f"import sys, tep.cli; sys.argv = {command!r}; sys.exit(tep.cli.main())"
        done = subprocess.run(
            [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
        )
        assert 1 == done.returncode, done.stdout + done.stderr
        assert "VIOLATION: AssertionError: the flag came first" in done.stdout


@pytest.mark.slow
def test_a_clean_hunt_says_what_was_seen() -> None:
    """Over the seeds every kind of trouble must turn up; else the swarm has a blind spot."""
    seen = hunt(one_write, runs=150)

    for sight in ("KillNic", "Clog", "Mute", "Slow", "Swizzle", "Pause", "Revoke", "Restart"):
        assert seen[sight], sight
    for sight in ("ended in an error", "post refused", "row UNREACHABLE", "row NIC_DOWN"):
        assert seen[sight], sight


async def checked(cluster: Cluster) -> None:
    """A protocol that compares bytes, as one does that sends a checksum along."""
    a, b = cluster.engines
    target = bytearray(64)
    (mr, _), (_, desc) = a.reg_mr(b"\7" * 64, access=tep.Access.SOURCE), b.reg_mr(target)
    a.submit_single_write(64, (mr, 0), (desc, 0), imm=9)
    await b.expect_imm_count(9, 1)
    assert bytes(target) == b"\7" * 64, "the checksum is wrong"


def test_a_checksum_finds_a_bit_that_was_turned() -> None:
    """Networks and memories have such faults, and no engine looks at bytes."""
    hunt(checked, nodes=2, nics=1, faults="order posting", runs=60)
    with pytest.raises(Violation, match="the checksum is wrong"):
        hunt(checked, nodes=2, nics=1, faults="order posting bytes", runs=60)


@pytest.mark.slow
def test_a_finding_shrinks_to_what_matters() -> None:
    """A knob that delays a thousand rows does not say which of them is the bug: one draw does."""
    with pytest.raises(Violation) as first:
        hunt(flag_last, faults="order posting workers", seed=4)
    found = shrink(first.value)

    assert isinstance(found.case, Case)
    assert ((1, 1), ()) == (found.case.nics, found.case.faults.events)
    chaos = found.case.faults.chaos
    assert isinstance(chaos.kept, tuple)
    assert 1 == len(chaos.kept)
    assert replace(Chaos.calm(chaos.seed), kept=chaos.kept, reorder_ps=chaos.reorder_ps) == chaos
    assert str(found) == str(shrink(first.value)), "the same every time"
    with pytest.raises(Violation, match="the flag came first") as again:
        run(flag_last, Case.parse(repr(found.case)))
    assert str(found) == str(again.value)
    with pytest.raises(UsageError, match="does not know its run"):
        shrink(Violation("somebody's own"))


def test_a_finding_tells_its_story() -> None:
    """The story needs no picture and no tool: what overtook what, and where the code stood."""
    with pytest.raises(Violation) as first:
        hunt(flag_last, faults="order posting workers", seed=4)
    found = shrink(first.value)
    told = story(found).splitlines()

    assert len(told) <= 30
    assert f"case: {found.case!r}" == told[0]
    assert re.match(r"drawn: a/0: flight of the bytes of row \d+$", told[1])
    late = [line for line in told if "THE REST HAS NOT LANDED" in line or "HAS NOT LANDED" in line]
    assert 1 == len(late)
    row = re.match(r"row (\d+), a/0 to b", late[0])[1]
    assert any(re.match(rf"out of order: .* row {row}, posted before it, is not", t) for t in told)
    assert any("the flag came first" in line for line in told[-4:])
    with pytest.raises(Violation) as killed:
        run(one_write, KILLED, may_fail=False)
    assert re.search(r"fault at .* us: KillNic\(node='b', nic=0\)", story(killed.value))


async def two_tasks(cluster: Cluster) -> None:
    """One task waits for a count that is too large, beside one that has ended."""
    a, b = cluster.engines
    target = bytearray(64)
    (mr, _), (_, desc) = a.reg_mr(b"\7" * 64, access=tep.Access.SOURCE), b.reg_mr(target)

    async def reader() -> None:
        await b.expect_imm_count(9, 3)

    await asyncio.gather(a.submit_single_write(64, (mr, 0), (desc, 0), imm=9), reader())


def test_a_story_says_where_the_code_stood() -> None:
    """A protocol that hangs has raised nothing: only the line that it waits in says why."""
    with pytest.raises(Violation) as hangs:
        run(two_tasks, Case(nics=(1, 1)))
    told = story(hangs.value)

    assert len(told.splitlines()) <= 30
    assert re.search(r"waits in line \d+ of reader: await b.expect_imm_count\(9, 3\)", told)


def test_a_story_says_where_the_code_stood_when_its_own_patience_ended() -> None:
    """A protocol with timeouts of its own hangs as well: without the line nobody knows where."""

    async def impatient(cluster: Cluster) -> None:
        reader = asyncio.ensure_future(two_tasks(cluster))
        async with asyncio.timeout(1e-4):
            await asyncio.shield(reader)

    with pytest.raises(Violation) as hangs:
        run(impatient, Case(nics=(1, 1)))

    assert re.search(r"waits in line \d+ of reader", story(hangs.value))


def test_a_hunt_says_what_was_tried() -> None:
    """A clean hunt that met no fault says little; its words say how much."""
    tried = hunt(one_write, runs=20, faults="nics")
    first, faults, _ = str(tried).splitlines()

    assert 20 == tried.cases
    assert re.match(r"20 cases in \d+\.\d s, and no promise was broken", first)
    assert f"faults: KillNic {tried['KillNic']}" == faults


def test_planned_faults_are_one_line_each(caplog) -> None:
    """A traceback of a fault that was wanted reads like a crash."""
    for seed in range(5):
        chaos = Chaos.calm(seed, post_fails=200)
        run(one_write, Case(nics=(2, 1), faults=Faults((), chaos)))
    down = [record for record in caplog.records if "is down" in record.getMessage()]

    assert down
    assert all(record.exc_info is None for record in down)


def test_the_replay_line_of_a_notebook_stands_alone() -> None:
    """Pasted into a fresh interpreter it must name all it needs but the protocol."""

    async def nested(cluster: Cluster) -> None:
        await flag_last(cluster)

    with pytest.raises(Violation) as found:
        hunt(nested, faults="order posting workers", seed=4)
    line = str(found.value).splitlines()[-1].removeprefix("replay: ")
    with pytest.raises(Violation, match="the flag came first"):
        exec(line, {"nested": nested})  # as if pasted


def _first_of(seeds: int) -> Violation:
    for seed in range(seeds):
        try:
            replay(seed)
        except Violation as found:
            return found
    raise AssertionError(f"{seeds} seeds, and no finding")


def test_a_broken_engine_shrinks_as_well() -> None:
    """The drawn world of the engine and users' protocols are shrunk by one mechanism."""
    with planted("cancel_lost"):
        first = _first_of(200)
        found = shrink(first)

    assert isinstance(found.case, Scenario)
    assert 1 == len(found.case.transfers)
    assert run_scenario(found.case), "without the mistake nothing is wrong"


def test_pairs_that_are_cut_in_two_are_no_runs() -> None:
    """A time without the node that closes then cannot be run: shrinking passes over it."""

    def again(scenario: Scenario) -> None:
        t_ps, name = scenario.close
        raise Violation(f"closed: {name} at {t_ps}", scenario, again)

    with pytest.raises(Violation) as first:
        again(replace(Scenario.draw(3), close=(500, "a")))

    assert (1, "a") == shrink(first.value).case.close


@given(scenarios(nodes=3, nics=(1, 2), faults="all"))
def test_cases_print_as_themselves(case: Case) -> None:
    """A literal that reads otherwise replays another run."""
    assert case == Case.parse(repr(case))
    assert 3 == case.nodes
    assert all(1 <= n <= 2 for n in case.nics)


@given(scenarios(faults="order posting"))
def test_restricted_cases_break_nothing(case: Case) -> None:
    """With disorder as the only trouble, everything must succeed."""
    assert not case.may_fail
    assert run(one_write, case, may_fail=False).error is None


def test_cases_are_read_and_nothing_is_executed() -> None:
    """The text comes from a log, or from a stranger."""
    for text in ("", "1", "Case(", "__import__('os')", "Case(nics=(1,), nope=2)", "Chaos()"):
        with pytest.raises(UsageError, match="is no Case"):
            Case.parse(text)
    for text in ("Case(nics=())", "Case(nics=(0,))"):
        with pytest.raises(UsageError, match=r"Case: nics=.*1 (to|\.\.) 64"):
            Case.parse(text)
    with pytest.raises(UsageError, match="names no node; there are: a"):
        Case(nics=(1,), faults=Faults(((1, KillNic("z", 0)),)))
    with pytest.raises(UsageError, match="is no group"):
        Case.draw(1, faults="everything")
    with pytest.raises(UsageError, match="from 1 to 64"):
        Case.draw(1, nics=(3, 2))


def test_a_run_is_the_same_again_with_its_trace() -> None:
    """A row log that changed the run would show another one."""
    case = Case.draw(11, faults="order")
    first, second = RowLog(), RowLog()
    ran = run(one_write, case, row_log=first)
    assert ran == run(one_write, case, row_log=second)
    assert first.digest() == second.digest()
    assert len(first) > 2
    assert ran == run(one_write, case)

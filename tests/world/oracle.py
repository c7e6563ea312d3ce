"""The oracle: plays a scenario on the chaos fabric and says whether the engine kept its promises.

It knows every transfer's bytes beforehand, and judges by memory and by what crossed the seam; of
the engine it uses the public verbs alone. `Violation` carries the line that plays the run again.

What must hold, whatever the fabric does:
 1. When a count fires, as many immediates are here, with all bytes of their rows.
 2. Nothing outside the targets changes.
 3. Each handle settles once.
 4. Everything ends; then engines are idle, and no count is left over or missing.
 5. After a transfer has settled its source may be overwritten.
 6. Cancel and error are confirmed when every posted row is back, and nothing lands afterwards.
 7. Nothing fails without a cause; what is done had no error but those that failover makes good.
 8. A cancelled row that no NIC had is never posted; no row is posted twice, or after the end.
 9. Keys and descriptors of a crashed incarnation never touch the next one.
10. Nothing is posted on a NIC that is known to be dead; the engine's statistics add up.
11. Bytes whose count has fired belong to the reader: nobody writes there again.
12. If only NICs died, and both ends have others, it ends as done, with exactly the count announced.
13. When all trouble is over, a new write between two live engines is done.
14. Nobody waits for another to end: while rows wait for a NIC no other batch gets two turns there,
    and no NIC with room ends a step with a batch that it was not offered. (Where an idle NIC may be
    given rows of another, only: if all NICs have room, each new batch was offered to one of them.)

15. A read brings bytes that its owner had between its submit and its end, and nothing beside them;
    once it has settled nothing of it is written, except to memory that is said to be in quarantine.
16. An owner is told once that its memory was read, if the read is done, and not before its end.
17. An immediate under which something failed is burnt: its sender takes no request under it, and
    each receiver's expectation of it fails; no other expectation fails. A retry has a fresh one.
18. Once a receiver has removed the sender, and the removal does not say that it is unfenced,
    nothing changes in the receiver's memory until it names the sender again.
19. Each change of a peer is told once; nobody is called lost without a cause, and who is gone is
    known to be. A peer that is being removed takes no requests; its removal ends after all that
    was sent to it before, leaves nothing behind, and then it can be met again.

Of 6 there is an exception: after an error that spoke of something dead, bytes may still land, so
that memory is not looked at (a path that is dead for the sender may be slow, not silent).
"""

from __future__ import annotations

import gc
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from tep.control.channel import Drop
from tep.core.stats import EngineStats
from tep.engine import TransferEngine
from tep.sim.clock import FabricEnv
from tep.sim.row_log import RowLog
from tep.testing.case import Violation
from tests.support.inside import machine_of
from tests.world.lab import BLANK, FREED, USED, Host, is_of_read
from tests.world.liveness import go_on, hear_of_failures, lasts
from tests.world.play import Play
from tests.world.scenario import Scenario
from tests.world.sizes import set_sizes
from tests.world.specs import SENDER
from tests.world.stage import Run, Stage, Wait
from tests.world.tap import Ledger

_YOUNGER_MAX: Final = 100
_OLDER_MAX: Final = 10
"""After so many collections of one generation the next one is collected as well."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The record of a run that kept all promises.

    Attributes:
        states: the final state of each transfer's rounds: "done", "cancelled", "failed", or
            "refused" if the submit raised; "" for a round that never began.
        seen: the coverage counters, by name.
        rows: rows and messages posted.
        end_ps: time of the last event.
    """

    states: tuple[tuple[str, ...], ...]
    seen: dict[str, int]
    rows: int
    end_ps: int


def replay(seed: int, *, row_log: RowLog | None = None) -> Outcome:
    """Play the scenario drawn from a seed. Raises Violation."""
    return run_scenario(Scenario.draw(seed), row_log=row_log)


def run_scenario(
    scenario: Scenario,
    *,
    engine_class: type[TransferEngine] = TransferEngine,
    row_log: RowLog | None = None,
    env: FabricEnv | None = None,
) -> Outcome:
    """Play a scenario to its end and judge it.

    Args:
        scenario: what happens.
        engine_class: the engine, or a subclass with something to prove.
        row_log: takes everything that happens on the fabric; its digest is the same each time.
        env: the clock, where it is not an ordinary one; then there is no liveness phase.

    Raises:
        Violation: a promise was broken, or the engine raised where it must not.
    """
    with _without_collector(), _unlogged(), set_sizes(scenario.sizes):
        return _play(scenario, engine_class, row_log, env)


@contextmanager
def _unlogged() -> Iterator[None]:
    """Keep what engines log of drawn faults off stderr, unless the program has set up logging."""
    log, handler = logging.getLogger("tep"), logging.NullHandler()
    if log.hasHandlers():
        yield
        return
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Pause Python's garbage collector; at the end it looks at what is new, rarely at the rest.

    Engines and their parts refer to each other, so all of a run becomes garbage at once, at its
    end. Collections before that find nothing, and make its objects old, which costs the later ones:
    a quarter of the time of a run.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
            _, younger, older = gc.get_count()
            gc.collect(0 if younger < _YOUNGER_MAX else 1 if older < _OLDER_MAX else 2)


def _play(
    scenario: Scenario,
    engine_class: type[TransferEngine],
    row_log: RowLog | None,
    env: FabricEnv | None,
) -> Outcome:
    play = Play(scenario, engine_class, row_log, env)
    try:
        play.run()
        _judge(play)
        if env is None:
            if not any(lasts(fault) for fault in play.stage.broken):
                hear_of_failures(play.stage, 0)
            if play.stage.broken or play.stage.barred:
                go_on(play.stage)
            hear_of_failures(play.stage)
    except Violation as found:
        raise _told(str(found), scenario, engine_class, env) from None
    except Exception as error:  # whatever a broken engine raises is a finding
        what = f"the engine raised {type(error).__name__}: {error}"
        raise _told(what, scenario, engine_class, env) from error
    return _outcome(play)


def _told(
    what: str, scenario: Scenario, engine_class: type[TransferEngine], env: FabricEnv | None
) -> Violation:
    again = None if env is not None else partial(run_scenario, engine_class=engine_class)
    return Violation(f"{what}\n{_again(scenario)}", scenario, again)


def _again(scenario: Scenario) -> str:
    if Scenario.draw(scenario.chaos.seed) == scenario:
        return f"replay: python -m tests.world {scenario.chaos.seed}"
    return f"replay: tests.world.oracle.run_scenario({scenario!r})"


def _outcome(play: Play) -> Outcome:
    stage = play.stage
    seen = stage.seen
    for host in stage.lab.hosts.values():
        for what, times in host.ledger.seen.items():
            seen[what] += times
        seen["turn among others"] += host.ledger.turns.crowded
    for what, times in stage.lab.fabric.seen.items():
        if what not in seen:  # posts are counted where engines make them
            seen[what] = times
    states = []
    for place, spec in enumerate(stage.scenario.transfers):
        runs = (stage.runs.get((place, k)) for k in range(spec.rounds + spec.again))
        states.append(tuple("" if run is None else run.state for run in runs))
    return Outcome(tuple(states), dict(seen), stage.lab.fabric.rows, stage.lab.env.now)


def _judge(play: Play) -> None:
    """Look at everything once nothing can happen any more."""
    stage = play.stage
    hosts = stage.lab.hosts.values()
    stage.wrong += stage.lab.fabric.violations
    for host in hosts:
        stage.wrong += host.ledger.wrong
        stage.wrong += [str(error) for error in host.engine.callback_errors]
    play.mail.judge()
    stage.echo.judge()
    play.reader.judge()
    play.company.judge()
    if stage.wrong:
        stage.fail("")
    for run in stage.runs.values():
        _judge_run(stage, run)
    for host in hosts:
        if host.live:
            messages = play.mail.handles.values() if host.name == SENDER else ()
            states = [handle.state.value for handle in messages] + stage.echo.states(host)
            if host.name == SENDER:
                states += play.reader.states()
            _judge_engine(stage, host, states)
        if host.name != SENDER:
            _judge_memory(stage, host)
            _judge_counts(stage, host)


def _judge_run(stage: Stage, run: Run) -> None:
    """4 and 6: it ended; and if not well, nothing landed since."""
    handle = run.handle
    if handle is None:
        if run.posted:
            stage.fail(f"{run} was refused, and yet {run.posted} rows of it were posted")
        return
    if not run.settled and (run.sender.live or run.sender is stage.sender):
        stage.fail(f"{run} never ended: {handle.describe()}")
    for host, dst, n in run.used:
        if host.live and host.memory[dst : dst + n] not in (USED * n, FREED * n):
            stage.fail(f"bytes of {run} landed at {host.name} after its count had fired")
    if run.state == "done":
        for host, pieces in zip(run.hosts, run.area.pieces):
            if host.live and not stage.lab.landed(host, pieces):
                stage.fail(f"bytes of {run} at {host.name} changed after it was done")
    for host, before in zip(run.hosts, run.snapshot):
        if host.memory[run.area.start : run.area.stop] != before:
            stage.fail(f"bytes of {run} landed at {host.name} after it ended {run.state}")


def _judge_engine(stage: Stage, host: Host, others: list[str]) -> None:
    """4 and 10: idle, and the statistics say what crossed the seam.

    `others`: how its messages, answers and reads ended.
    """
    engine, ledger = host.engine, host.ledger
    ended = Counter(others)
    if host.name == SENDER:
        mine = (run for run in stage.runs.values() if run.sender is host)
        ended.update(run.state for run in mine if run.handle is not None)
    open_waits = sum(w.host is host and not w.settled and not w.claimed for w in stage.waits)
    stats = engine.stats()
    left = {imm: n - host.used[imm] for imm, n in ledger.imms.items() if n != host.used[imm]}
    unexpected = dict(stats.imms_unexpected)
    for imm in [imm for imm in {**left, **unexpected} if stage.failed_under(imm, host)]:
        left.pop(imm, None)  # it is burnt: what came before or comes later counts for nobody
        unexpected.pop(imm, None)
    facts: tuple[tuple[str, object, object], ...] = (
        ("transfers done", ended["done"], stats.transfers_done),
        ("transfers cancelled", ended["cancelled"], stats.transfers_cancelled),
        ("transfers failed", ended["failed"], stats.transfers_failed),
        ("transfers submitted", sum(ended.values()), stats.transfers_submitted),
        ("rows and bytes of each NIC", list(zip(ledger.rows, ledger.nbytes)), list(stats.nics)),
        ("rows and bytes that were read", _read_by(ledger), list(stats.reads)),
        ("immediates counted", sum(ledger.imms.values()), stats.imms_counted),
        ("counts left over", left, unexpected),
        ("expectations open", open_waits, stats.expectations),
        ("rows outstanding", 0, sum(stats.rows_outstanding)),
        ("rows in the backlog", 0, stats.rows_backlog),
        ("control messages dropped", {}, _dropped(stats)),
        ("busy", False, machine_of(engine).busy()),
    )
    for what, true, told in facts:
        if true != told:
            stage.fail(f"engine {host.name}: {what}: it says {told}, but that is {true}")
    engine.deregister(host.mr)  # raises if a transfer is still thought to read from it
    if stage.lab.spans:
        engine.deregister(host.shelf_mr)


def _read_by(ledger: Ledger) -> list[tuple[int, int]]:
    return list(zip(ledger.reads, ledger.read_bytes))


def _dropped(stats: EngineStats) -> dict[str, int]:
    """Control messages that no peer should have sent; answers that come late are no fault."""
    return {why: n for why, n in stats.control_dropped if why != Drop.UNASKED.value}


def _judge_memory(stage: Stage, host: Host) -> None:
    """2 and 9: what no transfer to this incarnation aimed at is as it was."""
    memory = bytearray(host.memory)
    for start, stop in host.freed:
        if memory.count(FREED, start, stop) != stop - start:
            stage.fail(f"bytes of {host.name} changed after it had removed the sender")
        memory[start:stop] = BLANK * (stop - start)
    for run in stage.runs.values():
        for at, pieces in zip(run.hosts, run.area.pieces):
            if at is host:
                for _, dst, n in pieces:
                    memory[dst : dst + n] = BLANK * n
    if memory.count(BLANK) != len(memory):
        where = next(k for k, value in enumerate(memory) if value != BLANK[0])
        stage.fail(f"a stray write at byte {where} of {host.name}")


def _judge_counts(stage: Stage, host: Host) -> None:
    """4: as many immediates as announced, and nobody waits for what is here."""
    due: defaultdict[int, int] = defaultdict(int)
    most: defaultdict[int, int] = defaultdict(int)
    for (place, number), run in stage.runs.items():
        if host in run.hosts and not run.spec.silent:
            done = run.state == "done"
            for imm, count, _ in stage.dues(place, number, host.name):
                most[imm] += count
                due[imm] += count * done
    arrived = {imm: n for imm, n in host.ledger.imms.items() if not is_of_read(imm)}
    for imm in {**arrived, **due}:
        arrived.setdefault(imm, 0)
        if not due[imm] <= arrived[imm] <= most[imm] and host.live:
            stage.fail(
                f"{arrived[imm]} immediates {imm:#x} arrived at {host.name}, "
                f"of {due[imm]} due and {most[imm]} possible"
            )
    ahead: set[int] = set()
    for wait in stage.waits:
        if wait.host is host and host.live and not wait.settled:
            _judge_open(stage, wait, first=wait.imm not in ahead)
            ahead.add(wait.imm)


def _judge_open(stage: Stage, wait: Wait, *, first: bool) -> None:
    """Nothing is left to happen, and this never fired: was it right?"""
    host = wait.host
    spare = host.ledger.imms[wait.imm] - host.used[wait.imm]
    runs = stage.awaited(wait)
    sent = all(run is not None and run.state == "done" for run in runs)
    if sent or (first and spare >= wait.count):
        stage.fail(
            f"imm {wait.imm:#x} at {host.name} never fired: {spare} of {wait.count} are here"
            + (f", and {runs} are done" if sent else "")
        )

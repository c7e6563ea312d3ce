"""The simulated clock: order, deadlines, ends, and simpy's own events beside calls."""

from __future__ import annotations

import pytest
import simpy

from tep.base.errors import UsageError
from tep.sim.clock import FabricEnv, Turned


def test_calls_run_in_time_then_in_order_made() -> None:
    """Ties broken otherwise than by insertion would make traces depend on the heap's whim."""
    env = FabricEnv()
    log: list[tuple[int, str]] = []

    def note(what: str) -> None:
        log.append((env.now, what))
        if what == "spawn":
            env.call_at(env.now, note, "spawned")
            env.call_at(env.now + 5, note, "later")

    for t_ps, what in ((10, "a"), (30, "b"), (10, "spawn"), (0, "now"), (12, "c")):
        env.call_at(t_ps, note, what)
    env.run()
    expected = [(0, "now"), (10, "a"), (10, "spawn"), (10, "spawned"), (12, "c"), (15, "later")]

    assert [*expected, (30, "b")] == log


def test_processes_timeouts_and_conditions_of_simpy_stand_beside_calls() -> None:
    """Researchers write their loads as simpy processes."""
    env = FabricEnv()
    log: list[tuple[int, str]] = []
    env.call_at(10, lambda what: log.append((env.now, what)), "call")

    def walker():
        for _ in range(2):
            yield env.timeout(10)
            log.append((env.now, "walk"))
        yield env.all_of([env.timeout(1), env.timeout(7)])
        return "walked"

    assert "walked" == env.run(env.process(walker()))
    assert [(10, "call"), (10, "walk"), (20, "walk")] == log
    assert 27 == env.now
    with pytest.raises(RuntimeError, match="No scheduled events left"):
        env.run(env.event())


def test_a_users_own_steps_run_calls() -> None:
    """A user's own loop over step() must see the fabric move."""
    env = FabricEnv()
    seen: list[int] = []
    env.call_at(5, seen.append, 1)
    env.call_at(5, seen.append, 2)
    env.step()

    assert ([1], 5) == (seen, env.now)
    env.step()
    with pytest.raises(simpy.core.EmptySchedule):
        env.step()


def test_a_float_time_is_refused() -> None:
    """Float time rounds differently at different distances from zero: no two machines' traces."""
    env = FabricEnv()
    with pytest.raises(UsageError, match=r"delay 1\.5: simulated time is an integer count"):
        env.timeout(1.5)
    with pytest.raises(TypeError):
        env.run(1.5)


def test_run_to_a_time() -> None:
    """The clock must stand at the time asked for, also where nothing happens then."""
    env = FabricEnv()
    seen: list[int] = []
    env.call_at(10, seen.append, 10)
    env.call_at(20, seen.append, 20)
    env.run(10)
    assert ([10], 10) == (seen, env.now)
    env.run(15)
    assert ([10], 15) == (seen, env.now)
    env.run(100)
    assert ([10, 20], 100) == (seen, env.now)
    with pytest.raises(UsageError, match="stands at 100 ps already"):
        env.run(99)


def test_run_until_says_why_it_came_back() -> None:
    """A driver tells a timeout from a stall by this alone."""
    env = FabricEnv()
    seen: list[int] = []
    env.call_at(10, seen.append, 10)

    assert Turned.DEADLINE is env.run_until(lambda: bool(seen), 9)
    assert 9 == env.now
    assert Turned.SETTLED is env.run_until(lambda: bool(seen), 10)
    assert Turned.EMPTY is env.run_until(lambda: False, 1000)
    assert 10 == env.now, "a stall is noticed at once, not at the deadline"


def test_an_exception_in_an_event_leaves_the_clock_usable() -> None:
    """After a failed assertion in a callback a notebook goes on with the same cluster."""
    env = FabricEnv()
    env.call_at(1, lambda _: 1 // 0)
    env.call_at(2, lambda _: None)
    with pytest.raises(ZeroDivisionError):
        env.run()
    env.run()

    assert (2, False) == (env.now, env.running)


def test_running_inside_running_is_refused() -> None:
    """A nested run would pull events from under the outer one's feet."""
    env = FabricEnv()
    env.call_at(1, lambda _: env.run())
    with pytest.raises(UsageError, match="use `await`"):
        env.run()


def test_daemons_keep_nothing_alive() -> None:
    """Watched words are read for ever; a simulation that never ends would be a stall unseen."""
    env = FabricEnv()
    looks: list[int] = []

    def look(_: object) -> None:
        looks.append(env.now)
        env.call_daemon(env.now + 10, look)

    env.call_daemon(10, look)
    env.call_at(35, looks.append, -1)
    env.run()

    assert [10, 20, 30, -1, 40] == looks, "one last look after the last event"
    assert 50 == env.next_ps(), "a daemon's, which nobody waits for"


def test_a_daemons_last_look_can_bring_events() -> None:
    """A word written by the last event must still be seen."""
    env = FabricEnv()
    words: list[str] = []
    seen: list[str] = []

    def look(_: object) -> None:
        if words:
            env.call_at(env.now + 1, seen.append, words.pop())
        env.call_daemon(env.now + 10, look)

    for _ in range(3):
        env.call_daemon(10, look)
    env.call_at(35, words.append, "written")

    assert Turned.SETTLED is env.run_until(lambda: bool(seen))


def test_ties_are_shuffled_by_their_seed_only() -> None:
    """Order of one instant is a schedule to explore; order across instants is causality."""

    def order(seed: int | None) -> list[int]:
        env = FabricEnv()
        if seed is not None:
            env.shuffle_ties(seed)
        seen: list[int] = []
        for k in range(40):
            env.call_at(k // 20, seen.append, k)
        env.run()
        return seen

    assert [*range(40)] == order(None)
    assert order(1) == order(1)
    assert order(1) != order(2)
    assert [*range(20)] == sorted(order(1)[:20])


def test_stall_report_joins_what_engines_say() -> None:
    """One engine's silence must not hide another's report."""
    env = FabricEnv()
    assert "no engine reports anything outstanding" == env.stall_report()
    env.reporters += [lambda: "a waits", lambda: "", lambda: "b waits"]

    assert "a waits\nb waits" == env.stall_report()

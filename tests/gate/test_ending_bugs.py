"""The gate of what may end an engine, or make it wait for ever: each planted bug is found.

A bug here is looked for by the test that must find it, or by a trial of the same kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest

from tep.backends.loopback import Hub, open_domains
from tep.base.errors import StaleEpoch
from tep.control.channel import Channel
from tep.control.failover import Fencing
from tep.control.messages import Failed, FenceOff, encode
from tep.core.handles import Handle
from tep.core.outbox import Outbox
from tep.core.regions import MrHandle
from tep.drivers.threads import InlineDriver
from tep.engine import TransferEngine
from tep.engine.machine import Machine
from tests.e2e import test_callbacks
from tests.gate.registry import Change, changed
from tests.property.test_hostile_control import (
    World,
    test_a_handler_that_raises_drops_its_message_alone,
)
from tests.support.inside import worker_of
from tests.support.pairs import pair
from tests.unit.core import test_backpressure


class Found(NamedTuple):
    """A bug, and what finds it."""

    plant: Callable[[], list[Change]]
    trial: Callable[[], object]


BUGS: dict[str, Found] = {}


def found_by(
    trial: Callable[[], object],
) -> Callable[[Callable[[], list[Change]]], Callable[[], list[Change]]]:
    """Register a bug with what must find it."""

    def register(plant: Callable[[], list[Change]]) -> Callable[[], list[Change]]:
        BUGS[plant.__name__] = Found(plant, trial)
        return plant

    return register


# ---------------------------------------------------------------------- control messages


def speaks_for_another() -> None:
    """Engine c has the path of a at b fenced off."""
    world = World()
    world.transfer()
    world.say(encode(FenceOff(1, world.a.main_address.domains[0], 0, (1,))))
    world.turn()
    far = worker_of(world.b).group.far_ends.get(0, world.a.main_address.domains[0])
    assert far is None or far.fence is None
    assert dict(world.b.stats().control_dropped)["it speaks for another engine"]
    world.transfer()


def asks_about_no_nic() -> None:
    """Engine c asks about a NIC that b has not."""
    world = World()
    world.say(encode(FenceOff(1, world.c.main_address.domains[0], 63, (1,))))
    world.turn()
    assert "its handler raised" not in dict(world.b.stats().control_dropped)
    world.transfer()


def gives_much_up() -> None:
    """Engine c says again and again that something of it failed."""
    world = World()
    for k in range(300):
        world.say(encode(Failed(k, k, "c", "it was cancelled", ((2**20 + 512 * k, 512),))))
        if k % 16 == 0:
            world.turn()
    world.turn()
    members = worker_of(world.b).members
    assert all(len(known) <= 256 for known in members._serials.values())
    stats = world.b.stats()
    assert stats.imms_burnt <= 1 << 16
    assert stats.imms_burnt + stats.imms_burnt_forgotten == 300 * 512


def a_handler_raises() -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_a_handler_that_raises_drops_its_message_alone("b", patch)


@found_by(speaks_for_another)
def nobody_looks_who_speaks() -> list[Change]:
    """A control message counts as sent by the engine that it names."""
    return [(Channel, "engine_of", lambda *_: b"")]


@found_by(a_handler_raises)
def no_guard() -> list[Change]:
    """An exception of a message's handler leaves the step."""
    return [(Channel, "guard", lambda _self, _address, handler, *args: handler(*args))]


@found_by(asks_about_no_nic)
def no_bounds_of_nics() -> list[Change]:
    """The number of a NIC in a message is an index at once."""
    return [(Fencing, "admit", lambda *_: True)]


@found_by(gives_much_up)
def no_bounds_of_burnt_immediates() -> list[Change]:
    """Immediates that peers give up are remembered without a limit."""
    return [("tep.core.imm", "BURNT_MAX", 10**9)]


@found_by(gives_much_up)
def no_bounds_of_serials() -> list[Change]:
    """Each notice of a peer is remembered."""
    return [("tep.control.membership", "_SERIALS_MAX", 10**9)]


# ---------------------------------------------------------------------- lines and memory


@found_by(lambda: test_backpressure.test_a_silent_peer_holds_up_nobody_on_the_chaos_fabric(0))
def one_line_for_all_peers() -> list[Change]:
    """A message that a NIC does not take keeps all NICs from those behind it."""

    def post(self) -> bool:
        while self.turns:
            line = self.turns[0]
            line.window = 1 << 30
            if not line.waiting:
                self.turns.popleft()
                line.in_turn = False
            elif not self._offer(line):
                return False
        return True

    return [(Outbox, "post", post)]


@found_by(partial(test_backpressure.test_a_write_that_races_with_deregister_is_refused, "single"))
def deregister_races_with_submit() -> list[Change]:
    """A region counts as there because it was when the verb looked."""
    return [(MrHandle, "closed", property(lambda _: False, lambda *_: None))]


# ---------------------------------------------------------------------- waits and callbacks


class _Kicked(InlineDriver):
    """A driver that counts its kicks: a thread might look at that moment by chance."""

    kicks = 0

    def kick(self) -> None:
        self.kicks += 1


def a_verb_raises() -> None:
    hub, driver = Hub(7), _Kicked()

    def engine(name: str, epoch: int, driver: InlineDriver) -> TransferEngine:
        opened = open_domains(1, hub=hub, name=name)
        return TransferEngine(opened.domains, driver=driver, name=name, epoch=epoch)

    with (
        engine("a", 1, driver) as a,
        engine("b", 1, InlineDriver()) as former,
        engine("b", 2, InlineDriver()) as later,
    ):
        a.add_peer_group([former.main_address])
        driver.kicks = 0
        with pytest.raises(StaleEpoch):
            a.add_peer_group([later.main_address, former.main_address])
        assert driver.kicks


@found_by(a_verb_raises)
def nobody_kicks_for_the_replaced() -> list[Change]:
    """A later incarnation is met by a verb that then raises, and the engine sleeps on."""
    real = Machine._replaced

    def asleep(self, link) -> None:
        driver, self.driver = self.driver, _Deaf(self.driver)
        try:
            real(self, link)
        finally:
            self.driver = driver

    return [(Machine, "_replaced", asleep)]


class _Deaf:
    """A driver whose kick does nothing."""

    def __init__(self, driver: Any) -> None:
        self.now_s = driver.now_s

    def kick(self) -> None:
        pass


@found_by(
    lambda: test_callbacks.test_whatever_a_callback_raises_ends_that_callback_only(
        "inline", SystemExit
    )
)
def callbacks_raise_exceptions_only() -> list[Change]:
    """A callback that calls sys.exit() is a bug in tep."""

    def call(self, callback) -> None:
        try:
            callback(self)
        except Exception as error:  # noqa: BLE001  # the planted mistake itself
            self._owner.report_callback_error(self, callback, error)

    return [(Handle, "_call", call)]


def waits_for_a_month() -> None:
    """A worker sleeps until a heartbeat that is due in five weeks."""
    with pair(threads=True) as p:
        p.a.watch_peer(p.b.main_address, every_s=3e6, lost_after_s=math.inf)
        for _ in range(3):
            p.a.driver.call(lambda: None)
            p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 1).wait(5)
            assert p.a.driver._thread.join(0.05) is None
            assert p.a.driver._thread.is_alive()


# The worker's traceback, as a bug in tep leaves it.
@found_by(waits_for_a_month)
def any_time_for_the_system() -> list[Change]:
    """poll() overflows at 24.8 days."""
    return [("tep.drivers.threads", "system_s", lambda left_s: max(left_s, 0.0))]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_found(name: str) -> None:
    """A bug that survives could be in the product, and nobody would know."""
    bug = BUGS[name]
    assert bug.plant.__doc__
    with changed(bug.plant()), pytest.raises(BaseException) as found:  # in any way
        bug.trial()
    assert not isinstance(found.value, pytest.skip.Exception)


@pytest.mark.parametrize("name", BUGS)
def test_the_engine_as_it_is_passes(name: str) -> None:
    """A trial that fails by itself finds everything, and shows nothing."""
    BUGS[name].trial()

"""Notices of burnt immediates: sent until they are answered, taken once, and bounded."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from tep.base.errors import BurntImm, FabricError
from tep.base.units import PS_PER_NS
from tep.control import channel, membership
from tep.control.channel import Channel
from tep.control.messages import PRUNED_MAX, WHY_MAX, Answer, Failed, decode, encode
from tep.engine import TransferEngine
from tests.support.inside import link_of, worker_of
from tests.support.pairs import Pair, pair
from tests.support.senders import PAGES, World, world

Asked = tuple[Callable[[int], Failed], Callable[[Answer], object], Callable[[str], object]]
YES = Answer(1, "", ())


class Deaf:
    """Replaces Channel.ask: keeps the notices, and answers them when a test says so."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []

    def __call__(
        self,
        _link: object,
        make: Callable[[int], Failed],
        told: Callable[[Answer], object],
        lost: Callable[[str], object],
    ) -> None:
        self.asked.append((make, told, lost))

    def lose(self) -> list[Failed]:
        """None of the notices so far is answered; return them."""
        asked, self.asked = self.asked, []
        for _, _, lost in asked:
            lost("no answer")
        return [make(1) for make, _, _ in asked]

    def take(self) -> list[Failed]:
        """All notices so far are answered; return them."""
        asked, self.asked = self.asked, []
        for _, told, _ in asked:
            told(YES)
        return [make(1) for make, _, _ in asked]


def cancelled(w: World, imm: object = 7) -> None:
    """Have a transfer of a cancelled before anything of it is posted."""
    w.write(w.a, imm).cancel()
    w.rest()


def burn(w: World, imms: list[int], why: str) -> None:
    """As if a transfer of a to c had failed under these immediates."""
    job = SimpleNamespace(imms_by_peer=lambda: [(link_of(w.a, w.c), imms)])
    worker_of(w.a).notices.burn(SimpleNamespace(failure=why, job=job))


def tell(
    engine: TransferEngine, peer: TransferEngine, serial: int, imms: tuple[tuple[int, int], ...]
) -> None:
    """Have an engine tell a peer of failed requests, once."""
    failed = partial(Failed, serial=serial, who=engine.name, reason="no", imms=imms)
    worker_of(engine).channel.say_once(link_of(engine, peer), failed)


def say(p: Pair, serial: int, imms: tuple[tuple[int, int], ...]) -> None:
    """Have a tell b of failed requests, once."""
    tell(p.a, p.b, serial, imms)
    p.quiet(20)


# ---------------------------------------------------------------------- the sender


def test_a_notice_that_is_lost_is_sent_again_with_its_serial() -> None:
    """Its reader would wait for its whole timeout; under a new serial it would count twice."""
    with world() as w, mock.patch.object(Channel, "ask", deaf := Deaf()):
        cancelled(w)
        assert "c has not been told of 0 burnt immediates, and has not answered 1 notices" in (
            w.a.explain()
        )
        tries = []
        for _ in range(4):
            tries += deaf.lose()
            w.a.driver.kick()
            w.rest()
        assert [tries[0]] * 4 == tries
        assert (((7, 1),), "it was cancelled", "a (epoch 1)") == (
            tries[0].imms, tries[0].reason, tries[0].who,
        )  # fmt: skip
        deaf.take()
        w.rest()
        assert [] == deaf.asked
        assert not worker_of(w.a).channel.busy
        assert "burnt" not in w.a.explain()


def test_a_peer_that_does_not_answer_is_told_less_and_less_often() -> None:
    """It would be told a hundred times a second for ever, over all paths to it."""
    with world(probe_first_s=0.01, probe_max_s=1.0) as w:
        times: list[float] = []

        def unheard(*those: Callable[..., object]) -> None:
            times.append(w.a.driver.now_s())
            those[-1]("nobody answered")

        with mock.patch.object(Channel, "ask", unheard):
            cancelled(w)
        assert channel._TRIES_MAX + 1 == len(times), "and then not at all, by itself"
        waits = [late - early for early, late in itertools.pairwise(times)]
        assert waits[0] == pytest.approx(0.01, rel=0.01)
        assert max(waits) == pytest.approx(1.0, rel=0.01)
        assert all(late > 0.99 * early for early, late in itertools.pairwise(waits))


@pytest.mark.parametrize("how", ["heard", "another failure"])
def test_a_peer_that_was_silent_for_long_is_told_when_it_is_heard(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that was cut off for an hour would never learn what had failed before."""
    monkeypatch.setattr(channel, "_TRIES_MAX", 0)
    with world() as w:
        waits = w.c.expect_imm_count(7, PAGES)
        with mock.patch.object(Channel, "ask", lambda *those: those[-1]("nobody answered")):
            cancelled(w)
        assert not waits.finished
        if how == "heard":
            worker_of(w.a).notices.heard(link_of(w.a, w.c))
            w.a.driver.kick()
        else:
            cancelled(w, 9)
        w.rest()
        assert waits.failed


def test_immediates_that_fail_together_share_a_notice() -> None:
    """A request of thousands of them would cost as many messages."""
    with world() as w, mock.patch.object(Channel, "ask", deaf := Deaf()):
        cancelled(w, np.repeat(np.array([6, 7, 8, 10, 3], np.uint32), PAGES // 5))
        (notice,) = deaf.take()
        assert ((3, 1), (6, 3), (10, 1)) == notice.imms


@pytest.mark.parametrize("room", [512, 4096])
def test_each_notice_fits_into_a_message_and_together_they_are_all(room: int) -> None:
    """A message that is too long is refused each time, and its reader waits in vain."""
    alone = list(range(0, 2000, 2))
    with world() as w, mock.patch.object(Channel, "ask", deaf := Deaf()):
        told: list[int] = []
        with mock.patch.object(Channel, "control_bytes", room):
            burn(w, [*range(10_000, 50_000), *alone], "é" * 500)
            while w.rest() or w.a.driver.kick() or w.rest() or deaf.asked:
                assert len(deaf.asked) <= channel._NOTICES_MAX
                for notice in deaf.take():
                    assert len(encode(notice)) <= room
                    assert notice == decode(encode(notice))
                    assert sum(n for _, n in notice.imms) <= PRUNED_MAX
                    assert len(notice.reason) <= WHY_MAX
                    told += [imm for first, n in notice.imms for imm in range(first, first + n)]
        assert sorted(told) == sorted([*range(10_000, 50_000), *alone])


def test_reasons_stay_with_their_immediates() -> None:
    """A reader would look for a fault that another transfer had."""
    with world() as w, mock.patch.object(Channel, "ask", deaf := Deaf()):
        for imms, why in (([1, 2], "one"), ([3], "two\nand more"), ([4], "one")):
            burn(w, imms, why)
        w.a.driver.kick()
        w.rest()
        assert {"one": ((1, 2), (4, 1)), "two": ((3, 1),)} == {
            n.reason: n.imms for n in deaf.take()
        }


def test_immediates_beyond_the_bound_are_told_to_nobody_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer that is gone for an hour must not fill the memory; the operator learns of it."""
    monkeypatch.setattr(channel, "_WAITING_MAX", 2)
    with world() as w, caplog.at_level(logging.WARNING, "tep"):
        waits = [w.c.expect_imm_count(imm, 1) for imm in range(PAGES)]
        cancelled(w, np.arange(PAGES, dtype=np.uint32))
        assert 2 == sum(wait.failed for wait in waits)
        lost = f"{PAGES - 2} burnt immediates are not told to peers"
        assert f"{lost}: too many at once" in w.a.stall_report()
        with pytest.raises(BurntImm):  # they are burnt here all the same
            w.write(w.a, PAGES - 1)
    assert lost in caplog.text


@pytest.mark.parametrize("what", ["removed", "restarted"])
@pytest.mark.parametrize("after_ns", range(0, 500, 100))
def test_who_is_gone_while_it_is_told_holds_nothing_up(what: str, after_ns: int) -> None:
    """Nobody is left to tell: what was to be told is forgotten, with the record."""
    with world(probe_first_s=20e-6, probe_max_s=40e-6) as w:
        w.cut_off(w.write(w.a))
        fresh = w.cluster.restart("c")
        w.cluster.env.run(until=w.cluster.env.now + after_ns * PS_PER_NS)
        if what == "removed":
            removal = w.a.remove_peer(w.c.main_address)
            w.rest()
            assert removal.ok, removal.describe()
        else:
            w.a.add_peer_group([fresh.main_address])
            w.rest()
        assert [] == worker_of(w.a).notices.describe()
        assert 0 == w.a.stats().imms_burnt
        _, desc = fresh.reg_mr(np.zeros(8, np.uint8))
        assert w.a.submit_single_write(8, (w.mrs["a"], 0), (desc, 0), 7).wait().ok, "a new pair"


def test_nobody_is_told_where_no_nic_is_left() -> None:
    """The engine would wake up for it again and again."""
    with world() as w:
        for nic in range(2):
            w.cluster.kill_nic("a", nic)
        sent = w.write(w.a)
        w.rest()
        assert sent.failed
        assert [] == worker_of(w.a).notices.describe()
        assert not worker_of(w.a).channel.busy


def test_what_failed_because_its_peer_restarted_is_told_to_nobody() -> None:
    """The next incarnation has never heard of it, and its record is another one."""
    with world() as w:
        sent = w.write(w.a)
        w.a.add_peer_group([w.cluster.restart("c").main_address])
        w.rest()
        assert sent.failed
        assert 0 == w.a.stats().imms_burnt


def test_closing_tells_what_no_peer_has_answered() -> None:
    """It is said once more, since nobody is left to repeat it."""
    with pair() as p:
        waits = p.b.expect_imm_count(7, 1)
        with mock.patch.object(Channel, "ask", lambda *those: those[-1]("nobody answered")):
            p.a.submit_barrier([p.desc], 7).cancel()
            p.quiet()
        assert not waits.finished
        p.a.close()
        with pytest.raises(FabricError, match="gave it up: it was cancelled"):
            waits.wait(10)


# ---------------------------------------------------------------------- the receiver


def test_a_late_copy_burns_nothing_again() -> None:
    """Whoever has removed the immediate at both ends would be told of a failure that is over."""
    with pair() as p:
        say(p, 5, ((7, 2), (20, 1)))
        assert 3 == p.b.stats().imms_burnt
        p.b.remove_imm(7)
        say(p, 5, ((7, 2), (20, 1)))
        assert [8, 20] == sorted(worker_of(p.b).imms.burnt.why)
        say(p, 6, ((7, 1),))
        assert [7, 8, 20] == sorted(worker_of(p.b).imms.burnt.why)


def test_each_copy_is_answered() -> None:
    """The first answer may have been lost: who hears nothing repeats the notice for ever."""
    with pair() as p:
        answers: list[Answer] = []
        link = link_of(p.a, p.b)
        for _ in range(2):
            worker_of(p.a).channel.ask(
                link, lambda n: Failed(n, 5, "a", "no", ((7, 1),)), answers.append, pytest.fail
            )
            p.quiet()
        assert ["", ""] == [answer.why for answer in answers]


def test_serials_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer's messages must not fill the receiver's memory."""
    monkeypatch.setattr(membership, "_SERIALS_MAX", 3)
    with pair() as p:
        for serial in range(1, 9):
            say(p, serial, ((serial, 1),))
        for imm in range(1, 9):
            p.b.remove_imm(imm)
        for serial in (6, 7, 8, 5):
            assert 0 == p.b.stats().imms_burnt, "it remembers the last three"
            say(p, serial, ((serial, 1),))
        assert 1 == p.b.stats().imms_burnt, "and not the fourth"


def test_engines_whose_serials_are_remembered_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines come and go; what is remembered of each would stay for ever."""
    monkeypatch.setattr(membership, "_ENGINES_MAX", 1)
    with world() as w:
        for engine, imm, burnt in ((w.a, 7, 1), (w.b, 8, 1), (w.b, 8, 0), (w.a, 7, 1)):
            tell(engine, w.c, 5, ((imm, 1),))
            engine.driver.kick()
            w.rest()
            assert burnt == w.c.stats().imms_burnt, "it remembers the last engine alone"
            w.c.remove_imm(imm)


def test_the_first_reason_stays() -> None:
    """A later notice of the same immediate would hide what went wrong first."""
    with pair() as p:
        say(p, 1, ((7, 1),))
        link = link_of(p.a, p.b)
        worker_of(p.a).channel.say_once(link, lambda n: Failed(n, 2, "z", "later", ((7, 1),)))
        p.quiet(20)
        with pytest.raises(FabricError, match="a gave it up: no"):
            p.b.expect_imm_count(7, 1).wait(1)

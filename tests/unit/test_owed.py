"""What a peer is owed after transfers failed: what a retry waits for, and what it does not."""

from __future__ import annotations

from unittest import mock

import pytest

import tep
from tep.api import EngineOptions
from tep.control.channel import Channel
from tep.control.messages import Answer, Missing
from tep.control.telling import _List, _Owed
from tep.core.path import Path, PathEvent
from tep.errors import BusyError
from tests.support.pairs import pair
from tests.support.script import scripted
from tests.support.senders import PAGE, PAGES, World, world


@pytest.mark.parametrize(
    ("came", "late", "waits"), [(0, 0, False), (1, 0, True), (0, 1, True), (2, 3, True)]
)
def test_a_retry_waits_only_if_something_of_the_first_try_came(
    came: int, late: int, waits: bool
) -> None:
    """It makes up for one of which nothing came: then there is no news, and no time is lost."""
    owed = _Owed(1.0)
    owed.new[7] = ("why", 40, came, late)
    assert waits == owed.is_to_wait(7)
    assert waits == (7 in owed.new)

    listed = owed.lists[1] = _List(1, "why", {8: (40, came, late), 9: (40, 0, 0)})
    assert waits == owed.is_to_wait(8)
    assert waits == (8 in listed.imms)
    listed.out = True
    assert owed.is_to_wait(9), "the news is on its way"
    assert 9 in listed.imms


def test_a_list_that_is_refused_again_and_again_is_sent_without_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer whose sums never get equal would refuse it for ever."""
    monkeypatch.setattr("tep.control.telling._REFUSED_MAX", 1)
    asked: list[tuple] = []
    with world() as w, mock.patch.object(Channel, "ask", lambda *those: asked.append(those)):
        came = w.cut_off(w.write(w.a))
        w.rest()
        for _ in range(3):
            told = asked[-1][3]
            told(Answer(1, "not yet", (), 0))
            w.a.driver.kick()
            w.rest()
    totals = [entry[-1] for (_, _, message, *_) in asked for entry in message(1).imms]
    assert [came, came, -1, -1] == totals


def _in_doubt(w: World) -> tuple:
    """The news about immediate 7, of which rows may still land on one path, and that path."""
    w.write(w.a).wait()
    link = w.a._peers.link(w.c.main_address, "test")
    telling, path = w.a._worker.telling, link.path(0, 0)
    owed = telling._at(link)
    owed.paths[path] = {7: path.fences}
    return telling, link, owed, path


@pytest.mark.parametrize(("why", "left"), [("", True), ("it cannot fence", False)])
def test_a_path_that_a_peer_cannot_fence_is_not_asked_about_again(why: str, left: bool) -> None:
    """Nobody will ever know what lands there, and a retry would wait for that for ever."""
    with world() as w:
        telling, link, owed, path = _in_doubt(w)
        owed.clearing[path] = False
        with mock.patch.object(w.a._worker.failover, "clear") as clear:
            telling._send(link, owed)
        (asked, told, _) = clear.call_args.args
        told(why)
        assert asked is path
        assert left == (path in owed.paths)


def test_nothing_waits_for_a_peer_where_no_nic_is_left() -> None:
    """Nobody could be told: what waits for that would never end."""
    with world() as w:
        telling, link, owed, _ = _in_doubt(w)
        owed.new[8] = ("why", PAGES, 1, 0)
        assert all(telling._must_wait(link, owed, [imm]) for imm in (7, 8))
        with mock.patch.object(w.a._worker.group, "alive", [False, False]):
            assert not any(telling._must_wait(link, owed, [imm]) for imm in (7, 8))


def test_a_path_that_was_fenced_before_the_peer_was_asked_is_opened_again() -> None:
    """A retry waits for a fence; something else has it fenced first, and leaves it shut."""
    with world() as w:
        telling, link, owed, path = _in_doubt(w)
        assert telling._must_wait(link, owed, [7])
        w.a._worker.group.suspect(path)
        path.to(PathEvent.ASKED)
        path.to(PathEvent.FENCED)
        with mock.patch.object(telling, "_reopen") as reopen:
            telling._send(link, owed)
        reopen.assert_called_once_with(path)


def test_a_path_that_is_fenced_after_news_was_lost_is_opened_again() -> None:
    """A list got lost while a fence was asked for; when that came, nobody asked to have it lifted.

    Found by a search of drawn runs.
    """
    with world() as w:
        telling, link, owed, path = _in_doubt(w)
        owed.clearing[path] = False
        telling._send(link, owed)
        assert path.asking
        telling._missed(link, owed, "nobody answered")
        w.a.driver.kick()
        w.rest()
        assert path.is_up, path


def test_rows_that_went_out_meanwhile_leave_doubts_as_they_are() -> None:
    """The answer is older than these rows, and its sums do not tell them from those in doubt."""
    with world() as w:
        _, link, _, path = _in_doubt(w)
        failover, told = w.a._worker.failover, mock.Mock()
        path.sums.doubt[7] += 1
        w.a._worker.group.suspect(path)
        with mock.patch.object(Channel, "ask") as ask:
            failover.clear(path, told, pytest.fail)
        _, _, answered, _ = ask.call_args.args
        with mock.patch.object(failover, "is_clear", return_value=False):
            answered(Answer(1, "", (failover.acknowledged(path, (7,))[7] + 1,), 0))
        assert {7: 1} == path.sums.doubt
        assert failover.can_clear(path)
        told.assert_called_once_with("")
        assert link.current


def test_nics_that_count_for_no_sender_clear_no_doubts() -> None:
    """They have no sums to compare: asking would fence a path, and nobody would be the wiser."""
    with scripted().engine as engine:
        path = mock.Mock(spec=Path)
        path.sums.doubt, path.sums.sent.forgot, path.unclear = {7: 1}, False, False
        assert not engine._worker.failover.can_clear(path)


def test_the_sums_of_a_removed_peer_are_not_believed() -> None:
    """A transfer that still names it would compare them with those of whoever came after it."""
    with world() as w:
        w.write(w.a).wait()
        link = w.a._peers.link(w.c.main_address, "test")
        assert not any(path.sums.sent.forgot for path in link.paths())
        w.a.remove_peer(w.c.main_address).wait()
        forgot = [path.sums.sent.forgot for path in link.paths()]
        assert forgot
        assert all(forgot)


def test_no_peer_takes_back_more_than_it_sent() -> None:
    """Rows of another sender would be taken back with its own, and their reader would hang."""
    with world() as w:
        for engine, n in ((w.a, 3), (w.b, 2)):
            for _ in range(n):
                engine.submit_single_write(PAGE, (w.mrs[engine.name], 0), (w.desc, 0), 7).wait()
        link = w.a._peers.link(w.c.main_address, "test")
        say = w.a._worker.channel.say_once
        say(link, lambda n: Missing(n, 1, 1, "a", "no", 0, ((7, 1, PAGES, 30, 0, -1),)))
        w.a.driver.kick()
        w.rest()
        assert 2 == dict(w.c.stats().imms_unexpected).get(7, 0)


def test_an_expectation_takes_no_room_of_the_backlog() -> None:
    """As many rows as the limit says are taken behind one; and then the limit still holds."""
    with pair(options=EngineOptions(backlog_rows_max=10)) as p:

        def write(rows: int) -> tep.Transfer:
            pages = tep.Pages(range(rows))
            return p.a.submit_paged_writes(1, (p.mr, pages), (p.desc, pages))

        expectation = p.a.expect_imm_count(7, 1)
        assert expectation in p.a._worker.not_taken()
        p.settle(write(10))
        both = write(5), write(5)
        with pytest.raises(BusyError, match="10 rows wait for NICs already, 1 more pass the lim"):
            write(1)
        p.settle(*both)
        expectation.cancel()

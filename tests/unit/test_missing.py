"""What peers say that they do not send: when it is believed, of whom, and what it ends."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from tep.api import Pages
from tep.control.failures import SERIALS_MAX
from tep.control.messages import Answer, Missing
from tep.errors import FabricError, StallError
from tests.support.pairs import pair
from tests.support.senders import PAGE, PAGES, world


@pytest.mark.parametrize(
    ("after", "count", "late", "fenced", "ended"),
    [
        (1, PAGES, 1, False, "gave it up: no"),
        (1, PAGES, 1, True, "1 of 40 arrived"),
        (1, 1, 1, False, ""),
        (2, PAGES, 1, False, "2 of 40 arrived"),
        (0, 1, 2, False, "gave it up: no"),
        (1, 1, 2, False, ""),
        (1, PAGES, 2, False, "gave it up: no"),
    ],
)
def test_a_row_that_comes_late_is_no_retry_where_nobody_fences_it(
    after: int, count: int, late: int, fenced: bool, ended: str
) -> None:
    """It was taken for one, and who stated its expectation after it waited for its whole timeout.

    Found by a search of drawn runs. Of 40 rows 39 have come; the last arrives after the news. Two
    rows are a retry, and one is all that somebody may wait for. Once its path is fenced it does
    not come, and one row is a retry, too. Where two may be late, one of these has come before.
    """
    with world(failover=False) as w:
        came = Pages(range(PAGES - 1))
        w.a.submit_paged_writes(PAGE, (w.mrs["a"], came), (w.desc, came), 7).wait()
        link = w.a._peers.link(w.c.main_address, "test")
        say = w.a._worker.channel.say_once
        short = (7, 1, PAGES, PAGES - late, late, -1)
        say(link, lambda n: Missing(n, 1, 1, "a", "no", 0, (short,)))
        w.a.driver.kick()
        w.rest()
        if fenced:
            say(link, lambda n: Missing(n, 2, 1, "a", "", 0, ((7, 1, 0, 0, 0, -1),)))
        w.a.driver.kick()
        w.rest()
        for _ in range(after):
            w.a.submit_single_write(PAGE, (w.mrs["a"], 0), (w.desc, 0), 7).wait()
        w.rest()
        waits = w.c.expect_imm_count(7, count)
        with pytest.raises((FabricError, StallError), match=ended) if ended else nullcontext():
            waits.wait(1)


def test_who_names_its_sender_learns_what_that_one_gave_up() -> None:
    """Another one gave the same immediate up before: its word would stand in the way."""
    with world() as w:
        for engine in (w.a, w.b):
            w.cut_off(w.write(engine))
            w.rest()
        with pytest.raises(FabricError, match=r"b .epoch 1. gave it up"):
            w.c.expect_imm_count(7, PAGES, sender=w.b.main_address).wait(1)


def test_each_that_gave_an_immediate_up_ends_one_expectation() -> None:
    """The second one would wait for its whole timeout; and what is used up is not kept."""
    with world() as w:
        for engine in (w.a, w.b):
            w.cut_off(w.write(engine))
            w.rest()
        for name in "ab":
            with pytest.raises(FabricError, match=f"{name} .epoch 1. gave it up"):
                w.c.expect_imm_count(7, PAGES).wait(1)
        assert {} == w.c._worker.failures.broken


@pytest.mark.parametrize(
    ("pruned", "total", "why"),
    [
        (0, PAGES + 1, "not all that were acknowledged have been counted yet"),
        (1, PAGES, "sums are being pruned"),
        (1, -1, ""),
        (0, PAGES, ""),
    ],
)
def test_a_list_waits_until_all_that_it_knows_of_has_been_counted(
    pruned: int, total: int, why: str
) -> None:
    """A row that is counted later would stay in the count, for a retry of which one is missing."""
    with world() as w:
        assert w.write(w.a).wait().ok
        answers: list[Answer] = []
        link = w.a._peers.link(w.c.main_address, "test")
        entry = (7, 1, PAGES + 1, PAGES, 0, total)
        w.a._worker.channel.ask(
            link,
            lambda n: Missing(n, 1, 1, "a", "no", pruned, (entry,)),
            answers.append,
            pytest.fail,
        )
        w.a.driver.kick()
        w.rest()
        assert [why] == [answer.why for answer in answers]
        assert (PAGES if why else 0) == dict(w.c.stats().imms_unexpected).get(7, 0)


@pytest.mark.parametrize(("more", "over"), [(1, True), (2, False)])
def test_a_transfer_of_which_all_came_and_was_used_up_ends_nobody(more: int, over: bool) -> None:
    """Its sender lost the last completion; who expects the retry would be told that it fails."""
    with world() as w:
        assert w.write(w.a).wait().ok
        assert w.c.expect_imm_count(7, PAGES).wait().ok
        link = w.a._peers.link(w.c.main_address, "test")
        entry = (7, 1, PAGES - 1 + more, PAGES - 1, more, PAGES - 1)
        w.a._worker.channel.say_once(link, lambda n: Missing(n, 1, 1, "a", "no", 0, (entry,)))
        w.a.driver.kick()
        w.rest()
        again = w.c.expect_imm_count(7, PAGES)
        assert w.write(w.a).wait().ok
        w.rest()
        assert (over, not over) == (again.ok, again.failed)


def test_who_names_another_sender_goes_on_waiting() -> None:
    """A count that is b's alone is no business of a's."""
    with world() as w:
        mine = w.c.expect_imm_count(7, PAGES, sender=w.b.main_address)
        w.cut_off(w.write(w.a))
        w.rest()
        assert not mine.finished
        assert w.write(w.b).wait().ok
        assert mine.wait().ok


def test_lists_of_peers_are_bounded() -> None:
    """What a peer says must not fill the memory of the one that listens."""
    with pair() as p:
        tell = p.a._worker.channel.say_once
        link = p.a._peers.link(p.b.main_address, "test")

        def lie(serial: int, first: int, n: int) -> None:
            entry = (first, n, 1, 1, 0, -1)
            tell(link, lambda number: Missing(number, serial, 0, "a", "no", 0, (entry,)))

        failures = p.b._worker.failures
        for serial in range(1, 3 * SERIALS_MAX):
            lie(serial, 1000 * serial, 900)
        p.quiet(2000)
        (heard,) = failures._lists.values()
        assert SERIALS_MAX == len(heard.serials)
        assert 1024 == len(failures.broken)
        assert dict(p.b.stats().control_dropped)["no room for what it asks"] == 2 * SERIALS_MAX - 1


def test_lists_that_are_done_make_room_for_others() -> None:
    """An engine that has failed often enough could tell nobody any more."""
    with pair() as p:
        link = p.a._peers.link(p.b.main_address, "test")
        for serial in range(1, SERIALS_MAX + 3):
            entry = (serial, 1, 1, 0, 0, -1)
            p.a._worker.channel.say_once(
                link, lambda n, s=serial, e=entry: Missing(n, s, max(0, s - 9), "a", "", 0, (e,))
            )
            p.quiet(20)
        p.quiet()
        assert () == p.b.stats().control_dropped
        assert SERIALS_MAX + 2 == len(p.b._worker.failures.broken)


def test_a_list_that_comes_again_after_others_are_done_is_applied_once() -> None:
    """A repetition that was late would end the retry."""
    with pair() as p:
        link = p.a._peers.link(p.b.main_address, "test")
        for serial, done, imm in ((2, 0, 7), (3, 2, 8), (2, 2, 7)):
            entry = (imm, 1, 1, 0, 0, -1)
            p.a._worker.channel.say_once(
                link, lambda n, s=serial, d=done, e=entry: Missing(n, s, d, "a", "no", 0, (e,))
            )
            p.quiet(200)
            if imm == 7 and not done:
                with pytest.raises(FabricError, match="gave it up"):
                    p.b.expect_imm_count(7, 1).wait(1)
        assert [8] == list(p.b._worker.failures.broken)


def test_nobody_takes_back_what_others_sent() -> None:
    """A confused peer that claims the arrivals of another would let its reader wait for ever."""
    with world() as w:
        assert w.write(w.b).wait().ok
        channel = w.a._worker.channel
        link = w.a._peers.link(w.c.main_address, "test")
        channel.say_once(link, lambda n: Missing(n, 1, 1, "a", "no", 0, ((7, 1, 0, PAGES, 0, -1),)))
        w.a.driver.kick()
        w.rest()
        assert PAGES == dict(w.c.stats().imms_unexpected).get(7, 0)

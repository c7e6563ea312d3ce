"""The planted bugs of failover, burnt immediates and reopening that show in cases played whole.

An exploration that finds nothing in a wrong engine proves nothing about a right one. So each bug
is named here: with the case that shows it, or with the reason why no case does.
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.gate import bugs_failover
from tests.gate.bugs_burnt import BURNT as BURNT_BUGS
from tests.gate.bugs_burnt import ORDERS
from tests.gate.bugs_reopening import REOPENING as REOPENING_BUGS
from tests.gate.registry import BUGS, Bug, changed
from tests.support.order_cases import BURNT, FAILOVER, REOPENING, Cases, first_case

FAILOVER_BUGS: Final = {
    name: bug for name, bug in BUGS.items() if bug.plant.__module__ == bugs_failover.__name__
}

ROOMS: Final[dict[str, tuple[dict[str, Bug], Cases]]] = {
    "failover": (FAILOVER_BUGS, FAILOVER),
    "burnt immediates": (BURNT_BUGS | ORDERS, BURNT),
    "reopening": (REOPENING_BUGS, REOPENING),
}

RUNS_MAX: Final = 250
"""Runs of each case: all of most of them, and the first ones of the others."""

SHOWN: Final[dict[str, str]] = {
    # failover
    "lost_rows_never_landed": "a NIC dies",
    "lost_rows_all_landed": "a NIC dies",
    "top_up_one_short": "a NIC dies",
    "acknowledged_not_subtracted": "two share a path and the immediate",
    "sums_over_all_senders": "a message is lost",
    "sums_over_all_nics": "cancelled, with one NIC left",
    "acks_of_lost_rows": "a NIC dies",
    "tally_keeps_first": "two share a path and the immediate",
    "path_not_fenced": "a NIC dies",
    "sums_taken_before_the_fence": "a NIC dies",
    "first_nic_fenced": "a NIC dies",
    "asked_while_rows_are_out": "two share a path and the immediate",
    "only_missing_rows_written": "two share a path and the immediate",
    "all_immediates_again": "two share a path and the immediate",
    "immediates_before_the_bytes": "a NIC dies",
    "written_after_release": "a NIC dies",
    "only_the_first_transfer_is_written_again": "two share a path and the immediate",
    "sharing_transfers_are_written_again_apart": "two share a path and the immediate",
    "first_row_written_again": "rows are flushed",
    "ending_requests_written_again": "cancelled, with one NIC left",
    "done_while_rows_are_held": "a NIC dies",
    "flushed_rows_fail": "two on a path that is flushed",
    "rows_to_a_dead_nic_fail": "a NIC dies",
    "cancel_ends_held_rows": "a queued row is cancelled",
    "lost_question_not_repeated": "a message is lost",
    # burnt immediates
    "late_copies_burn_again": "its notice comes twice",
    "a_failure_burns_nothing": "the only path is cut",
    "a_cancel_burns_nothing": "a queued row is cancelled",
    "no_notice_is_sent": "a queued row is cancelled",
    "a_lost_notice_is_not_repeated": "the only path is cut",
    "burnt_immediates_are_accepted": "a queued row is cancelled",
    "open_expectations_wait_on": "a queued row is cancelled",
    "later_expectations_are_not_refused": "a queued row is cancelled",
    "what_comes_late_is_counted": "a queued row is cancelled",
    # reopening
    "rows_of_before_land_after": "one row",
    "agreed_but_not_lifted": "two rounds",
    "taken_into_use_when_refused": "two rounds",
    "never_asked_without_a_fence": "cut twice",
    "open_in_name_only": "one row",
    "shunned_for_good": "one row",
}
"""Bugs, and a case of their room in which an order shows them."""

MISSED: Final[dict[str, str]] = {
    # failover
    "arrivals_counted_as_entries": "no completion stands for several immediates here",
    "arrivals_by_columns_missed": "one immediate at a time arrives here",
    "mixed_burst_bypasses_its_page": "one immediate at a time arrives here",
    "given_up_at_the_first_lane": "it only takes longer: the question is repeated",
    "questions_share_a_number": "one question at a time is open here",
    "first_part_of_the_answer_is_all": "an answer has one part here",
    "lost_pieces_stay_out": "nothing is posted in pieces here",
    "routes_go_by_nics": "no two NICs here fail to reach each other, and reach others",
    "our_other_nics_are_no_way": "no two NICs here fail to reach each other, and reach others",
    "no_callback_after_failure": "nothing here waits for the callback of a failed transfer",
    "called_back_too_early": "callbacks here look only at transfers that are done",
    # burnt immediates
    "only_the_first_run_is_sent": "there is one immediate here",
    "only_the_first_run_is_burnt": "there is one immediate here",
    "only_the_first_target_is_told": "there is one target here",
    "one_expectation_of_several_fails": "there is one expectation here",
    "rows_under_an_unsure_immediate_are_guessed": "no path is used again after rows of it failed",
    # reopening
    "lifted_but_remembered_as_shut": "no path is fenced off a second time in so few runs",
    "asked_back_while_rows_are_held": "a path is asked back only when nothing else is left",
    "late_copies_count": "no path is in use when the copy comes in so few runs",
    "asked_once": "nobody refuses to open a path here",
    "back_over_a_fenced_path": "no heartbeat is answered over one path and not over another here",
    "notes_take_rows_along": "rows are not flushed here",
    "left_and_forgotten": "rows find each path that is shut here",
}
"""Bugs that no case shows in so many runs, and why; seeds of their own gates find them all."""


def cases_of(name: str) -> tuple[Bug, Cases]:
    """A bug, and the cases of its room."""
    return next((bugs[name], cases) for bugs, cases in ROOMS.values() if name in bugs)


def test_each_bug_is_in_the_table() -> None:
    """A bug that was never tried here says nothing about these cases."""
    known = {name for bugs, _ in ROOMS.values() for name in bugs}

    assert known == SHOWN.keys() | MISSED.keys()
    assert not SHOWN.keys() & MISSED.keys()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", SHOWN)
def test_a_bug_shows_in_its_case(name: str) -> None:
    """A case that does not show it any more has become weaker."""
    bug, cases = cases_of(name)
    with changed(bug.plant()):
        assert first_case({SHOWN[name]: cases[SHOWN[name]]}, RUNS_MAX) is not None


@pytest.mark.long
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", MISSED)
def test_no_case_shows_the_others(name: str) -> None:
    """A bug that shows after all belongs to the other table."""
    bug, cases = cases_of(name)
    with changed(bug.plant()):
        assert first_case(cases, RUNS_MAX) is None

"""Which planted bugs of failover, leases and reopening show in the cases that are played whole.

An exploration that finds nothing in a wrong engine proves nothing about a right one. So each bug
is named here: with the case that shows it, or with the reason why no case does.
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.gate import bugs_failover
from tests.gate.bugs_leases import LEASE_BUGS
from tests.gate.bugs_reopening import REOPENING as REOPENING_BUGS
from tests.gate.registry import BUGS, Bug, changed
from tests.support.order_cases import FAILOVER, LEASES, REOPENING, Cases, first_case

FAILOVER_BUGS: Final = {
    name: bug for name, bug in BUGS.items() if bug.plant.__module__ == bugs_failover.__name__
}

ROOMS: Final[dict[str, tuple[dict[str, Bug], Cases]]] = {
    "failover": (FAILOVER_BUGS, FAILOVER),
    "leases": (LEASE_BUGS, LEASES),
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
    # leases
    "free_when_run_out": "no failover",
    "silence_is_consent": "one NIC",
    "paths_ignored": "no failover",
    "answered_at_once": "no failover",
    "doubts_kept_back": "no failover",
    "own_death_is_an_end": "no failover",
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
    # leases
    "silent_writer_is_let_in_again": "nobody opens a path again here",
    "restart_is_an_end": "no writer restarts here",
    "paths_turned_round": "one side has one NIC here, and few orders tell its number apart",
    "failed_fence_is_a_fence": "no fence fails here",
    "deregistered_under_a_writer": "nobody deregisters here",
    "never_runs_out": "leases are revoked here, and do not run out",
    "written_after_the_end": "nothing is written after the end here",
    "end_not_remembered": "the writer has met each lease before its end here",
    "shut_for_ever": "nobody opens a path again here",
    "dead_end_is_an_end": "no path is cut here, and nothing lands at a NIC that is dead",
    "given_up_and_forgotten": "no failover is given up here",
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

"""The promises of the puller under any crash; and its wrong versions are found."""

from __future__ import annotations

import puller
import pytest

from tep.testing import Violation, hunt

TROUBLE = "order posting receives keys links workers restarts control errors"
"""All that ends: a NIC that is dead for good, or was given up, may end the puller's patience."""


def test_every_block_arrives_whatever_crashes() -> None:
    """When trouble is over the puller comes to its end, with every block as it was sent."""
    seen = hunt(puller.pull, runs=60, faults=TROUBLE, may_fail=False)

    assert seen["Restart"]


def test_nothing_is_kept_torn_and_nothing_hangs_whatever_breaks() -> None:
    """Where the node cannot be reached any more, the puller ends in an error that says so."""
    seen = hunt(puller.pull, runs=60)

    assert seen["KillNic"]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (puller.first_guess, "a torn block was kept"),
        (puller.second_guess, "a torn block was kept"),
        (puller.third_guess, "30 tries brought"),
    ],
)
def test_wrong_pullers_are_found(wrong, what: str) -> None:
    """Each mistake needs another fault: disorder, a doubled datagram, a crash or loss."""
    with pytest.raises(Violation, match=what):
        hunt(wrong, runs=400, faults=TROUBLE, may_fail=False)

"""The writer's end of leases: what it remembers of them, and when it answers their owners."""

from __future__ import annotations

from unittest import mock

import pytest

from tep.control import held_leases
from tep.control.channel import Drop
from tep.control.messages import Ended, Renewed
from tep.errors import LeaseError
from tests.support.lease_pair import Pair


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_an_old_renewal_changes_nothing(pair: Pair) -> None:
    """Control messages overtake each other: the owner's last word counts, not the last to come."""
    grant, lease = pair.lease(for_s=0.8)
    held = pair.b._peers.resolve(lease, "test").held_lease
    address = pair.a.main_address.domains[0]
    pair.b._worker.held_leases._renewed(0, address, Renewed(1, *held.key, 2, 10**9))
    until_s = held.until_s
    pair.b._worker.held_leases._renewed(0, address, Renewed(2, *held.key, 1, 10**12))

    assert until_s == held.until_s
    grant.revoke().wait(1)


def test_old_leases_are_over_by_their_number(pair: Pair) -> None:
    """What is remembered of leases is bounded; what is forgotten must not come to life again."""
    with mock.patch.object(held_leases, "_HELD_MAX", 2):
        leases = []
        for _ in range(5):
            grant, lease = pair.lease()
            leases.append(lease)
            grant.revoke().wait(1)
        grant, lease = pair.lease()
        pair.write(lease).wait(1)

        assert 3 == len(pair.b._worker.held_leases.known)
        for old in leases:
            with pytest.raises(LeaseError, match="asked back|too old"):
                pair.write(old)
        address = pair.a.main_address.domains[0]
        pair.b._worker.held_leases._ended(0, address, Ended(77, address, 1))
        assert "too long ago" in pair.b._worker.channel._queue[-1].message.why
        grant.revoke().wait(1)


def test_the_owner_is_answered_after_the_last_transfer(pair: Pair) -> None:
    """One of two that has ended says nothing of the other, whose row may land in freed memory."""
    grant, lease = pair.lease()
    sent = [pair.write(lease) for _ in range(2)]
    pair.cluster.env.run_until(lambda: all(each.stats().rows_posted for each in sent))
    held, leases = pair.b._peers.resolve(lease, "test").held_lease, pair.b._worker.held_leases
    with mock.patch.object(leases, "_answer") as answer:
        leases._ended(0, held.key[0], Ended(77, *held.key))
        leases.ended(sent[0])
        assert not answer.called
        leases.ended(sent[1])
    answer.assert_called_once_with(held)
    grant.revoke().wait(1)


def test_a_lease_that_is_over_is_remembered_while_a_row_of_it_is_out(pair: Pair) -> None:
    """Its owner, who asks once more, would hear that it is long ago, and give the memory away."""
    grant, lease = pair.lease()
    sent = pair.write(lease)
    pair.cluster.env.run_until(lambda: sent.stats().rows_posted)
    held, leases = pair.b._peers.resolve(lease, "test").held_lease, pair.b._worker.held_leases
    owner = held.key[0]
    with (
        mock.patch.object(held_leases, "_HELD_MAX", 1),
        mock.patch.object(pair.b._worker.channel, "tell") as tell,
    ):
        for question, number in enumerate((lease.number, 98, 99, lease.number), 77):
            leases._ended(0, owner, Ended(question, owner, number))
    assert [78, 79] == [call.args[2] for call in tell.call_args_list]
    grant.revoke().wait(1)


@pytest.mark.parametrize("path", [(1, 0), (0, 1), (1, 1)])
def test_the_owner_learns_which_path_a_row_may_still_come_over(
    pair: Pair, path: tuple[int, int]
) -> None:
    """It would fence another one, and give the memory away."""
    grant, lease = pair.lease()
    pair.b._peers.resolve(lease, "test").held_lease.paths.add(path)
    with mock.patch.object(pair.a._worker.leases, "_fence") as fence:
        grant.revoke()
        pair.pass_s(1e-3)
    fence.assert_called_once_with(grant, [path])


def test_owners_beyond_the_limit_get_no_answer_and_those_before_them_do(pair: Pair) -> None:
    """A peer can name as many owners as it likes: each of them would cost memory for good."""
    leases, channel = pair.b._worker.held_leases, pair.b._worker.channel
    address = pair.a.main_address.domains[0]

    def answered(owner: bytes, number: int) -> bool:
        """Whether an owner's question about the end of a lease is answered."""
        with mock.patch.object(channel, "tell") as tell:
            leases._ended(0, address, Ended(77, owner, number))
        return tell.called

    with mock.patch.object(held_leases, "_OWNERS_MAX", 2):
        asked = [(b"x", 1), (b"y", 1), (b"z", 1), (b"x", 2), (b"y", 1)]
        assert [True, True, False, True, True] == [answered(*about) for about in asked]
        assert {Drop.FULL: 1} == channel.dropped
        _, lease = pair.lease()
        pair.write(lease).wait(1)
        assert answered(address, lease.number), "a lease that is used here has a record"
        assert not answered(b"z", 1), "that one is above the limit makes no room for others"
    assert {(b"x", 1), (b"y", 1), (b"x", 2), (address, 1)} == set(leases.known)


def test_a_lease_of_an_owner_that_has_restarted_is_over(pair: Pair) -> None:
    """What was submitted before that is not posted any more; the record is one of those bounded."""
    _, lease = pair.lease()
    late = pair.write(lease)
    pair.b.add_peer_group([pair.cluster.restart("a").main_address])
    with pytest.raises(LeaseError, match="asked back"):
        late.wait(1)
    assert [True] == [held.over for held in pair.b._worker.held_leases.known.values()]

"""The writer's end of leases: what it may write to, until when, and how it lets go.

The owner's end is `leases`. Rule 1: a lease that its owner has asked back stays over, whatever
comes late or twice. Rule 2: the owner is answered only when no transfer under the lease is open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from tep.control.channel import Channel, Drop
from tep.control.messages import NICS_MAX, Ended, Renewed, Told
from tep.core.group import DomainGroup
from tep.core.path import Link
from tep.core.region import Job, Remote
from tep.core.transfer import Transfer
from tep.errors import LeaseError
from tep.wire import Lease

__all__ = ["MARGIN", "Hold", "Holding"]

MARGIN: Final = 1 / 8
"""Share of a lease's time that its holder leaves unused: for clocks that differ, and the way."""

_HELD_MAX: Final = 4096
"""Leases of one owner that are over and are remembered; what is older is refused unseen."""

_OWNERS_MAX: Final = 4096
"""Owners that ended leases which were never used here. Those of another one get no answer, and it
fences this engine off."""

_ASKING_MAX: Final = 64
"""Questions about one lease that are answered together; older ones were given up by their owner."""

_PATHS_MAX: Final = 100
"""Paths that fit into an answer of 512 bytes, 3 bytes each."""

Key = tuple[bytes, int]


class Hold:
    """One lease, as its holder knows it.

    Attributes:
        key: address of the owner's first NIC, and the lease's number.
        remote: its bytes, resolved; None while only the owner's word of its end is known.
        until_s: when submits under it are refused, on the engine's clock; the margin is off.
        over: whether the owner has asked for it back.
        open: transfers under it that have not settled.
        paths: (our NIC, its NIC) over which bytes may still land.
        asking: where its end was asked about, and not answered yet.
        round: of the last renewal.
    """

    __slots__ = ("asking", "key", "open", "over", "paths", "remote", "round", "until_s")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.remote: Remote | None = None
        self.until_s = 0.0
        self.over = False
        self.open: dict[Transfer, None] = {}
        self.paths: set[tuple[int, int]] = set()
        self.asking: dict[tuple[int, bytes, int], None] = {}
        self.round = 0


class Holding:
    """All leases that one engine holds. Users' threads come to `resolve`
    and `orphan`, all else is its worker's.

    Args:
        group: its NICs.
        channel: from and to the owners.
        now_s: the clock.

    Attributes:
        held: every lease that was met, by owner and number; empty where leases are not used.
    """

    def __init__(self, group: DomainGroup, channel: Channel, now_s: Callable[[], float]) -> None:
        self.held: dict[Key, Hold] = {}
        self._over: dict[bytes, deque[Hold]] = {}  # by owner
        self._forgotten: dict[bytes, int] = {}
        self._own = group.domains[0].address
        self._group, self._channel, self._now_s = group, channel, now_s
        channel.hear(Ended, self._ended)
        channel.hear(Renewed, self._renewed)

    def resolve(self, lease: Lease, link: Link, what: str) -> Remote:
        """The bytes of a lease, ready for posting; its time begins when it is met first.

        Raises:
            LeaseError: it is over, about to be, or another engine's.
        """
        if lease.holder != self._own:
            raise LeaseError(
                f"{what}: {lease} was granted to {lease.holder!r}, not to this engine, or to it "
                "before it restarted"
            )
        key = lease.desc.addr.domains[0], lease.number
        hold = self._find(*key)
        if hold is None:
            raise LeaseError(f"{what}: {lease} is too old to be known; ask its owner for a new one")
        if hold.remote is None and hold.round == 0:
            hold.until_s = self._now_s() + lease.for_ns * 1e-9 * (1 - MARGIN)
        if hold.remote is None:
            hold.remote = Remote(lease.desc, link, hold)
        self._check(hold, what)
        return hold.remote

    def _check(self, hold: Hold, what: str) -> None:
        assert hold.remote is not None
        name = f"{what}: lease {hold.key[1]} of {hold.remote.desc}"
        if hold.over:
            raise LeaseError(f"{name} was asked back by its owner; ask it for a new one")
        late_s = self._now_s() - hold.until_s
        if late_s >= 0:
            raise LeaseError(
                f"{name} ran out {late_s:.6f} s ago (its margin of 1/8 included); have its owner "
                "renew it earlier, or ask for a new one"
            )

    # ------------------------------------------------------------------ transfers

    def start(self, transfer: Transfer) -> None:
        """Take a transfer under the leases that it is for. Raises LeaseError, as resolve() does."""
        for hold in _holds(transfer.job):
            self._check(hold, transfer.job.kind)
            hold.open[transfer] = None

    def ended(self, transfer: Transfer) -> None:
        """A transfer has settled: no row of it is posted any more."""
        for remote, domain, nic in transfer.doubts():
            if isinstance(remote.hold, Hold):
                remote.hold.paths.add((domain, nic))
        for hold in _holds(transfer.job):
            hold.open.pop(transfer, None)
            if hold.over and not hold.open:
                self._answer(hold)

    # ------------------------------------------------------------------ the owner's word

    def _ended(self, nic: int, address: bytes, note: Ended) -> None:
        """The owner wants its memory back: what is queued is dropped, what is posted awaited."""
        known = (note.owner, note.lease) in self.held or note.owner in self._over
        if not known and len(self._over) >= _OWNERS_MAX:
            self._channel.drop(Drop.FULL, address, f"leases of {_OWNERS_MAX} owners are remembered")
            return
        hold = self._find(note.owner, note.lease)
        if hold is None:  # it was over, and what was left of it is forgotten
            self._channel.answer(nic, address, Told(note.number, "it was too long ago", ()))
            return
        self._end(hold)
        hold.asking[nic, address, note.number] = None
        if len(hold.asking) > _ASKING_MAX:
            del hold.asking[next(iter(hold.asking))]
        error = LeaseError(f"lease {note.lease} was asked back by its owner before this was posted")
        for transfer in list(hold.open):
            if self._group.drop_queued(transfer):
                transfer.failure = transfer.failure or error
                if transfer.left == 0:
                    self._group.ended.append(transfer)
        if not hold.open:
            self._answer(hold)

    def _answer(self, hold: Hold) -> None:
        asking, hold.asking = hold.asking, {}
        why, paths = "", tuple(sorted(i * NICS_MAX + j for i, j in hold.paths))
        if len(paths) > _PATHS_MAX:
            why, paths = f"rows on {len(paths)} paths are lost", ()
        for nic, address, number in asking:
            self._channel.answer(nic, address, Told(number, why, paths))

    def _renewed(self, nic: int, address: bytes, note: Renewed) -> None:
        # Of one that was never used here nothing is kept: its time begins with its first use.
        hold = self.held.get((note.owner, note.lease))
        if hold is not None and note.round > hold.round:
            hold.round = note.round
            hold.until_s = self._now_s() + note.for_ns * 1e-9 * (1 - MARGIN)
        self._channel.answer(nic, address, Told(note.number, "", ()))

    def _find(self, owner: bytes, number: int) -> Hold | None:
        """The hold of a lease, a new one where it was never met; None: it was forgotten."""
        key = owner, number
        found = self.held.get(key)
        if found is None and number > self._forgotten.get(owner, 0):
            found = self.held.setdefault(key, Hold(key))
        return found

    def orphan(self, link: Link) -> None:
        """A peer has restarted: what its earlier incarnation had leased is over."""
        for hold in list(self.held.values()):
            if hold.remote is not None and hold.remote.link is link:
                self._end(hold)

    def _end(self, hold: Hold) -> None:
        """Note that a lease is over. So many are remembered; older ones are refused by number."""
        if hold.over:
            return
        hold.over = True
        owner = hold.key[0]
        over = self._over.setdefault(owner, deque())
        over.append(hold)
        if len(over) > _HELD_MAX and not over[0].open:
            old = over.popleft()
            self._forgotten[owner] = max(old.key[1], self._forgotten.get(owner, 0))
            self.held.pop(old.key, None)


def _holds(job: Job) -> Iterable[Hold]:
    remotes = [job.remotes] if isinstance(job.remotes, Remote) else job.remotes.remotes
    return dict.fromkeys(remote.hold for remote in remotes if isinstance(remote.hold, Hold))

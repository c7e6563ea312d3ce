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

__all__ = ["MARGIN", "HeldLease", "HeldLeases"]

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


class HeldLease:
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


class HeldLeases:
    """All leases that one engine holds. Users' threads come to `resolve`
    and `orphan`, all else is its worker's.

    Args:
        group: its NICs.
        channel: from and to the owners.
        now_s: the clock.

    Attributes:
        known: every lease that was met, by owner and number; empty where leases are not used.
    """

    def __init__(self, group: DomainGroup, channel: Channel, now_s: Callable[[], float]) -> None:
        self.known: dict[Key, HeldLease] = {}
        self._over: dict[bytes, deque[HeldLease]] = {}  # by owner
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
        held = self._find(*key)
        if held is None:
            raise LeaseError(f"{what}: {lease} is too old to be known; ask its owner for a new one")
        if held.remote is None and held.round == 0:
            held.until_s = self._now_s() + lease.for_ns * 1e-9 * (1 - MARGIN)
        if held.remote is None:
            held.remote = Remote(lease.desc, link, held)
        self._check(held, what)
        return held.remote

    def _check(self, held: HeldLease, what: str) -> None:
        assert held.remote is not None
        name = f"{what}: lease {held.key[1]} of {held.remote.desc}"
        if held.over:
            raise LeaseError(f"{name} was asked back by its owner; ask it for a new one")
        late_s = self._now_s() - held.until_s
        if late_s >= 0:
            raise LeaseError(
                f"{name} ran out {late_s:.6f} s ago (its margin of 1/8 included); have its owner "
                "renew it earlier, or ask for a new one"
            )

    # ------------------------------------------------------------------ transfers

    def start(self, transfer: Transfer) -> None:
        """Take a transfer under the leases that it is for. Raises LeaseError, as resolve() does."""
        for held in _held_leases(transfer.job):
            self._check(held, transfer.job.kind)
            held.open[transfer] = None

    def ended(self, transfer: Transfer) -> None:
        """A transfer has settled: no row of it is posted any more."""
        for remote, domain, nic in transfer.doubts():
            if isinstance(remote.held_lease, HeldLease):
                remote.held_lease.paths.add((domain, nic))
        for held in _held_leases(transfer.job):
            held.open.pop(transfer, None)
            if held.over and not held.open:
                self._answer(held)

    # ------------------------------------------------------------------ the owner's word

    def _ended(self, nic: int, address: bytes, note: Ended) -> None:
        """The owner wants its memory back: what is queued is dropped, what is posted awaited."""
        known = (note.owner, note.lease) in self.known or note.owner in self._over
        if not known and len(self._over) >= _OWNERS_MAX:
            self._channel.drop(Drop.FULL, address, f"leases of {_OWNERS_MAX} owners are remembered")
            return
        held = self._find(note.owner, note.lease)
        if held is None:  # it was over, and what was left of it is forgotten
            self._channel.answer(nic, address, Told(note.number, "it was too long ago", ()))
            return
        self._end(held)
        held.asking[nic, address, note.number] = None
        if len(held.asking) > _ASKING_MAX:
            del held.asking[next(iter(held.asking))]
        error = LeaseError(f"lease {note.lease} was asked back by its owner before this was posted")
        for transfer in list(held.open):
            if self._group.drop_queued(transfer):
                transfer.failure = transfer.failure or error
                if transfer.left == 0:
                    self._group.ended.append(transfer)
        if not held.open:
            self._answer(held)

    def _answer(self, held: HeldLease) -> None:
        asking, held.asking = held.asking, {}
        why, paths = "", tuple(sorted(i * NICS_MAX + j for i, j in held.paths))
        if len(paths) > _PATHS_MAX:
            why, paths = f"rows on {len(paths)} paths are lost", ()
        for nic, address, number in asking:
            self._channel.answer(nic, address, Told(number, why, paths))

    def _renewed(self, nic: int, address: bytes, note: Renewed) -> None:
        # Of one that was never used here nothing is kept: its time begins with its first use.
        held = self.known.get((note.owner, note.lease))
        if held is not None and note.round > held.round:
            held.round = note.round
            held.until_s = self._now_s() + note.for_ns * 1e-9 * (1 - MARGIN)
        self._channel.answer(nic, address, Told(note.number, "", ()))

    def _find(self, owner: bytes, number: int) -> HeldLease | None:
        """The record of a lease, a new one where it was never met; None: it was forgotten."""
        key = owner, number
        found = self.known.get(key)
        if found is None and number > self._forgotten.get(owner, 0):
            found = self.known.setdefault(key, HeldLease(key))
        return found

    def orphan(self, link: Link) -> None:
        """A peer has restarted: what its earlier incarnation had leased is over."""
        for held in list(self.known.values()):
            if held.remote is not None and held.remote.link is link:
                self._end(held)

    def _end(self, held: HeldLease) -> None:
        """Note that a lease is over. So many are remembered; older ones are refused by number."""
        if held.over:
            return
        held.over = True
        owner = held.key[0]
        over = self._over.setdefault(owner, deque())
        over.append(held)
        if len(over) > _HELD_MAX and not over[0].open:
            old = over.popleft()
            self._forgotten[owner] = max(old.key[1], self._forgotten.get(owner, 0))
            self.known.pop(old.key, None)


def _held_leases(job: Job) -> Iterable[HeldLease]:
    remotes = [job.remotes] if isinstance(job.remotes, Remote) else job.remotes.remotes
    return dict.fromkeys(
        remote.held_lease for remote in remotes if isinstance(remote.held_lease, HeldLease)
    )

"""The writer's end of leases: which bytes it may write to, until when, and how a lease ends.

The owner's end is `leases`. Rule 1: a lease that its owner has asked back stays over, even if
messages arrive late or twice. Rule 2: the owner gets its answer only when no transfer under the
lease is open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from tep.control.channel import Channel, Drop
from tep.control.messages import NICS_MAX, Ended, Renewed
from tep.core.group import DomainGroup
from tep.core.path import Link
from tep.core.region import Job, Remote
from tep.core.transfer import Transfer
from tep.errors import LeaseError
from tep.wire import Lease

__all__ = ["MARGIN", "HeldLease", "HeldLeases"]

MARGIN: Final = 1 / 8
"""Share of a lease's time that its holder does not use: clocks differ, and messages take time."""

_HELD_MAX: Final = 4096
"""Ended leases that are remembered of each owner; older ones are refused by their number."""

_OWNERS_MAX: Final = 4096
"""Owners of which ended leases are remembered. Beyond that an owner that ends a lease which this
engine never used gets no answer, and fences this engine off."""

_ASKING_MAX: Final = 64
"""Questions about one lease that are answered together; their owner has given older ones up."""

_PATHS_MAX: Final = 100
"""Paths that fit into an answer of 512 bytes, 3 bytes each."""

Key = tuple[bytes, int]


class HeldLease:
    """One lease, as its holder knows it.

    Attributes:
        key: address of the owner's first NIC, and the lease's number.
        name: what errors call it, once it was used here.
        remote: its bytes, resolved; None if it was never used here, or its owner was removed since.
        until_s: when submits under it begin to be refused, on the engine's clock; the margin is
            subtracted. 0: it was never used here.
        over: whether the owner has asked for it back.
        open: transfers under it that have not settled.
        paths: (our NIC, its NIC) over which bytes may still land.
        asking: (our NIC, address, number) of the questions about its end that are not answered yet.
        round: the round of the last renewal.
    """

    __slots__ = ("asking", "key", "name", "open", "over", "paths", "remote", "round", "until_s")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.name = f"lease {key[1]}"
        self.remote: Remote | None = None
        self.until_s = 0.0
        self.over = False
        self.open: dict[Transfer, None] = {}
        self.paths: set[tuple[int, int]] = set()
        self.asking: dict[tuple[int, bytes, int], None] = {}
        self.round = 0


class HeldLeases:
    """All leases that one engine holds.

    Users' threads may call `resolve` and `orphan`; only the worker calls the rest.

    Args:
        group: its NICs.
        channel: control messages from and to the owners.
        take_back: drops the rows of a transfer that are not posted, and says how many there were.
        now_s: the clock.

    Attributes:
        known: every lease that was used or ended here, by owner and number.
    """

    def __init__(
        self,
        group: DomainGroup,
        channel: Channel,
        take_back: Callable[[Transfer], int],
        now_s: Callable[[], float],
    ) -> None:
        self.known: dict[Key, HeldLease] = {}
        self._over: dict[bytes, deque[HeldLease]] = {}  # by owner
        self._forgotten: dict[bytes, int] = {}
        self._own = group.domains[0].address
        self._group, self._channel = group, channel
        self._take_back, self._now_s = take_back, now_s
        channel.hear(Ended, self._ended)
        channel.hear(Renewed, self._renewed)

    def resolve(self, lease: Lease, link: Link, what: str) -> Remote:
        """The bytes of a lease, ready for posting; its time begins with its first use.

        Raises:
            LeaseError: it is over, has run out, or was granted to another engine.
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
        if not held.until_s:
            held.until_s = self._now_s() + lease.for_ns * 1e-9 * (1 - MARGIN)
        remote = held.remote
        if remote is None or remote.link is not link:
            held.name = f"lease {lease.number} of {lease.desc}"
            remote = held.remote = Remote(lease.desc, link, held)
        self._check(held, what)
        return remote

    def _check(self, held: HeldLease, what: str) -> None:
        name = f"{what}: {held.name}"
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
        """Begin a transfer under its leases. Raises LeaseError, as resolve() does."""
        for held in _held_leases(transfer.job):
            self._check(held, transfer.job.kind)
            held.open[transfer] = None

    def ended(self, transfer: Transfer) -> None:
        """A transfer has settled: none of its rows is posted any more."""
        for remote, domain, nic in transfer.doubts():
            if isinstance(remote.held_lease, HeldLease):
                remote.held_lease.paths.add((domain, nic))
        for held in _held_leases(transfer.job):
            held.open.pop(transfer, None)
            if held.over and not held.open:
                self._answer(held)

    def late(self, transfer: Transfer) -> LeaseError | None:
        """Why what was read under leases may be new contents of their memory; None: it is not.

        Until a lease is over or has run out its owner changes nothing; afterwards nobody knows.
        """
        for held in _held_leases(transfer.job):
            try:
                self._check(held, f"{transfer.job.kind}: its bytes came too late")
            except LeaseError as error:
                return error
        return None

    # ------------------------------------------------------------------ the owner's messages

    def _ended(self, nic: int, address: bytes, message: Ended) -> None:
        """The owner wants its memory back: drop waiting rows, and wait for the posted ones."""
        known = (message.owner, message.lease) in self.known or message.owner in self._over
        if not known and len(self._over) >= _OWNERS_MAX:
            self._channel.drop(Drop.FULL, address, f"leases of {_OWNERS_MAX} owners are remembered")
            return
        held = self._find(message.owner, message.lease)
        if held is None:  # it ended long ago, and its record is gone
            self._channel.tell(nic, address, message.number, "it was too long ago")
            return
        self._end(held)
        held.asking[nic, address, message.number] = None
        if len(held.asking) > _ASKING_MAX:
            del held.asking[next(iter(held.asking))]
        error = LeaseError(
            f"lease {message.lease} was asked back by its owner before this was posted"
        )
        for transfer in list(held.open):
            if self._take_back(transfer):
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
            self._channel.tell(nic, address, number, why, paths)

    def _renewed(self, nic: int, address: bytes, message: Renewed) -> None:
        # A lease that was never used here needs no record: its time begins with its first use.
        held = self.known.get((message.owner, message.lease))
        if held is not None and message.round > held.round:
            held.round = message.round
            held.until_s = self._now_s() + message.for_ns * 1e-9 * (1 - MARGIN)
        self._channel.tell(nic, address, message.number)

    def _find(self, owner: bytes, number: int) -> HeldLease | None:
        """The record of a lease, made if there is none; None: it ended and was forgotten."""
        key = owner, number
        found = self.known.get(key)
        if found is None and number > self._forgotten.get(owner, 0):
            found = self.known.setdefault(key, HeldLease(key))
        return found

    def orphan(self, link: Link) -> None:
        """A peer has restarted: the leases that its earlier incarnation granted are over."""
        for held in list(self.known.values()):
            if held.remote is not None and held.remote.link is link:
                self._end(held)

    def forget(self, link: Link) -> None:
        """A peer was removed: its leases are resolved anew if it is met again."""
        for held in list(self.known.values()):
            if held.remote is not None and held.remote.link is link:
                held.remote = None

    def _end(self, held: HeldLease) -> None:
        """Mark a lease as over; forget the oldest one of its owner if there are too many."""
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

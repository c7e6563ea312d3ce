"""The owner's end of leases: it grants, renews and ends them.

The writer's end is `held_leases`. Rule 1: when a lease runs out, the owner asks for its memory
back; the memory is not free by that. Rule 2: a lease ends as free only after its writer has said
that no row under it is left, and after the paths over which bytes may still arrive are fenced off.
A writer that does not answer is fenced off on all paths, which stay shut until it has answered.
Rule 3: where this cannot be established, the bytes are in quarantine, and the end says so.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar

import msgspec

from tep.backends.base import Access, Domain, Status
from tep.checks import check_seconds, unpicklable
from tep.control.channel import Channel
from tep.control.fencing import Fencing
from tep.control.messages import NICS_MAX, Answer, Ended, Renewed
from tep.core.handle import Handle, Owner, State
from tep.core.path import FarEnds, Link
from tep.core.quarantine import Quarantine
from tep.core.region import MrHandle, deregistered
from tep.errors import BadRequest, BusyError, FabricError, LeaseError, TepError
from tep.wire import Lease

__all__ = ["Grant", "Leases", "Revocation", "grant_lease"]

T = TypeVar("T")
Settle = Callable[[Handle, State, TepError | None], None]

_S_PER_NS: Final = 1e-9


class LeaseOwner(Owner, Protocol):
    """What leases need of the engine."""

    closed: bool

    def run(self, function: Callable[[], T], /) -> T:
        """Run a function between two steps."""


class Revocation(Handle):
    """The end of a lease: ok = nobody can use its bytes any more; failed = quarantine.

    It is pending as long as the lease lasts, whatever ends the lease. `cancel()` revokes.

    Attributes:
        grant: the lease that it is the end of.
    """

    counted = False
    __slots__ = ("grant",)

    def __init__(self, grant: Grant, now_s: float) -> None:
        super().__init__(grant.owner, now_s)
        self.grant = grant

    def cancel(self) -> None:
        """Revoke the lease."""
        self.grant.revoke()

    def describe(self) -> str:
        """One line for reports."""
        grant = self.grant
        if self.finished:
            return f"{grant}: {'free' if self.ok else 'in quarantine'}"
        if not grant.ending:
            return f"{grant}: granted, for another {grant.left_s:.3f} s"
        return f"{grant}: asked back; {grant.why or 'its holder has not answered yet'}"


class Grant:
    """What `engine.lease` returns: the owner's end of one lease.

    Attributes:
        lease: what the peer needs; `lease.to_bytes()` travels in anything.
        mr, start, stop: the bytes.
        link: the peer.
        until_s: when it runs out, on the engine's clock.
        ending: whether its holder was asked to give it back.
        asked_again: whether a holder that did not answer is being asked once more.
        fence: whether paths that are up may be fenced off to end it.
        over: settles when it is over; see Revocation.
    """

    __slots__ = (
        "_leases", "asked_again", "ending", "fence", "lease", "link", "mr", "over", "owner",
        "round", "start", "stop", "until_s", "why",
    )  # fmt: skip

    def __init__(
        self,
        owner: LeaseOwner,
        leases: Leases,
        lease: Lease,
        link: Link,
        mr: MrHandle,
        start: int,
        *,
        fence: bool,
    ) -> None:
        self.owner = owner
        self.lease = lease
        self.link = link
        self.mr = mr
        self.start = start
        self.stop = start + lease.desc.nbytes
        self.round = 0
        self.ending = self.asked_again = False
        self.fence = fence
        self.why = ""
        self._leases = leases
        now_s = leases.now_s()
        self.until_s = now_s + lease.for_ns * _S_PER_NS
        self.over = Revocation(self, now_s)

    def __str__(self) -> str:
        where = f"bytes {self.start} .. {self.stop} of region {self.mr.desc.region}"
        return f"lease {self.lease.number} of {where} to {self.link.addr.name}"

    __reduce__ = unpicklable("it is the owner's end; send `grant.lease.to_bytes()` to the writer")

    def __repr__(self) -> str:
        return f"Grant({self.over.describe()})"

    @property
    def left_s(self) -> float:
        """Seconds until it runs out."""
        return max(0.0, self.until_s - self._leases.now_s())

    def renew(self, for_s: float) -> None:
        """Make it last `for_s` seconds from now on, and tell the peer.

        Raises:
            LeaseError: it is over, or was asked back.
        """
        for_ns = _for_ns(for_s, "renew")
        self.owner.run(lambda: self._leases.renew(self, for_ns))

    def revoke(self) -> Revocation:
        """Ask for the memory back now; return the handle that settles when it is free.

        Idempotent. If the lease ended in quarantine before, ending it is tried again.
        """
        if not self.owner.closed:
            self.owner.run(lambda: self._leases.revoke(self))
        return self.over


class Leases:
    """All leases that one engine has granted. Only the worker calls it; `Grant` sends commands.

    Args:
        channel, fencing: to ask writers, and to fence them off.
        far_ends: the records of paths, which leases keep shut.
        now_s: the clock.
        opened: every handle that has not settled.
        settle: ends a handle.
        domains: the NICs.

    Attributes:
        now_s: the clock.
        granted: the leases that are not over, by number.
        held_back: the leases that ended in quarantine, and why.
    """

    def __init__(
        self,
        channel: Channel,
        fencing: Fencing,
        far_ends: FarEnds,
        now_s: Callable[[], float],
        opened: dict[Handle, None],
        settle: Settle,
        domains: Sequence[Domain],
    ) -> None:
        self._domains = domains
        self.granted: dict[int, Grant] = {}
        self.held_back: dict[Grant, str] = {}
        self._numbers = itertools.count(1)
        self._due: list[tuple[float, int]] = []
        self._channel, self._fencing, self.now_s = channel, fencing, now_s
        self._far_ends = far_ends
        self._opened, self._settle = opened, settle

    # ------------------------------------------------------------------ granting

    def next_number(self) -> int:
        """The number of the next lease."""
        return next(self._numbers)

    def grant(self, grant: Grant) -> None:
        """Begin a lease. Raises BusyError if some of its bytes are in quarantine."""
        if grant.mr.closed:  # another thread was here after the check
            raise deregistered(grant.mr, "lease")
        for found in self.quarantines(grant.mr):
            if found.start < grant.stop and grant.start < found.stop:
                text = f"lease: bytes {found.start} .. {found.stop} are not free: {found.why}"
                raise BusyError(text)
        self._begin(grant)

    def _begin(self, grant: Grant) -> None:
        self.granted[grant.lease.number] = grant
        heapq.heappush(self._due, (grant.until_s, grant.lease.number))
        self._opened[grant.over] = None

    def renew(self, grant: Grant, for_ns: int) -> None:
        """Make a lease last `for_ns` nanoseconds from now on, and tell its holder."""
        if grant.ending or grant.over.finished:
            raise LeaseError(f"renew: {grant} was asked back, or is over; grant a new one")
        grant.until_s = self.now_s() + for_ns * _S_PER_NS
        grant.round += 1
        heapq.heappush(self._due, (grant.until_s, grant.lease.number))
        owner, number, turn = _owner(grant), grant.lease.number, grant.round
        self._channel.ask(
            grant.link, lambda n: Renewed(n, owner, number, turn, for_ns), _nothing, _nothing
        )

    # ------------------------------------------------------------------ ending

    def step(self) -> bool:
        """End the leases that have run out; True if there was one."""
        work = False
        now_s = self.now_s()
        while self._due and self._due[0][0] <= now_s:
            grant = self.granted.get(heapq.heappop(self._due)[1])
            if grant is not None and grant.until_s <= now_s:
                work = True
                self.end(grant)
        return work

    def lose(self, link: Link) -> None:
        """A peer was replaced or removed: end its leases, and release the paths they keep shut."""
        for grant in list(self.granted.values()):
            if grant.link is link:
                self.end(grant)
        self._far_ends.release(lambda kept: isinstance(kept, Grant) and not kept.link.current)

    def due_s(self) -> float | None:
        """When the next lease runs out; None: there is none."""
        due = self._due
        while due and ((grant := self.granted.get(due[0][1])) is None or grant.ending):
            heapq.heappop(due)
        return due[0][0] if due else None

    def revoke(self, grant: Grant) -> None:
        """End a lease; if it is in quarantine, try again to end it."""
        if grant in self.held_back:
            del self.held_back[grant]
            grant.ending = False
            grant.over = Revocation(grant, self.now_s())
            self._begin(grant)
        self.end(grant)

    def end(self, grant: Grant) -> None:
        """Ask for the memory back. Idempotent."""
        if grant.ending or grant.over.finished:
            return
        grant.ending, grant.why = True, ""
        self._ask(grant, self._stopped, self._silent)

    def _ask(
        self,
        grant: Grant,
        told: Callable[[Grant, Answer], object],
        lost: Callable[[Grant, str], object],
    ) -> None:
        owner, number = _owner(grant), grant.lease.number
        ends = partial(told, grant), partial(lost, grant)
        self._channel.ask(grant.link, lambda n: Ended(n, owner, number), *ends)

    def _stopped(self, grant: Grant, answer: Answer) -> None:
        """The writer has stopped: fence the paths over which bytes may still arrive."""
        self._let_go(grant, answer)
        paths = [divmod(count, NICS_MAX) for count in answer.counts]
        there, here = len(grant.link.addr.domains), len(grant.lease.desc.rkeys)
        if answer.why or any(i >= there or j >= here for i, j in paths):
            self._silent(grant, answer.why or "it named a NIC that is not there")
        else:
            self._fence(grant, paths)

    def _silent(self, grant: Grant, why: str) -> None:
        """The writer did not answer: fence all its paths, so that nothing lands any more."""
        grant.why = f"{grant.link.addr.name} did not say that it had stopped: {why}"
        there, here = len(grant.link.addr.domains), len(grant.lease.desc.rkeys)
        paths = list(itertools.product(range(there), range(here)))
        if grant.fence:  # the holder may still use the lease
            for i, j in paths:
                self._far_ends.at(j, grant.link.addr.domains[i]).leases[grant] = None
        self._fence(grant, paths)

    def ask_again(self, nic: int, address: bytes) -> None:
        """The holder of leases that keep a path shut answers again: ask it for them once more."""
        far = self._far_ends.get(nic, address)
        for grant in () if far is None else tuple(far.leases):
            assert isinstance(grant, Grant)
            if not grant.asked_again:
                grant.asked_again = True
                self._ask(grant, self._let_go, self._still_silent)

    def _still_silent(self, grant: Grant, _: str) -> None:
        grant.asked_again = False

    def _let_go(self, grant: Grant, _: Answer) -> None:
        """Any answer means that the holder has stopped: release the paths kept shut."""
        grant.asked_again = False
        for j in range(len(grant.lease.desc.rkeys)):
            for address in grant.link.addr.domains:
                far = self._far_ends.get(j, address)
                if far is not None:
                    far.leases.pop(grant, None)

    def _fence(self, grant: Grant, paths: Iterable[tuple[int, int]]) -> None:
        """Fence (its NIC, our NIC) paths off; the lease is over when all fences have ended."""
        if not self._channel.able:
            return  # the engine is being closed, which ends all leases
        paths = list(paths)
        if paths and grant.link.current and not grant.fence:
            self._fenced(grant, ["its paths were not to be fenced off"])
            return
        fences = _Fences(partial(self._fenced, grant))
        for i, j in paths:
            fences.begin(self._fencing, grant.link.addr.domains[i], j)
        fences.end(self._fencing, -1, Status.OK)

    def _fenced(self, grant: Grant, gaps: Sequence[str]) -> None:
        if grant.over.finished:
            return
        del self.granted[grant.lease.number]
        if not gaps:
            self._settle(grant.over, State.DONE, None)
            return
        name = grant.link.addr.name
        why = (
            f"{name} may still {_use(grant)} there: {grant.why or 'a row of it is lost'}; {gaps[0]}"
        )
        self.held_back[grant] = why
        cure = f"close the engine, or revoke() again once {name} is back"
        if all(domain.caps.deregister_fences for domain in self._domains):
            cure = f"deregister the region, {cure}"
        text = f"{grant} is in quarantine: {why}; {cure}"
        self._settle(grant.over, State.FAILED, FabricError(text, code="QUARANTINED", peer=name))

    # ------------------------------------------------------------------ asking

    def quarantines(self, mr: MrHandle) -> tuple[Quarantine, ...]:
        """The bytes of a region that are in quarantine because of a lease."""
        held = list(self.held_back.items())
        return tuple(Quarantine(g.start, g.stop, why) for g, why in held if g.mr is mr)

    def refuse(self, mr: MrHandle) -> None:
        """Raise BusyError if a lease of a region is not over."""
        for grant in self.granted.values():
            if grant.mr is mr:
                state = "asked back" if grant.ending else f"for another {grant.left_s:.3f} s"
                raise BusyError(
                    f"deregister: {grant} is not over ({state}); revoke() it, and wait for its end"
                )

    def forget(self, mr: MrHandle) -> None:
        """A region was deregistered, which ended the quarantines of its leases."""
        for grant in [grant for grant in self.held_back if grant.mr is mr]:
            del self.held_back[grant]

    def closed(self) -> None:
        """The NICs are closed, and write nothing any more (C14): every lease is over."""
        for grant in list(self.granted.values()):
            self._fenced(grant, ())


class _Fences:
    """Several fences, and one call when all of them have ended.

    Attributes:
        gaps: for each fence that failed, why.
    """

    __slots__ = ("_left", "_then", "gaps")

    def __init__(self, then: Callable[[Sequence[str]], object]) -> None:
        self.gaps: list[str] = []
        self._left = 1  # released by the caller, so that it cannot end before all fences have begun
        self._then = then

    def begin(self, fencing: Fencing, source: bytes, nic: int) -> None:
        """Begin to fence one path."""
        self._left += 1
        try:
            fencing.fence(source, nic, partial(self.end, fencing, nic))
        except TepError as error:
            self.gaps.append(str(error))
            self.end(fencing, nic, Status.OK)

    def end(self, fencing: Fencing, nic: int, status: int) -> None:
        """One fence has ended."""
        if status != Status.OK:
            self.gaps.append(fencing.why_not(nic, status) or "")
        self._left -= 1
        if self._left == 0:
            self._then(self.gaps)


def grant_lease(
    owner: LeaseOwner,
    leases: Leases,
    view: MrHandle,
    link: Link,
    for_s: float,
    access: Access,
    *,
    fence: bool,
) -> Grant:
    """Make a lease of a region or a view of one, which `engine.lease` has checked."""
    mr = view.root
    rights = Access.TARGET | Access.READABLE
    if not access & rights or access & ~rights:
        raise BadRequest(
            f"lease: access={access!r}; a lease is for Access.TARGET, Access.READABLE, or both"
        )
    if access.target and not mr.access.target:
        raise BadRequest(f"lease: {mr!r} was registered without Access.TARGET; nobody may write")
    if access.readable and not mr.access.readable:
        raise BadRequest(f"lease: {mr!r} was registered without Access.READABLE; nobody may read")
    desc = msgspec.structs.replace(view.desc, writable=access.target, readable=access.readable)
    holder = link.addr.domains[0]
    lease = Lease(desc, leases.next_number(), holder, _for_ns(for_s, "lease"))
    grant = Grant(owner, leases, lease, link, mr, view.start, fence=fence)
    owner.run(lambda: leases.grant(grant))
    return grant


def _for_ns(for_s: float, what: str) -> int:
    return round(check_seconds(f"{what}: for_s", for_s, 1e-9) / _S_PER_NS)


def _use(grant: Grant) -> str:
    return "write" if grant.lease.desc.writable else "read"


def _owner(grant: Grant) -> bytes:
    return grant.lease.desc.addr.domains[0]


def _nothing(_: object) -> None:
    """Ignore the end of a renewal: if it did not arrive, the writer stops earlier."""

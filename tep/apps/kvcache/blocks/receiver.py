"""KvReceiver: grants senders the right to write blocks, counts what arrives, and takes it back.

Rule 1: a request is complete when every head of every tensor was claimed by one sender, each
claim's immediates are counted, and its checksums, if it announced any, are those of the blocks.
Rule 2: its blocks are free when it is complete, or when each claim has ended: by its sender's word,
or because that incarnation is certain to be dead or is fenced off. A sender that is silent when it
is asked to stop is removed from the engine, which fences it off where NICs can. Rule 3: each claim
has an immediate of its own, which is given out again only if all that was expected of it has
arrived. Rule 4: the lock of the cache guards everything here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from tep import (
    BusyError,
    ClosedError,
    Expectation,
    NetAddr,
    PeerChange,
    PeerEvent,
    Removal,
    Sender,
    TepError,
    UsageError,
    checksum,
)
from tep.apps import KVCACHE
from tep.apps.kvcache.blocks.cache import KvBlocks
from tep.apps.kvcache.blocks.handle import KvRequest, KvSide, Patience
from tep.apps.kvcache.blocks.messages import (
    Cancel,
    Claim,
    Ended,
    Go,
    Over,
    Refuse,
    Stopping,
    Ticket,
    encode,
)
from tep.apps.kvcache.layout import rows_of, served_heads

__all__ = ["ImmSpace", "KvLoad", "KvReceiver"]


class ImmSpace:
    """The immediates of one receiver; they go round, and one that ended comes last.

    A number is live from take() to its end. A clean end (all that was expected has arrived) frees
    it at once. After a cancel or a failure it is burnt, as engines call it: neither end uses it
    again.
    """

    def __init__(self, numbers: range) -> None:
        if numbers.step != 1 or len(numbers) < 1 or numbers.start < 0 or numbers.stop > 2**32:
            raise UsageError(f"ImmSpace: {numbers} is no range of immediates with step 1")
        self._numbers = numbers
        self._next = numbers.start
        self.live: set[int] = set()
        self.burnt: set[int] = set()

    def take(self) -> int:
        """Give out a number that nothing in flight can carry.

        Raises:
            BusyError: all numbers are live or burnt.
        """
        for _ in range(len(self._numbers)):
            imm = self._next
            self._next += 1
            if self._next == self._numbers.stop:
                self._next = self._numbers.start
            if not (imm in self.live or imm in self.burnt):
                self.live.add(imm)
                return imm
        raise BusyError(
            f"all {len(self._numbers)} immediates are in use: {len(self.live)} live, "
            f"{len(self.burnt)} burnt; enlarge the range"
        )

    def end(self, imm: int) -> None:
        """All that was expected has arrived, and nothing else was sent."""
        self.live.remove(imm)

    def burn(self, imm: int) -> None:
        """The request ended early: what was sent of it may still be counted."""
        self.live.remove(imm)
        self.burnt.add(imm)


class _Grant:
    """The right of one sender to write for one request."""

    def __init__(self, addr: NetAddr, message: Claim, imm: int, count: int) -> None:
        self.addr, self.claim, self.imm, self.count = addr, message.claim, imm, count
        self.message = message
        self.checked = not message.sums
        self.wrong = ""  # checksums that differ
        self.expectation: Expectation | None = None
        self.ended: Ended | None = None
        self.counted = self.settled = self.dead = False
        self.asked = 0  # times that it was asked again to stop, since it last answered
        self.free_s: float | None = None  # when the last row in doubt counts as landed

    @property
    def who(self) -> tuple[str, int]:
        return self.addr.name, self.addr.epoch


class KvLoad(KvRequest):
    """A request that is expected; see KvRequest.

    Attributes:
        ticket: for the sender's `begin`; it travels by any way.
    """

    def __init__(
        self,
        receiver: KvReceiver,
        request: str,
        blocks: list[list[int]],
        timeout_s: float | None,
        serial: int,
    ) -> None:
        super().__init__(receiver, request, blocks, timeout_s)
        addr = receiver.blocks.named(receiver.blocks.engine.main_address)
        raw = tuple(np.array(group, "<u4").tobytes() for group in blocks)
        self.ticket = encode(Ticket(addr.name, addr.epoch, serial, request, raw))
        self._receiver, self._serial = receiver, serial
        self._grants: dict[tuple[str, int, int], _Grant] = {}  # by sender and claim
        self._tp = 0  # of the senders, once one has claimed
        self._uncovered = receiver._heads_of(blocks)
        self._claimed: set[tuple[str, int]] = set()  # tensors, and ranks of the senders
        self._told_s = self._failed_s = -math.inf

    def cancel(self, reason: str = "cancelled by the receiver") -> None:
        """Take back the right to write. It is "free" once nobody can any more. Idempotent."""
        with self._receiver.blocks.lock:
            self._receiver._fail(self, reason)


class KvReceiver(KvSide):
    """Expects blocks that other instances write to this rank's cache.

    Args:
        blocks: this rank's cache.
        imms: immediates to grant; they are this receiver's alone on its engine.
        patience: `cancel_s` between repeats of a message, `request_s` for one request, `linger_s`
            how long a row may still land after its NIC or path failed, and how long a sender that
            is asked to stop may be silent before it is removed.

    Attributes:
        removed: the claims of each sender that was removed from the engine, with their requests'
            serials, which it has not ended by its own word.
    """

    def __init__(
        self,
        blocks: KvBlocks,
        *,
        imms: range = KVCACHE,
        patience: Patience = Patience(),
    ) -> None:
        on_stopping, on_ended = self._on_stopping, self._on_ended
        blocks.handle({Claim: self._on_claim, Stopping: on_stopping, Ended: on_ended})
        blocks.engine.on_peer(self._on_peer)
        super().__init__(blocks, patience)
        self.imms = ImmSpace(imms)
        self._serial = 0
        self._loads: dict[int, KvLoad] = {}
        self._dead: dict[str, tuple[int, int]] = {}  # epoch, and the last request expected then
        self.removed: dict[tuple[str, int], dict[int, int]] = {}

    @property
    def idle(self) -> bool:
        """Whether every request has ended, and its blocks are the engine's again."""
        return not self._loads

    def expect(
        self, request: str, block_ids: Sequence[Sequence[int]], *, timeout_s: float | None = None
    ) -> KvLoad:
        """Expect a request's blocks; hand its `ticket` to the sender.

        Args:
            request: its name, the same at the sender.
            block_ids: for each group, the blocks here. Nothing else may use them until the load is
                finished. They take the last blocks of the sender's.
            timeout_s: for all of it; None: the patience's.

        Raises:
            UsageError: no such blocks.
        """
        ids = self.blocks.check_blocks("expect", block_ids)
        with self.blocks.lock:
            self._serial += 1
            load = self._loads[self._serial] = KvLoad(self, request, ids, timeout_s, self._serial)
            self._settle(load)  # it may need nothing
        return load

    def fenced(self, name: str, epoch: int) -> None:
        """An incarnation of a sender's engine is certain to be dead: none of its rows lands.

        For instance because its process has ended. That it has restarted is noticed by itself. If
        it claims a request that is expected later, it was not dead, and is granted it.

        Args:
            name: of its engine.
            epoch: it, and all before it.
        """
        with self.blocks.lock:
            former, _ = self._dead.get(name, (epoch, 0))
            self._dead[name] = max(epoch, former), self._serial
            self._end_of(name, epoch, "dead")

    def _end_of(self, name: str, epoch: int, how: str) -> None:
        """Nothing lands any more of what an incarnation of a sender, or one before it, has sent."""
        for load in tuple(self._loads.values()):
            for grant in load._grants.values():
                if grant.who[0] == name and grant.who[1] <= epoch and not grant.settled:
                    grant.dead = True
                    self._fail(load, f"sender {name} is {how}")
            self._settle(load)

    # ------------------------------------------------------------------ claims

    def _heads_of(self, blocks: list[list[int]]) -> dict[str, int]:
        """Count the heads of each tensor that are to come."""
        mine = (self.blocks.tp, self.blocks.rank)
        return {
            name: served_heads(one.tensor.heads, mine, mine, name)[2]
            for name, one in self.blocks.placed.items()
            if blocks[one.tensor.group]
        }

    def _find(
        self, message: Claim | Stopping | Ended, sender: Sender
    ) -> tuple[NetAddr | None, KvLoad | None, _Grant | None]:
        """The peer that a message is from, the request that it is about, and its grant there."""
        addr, load = self.blocks.peer_of(message.addr, sender), self._loads.get(message.serial)
        if addr is None or load is None:
            return addr, load, None
        return addr, load, load._grants.get((addr.name, addr.epoch, message.claim))

    def _on_claim(self, message: Claim, sender: Sender) -> None:
        addr, load, grant = self._find(message, sender)
        if addr is None or self._ask_to_end(addr):
            return  # it will ask again
        why = ""
        if load is not None and load.request == message.request:
            try:
                if grant is None and load.state == "open":
                    grant = self._grant(load, message, addr)
            except BusyError:
                return  # no immediate is free: it will ask again
            except TepError as error:
                why = str(error)
            if grant is not None and load.state == "open":
                self.blocks.send(addr, Go(addr.epoch, message.claim, grant.imm))
                return
            if grant is not None:
                self._cancel(load, grant)
                return
        why = why or f"{message.request!r} is not expected here, or not any more"
        self.blocks.send(addr, Refuse(addr.epoch, message.claim, why))

    def _ask_to_end(self, addr: NetAddr) -> bool:
        """Ask a sender that was removed to end what it has not ended; False: there is nothing.

        It stays fenced off until then: it is named to the engine by the next grant.
        """
        old = self.removed.get((addr.name, addr.epoch), {})
        for claim, serial in old.items():
            order = Cancel(addr.epoch, claim, self.blocks.address, serial, "it was given up")
            self.blocks.send(addr, order)
        return bool(old)

    def _grant(self, load: KvLoad, message: Claim, addr: NetAddr) -> _Grant:
        """Grant a claim. An error is the reason to refuse it."""
        epoch, serial = self._dead.get(addr.name, (-1, 0))
        if addr.epoch <= epoch:
            if load._serial <= serial:
                raise UsageError("its sender is known to be dead")
            del self._dead[addr.name]  # nobody can claim what was expected after his death
        if load._tp not in {0, message.tp} or not 0 <= message.rank < message.tp:
            raise UsageError(f"rank {message.rank} of {message.tp}; others have {load._tp} ranks")
        heads, rows = self._covered(load, message)
        imm = self.imms.take()
        grant = _Grant(addr, message, imm, rows)
        try:
            grant.expectation = self.blocks.engine.expect_imm_count(
                imm, rows, sender=addr, on_done=partial(self._counted, load, grant)
            )
        except TepError:
            self.imms.end(imm)
            raise
        for name, n in heads.items():
            load._uncovered[name] -= n
            load._claimed.add((name, message.rank))
        load._tp = message.tp
        load._grants[addr.name, addr.epoch, message.claim] = grant
        return grant

    def _covered(self, load: KvLoad, message: Claim) -> tuple[dict[str, int], int]:
        """Heads of each tensor that a claim brings, and the rows that carry them."""
        heads, rows = {}, 0
        mine, theirs = (self.blocks.tp, self.blocks.rank), (message.tp, message.rank)
        for name, length in message.rows.items():
            place = self.blocks.placed.get(name)
            if place is None:
                raise UsageError(f"there is no tensor {name!r}")
            if (name, message.rank) in load._claimed:  # its heads would stand for another rank's
                raise UsageError(f"rank {message.rank} of {message.tp} has claimed {name!r} before")
            tensor = place.tensor
            _, first, n = served_heads(tensor.heads, theirs, mine, name)
            whole, offsets, _ = rows_of(place, place, (first, first, n))
            if length < 1 or whole % length or not n or n > load._uncovered.get(name, 0):
                raise UsageError(
                    f"rank {message.rank} of {message.tp} brings {n} heads of {name!r} in rows of "
                    f"{length} bytes; {load._uncovered.get(name, 0)} are missing"
                )
            heads[name] = n
            rows += len(offsets) * whole // length * len(load.blocks[tensor.group])
        if not rows:
            raise UsageError("it brings nothing")
        return heads, rows

    # ------------------------------------------------------------------ ends

    def _counted(self, load: KvLoad, grant: _Grant, expectation: Expectation) -> None:
        with self.blocks.lock:
            grant.counted = True
            if not (expectation.ok or expectation.cancelled):
                self._fail(load, f"{grant.addr.name}: {expectation.error}")
            self._settle(load)

    def _on_stopping(self, message: Stopping, sender: Sender) -> None:
        _, _, grant = self._find(message, sender)
        if grant is not None:
            grant.asked = 0

    def _on_ended(self, message: Ended, sender: Sender) -> None:
        addr, load, grant = self._find(message, sender)
        if addr is None:
            return
        self._has_ended(addr, message.claim)
        if load is not None:
            if grant is not None and grant.ended is None:
                grant.ended = message
                if message.doubt:
                    grant.free_s = self.now_s() + self.patience.linger_s
            if message.reason or grant is None:
                self._fail(load, f"{addr.name}: {message.reason}")
            self._settle(load)
        self.blocks.send(addr, Over(addr.epoch, message.claim))

    def _fail(self, load: KvLoad, reason: str) -> None:
        if load.state == "open":
            load._to("failed", reason)
            load._told_s = load._failed_s = self.now_s()
            for grant in load._grants.values():
                self._cancel(load, grant)
        self._settle(load)

    def _has_ended(self, addr: NetAddr, claim: int) -> None:
        who = addr.name, addr.epoch
        old = self.removed.get(who, {})
        old.pop(claim, None)
        if not old:
            self.removed.pop(who, None)

    def _remove(self, addr: NetAddr) -> None:
        """Have a silent sender fenced off, once."""
        who = addr.name, addr.epoch
        if who in self.removed:
            return
        self.removed[who] = {
            grant.claim: load._serial
            for load in self._loads.values()
            for grant in load._grants.values()
            if grant.who == who and not grant.settled
        }

        def removed(removal: Removal) -> None:
            with self.blocks.lock:
                if removal.ok and not removal.unfenced:
                    self._end_of(*who, "fenced off, since it did not say that it had stopped")

        with contextlib.suppress(ClosedError):
            self.blocks.engine.remove_peer(addr).add_done_callback(removed)

    def _cancel(self, load: KvLoad, grant: _Grant, never: bool = False) -> None:
        """Ask a sender to stop, unless it is known that it has; remove it if it is silent.

        Times that it was asked count, not time: while this process was held up it heard nobody.
        """
        if grant.ended is None and not (grant.settled or grant.dead):
            what = (grant.claim, self.blocks.address, load._serial, load.reason)
            self.blocks.send(grant.addr, Cancel(grant.addr.epoch, *what))
            if never or grant.asked * self.patience.cancel_s >= self.patience.linger_s:
                self._remove(grant.addr)
            grant.asked += 1

    def _settle(self, load: KvLoad) -> None:
        """Look what has ended, and say so."""
        for grant in load._grants.values():
            self._settle_grant(load, grant)
            if grant.wrong and load.state == "open":
                self._fail(load, grant.wrong)
                return
        if not all(grant.settled for grant in load._grants.values()):
            return
        if load.state == "failed":
            load.failed_blocks = self._failed_blocks(load)
            del self._loads[load._serial]
            load._to("free")
        elif load.state == "open" and not any(load._uncovered.values()):
            del self._loads[load._serial]
            load._to("done")

    def _settle_grant(self, load: KvLoad, grant: _Grant) -> None:
        expectation = grant.expectation
        if grant.settled or expectation is None:
            return
        if expectation.ok and not (grant.checked or grant.wrong) and grant.ended is not None:
            try:
                grant.wrong = self._compare(load, grant, grant.ended.sums)
            except TepError as error:  # of the GPU
                grant.wrong = f"checksums: {error}"
            grant.checked = not grant.wrong
        if expectation.ok and (grant.checked or load.state == "failed"):
            # All that this sender writes is here.
            self.imms.end(grant.imm)
            grant.settled = True
            return
        ended = grant.ended
        if load.state == "open" or not (grant.dead or ended):
            return
        if grant.free_s is not None and self.now_s() < grant.free_s and not grant.dead:
            return
        if not grant.counted:
            expectation.cancel()
            return
        self.imms.burn(grant.imm)
        grant.settled = True

    def _compare(self, load: KvLoad, grant: _Grant, sums: dict[str, int]) -> str:
        """Compare the checksums of all rows that a sender wrote; return what differs, or ""."""
        claim, mine = grant.message, (self.blocks.tp, self.blocks.rank)
        for name, length in claim.rows.items():
            at = self.blocks.placed[name]
            _, first, count = served_heads(at.tensor.heads, (claim.tp, claim.rank), mine, name)
            whole, offsets, _ = rows_of(at, at, (first, first, count))
            ids = np.array(load.blocks[at.tensor.group], np.int64)[:, None, None]
            parts = offsets[:, None] + np.arange(0, whole, length)
            starts = at.start + ids * at.block_stride + parts
            here = checksum(self.blocks.mr(at.region), starts, length)
            if here != sums.get(name):
                return (
                    f"{grant.addr.name}: checksums of {name!r} differ: {starts.size} rows of "
                    f"{length} bytes in region {at.region} from offset {starts.min()} on; written "
                    f"{sums.get(name, 0):#010x}, here {here:#010x}. A NIC that moves other bytes "
                    "than it was given: `tep doctor` tests the way between GPUs and NICs"
                )
        return ""

    def _failed_blocks(self, load: KvLoad) -> tuple[tuple[int, ...], ...]:
        found = []
        for group, ids in enumerate(load.blocks):
            good = np.full(len(ids), not any(load._uncovered.values()))
            for grant in load._grants.values():
                checked = grant.checked
                if checked and grant.expectation is not None and grant.expectation.ok:
                    continue
                told = grant.ended.good if checked and grant.ended is not None else ()
                bits = np.frombuffer(told[group] if group < len(told) else b"", np.uint8)
                some = np.unpackbits(bits)[: len(ids)].astype(bool)
                good &= some if len(some) == len(ids) else False
            found.append(tuple(np.array(ids, np.int64)[~good].tolist()))
        return tuple(found)

    # ------------------------------------------------------------------ peers and time

    def _on_peer(self, event: PeerEvent) -> None:
        if event.kind is PeerChange.RESTARTED:
            self.removed.pop((event.peer, event.epoch), None)
            self.fenced(event.peer, event.epoch)

    def turn(self) -> float:
        """Repeat what was not answered, and end what is late; return when to look again."""
        now_s, patience = self.now_s(), self.patience
        with self.blocks.lock:
            for load in tuple(self._loads.values()):
                if load.state == "open" and now_s >= load.deadline_s:
                    self._fail(load, self._late(load))
                elif load.state == "failed":
                    if now_s - load._told_s >= patience.cancel_s:
                        load._told_s = now_s
                        never = now_s - load._failed_s >= patience.request_s  # it never stops
                        for grant in load._grants.values():
                            self._cancel(load, grant, never)
                    self._settle(load)
        return patience.cancel_s

    def _late(self, load: KvLoad) -> str:
        told = [
            "its checksums did not come" if g.expectation.ok else g.expectation.describe()
            for g in load._grants.values()
            if g.expectation and not g.settled
        ]
        missing = sum(load._uncovered.values())
        unclaimed = [f"nobody claimed {missing} heads of it"] if missing else []
        return "not complete before its deadline: " + "; ".join(told + unclaimed)

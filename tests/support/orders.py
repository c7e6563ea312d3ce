"""A fabric on which every order of events can be tried, one after the other. Not a test.

What may happen next (a row lands, an acknowledgement or an error comes back, a control message
arrives, is lost or comes twice, a fence closes, a NIC dies) is a list, and `Choices` say which of
it does. Between two events both engines are turned until they rest.

`explored` goes through all choices there are, and through each state once. An engine is a function
of what it was given, in its order. So two runs in which each engine was given the same, and the
fabric and the memory are the same, go on alike: the order between events of different engines makes
no difference, and the second run ends there.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from typing import TypeVar

from tep.backends.base import DomainCaps, DomainKey, Kind, Status, WriteBatch
from tep.control.channel import Drop
from tep.drivers.threads import InlineDriver
from tep.engine import TransferEngine
from tests.support.inside import machine_of, peers_of, worker_of
from tests.world.explore import Choices

Event = Callable[[], None]

# Deaths are what these runs are about. pytest keeps every line that is logged: gigabytes.
logging.getLogger("tep.orders").setLevel(logging.ERROR)


T = TypeVar("T")


class Known(Exception):
    """A run has come to a state from which an earlier run went on, or will."""


class Tree(Choices):
    """All choices, one path after the other, and the states that were met.

    Args:
        merge: whether a run ends where it meets a state again; False: each path is its own.
    """

    __slots__ = ("_merge", "_states")

    def __init__(self, *, merge: bool = True) -> None:
        super().__init__()
        self._merge = merge
        self._states: set[int] = set()

    def meet(self, state: Callable[[], Hashable]) -> None:
        """Raise Known if a run before this one has met this state."""
        if not self._merge or self._at < len(self._path):
            return  # this part of the path is that of the run before
        key = hash(state())
        if key in self._states:
            raise Known
        self._states.add(key)


def explored(
    play: Callable[[Choices], T], *, merge: bool = True, runs_max: int | None = None
) -> list[T]:
    """Play all orders; return what the runs returned that came to an end of their own.

    Args:
        play: one run, a function of its choices. A run that raises ends the search.
        merge: as in Tree.
        runs_max: give up after so many runs, those that were cut short included; None: never.
    """
    tree, found, runs = Tree(merge=merge), [], 0
    while True:
        runs += 1
        with suppress(Known):
            found.append(play(tree))
        if not tree.next() or runs == runs_max:
            return found


class Drawn(Choices):
    """Answers that are drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)

    def pick(self, n: int) -> int:
        return self.random.randrange(n)


class Flight:
    """A row on its way."""

    def __init__(self, here: Nic, there: Nic, batch: WriteBatch, index: int) -> None:
        self.here = here
        self.there = there
        self.row = next(batch.rows(index, index + 1))
        self.ctx = batch.ctx
        self.index = index
        self.landed = False
        self.ended = False
        self.barred = False


class Nic:
    """One NIC of the fabric; see `tep.backends.base.ControlDomain`."""

    def __init__(self, fabric: Fabric, name: str, index: int, owner: int) -> None:
        self.caps = DomainCaps(
            backend="orders",
            nic=f"{name}/{index}",
            link_bps=0,
            sq_depth=fabric.depth,
            max_write_bytes=1 << 20,
            max_msg_bytes=64,
            ordered=False,
            peer_timeout_s=1.0,
            control_bytes=1024,
            imm_source=True,
        )
        self.fabric = fabric
        self.address = f"{name}/{index}".encode()
        self.dead = False
        self.slots = 0
        self.regions = {}
        self.fenced = set()
        self.fencing = set()
        self.controls = {}
        self.cq = deque()
        self.owner = owner
        self.gone = False  # its engine has crashed
        fabric.nics.append(self)

    def push(self, kind, status, imm, row, ctx, nbytes=0, *, says=()) -> None:
        """Hand the engine a completion. `says`: what else it learns by it."""
        self.cq.append((kind, status, 1, imm, row, ctx, nbytes))
        self.fabric.note(self.owner, (self.address, kind, status, imm, row, ctx, says))

    def push_control(self, payload: bytes, address: bytes) -> None:
        """Hand the engine a control message."""
        slot = self.slots = self.slots + 1
        self.controls[slot] = (payload, address)
        self.push(Kind.CONTROL, Status.OK, 0, 0, slot, len(payload), says=(payload, address))

    @property
    def lost(self) -> bool:
        """True if nothing arrives here any more."""
        return self.dead or self.gone

    def register(self, memory, access) -> DomainKey:
        # Another key and base on each NIC, so that a mix-up shows.
        number = len(self.regions) + 1
        key = 1000 * (self.fabric.nics.index(self) + 1) + number
        base = key << 20
        self.regions[key] = (memory.bytes_view(), base, memory.ptr)
        return DomainKey(key, key, base)

    def deregister(self, key: DomainKey) -> None:
        del self.regions[key.rkey]

    def connect(self, peer: bytes) -> int:
        return next(k for k, nic in enumerate(self.fabric.nics) if nic.address == peer)

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        assert not self.dead or any(entry[0] == Kind.DOWN for entry in self.cq), "known to be dead"
        out = sum(f.here is self and not f.ended for f in self.fabric.flights)
        stop = min(stop, start + self.fabric.depth - out)
        for index in range(start, stop):
            peer = batch.peer if isinstance(batch.peer, int) else int(batch.peer[index])
            self.fabric.flights.append(Flight(self, self.fabric.nics[peer], batch, index))
        return stop - start

    def post_send(self, peer: int, payload: bytes, ctx: int) -> bool:
        raise NotImplementedError

    def post_control(self, peer: int, payload: bytes, ctx: int) -> bool:
        self.fabric.controls.append((self, self.fabric.nics[peer], payload, ctx))
        return True

    def take_control(self, slot: int) -> tuple[bytes, bytes]:
        return self.controls.pop(slot)

    def engine_of(self, address: bytes) -> bytes:
        return address.partition(b"/")[0]

    def source(self, number: int) -> bytes:
        return self.fabric.nics[number].address

    def fence(self, source: bytes, ctx: int) -> None:
        self.fencing.add(source)
        self.fabric.fences.append((self, source, ctx))

    def unfence(self, source: bytes) -> None:
        if source in self.fenced:
            self.fenced.remove(source)
            for flight in self.fabric.flights:
                flight.barred |= flight.there is self and flight.here.address == source

    def poll(self, out) -> int:
        n = 0
        while self.cq and n < len(out):
            out[n] = self.cq.popleft()
            n += 1
        return n

    def status_text(self, status: int) -> str:
        return ""

    def forget(self, peer) -> None:
        """Nothing is kept of a peer that could be given back."""

    def set_waker(self, waker) -> None:
        pass

    def wakeup_fd(self):
        return None

    def arm(self) -> bool:
        return True

    def close(self) -> None:
        for flight in self.fabric.flights:
            if flight.here is self and not flight.ended:
                flight.ended = True
                self.push(Kind.WRITE, Status.FLUSHED, 0, flight.index, flight.ctx)


class Still(InlineDriver):
    """Time stands still but for who moves the fabric's."""

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric.ring)
        self._fabric = fabric

    def now_s(self) -> float:
        return self._fabric.now_s


class Fabric:
    """Two engines, the rows and messages in flight between them, and the chooser of the order.

    Args:
        chooser: chooses the next event.
        nics: numbers of NICs of each engine.
        doomed: one of these NICs dies, numbered over both engines; empty: none does.
        losses: number of control messages that may get lost although they complete well.
        copies: number of control messages that may come twice, the second time at any moment.
        flush: True: an error may end all other rows of its path as FLUSHED.
        depth: rows that a NIC takes.

    Attributes:
        now_s: the time of both engines; a slow machine must not make them ask a second time.
        cuts: pairs of NICs between which nothing gets through.
        more: further events, chosen by the test.
        state: the test's own state, which decides about `more` and about its end.
    """

    def __init__(
        self,
        chooser: Choices,
        nics: tuple[int, int],
        doomed: tuple[int, ...],
        *,
        losses: int = 0,
        copies: int = 0,
        flush: bool = False,
        depth: int = 64,
    ) -> None:
        self.chooser = chooser
        self.depth = depth
        self.nics: list[Nic] = []
        self.flights: list[Flight] = []
        self.controls: list[tuple[Nic, Nic, bytes, int | None]] = []
        self.fences: list[tuple[Nic, bytes, int]] = []
        self.doomed = doomed
        self.losses, self.copies, self.flush = losses, copies, flush
        self.ring = []
        self.now_s = 0.0
        self.cuts: set[tuple[Nic, Nic]] = set()
        self.more: Callable[[], list[Event]] = list
        self.state: Callable[[], Hashable] = tuple
        self.told = [0, 0]
        self.engines: list[TransferEngine] = []
        for owner, (name, n) in enumerate(zip("ab", nics, strict=True)):
            self.engines.append(self._engine(name, n, owner, 1))

    def _engine(self, name: str, n: int, owner: int, epoch: int) -> TransferEngine:
        host = name if epoch == 1 else f"{name}#{epoch}"
        nics = [Nic(self, host, k, owner) for k in range(n)]
        return TransferEngine(nics, driver=Still(self), name=name, epoch=epoch)

    def note(self, owner: int, what: Hashable) -> None:
        """An engine was given something; what it will do is a function of all that it was given."""
        self.told[owner] = hash((self.told[owner], what))

    def restart(self, owner: int) -> TransferEngine:
        """Crash an engine and start it again. What it had sent may arrive all the same."""
        old = self.engines[owner]
        mine = [nic for nic in self.nics if nic.owner == owner and not nic.gone]
        for nic in mine:
            nic.gone = True
        for flight in self.flights:
            flight.ended |= flight.here.gone
        self.fences = [entry for entry in self.fences if not entry[0].gone]
        self.ring.remove(machine_of(old))
        self.note(owner, "restart")
        self.engines[owner] = self._engine(old.name, len(mine), owner, peers_of(old).own.epoch + 1)
        return self.engines[owner]

    def run(self) -> None:
        """Let everything happen that can, in the order that the chooser says."""
        self.rest()
        while events := self._events():
            if isinstance(self.chooser, Tree):
                self.chooser.meet(self._state)
            events[self.chooser.pick(len(events))]()
            self.rest()
        for engine in self.engines:
            dropped = worker_of(engine).channel.dropped.keys() - {Drop.UNASKED}
            assert not dropped, f"{engine.name} dropped messages of its peer: {dropped}"

    def _state(self) -> Hashable:
        """All that the rest of the run depends on, but for its choices."""
        number = self.nics.index
        return (
            tuple(self.told),
            tuple(
                (
                    nic.dead,
                    tuple(sorted(nic.fenced)),
                    tuple(bytes(memory) for memory, _, _ in nic.regions.values()),
                    tuple((f.landed, f.ended, f.barred) for f in self.flights if f.here is nic),
                )
                for nic in self.nics
            ),
            tuple(sorted((number(a), number(b), p, c or 0) for a, b, p, c in self.controls)),
            tuple(sorted((number(nic), ctx) for nic, _, ctx in self.fences)),
            tuple(sorted((number(a), number(b)) for a, b in self.cuts)),
            (self.doomed, self.losses, self.copies, self.now_s),
            self.state(),
        )

    def rest(self) -> None:
        for _ in range(1000):
            work = [machine.step() for machine in self.ring]  # each of them, whoever had work
            if not any(work):
                break
            for machine in self.ring:
                machine.deliver()
        else:
            raise AssertionError("the engines never rest")

    def _events(self) -> list[Event]:
        found: list[Event] = []
        for flight in self.flights:
            found += self.events_of(flight)
        for k, (_, _, _, ctx) in enumerate(self.controls):
            found.append(lambda k=k: self.deliver(k))
            if self.losses and ctx is not None:
                found.append(lambda k=k: self._lose(k))
            if self.copies and ctx is not None:
                found.append(lambda k=k: self._copy(k))
        found += [lambda k=k: self.fence(k) for k in range(len(self.fences))]
        # Dying is a choice as long as it makes a difference to any row.
        if self.doomed and any(not flight.ended for flight in self.flights):
            found += [lambda nic=nic: self.die(self.nics[nic]) for nic in self.doomed]
        return found + self.more()

    def events_of(self, flight: Flight) -> list[Event]:
        here, there = flight.here, flight.there
        fenced = flight.barred or here.address in there.fenced
        # A fence that has begun may end rows, and keeps none out before it is told to be there.
        closing = here.address in there.fencing
        broken = here.dead or there.lost or fenced or closing or (here, there) in self.cuts
        may_land = not there.lost and not fenced
        found: list[Event] = []
        # A row whose sender has been told that it failed may land all the same, until it is
        # fenced. Once nothing else is to come that makes no difference.
        more = not flight.ended or self.controls or any(not f.ended for f in self.flights)
        if not flight.landed and may_land and more:
            found.append(lambda: self.land(flight))
        if not flight.ended:
            if broken:
                found.append(lambda: self.fail(flight))
                if self.flush and any(self._behind(flight)):
                    found.append(lambda: self._flush(flight))
            elif flight.landed:
                found.append(lambda: self.end(flight, Status.OK))
        return found

    def _behind(self, flight: Flight) -> Iterator[Flight]:
        """The other rows of its path that have not ended."""
        for other in self.flights:
            mine = other.here is flight.here and other.there is flight.there
            if mine and other is not flight and not other.ended:
                yield other

    def land(self, flight: Flight) -> None:
        flight.landed = True
        row, there = flight.row, flight.there
        if row.nbytes:
            source, _, ptr = flight.here.regions[row.lkey]
            target, base, _ = there.regions[row.rkey]
            at, src = row.dst - base, row.src - ptr
            assert 0 <= at <= len(target) - row.nbytes
            target[at : at + row.nbytes] = source[src : src + row.nbytes]
        if row.imm is not None:
            number = self.nics.index(flight.here)
            there.push(Kind.IMM, Status.OK, row.imm, 0, number)

    def end(self, flight: Flight, status: Status) -> None:
        flight.ended = True
        row = 0 if status is Status.OK else flight.index
        flight.here.push(Kind.WRITE, status, 0, row, flight.ctx)

    def fail(self, flight: Flight) -> None:
        self.end(flight, self._why(flight.here, flight.there))

    def _why(self, here: Nic, there: Nic) -> Status:
        if here.dead:
            return Status.NIC_DOWN
        return Status.STALE_PEER if there.gone else Status.UNREACHABLE

    def _flush(self, flight: Flight) -> None:
        others = list(self._behind(flight))
        self.fail(flight)
        for other in others:
            self.end(other, Status.FLUSHED)

    def deliver(self, k: int) -> None:
        here, there, payload, ctx = self.controls.pop(k)
        status = Status.OK
        if here.dead or there.lost or {(here, there), (there, here)} & self.cuts:
            status = self._why(here, there)
        else:
            there.push_control(payload, here.address)
        self._sent(here, ctx, status)

    def _sent(self, here: Nic, ctx: int | None, status: Status = Status.OK) -> None:
        if ctx is not None and not here.gone:
            here.push(Kind.SENT, status, 0, 0, ctx)

    def _lose(self, k: int) -> None:
        self.losses -= 1
        here, _, _, ctx = self.controls.pop(k)
        self._sent(here, ctx)

    def _copy(self, k: int) -> None:
        self.copies -= 1
        here, there, payload, _ = self.controls[k]
        self.controls.append((here, there, payload, None))

    def fence(self, k: int) -> None:
        nic, source, ctx = self.fences.pop(k)
        nic.fencing.discard(source)
        nic.fenced.add(source)
        nic.push(Kind.FENCED, Status.OK, 0, 0, ctx)

    def die(self, nic: Nic) -> None:
        self.doomed = ()
        nic.dead = True
        nic.push(Kind.DOWN, Status.NIC_DOWN, 0, 0, 0)

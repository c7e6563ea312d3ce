"""A fabric on which every order of events can be tried, one after the other. Not a test.

What may happen next (a row lands, an acknowledgement or an error comes back, a control message
arrives, a
fence closes, a NIC dies) is a list, and `Choices` say which of it does. Between two events both
engines are turned until they rest. `every` runs through all choices there are.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterator

from tep.backends.base import DomainCaps, DomainKey, Kind, Status, WriteBatch
from tep.control.channel import Drop
from tep.drivers import InlineDriver
from tep.engine import TransferEngine
from tep.testing.explore import Choices

Event = Callable[[], None]

# Deaths are what these runs are about. pytest keeps every line that is logged: gigabytes.
logging.getLogger("tep.orders").setLevel(logging.ERROR)


def every() -> Iterator[Choices]:
    """The choices of each way in which a run can go."""
    choices = Choices()
    yield choices
    while choices.next():
        yield choices


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

    def __init__(self, fabric: Fabric, name: str, index: int) -> None:
        self.caps = DomainCaps(
            backend="orders",
            nic=f"{name}/{index}",
            link_bps=0,
            sq_depth=64,
            max_write_bytes=1 << 20,
            max_msg_bytes=64,
            ordered=False,
            imm_eats_recv=False,
            peer_timeout_s=1.0,
            control_bytes=1024,
            imm_source=True,
        )
        self.fabric = fabric
        self.address = f"{name}/{index}".encode()
        self.dead = False
        self.regions = {}
        self.fenced = set()
        self.controls = {}
        self.cq = deque()
        fabric.nics.append(self)

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
        self.fenced.add(source)
        self.fabric.fences.append((self, ctx))

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
                entry = (Kind.WRITE, Status.FLUSHED, 1, 0, flight.index, flight.ctx, 0)
                self.cq.append(entry)


class Still(InlineDriver):
    """Time stands still but for who moves the fabric's."""

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric.ring)
        self._fabric = fabric

    def now_s(self) -> float:
        return self._fabric.now_s


class Fabric:
    """Two engines, what is on its way between them, and who chooses.

    Args:
        chooser: who.
        nics: of each engine.
        doomed: the NICs of which one dies, numbered over both engines; empty: none does.

    Attributes:
        now_s: the time of both engines; a slow machine must not make them ask a second time.
        cuts: pairs of NICs between which nothing gets through.
        more: what else may happen, by the test's will.
    """

    def __init__(self, chooser: Choices, nics: tuple[int, int], doomed: tuple[int, ...]) -> None:
        self.chooser = chooser
        self.nics: list[Nic] = []
        self.flights: list[Flight] = []
        self.controls: list[tuple[Nic, Nic, bytes, int]] = []
        self.fences: list[tuple[Nic, int]] = []
        self.doomed = doomed
        self.slots = 0
        self.ring = []
        self.now_s = 0.0
        self.cuts: set[tuple[Nic, Nic]] = set()
        self.more: Callable[[], list[Event]] = list
        self.engines = [
            TransferEngine(
                [Nic(self, name, k) for k in range(n)],
                driver=Still(self),
                name=name,
                epoch=1,
            )
            for name, n in zip("ab", nics, strict=True)
        ]

    def run(self) -> None:
        """Let everything happen that can, in the order that the chooser says."""
        self._rest()
        while events := self._events():
            events[self.chooser.pick(len(events))]()
            self._rest()
        for engine in self.engines:
            dropped = engine._worker.channel.dropped.keys() - {Drop.UNASKED}
            assert not dropped, f"{engine.name} dropped messages of its peer: {dropped}"

    def _rest(self) -> None:
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
            found += self._of(flight)
        found += [lambda k=k: self._deliver(k) for k in range(len(self.controls))]
        found += [lambda k=k: self._fence(k) for k in range(len(self.fences))]
        # Dying is a choice as long as it makes a difference to any row.
        if self.doomed and any(not flight.ended for flight in self.flights):
            found += [lambda nic=nic: self._die(self.nics[nic]) for nic in self.doomed]
        return found + self.more()

    def _of(self, flight: Flight) -> list[Event]:
        here, there = flight.here, flight.there
        fenced = flight.barred or here.address in there.fenced
        broken = here.dead or there.dead or fenced or (here, there) in self.cuts
        may_land = not there.dead and not fenced
        found: list[Event] = []
        # A row whose sender has been told that it failed may land all the same, until it is
        # fenced. Once nothing else is to come that makes no difference.
        more = not flight.ended or self.controls or any(not f.ended for f in self.flights)
        if not flight.landed and may_land and more:
            found.append(lambda: self._land(flight))
        if not flight.ended:
            if broken:
                found.append(lambda: self._fail(flight))
            elif flight.landed:
                found.append(lambda: self._end(flight, Status.OK))
        return found

    def _land(self, flight: Flight) -> None:
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
            there.cq.append((Kind.IMM, Status.OK, 1, row.imm, 0, number, 0))

    def _end(self, flight: Flight, status: Status) -> None:
        flight.ended = True
        row = 0 if status is Status.OK else flight.index
        flight.here.cq.append((Kind.WRITE, status, 1, 0, row, flight.ctx, 0))

    def _fail(self, flight: Flight) -> None:
        dead = flight.here.dead
        self._end(flight, Status.NIC_DOWN if dead else Status.UNREACHABLE)

    def _deliver(self, k: int) -> None:
        here, there, payload, ctx = self.controls.pop(k)
        status = Status.OK
        if here.dead or there.dead or {(here, there), (there, here)} & self.cuts:
            status = Status.NIC_DOWN if here.dead else Status.UNREACHABLE
        else:
            slot = self.slots = self.slots + 1
            there.controls[slot] = (payload, here.address)
            there.cq.append((Kind.CONTROL, Status.OK, 1, 0, 0, slot, len(payload)))
        here.cq.append((Kind.SENT, status, 1, 0, 0, ctx, 0))

    def _fence(self, k: int) -> None:
        nic, ctx = self.fences.pop(k)
        nic.cq.append((Kind.FENCED, Status.OK, 1, 0, 0, ctx, 0))

    def _die(self, nic: Nic) -> None:
        self.doomed = ()
        nic.dead = True
        nic.cq.append((Kind.DOWN, Status.NIC_DOWN, 1, 0, 0, 0, 0))

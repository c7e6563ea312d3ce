"""The shared state of one scenario: its nodes, the transfers begun, and the faults found.

State and its look-ups; `sender`, `receivers` and `mail` play on it, `oracle` judges it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from tep.backends.base import Access, Batch, ReadBatch
from tep.base.api import Barrier, Paged, Routing, Scatter, Shape, Single
from tep.core import plan
from tep.core.handles import Expectation, Removal, State, Transfer
from tep.core.requests import DEFAULT
from tep.engine import TransferEngine
from tep.sim.clock import FabricEnv
from tep.sim.faults import Fault
from tep.sim.row_log import RowLog
from tep.testing.case import Violation
from tests.support.inside import worker_of
from tests.world.lab import Area, Host, Lab, Piece, is_of_read
from tests.world.scenario import Scenario
from tests.world.specs import (
    IMMS,
    RECEIVERS,
    SENDER,
    TransferSpec,
)
from tests.world.tap import Mover

Due = tuple[int, int, tuple[Piece, ...]]
"""An immediate, how many of it, and the bytes that are there once all of them are."""

Shares = tuple[tuple[int, int], ...]
"""The place of each transfer under one immediate, and which of its dues has its bytes."""

ECHO_IMMS: Final = range(0xEC000, 0xED000)
"""Immediates of the answers that receivers send when a count has fired, so that all engines send
and receive at once; each answer has its own, since a failed answer's is burnt."""


@dataclass(slots=True, eq=False)
class Run(Mover):
    """One try of one round of one transfer, from its submit on.

    Attributes:
        number: of all tries of all rounds.
        round: the round that it is for; the number, as long as nothing was tried again.
        sender: the incarnation of node a that submits it.
        hosts: the receivers, in the incarnations whose descriptors it names.
        handle: None if the submit raised.
        settled: how often its callback came.
        cancelled: whether it was asked to end early.
        used: what receivers have used up of it: node, offset there, length.
        snapshot: its bytes at each receiver when it ended, where nothing may change them any more.
    """

    place: int
    number: int
    round: int
    spec: TransferSpec
    area: Area
    sender: Host
    hosts: tuple[Host, ...]
    handle: Transfer | None = None
    settled: int = 0
    cancelled: bool = False
    snapshot: tuple[bytes, ...] = ()
    used: list[tuple[Host, int, int]] = field(default_factory=list)

    def may_post(self) -> str:
        if self.settled or (self.handle is not None and self.handle.finished):
            return f"{self} has settled"
        if self.cancelled and not self.failed:  # what a dead NIC had may be written again
            return f"{self} was cancelled"
        return ""

    def is_failing(self) -> bool:
        return self.handle is not None and self.handle.failure is not None

    @property
    def is_open(self) -> bool:
        """True if its sender lives, has begun it, and has not ended it."""
        return self.sender.live and self.handle in worker_of(self.sender.engine).open

    def take_snapshot(self) -> None:
        """Note its bytes at each receiver: from now on nothing may change them."""
        area = self.area
        self.snapshot = tuple(bytes(h.memory[area.start : area.stop]) for h in self.hosts)

    @property
    def state(self) -> str:
        """The final state; "refused" if the submit raised, "pending" if its sender crashed."""
        return "refused" if self.handle is None else self.handle.state.value

    def __str__(self) -> str:
        round_of = f" round {self.round}" if self.spec.rounds > 1 else ""
        again = f" retry {self.number - self.round}" if self.number > self.round else ""
        return f"transfer {self.place}{round_of}{again} ({self.spec.kind})"


@dataclass(slots=True, eq=False)
class Wait:
    """One expectation, or claim: `count` immediates, upon which the bytes of `shares` are there.

    Attributes:
        number: of the try that it waits for.
        recalled: whether it was cancelled, to be stated again.
        claimed: it is no expectation: on_imm brings the arrivals.
        then: what its receiver does once it is reached.
    """

    host: Host
    place: int
    round: int
    number: int
    imm: int
    count: int
    shares: Shares
    claimed: bool = False
    handle: Expectation | None = None
    settled: int = 0
    recalled: bool = False
    then: Callable[[], None] | None = None


class Stage:
    """One scenario on its lab.

    Attributes:
        runs: by (place of the transfer, number of the try).
        over: time at which a transfer failed for good or became in doubt, by place. Nothing of
            it is sent, or expected, any more.
        reached: rounds that have arrived completely at a receiver, as (place, round).
        waits: every expectation and claim, in the order they were stated.
        wrong: the faults found, in words; the first is the finding.
        closed: nodes whose engine was closed.
        gone: end of a node's first incarnation, by node.
        removals: removals of peers by node a, by node.
        barred: receivers that had to remove node a.
        known: the barred receivers that it had sent to before.
        echo: the answers.
        seen: the coverage counters.
        probing: the owner of rows once all is judged, while the engines are tried once more.
        routings: routings of each transfer.
        find_read: the read that a posted row belongs to.
    """

    def __init__(
        self,
        scenario: Scenario,
        engine_class: type[TransferEngine],
        row_log: RowLog | None,
        env: FabricEnv | None,
    ) -> None:
        self.scenario = scenario
        self.lab = Lab(scenario, engine_class, row_log, self._find, env)
        self.runs: dict[tuple[int, int], Run] = {}
        self.latest: dict[int, Run] = {}
        self.over: dict[int, int] = {}
        self.reached: set[tuple[int, int]] = set()
        self.waits: list[Wait] = []
        self.wrong: list[str] = []
        self.closed: set[str] = set()
        self.gone: dict[str, int] = {}
        self.removals: dict[str, Removal] = {}
        self.barred: set[Host] = set()
        self.known: set[Host] = set()
        self.seen: defaultdict[str, int] = defaultdict(int)
        self.probing: Mover | None = None
        self.nlocal = scenario.nics[0]
        self.routings = tuple(self._routing(spec) for spec in scenario.transfers)
        self._dues: dict[tuple[int, int, str], list[Due]] = {}
        self._starts = [
            (area.start, place, number)
            for place, rounds in enumerate(self.lab.areas)
            for number, area in enumerate(rounds)
        ]
        self.find_read: Callable[[Batch, int], Mover | None] = lambda _batch, _start: None
        self.echo = Echo(self)

    @property
    def sender(self) -> Host:
        """Node a as it is now."""
        return self.lab.hosts[SENDER]

    @property
    def broken(self) -> list[Fault]:
        """Faults so far, those too that the fabric's own load brought about."""
        return self.lab.fabric.happened

    @property
    def harmed(self) -> bool:
        """Return True if any fault happened, or may happen, that fails a row or message."""
        chaos = self.scenario.chaos
        risky = chaos.rnr_retries >= 0 or chaos.message_loss > 0 or chaos.odd_errors > 0
        risky = risky or chaos.connect_fails > 0
        risky = risky or chaos.fence_fails > 0
        return bool(self.broken or self.closed) or risky

    def forget(self, host: Host) -> None:
        """Node a does not remember any more which NICs of a node are silent."""
        self.sender.ledger.unsure.add(f"sim:{host.name}#{host.desc.addr.epoch}".encode())

    def must_refuse(self, hosts: Iterable[Host]) -> bool:
        """Return True if node a must refuse requests to one of these, since it removes it."""
        leaving = (host for host in hosts if host in self.known)
        return any(not self.removals[host.name].finished for host in leaving)

    def may_refuse(self, hosts: Iterable[Host]) -> bool:
        """Return True if node a may refuse requests to these: it is closed, or removes a peer."""
        found = (self.removals.get(host.name) for host in hosts)
        leaving = any(removal is not None and not removal.finished for removal in found)
        return leaving or not self.sender.live

    def blame(self, what: str) -> None:
        """Write down what is wrong. Callbacks use this: the engine would catch what they raise."""
        self.wrong.append(what)

    def fail(self, what: str) -> None:
        """Raise what is wrong, or was wrong before."""
        raise Violation(self.wrong[0] if self.wrong else what)

    def receivers(self, spec: TransferSpec) -> tuple[Host, ...]:
        """The receivers of a transfer as they are now."""
        hosts = self.lab.hosts
        if spec.wide:
            return tuple(hosts[name] for name in self.scenario.names[1:])
        return (hosts[RECEIVERS[0]],)

    def awaited(self, wait: Wait) -> list[Run | None]:
        """For each transfer that a wait is for: the run that it waits for, if that has begun."""
        found = (self.runs.get((place, wait.number)) for place, _ in wait.shares)
        return [run if run is not None and wait.host in run.hosts else None for run in found]

    def failed_under(self, imm: int, host: Host) -> list[Run]:
        """The runs that ended badly, and burnt an immediate at a receiver."""
        return [
            run
            for (place, number), run in self.runs.items()
            if host in run.hosts
            and _ended_badly(run)
            and not run.spec.silent
            and any(imm == due for due, _, _ in self.dues(place, number, host.name))
        ]

    def give_up(self, place: int) -> None:
        """Nothing more is tried under the immediate of a transfer."""
        self.over.setdefault(place, self.lab.env.now)

    def dues(self, place: int, number: int, name: str) -> list[Due]:
        """Return the immediates of a transfer's try for one receiver, by the rule of counting."""
        key = (place, number, name)
        found = self._dues.get(key)
        if found is None:
            found = self._dues[key] = self._count(*key)
        return found

    def _count(self, place: int, number: int, name: str) -> list[Due]:
        spec = self.scenario.transfers[place]
        imm = self.scenario.imm(place, number)
        where = RECEIVERS.index(name)
        pieces = self.lab.areas[place][number].pieces[where if spec.wide else 0]
        if spec.kind == "per_page":
            return [(spec.page_imm(imm, k), 1, (piece,)) for k, piece in enumerate(pieces)]
        shape = _shape(spec, pieces, self.routings[place])
        count = plan.count_imms(shape, self.nlocal, self.scenario.nics[1 + where])
        if spec.split and count > 1:
            return [(imm, count // 2, ()), (imm, count - count // 2, pieces)]
        return [(imm, count, pieces)]

    def _routing(self, spec: TransferSpec) -> Routing:
        nics = self.scenario.nics[1 : len(self.scenario.names) if spec.wide else 2]
        most = min(plan.lanes(self.nlocal, n) for n in nics)
        cut = spec.kind == "single" or (spec.kind == "scatter" and spec.by_bytes)
        shards = min(spec.shards, most // self.nlocal if spec.pinned else most) if cut else 0
        routing = Routing(
            num_shards=shards or None,
            domain=spec.size % self.nlocal if spec.pinned else None,
            scatter_by="bytes" if spec.by_bytes else "peers",
        )
        return DEFAULT if routing == DEFAULT else routing  # the same object has paths of its own

    def _find(self, name: str, batch: Batch, start: int) -> Mover | None:
        """The run that a posted row belongs to: by its source address, or a barrier's immediate."""
        if self.probing is not None:
            return self.probing
        if name != SENDER:
            return self.echo.answers(self.lab.hosts[name])
        if isinstance(batch, ReadBatch) or is_of_read(batch.imm):
            return self.find_read(batch, start)
        src = batch.src if isinstance(batch.src, int) else int(batch.src[start])
        if src == 0:
            imm = batch.imm
            assert isinstance(imm, int), "a row without source and without immediate"
            return self.latest.get(IMMS.index(imm)) if imm in IMMS else None
        offset = src - self.sender.mr.memory.ptr
        k = bisect_right(self._starts, (offset, 1 << 30, 0)) - 1
        return self.runs.get(self._starts[k][1:]) if k >= 0 else None


def _shape(spec: TransferSpec, pieces: tuple[Piece, ...], routing: Routing) -> Shape:
    """A transfer as one of its receivers has to know it."""
    match spec.kind:
        case "single":
            return Single(spec.size, routing)
        case "scatter":
            return Scatter(pieces[0][2], routing)
        case "barrier":
            return Barrier()
        case _:
            return Paged(spec.pages)


@dataclass(slots=True, eq=False)
class _Answers(Mover):
    """All answers of one incarnation."""

    host: Host
    handles: list[Transfer] = field(default_factory=list)

    def is_failing(self) -> bool:
        return any(handle.failure is not None for handle in self.handles)


class Echo:
    """The answers of one run: receivers tell the sender of each count that fired by an empty write.

    It judges them too: each that is done was counted once, and none that was not sent.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._imms = iter(ECHO_IMMS)
        self._of: dict[str, _Answers] = {}
        self._all: list[_Answers] = []
        sender = stage.sender
        if stage.scenario.echo:
            _, self._inbox = sender.register(bytearray(8), Access.SOURCE_AND_TARGET)
            sender.engine.on_imm(ECHO_IMMS, self._heard)

    def _heard(self, imm: int, count: int) -> None:
        self._stage.seen["answer"] += count
        self._stage.sender.used[imm] += count

    def answer(self, host: Host) -> None:
        """A count fired at this receiver: say so."""
        if self._stage.scenario.echo:
            handle = host.engine.submit_barrier([self._inbox], next(self._imms))
            self.answers(host).handles.append(handle)

    def answers(self, host: Host) -> _Answers:
        """The answers of a receiver's incarnation."""
        found = self._of.get(host.name)
        if found is None or found.host is not host:
            found = self._of[host.name] = _Answers(host)
            self._all.append(found)
        return found

    def states(self, host: Host) -> list[str]:
        """Return the final states of an incarnation's answers."""
        found = self._of.get(host.name)
        mine = found.handles if found is not None and found.host is host else ()
        return [handle.state.value for handle in mine]

    def judge(self) -> None:
        """Look at all answers once all is quiet."""
        stage = self._stage
        may_fail = stage.harmed or stage.removals
        handles = [handle for answers in self._all for handle in answers.handles]
        done = sum(handle.ok for handle in handles)
        came = stage.sender.ledger.imms
        heard = sum(n for imm, n in came.items() if imm in ECHO_IMMS)
        if stage.sender.live and not done <= heard <= len(handles):
            stage.blame(f"{heard} answers arrived, of {len(handles)}, {done} of which are done")
        for answers in self._all:
            for handle in answers.handles if answers.host.live else ():
                if not handle.finished:
                    stage.blame(f"an answer of {answers.host.name} never ended")
                if handle.state is State.FAILED and not may_fail:
                    stage.blame(f"an answer failed without a cause: {handle.error}")


def _ended_badly(run: Run) -> bool:
    """Return True if a run has failed or was cancelled; its callback may still be to come."""
    if run.settled:
        return run.state != "done"
    return run.handle is not None and run.handle.finished and not run.handle.ok

"""The place of one scenario: hosts on the chaos fabric, with guarded memory, engines and taps.

Making things only: what is done with them is `tests.world.oracle`'s matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Final, cast

import numpy as np

from tep.backends.base import Access, Batch
from tep.base.api import EngineOptions
from tep.base.errors import FabricError
from tep.base.hashing import draw_array, stream_key
from tep.base.wire import MrDesc
from tep.core.regions import MrHandle
from tep.engine import TransferEngine
from tep.sim.chaos import ChaosFabric, ChaosNic, ChaosNode
from tep.sim.clock import FabricEnv
from tep.sim.draws import Stream
from tep.sim.driver import SimDriver
from tep.sim.faults import Drift
from tep.sim.row_log import RowLog
from tests.world.scenario import Scenario
from tests.world.sizes import in_pieces
from tests.world.specs import (
    READS_MAX,
    RECEIVERS,
    SENDER,
    TransferSpec,
)
from tests.world.tap import Ledger, Mover, Tap

BLANK: Final = b"\xee"
"""Fill byte of target memory that nobody wrote."""

REUSED: Final = b"\xaa"
"""Fill byte that the application writes over its source once it may."""

_GAP_BYTES: Final = 32
USED: Final = b"\xbb"
"""Fill byte that a receiver writes over bytes that it knows to be complete."""

FREED: Final = b"\xcc"
"""Fill byte that a receiver writes over its memory once its sender is removed and fenced off."""

READ_IMM: Final = 0x5EAD0000
"""The immediate that notifies an owner of the end of the first read; one more for each read."""

_PROBE_MAX_S: Final = 80e-6
_PROBE_BARRED_S: Final = 20e-3

_OPTIONS: Final = EngineOptions(poll_rows=64, post_rows_max=2, probe_first_s=5e-6)
"""Small, so that buffers cost little to make, and so that batches are posted in turns."""

Piece = tuple[int, int, int]
"""One run of bytes: offset in the source, offset in the target, length."""


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of one read; the same offsets at the owner and at the reader.

    Attributes:
        start, stop: everything lies between them.
        stride: from one page to the next.
        pieces: a page each, or the whole read.
    """

    start: int
    stop: int
    stride: int
    pieces: tuple[Piece, ...]


def spans_of(scenario: Scenario) -> tuple[Span, ...]:
    """Lay out what is read, with gaps that belong to nobody."""
    at, found = _GAP_BYTES, []
    for place, spec in enumerate(scenario.reads):
        n, stride = 1 if spec.kind == "single" else spec.pages, spec.size + 8
        pieces = tuple(
            (at + (17 * k + place) % n * stride, at + (17 * k + 5) % n * stride, spec.size)
            for k in range(n)
        )
        found.append(Span(at, at + n * stride, stride, pieces))
        at += n * stride + _GAP_BYTES
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Area:
    """The bytes of one round of one transfer; the same offsets in the source and in each target.

    Attributes:
        start, stop: everything lies between them.
        pieces: for each receiver in turn; a page each, or the whole write.
        src_indices, dst_indices: page lists.
    """

    start: int
    stop: int
    pieces: tuple[tuple[Piece, ...], ...]
    src_indices: tuple[int, ...] = ()
    dst_indices: tuple[int, ...] = ()


def areas_of(scenario: Scenario) -> tuple[tuple[Area, ...], ...]:
    """Lay out memory: an area for each round and each retry, with gaps that belong to nobody."""
    at, receivers = _GAP_BYTES, len(scenario.names) - 1
    found = []
    for place, spec in enumerate(scenario.transfers):
        rounds = []
        for number in range(spec.rounds + spec.again):
            area = _area(spec, at, place + number, receivers)
            rounds.append(area)
            at = area.stop + _GAP_BYTES
        found.append(tuple(rounds))
    return tuple(found)


def _area(spec: TransferSpec, start: int, salt: int, receivers: int) -> Area:
    size = spec.size
    if spec.kind == "barrier":
        return Area(start, start, ((),) * receivers)
    if spec.kind == "scatter":
        # Slices of different lengths, each from its own place, so that no two can be mistaken.
        lengths = [size // (k + 1) + k for k in range(receivers)]
        *dsts, stop = accumulate(lengths, initial=start)
        srcs = [start + stop - dst - n for dst, n in zip(dsts, lengths)]
        return Area(start, stop, tuple(((s, d, n),) for s, d, n in zip(srcs, dsts, lengths)))
    if spec.kind == "single":
        return Area(start, start + size, (((start, start, size),),))
    n, stride = spec.pages, size + spec.gap
    # Two orders without much in common; 17 is prime to every number of pages.
    dst = tuple((17 * k + salt + 1) % n for k in range(n))
    src = tuple(range(n)) if salt % 2 else tuple(range(n - 1, -1, -1))
    pieces = tuple((start + s * stride, start + d * stride, size) for s, d in zip(src, dst))
    return Area(start, start + n * stride, (pieces,), src, dst)


@lru_cache(maxsize=64)
def _pattern(nbytes: int) -> bytes:
    """Make source bytes, without any fill byte."""
    words = draw_array(stream_key(5, Stream.SCENARIO), np.arange(nbytes // 8 + 1, dtype=np.uint64))
    return bytes((words.view(np.uint8) & 0x7F)[:nbytes])


def is_of_read(imm: object) -> bool:
    """Return True if an immediate, or its field in a batch, notifies an owner of a read."""
    return isinstance(imm, int) and READ_IMM <= imm < READ_IMM + READS_MAX


class Host:
    """One incarnation of one node: engine, memory, and what crossed its seam.

    Attributes:
        memory: the source of node a; the target of the others.
        ledger, taps: what crossed its seam, and who wrote it down.
        freed: from where to where it wrote FREED.
        used: immediates of each value that its expectations and claims have used up.
        live: False once it crashed or its engine was closed.
        shelf: what is read of b and c; where node a's reads bring it.
        versions: how often a receiver has changed the bytes of each read.
    """

    def __init__(
        self,
        lab: Lab,
        node: ChaosNode,
        memory: bytearray,
        engine_class: type[TransferEngine],
        find: Callable[[str, Batch, int], Mover | None],
    ) -> None:
        self.name = node.name
        nics, depth = len(node.nics), lab.fabric.chaos.sq_depth
        pieces = in_pieces(lab.sizes)
        rows_max = lab.options.post_rows_max
        finds = partial(find, node.name)
        self.ledger = Ledger(finds, nics, rows_max, depth, in_pieces=pieces)
        self.driver = SimDriver(lab.env, node)
        self.taps = [Tap(cast("ChaosNic", nic), self.ledger) for nic in node.nics]
        self.engine = engine_class(
            self.taps,
            driver=self.driver,
            name=node.name,
            epoch=node.epoch,
            options=lab.options,
        )
        self.engine.on_peer(self.ledger.heard_of)
        self.memory = memory
        self.freed: list[tuple[int, int]] = []
        self.used: defaultdict[int, int] = defaultdict(int)
        self.live = True
        self.mr: MrHandle
        self.desc: MrDesc
        access = Access.SOURCE if node.name == SENDER else Access.SOURCE_AND_TARGET
        self.mr, self.desc = self.register(memory, access)
        self.shelf = bytearray(lab.shelf_of(node.name))
        self.versions = [0] * len(lab.spans)
        self.shelf_mr: MrHandle
        self.shelf_desc: MrDesc
        if lab.spans:
            access = Access.SINK if node.name == SENDER else Access.READABLE
            self.shelf_mr, self.shelf_desc = self.register(self.shelf, access)

    @property
    def unconnected(self) -> int:
        """Count how often one of its NICs could not connect to a peer."""
        return sum(tap.unconnected for tap in self.taps)

    def register(self, memory: bytearray, access: Access) -> tuple[MrHandle, MrDesc]:
        """Register memory with its engine, and try again as often as a NIC has no room for it."""
        while True:
            before = [tap.nic.regions for tap in self.taps]
            try:
                return self.engine.reg_mr(memory, access=access)
            except FabricError as error:
                if [tap.nic.regions for tap in self.taps] != before:
                    self.ledger.wrong.append(f"reg_mr failed, and some NICs keep it: {error}")


class Lab:
    """All of it.

    Attributes:
        original: the source's bytes before anybody wrote over them.
        spans: of each read.
        hosts: the live incarnation of each node.
        first: the first incarnation of each node.
        options: of every engine.
        sizes: constants of the engine that are small.
    """

    def __init__(
        self,
        scenario: Scenario,
        engine_class: type[TransferEngine],
        row_log: RowLog | None,
        find: Callable[[str, Batch, int], Mover | None],
        env: FabricEnv | None,
    ) -> None:
        chaos = scenario.chaos
        self.sizes = scenario.sizes
        self.env = env or FabricEnv()
        self.fabric = ChaosFabric(self.env, chaos, row_log=row_log)
        self.areas = areas_of(scenario)
        self.spans = spans_of(scenario)
        nbytes = self.areas[-1][-1].stop + _GAP_BYTES
        self.original = _pattern(-(-nbytes // 1024) * 1024)[:nbytes]
        # So that what was fenced off is opened again while the scenario lasts. Control messages
        # that come back later than the next ones go out would turn their engine for ever: hence
        # the longest wait, in which each NIC of the peers is asked, one after the other at worst.
        asked = sum(scenario.nics[1:]) if scenario.wide else scenario.nics[1]
        turns = max(4, asked + 1, 2 * asked // chaos.sq_depth)
        if any(isinstance(fault, Drift) for _, fault in scenario.faults):
            turns *= 2  # a clock may run at twice the speed
        probe_max_s = max(_PROBE_MAX_S, turns * 1e-12 * max(chaos.dead_after_ps, chaos.pause_ps))
        if (scenario.bar_ps, scenario.remove_ps) != (None, None):  # paths are asked for in vain
            probe_max_s = max(probe_max_s, _PROBE_BARRED_S)
        self.options = replace(
            _OPTIONS,
            failover=scenario.failover,
            probe_max_s=probe_max_s,
        )
        self._engine_class = engine_class
        self._find = find
        self.hosts: dict[str, Host] = {}
        for name, nics in zip(scenario.names, scenario.nics):
            memory = bytearray(self.original) if name == SENDER else bytearray(BLANK * nbytes)
            node = self.fabric.node(name, nics)
            self.hosts[name] = Host(self, node, memory, engine_class, find)
        self.first = dict(self.hosts)

    def restart(self, name: str) -> Host:
        """Crash a node and bring it back, with blank memory, or node a with what it sends."""
        old = self.hosts[name]
        old.live = False
        old.driver.close()
        node = self.fabric.restart(name)
        memory = bytearray(self.original if name == SENDER else BLANK * len(self.original))
        fresh = self.hosts[name] = Host(self, node, memory, self._engine_class, self._find)
        return fresh

    def shelf_of(self, name: str) -> bytes:
        """Return a node's initial readable memory; for node a, its bytes before any read."""
        nbytes = self.spans[-1].stop + _GAP_BYTES if self.spans else 0
        if name == SENDER:
            return BLANK * nbytes
        shift = 64 * RECEIVERS.index(name)
        return _pattern(-(-nbytes // 1024) * 1024 + shift)[shift : shift + nbytes]

    def landed(self, host: Host, pieces: tuple[Piece, ...]) -> bool:
        """Return True if all bytes of these pieces are at a receiver, or were there before."""
        there, sent = host.memory, self.original
        return all(
            there[dst : dst + n] in (sent[src : src + n], USED * n, FREED * n)
            for src, dst, n in pieces
        )

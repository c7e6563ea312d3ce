"""Node a as a reader, and b, the owner of what it reads: its bytes change, and are freed.

Version v of a byte is its first value plus v. What a read brings must be of versions that were
there between its submit and its end. The owner that is told that its memory was read writes FREED
over it, and the reader REUSED over what a settled read brought: neither may be brought, or
overwritten, afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tep.backends.base import Batch
from tep.base.api import Pages
from tep.base.errors import ClosedError, StaleEpoch
from tep.core.handles import State, Transfer
from tep.sim.faults import Clog, Cut, Mute
from tests.world.lab import BLANK, READ_IMM, REUSED, USED, Host, Span
from tests.world.specs import RECEIVERS, SENDER, ReadSpec
from tests.world.stage import Stage
from tests.world.tap import Mover

_VALUES: Final = 128  # first values are below, and so are all versions
_NEXT: Final = bytes((value + 1) % _VALUES for value in range(256))


@dataclass(slots=True, eq=False)
class _Read(Mover):
    """One read, from its submit on.

    Attributes:
        host: its owner, in the incarnation whose descriptor it names.
        since: the version of the owner's bytes when it was submitted.
        told: how often the owner was told that it is over.
        reused: whether its memory here was written over when it settled.
    """

    place: int
    spec: ReadSpec
    span: Span
    host: Host
    since: int
    told: int = 0
    handle: Transfer | None = None
    settled: int = 0
    cancelled: bool = False
    reused: bool = False

    def may_post(self) -> str:
        if self.settled or (self.handle is not None and self.handle.finished):
            return f"{self} has settled"
        if self.cancelled and not self.failed:  # what failed before may have been posted again
            return f"{self} was cancelled"
        return ""

    def is_failing(self) -> bool:
        return self.handle is not None and self.handle.failure is not None

    def __str__(self) -> str:
        return f"read {self.place} ({self.spec.kind})"


class Reader:
    """All reads of one run."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._reads: dict[int, _Read] = {}
        env = stage.lab.env
        for place, spec in enumerate(stage.scenario.reads):
            env.call_at(spec.start_ps, self._begin, place)
            if spec.change_ps is not None:
                env.call_at(spec.change_ps, self._change, place)
        for host in stage.lab.hosts.values():
            self.open(host)

    def open(self, host: Host) -> None:
        """Have an owner hear that it was read."""
        reads = len(self._stage.scenario.reads)
        if reads and host.name != SENDER:
            imms = range(READ_IMM, READ_IMM + reads)
            host.engine.on_imm(imms, lambda imm, count: self._heard(host, imm - READ_IMM, count))

    def find(self, batch: Batch, start: int) -> Mover | None:
        """The read that a posted row belongs to: by its place here, or by its immediate."""
        if isinstance(batch.imm, int):
            return self._reads.get(batch.imm - READ_IMM)
        here = batch.src if isinstance(batch.src, int) else int(batch.src[start])
        offset = here - self._stage.sender.shelf_mr.memory.ptr
        for read in self._reads.values():
            if read.span.start <= offset <= read.span.stop:
                return read
        return None

    # ------------------------------------------------------------------ the owners

    def _change(self, place: int) -> None:
        """The owners write the next version of their bytes, unless they have freed them."""
        span = self._stage.lab.spans[place]
        for host in self._stage.lab.hosts.values():
            read = self._reads.get(place)
            freed = read is not None and host is read.host and read.told > 0
            if host.name != SENDER and host.live and not freed:
                part = host.shelf[span.start : span.stop]
                host.shelf[span.start : span.stop] = part.translate(_NEXT)
                host.versions[place] += 1

    def _heard(self, host: Host, place: int, count: int) -> None:
        """An owner is told that a read is over: it frees what was read."""
        stage, read = self._stage, self._reads.get(place)
        stage.seen["owner told"] += count
        host.used[READ_IMM + place] += count
        if read is None or host is not read.host:
            stage.blame(f"{host.name} was told of read {place}, and was not read")
            return
        read.told += count
        if read.reads_out:
            stage.blame(f"{host.name} was told of {read} while NICs hold rows of it")
        for there, _, n in read.span.pieces:
            host.shelf[there : there + n] = USED * n

    # ------------------------------------------------------------------ the reader

    def _begin(self, place: int) -> None:
        stage = self._stage
        spec, span = stage.scenario.reads[place], stage.lab.spans[place]
        host = stage.lab.hosts[RECEIVERS[0]]
        read = self._reads[place] = _Read(place, spec, span, host, host.versions[place])
        try:
            read.handle = self._submit(read)
        except StaleEpoch:
            if host.live:
                stage.fail(f"{read}: a fresh descriptor was refused")
            return
        except ClosedError:
            if not stage.may_refuse([host]):
                stage.fail(f"{read}: refused by an engine that is open")
            return
        stage.seen["read"] += 1
        read.handle.add_done_callback(lambda handle: self._ended(read, handle))
        if spec.cancel_ps is not None:
            env = stage.lab.env
            env.call_at(env.now + spec.cancel_ps, self._cancel, read)

    def _submit(self, read: _Read) -> Transfer:
        """Submit it."""
        spec, span, sender = read.spec, read.span, self._stage.sender
        engine, mr, desc = sender.engine, sender.shelf_mr, read.host.shelf_desc
        imm = READ_IMM + read.place if spec.told else None
        match spec.kind:
            case "single":
                ((there, here, nbytes),) = span.pieces
                return engine.submit_single_read(nbytes, (desc, there), (mr, here), imm)
            case "paged":
                lists = [
                    Pages(
                        [(piece[k] - span.start) // span.stride for piece in span.pieces],
                        stride=span.stride,
                        offset=span.start,
                    )
                    for k in (0, 1)
                ]
                pages = (desc, lists[0]), (mr, lists[1])
                return engine.submit_paged_reads(spec.size, *pages, imm)

    def _cancel(self, read: _Read) -> None:
        assert read.handle is not None
        if not read.settled:
            read.cancelled = True
            read.handle.cancel()

    def _ended(self, read: _Read, handle: Transfer) -> None:
        """Judge what it brought, and use the memory for something else."""
        stage, span = self._stage, read.span
        stage.seen[f"read {handle.state.value}"] += 1
        read.settled += 1
        if read.settled != 1:
            stage.blame(f"{read} settled twice")
        if read.posted != read.back:
            out = read.posted - read.back
            stage.blame(f"{read} ended {handle.state.value} while NICs hold {out} of its rows")
        stage.seen["read again by another NIC"] += bool(handle.ok and read.failed)
        if handle.ok:
            self._check_bytes(read)
        elif handle.state is State.CANCELLED and not read.cancelled:
            stage.blame(f"{read} ended cancelled, but nobody cancelled it")
        elif handle.state is State.FAILED and not stage.harmed:
            stage.blame(f"{read} failed without a cause: {handle.error}")
        elif handle.state is State.FAILED and self._is_only_late():
            stage.blame(f"{read} failed, though links were in trouble for a while only")
        shelf = stage.sender.shelf
        if handle.ok or not stage.sender.shelf_mr.quarantined:
            shelf[span.start : span.stop] = REUSED * (span.stop - span.start)
            read.reused = True

    def _is_only_late(self) -> bool:
        """Return True if all trouble was over before any row could be given up."""
        stage, chaos = self._stage, self._stage.scenario.chaos
        if stage.closed or chaos.rnr_retries >= 0 or chaos.message_loss or chaos.cq_depth:
            return False
        if stage.sender.unconnected:
            return False
        if stage.lab.fabric.seen["row PROVIDER"]:  # of an owner who was to be told, perhaps
            return False
        lasts = [
            fault.for_ps if isinstance(fault, Clog | Cut | Mute) else None for fault in stage.broken
        ]
        return None not in lasts and sum(filter(None, lasts)) < chaos.dead_after_ps

    def _check_bytes(self, read: _Read) -> None:
        stage, host = self._stage, read.host
        here = np.frombuffer(stage.sender.shelf, np.uint8)
        first = np.frombuffer(stage.lab.shelf_of(host.name), np.uint8)
        for there, at, n in read.span.pieces:
            found = here[at : at + n]
            age = (found - first[there : there + n]) % _VALUES
            right = (found < _VALUES) & (read.since <= age) & (age <= host.versions[read.place])
            if not right.all():
                stage.blame(f"{read} is done, but bytes of {host.name} differ at {at}")

    # ------------------------------------------------------------------ the judgement

    def states(self) -> list[str]:
        """Return the final states of the reads that the engine accepted."""
        reads = self._reads.values()
        return [read.handle.state.value for read in reads if read.handle is not None]

    def judge(self) -> None:
        """Look at all of it once nothing can happen any more."""
        stage = self._stage
        for read in self._reads.values():
            self._judge_read(read)
        rest = bytearray(stage.sender.shelf)
        for read in self._reads.values():
            start, stop = read.span.start, read.span.stop
            if read.reused and rest[start:stop] != REUSED * (stop - start):
                stage.blame(f"bytes of {read} were written after it had settled")
            for _, here, n in read.span.pieces:
                rest[here : here + n] = BLANK * n
            if read.reused:
                rest[start:stop] = BLANK * (stop - start)
        if rest.count(BLANK) != len(rest):
            where = next(k for k, value in enumerate(rest) if value != BLANK[0])
            stage.blame(f"a read wrote at byte {where} of {SENDER}, which is nobody's")

    def _judge_read(self, read: _Read) -> None:
        stage, handle = self._stage, read.handle
        if handle is None:
            if read.posted:
                stage.blame(f"{read} was refused, and yet {read.posted} rows of it were posted")
            return
        if not read.settled:
            stage.blame(f"{read} never ended: {handle.describe()}")
        host, told = read.host, read.told
        due = int(read.spec.told and handle.ok and host.live)
        if not due <= told <= int(read.spec.told):
            stage.blame(f"{read} is {handle.state.value}, and {host.name} was told {told} times")

"""Records an engine while it is traced: at the backend interface, at each step and handle's end.

Rule 1: an engine that is not traced pays nothing: recording wraps its NICs and its step, and
unwraps them at the end. Rule 2: recording never changes the engine's behaviour.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, cast

import numpy as np

from tep.backends.base import Batch, Completions, Domain, Kind, ReadDomain
from tep.base.errors import UsageError
from tep.core.handles import Expectation, Handle, Transfer, names_of
from tep.drivers.threads import InlineDriver, ThreadDriver
from tep.observe.trace import Mark, Span, Trace

__all__ = ["record"]

_ROWS: Final = (int(Kind.WRITE), int(Kind.READ))
_IMM: Final = int(Kind.IMM)
_IMM_BYTE: Final = bytes([_IMM])
_FEW: Final = 24
"""Number of completions up to which a loop is faster than columns."""

_IMMS_MAX: Final = 8
"""Number of different immediates of one poll up to which each gets a mark; more share one."""


class _Out:
    __slots__ = ("args", "left", "name", "start_s")

    def __init__(self, name: str, start_s: float, args: dict[str, Any]) -> None:
        self.name = name
        self.start_s = start_s
        self.args = args
        self.left = 0


class _Tap:
    """A wrapper of one NIC that records posted and returned rows, and immediates."""

    def __init__(self, recorder: _Recorder, nic: Domain, index: int) -> None:
        self._nic = nic
        self._recorder = recorder
        self._index = index
        self._track = f"NIC {index} ({nic.caps.nic})"
        self._arrivals = f"immediates of {self._track}"
        self._out: dict[int, _Out] = {}
        self.caps = nic.caps
        self.address = nic.address

    def __getattr__(self, name: str) -> Any:  # everything else goes to the NIC itself
        return getattr(self._nic, name)

    def post(self, batch: Any, start: int, stop: int) -> int:
        taken = self._nic.post(batch, start, stop)
        if taken:
            self._posted(batch, start, taken)
        return taken

    def post_read(self, batch: Any, start: int, stop: int) -> int:
        taken = cast("ReadDomain", self._nic).post_read(batch, start, stop)
        if taken:
            self._posted(batch, start, taken)
        return taken

    def _posted(self, batch: Batch, start: int, taken: int) -> None:
        nbytes = batch.nbytes
        moved = (
            nbytes * taken if isinstance(nbytes, int) else int(nbytes[start : start + taken].sum())
        )
        out = self._out.get(batch.ctx)
        if out is None:
            recorder = self._recorder
            pending = recorder.machine.worker.group.batches[batch.ctx]
            job = pending.transfer.job
            to = names_of(job.remotes) if isinstance(pending.nics, int) else "several"
            args = {"nic": self._index, "to": to, "rows": 0, "bytes": 0}
            out = self._out[batch.ctx] = _Out(job.kind, recorder.now_s(), args)
        out.left += taken
        out.args["rows"] += taken
        out.args["bytes"] += moved

    def poll(self, out: Completions) -> int:
        n = self._nic.poll(out)
        if n == 0:
            return n
        found, now_s = out[:n], self._recorder.now_s()
        if n > _FEW and found["kind"].tobytes() == _IMM_BYTE * n:
            self._counted(_sums(found), now_s)
            return n
        counts: dict[int, int] = {}
        for kind, status, count, imm, _, ctx, _ in found.tolist():
            if kind == _IMM:
                counts[imm] = counts.get(imm, 0) + count
            elif kind in _ROWS and ctx in self._out:  # else it was posted before the trace began
                self._returned(ctx, count, status, now_s)
        if counts:
            self._counted(counts, now_s)
        return n

    def _returned(self, ctx: int, count: int, status: int, now_s: float) -> None:
        out = self._out[ctx]
        out.left -= count
        if status:
            out.args["failed"] = out.args.get("failed", 0) + count
        if not out.left:
            del self._out[ctx]
            self._end(out, now_s)

    def _end(self, out: _Out, now_s: float) -> None:
        recorder = self._recorder
        name = recorder.machine.name
        span = Span("batch", name, self._track, out.name, out.start_s, now_s, out.args)
        recorder.trace.add(span)

    def _counted(self, counts: dict[int, int], now_s: float) -> None:
        if len(counts) > _IMMS_MAX:
            args = {"imm": min(counts), "to": max(counts), "count": sum(counts.values())}
            self._mark(f"{len(counts)} immediates", args, now_s)
            return
        for imm, count in counts.items():
            self._mark(f"imm {imm:#x}", {"imm": imm, "count": count}, now_s)

    def _mark(self, label: str, args: dict[str, Any], now_s: float) -> None:
        recorder = self._recorder
        recorder.trace.mark(Mark("imm", recorder.machine.name, self._arrivals, label, now_s, args))

    def end(self, now_s: float) -> None:
        """End the spans of rows that the NIC still has, at the trace's end."""
        for out in self._out.values():
            out.args["in_flight"] = out.left
            self._end(out, now_s)
        self._out.clear()


class _Recorder:
    """Records one engine into a trace.

    Attributes:
        machine: `tep.engine.machine.Machine`, which stands above this room.
    """

    def __init__(self, machine: Any, trace: Trace) -> None:
        self.machine = machine
        self.trace = trace
        self.now_s = machine.driver.now_s
        self._real = isinstance(machine.driver, ThreadDriver | InlineDriver)
        self._step = machine.step
        self._nics: tuple[Domain, ...] = ()
        self._taps: list[_Tap] = []

    def start(self) -> None:
        """Begin recording, between two steps."""
        group = self.machine.worker.group
        if self.machine.tracer is not None:
            raise UsageError(
                f"trace: engine {self.machine.name!r} is traced already; stop that trace first"
            )
        self.machine.tracer = self
        self._nics = group.domains
        self._taps = [_Tap(self, nic, index) for index, nic in enumerate(self._nics)]
        group.domains = cast("tuple[Domain, ...]", tuple(self._taps))
        self.machine.step = self.step
        self.machine.observe(self.settled)
        self.machine.worker.journal.listeners.append(self.note)

    def stop(self) -> None:
        """End recording, between two steps, and record the spans that are still open."""
        now_s, worker = self.now_s(), self.machine.worker
        worker.group.domains = self._nics
        self.machine.step = self._step
        self.machine.unobserve(self.settled)
        self.machine.tracer = None
        worker.journal.listeners.remove(self.note)
        self.settled(worker._settled)
        for handle in worker.unsettled():
            self._add(handle, now_s)
        for tap in self._taps:
            tap.end(now_s)

    def step(self) -> bool:
        """Time a step of the worker, and record it if there was work."""
        start_s = self.now_s()
        cpu_ns = time.thread_time_ns() if self._real else 0
        work: bool = self._step()
        if work:
            args = {"cpu_us": (time.thread_time_ns() - cpu_ns) / 1000} if self._real else {}
            name = self.machine.name
            self.trace.add(Span("step", name, "worker", "step", start_s, self.now_s(), args))
        return work

    def note(self, kind: str, text: str) -> None:
        """Record a failure, or its repair, that the engine reports."""
        args = {"kind": kind}
        self.trace.mark(Mark("fault", self.machine.name, "faults", text, self.now_s(), args))

    def settled(self, handles: list[Handle]) -> None:
        """Record handles that have settled."""
        now_s = self.now_s()
        for handle in handles:
            self._add(handle, now_s)

    def _add(self, handle: Handle, now_s: float) -> None:
        name = self.machine.name
        args: dict[str, Any] = {"state": handle.state.value}
        if isinstance(handle, Transfer):
            job = handle.job
            args |= {"rows": handle.rows, "bytes": job.total, "to": names_of(job.remotes)}
            stop_s = now_s if handle.settled_s is None else handle.settled_s
            span = Span("transfer", name, "transfers", job.kind, handle.submitted_s, stop_s, args)
        elif isinstance(handle, Expectation):
            args |= {"imm": handle.imm, "count": handle.count}
            label = f"imm {handle.imm:#x} x {handle.count}"
            span = Span("wait", name, "expectations", label, handle.submitted_s, now_s, args)
        elif handle.counted:
            label = type(handle).__name__.lower()
            span = Span("transfer", name, "transfers", label, handle.submitted_s, now_s, args)
        else:
            return
        if handle.error is not None:
            args["error"] = str(handle.error).splitlines()[0]
        self.trace.add(span)


def _sums(found: Completions) -> dict[int, int]:
    imms, counts = found["imm"], found["count"]
    if (imms == imms[0]).all():
        return {int(imms[0]): int(counts.sum())}
    values, places = np.unique(imms, return_inverse=True)
    sums = np.bincount(places, counts).astype(np.int64)
    return dict(zip(values.tolist(), sums.tolist(), strict=True))


def record(machine: Any, trace: Trace) -> Callable[[], None]:
    """Record an engine into a trace from now on; return the function that ends it."""
    recorder = _Recorder(machine, trace)
    machine.driver.call(recorder.start)

    def stop() -> None:
        machine.driver.call(recorder.stop)

    return stop

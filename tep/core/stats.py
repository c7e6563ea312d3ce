"""The journal of faults, and the records that `stats()` of transfers and engines returns.

The journal writes a line for each fault, and for each that was mended, to the log `tep.` and the
name of the backend. A trace and the metrics listen there as well.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

from tep.observe.shown import Shown

__all__ = ["EngineStats", "Failover", "Journal", "NicBytes", "TransferStats"]

_EACH_MAX: Final = 8
"""So many of one kind are logged one by one; then the 16th, the 32nd, and so on."""


class Journal:
    """The events of one engine that somebody should know of, with `counts` of each kind.

    `listeners` are called with the kind and the text of each.
    """

    def __init__(self, name: str = "?", backend: str = "none") -> None:
        self.counts: Counter[str] = Counter()
        self.listeners: list[Callable[[str, str], object]] = []
        self._name = name
        self._log = logging.getLogger(f"tep.{backend}")

    def decided(self, summary: str, why: Callable[[], str]) -> None:
        """Log a decision: the summary at INFO, its reasons at DEBUG, which are made only then."""
        self._log.info("%s: %s", self._name, summary)
        if self._log.isEnabledFor(logging.DEBUG):
            self._log.debug("%s: %s", self._name, why())

    def say(self, kind: str, text: str, level: int = logging.WARNING) -> None:
        """Log one event, if its kind is not too frequent, and tell the listeners of it.

        There are few kinds: nic_down, peer_lost, peer_back, failover, fence, reopen, burnt. What
        mends something is logged at INFO.
        """
        self.counts[kind] += 1
        times = self.counts[kind]
        if times <= _EACH_MAX or times & (times - 1) == 0:
            many = f" ({times} times {kind} so far)" if times > _EACH_MAX else ""
            self._log.log(level, "%s: %s%s", self._name, text, many)
        for listener in self.listeners:
            listener(kind, text)


class Failover(Enum):
    """Whether rows of a NIC that dies are retransmitted; `explain()` says why not."""

    AVAILABLE = "available"
    OFF = "off"  # by EngineOptions(failover=False)
    UNABLE = "unable"  # the backend cannot fence a path off, or say where immediates came from
    PARTIAL = "partial"  # not on some paths, whose sums are forgotten


class NicBytes(NamedTuple):
    """The rows posted on one NIC, and their bytes."""

    rows: int
    nbytes: int


class _OfNics(Shown):
    """Statistics whose picture shows what each NIC carried."""

    __slots__ = ()
    nics: tuple[NicBytes, ...]

    def _drawn(self) -> Sequence[Mapping[str, Any]]:
        return [{"NIC": f"NIC {k}", **part._asdict()} for k, part in enumerate(self.nics)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats(_OfNics):
    """One transfer.

    Attributes:
        kind: "single", "paged", "scatter", "barrier", "single read" or "paged read".
        state: "pending", "done" (the handle is `ok`), "cancelled" or "failed".
        rows: writes, or reads and the immediates that follow them, that it makes in all.
        nbytes: bytes it moves in all.
        rows_posted: taken by NICs so far.
        rows_back: over so far: returned by NICs, well or not, or failed before a NIC took them.
        rows_failed: returned with an error, or failed before a NIC took them.
        rows_dropped: taken out before a NIC had them, by cancel() or after another row failed.
        rows_again: posted in addition, since a NIC had died with rows on it.
        nics: rows and bytes of each local NIC.
        elapsed_s: from submit to the last row's return, or to now; seconds of the driver's clock.
    """

    kind: str
    state: str
    rows: int
    nbytes: int
    rows_posted: int
    rows_back: int
    rows_failed: int
    rows_dropped: int
    nics: tuple[NicBytes, ...]
    elapsed_s: float
    rows_again: int

    @property
    def gbps(self) -> float:
        """Bits a nanosecond over `elapsed_s`; 0 if no time passed."""
        return self.nbytes * 8 / self.elapsed_s / 1e9 if self.elapsed_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(_OfNics):
    """One engine, since it was opened. Names say the unit: rows, `nbytes`, counts of handles.

    Attributes:
        steps: how often it was turned.
        transfers_submitted: requests and messages accepted.
        transfers_done, transfers_failed, transfers_cancelled: how those that settled ended.
        rows_backlog: rows waiting for a NIC to take them.
        rows_outstanding: rows that each NIC has now.
        nics: rows and bytes each NIC has carried, without reads.
        reads: rows and bytes that each NIC was to read.
        reads_again: rows of reads that were posted again.
        imms_counted: immediates that arrived and were counted.
        imms_unexpected: (immediate, count) that arrived and nobody has taken, at most 1,000 of
            them.
        expectations: expectations not reached.
        regions: registered regions.
        peers: peers known.
        callback_errors: users' callbacks that raised.
        imms_burnt: immediates under which something failed, sent or expected here.
        imms_burnt_forgotten: how many more there were, which are not remembered any more.
        bytes_quarantined: here, that a NIC may touch although nothing is open.
        failover: whether rows of a NIC that dies are retransmitted.
        control_dropped: control messages of peers that were dropped, by reason; see the log.
        nics_up: of each NIC, whether it is up.
        faults: (kind, count) of what the log tells: "nic_down", "failover", "fence", and so on.
    """

    steps: int
    transfers_submitted: int
    transfers_done: int
    transfers_failed: int
    transfers_cancelled: int
    rows_backlog: int
    rows_outstanding: tuple[int, ...]
    nics: tuple[NicBytes, ...]
    imms_counted: int
    imms_unexpected: tuple[tuple[int, int], ...]
    expectations: int
    regions: int
    peers: int
    callback_errors: int
    imms_burnt: int
    imms_burnt_forgotten: int
    bytes_quarantined: int
    control_dropped: tuple[tuple[str, int], ...]
    reads: tuple[NicBytes, ...]
    reads_again: int
    failover: Failover
    nics_up: tuple[bool, ...]
    faults: tuple[tuple[str, int], ...]

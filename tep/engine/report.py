"""Reports of an engine: statistics, the paths to a peer, and what each open handle waits for.

Only reads; all of it works while the engine runs.
"""

from __future__ import annotations

from operator import add
from typing import Final, Protocol, runtime_checkable
from weakref import WeakSet

from tep.base.errors import UsageError
from tep.base.units import MiB
from tep.base.wire import NetAddr
from tep.core.handles import Expectation, State
from tep.core.path import Link
from tep.core.plan import lanes, plan_paged, plan_single
from tep.core.regions import MrHandle, Quarantine
from tep.core.stats import EngineStats, Failover, NicBytes
from tep.drivers.threads import Driver
from tep.engine.worker import Worker

__all__ = ["Describes", "Reported", "engine_stats", "explain", "snapshot", "stall_report"]


@runtime_checkable
class Describes(Protocol):
    """The protocol of things that describe themselves in one line."""

    def describe(self) -> str: ...


class Reported(Protocol):
    """The engine's part that reports need; see `Machine`."""

    name: str
    address: NetAddr
    driver: Driver
    worker: Worker
    regions: dict[int, MrHandle]
    kept: dict[MrHandle, None]
    about: str
    errors: int
    crashed: bool
    prepared: WeakSet[Describes]


_LISTED_MAX: Final = 20
_NOT_SHOWN: Final = {
    "peers", "imms_unexpected", "control_dropped", "failover", "nics_up", "faults"
}  # fmt: skip
"""The fields that a snapshot has in another form, or not at all."""

_UNEXPECTED_MAX: Final = 1000


def engine_stats(engine: Reported) -> EngineStats:
    """Collect an engine's statistics."""
    worker = engine.worker
    group = worker.group
    unexpected = list(worker.imms.counts.items())[:_UNEXPECTED_MAX]
    return EngineStats(
        steps=worker.steps,
        transfers_submitted=worker.submitted,
        transfers_done=worker.settled[State.DONE],
        transfers_failed=worker.settled[State.FAILED],
        transfers_cancelled=worker.settled[State.CANCELLED],
        rows_backlog=group.backlog + group.queued_reads,
        rows_outstanding=tuple(map(add, group.outstanding, worker.reads.outstanding)),
        nics=tuple(map(NicBytes, group.rows, group.nbytes)),
        reads=tuple(map(NicBytes, worker.reads.rows, worker.reads.nbytes)),
        reads_again=worker.reads.again,
        imms_counted=worker.imms.total,
        imms_unexpected=tuple(unexpected),
        expectations=worker.imms.waiting
        + sum(isinstance(handle, Expectation) for handle in worker.not_taken()),
        regions=len(engine.regions),
        peers=len(engine.worker.peers.links),
        callback_errors=engine.errors,
        imms_burnt=len(worker.imms.burnt.why) + len(worker.notices.burnt.why),
        imms_burnt_forgotten=worker.imms.burnt.forgotten + worker.notices.burnt.forgotten,
        bytes_quarantined=sum(found.stop - found.start for _, found in _quarantines(engine)),
        control_dropped=_drops(worker),
        failover=_failover(engine)[0],
        nics_up=tuple(group.alive),
        faults=tuple(worker.journal.counts.items()),
    )


def _failover(engine: Reported) -> tuple[Failover, list[str]]:
    """Whether failover is available, and why not."""
    worker = engine.worker
    if worker.group.acks is None:
        if (why := worker.group.why_not) is not None:
            return Failover.UNABLE, [why]
        return Failover.OFF, ["EngineOptions(failover=False)"]
    why_not = [
        f"to {link.addr.name} over NIC {path.domain} to its NIC {path.nic}: "
        + path.sums.why_forgot()
        for link in list(engine.worker.peers.links.values())
        for path in link.paths()
        if path.sums.sent.forgot
    ]
    for arrivals in worker.fencing.arrivals:
        why_not += [f"from a sender: {why}" for why in arrivals.forgotten]
    return (Failover.PARTIAL if why_not else Failover.AVAILABLE), why_not


def _failover_lines(engine: Reported) -> list[str]:
    found, why_not = _failover(engine)
    if found is Failover.AVAILABLE:
        return ["  failover: available"]
    rest = [f"  ... and {len(why_not) - _LISTED_MAX} more"] if len(why_not) > _LISTED_MAX else []
    return [*(f"  failover: no, because {why}" for why in why_not[:_LISTED_MAX]), *rest]


def _notice_lines(engine: Reported) -> list[str]:
    """Say whether peers are told which immediates are burnt, and what they do not know yet."""
    if not all(domain.caps.control_bytes for domain in engine.worker.group.domains):
        why = f"the {engine.address.backend} backend has no control messages"
        return [f"  peers are not told of transfers that fail, because {why}"]
    return [f"  {line}" for line in engine.worker.notices.describe()[:_LISTED_MAX]]


def _drops(worker: Worker) -> tuple[tuple[str, int], ...]:
    """Count the dropped control messages, by reason."""
    return tuple((reason.value, times) for reason, times in list(worker.channel.dropped.items()))


def _quarantines(engine: Reported) -> list[tuple[MrHandle, Quarantine]]:
    regions = [*list(engine.regions.values()), *list(engine.kept)]
    return [(mr, found) for mr in regions for found in mr.quarantined]


def _quarantine_lines(engine: Reported) -> list[str]:
    found = _quarantines(engine)
    lines = [
        f"  bytes {start} .. {stop} of region {mr.desc.region} are in quarantine: {why}"
        for mr, (start, stop, why) in found[:_LISTED_MAX]
    ]
    if len(found) > _LISTED_MAX:
        lines.append(f"  ... and {len(found) - _LISTED_MAX} more quarantines")
    return lines


def explain(engine: Reported, peer: NetAddr | None) -> str:
    """Say which NICs an engine has and, for a peer, its lanes and how requests are divided.

    Raises:
        UsageError: the peer is not known to this engine.
    """
    group = engine.worker.group
    lines = [f"engine {engine.address}"]
    lines += [f"  {engine.about}"] if engine.about else []
    for k, domain in enumerate(group.domains):
        caps = domain.caps
        order = "ordered" if caps.ordered else "unordered"
        state = "alive" if group.alive[k] else "DOWN"
        reads = f"reads {caps.reads}" if caps.reads else f"no reads ({caps.no_reads})"
        lines.append(
            f"  NIC {k}: {caps.nic} on {caps.backend}, {caps.link_bps / 1e9:g} Gb/s, {order}, "
            f"queue {caps.sq_depth}, {reads}, memory {'/'.join(caps.memory_kinds)}, {state}"
        )
        if isinstance(domain, Describes):
            lines.append(f"    {domain.describe()}")
    lines += _failover_lines(engine)
    lines += _notice_lines(engine)
    lines += _quarantine_lines(engine)
    ready = sorted(prepared.describe() for prepared in list(engine.prepared))
    lines += [f"  {line}" for line in ready[:_LISTED_MAX]]
    lines += [f"  watched words: {engine.worker.watch.describe()}"] if engine.worker.watch else []
    copied = [mr for mr in list(engine.regions.values()) if mr.memory.stands_for]
    lines += [f"  region {mr.desc.region}: {mr.memory.stands_for}" for mr in copied[:_LISTED_MAX]]
    if peer is None:
        lines += [f"  peer: {link.addr}" for link in list(engine.worker.peers.links.values())]
        return "\n".join(lines)
    link = engine.worker.peers.links.get((peer.backend, peer.name))
    if link is None:
        raise UsageError(
            f"explain: nothing was ever submitted to {peer}; submit something, or add_peer_group"
        )
    return "\n".join([*lines, *_explain_link(engine, link)])


def _explain_link(engine: Reported, link: Link) -> list[str]:
    nlocal, nremote = len(engine.worker.group.domains), len(link.addr.domains)
    pairs = [(k % nlocal, k % nremote) for k in range(lanes(nlocal, nremote))]
    single = plan_single(MiB, nlocal, nremote, 0)
    paged = plan_paged(256, nlocal, nremote, 0, None, link.weights_now())
    state = "".join("." if alive else "X" for alive in link.alive)
    shards = [share.stop - share.start for share in single.shares]
    runs = [share.stop - share.start for share in paged.shares]
    return [
        f"to {link.addr}",
        f"  its NICs (. answers, X does not): {state}",
        f"  lanes (local NIC -> its NIC): {', '.join(f'{i}->{j}' for i, j in pairs)}",
        f"  1 MiB single: {single.imms} immediates, shards of {shards} bytes",
        f"  256 pages: {paged.imms} immediates, runs of {runs} pages",
    ]


def stall_report(engine: Reported) -> str:
    """List every open handle, oldest first, what it waits for and since when.

    Then each NIC, and the immediates that have arrived and that nobody waits for.
    """
    worker = engine.worker
    group = worker.group
    waiting = worker.unsettled()
    now_s = engine.driver.now_s()
    lines = [
        f"engine {engine.name}: {len(waiting)} open, {len(worker.commands)} commands not taken yet"
    ]
    lines += [
        f"  {handle.describe()}; for {now_s - handle.submitted_s:.6f} s"
        for handle in waiting[:_LISTED_MAX]
    ]
    if len(waiting) > _LISTED_MAX:
        lines.append(f"  ... and {len(waiting) - _LISTED_MAX} more")
    for k, domain in enumerate(group.domains):
        state = "alive" if group.alive[k] else "DOWN"
        rows, reads = group.outstanding[k], worker.reads.outstanding[k]
        more = f", {reads} reads" if reads else ""
        lines.append(f"  NIC {k} ({domain.caps.nic}, {state}): {rows} rows outstanding{more}")
    lines += [f"  {n} control messages dropped: {d}" for d, n in _drops(worker)]
    queued = group.backlog + group.queued_reads
    lines.append(f"  {queued} rows wait for a NIC; {worker.imms.total} immediates counted")
    lines += [f"  {line}" for line in worker.notices.describe()[:_LISTED_MAX]]
    extra = [f"{imm:#x} x {n}" for imm, n in list(worker.imms.counts.items())[:_LISTED_MAX]]
    if extra:
        lines.append(f"  immediates here that no expectation has used: {', '.join(extra)}")
    return "\n".join([*lines, *_quarantine_lines(engine)])


def snapshot(engine: Reported) -> dict[str, object]:
    """Return the values that `tep top` shows of an engine, for JSON; times are seconds."""
    worker, stats, now_s = engine.worker, engine_stats(engine), engine.driver.now_s()
    group = worker.group
    waiting = worker.unsettled()
    numbers = ("rows_outstanding", "nics", "reads")
    nics = [
        {
            "nic": domain.caps.nic,
            "link_bps": domain.caps.link_bps,
            "alive": alive,
            "rows_outstanding": outstanding,
            "rows": written.rows + read.rows,
            "bytes_written": written.nbytes,
            "bytes_read": read.nbytes,
        }
        for domain, alive, outstanding, written, read in zip(
            group.domains, group.alive, *(getattr(stats, name) for name in numbers)
        )
    ]
    return {
        "name": engine.name,
        "epoch": engine.address.epoch,
        "backend": engine.address.backend,
        "crashed": engine.crashed,
        "now_s": now_s,
        "nics": nics,
        "peers": [
            {"name": link.addr.name, "nics_alive": sum(link.alive), "nics": len(link.alive)}
            for link in list(engine.worker.peers.links.values())
        ],
        "open": len(waiting),
        "oldest": [
            {"what": handle.describe(), "for_s": now_s - handle.submitted_s}
            for handle in waiting[:_LISTED_MAX]
        ],
        **{
            name: value
            for name in EngineStats.__slots__
            if name not in {*numbers, *_NOT_SHOWN}
            for value in (getattr(stats, name),)
        },
        "failover": stats.failover.value,
        "control_dropped": dict(stats.control_dropped),
        "faults": dict(stats.faults),
    }

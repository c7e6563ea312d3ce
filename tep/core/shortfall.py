"""What of a failed transfer did not come, for each peer and immediate. Pure.

Rule: a row came if its NIC had an acknowledgement for it, or if a failover found that it landed.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from tep.backends.base import Status
from tep.core.path import Link, Path
from tep.core.pending import NEVER_LANDED, NO_IMM, Pending, ints
from tep.core.plan import plan_single
from tep.core.read_requests import ReadJob
from tep.core.region import Job, Remote
from tep.core.transfer import Transfer

_NONE_COMES: Final = NO_IMM | {NEVER_LANDED, Status.STALE_PEER}

__all__ = ["Shortfall", "shortfalls"]


class Shortfall:
    """One immediate of a transfer, towards one peer.

    Attributes:
        sent: how many the transfer was to bring.
        came: how many of them arrived for certain.
        late: how many of the others may still arrive, or have arrived.
        paths: the paths on which these rows were lost, or bytes of the transfer may still land.
    """

    __slots__ = ("came", "late", "paths", "sent")

    def __init__(self, sent: int) -> None:
        self.sent = sent
        self.came = self.late = 0
        self.paths: dict[Path, None] = {}  # in order: a set's would differ from run to run


def shortfalls(transfer: Transfer, nlocal: int) -> dict[Link, dict[int, Shortfall]]:
    """The immediates of a transfer that has ended not all of which came.

    Args:
        transfer: no row of it is posted any more.
        nlocal: NICs of this engine.
    """
    found = {
        link: {imm: Shortfall(sent) for imm, sent in imms.items()}
        for link, imms in _planned(transfer.job, nlocal).items()
    }
    if not found:
        return {}
    for batch in transfer.batches():
        assert isinstance(batch, Pending)
        if batch.batch.imm is not None:
            _count(batch, found)
    found = {
        link: short
        for link, imms in found.items()
        if (short := {imm: each for imm, each in imms.items() if each.came < each.sent})
    }
    for path in transfer.doubtful_paths():
        for each in found.get(path.link, {}).values():
            each.paths[path] = None
    return found


def _planned(job: Job, nlocal: int) -> dict[Link, Counter[int]]:
    """How many of each immediate a job brings to each peer."""
    imm, remotes = job.imm, job.remotes
    if isinstance(job, ReadJob) and job.owner_imm is not None:
        owners = [remotes] if isinstance(remotes, Remote) else remotes.remotes
        return {remote.link: Counter({job.owner_imm: 1}) for remote in owners}
    if imm is None:
        return {}
    if isinstance(remotes, Remote):
        one = Counter({imm: job.n}) if isinstance(imm, int) else Counter(imm.tolist())
        return {remotes.link: one}
    assert isinstance(imm, int)
    found: dict[Link, Counter[int]] = {}
    sizes = ints(job.nbytes, len(remotes.remotes))
    for remote, nbytes in zip(remotes.remotes, sizes, strict=True):
        plan = plan_single(nbytes, nlocal, remote.nics, 0, job.routing) if job.split else None
        found.setdefault(remote.link, Counter())[imm] += 1 if plan is None else plan.imms
    return found


def _count(pending: Pending, found: dict[Link, dict[int, Shortfall]]) -> None:
    """Count the posted rows of one batch; their number may be large, that of lost rows is not."""
    imm, remotes = pending.batch.imm, pending.remotes
    assert imm is not None
    if isinstance(remotes, Remote):
        rows = pending.at
        came = Counter({imm: rows}) if isinstance(imm, int) else Counter(imm[:rows].tolist())
        for value, times in came.items():
            found[remotes.link][value].came += times
    else:
        for row in pending.posted_rows():
            value = pending.imm(row)
            assert value is not None
            found[pending.target(row)[0].link][value].came += 1
    for row, status in pending.lost.items():
        if status == Status.OK:
            continue
        remote, nic = pending.target(row)
        value = pending.imm(row)
        assert value is not None
        short = found[remote.link][value]
        short.came -= 1
        if status not in _NONE_COMES:
            short.late += 1
            short.paths[remote.link.path(pending.domain, nic)] = None

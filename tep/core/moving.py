"""Rows that never left, taken from one NIC's batch and made a batch of another NIC.

The keys, addresses and PeerIds of the new lane replace those of the old. Which lane, and when, is
the group's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tep.backends.base import WriteBatch
from tep.core.pending import Pending, cut_column, ints, shifted
from tep.core.region import Remote

__all__ = ["on_lanes"]


def on_lanes(old: Pending, start: int, stop: int, domain: int, nics: Sequence[int]) -> Pending:
    """Rows start..stop of a batch on our NIC `domain`; the old batch stays as it is.

    Args:
        old: the batch.
        start: the first of the rows.
        stop: one behind the last.
        domain: our NIC.
        nics: the peers' NICs: of each row where the rows go to different regions, else one for all.
    """
    batch, mr = old.batch, old.transfer.job.mr
    lkey = 0 if mr is None else mr.keys[domain].lkey
    src, nbytes, imm = (cut_column(c, start, stop) for c in (batch.src, batch.nbytes, batch.imm))
    assert src is not None
    assert nbytes is not None
    n = stop - start
    if isinstance(old.remotes, Remote):
        assert isinstance(old.nics, int)
        remote, nic = old.remotes, nics[0]
        dst = cut_column(batch.dst, start, stop)
        dst = shifted(dst, remote.bases[nic] - remote.bases[old.nics])
        peer = remote.link.peer(domain, nic)
        fresh = WriteBatch(n, peer, src, lkey, dst, remote.rkeys[nic], nbytes, imm, 0)
        return Pending(old.transfer, domain, fresh, remote, nic)
    targets = [old.target(row) for row in range(start, stop)]
    dsts = ints(batch.dst, batch.n)[start:stop]
    moved = [
        at - remote.bases[was] + remote.bases[now]
        for at, (remote, was), now in zip(dsts, targets, nics, strict=True)
    ]
    lanes = [(remote, nic) for (remote, _), nic in zip(targets, nics, strict=True)]
    peers = [remote.link.peer(domain, nic) for remote, nic in lanes]
    rkeys = [remote.rkeys[nic] for remote, nic in lanes]
    peer_column, dst_column, rkey_column = (
        np.array(column, np.uint64) for column in (peers, moved, rkeys)
    )
    fresh = WriteBatch(n, peer_column, src, lkey, dst_column, rkey_column, nbytes, imm, 0)
    return Pending(old.transfer, domain, fresh, [remote for remote, _ in lanes], list(nics))

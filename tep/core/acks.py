"""The sender's sums: how many immediates of each value were acknowledged on each lane.

They are compared with the receiver's when a lane dies; see `recovery`. Sums only, no decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from tep.core.pending import Pending
from tep.core.region import Link, Remote

__all__ = ["Acks"]

_WIDE_MAX: Final = 1024
"""Kinds of scatters that are counted as a whole before they are, target by target."""


class _Wide:
    """Scatters or barriers over the same lanes with the same immediate."""

    __slots__ = ("count", "domain", "imm", "nics", "remotes")

    def __init__(
        self, domain: int, remotes: Sequence[Remote], nics: Sequence[int], imm: int
    ) -> None:
        self.domain = domain
        self.remotes = remotes
        self.nics = nics
        self.imm = imm
        self.count = 1


class Acks:
    """What one engine's peers have acknowledged.

    A scatter or barrier in a steady group goes over the same lanes each time: such are counted by
    (its lanes, immediate) and taken apart only when somebody asks, or when they are too many.

    Attributes:
        large: lanes (peer, our NIC, its NIC) with so many values that they should be pruned.
    """

    __slots__ = ("_wide", "large")

    def __init__(self) -> None:
        self.large: dict[tuple[Link, int, int], None] = {}
        self._wide: dict[tuple[int, int], _Wide] = {}

    def add(self, pending: Pending) -> None:
        """Count a batch, whose rows have all come back, except those that were lost."""
        imm, n, remotes = pending.batch.imm, pending.stop, pending.remotes
        if n == 0 or imm is None:
            return
        if isinstance(remotes, Remote):
            assert isinstance(pending.nics, int)
            sent = remotes.link.lane(pending.domain, pending.nics).sent
            if not isinstance(imm, int):
                rows = imm[:n].astype(np.uint64)
                sent.add_many(np.delete(rows, list(pending.lost)) if pending.lost else rows)
            elif n > len(pending.lost):
                sent.add(imm, n - len(pending.lost))
            if sent.large:
                self.large[remotes.link, pending.domain, pending.nics] = None
        elif pending.lost or n < pending.batch.n or not isinstance(imm, int):
            for row in range(n):
                one = pending.imm(row)
                if row not in pending.lost and one is not None:
                    remote, nic = pending.target(row)
                    self._add(remote.link, pending.domain, nic, one, 1)
        else:
            # The list of NICs stands for the lanes: one template has one, and it is kept alive.
            key = id(pending.nics), imm
            known = self._wide.get(key)
            if known is not None:
                known.count += 1
                return
            assert not isinstance(pending.nics, int)
            self._wide[key] = _Wide(pending.domain, remotes, pending.nics, imm)
            if len(self._wide) > _WIDE_MAX:
                self.fold()

    def doubt(self, pending: Pending, row: int) -> None:
        """Count a row of which nobody will ever know whether it landed."""
        imm = pending.imm(row)
        if imm is not None:
            remote, nic = pending.target(row)
            remote.link.lane(pending.domain, nic).doubt[imm] += 1

    def fold(self) -> None:
        """Take all that is counted as a whole apart, into the lanes."""
        wide, self._wide = self._wide, {}
        for each in wide.values():
            for remote, nic in zip(each.remotes, each.nics, strict=True):
                self._add(remote.link, each.domain, nic, each.imm, each.count)

    def _add(self, link: Link, domain: int, nic: int, imm: int, count: int) -> None:
        sent = link.lane(domain, nic).sent
        sent.add(imm, count)
        if sent.large:
            self.large[link, domain, nic] = None

"""A reader and an owner over NICs that do what a test says. Not a test."""

from __future__ import annotations

import tep
from tep.backends.base import Access, ReadRow, Row
from tests.support.script import memory, scripted

PAGE = 4096
HERE = 1 << 30


class Reading:
    """A reader of two NICs, an owner of two, 16 pages of each."""

    def __init__(self, nics: int = 2, **options: object) -> None:
        self.me = scripted(nics, name="me", reads=1 << 20, options=tep.EngineOptions(**options))
        self.owner = scripted(nics, name="owner", reads=1)
        _, self.desc = self.owner.engine.reg_mr(memory(16 * PAGE), access=Access.READABLE)
        self.mr, _ = self.me.engine.reg_mr(memory(16 * PAGE, HERE), access=Access.SINK)

    def paged(self, npages: int = 8, **given: object) -> tep.Transfer:
        pages = tep.Pages(range(npages))
        sent = self.me.engine.submit_paged_reads(
            PAGE, (self.desc, pages), (self.mr, pages), **given
        )
        self.me.turn()
        return sent

    def rows(self) -> list[Row | ReadRow]:
        return [posted.row for posted in self.me.posted]


__all__ = ["HERE", "PAGE", "Reading"]

"""An engine on strings with a source, and peers whose keys it must not mix up. Not a test."""

from __future__ import annotations

from tep.base.api import Pages, ScatterDst
from tep.base.units import KiB
from tests.support.script import Posted, Scripted, memory, scripted

PTR = 1 << 30
IMM = 0x01020304


class Ends:
    """An engine, a source, and descriptors of peers with their NICs."""

    def __init__(self, nlocal: int, nremotes: tuple[int, ...] = (1,), **kw) -> None:
        self.own = scripted(nlocal, **kw)
        self.engine, self.nics = self.own.engine, self.own.nics
        self.mr, _ = self.engine.reg_mr(memory(1 << 30, PTR))
        self.peers = [scripted(n, name=f"p{k}") for k, n in enumerate(nremotes)]
        self.descs = [
            p.engine.reg_mr(memory(1 << 30, (k + 2) << 40))[1] for k, p in enumerate(self.peers)
        ]

    def pages(self, npages: int, imm: int | None = IMM, **kw):
        pages = Pages(range(npages))
        return self.engine.submit_paged_writes(
            KiB, (self.mr, pages), (self.descs[0], pages), imm, **kw
        )

    def scatter(self, **kw):
        dsts = [ScatterDst(KiB, k * KiB, (d, 7 * k)) for k, d in enumerate(self.descs)]
        return self.engine.submit_scatter(self.mr, dsts, IMM, **kw)

    def meant(self, nic: int, posted: Posted) -> tuple[int, int, int, int]:
        """(peer, its NIC, source offset, target offset); fails on keys that do not belong."""
        row = posted.row
        address = self.nics[nic].peers[row.peer - 10 * nic]
        peer, remote = (int(part) for part in address.decode()[1:].split("/"))
        desc = self.descs[peer]
        assert desc.rkeys[remote] == row.rkey, "a key of another NIC"
        assert self.mr.keys[nic].lkey == row.lkey, "a local key of another NIC"
        return peer, remote, row.src - PTR, row.dst - desc.bases[remote]

    def places(self) -> list[tuple[int, int]]:
        """(source offset, target offset) of every row ever posted."""
        found = (self.meant(k, row) for k, nic in enumerate(self.nics) for row in nic.posted)
        return sorted((src, dst) for _, _, src, dst in found)


def finish_all(own: Scripted) -> None:
    """Let every NIC return what it holds, until nothing moves."""
    for _ in range(20):
        for nic in own.nics:
            nic.finish()
        own.turn()

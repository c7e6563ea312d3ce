"""From verbs to posted rows, on NICs that write down what they are given: tiling, keys, lengths.

Bytes are compared in test_engine_loopback.py; here regions are larger than any machine's memory.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tep.base.api import Pages, Routing, ScatterDst, Single
from tep.base.units import GiB, KiB
from tep.base.wire import MrDesc
from tep.core.plan import ROW_BYTES_MAX, count_imms
from tep.drivers.threads import InlineDriver
from tep.engine import TransferEngine
from tests.support.null import null_memory, null_pair
from tests.support.script import Posted, Scripted, memory, scripted

NICS = st.integers(1, 4)
PTR = 1 << 40


def target_of(
    own: Scripted, peer: Scripted, desc: MrDesc, nic: int, posted: Posted
) -> tuple[int, int]:
    """The remote NIC and the offset that a row means; fails unless all its keys belong together."""
    row = posted.row
    remote = desc.rkeys.index(row.rkey)
    assert own.nics[nic].peers[row.peer - 10 * nic] == peer.nics[remote].address
    offset = row.dst - desc.bases[remote]
    assert 0 <= offset <= desc.nbytes - row.nbytes
    return remote, offset


def rows_of(own: Scripted, peer: Scripted, mr, desc: MrDesc) -> list[tuple[int, int, int]]:
    """(source offset, target offset, bytes) of every row posted, its keys checked."""
    found = []
    for nic, domain in enumerate(own.nics):
        for posted in domain.posted:
            assert mr.keys[nic].lkey == posted.row.lkey
            _, offset = target_of(own, peer, desc, nic, posted)
            found.append((posted.row.src - PTR, offset, posted.row.nbytes))
    return sorted(found)


def ends(nlocal: int, nremote: int, nbytes: int):
    own, peer = scripted(nlocal), scripted(nremote, name="peer")
    mr, _ = own.engine.reg_mr(memory(nbytes, PTR))
    _, desc = peer.engine.reg_mr(memory(nbytes))
    return own, peer, mr, desc


@given(
    NICS,
    NICS,
    st.one_of(
        st.integers(0, 100 * KiB),
        st.integers(0, 40 * GiB),
        st.builds(lambda k, d: max(0, k * GiB + d), st.integers(0, 40), st.integers(-2, 3)),
    ),
    st.integers(0, 8 * GiB),
    st.data(),
)
def test_rows_of_a_single_write_tile_it_exactly(nlocal, nremote, nbytes, offset, data) -> None:
    """No byte is left out or written twice; no row is over 1 GiB; each row has its NIC's keys."""
    own, peer, mr, desc = ends(nlocal, nremote, 64 * GiB)
    for _ in range(data.draw(st.integers(0, 3))):  # another cursor
        own.engine.submit_single_write(1, (mr, 0), (desc, 0))
    own.turn()
    for nic in own.nics:
        nic.posted.clear()
    sent = own.engine.submit_single_write(nbytes, (mr, offset), (desc, 2 * offset), 5)
    own.turn()
    rows = rows_of(own, peer, mr, desc)

    assert sent.rows == len(rows) == count_imms(Single(nbytes), nlocal, nremote)
    at = 0
    for src, dst, length in rows:
        assert (offset + at, 2 * offset + at) == (src, dst)
        assert 0 <= length <= ROW_BYTES_MAX
        at += length
    assert nbytes == at
    assert all(posted.row.imm == 5 for posted in own.posted)


@pytest.mark.parametrize(("nlocal", "nremote"), list(product(range(1, 5), range(1, 5))))
def test_5_gib_and_3_bytes_over_every_pair_of_nic_counts(nlocal, nremote) -> None:
    """A length in 32 bits anywhere would post 1 GiB and 3 bytes of it."""
    own, peer, mr, desc = ends(nlocal, nremote, 16 * GiB)
    nbytes = 5 * GiB + 3
    own.engine.submit_single_write(nbytes, (mr, 5 * GiB), (desc, 9 * GiB))
    own.turn()
    rows = rows_of(own, peer, mr, desc)

    assert nbytes == sum(length for _, _, length in rows)
    assert 14 * GiB + 3 == max(dst + length for _, dst, length in rows)
    assert all(length <= ROW_BYTES_MAX for _, _, length in rows)
    assert {posted.row.imm for posted in own.posted} == {None}
    assert all(nic.posted for nic in own.nics)
    assert set(desc.rkeys) == {posted.row.rkey for posted in own.posted}


@given(NICS, NICS, st.integers(1, 60), st.none() | st.integers(0, 3))
def test_pages_are_posted_once_each_with_keys_that_belong_together(
    nlocal, nremote, npages, pinned
) -> None:
    """Each page is one row, on a NIC that the routing allows, with that lane's keys."""
    own, peer, mr, desc = ends(nlocal, nremote, 64 * GiB)
    domain = None if pinned is None else pinned % nlocal
    pages = Pages(np.arange(npages)[::-1], stride=GiB // 2, offset=GiB)
    own.engine.submit_paged_writes(
        KiB, (mr, pages), (desc, pages), np.arange(npages), routing=Routing(domain=domain)
    )
    own.turn()
    rows = rows_of(own, peer, mr, desc)

    expected = [GiB + k * (GiB // 2) for k in range(npages)]
    assert [(at, at, KiB) for at in expected] == rows
    by_offset = {posted.row.src: posted.row.imm for posted in own.posted}
    assert {PTR + at: npages - 1 - k for k, at in enumerate(expected)} == by_offset
    if domain is not None:
        assert [domain] == [k for k, nic in enumerate(own.nics) if nic.posted]


@given(NICS, st.lists(NICS, min_size=1, max_size=6), st.booleans(), st.integers(1, 4))
def test_scatter_rows_have_the_keys_of_their_own_target(nlocal, nremotes, by_bytes, rounds) -> None:
    """With several peers in one batch a column shifted by one writes into a stranger's memory."""
    own = scripted(nlocal)
    mr, _ = own.engine.reg_mr(memory(64 * GiB, PTR))
    peers = [scripted(n, name=f"p{k}") for k, n in enumerate(nremotes)]
    descs = [peer.engine.reg_mr(memory(8 * GiB, (k + 1) << 44))[1] for k, peer in enumerate(peers)]
    group = own.engine.add_peer_group([peer.engine.main_address for peer in peers])
    routing = Routing(scatter_by="bytes" if by_bytes else "peers")
    dsts = [ScatterDst(40_000 + k, k * GiB, (desc, 5 * GiB + k)) for k, desc in enumerate(descs)]
    for _ in range(rounds):
        for nic in own.nics:
            nic.posted.clear()
        own.engine.submit_scatter(mr, dsts, 3, group=group, routing=routing)
        own.turn()
        found: dict[int, list[tuple[int, int, int]]] = {}
        for nic, domain in enumerate(own.nics):
            for posted in domain.posted:
                address = domain.peers[posted.row.peer - 10 * nic]
                k = int(address.split(b"/")[0][1:])
                _, offset = target_of(own, peers[k], descs[k], nic, posted)
                found.setdefault(k, []).append((posted.row.src - PTR, offset, posted.row.nbytes))
        for k, dst in enumerate(dsts):
            rows = sorted(found[k])
            assert by_bytes or len(rows) == 1
            assert [src - k * GiB for src, _, _ in rows] == [at - dst.dst[1] for _, at, _ in rows]
            ends_at = [src + n for src, _, n in rows]
            assert [k * GiB, *ends_at[:-1]] == [src for src, _, _ in rows]
            assert k * GiB + dst.nbytes == ends_at[-1]


@pytest.mark.parametrize("nics", [1, 2, 4])
def test_null_nics_carry_more_than_4_gib_and_count_its_immediates(nics) -> None:
    """The benchmarks' NIC must account as real ones do, or its figures are of something else."""
    ring: list = []
    a, b = (
        TransferEngine(domains, driver=InlineDriver(ring), name=name, epoch=1)
        for name, domains in zip("ab", null_pair(nics), strict=True)
    )
    mr, _ = a.reg_mr(null_memory(16 * GiB))
    _, desc = b.reg_mr(null_memory(16 * GiB))
    got = b.expect_imm_count(1, count_imms(Single(5 * GiB + 3), nics, nics))
    sent = a.submit_single_write(5 * GiB + 3, (mr, 7), (desc, 9 * GiB), 1)
    got.wait(5)
    sent.wait(5)

    assert 5 * GiB + 3 == sum(nic.nbytes for nic in sent.stats().nics)
    assert () == b.stats().imms_unexpected

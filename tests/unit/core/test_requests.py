"""From arguments to columns: addresses, lengths beyond 4 GiB, overlap tests at their edges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tep.base.api import Pages, Routing, ScatterDst, Single
from tep.base.errors import BadRequest
from tep.base.units import GiB, KiB, MiB
from tep.core.plan import ROW_BYTES_MAX, count_imms, plan_single
from tep.core.regions import MrHandle, Remote, Targets
from tep.core.requests import (
    DEFAULT,
    Job,
    barrier_job,
    longest_row,
    paged_job,
    scatter_job,
    single_job,
    slices_of,
)
from tests.support.inside import peers_of
from tests.support.script import memory, scripted

PTR = 1 << 20
BASE = 1 << 20


def ends(nbytes: int, nlocal: int = 1, nremote: int = 1) -> tuple[MrHandle, Remote]:
    """A source at PTR and a resolved target of the same length."""
    own, peer = scripted(nlocal), scripted(nremote, name="peer")
    mr, _ = own.engine.reg_mr(memory(nbytes, PTR))
    _, desc = peer.engine.reg_mr(memory(nbytes))
    return mr, peers_of(own.engine).resolve(desc, "test")


def test_single_is_one_whole_write_until_it_is_dealt_out() -> None:
    """Shards depend on the cursor, which only the group knows; their number must not."""
    mr, remote = ends(64 * KiB, 2, 2)
    job = single_job(40_000, (mr, 5), remote, 9, 0xFFFFFFFF, DEFAULT, 2)

    assert (PTR + 5, BASE + 9, 40_000, 0xFFFFFFFF) == (job.src, job.dst, job.nbytes, job.imm)
    assert (2, 40_000, True) == (job.n, job.total, job.split)


def test_numpy_integers_become_plain_ones() -> None:
    """Offsets often come out of arrays; in 64-bit arithmetic they would wrap or stay numpy's."""
    mr, remote = ends(64 * KiB)
    job = single_job(
        np.int32(8), (mr, np.int64(16)), remote, np.uint64(24), np.uint32(7), DEFAULT, 1
    )

    assert [int] * 4 == [type(x) for x in (job.src, job.dst, job.nbytes, job.imm)]
    slices = [ScatterDst(np.int64(8), np.uint16(1), (remote.desc, np.int64(3)))]
    job = scatter_job(mr, slices_of(slices), Targets([remote]), np.int64(1), DEFAULT, 1)
    assert ([PTR + 1], [3], [8]) == (job.src.tolist(), job.dst.tolist(), job.nbytes.tolist())
    assert type(job.total) is int
    job = paged_job(np.int64(8), (mr, Pages([1, 2])), (remote, Pages([3, 4])), 1, DEFAULT, 1)
    assert 8 == job.nbytes
    assert type(job.nbytes) is int


def test_pages_become_addresses_and_offsets() -> None:
    """Swapped or unscaled, every page lands somewhere else."""
    mr, remote = ends(64 * KiB)
    src, dst = Pages([3, 0, 3], stride=100, offset=7), Pages([2, 9, 4], offset=1)
    job = paged_job(64, (mr, src), (remote, dst), [5, 0, 2**32 - 1], DEFAULT, 1)

    assert [PTR + 307, PTR + 7, PTR + 307] == job.src.tolist()
    assert [BASE + 129, BASE + 577, BASE + 257] == job.dst.tolist()
    assert [5, 0, 2**32 - 1] == job.imm.tolist()
    assert (64, 3, 192, 64) == (job.nbytes, job.n, job.total, job.longest)


def test_immediates_are_copied() -> None:
    """A user who reuses the array before the engine's turn would change what is sent."""
    mr, remote = ends(64 * KiB)
    imms = np.arange(4, dtype=np.uint32)
    job = paged_job(8, (mr, Pages(range(4))), (remote, Pages(range(4))), imms, DEFAULT, 1)
    imms[:] = 9

    assert [0, 1, 2, 3] == job.imm.tolist()


def test_one_page_and_a_scalar_array_stay_scalar() -> None:
    """A single page must not pay for columns."""
    mr, remote = ends(64 * KiB)
    job = paged_job(8, (mr, Pages([2])), (remote, Pages([3])), np.array(7), DEFAULT, 1)

    assert (PTR + 16, BASE + 24, 7) == (job.src, job.dst, job.imm)


@pytest.mark.parametrize("spread", [1, 15, 16, 17, 1000])
def test_duplicates_are_found_by_bitmap_and_by_sorting(spread) -> None:
    """The two ways to look meet where the largest index is 16 times the count."""
    mr, remote = ends(1 << 20)
    good = np.arange(20) * spread
    bad = good.copy()
    bad[3] = bad[17]
    paged_job(8, (mr, Pages(range(20))), (remote, Pages(good)), None, DEFAULT, 1)
    with pytest.raises(BadRequest, match=f"target page {17 * spread} is listed more than once"):
        paged_job(8, (mr, Pages(range(20))), (remote, Pages(bad)), None, DEFAULT, 1)


def test_pages_closer_than_their_length_are_legal_where_they_do_not_meet() -> None:
    """A stride below the page size is how pages of many sizes share one region."""
    mr, remote = ends(64 * KiB)
    paged_job(64, (mr, Pages([0, 1])), (remote, Pages([0, 2], stride=32)), None, DEFAULT, 1)
    with pytest.raises(BadRequest, match="start within one page of byte 33"):
        paged_job(
            64, (mr, Pages([0, 1])), (remote, Pages([3, 1], stride=31, offset=2)), None, DEFAULT, 1
        )


def test_empty_pages_never_overlap() -> None:
    """Immediates without bytes may all name one place."""
    mr, remote = ends(64)
    job = paged_job(0, (mr, Pages([0, 0])), (remote, Pages([1, 1])), 5, DEFAULT, 1)

    assert (2, 0) == (job.n, job.total)


def test_pages_beyond_4_gib_keep_all_their_bits() -> None:
    """32-bit arithmetic anywhere wraps to the region's start."""
    mr, remote = ends(9 * GiB)
    pages = Pages([0, 2 * GiB // KiB, 8 * GiB // KiB], stride=KiB, offset=3)
    job = paged_job(KiB, (mr, pages), (remote, pages), 1, DEFAULT, 1)

    assert [BASE + 3, BASE + 2 * GiB + 3, BASE + 8 * GiB + 3] == job.dst.tolist()
    assert [PTR + 3, PTR + 2 * GiB + 3, PTR + 8 * GiB + 3] == job.src.tolist()


def test_slices_beyond_4_gib_keep_all_their_bits() -> None:
    """Large slices must keep all bits, like pages; a slice itself is one row of at most 1 GiB."""
    mr, remote = ends(9 * GiB)
    targets = Targets([remote, remote])
    dsts = [ScatterDst(GiB, 8 * GiB, (remote.desc, 7 * GiB)), ScatterDst(0, 0, (remote.desc, 0))]
    job = scatter_job(mr, slices_of(dsts), targets, 1, DEFAULT, 1)

    assert ([PTR + 8 * GiB, PTR], [7 * GiB, 0]) == (job.src.tolist(), job.dst.tolist())
    too_long = [ScatterDst(GiB + 1, 0, (remote.desc, 0)), dsts[1]]
    with pytest.raises(BadRequest, match="slice 0: 1073741825 bytes; a slice is 1073741824 at the"):
        scatter_job(mr, slices_of(too_long), targets, 1, DEFAULT, 1)


def test_a_scatter_goes_to_its_own_places_and_not_to_the_last_ones() -> None:
    """The places of the last request are kept: others would be written over."""
    mr, remote = ends(64 * KiB)
    targets = Targets([remote, remote])
    for places in ([8, 64], [8, 64], [0, 64], [16, 32], [512, 0]):
        dsts = [ScatterDst(8, 0, (remote.desc, at)) for at in places]
        job = scatter_job(mr, slices_of(dsts), targets, None, DEFAULT, 1)
        assert places == job.dst.tolist()


def test_scatter_by_bytes_counts_the_rows_of_every_slice() -> None:
    """A wrong row count lets the transfer settle early, or never."""
    mr, remote = ends(GiB, 2, 3)
    routing = Routing(scatter_by="bytes")
    sizes = (0, 100, 16 * KiB, 6 * 8192)
    dsts = [ScatterDst(n, 0, (remote.desc, MiB * k)) for k, n in enumerate(sizes)]
    job = scatter_job(mr, slices_of(dsts), Targets([remote] * 4), 1, routing, 2)

    assert 1 + 1 + 2 + 6 == job.n
    assert 8192 == longest_row(job, 2)
    assert sum(sizes) == job.total


def test_slices_that_share_bytes_of_a_target_are_refused() -> None:
    """The result is undefined on every fabric; paged writes refuse it too."""
    mr, remote = ends(GiB)
    remote, twin = (Remote(remote.desc, remote.link) for _ in "12")  # it was decoded twice

    def scatter(*slices: tuple[int, int]) -> None:
        dsts = [ScatterDst(n, 0, (remote.desc, at)) for n, at in slices]
        targets = Targets([remote, twin, remote][: len(dsts)])
        scatter_job(mr, slices_of(dsts), targets, None, DEFAULT, 1)

    scatter((8, 0), (8, 8), (8, 16))
    scatter((8, 16), (0, 17), (8, 0))  # an empty one shares nothing
    for at, slices in [
        (0, ((8, 0), (8, 0))), (7, ((8, 7), (8, 0))), (8, ((9, 0), (8, 100), (1, 8))),
    ]:  # fmt: skip
        with pytest.raises(BadRequest, match=rf"s 0 and . overlap: both write to bytes from {at} "):
            scatter(*slices)


def test_scatter_slices_are_checked_one_by_one_where_targets_differ() -> None:
    """The quick look compares with the shortest region; a longer one may hold more."""
    mr, short = ends(100)
    _, long = ends(1000)
    targets = Targets([short, long])
    dsts = [ScatterDst(50, 0, (short.desc, 50)), ScatterDst(50, 50, (long.desc, 950))]
    assert 2 == scatter_job(mr, slices_of(dsts), targets, None, DEFAULT, 1).n
    dsts[0] = ScatterDst(50, 0, (short.desc, 51))
    with pytest.raises(BadRequest, match="slice 0: target bytes 51 .. 101 are outside the 100"):
        scatter_job(mr, slices_of(dsts), targets, None, DEFAULT, 1)


def test_barrier_has_a_row_a_target_and_no_bytes() -> None:
    """Its immediate is all there is."""
    _, remote = ends(64)
    job = barrier_job(Targets([remote] * 3), 0, DEFAULT, 1)

    assert (3, 0, 0, None) == (job.n, job.total, job.imm, job.mr)


@pytest.mark.parametrize("nics", [1, 2, 3])
def test_single_of_5_gib_and_3_bytes_is_cut_into_rows_of_1_gib(nics) -> None:
    """An immediate vouches for its own row only, so both sides must count rows alike."""
    nbytes = 5 * GiB + 3
    mr, remote = ends(nbytes + 4 * GiB, nics, nics)
    job = single_job(nbytes, (mr, 4 * GiB), remote, 3 * GiB, 1, DEFAULT, nics)
    plan = plan_single(nbytes, nics, nics, 0)

    assert job.n == plan.imms == count_imms(Single(nbytes), nics, nics)
    assert longest_row(job, nics) <= ROW_BYTES_MAX
    assert nbytes == job.longest
    edges = [0, *(share.stop for share in plan.shares)]
    assert edges[:-1] == [share.start for share in plan.shares]
    assert nbytes == edges[-1]


REQUESTS = st.tuples(
    st.sampled_from([0, 8, 64, 40_000]),
    st.sampled_from([0, 16, True, np.int64(16)]),
    st.sampled_from([0, 1, 24]),
    st.sampled_from([None, 0, 1, True, np.uint32(7), 0xFFFFFFFF]),
    st.sampled_from([DEFAULT, Routing(), Routing(domain=1), Routing(num_shards=2)]),
)


@given(asked=st.lists(REQUESTS, min_size=1, max_size=20))
def test_a_request_that_is_repeated_is_what_it_would_be_anew(asked) -> None:
    """The last one to each region is remembered: nothing else may be given out for another."""
    mr, remote = ends(64 * KiB, 2, 2)
    names = [name for name in Job.__slots__ if name not in {"mr", "remotes"}]
    for nbytes, src, dst, imm, routing in asked:
        job = single_job(nbytes, (mr, src), remote, dst, imm, routing, 2)
        fresh = single_job(
            nbytes, (mr, src), Remote(remote.desc, remote.link), dst, imm, routing, 2
        )
        assert (mr, remote) == (job.mr, job.remotes)
        for name in names:
            found, wanted = getattr(job, name), getattr(fresh, name)
            assert (type(wanted), wanted) == (type(found), found), name


def test_bad_numbers_are_refused_although_equal_ones_were_good() -> None:
    """8.0 equals the 8 of the last request, and is no number of bytes."""
    mr, remote = ends(64 * KiB)
    single_job(8, (mr, 16), remote, 24, 7, DEFAULT, 1)
    for bad in ((8.0, 16, 24, 7), (8, 16.0, 24, 7), (8, 16, 24.0, 7), (8, 16, 24, 7.0)):
        nbytes, src, dst, imm = bad
        with pytest.raises(BadRequest):
            single_job(nbytes, (mr, src), remote, dst, imm, DEFAULT, 1)


def test_what_is_remembered_of_a_region_goes_when_it_is_given_back() -> None:
    """The engine lets go of memory with its region, also where a peer's region was written to."""
    own, peer = scripted(1), scripted(1, name="peer")
    mr, _ = own.engine.reg_mr(memory(64, PTR))
    kept, _ = own.engine.reg_mr(memory(64, 2 * PTR))
    remotes = []
    for region in (mr, kept):
        _, desc = peer.engine.reg_mr(memory(64))
        remotes.append(peers_of(own.engine).resolve(desc, "test"))
        single_job(8, (region, 0), remotes[-1], 0, 1, DEFAULT, 1)
    own.engine.deregister(mr)
    assert remotes[0].steady is None
    assert remotes[1].steady is not None

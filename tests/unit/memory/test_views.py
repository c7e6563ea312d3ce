"""Views of regions and descriptors: `mr[a:b]`, `desc[a:b]`."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tep
from tep.core.regions import Quarantine
from tests.support.effort import effort
from tests.support.pairs import pair

N = 4096
ENDS = st.none() | st.integers(-2 * N, 2 * N)


@settings(max_examples=effort(60, 15), derandomize=True)
@given(ENDS, ENDS, ENDS, ENDS, st.integers(0, N))
def test_views_are_numpys(a, b, c, d, nbytes) -> None:
    """A slice that selects other bytes than numpy's would overwrite foreign memory."""
    with pair(nbytes=N) as p:
        sources, targets = p.src.data[a:b], p.dst.data[c:d]
        mr, desc = p.mr[a:b], p.desc[c:d]
        assert (len(sources), len(targets)) == (mr.memory.nbytes, desc.nbytes)
        if nbytes > min(len(sources), len(targets)):
            with pytest.raises(tep.BadRequest, match="outside the .* bytes of"):
                p.a.submit_single_write(nbytes, (mr, 0), (desc, 0))
            return
        expected = p.dst.data.copy()
        expected[c:d][:nbytes] = sources[:nbytes]
        travelled = tep.MrDesc.from_bytes(desc.to_bytes())
        p.settle(p.a.submit_single_write(nbytes, (mr, 0), (travelled, 0)))
        assert (expected == p.dst.data).all()
        assert p.dst.guards_hold()


def test_views_of_views_are_of_the_region() -> None:
    """Offsets that are not added up point to somebody else's bytes."""
    with pair() as p:
        mr, desc = p.mr[1000:9000][24:-1000], p.desc[1000:9000][24:-1000]
        assert (1024, 6976) == (mr.start, mr.memory.nbytes)
        assert mr.root is p.mr
        assert (0, False) == (mr.inflight, mr.closed)
        assert desc == p.desc[1024:8000]
        assert (p.dst_mr[8:16].desc, p.desc[8:16]) == (p.desc[8:16], p.dst_mr[8:16].desc)
        assert "MrView(bytes 1024 .. 8000 of MrHandle(region 1, 65536 bytes" in repr(mr)


def test_a_view_knows_which_of_its_bytes_are_in_quarantine() -> None:
    """Bytes beside it that are in doubt do not concern it; of its own none may be missing."""
    found = Quarantine(10, 20, "a fence failed"), Quarantine(16, 30, "a NIC is down")
    with pair() as p, mock.patch.object(type(p.mr.owner), "quarantines", return_value=found):
        assert found == p.mr.quarantined
        for start, stop in itertools.combinations(range(5, 36), 2):
            expected = {
                (max(q.start, start) - start, min(q.stop, stop) - start, q.why)
                for q in found
                if set(range(q.start, q.stop)) & set(range(start, stop))
            }
            assert expected == set(p.mr[start:stop].quarantined), (start, stop)
        assert () == p.mr[12:12].quarantined


def test_every_verb_takes_views() -> None:
    """A verb that looks at the region in place of its view sends other bytes than were meant."""
    with pair() as p:
        mr, desc, pages = p.mr[4096:], p.desc[8192:], tep.Pages([1, 0])
        sent = p.a.submit_paged_writes(512, (mr, pages), (desc, pages), 1)
        p.settle(sent, p.a.submit_scatter(mr, [tep.ScatterDst(256, 64, (desc, 4096))], 2))
        p.settle(p.a.submit_barrier([desc], 3))
        assert (p.src.data[4096:5120] == p.dst.data[8192:9216]).all()
        assert (p.src.data[4160:4416] == p.dst.data[12288:12544]).all()
        assert p.untouched_but([(8192, 9216), (12288, 12544)])
        assert [2, 1, 1] == [dict(p.b.stats().imms_unexpected).get(imm, 0) for imm in (1, 2, 3)]


def test_a_transfer_from_a_view_keeps_the_region() -> None:
    """Memory that is given back while a NIC reads it is somebody else's by then."""
    with pair() as p:
        view = p.mr[64:128]
        sent = p.a.submit_single_write(64, (view, 0), (p.desc, 0))
        p.a._worker.take_all_commands()
        assert (1, 1) == (p.mr.inflight, view.inflight)
        with pytest.raises(tep.BusyError, match="in use by 1 transfers"):
            p.a.deregister(p.mr)
        p.settle(sent)
        with pytest.raises(tep.BadRequest, match="is a view; give the region itself"):
            p.a.deregister(view)
        p.a.deregister(p.mr)
        assert view.closed
        with pytest.raises(tep.ClosedError, match="was deregistered"):
            p.a.submit_single_write(64, (view, 0), (p.desc, 0))


@pytest.mark.parametrize("which", ["mr", "desc"])
def test_what_is_no_view_is_refused_by_name(which) -> None:
    """An index that numpy takes for an element has no meaning here."""
    with pair() as p:
        found = getattr(p, which)
        for part, words in (
            (3, r"\[3\]: a view is a range of bytes"),
            (slice(0, 8, 2), r"\[0:8:2\]: a view has no step; tep.Pages"),
            (slice("a", None), r"\[a:None\]: slice indices must be integers"),
            (np.array([1]), "a view is a range"),
        ):
            with pytest.raises(tep.BadRequest, match=which + ".*" + words):
                found[part]
        with pytest.raises(TypeError):
            iter(found)
        assert 0 == len(p.src.data[9:3])
        assert 0 == found[9:3].nbytes if which == "desc" else found[9:3].memory.nbytes == 0

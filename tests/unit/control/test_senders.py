"""Receive callbacks that know the sender of each message."""

from __future__ import annotations

import msgspec
import pytest

import tep
from tep.base.errors import BadRequest
from tep.sim.cluster import Cluster
from tests.support.pairs import pair


@pytest.mark.parametrize("fabric", [{"nics": 2}, {"profile": "efa_2x200"}], ids=["chaos", "timing"])
def test_the_callback_gets_the_sender(fabric: dict[str, object]) -> None:
    """Without it each protocol would have to put its own address into each message."""
    with Cluster(3, **fabric) as cluster:
        a, b, c = cluster.engines
        got: list[tuple[bytes, tep.Sender]] = []
        c.submit_recvs(64, 8, lambda view, who: got.append((bytes(view), who)), with_sender=True)
        c.add_peer_group([a.main_address])
        a.submit_send(c.main_address, b"a").wait()
        b.submit_send(c.main_address, b"b").wait()
        cluster.env.run()
        told = dict(got)
        assert a.main_address == told[b"a"].peer
        assert told[b"a"].nic in a.main_address.domains
        assert "NIC 0 of a@sim" in repr(told[b"a"])
        assert told[b"b"].peer is None, "c has not met b"
        assert "was not met" in repr(told[b"b"])
        assert told[b"a"].engine != told[b"b"].engine
        assert told[b"a"].owns(a.main_address)
        assert not told[b"b"].owns(a.main_address)
        mixed = (*b.main_address.domains, *a.main_address.domains)
        both = msgspec.structs.replace(b.main_address, domains=mixed, link_bps=(1,) * len(mixed))
        assert not told[b"b"].owns(both), "answers would go to a as well"


def test_one_engine_has_one_callback_with_one_signature() -> None:
    """A second one would take messages from the first, or be called with what it does not take."""
    with pair() as p:

        def take(*_: object) -> None:
            pass

        p.b.submit_recvs(64, 2, take, with_sender=True)
        p.b.submit_recvs(64, 2, take, with_sender=True)
        with pytest.raises(BadRequest, match="already, with_sender=True"):
            p.b.submit_recvs(64, 2, take)
        with pytest.raises(BadRequest, match="with_sender"):
            p.a.submit_recvs(64, 2, take, with_sender=3)

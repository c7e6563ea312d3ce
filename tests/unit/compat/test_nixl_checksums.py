"""TEP_NIXL_CHECKSUMS: a transfer whose bytes differ at its two ends is an error that names them."""

from __future__ import annotations

import numpy as np
import pytest

from tep import sim
from tep.compat.nixl import bindings, chaos, nixl_agent, wire

PAGE, NPAGES = 512, 16
LOOKS = 200_000


@pytest.fixture
def pair(request, monkeypatch):
    """Two agents that know each other, `corrupt` of 256 rows have a bit turned.

    `request.param` is (corrupt, names of the agents that are asked for checksums).
    """
    corrupt, asked = request.param
    monkeypatch.setenv("TEP_NIXL_BACKEND", "chaos")
    faults = sim.Chaos.calm(seed=1, corrupt=corrupt)
    with sim.Cluster(2, nics=1, seed=1, chaos=faults) as cluster, chaos.using(cluster):
        made = []
        for value, name in enumerate("AB"):
            with monkeypatch.context() as patch:
                if name in asked:
                    patch.setenv("TEP_NIXL_CHECKSUMS", "yes")
                agent = nixl_agent(name)
            made.append(agent)
            agent.memory = np.full(2 * NPAGES * PAGE, value, np.uint8)
            agent.register_memory([(agent.memory.ctypes.data, agent.memory.nbytes, 0, "")], "DRAM")
        for agent, other in (made, reversed(made)):
            agent.add_remote_agent(other.get_agent_metadata())
        yield made


def xfer(a, b, op, notif=b""):
    """Every second page, in two lengths, to or from other places there."""
    at = np.arange(NPAGES) * 2 * PAGE
    lengths = np.where(np.arange(NPAGES) < 5, PAGE, PAGE // 2)
    mine, theirs = (
        a.get_xfer_descs(np.stack([one.memory.ctypes.data + to, lengths, 0 * at], 1), "DRAM")
        for one, to in ((a, at), (b, at[::-1] + PAGE))
    )
    return a.initialize_xfer(op, mine, theirs, b.name, notif)


def finish(agent, handle):
    state = agent.transfer(handle)
    for _ in range(LOOKS):
        if state != "PROC":
            return state
        state = agent.check_xfer_state(handle)
    return state


def notifs(agent):
    """All that comes for a while."""
    for _ in range(1000):
        agent.update_notifs()
    return agent.notifs


@pytest.mark.parametrize("pair", [(0, "AB")], indirect=True)
@pytest.mark.parametrize("op", ["READ", "WRITE"])
def test_equal_bytes_end_as_without_checksums(pair, op):
    """A check that accuses the innocent is soon switched off."""
    a, b = pair
    assert "DONE" == finish(a, xfer(a, b, op))
    assert "DONE" == finish(a, xfer(a, b, op, b"told"))
    a.send_notif("B", b"after")

    assert {"A": [b"told", b"after"]} == notifs(b)


@pytest.mark.parametrize("pair", [(256, "AB")], indirect=True)
@pytest.mark.parametrize("op", ["READ", "WRITE"])
def test_a_bit_that_was_turned_is_found_before_anybody_is_told(pair, op):
    """The NIC said that all was well, and the model answered with garbage."""
    a, b = pair
    handle = xfer(a, b, op, b"told")
    with pytest.raises(bindings.nixlMismatchError) as raised:
        finish(a, handle)

    start = f"{b.memory.ctypes.data:#x}"
    for words in ("agent 'B': checksums differ", f"its {b.memory.nbytes} bytes at {start}"):
        assert words in str(raised.value)
    assert {} == notifs(b)
    with pytest.raises(bindings.nixlMismatchError):
        a.check_xfer_state(handle)


@pytest.mark.parametrize("pair", [(256, "B")], indirect=True)
def test_they_are_off_by_default(pair):
    """They cost a look at each byte at both ends."""
    a, b = pair
    assert "DONE" == finish(a, xfer(a, b, "WRITE", b"told"))

    assert {"A": [b"told"]} == notifs(b)


@pytest.mark.parametrize("pair", [(0, "A")], indirect=True)
def test_the_other_end_without_them_is_an_error(pair):
    """A user who set the variable at one end only would think that his bytes are compared."""
    a, b = pair
    with pytest.raises(bindings.nixlBackendError, match="TEP_NIXL_CHECKSUMS is not set there"):
        finish(a, xfer(a, b, "READ"))


@pytest.mark.parametrize("pair", [(0, "AB")], indirect=True)
@pytest.mark.parametrize("key", [(0, 1, 2, 3), None])
def test_a_question_about_memory_that_is_not_there_is_answered(pair, key):
    """It comes from a peer: rows beyond a region, or of no region, would be read."""
    _, b = pair
    key = key or next(iter(b._regions))
    found = b._sums(wire.WantSums(7, [wire.Part(key, PAGE, [b.memory.nbytes - 1])]))

    assert (7, []) == (found.number, found.values)
    assert found.why.startswith("BadRequest" if key in b._regions else "KeyError")


@pytest.mark.parametrize("pair", [(0, "AB")], indirect=True)
def test_an_agent_that_is_lost_meanwhile_fails_what_waits_for_it(pair, monkeypatch):
    """It stayed PROC for ever."""
    a, b = pair
    monkeypatch.setattr(b, "_sums", lambda _: wire.Sums(10**6, []))
    handle = xfer(a, b, "READ")
    a.transfer(handle)
    for _ in range(1000):
        assert "PROC" == a.check_xfer_state(handle)
    with a.lock:
        a._on_lost(a._channel(a.remotes["B"]), "it is dead")
    with pytest.raises(bindings.nixlRemoteDisconnectError, match="it is dead"):
        a.check_xfer_state(handle)
    assert {} == a._uncompared


@pytest.mark.parametrize("pair", [(0, "AB")], indirect=True)
def test_an_answer_that_was_lost_is_asked_for_again(pair, monkeypatch):
    """Its sender can tell nobody."""
    a, b = pair
    answer, asked = b._sums, []

    def sums(message):
        asked.append(message.number)
        return answer(message) if len(asked) > 2 else wire.Sums(10**6, [])

    monkeypatch.setattr(b, "_sums", sums)
    monkeypatch.setattr("tep.compat.nixl.api._ASK_AGAIN_S", 1e-3)

    assert "DONE" == finish(a, xfer(a, b, "WRITE"))
    assert 3 == len(asked)


@pytest.mark.parametrize("pair", [(0, "AB")], indirect=True)
def test_rows_that_are_too_many_for_a_question_are_an_error(pair, monkeypatch):
    """The error is raised on the engine's thread: the transfer stayed PROC for ever."""
    a, b = pair
    monkeypatch.setattr("tep.compat.nixl.channel.BODY_MAX", 40)
    with pytest.raises(bindings.nixlBackendError, match="checksums: a message of .* bytes"):
        finish(a, xfer(a, b, "READ"))
    assert {} == a._uncompared

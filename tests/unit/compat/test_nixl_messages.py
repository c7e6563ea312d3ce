"""Notifications and messages of tep.compat.nixl: of any length, from whom they say, none lost."""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

import tep
from tep.compat.nixl import api, bindings, channel, nixl_agent, wire
from tep.control.membership import PeerChange, PeerEvent

WAIT_S = 60.0
NBYTES = 4096


@pytest.fixture
def agents(monkeypatch):
    """Two agents that know each other, each with a registered buffer."""
    monkeypatch.setenv("TEP_NIXL_BACKEND", "local")
    made = [nixl_agent(name) for name in ("A", "B")]
    for agent in made:
        agent.memory = np.full(NBYTES, ord(agent.name), np.uint8)
        agent.register_memory([(agent.memory.ctypes.data, NBYTES, 0, "")], "DRAM")
    for agent, other in (made, reversed(made)):
        agent.add_remote_agent(other.get_agent_metadata())
    yield made
    for agent in made:
        agent.close()


def until(condition):
    end_s = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < end_s, "it did not come to that"
    return found


def notifs(agent, n, who="A"):
    """Wait for n notifications of an agent."""
    until(lambda: len(agent.update_notifs().get(who, ())) >= n)
    return agent.notifs.pop(who)


def xfer(a, b, op="WRITE", notif=b"", nbytes=64):
    mine, theirs = (
        a.get_xfer_descs([(one.memory.ctypes.data, nbytes, 0)], "DRAM") for one in (a, b)
    )
    return a.initialize_xfer(op, mine, theirs, b.name, notif)


def finish(agent, handle):
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    return state


def lose(agent, monkeypatch, kinds, count=10**9):
    """Lose messages of some kinds that an agent sends, as a net that fails; return their bodies."""
    lost, send = [], agent.engine.submit_send

    def submit_send(addr, raw, *, on_done):
        frame = msgspec.msgpack.decode(raw, type=channel.Frame)
        whole = frame.last and 0 < len(frame.body) < channel.PIECE
        if whole and isinstance(wire.decode(frame.body), kinds) and len(lost) < count:
            lost.append(frame.body)
            raise tep.BusyError("lost by the test")
        return send(addr, raw, on_done=on_done)

    monkeypatch.setattr(agent.engine, "submit_send", submit_send)
    return lost


@pytest.mark.slow
@pytest.mark.parametrize(
    "nbytes", [0, 1, 6143, 6144, 6145, 65_535, 65_536, 70_000, 1 << 20, 1 << 22]
)
def test_notifications_of_any_length_arrive(agents, nbytes):
    """From 65,536 bytes on they vanished: no error, no word, and a WRITE said DONE."""
    a, b = agents
    raw = bytes(np.arange(nbytes, dtype=np.uint32).astype(np.uint8))
    a.send_notif("B", raw)
    assert "DONE" == finish(a, xfer(a, b, notif=raw + b"w"))
    assert "DONE" == finish(a, xfer(a, b, "READ", notif=raw + b"r"))
    a.send_notif("B", b"after")

    assert [raw, raw + b"w", raw + b"r", b"after"] == notifs(b, 4)


def test_what_is_too_long_is_refused_at_once_and_takes_nothing_along(agents):
    """Small neighbours of a long notification were lost with it, 4 to 30 of 100."""
    a, b = agents
    handle = xfer(a, b)
    long = bytes(api.NOTIF_MAX + 1)
    for k in range(50):
        a.send_notif("B", b"a%d" % k)
    for call in (
        lambda: a.send_notif("B", long),
        lambda: a.transfer(handle, long),
        lambda: xfer(a, b, notif=long),
    ):
        with pytest.raises(bindings.nixlInvalidParamError, match="bytes; .* are possible"):
            call()
    for k in range(50):
        a.send_notif("B", b"b%d" % k)

    assert [b"%s%d" % (x, k) for x in (b"a", b"b") for k in range(50)] == notifs(b, 100)


def test_long_and_short_ones_stay_in_order(agents):
    """Pieces of many messages are on their way together."""
    a, b = agents
    sent = [bytes([k]) * (1 + k * 9000 % 70_000) for k in range(200)]
    for one in sent:
        a.send_notif("B", one)

    assert sent == notifs(b, 200)


def test_a_lost_notification_is_an_error_of_the_next_call_that_names_the_agent(agents, monkeypatch):
    """Nobody was told: in NIXL's protocols a notification is a request which somebody waits for."""
    a, b = agents
    handle = xfer(a, b)
    calls = (
        lambda: a.send_notif("B", b"not sent"),
        lambda: a.transfer(handle),
        lambda: xfer(a, b),
    )
    for call in calls:
        a.send_notif("B", b"before")
        with monkeypatch.context() as patch:
            assert not lose(a, patch, wire.Notif)
            a.send_notif("B", b"lost")
        with pytest.raises(bindings.nixlRemoteDisconnectError, match="1 earlier .*by the test"):
            call()
        a.send_notif("B", b"after")
        assert [b"before", b"after"] == notifs(b, 2)


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_a_transfer_is_done_when_its_notification_is_there(agents, monkeypatch, op):
    """It said DONE, and its target never heard of it."""
    a, b = agents
    handle = xfer(a, b, op, b"told")
    assert "DONE" == finish(a, handle)
    with monkeypatch.context() as patch:
        lose(a, patch, (wire.Written, wire.Notif))
        with pytest.raises(bindings.nixlRemoteDisconnectError, match="its notification is lost"):
            finish(a, handle)
    assert "DONE" == finish(a, handle)

    assert [b"told", b"told"] == notifs(b, 2)


def test_the_number_of_a_write_whose_word_was_lost_is_not_used_again(agents, monkeypatch):
    """Its rows stay counted at the target: a later one would be notified before its bytes."""
    a, b = agents
    assert "DONE" == finish(a, xfer(a, b))
    (numbers,) = a._granted.values()
    lose(a, monkeypatch, wire.Written)
    assert "DONE" == finish(a, xfer(a, b)), "nobody waits for a notification"
    until(lambda: numbers.burnt)


def test_a_question_that_is_lost_fails_its_transfer(agents, monkeypatch):
    """It stayed PROC for ever."""
    a, b = agents
    lose(a, monkeypatch, wire.WantGrant)
    handle = xfer(a, b)
    with pytest.raises(bindings.nixlRemoteDisconnectError) as raised:
        finish(a, handle)
    del handle, raised
    gc.collect()
    a.get_new_notifs()
    assert {} == a._requests, "a handle that was dropped is kept for ever"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["removed", "closed"])
def test_a_transfer_under_way_with_an_agent_that_goes_fails_and_no_other(agents, monkeypatch, how):
    """It stayed PROC for ever, or took those with other agents along."""
    a, b = agents
    other = nixl_agent("C")
    try:
        other.memory = np.zeros(NBYTES, np.uint8)
        other.register_memory([(other.memory.ctypes.data, NBYTES, 0, "")], "DRAM")
        a.add_remote_agent(other.get_agent_metadata())
        other.add_remote_agent(a.get_agent_metadata())
        for one in (b, other):
            lose(one, monkeypatch, wire.Grant)
        gone, stays = xfer(a, b), xfer(a, other)
        assert ["PROC", "PROC"] == [a.transfer(one) for one in (gone, stays)]
        if how == "removed":
            a.remove_remote_agent("B")
        else:
            b.close()
        with pytest.raises(bindings.nixlRemoteDisconnectError, match="'B'"):
            until(lambda: a.check_xfer_state(gone) != "PROC")
        assert "PROC" == a.check_xfer_state(stays)
        a.release_xfer_handle(stays)
    finally:
        other.close()


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_rows_that_the_engine_refuses_fail_their_transfer_and_end_it(agents, monkeypatch, op):
    """The first part was posted, the second was not: nobody waited for the first."""
    a, b = agents
    name = {"WRITE": "submit_paged_writes", "READ": "submit_paged_reads"}[op]
    submit, posted, ended = getattr(a.engine, name), [], []

    def refuse_second(*args, on_done):
        if posted:
            raise tep.BusyError("refused by the test")
        posted.append(on_done)
        return submit(*args, on_done=ended.append)

    rows = [[(one.memory.ctypes.data + 64 * k, 8 + 8 * k, 0) for k in range(2)] for one in (a, b)]
    mine, theirs = (a.get_xfer_descs(some, "DRAM") for some in rows)
    handle = a.initialize_xfer(op, mine, theirs, "B")
    with monkeypatch.context() as patch:
        patch.setattr(a.engine, name, refuse_second)
        with pytest.raises(bindings.Error, match="refused by the test"):
            finish(a, handle)
    (request,) = a._requests.values()
    assert request.under_way, "a NIC has the first part: its memory may be touched"
    until(lambda: ended)
    posted[0](ended[0])
    assert not request.under_way
    assert "DONE" == finish(a, handle), "it can be posted again"


def test_an_answer_that_is_lost_is_asked_for_again(agents, monkeypatch):
    """Its sender can tell nobody; who waits for it asks."""
    monkeypatch.setattr(api, "_ASK_AGAIN_S", 0.01)
    a, b = agents
    lost = lose(b, monkeypatch, wire.Grant, 4)
    assert "DONE" == finish(a, xfer(a, b, notif=b"x"))
    assert 4 == len(lost)


def test_to_notify_the_dead_is_an_error(agents):
    """It returned, and nothing was there."""
    a, b = agents
    b.close()

    def notify():
        try:
            a.send_notif("B", b"x")
        except bindings.nixlRemoteDisconnectError:
            return True
        return False

    until(notify)
    until(notify)
    a.channels._on_peer(
        PeerEvent(
            peer=a.remotes["B"].addr.name,
            epoch=a.remotes["B"].addr.epoch,
            kind=PeerChange.LOST,
            reason="no answer",
        )
    )
    for _ in range(3):
        with pytest.raises(bindings.nixlRemoteDisconnectError, match="it is lost"):
            a.send_notif("B", b"x")


def forged(value, /, **fields):
    return msgspec.structs.replace(value, **fields)


def test_a_notification_counts_only_from_the_agents_own_engine(agents):
    """A third engine said "all pages are in place" for another agent, and ended its stream."""
    friend, victim = agents
    friend.send_notif("B", b"1")
    with tep.TransferEngine.open("local", name="evil") as evil:
        true, own = friend.engine.main_address, evil.main_address
        claims = [
            true,
            forged(true, domains=own.domains),
            forged(true, epoch=2**62, domains=own.domains),
            forged(true, domains=(*own.domains, *true.domains), link_bps=(0, 0)),
            own,
        ]
        for seq in (0, 1, 10**9):
            for claim in claims:
                body = wire.encode(wire.Notif(b"forged"))
                frame = channel.Frame("A", claim.to_bytes(), seq, seq, ((0, seq),), True, body)
                raw = msgspec.msgpack.encode(frame)
                evil.submit_send(victim.engine.main_address, raw).wait(WAIT_S)
        friend.send_notif("B", b"2")
        assert [b"1", b"2"] == notifs(victim, 2)
        assert not victim.update_notifs().get("A")


def test_a_stranger_takes_no_counts(agents):
    """Written with another agent's immediate used up its rows."""
    a, b = agents
    assert "DONE" == finish(a, xfer(a, b, notif=b"x"))
    (grant,) = [one for who, one in b._grants.items() if who.name == "A"]
    other = b.channels.to("C", b.channels.to("B", a.engine.main_address).addr)
    with b.lock:
        b._on_message(other, wire.encode(wire.Written(grant.start, 1, b"forged")))
    assert 1 == b.channels.garbled


def test_an_agent_that_is_not_known_is_heard_once_the_name_is_its_own(agents, monkeypatch):
    """A restarted agent speaks before its new metadata has come; the old one is still in force."""
    a, b = agents
    a.send_notif("B", b"first")
    assert [b"first"] == notifs(b, 1)
    again = nixl_agent("A")
    try:
        again.add_remote_agent(b.get_agent_metadata())
        again.send_notif("B", b"second")

        def waits():
            with b.lock:
                return any(one.held for one in b.channels._known.values())

        until(waits)
        assert {} == b.get_new_notifs(), "the former one lives"
        a.close()
        again.send_notif("B", b"third")

        def heard():
            again.send_notif("B", b"poke")
            return b"third" in b.update_notifs().get("A", ())

        until(heard)
        assert [b"second", b"third"] == b.notifs["A"][:2]
    finally:
        again.close()


def test_agents_that_have_spoken_are_bounded(agents, monkeypatch):
    """Each engine is one agent; of many the oldest that nobody introduced is forgotten."""
    monkeypatch.setattr(channel, "AGENTS_MAX", 4)
    a, b = agents
    a.send_notif("B", b"first")
    assert [b"first"] == notifs(b, 1)
    with tep.TransferEngine.open("local", name="evil") as evil:
        for k in range(20):
            name = f"evil{k}"
            frame = channel.Frame(name, evil.main_address.to_bytes(), 0, 0, (), True, b"x")
            evil.submit_send(b.engine.main_address, msgspec.msgpack.encode(frame)).wait(WAIT_S)
        until(lambda: b.channels.foreign == 19)
    for k in range(8):
        with tep.TransferEngine.open("local", name="evil") as evil:
            frame = channel.Frame(f"e{k}", evil.main_address.to_bytes(), 0, 0, (), True, b"x")
            evil.submit_send(b.engine.main_address, msgspec.msgpack.encode(frame)).wait(WAIT_S)
    a.send_notif("B", b"last")

    assert [b"last"] == notifs(b, 1)
    assert len(b.channels._spoken) <= 4
    assert len(b.channels._known) <= 5


def test_pieces_out_of_order_are_few(monkeypatch):
    """Whoever never sends the first one fills the memory of its peer: 174 MiB by 3,000 of them."""
    monkeypatch.setattr(channel, "EARLY_MAX", 4)
    owner = SimpleNamespace(garbled=0)
    line = channel.Channel(owner, "A", None)
    pieces = [channel.Frame("A", b"", k, 0, (), True, b"%d" % k) for k in range(10)]

    assert [] == [message for piece in pieces[1:] for message in line.take(piece)]
    assert 5 == owner.garbled
    assert [b"0", b"1", b"2", b"3", b"4"] == list(line.take(pieces[0]))
    for k in range(20, 40, 2):  # gaps are no way around it
        assert not list(line.take(channel.Frame("A", b"", -1, 0, ((k, k + 1),), True, b"")))
    assert 5 + 6 == owner.garbled


def test_a_writer_for_whom_no_immediates_are_left_is_told(agents):
    """The grant was none that could be read: the writer asked for ever."""
    a, b = agents
    b._grants = dict.fromkeys(range(1 << 16))
    with pytest.raises(bindings.nixlBackendError, match="no immediate is left"):
        finish(a, xfer(a, b))

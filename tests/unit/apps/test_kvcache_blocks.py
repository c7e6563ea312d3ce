"""KvSender and KvReceiver as an inference engine calls them: by poll(), over real memory."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from tep import BadDescriptor, EngineOptions, TransferEngine, UsageError
from tep.apps.kvcache import Patience
from tep.apps.kvcache.blocks import KvBlocks, KvReceiver, KvSender
from tep.backends.loopback import Hub

PATIENCE = Patience(cancel_s=0.02, request_s=20.0, linger_s=0.1)
TOKENS, HEADS, RUN, LAYERS, BLOCKS = 16, 2, 8, 2, 10


@pytest.fixture
def engines():
    with TransferEngine.open("local") as one, TransferEngine.open("local") as other:
        yield one, other


def cache(engine, order, *, heads=HEADS):
    """A cache of one array a layer, its dimensions in this order."""
    sizes = {"b": BLOCKS, "h": heads, "t": TOKENS, "d": RUN}
    blocks = KvBlocks(engine)
    arrays = []
    for layer in range(LAYERS):
        array = np.zeros([sizes[letter] for letter in order], np.uint8)
        blocks.add(f"{layer}", layer, array, order)
        arrays.append(array.transpose([order.index(letter) for letter in "bhtd"]))
    return blocks, arrays


def join(engines, patience=PATIENCE):
    """A sender and a receiver that know each other, and their arrays."""
    here, sources = cache(engines[0], "bhtd")
    there, sinks = cache(engines[1], "tbhd")
    sender = KvSender(here, patience=patience)
    receiver = KvReceiver(there, patience=patience)
    sender.connect(there.card())
    dice = np.random.default_rng(0)
    for array in sources:
        array[:] = dice.integers(1, 256, array.shape, np.uint8)
    return sender, receiver, sources, sinks


@pytest.fixture
def pair(engines):
    return join(engines)


def poll_until(sides, handles):
    """Poll as an engine's loop does, until all handles are finished; return the events."""
    events, end_s = [], time.monotonic() + 60
    while not all(handle.finished for handle in handles):
        assert time.monotonic() < end_s, [(h.request, h.state, h.reason) for h in handles]
        for side in sides:
            events += [(event.request, event.state) for event in side.poll()]
    for side in sides:
        events += [(event.request, event.state) for event in side.poll()]
    return events


def test_blocks_arrive_by_poll_alone(pair):
    """An engine has no event loop to spare: its own loop's poll must be enough."""
    sender, receiver, sources, sinks = pair
    load = receiver.expect("r", [[7, 1, 4]])
    send = sender.begin("r", [[2, 3, 9, 5]], load.ticket, ntokens=4 * TOKENS - 3)
    for upto in (TOKENS + 2, 4 * TOKENS - 3):
        for layer in range(LAYERS):
            send.layer_done(layer, upto)

    events = poll_until((sender, receiver), (send, load))

    assert [("r", "done"), ("r", "done")] == events
    assert load.ok
    assert send.ok
    for source, sink in zip(sources, sinks, strict=True):
        assert (source[[3, 9, 5]] == sink[[7, 1, 4]]).all()
        assert not sink[[0, 2, 3, 5, 6, 8, 9]].any()


def test_a_stale_ticket_is_refused_by_the_receiver(pair):
    """Else blocks that belong to another request by now are overwritten with an old one's."""
    sender, receiver, _, sinks = pair
    stale = receiver.expect("r", [[1, 2]])
    stale.cancel()
    assert stale.finished, "nobody had claimed it, so its blocks are free at once"
    load = receiver.expect("r", [[1, 2]])
    send = sender.begin("r", [[3, 4]], stale.ticket)
    for layer in range(LAYERS):
        send.layer_done(layer)

    poll_until((sender, receiver), (send,))

    assert not send.ok
    assert "not expected here" in send.reason
    assert "open" == load.state
    assert not any(sink.any() for sink in sinks)
    load.cancel()


def test_a_ticket_is_claimed_once_by_each_rank(pair):
    """A rank that claimed twice would stand for another rank, whose heads never came."""
    sender, receiver, sources, sinks = pair
    load = receiver.expect("r", [[7]])
    sends = [sender.begin("r", [[2]], load.ticket) for _ in range(2)]
    for send in sends:
        for layer in range(LAYERS):
            send.layer_done(layer)

    poll_until((sender, receiver), (load, *sends))

    assert load.ok
    assert [False, True] == sorted(send.ok for send in sends)
    (why,) = [send.reason for send in sends if not send.ok]
    assert "has claimed" in why or "not any more" in why
    assert (sources[0][2] == sinks[0][7]).all()


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_cancel_from_either_side_names_the_blocks_that_failed(pair, side):
    """The decoder must know which blocks to recompute, the prefiller when to free them."""
    sender, receiver, _, _ = pair
    load = receiver.expect("r", [[1, 2]])
    send = sender.begin("r", [[3, 4]], load.ticket)
    send.layer_done(0)
    (send if side == "sender" else load).cancel("enough")

    events = poll_until((sender, receiver), (send, load))

    assert 2 == events.count(("r", "failed")) == events.count(("r", "free"))
    assert "enough" in load.reason
    assert "enough" in send.reason or "not expected here" in send.reason
    assert ((1, 2),) == load.failed_blocks
    assert ((3, 4),) == send.failed_blocks


def test_what_nobody_writes_fails_at_its_deadline(pair):
    """A prefiller that was never told must not hold a decoder's blocks for ever."""
    _, receiver, _, _ = pair
    load = receiver.expect("r", [[1]], timeout_s=0.01)

    poll_until((receiver,), (load,))

    assert "nobody claimed" in load.reason


def test_a_dead_sender_is_fenced_by_word(pair):
    """Only who runs the processes can know that one is dead; then its blocks must come back."""
    sender, receiver, _, _ = pair
    addr = sender.blocks.engine.main_address
    load = receiver.expect("r", [[1, 2]])
    send = sender.begin("r", [[3, 4]], load.ticket)
    granted(sender, receiver)
    sender.blocks.engine.close()
    receiver.fenced(addr.name, addr.epoch)

    poll_until((receiver,), (load,))

    assert "is dead" in load.reason or "was lost" in load.reason
    assert "free" == load.state
    assert "open" == send.state


def granted(sender, receiver):
    """Poll until the sender may write: its grant has taken an immediate."""
    end_s = time.monotonic() + 60
    while not receiver.imms.live:
        assert time.monotonic() < end_s
        sender.poll()


@pytest.mark.slow
def test_a_silent_sender_is_removed_and_may_come_back(monkeypatch):
    """With fences, blocks come back without the sender's answer; its old sends end first."""
    hub = Hub()
    often = EngineOptions(probe_first_s=0.05)
    with (
        TransferEngine.open("loopback", hub=hub, name="one", options=often) as one,
        TransferEngine.open("loopback", hub=hub, name="other") as other,
    ):
        sender, receiver, sources, sinks = join((one, other))
        load = receiver.expect("old", [[1, 2]], timeout_s=0.2)
        old = sender.begin("old", [[3, 4]], load.ticket)
        granted(sender, receiver)
        monkeypatch.setattr(sender.blocks, "send", lambda *_: None)
        poll_until((receiver,), (load,))
        monkeypatch.undo()

        assert "free" == load.state
        assert "before its deadline" in load.reason
        assert receiver.removed
        old.layer_done(0)
        for array in sinks:
            array[[1, 2]] = 0
        tries, end_s = 0, time.monotonic() + 60
        while not load.ok:  # its rows fail until its paths are opened again
            assert time.monotonic() < end_s, load.reason
            tries += 1
            load = receiver.expect(f"new {tries}", [[5, 6]], timeout_s=2.0)
            new = sender.begin(f"new {tries}", [[3, 4]], load.ticket)
            for layer in range(LAYERS):
                new.layer_done(layer)
            poll_until((sender, receiver), (load, new))

        poll_until((sender, receiver), (old,))
        assert "done" == new.state
        for source, sink in zip(sources, sinks, strict=True):
            assert (source[[3, 4]] == sink[[5, 6]]).all()
            assert not sink[[1, 2]].any(), "written after it was removed"


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_a_slow_sender_is_waited_for_as_long_as_a_request_may_take(ends):
    """A sender that is removed because a NIC of it is slow loses its other requests as well."""
    patience = replace(PATIENCE, linger_s=20.0, request_s=20.0 if ends else 0.5)
    with (
        TransferEngine.open("loopback", hub=(hub := Hub()), name="one") as one,
        TransferEngine.open("loopback", hub=hub, name="other") as other,
    ):
        sender, receiver, _, _ = join((one, other), patience)
        load = receiver.expect("r", [[1, 2]])
        send = sender.begin("r", [[3, 4]], load.ticket)
        granted(sender, receiver)
        (claim,) = send._claims
        claim.under_way += 1  # a row that its NIC keeps
        load.cancel()
        if ends:
            (grant,) = load._grants.values()
            for asked in (True, False) * 3:  # it is asked again, and answers each time
                while bool(grant.asked) is not asked:
                    sender.poll()
                    receiver.poll()
            assert "failed" == load.state
            assert not receiver.removed
            claim.under_way -= 1
            sender._settle(send)
        poll_until((sender, receiver), (load,))
        assert "free" == load.state
        assert ends != bool(receiver.removed)


BAD = {
    "a ticket of 'r'": lambda s, r, load: s.begin("other", [[1, 2]], load.ticket),
    "expects [2] blocks, here are [1]": lambda s, r, load: s.begin("r", [[1]], load.ticket),
    "lists a block twice": lambda s, r, load: s.begin("r", [[1, 1]], load.ticket),
    "blocks 1 .. 10; '0' has 0 .. 9": lambda s, r, load: r.expect("r", [[1, 10]]),
    "2 lists of blocks, the cache has 1": lambda s, r, load: r.expect("r", [[1], [2]]),
    "no layer 2": lambda s, r, load: s.begin("r", [[1, 2]], load.ticket).layer_done(2),
    "no Ticket": lambda s, r, load: s.begin("r", [[1, 2]], b"nonsense"),
    "no Card": lambda s, r, load: s.connect(load.ticket),
    "which is unknown": lambda s, r, load: (
        s._peers.clear(),
        s.begin("r", [[1, 2]], load.ticket),
    ),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_input_is_named(pair, text):
    """A wrong list that is taken writes somebody else's blocks."""
    sender, receiver, _, _ = pair
    load = receiver.expect("r", [[1, 2]])

    with pytest.raises((UsageError, BadDescriptor)) as caught:
        BAD[text](sender, receiver, load)

    assert text in str(caught.value)


@pytest.mark.parametrize(("rank", "tp"), [(2, 2), (-1, 2), (0, 0), (1, 1)])
def test_a_rank_that_its_group_does_not_have_is_refused(engines, rank, tp):
    """Its blocks would be sent by nobody."""
    KvBlocks(engines[0], tp=2, rank=1)
    with pytest.raises(UsageError, match=f"rank={rank} of tp={tp}"):
        KvBlocks(engines[0], tp=tp, rank=rank)


def test_another_layout_is_refused_before_anything_moves(engines):
    """Two models whose caches differ would exchange bytes that mean something else."""
    here, _ = cache(engines[0], "bhtd")
    there, _ = cache(engines[1], "bthd", heads=4)
    sender = KvSender(here)
    KvReceiver(there)

    with pytest.raises(UsageError, match=r"(?s)another KV cache.*heads=2.*heads=4"):
        sender.connect(there.card())


@pytest.mark.parametrize(
    ("array", "axes", "text"),
    [
        (np.zeros((2, 2), np.uint8), "bx", "letters b and d"),
        (np.zeros((2, 2), np.uint8), "hd", "letters b and d"),
        (np.zeros((2, 2), np.uint8), "bt", "letters b and d"),
        (np.zeros((2, 2), np.uint8), "bhd", "names 3 dimensions"),
        (np.zeros((4, 4), np.float32)[:, ::2], "bd", "8 bytes apart"),
        (np.zeros((2, 3, 4), np.uint8)[::-1], "bhd", "negative"),
    ],
)
def test_a_tensor_that_cannot_be_described_is_refused(engines, array, axes, text):
    """A stride that is ignored sends the neighbour's bytes."""
    with pytest.raises(UsageError, match=text):
        KvBlocks(engines[0]).add("0", 0, array, axes)

"""Messages to a KV cache are bound to the engine that sent them, and fill no memory."""

from __future__ import annotations

import os
import time

import msgspec
import numpy as np
import pytest

from tep import BadDescriptor, NetAddr, TransferEngine, UsageError
from tep.apps.kvcache.blocks import KvBlocks, KvReceiver, KvSender, cache
from tep.apps.kvcache.blocks.messages import (
    Cancel,
    Card,
    Ended,
    Go,
    Note,
    Over,
    Refuse,
    decode_as,
    encode,
)
from tep.apps.kvcache.layout import Placed

WAIT_S = 60.0


@pytest.fixture
def engines():
    """A victim, a friend of it, and a third."""
    made = [TransferEngine.open("local", name=name) for name in ("victim", "friend", "evil")]
    yield made
    for one in made:
        one.close()


def blocks_of(engine, *, by_address=False):
    blocks = KvBlocks(engine)
    if by_address:
        blocks.name_by_address()
    blocks.add("k", 0, np.zeros((8, 1, 16, 8), np.uint8), "bhtd")
    return blocks


def until(condition):
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, "it did not come to that"
        os.sched_yield()


def forged(value, /, **fields):
    return msgspec.structs.replace(value, **fields)


@pytest.mark.parametrize("by_address", [False, True])
def test_a_note_counts_only_from_the_engine_that_it_names(engines, by_address):
    """A third engine spoke as a prefiller, and said which of its processes had died."""
    victim, friend, evil = engines
    blocks, heard = blocks_of(victim, by_address=by_address), []
    blocks.on_note(lambda peer, body: heard.append((peer, body)))
    blocks.card()
    honest = blocks_of(friend, by_address=by_address)
    honest.on_note(lambda *_: None)
    honest.send_note(victim.main_address, 1, b"true")
    until(lambda: heard)
    epoch, true, own = victim.main_address.epoch, friend.main_address, evil.main_address
    claims = [
        true,
        forged(true, domains=own.domains),
        forged(true, epoch=2**63, domains=own.domains),
        forged(true, domains=(*own.domains, *true.domains), link_bps=(0, 0)),
        forged(own, domains=(*own.domains, *true.domains), link_bps=(0, 0)),
    ]
    for k, claim in enumerate(claims):
        note = Note(epoch, k, claim.to_bytes(), 0, 1, b"forged")
        evil.submit_send(victim.main_address, encode(note)).wait(WAIT_S)
    honest.send_note(victim.main_address, 2, b"true again")
    until(lambda: len(heard) + blocks.foreign >= 2 + len(claims))
    peer = blocks.named(true)

    assert [(peer, b"true"), (peer, b"true again")] == [one for one in heard if one[0] == peer]
    if not by_address:
        assert len(claims) == blocks.foreign
    victim.submit_send(peer, b"still the same peer").wait(WAIT_S)


def test_one_engine_is_one_peer(engines):
    """Each name that it takes would be another peer that is remembered."""
    victim, _, evil = engines
    blocks, heard = blocks_of(victim, by_address=True), []
    blocks.on_note(lambda peer, body: heard.append(peer))
    blocks.card()
    for k in range(20):
        claim = forged(evil.main_address, name=f"evil{k}")
        note = Note(victim.main_address.epoch, k, claim.to_bytes(), 0, 1, b"x")
        evil.submit_send(victim.main_address, encode(note)).wait(WAIT_S)
    until(lambda: len(heard) + blocks.foreign == 20)

    assert 1 == len(heard)


def test_a_name_passes_on_once_its_engine_is_lost(engines):
    """A prefiller that was started again must be heard; one that lives keeps its name."""
    victim, friend, _ = engines
    blocks, heard = blocks_of(victim), []
    blocks.on_note(lambda peer, body: heard.append(body))
    blocks.card()
    blocks_of(friend).send_note(victim.main_address, 1, b"first")
    until(lambda: heard)
    with TransferEngine.open("local", name="friend") as again:
        claim = forged(again.main_address, epoch=friend.main_address.epoch + 1)
        note = encode(Note(victim.main_address.epoch, 1, claim.to_bytes(), 0, 1, b"second"))
        again.submit_send(victim.main_address, note).wait(WAIT_S)
        until(lambda: blocks.foreign)
        friend.close()
        until(lambda: again.submit_send(victim.main_address, note).wait(WAIT_S) and heard[1:])

    assert b"second" == heard[1]


def test_unfinished_notes_are_bounded(engines, monkeypatch):
    """One peer filled the memory with pieces of a note that never ends, and with many notes."""
    monkeypatch.setattr(cache, "NOTES_PEER_MAX", 8)
    monkeypatch.setattr(cache, "PIECES_PEER_MAX", 64)
    victim, friend, evil = engines
    blocks, heard = blocks_of(victim), []
    blocks.on_note(lambda peer, body: heard.append(body))
    blocks.card()
    epoch, me = victim.main_address.epoch, evil.main_address.to_bytes()

    def send(number, part, parts, body=b"x" * 100):
        note = Note(epoch, number, me, part, parts, body)
        evil.submit_send(victim.main_address, encode(note)).wait(WAIT_S)

    for k in range(200):
        send(k, 0, 2)
        send(5, k, 4096)
    for parts in (4097, 10**9):
        send(5, 1, parts)
    send(6, 0, 2, b"x" * (cache.NOTE_BYTES + 1))
    until(lambda: blocks.garbled >= 3)
    (kept,) = blocks._unfinished.values()
    assert len(kept) <= 8
    assert sum(map(len, kept.values())) <= 64
    honest = blocks_of(friend)
    for number in range(50):
        honest.send_note(victim.main_address, number, bytes([number]) * (3 * cache.NOTE_BYTES))
    until(lambda: len(heard) == 50)

    assert {bytes([n]) * (3 * cache.NOTE_BYTES) for n in range(50)} == set(heard)
    with pytest.raises(UsageError, match="bytes; .* are possible"):
        honest.send_note(victim.main_address, 99, b"x" * (cache.NOTE_PARTS * cache.NOTE_BYTES + 1))


def test_answers_to_a_claim_count_only_from_its_receiver(engines):
    """A forged Go has blocks written under another one's immediate; a forged Cancel ends them."""
    victim, friend, evil = engines
    receiver, sender = KvReceiver(blocks_of(friend)), KvSender(blocks_of(victim))
    sender.connect(receiver.blocks.card())
    load = receiver.expect("r", [[1]])
    monitor = sender.blocks
    with receiver.blocks.lock:  # the receiver does not answer yet
        send = sender.begin("r", [[2]], load.ticket)
        (number,) = sender._claims
        epoch, me = victim.main_address.epoch, evil.main_address.to_bytes()
        for message in (
            Go(epoch, number, 5),
            Refuse(epoch, number, "forged"),
            Cancel(epoch, number, me, 1, "forged"),
            Over(epoch, number),
        ):
            evil.submit_send(victim.main_address, encode(message)).wait(WAIT_S)
        until(lambda: monitor.foreign >= 4)
        assert "open" == send.state
        assert sender._claims[number].imm is None
    end = Ended(
        friend.main_address.epoch, number, victim.main_address.to_bytes(), 1, (), False, "", {}
    )
    evil.submit_send(friend.main_address, encode(end)).wait(WAIT_S)
    until(lambda: receiver.blocks.foreign)
    send.layer_done(0)

    def over():
        sender.poll()
        receiver.poll()
        return load.finished

    until(over)
    assert load.ok, load.reason


def test_a_card_is_its_own_engines_memory(engines):
    """Blocks would be written into a third engine's memory, or beyond the end of a region."""
    victim, friend, evil = engines
    sender, theirs = KvSender(blocks_of(victim)), blocks_of(friend)
    card = msgspec.msgpack.decode(theirs.card(), type=Card)
    (place,) = decode_as(tuple[Placed, ...], card.tensors)

    def placed(**fields: object) -> object:
        return forged(card, tensors=msgspec.Raw(encode((forged(place, **fields),))))

    bad = {
        "another engine's memory": forged(card, addr=evil.main_address.to_bytes()),
        "rank 1 of 1": forged(card, rank=1),
        "ends at": placed(block_stride=2**47),
        "no region 1": placed(region=1),
        "no tuple": placed(blocks=0),
    }
    for text, one in bad.items():
        with pytest.raises(BadDescriptor, match=text):
            sender.connect(encode(one))
    with pytest.raises(BadDescriptor, match="handed in the card of"):
        sender.connect(encode(card), evil.main_address)
    found = sender.connect(encode(card), friend.main_address)
    assert (1, 0) == (found.tp, found.rank)


def test_names_by_address_are_nobody_elses():
    """Whatever else an address says: two that differ have different names."""
    addr = NetAddr("local", "n", 5, (b"abc", b"xyz"), (1, 2))
    others = [
        addr,
        forged(addr, name="m"),
        forged(addr, epoch=6),
        forged(addr, domains=(b"abc", b"xy")),
        forged(addr, link_bps=(1, 3)),
        addr.by_address(),
        forged(addr, name="n" * 10_000),
    ]
    names = [one.by_address().name for one in others]

    assert len(others) == len(set(names))
    assert max(map(len, names)) < 110
    assert names == [one.by_address().name for one in others]

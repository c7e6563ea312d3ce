"""Messages of a KV cache may be lost: of each kind the first ones are, and all still ends well."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import numpy as np
import pytest

import tep
from tep.apps.kvcache import Patience
from tep.apps.kvcache.blocks import KvBlocks, KvReceiver, KvSender
from tep.apps.kvcache.blocks.messages import (
    Cancel,
    Claim,
    Ended,
    Go,
    Note,
    Over,
    Refuse,
    decode,
)
from tep.integrations.vllm.terms import Load, Orders, Source, Step, Terms, Told, Want
from tep.integrations.vllm.terms import decode as decode_note
from tep.integrations.vllm.worker import Worker

WAIT_S = 60.0
TIMES = 3
PATIENCE = Patience(cancel_s=0.01, request_s=30.0, linger_s=0.1)
TERMS = Terms(beat_s=0.02, lost_after_s=20.0, doubt_s=0.1, load_s=30.0, lease_s=20.0)


def lose(engine, patch, is_it, *, raises):
    """Lose the first messages of a kind, by an exception or by their end; return them."""
    lost, send = [], engine.submit_send

    def submit_send(addr, payload, *, on_done):
        message = decode(payload)
        if not is_it(message) or len(lost) >= TIMES:
            return send(addr, payload, on_done=on_done)
        lost.append(message)
        if raises:
            raise tep.BusyError("lost by the test")
        on_done(SimpleNamespace(error="lost by the test"))
        return None

    patch.setattr(engine, "submit_send", submit_send)
    return lost


def until(condition, *sides):
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, "it did not come to that"
        for side in sides:
            side.poll()
        os.sched_yield()


@pytest.fixture
def engines():
    with tep.TransferEngine.open("local") as one, tep.TransferEngine.open("local") as other:
        yield one, other


def blocks_of(engine, fill):
    blocks, memory = KvBlocks(engine), np.full((8, 1, 16, 8), fill, np.uint8)
    blocks.add("k", 0, memory, "bhtd")
    return blocks, memory


@pytest.mark.slow
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("kind", [Claim, Go, Ended, Over, Cancel, Refuse])
def test_each_message_of_a_transfer_is_said_again(engines, monkeypatch, kind, raises):
    """A grant or an end that is said once is waited for, or keeps blocks out of use, for ever."""
    (here, _), (there, memory) = (blocks_of(*one) for one in zip(engines, (7, 0), strict=True))
    sender, receiver = KvSender(here, patience=PATIENCE), KvReceiver(there, patience=PATIENCE)
    sender.connect(there.card())
    load = receiver.expect("r", [[1, 2]])
    ticket = load.ticket
    if kind is Refuse:
        load.cancel()
        until(lambda: load.finished, receiver)
    lost = [
        lose(engine, monkeypatch, lambda one: isinstance(one, kind), raises=raises)
        for engine in engines
    ]
    send = sender.begin("r", [[3, 4]], ticket)
    if kind is Cancel:
        until(lambda: receiver.imms.live, sender, receiver)
        load.cancel()  # it was granted, and nothing of it was written
    else:
        send.layer_done(0)
    until(lambda: send.finished and load.finished, sender, receiver)
    until(lambda: sender.idle and receiver.idle, sender, receiver)

    assert TIMES == sum(map(len, lost))
    if kind not in {Cancel, Refuse}:
        assert load.ok
        assert send.ok
        assert (memory[1:3] == 7).all()


NOTES = {
    "load": lambda note: isinstance(note, Want) and note.kind == "load",
    "keep": lambda note: isinstance(note, Want) and note.kind == "keep",
    "drop": lambda note: isinstance(note, Want) and note.kind == "drop",
    **{
        state: lambda note, state=state: isinstance(note, Told) and note.state == state
        for state in ("taken", "kept", "gone", "card")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("what", NOTES)
def test_each_note_of_the_vllm_connector_is_said_again(engines, monkeypatch, what):
    """A word that was lost kept blocks for their whole lease, or a request for its whole time."""
    (here, _), (there, memory) = (blocks_of(*one) for one in zip(engines, (7, 0), strict=True))
    here.card()
    there.card()
    prefiller, decoder = Worker(here, TERMS), Worker(there, TERMS)

    def is_it(message):
        whole = isinstance(message, Note) and message.parts == 1
        return whole and NOTES[what](decode_note(message.body))

    lost = [lose(engine, monkeypatch, is_it, raises=False) for engine in engines]
    sent, received, gone = set(), set(), set()

    def poll():
        sent.update(prefiller.poll().sent)
        report = decoder.poll()
        received.update(report.received)
        gone.update(report.gone)

    both = SimpleNamespace(poll=poll)
    source = Source("k", (engines[0].main_address.to_bytes(),))
    prefiller.obey(Orders(holds=[Step("p", "k", ((3, 4),), 32, 32)]))
    decoder.obey(Orders(keeps=[source]))
    if what in {"keep", "kept"}:
        until(lambda: TIMES == sum(map(len, lost)), both)
    if what in {"drop", "gone"}:
        decoder.obey(Orders(drops=[source]))
        until(lambda: "p" in sent and not (decoder.loads.loading or decoder.loads.asks), both)
    else:
        decoder.obey(Orders(loads=[Load("d", source, ((1, 2),))]))
        until(lambda: "p" in sent and "d" in received, both)
        assert (memory[1:3] == 7).all()

    # Who is granted a load knows without the word that it was taken.
    assert sum(map(len, lost)) in ({1, 2, 3} if what == "taken" else {TIMES})

"""No call that vLLM makes in its loop raises, whatever a client, router or instance sends.

An exception out of the scheduler's or a worker's half ends vLLM's engine with all its requests.
"""

from __future__ import annotations

import base64
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tep
from tep.apps.kvcache import KvBlocks
from tep.apps.kvcache.blocks.messages import Card, Ticket
from tep.integrations.vllm.scheduler import Scheduler
from tep.integrations.vllm.terms import Load, Orders, Source, Step, Told, Want, encode
from tep.integrations.vllm.worker import Worker

ADDR = tep.NetAddr("loopback", "p", 5, (b"abc",), (10,))
RANK = base64.b64encode(ADDR.to_bytes()).decode()
PLAIN = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
    *(st.just(RANK), st.just(2**70), st.text(st.characters(), min_size=1)),
)
ANY = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
NAMES = st.sampled_from(["key", "ranks", "ntokens", "digest", "lease_s", "processes", ""])
TEP = ANY | st.dictionaries(NAMES, ANY | st.just([RANK]) | st.just("k"))
PARAMS = ANY | st.fixed_dictionaries(
    {},
    optional={"do_remote_prefill": ANY, "do_remote_decode": ANY, "tep": TEP},
)
NOTHING = SimpleNamespace(
    scheduled_new_reqs=(),
    scheduled_cached_reqs=SimpleNamespace(req_ids=(), new_block_ids=(), num_computed_tokens=()),
    num_scheduled_tokens={},
    preempted_req_ids=None,
)


@pytest.mark.slow
@given(params=PARAMS, prompt=st.none() | st.lists(st.integers(0, 2**31), max_size=40))
def test_any_parameters_of_a_request(params, prompt):
    """They are copied out of an HTTP request."""
    status = SimpleNamespace(name="FINISHED_STOPPED")
    request = SimpleNamespace(
        request_id="r", prompt_token_ids=prompt, kv_transfer_params=params, num_computed_tokens=99,
        status=status,
    )  # fmt: skip
    scheduler = Scheduler([16])
    scheduler.ranks = (ADDR.to_bytes(),)
    scheduler.arrived(request)
    count, later = scheduler.matched(request, 0)
    scheduler.allocated(request, ([1, 2, 3],), count)
    for load in scheduler.orders(NOTHING).loads:
        assert later
        assert isinstance(load.source, Source)
        msgspec.msgpack.encode(load.source.key)
    scheduler.finished(request, ([1, 2, 3],))
    scheduler.orders(NOTHING)


class Prefiller:
    """A worker whose cache has two layers, and a decoder's cache that is like it."""

    def __init__(self):
        self.engines = [
            tep.TransferEngine.open("loopback", name=name) for name in ("prefiller", "decoder")
        ]
        caches = []
        for engine in self.engines:
            blocks = KvBlocks(engine)
            for layer in range(2):
                blocks.add(f"{layer}", layer, np.zeros((8, 2, 4, 8), np.uint8), "bhtd")
            caches.append(blocks)
        self.card = caches[1].card()
        caches[1].name_by_address()
        self.blocks = caches[0]
        self.worker = Worker(caches[0])
        self.peer = caches[0].named(self.engines[1].main_address)
        self.ticket = Ticket(self.peer.name, self.peer.epoch, 1, "k", (b"\1\0\0\0\2\0\0\0",))
        self.worker.obey(Orders(steps=[Step("r", "k", ((3, 4),), 8, 0)]))


@pytest.fixture(scope="module")
def prefiller():
    made = Prefiller()
    yield made
    for engine in made.engines:
        engine.close()


SPOILED = st.one_of(
    st.integers(-1, 9), st.sampled_from([0, 1, 2**31, 2**47, 2**48, 2**63 - 1, 2**64 - 1]),
    st.binary(max_size=9), st.text(max_size=3), st.lists(st.integers(0, 3), max_size=3),
)  # fmt: skip


def spoil(draw, value):
    """Replace one place of nested lists."""
    if not isinstance(value, list) or not value or draw(st.integers(0, 9)) == 0:
        return draw(SPOILED)
    at = draw(st.integers(0, len(value) - 1))
    return [*value[:at], spoil(draw, value[at]), *value[at + 1 :]]


@st.composite
def spoiled(draw, value):
    """Draw the bytes of a struct, with one or two of them changed."""
    rows = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    for _ in range(draw(st.integers(0, 2))):
        rows = spoil(draw, rows)
    return msgspec.msgpack.encode(rows)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_card_and_ticket_of_a_decoder(prefiller, data):
    """A stride of 2**63 raised where vLLM saves a layer."""
    worker = prefiller.worker
    card = data.draw(spoiled(msgspec.msgpack.decode(prefiller.card, type=Card)))
    ticket = data.draw(spoiled(prefiller.ticket))
    with prefiller.blocks.lock:
        worker._on_note(prefiller.peer, encode(Want(1, "k", "load", True, card, ticket)))
        if (held := worker.holds.held.get("k")) is not None:
            for send in held.sends.values():
                for claim in send._claims:  # it was granted
                    claim.imm = 9
    worker.layer_saved(0, [Step("r", "k", ((3, 4),), 8, 8)])
    worker.poll()
    with prefiller.blocks.lock:  # for the next example
        if held is not None:
            held.sends.clear()
            held.served.clear()
        worker.holds.lost(prefiller.peer.name, prefiller.peer.epoch)

    assert not prefiller.engines[0].callback_errors


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=spoiled(Told(1, "k", "taken", "why", "mark:5:7")) | st.binary(max_size=40))
def test_any_answer_of_a_prefiller(prefiller, raw):
    """A mark that was no mark raised with this poll and with every later one."""
    worker = prefiller.worker
    source = Source("k", (prefiller.engines[1].main_address.to_bytes(),), early=True)
    worker.loads.asks.clear()  # an example before this one dropped what it wanted
    worker.obey(Orders(loads=[Load("l", source, ((5,),))]))
    try:
        (number,) = worker.loads.asks
        ask = worker.loads.asks.pop(number)
        worker.loads.asks[1] = ask
        with prefiller.blocks.lock:
            worker._on_note(prefiller.peer, raw)
        worker.poll()
    finally:
        worker.loads.end("l")
        worker.poll()

"""Requests and strangers make claims to the vLLM connector, which cost nobody else anything."""

from __future__ import annotations

import base64
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

import tep
from tep.apps.kvcache import KvBlocks
from tep.integrations.vllm import loads
from tep.integrations.vllm.scheduler import Scheduler
from tep.integrations.vllm.terms import Asked, Load, Orders, Report, Source, Step, Terms, Told, Want
from tep.integrations.vllm.worker import Worker
from tests.support.inside import peers_of

TOKENS, BLOCK_BYTES, BLOCKS = 16, 1 << 18, 8
TERMS = Terms(beat_s=0.02, lost_after_s=30.0, doubt_s=0.1, load_s=60.0)
WAIT_S = 60.0


class Half:
    """One worker with a cache of one tensor, on an engine of its own."""

    def __init__(self, name, fill, terms=TERMS):
        self.engine = tep.TransferEngine.open("local", name=name)
        self.memory = np.full((BLOCKS, 1, TOKENS, BLOCK_BYTES // TOKENS), fill, np.uint8)
        blocks = self.blocks = KvBlocks(self.engine)
        blocks.add("k", 0, self.memory, "bhtd")
        blocks.card()
        self.worker = Worker(blocks, terms)
        self.report = Report()

    def poll(self):
        found = self.worker.poll()
        self.report = self.report.aggregate(found)
        return found

    @property
    def loads(self):
        return self.worker.loads

    def granted(self):
        """The immediates of the loads that were granted, and have not ended."""
        with self.blocks.lock:
            return set(self.loads.receiver.imms.live)


@pytest.fixture
def halves():
    """A prefiller and a decoder."""
    made = Half("prefiller", 7), Half("decoder", 0)
    yield made
    for one in made:
        one.engine.close()


def until(condition, *halves):
    """Poll both sides until something is so."""
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, "it did not come to that"
        for one in halves:
            one.poll()


def source(key, *addrs):
    return Source(key, tuple(one.to_bytes() for one in addrs), early=True)


def begin(prefiller, decoder, name="r", key="k", blocks=((1, 2),)):
    """Have a load begin; return it once the prefiller was granted it, and has written nothing."""
    prefiller.worker.obey(Orders(steps=[Step(name, key, blocks, 16 * len(blocks[0]), 0)]))
    order = Load(name, source(key, prefiller.engine.main_address), blocks)
    before = decoder.granted()
    decoder.worker.obey(Orders(loads=[order]))
    load = decoder.loads.loading[name].load
    until(lambda: decoder.granted() - before, prefiller, decoder)
    return load


def forged(addr, **fields):
    return msgspec.structs.replace(addr, **fields)


@pytest.mark.parametrize(
    "more",
    [{"digest": []}, {"digest": {}}, {"ranks": [5]}, {"key": 5}, {"ntokens": []}, {"key": "\ud800"},
     {"ranks": 5}, {"key": "x" * 10_000}, {"ranks": ["QUJD"] * 5000}, {"ranks": {"a": 1}},
     {"ntokens": -1}, {"digest": "\ud800"}],
)  # fmt: skip
def test_nonsense_in_a_request_costs_that_request_its_load(more):
    """An exception out of the scheduler ends vLLM's engine, and every user's request with it."""
    rank = base64.b64encode(tep.NetAddr("local", "p", 5, (b"x",), (0,)).to_bytes()).decode()
    params = {"do_remote_prefill": True, "tep": {"key": "k", "ranks": [rank]} | more}
    request = SimpleNamespace(
        request_id="r", prompt_token_ids=[1, 2, 3], kv_transfer_params=params, num_computed_tokens=0
    )
    scheduler = Scheduler([16])
    scheduler.arrived(request)

    assert (0, False) == scheduler.matched(request, 0)
    assert 1 == sum(scheduler.refused.values())
    assert all(len(why) < 400 for why in scheduler.refused)


def test_reasons_of_refusals_are_bounded():
    """A stranger chooses them: each could be another one, and none was ever forgotten."""
    scheduler = Scheduler([16])
    for k in range(1000):
        params = {"do_remote_prefill": True, "tep": {"key": "k", "digest": f"{k}", "ranks": ["%"]}}
        params["tep"][f"ranks{k}"] = params["tep"]["key"] = k
        scheduler.arrived(SimpleNamespace(request_id="r", kv_transfer_params=params | {"x": k}))

    assert len(scheduler.refused) <= 256


def test_keys_of_other_requests_cannot_be_guessed():
    """A guessed key would give another user's prompt."""
    both = [Scheduler([16], token=token) for token in "ab"]
    keys = {scheduler._new_key() for scheduler in both for _ in range(100)}

    assert 200 == len(keys)
    assert 200 == len({key.partition("/")[2] for key in keys})
    assert all(Asked.read({"key": key}).key == key for key in keys)


def test_only_the_prefiller_says_which_process_it_is(halves):
    """A request's mark of a dead process freed blocks into which a living prefiller then wrote."""
    prefiller, decoder = halves
    place, _, start = loads.mark_here().rsplit(":", 2)
    load = begin(prefiller, decoder)
    params = {
        "key": "other",
        "ranks": [base64.b64encode(prefiller.engine.main_address.to_bytes()).decode()],
        "processes": [f"{place}:{4194303}:{start}", "\u00b2", 5],
    }
    evil = Asked.read(params).source()
    decoder.worker.obey(Orders(loads=[Load("evil", evil, ((5,),))]))
    for _ in range(50):
        for half in halves:
            half.poll()
    assert "open" == load.state
    prefiller.worker.layer_saved(0, [Step("r", "k", ((1, 2),), 32, 32)])
    until(lambda: "r" in decoder.report.received, *halves)

    assert load.ok
    assert (decoder.memory[1:3] == 7).all()


def test_an_answer_counts_only_from_whom_was_asked_and_about_that(halves):
    """Numbers of questions are small: a stranger would end the loads of others."""
    prefiller, decoder = halves
    where = source("k", prefiller.engine.main_address)
    decoder.worker.obey(Orders(loads=[Load("r", where, ((1, 2),))]))
    load, (ask,) = decoder.loads.loading["r"].load, decoder.loads.asks.values()
    other = decoder.engine.main_address
    for peer, key in ((other, ask.want.key), (ask.addr, "another"), (other, "another")):
        assert not decoder.loads.answered(peer, Told(ask.want.number, key, "gone", "evil"))
    assert "open" == load.state

    assert decoder.loads.answered(ask.addr, Told(ask.want.number, ask.want.key, "gone", "true"))
    assert "open" != load.state


def test_a_load_waits_no_longer_once_its_prefiller_is_lost_or_has_ended(halves, monkeypatch):
    """It would wait for its time limit, or end because somebody else was lost."""
    prefiller, decoder = halves
    load = begin(prefiller, decoder)
    where = prefiller.engine.main_address
    with decoder.blocks.lock:
        decoder.loads.lost("somebody", where.epoch)
        decoder.loads.lost(where.name, where.epoch - 1)
    decoder.poll()
    assert "open" == load.state
    monkeypatch.setattr(loads, "has_ended", lambda _: True)
    decoder.poll()
    assert "open" != load.state


def test_what_was_dropped_before_it_was_computed_is_not_kept(halves):
    """A decoder that gives up early would have its blocks held for a whole lease."""
    prefiller, decoder = halves
    states = [
        prefiller.worker.holds.answer(decoder.engine.main_address, Want(n, "k", kind, True)).state
        for n, kind in enumerate(("keep", "drop", "keep", "load"))
    ]

    assert ["kept", "gone", "gone", "gone"] == states


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "while it loads"])
@pytest.mark.parametrize("fields", ["later", "same", "its NICs too", "nothing but its NICs"])
def test_an_address_in_a_request_takes_nobodys_place(halves, when, fields):
    """An engine that meets a later incarnation holds the former for dead: its blocks came free."""
    prefiller, decoder = halves
    true = prefiller.engine.main_address
    nobody = bytes([true.domains[0][0]]) + b"nobody is here"
    evil = {
        "later": forged(true, epoch=2**63, domains=(nobody,)),
        "same": forged(true, domains=(nobody,)),
        "its NICs too": forged(true, domains=(*true.domains, nobody), link_bps=(0, 0)),
        "nothing but its NICs": forged(true, name="x", epoch=true.epoch + 1),
    }[fields]
    order = Orders(loads=[Load("evil", source("k2", evil), ((5,),))])
    if when == "before":
        decoder.worker.obey(order)
        for _ in range(20):
            decoder.poll()
    load = begin(prefiller, decoder)
    if when != "before":
        decoder.worker.obey(order)
        for _ in range(20):
            decoder.poll()
    prefiller.worker.layer_saved(0, [Step("r", "k", ((1, 2),), 32, 32)])
    until(lambda: load.finished, *halves)

    assert load.ok, load.reason
    assert (decoder.memory[1:3] == 7).all()


@pytest.mark.slow
def test_whoever_never_answers_is_forgotten():
    """A client chooses addresses; each would stay for ever, and its load for its whole time."""
    terms = Terms(beat_s=0.02, lost_after_s=0.1, doubt_s=0.1, load_s=60.0)
    decoder = Half("decoder", 0, terms)
    with tep.TransferEngine.open("local", name="silent") as silent:
        silent.submit_recvs(1 << 16, 64, lambda _: None)
        order = Load("r", source("k", silent.main_address), ((1,),))
        decoder.worker.obey(Orders(loads=[order]))
        until(lambda: "r" in decoder.report.received, decoder)
        until(lambda: not (decoder.loads.loading or decoder.loads.asks), decoder)
        assert {1} == decoder.report.bad
        until(lambda: not (decoder.loads._strangers or peers_of(decoder.engine).links), decoder)
    decoder.engine.close()


@pytest.mark.parametrize("lives", [False, True])
def test_a_later_incarnation_that_answers_ends_the_doubt_about_a_lost_one(halves, lives):
    """Blocks stayed out of use for ever; of one that lives they came free while it wrote."""
    prefiller, decoder = halves
    load = begin(prefiller, decoder)
    if not lives:
        prefiller.engine.close()  # without a word; its process, this one, goes on
        load.cancel()
    again = Half("prefiller", 9)
    try:
        fresh = begin(again, decoder, "r2", "k2", ((4,),))
        again.worker.layer_saved(0, [Step("r2", "k2", ((4,),), 16, 16)])
        until(lambda: fresh.finished, again, decoder)
        assert fresh.ok, fresh.reason
        if lives:
            assert "open" == load.state
        else:
            until(lambda: load.finished, again, decoder)
    finally:
        again.engine.close()


def test_a_bug_of_the_prefiller_is_told_to_the_decoder(halves, monkeypatch):
    """An exception ended the answer and not the question, which was repeated for 60 s."""
    prefiller, decoder = halves

    def answer(*_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(prefiller.worker.holds, "answer", answer)
    order = Load("r", source("k", prefiller.engine.main_address), ((1,),))
    decoder.worker.obey(Orders(loads=[order]))
    load = decoder.loads.loading["r"].load
    until(lambda: load.finished, *halves)

    assert "ZeroDivisionError: a bug" in load.reason


def test_blocks_that_cannot_be_expected_fail_their_request(halves):
    """An order that the cache refuses came out of the worker as an exception."""
    prefiller, decoder = halves
    order = Load("r", source("k", prefiller.engine.main_address), ((1, BLOCKS),))
    decoder.worker.obey(Orders(loads=[order]))
    decoder.poll()

    assert ({"r"}, {"r"}) == (decoder.report.received, decoder.report.failed)
    assert {1, BLOCKS} == decoder.report.bad


def test_who_was_held_for_dead_is_asked_again_once_it_speaks(halves):
    """A mark can be wrong, as in a container that was moved: the prefiller was barred for good."""
    prefiller, decoder = halves
    load = begin(prefiller, decoder)
    (ask,) = decoder.loads.loading["r"].asks
    name, epoch = ask.addr.name, ask.addr.epoch
    decoder.loads.dead(name, epoch)
    until(lambda: load.finished, *halves)
    first = Load("r1", source("k1", prefiller.engine.main_address), ((3,),))
    with decoder.blocks.lock:  # it answers what it was asked before, too
        decoder.loads.dead(name, epoch)
        decoder.worker.obey(Orders(loads=[first]))
        assert "dead" in decoder.loads.loading["r1"].load.reason
    until(lambda: not decoder.loads._dead, *halves)
    again = begin(prefiller, decoder, "r2", "k2", ((4,),))
    prefiller.worker.layer_saved(0, [Step("r2", "k2", ((4,),), 16, 16)])
    until(lambda: again.finished, *halves)

    assert again.ok, again.reason


def test_a_life_that_is_lost_ends_the_loads_from_it_and_from_no_later_one(halves):
    """They waited for their time-out; or a prefiller that is back lost those that it sends now."""
    prefiller, decoder = halves
    load = begin(prefiller, decoder)
    (ask,) = decoder.loads.loading["r"].asks
    name, epoch = ask.addr.name, ask.addr.epoch
    assert decoder.loads.has_successor(name, epoch - 1)
    assert not decoder.loads.has_successor(name, epoch)
    with decoder.blocks.lock:
        decoder.loads.lost(name, epoch - 1)
        decoder.loads.lost(f"{name}x", epoch)
        assert "open" == load.state
        decoder.loads.lost(name, epoch)
    assert f"prefiller {name} is lost" == load.reason


def test_a_decoders_life_that_is_lost_ends_the_sends_to_it_and_to_no_later_one(halves):
    """A decoder that is back lost what is sent to it now; or its last life was kept for ever."""
    begin(*halves)
    holds = halves[0].worker.holds
    ((name, epoch, _), send) = next(iter(holds.held["k"].sends.items()))
    peer = halves[0].blocks.named(halves[1].engine.main_address)
    want = Want(9, "k", "load", False, b"", b"no ticket")
    with halves[0].blocks.lock:
        holds.lost(name, epoch - 1)
        assert ("", "gone") == (send.reason, holds.answer(peer, want).state), "its card is known"
        holds.lost(name, epoch)
        ended = (f"decoder {name} is lost", "card")
        assert ended == (send.reason, holds.answer(peer, want).state), "its card is asked for"


def test_blocks_are_kept_for_as_long_as_a_decoder_asks_for_them(halves):
    """A request that waits for its turn at the decoder was computed again, each time."""
    begin(*halves)
    holds, want = halves[0].worker.holds, Want(9, "k", "keep", False, b"", b"")
    with halves[0].blocks.lock:
        held = holds.held["k"]
        held.final, held.until_s = True, 0.0
        assert "kept" == holds.answer(halves[1].engine.main_address, want).state
        assert held.until_s > halves[0].engine.driver.now_s()


@pytest.mark.parametrize(
    "mark", ["", ":", "::", "a:b:c", "{}:\u00b2:5", "{}:" + "1" * 5000 + ":5", "{}:-1:5", "\0:1:\0"]
)
def test_any_text_may_be_a_mark(mark):
    """It comes from another process: an exception would come back with every later poll."""
    place = loads.mark_here().rsplit(":", 2)[0]

    assert not loads.has_ended(mark.format(place))

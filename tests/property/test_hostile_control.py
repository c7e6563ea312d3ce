"""A third engine says whatever the control messages allow, beside a transfer between two others.

The messages are drawn from the types themselves, so that a new one joins without a word here.
"""

from __future__ import annotations

import gc
import os
import random
import typing

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

import tep
from tep.backends.base import new_completions
from tep.backends.loopback import Hub
from tep.base.api import Pages
from tep.control.messages import ControlMessage, Failed, decode, encode
from tep.core import imm as imm_table
from tests.support.inside import machine_of, worker_of

KINDS = typing.get_args(ControlMessage)
PAGE, PAGES, IMM = 8, 64, 7


def drawn_from(kind: inspect.Type, addresses: list[bytes]) -> st.SearchStrategy:
    """Draw what a field may hold: its declared limits, and what the world makes likely."""
    match kind:
        case inspect.IntType():
            low = 0 if kind.ge is None else kind.ge
            high = kind.le if kind.le is not None else (kind.lt or 2**63) - 1
            near = st.integers(low, min(high, low + 8))
            return st.one_of(near, st.integers(low, high), st.just(high))
        case inspect.BytesType():
            junk = st.binary(min_size=kind.min_length or 0, max_size=min(kind.max_length or 9, 40))
            return st.one_of(st.sampled_from(addresses), st.just(addresses[-1]), junk)
        case inspect.StrType():
            return st.text(max_size=min(kind.max_length or 9, 20))
        case inspect.VarTupleType():
            item = drawn_from(kind.item_type, addresses)
            return st.lists(item, max_size=min(kind.max_length or 9, 6)).map(tuple)
        case inspect.TupleType():
            return st.tuples(*(drawn_from(item, addresses) for item in kind.item_types))
    raise NotImplementedError(f"draw {kind}: say how")


def messages(addresses: list[bytes]) -> st.SearchStrategy[bytes]:
    """Any well-formed control message, as bytes."""

    def of(kind: type) -> st.SearchStrategy:
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        values = [drawn_from(field.type, addresses) for field in info.fields]
        return st.tuples(*values).map(lambda v: _well_formed(kind, v))

    return st.one_of([of(kind) for kind in KINDS]).filter(bool)


def _well_formed(kind: type, values: tuple) -> bytes:
    """The message as bytes, or none where its fields contradict each other."""
    try:
        return encode(decode(encode(kind(*values))))
    except ValueError:
        return b""


class World:
    """Engine a writes to b; c has one NIC, and says what it is given to say to both."""

    def __init__(self) -> None:
        hub = Hub()
        self.a, self.b, self.c = (
            tep.TransferEngine.open(
                "loopback", name=name, nics=nics, hub=hub, driver=tep.InlineDriver()
            )
            for name, nics in (("a", 2), ("b", 2), ("c", 1))
        )
        self.source = np.arange(1, PAGE * PAGES + 1).astype(np.uint8)
        self.target = np.zeros_like(self.source)
        self.mr, _ = self.a.reg_mr(self.source)
        self.region, self.desc = self.b.reg_mr(self.target)
        self.rounds = 0
        self.mouth = machine_of(self.c).domains[0]
        self.ears = [self.mouth.connect(at) for at in self.victims]
        self.ctx = 1 << 62

    @property
    def victims(self) -> tuple[bytes, ...]:
        return (*self.a.main_address.domains, *self.b.main_address.domains)

    @property
    def addresses(self) -> list[bytes]:
        return [*self.victims, *self.c.main_address.domains]

    def say(self, data: bytes) -> None:
        for ear in self.ears:
            self.ctx += 1
            assert self.mouth.post_control(ear, data, self.ctx)

    def turn(self) -> None:
        for engine in (self.a, self.b):
            for _ in range(3):
                engine.driver.turn()
        out = new_completions(64)
        while n := self.mouth.poll(out):
            for entry in out[:n]:
                if entry["kind"] == tep.backends.base.Kind.CONTROL:
                    self.mouth.take_control(int(entry["ctx"]))

    def transfer(self) -> None:
        """One transfer, exact in bytes and counts, once what c said of its immediate is removed."""
        self.rounds += 1
        for _ in range(20):
            self.turn()
        if IMM in worker_of(self.b).imms.burnt.why:
            with pytest.raises(tep.FabricError, match="burnt"):
                self.b.expect_imm_count(IMM, 1).wait(1)
        assert 0 == self.b.remove_imm(IMM)
        self.target.fill(0)
        pages = Pages(range(PAGES))
        got = self.b.expect_imm_count(IMM, PAGES, sender=self.a.main_address)
        sent = self.a.submit_paged_writes(PAGE, (self.mr, pages), (self.desc, pages), IMM)
        for _ in range(50):
            self.turn()
        assert sent.ok, sent.error or sent.describe()
        assert got.ok, got.error or got.describe()
        assert (self.source == self.target).all()
        assert () == self.b.stats().imms_unexpected


def test_every_kind_of_message_can_be_drawn() -> None:
    """A type of message that the search below never sends is one that may end an engine."""
    for kind in KINDS:
        assert isinstance(inspect.type_info(kind), inspect.StructType)
        messages([b"x"])


@pytest.mark.slow
@settings(max_examples=15)
@given(st.data())
def test_hostile_messages_change_nothing_between_others(data: st.DataObject) -> None:
    """Else one peer fences others off, ends the engines, or has a count complete without its bytes.

    What one peer says of an immediate burns it for all: their counts fail, and none is wrong.
    """
    world = World()
    said = data.draw(st.lists(messages(world.addresses), max_size=60))
    world.transfer()
    for k, message in enumerate(said):
        world.say(message)
        if k % 16 == 0:
            world.turn()
    world.transfer()
    assert world.a.stats().callback_errors == world.b.stats().callback_errors == 0
    assert "its handler raised" not in dict(world.b.stats().control_dropped)
    assert "its handler raised" not in dict(world.a.stats().control_dropped)


MESSAGES = 12_500 if "TEP_LONG" in os.environ else 1_500


@pytest.mark.slow
def test_thousands_of_hostile_messages_fill_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A table that grows with what peers say ends an engine as surely as an exception does."""
    monkeypatch.setattr(imm_table, "BURNT_MAX", 256)
    world = World()
    pool: list[bytes] = []

    @settings(max_examples=200, derandomize=True, database=None)
    @given(messages(world.addresses))
    def draw(message: bytes) -> None:
        pool.append(message)

    draw()
    known = [decode(message) for message in pool]
    rng = random.Random(1)
    serial, sizes = 0, []
    for _ in range(2):
        for k in range(MESSAGES):  # each goes to four NICs
            message = msgspec.structs.replace(rng.choice(known), number=rng.randrange(1 << 62))
            if k % 4 == 0:  # fresh names of things are what fills tables
                serial += 1
                message = Failed(serial, serial, "c", "no", ((1000 * serial, 900),))
            world.say(encode(message))
            if k % 16 == 0:
                world.turn()
            if k % 1024 == 0:
                world.transfer()
        world.transfer()
        gc.collect()
        sizes.append(len(gc.get_objects()))
    assert sizes[1] - sizes[0] < 2000, f"objects that stay: {sizes}"


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_handler_that_raises_drops_its_message_alone(name: str, monkeypatch) -> None:
    """Whatever is wrong in the dealing with one message, the engine is there for all others."""
    world = World()
    victim = {"a": world.a, "b": world.b}[name]

    def broken(*_: object) -> None:
        raise IndexError("of a peer's number")

    worker_of(victim).channel.hear(Failed, broken)
    world.say(encode(Failed(1, 1, "c", "no", ((1, 1),))))
    world.turn()
    assert 2 == dict(victim.stats().control_dropped)["its handler raised"]
    world.transfer()

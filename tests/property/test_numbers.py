"""Every number that the public API takes, given every number there is: it works, or it is refused.

The arguments are found by introspection: a new verb or argument joins by itself, and fails here
until a rule says what to do with it.
"""

from __future__ import annotations

import dataclasses
import decimal
import fractions
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tep
from tep.memory.source import adapt
from tep.sim.faults import Chaos
from tests.support.pairs import Pair, pair

DTYPES = [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64]
FLOATS = [np.float16, np.float32, np.float64]

ODD: list[object] = [
    *(math.inf, -math.inf, math.nan, -1, -1.5, -0.0, 0, 0.5, 1.0, 1, 3, 1e-300, 1e300),
    *(2**31, 2**31 - 1, 2**32, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30),
    *(-(2**31), -(2**63), -(2**64), -(10**30), 10**400, 1 + 1j, True, False),
    *(kind(value) for kind in DTYPES for value in (0, 1, 5)),
    *(np.int64(-1), np.int64(-(2**63)), np.uint64(2**64 - 1), np.uint32(2**32 - 1)),
    *(kind(value) for kind in FLOATS for value in (0.0, 1.0, 1.5, math.nan, math.inf)),
    *(np.bool_(True), np.array(1), np.array([1]), np.array([1, 2]), np.datetime64(1, "s")),
    *("", "1", "x", "\ud800", b"", b"1", bytearray(b"1"), None, [], [1], (), (1, 2), {}, {1: 2}),
    *(object(), int, print, fractions.Fraction(1, 3), decimal.Decimal("0.5"), range(3), slice(1)),
]

values = st.sampled_from(ODD) | st.integers() | st.floats() | st.integers(-(2**70), 2**70)

Call = Callable[[object], object]
Rules = dict[str, "Call | str"]

NOT_A_NUMBER = "not a number"


def ends(call: Callable[[], object], name: str) -> None:
    """Call; what it raises must be a usage error that names the argument."""
    text = name
    try:
        call()
    except tep.UsageError as error:
        text = str(error)
    assert name in text
    assert len(text) < 1000


def numbers(call: Callable[..., object], *names: str, **fixed: object) -> Rules:
    """Rules that give each of these keywords the odd value, and the others their sound ones."""

    def one(name: str, value: object) -> object:
        found = call(**(fixed | {name: value}))
        if isinstance(found, tep.Transfer | tep.Expectation | tep.Message):
            found.cancel()
        return found

    return {name: partial(one, name) for name in names}


def verbs(p: Pair) -> dict[str, Rules]:
    """The check of each argument of each method of TransferEngine and of its results."""
    e, peer = p.a, p.b.main_address
    names = "buffer access mr peer src dst dsts srcs peers group on_done payload sender imms"
    other = dict.fromkeys(names.split(), NOT_A_NUMBER)
    pages = tep.Pages([0, 1])
    single = partial(e.submit_single_write, src=(p.mr, 0), dst=(p.desc, 0))
    paged = partial(e.submit_paged_writes, src=(p.mr, pages), dst=(p.desc, pages))
    prepare_pages = partial(e.prepare_paged_writes, src=(p.mr, pages), dst=(p.desc, pages))
    scatter = partial(e.submit_scatter, p.mr)
    read = partial(e.submit_single_read, src=(p.desc, 0), dst=(p.mr, 0))
    reads = partial(e.submit_paged_reads, src=(p.desc, pages), dst=(p.mr, pages))
    watcher = e.alloc_uvm_watcher(lambda *_: None)
    e.submit_recvs(8, 1, repr)

    def watch(**given: float) -> None:
        e.watch_peer(peer, **given).close()
        e.driver.turn()  # one that is closed leaves at the next turn

    def recvs(nbytes: int = 1, count: int = 1, with_sender: Any = False) -> None:
        sound = all(isinstance(n, int | np.integer) for n in (nbytes, count))
        if sound and not (0 < nbytes * count < 2**20 or nbytes < 1 or count < 1):
            with pytest.raises(tep.BadRequest):  # else so much memory would be taken
                e.submit_recvs(min(nbytes, 2**40), 2**40, repr)
            return
        e.submit_recvs(nbytes, count, repr, with_sender=with_sender)

    def singles(call: Callable[..., object], src: object, dst: object) -> Rules:
        ends = {"src": (src, 0), "dst": (dst, 0)}
        return {
            **other,
            **numbers(partial(call, **ends), "nbytes"),
            **numbers(partial(call, 8, **ends), "routing"),
            "src": lambda v: call(8, (src, v), (dst, 0)),
            "dst": lambda v: call(8, (src, 0), (dst, v)),
        }

    def lists(call: Callable[..., object], *more: str) -> Rules:
        rest = numbers(call, "routing", *more, page_bytes=8)
        return {**other, **numbers(call, "page_bytes"), **rest}

    one = {"routing": lambda v: single(8, routing=v), "imm": lambda v: single(8, imm=v)}
    return {
        "submit_single_write": {
            **other,
            **numbers(single, "nbytes"),
            **one,
            "src": lambda v: single(8, src=(p.mr, v)),
            "dst": lambda v: single(8, dst=(p.desc, v)),
        },
        "submit_paged_writes": lists(paged, "imm"),
        "trace": {"events_max": lambda v: e.trace(events_max=v).stop()},
        "submit_scatter": {
            **other,
            **numbers(scatter, "imm", "routing", dsts=[tep.ScatterDst(8, 0, (p.desc, 0))]),
            "dsts": scatter,
        },
        "submit_barrier": {
            **other,
            **numbers(partial(e.submit_barrier, [p.desc]), "imm"),
            **numbers(partial(e.submit_barrier, [p.desc]), "routing", imm=1),
        },
        "submit_single_read": {
            **other,
            **numbers(read, "nbytes"),
            **numbers(read, "routing", "imm", nbytes=8),
            "src": lambda v: read(8, src=(p.desc, v)),
            "dst": lambda v: read(8, dst=(p.mr, v)),
        },
        "submit_paged_reads": lists(reads, "imm"),
        "prepare_paged_writes": lists(prepare_pages),
        "prepare_scatter": {
            **other,
            **numbers(e.prepare_scatter, "routing", src=p.mr, dsts=[(8, 0, (p.desc, 0))]),
        },
        "prepare_barrier": {**other, "routing": lambda v: e.prepare_barrier([p.desc], routing=v)},
        "Prepared.submit": {
            **other,
            **numbers(prepare_pages(8).submit, "imm", "src_offset", "dst_offset"),
        },
        "submit_send": other,
        "submit_recvs": {**other, **numbers(recvs, "nbytes", "count", "with_sender")},
        "expect_imm_count": {
            **other,
            **numbers(partial(e.expect_imm_count, count=1), "imm"),
            **numbers(partial(e.expect_imm_count, 1), "count"),
        },
        "on_imm": {**other, "imms": lambda v: e.on_imm(v, print)},
        "remove_imm": numbers(e.remove_imm, "imm"),
        "watch_peer": {
            **other,
            **numbers(partial(watch, lost_after_s=math.inf), "every_s"),
            **numbers(partial(watch, every_s=1e-3), "lost_after_s"),
        },
        "reg_mr": {**other, "access": lambda v: e.reg_mr(bytearray(8), access=v)},
        "deregister": other,
        "add_peer_group": other,
        "alloc_uvm_watcher": other,
        "on_peer": other,
        "remove_peer": other,
        "explain": other,
        "Watcher.store": numbers(watcher.store, "value"),
        "Expectation.wait": {"timeout_s": partial(wait, p)},
        "Expectation.wait_async": {"timeout_s": partial(wait_async, p)},
        "Transfer.wait": {"timeout_s": partial(wait, p)},
        "Transfer.wait_async": {"timeout_s": partial(wait_async, p)},
        "Message.wait": {"timeout_s": partial(wait, p)},
        "Message.wait_async": {"timeout_s": partial(wait_async, p)},
        "Removal.wait": {"timeout_s": partial(wait, p)},
        "Removal.wait_async": {"timeout_s": partial(wait_async, p)},
        "raw memory: ptr": {"pointer": lambda v: adapt((v, 1 << 12, "cuda:0"))},
        "raw memory: nbytes": {"bytes": lambda v: adapt((1 << 12, v, "cuda:0"))},
    }


def wait_async(p: Pair, timeout_s: object) -> None:
    """The number is looked at first; then an inline driver says that it cannot be awaited."""
    coroutine = p.b.expect_imm_count(78, 1).wait_async(timeout_s)
    try:
        coroutine.send(None)
    except RuntimeError:  # there is no event loop
        pass
    except tep.UsageError as error:
        if "timeout_s" in str(error):
            raise
    finally:
        coroutine.close()


def wait(p: Pair, timeout: object) -> None:
    """Wait for what is there, or for at most a little while."""
    late = not isinstance(timeout, int | float | np.number) or not timeout <= 0.01
    expectation = p.b.expect_imm_count(77, 0 if late else 1)
    try:
        with suppress(tep.WaitTimeout):
            expectation.wait(timeout)
    finally:
        expectation.cancel()
        p.b.driver.turn()


DRIVERS = {
    "arm", "busy", "cancel_handle", "close", "crash", "deliver", "due_s", "main_address",
    "must_poll", "open", "owing", "report_callback_error", "stall_report", "stats", "step",
    "wakeup_fds", "watching",
}  # fmt: skip
"""Methods that drivers and handles call, and methods without own arguments."""


INSIDE = {"count_posted", "fix_arrived"}
"""Methods of a transfer that only the engine calls."""


def found_verbs() -> Iterator[tuple[str, str]]:
    """(method, argument) of all that users call on an engine, and on what it returns."""
    kinds = {
        "": tep.TransferEngine,
        "Watcher.": tep.Watcher,
        "Expectation.": tep.Expectation,
        "Transfer.": tep.Transfer,
        "Message.": tep.Message,
        "Removal.": tep.Removal,
        "Prepared.": tep.Prepared,
    }
    for prefix, kind in kinds.items():
        for name, member in inspect.getmembers(kind, inspect.isfunction):
            if name.startswith("_") or name in INSIDE or (not prefix and name in DRIVERS):
                continue
            for argument in list(inspect.signature(member).parameters)[1:]:
                if argument not in {"callback", "handle"}:
                    yield prefix + name, argument


def test_every_argument_of_every_verb_has_a_rule() -> None:
    """An argument that nobody has thought about is one that nobody checks."""
    with pair() as p:
        rules = verbs(p)
        missing = [(m, a) for m, a in found_verbs() if a not in rules.get(m, {})]

    assert [] == missing


@contextmanager
def quiet_numpy() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


CHECKED = settings(
    deadline=None, max_examples=20, derandomize=True, suppress_health_check=list(HealthCheck)
)


def cases() -> list[tuple[str, str]]:
    with pair() as p:
        return [
            (m, a)
            for m, rules in verbs(p).items()
            for a, rule in rules.items()
            if rule != NOT_A_NUMBER
        ]


def check(rule: Call, name: str, value: object) -> None:
    with quiet_numpy():
        ends(lambda: rule(value), name)


def more(rule: Call, name: str) -> None:
    """Values that nobody has thought of."""

    @CHECKED
    @given(values)
    def run(value: object) -> None:
        check(rule, name, value)

    run()


NAMED = {
    "src": "source", "dst": "target", "dsts": "submit_scatter", "page_bytes": "page",
    "nbytes": "bytes",
}  # fmt: skip
"""The name of an argument in messages, if it is another word."""


@pytest.mark.parametrize(("verb", "argument"), cases())
def test_verbs_take_a_number_or_refuse_it_by_name(verb: str, argument: str) -> None:
    """A raw TypeError names nothing; a value that passes may stop the worker, which all share."""
    with pair() as p:
        rule = verbs(p)[verb][argument]
        assert not isinstance(rule, str)
        reads = verb.endswith("_single_read") and argument == "dst"
        name = "destination" if reads else NAMED.get(argument, argument)
        for value in ODD:
            check(rule, name, value)
        more(rule, name)
        lives(p)


def lives(p: Pair) -> None:
    """The engine still writes and counts, so nothing that was taken has broken it."""
    got = p.b.expect_imm_count(4242, 1)
    sent = p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 4242)
    p.settle(sent, got)
    assert sent.ok
    assert got.ok


# ---------------------------------------------------------------------- records


def record(kind: Callable[..., object], sound: dict[str, object]) -> dict[str, Call]:
    return {name: lambda v, name=name: kind(**(sound | {name: v})) for name in sound}


ADDR = tep.NetAddr("loopback", "n", 1, (b"a",), (1,))
DESC = tep.MrDesc(ADDR, 1, 8, "cpu", True, (1,), (1,))

RECORDS: dict[Any, dict[str, object]] = {
    tep.EngineOptions: {},
    tep.Routing: {
        "num_shards": None,
        "domain": None,
        "scatter_by": "peers",
    },
    tep.Pages: {"indices": [0, 1], "stride": 8, "offset": 0},
    tep.Single: {"nbytes": 1, "routing": tep.Routing()},
    tep.Scatter: {"nbytes": 1, "routing": tep.Routing()},
    tep.Paged: {"npages": 1},
    tep.NetAddr: {},
    tep.MrDesc: {},
    tep.count_imms: {"shape": tep.Single(8), "nlocal": 1, "nremote": 1},
}
RECORDS[tep.EngineOptions] = dataclasses.asdict(tep.EngineOptions())
for one in (ADDR, DESC):
    RECORDS[type(one)] = {name: getattr(one, name) for name in one.__struct_fields__}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_records_take_a_number_or_refuse_it_by_name(kind) -> None:
    """A record that is wrong is wrong where it was written down, not where it is used."""
    sound = RECORDS[kind]
    assert set(sound) == set(inspect.signature(kind).parameters)
    for name, make in record(kind, sound).items():
        for value in ODD:
            check(make, name, value)
        more(make, name)


@pytest.mark.parametrize("name", RECORDS[tep.EngineOptions])
def test_an_engine_works_with_all_options_that_it_takes(name: str) -> None:
    """commands_max=0 was taken, and then nothing was ever done."""
    for value in ODD:
        try:
            options = tep.EngineOptions(**({"probe_first_s": 1e-9} | {name: value}))
        except tep.UsageError:
            continue
        with pair(options=options) as p:
            lives(p)


@pytest.mark.parametrize("field", range(4))
def test_slices_of_a_scatter_take_numbers_or_refuse_them(field: int) -> None:
    """They are packed in C, whose errors name neither the slice nor the value."""

    def scatter(p: Pair, value: object) -> None:
        slices = [tep.ScatterDst(8, 0, (p.desc, 0)), tep.ScatterDst(8, 8, (p.desc, 8))]
        nbytes, src, (desc, offset) = slices[1]
        odd: list[Any] = [nbytes, src, desc, offset]
        odd[field] = value
        p.a.submit_scatter(p.mr, [slices[0], tep.ScatterDst(odd[0], odd[1], (odd[2], odd[3]))])

    with pair() as p:
        name = ("slice", "slice", "MrDesc", "slice")[field]
        for value in ODD:
            check(partial(scatter, p), name, value)
        lives(p)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Chaos)])
def test_knobs_of_the_chaos_fabric(name: str) -> None:
    """An assertion, or a TypeError deep in a run, does not say which knob is wrong."""
    for value in ODD:
        check(lambda v: Chaos(**{name: v}), name, value)


@pytest.mark.parametrize("name", ["nodes", "nics", "seed", "options"])
def test_options_of_a_cluster(name: str) -> None:
    """They are found wrong before any engine is open."""

    def cluster(value: object) -> None:
        if isinstance(value, int | np.integer) and 64 < value:
            value = 10**30 if name != "seed" else value
        with tep.sim.Cluster(**{name: value}):
            pass

    for value in ODD:
        check(cluster, name, value)


@pytest.mark.parametrize("call", ["exchange", "join"])
def test_timeouts_of_the_rendezvous(call: str) -> None:
    """A time-out that is no number must not become a wait without end."""
    place = tep.rendezvous.Place(rank=0, size=1, host="127.0.0.1", port=0, token="t" * 32)
    for value in ODD:
        if call == "exchange":
            check(lambda v: tep.rendezvous.exchange(b"", place, timeout_s=v), "timeout_s", value)
        else:
            check(lambda v: tep.rendezvous.join(place, timeout_s=v).close(), "timeout_s", value)


@pytest.mark.parametrize("backend", ["loopback", "local"])
def test_options_of_a_backend_are_of_their_kind(backend: str) -> None:
    """A misspelt option was a raw TypeError, and a text as a number of NICs another."""
    for name, value in [("nics", v) for v in (1.5, "x", b"1", math.nan, 1j, [], object())]:
        with pytest.raises(tep.UsageError, match=f"{backend}: nics="):
            tep.TransferEngine.open(backend, **{name: value})
    for name in (5, b"x", "\ud800"):
        with pytest.raises(tep.UsageError, match=f"{backend}: name="):
            tep.TransferEngine.open(backend, name=name)
    with pytest.raises(tep.UsageError, match=f"{backend}: no option 'nisc'; there are: nics,"):
        tep.TransferEngine.open(backend, nisc=1)

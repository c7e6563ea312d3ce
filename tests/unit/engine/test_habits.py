"""Habits that every public name keeps, found by reflection: a new name joins by itself.

What `tep`, `tep.rendezvous` and `tep.sim` offer, and what their functions and methods return, says
what it is, is pickled or says what to send instead; waits call their timeout alike; memory is taken
in whatever form it has.
"""

from __future__ import annotations

import array
import copy
import dataclasses
import enum
import inspect
import pickle
import re
import sys
import typing

import numpy as np
import pytest

import tep
from tep import rendezvous
from tep.base import errors
from tep.core.regions import Quarantine
from tep.drivers.threads import InlineDriver
from tep.host import topology
from tep.host.nics import Found
from tep.observe.trace import Mark
from tep.rendezvous.ranks import AsyncGroup
from tep.sim.driver import SimDriver
from tep.sim.sweeps import Table
from tests.support.pairs import pair

ROOMS = (tep, tep.rendezvous, tep.sim)

INNER = {"Path", "Queued", "Remote", "Targets", "Status", "Record"}
"""Classes that attributes of public objects have, and that are not for users."""


def annotated(function: object) -> object:
    """Return a function's return type, by its annotation."""
    hint = getattr(function, "__annotations__", {}).get("return")
    scope = vars(sys.modules[function.__module__])
    return eval(hint, dict(scope)) if isinstance(hint, str) else hint  # noqa: S307  # our own


def classes_in(hint: object) -> set[type]:
    """The classes of tep that an annotation names."""
    found = {hint, typing.get_origin(hint)}
    mine = {c for c in found if inspect.isclass(c) and c.__module__.startswith("tep.")}
    return mine.union(*map(classes_in, typing.get_args(hint)))


def methods_of(cls: type) -> dict[str, object]:
    """Its public methods and properties, as functions."""
    found = {}
    for name, member in inspect.getmembers_static(cls):
        inner = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
        own = name == "__getitem__" or not name.startswith("_")
        if own and inspect.isfunction(inner) and inner.__module__.startswith("tep."):
            found[name] = inner
    return found


def public() -> dict[str, object]:
    """Every public class and function: those that are named, and the classes that these return."""
    queue = [
        value
        for room in ROOMS
        for name in room.__all__
        if inspect.isclass(value := getattr(room, name)) or inspect.isfunction(value)
    ]
    found: dict[str, object] = {}
    while queue:
        value = queue.pop()
        name = f"{value.__module__.removeprefix('tep.')}.{value.__qualname__}"
        if name in found or value.__qualname__ in INNER or getattr(value, "_is_protocol", False):
            continue
        found[name] = value
        functions = [value]
        if inspect.isclass(value):
            # What simulators are made of is theirs; a user holds the simulators.
            of_sim = value.__module__.startswith("tep.sim.")
            functions = [] if of_sim else list(methods_of(value).values())
        for function in functions:
            queue += classes_in(annotated(function))
    return found


PUBLIC = public()
ERRORS = [getattr(errors, name) for name in errors.__all__]
CLASSES = sorted(
    name
    for name, value in PUBLIC.items()
    if inspect.isclass(value) and not issubclass(value, BaseException | enum.Enum)
)


def samples(p) -> list[object]:
    """One of each public class, by making it or by calling what returns it."""
    sent = p.a.submit_single_write(64, (p.mr, 0), (p.desc, 0), 7)
    p.settle(sent)
    return [
        *values(p.desc),
        *simulators(),
        tep.alloc(4096),
        InlineDriver(),
        tep.ThreadDriver("one"),
        p.a,
        p.a.stats(),
        p.a.main_address,
        p.mr,
        p.desc,
        sent,
        sent.stats(),
        p.a.prepare_barrier([p.desc]),
        p.a.submit_send(p.b.main_address, b"hello"),
        p.b.expect_imm_count(9, 3),
        p.a.add_peer_group([p.b.main_address]),
        p.a.watch_peer(p.b.main_address),
        p.b.remove_peer(p.more("c", 1).main_address),
        p.b.alloc_uvm_watcher(print),
    ]


def values(desc: tep.MrDesc) -> list[object]:
    """List the values that users write down or receive."""
    routing = tep.Routing(num_shards=2)
    place = rendezvous.Place(rank=1, size=2, port=29400, token="s" * 16)
    group = AsyncGroup(place)
    return [
        place,
        group,
        rendezvous.Group(None, group),
        topology.Place(
            device="cuda:0", nics=("mlx5_0",), cpus=(0, 1), is_efa=False, why="one switch"
        ),
        Found("mlx5_0", "ConnectX-7", usable=True),
        Quarantine(0, 8, "a write was given up"),
        routing,
        tep.Barrier(),
        tep.EngineOptions(),
        tep.Paged(3),
        tep.Pages([1, 2]),
        tep.PeerEvent(peer="b", epoch=1, kind=tep.PeerChange.LOST, reason="silent"),
        tep.Scatter(8, routing),
        tep.ScatterDst(8, 0, (desc, 0)),
        tep.Sender(b"nic 0 of b", b"b", None),
        tep.Single(8, routing),
        tep.Trace("host"),
        tep.Span("step", "a", "worker", "step", 0.0, 1.0, {}),
        Mark("fault", "a", "faults", "NIC 0 is down", 0.5, {}),
    ]


def simulators() -> list[object]:
    """List the simulators of `tep.sim`."""
    sim = tep.sim
    cluster = sim.Cluster(2, profile="cx7_400")
    chaos = sim.ChaosFabric(sim.FabricEnv(), sim.Chaos(seed=1))
    return [
        cluster,
        cluster.env,
        cluster.row_log,
        chaos,
        sim.Incarnation("a", cluster.engines[0], chaos.env, list),
        SimDriver(chaos.env, chaos.node("a", 1)),
        chaos.node("b", 1),
        sim.TimingFabric(sim.FabricEnv(), "cx7_400"),
        sim.Chaos(seed=3),
        sim.Faults(),
        sim.load_profile("cx7_400"),
        Table(({"x": 1, "value": 2.5},)),
        sim.Clog("a", 0, 5),
        sim.Cut("a", 0, "b", 1, 5),
        sim.Drift("a", 100, 5),
        sim.KillNic("a", 0),
        sim.Mute("a", 0, 5),
        sim.Pause("a", 5),
        sim.Restart("a"),
        sim.Revoke("a", 0),
        sim.Slow("a", 0, 2, 5),
        sim.Swizzle("a", 2, 5, 1),
    ]


@pytest.fixture(scope="module")
def made() -> dict[str, object]:
    """The samples, by the public class that they are of."""
    with pair() as p:
        found: dict[str, object] = {}
        for sample in samples(p):
            for cls in type(sample).__mro__:
                name = f"{cls.__module__.removeprefix('tep.')}.{cls.__qualname__}"
                if name in CLASSES:
                    found.setdefault(name, sample)
        yield found


@pytest.mark.parametrize("name", CLASSES)
def test_it_says_what_it_is(made: dict[str, object], name: str) -> None:
    """`<Transfer object at 0x7f...>` in a log names no transfer, progress or owner."""
    sample = made[name]
    text = repr(sample)
    assert type(sample).__repr__ is not object.__repr__, "add a __repr__"
    assert re.match(rf"(tep\.sim\.)?{type(sample).__name__}\(.*\)$", text, re.DOTALL)
    assert " object at 0x" not in text
    assert len(text) < 1200


@pytest.mark.parametrize("name", CLASSES)
def test_it_is_pickled_or_says_what_to_send(made: dict[str, object], name: str) -> None:
    """pickle's own error names an attribute inside, and not what the other process needs."""
    sample = made[name]
    words = rf"^a {type(sample).__name__} cannot be pickled or copied: .{{10,}}"
    if "unpicklable" in type(sample).__reduce__.__qualname__:
        for refused in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(tep.UsageError, match=words):
                refused(sample)
        return
    again = pickle.loads(pickle.dumps(sample))  # noqa: S301  # our own bytes
    assert type(sample) is type(again)
    assert repr(sample) == repr(again)
    if type(sample).__eq__ is not object.__eq__:
        assert sample == again


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_errors_are_pickled_whole(error: type[tep.TepError]) -> None:
    """A worker process hands its error to the one that waits for it: code and text must come."""
    made = error("what was wrong: 3 > 2")
    if error is tep.FabricError:
        made = error("lost", code="NIC_DOWN", domain=1, peer="b", row=3)
    if error is tep.BackendUnavailable:
        made = error("nothing here", (("dlopen", "no such file"),))
    again = pickle.loads(pickle.dumps(made))  # noqa: S301  # our own bytes
    assert (type(made), str(made), vars(made)) == (type(again), str(again), vars(again))


def test_all_errors_have_one_base() -> None:
    """Who catches TepError must get all of them; an error of the caller is a ValueError too."""
    assert all(issubclass(error, tep.TepError) for error in ERRORS)
    fabric = tep.BusyError, tep.FabricError, tep.RendezvousError, tep.WaitTimeout
    assert not any(issubclass(error, ValueError) for error in fabric)


# ---------------------------------------------------------------------- times


def arguments() -> list[tuple[str, str, inspect.Parameter]]:
    """Each argument of the public API: (function, name, parameter)."""
    found = []
    for value in PUBLIC.values():
        name, functions = value.__qualname__, {"": value}
        if inspect.isclass(value):
            functions = {f".{n}": f for n, f in methods_of(value).items()}
            functions[".__init__"] = value.__init__
        for more, function in functions.items():
            if inspect.isfunction(inspect.unwrap(function)):
                parameters = inspect.signature(function).parameters
                found += [(name + more, key, one) for key, one in parameters.items()]
    return found


ARGUMENTS = arguments()

OTHER_TIMES = {
    # Points of simulated time.
    ("FabricEnv.run_until", "deadline_ps"),
    ("FabricEnv.turn", "deadline_ps"),
}


def test_a_time_to_wait_has_one_name() -> None:
    """`timeout=5` in one place and `timeout_s=5` in another: one of them is guessed wrong."""
    odd = {
        (where, name)
        for where, name, _ in ARGUMENTS
        if re.search("time(out|r)|deadline|patience", name)
        and not re.fullmatch(r"(\w+_)?timeout_(s|ps)", name)
    }
    assert OTHER_TIMES == odd
    waits = {w for w, _, _ in ARGUMENTS if re.search(r"\.(wait|wait_async)$", w)}
    taking = {w for w, name, _ in ARGUMENTS if name == "timeout_s"}
    assert len(waits) > 10
    assert set() == waits - taking


# ---------------------------------------------------------------------- memory


class Dlpack:
    """A tensor that has DLPack and nothing else, as in some frameworks."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack__(self, **options: object) -> object:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()


class OldDlpack(Dlpack):
    """An exporter from before DLPack 1.0: without a version."""

    def __dlpack__(self, *, stream: object = None) -> object:
        return self.values.__dlpack__()


def torch_of(values: np.ndarray) -> object:
    return pytest.importorskip("torch").from_numpy(values)


FORMS = {
    "numpy": lambda values: values,
    "memoryview": memoryview,
    "array": lambda values: array.array(values.dtype.char, values.tolist()),
    "DLPack": Dlpack,
    "old DLPack": OldDlpack,
    "torch": torch_of,
}


def taking(*words: str) -> set[tuple[str, str]]:
    """Arguments whose annotation has one of these words."""
    return {
        (where, name)
        for where, name, parameter in ARGUMENTS
        if any(re.search(rf"\b{word}\b", str(parameter.annotation)) for word in words)
    }


def of_reg_mr(p, values) -> bytes:
    mr, _ = p.a.reg_mr(values, access=tep.Access.SOURCE)
    p.settle(p.a.submit_single_write(mr.memory.nbytes, (mr, 0), (p.desc, 0)))
    return p.dst.data[: mr.memory.nbytes].tobytes()


def of_submit_send(p, values) -> bytes:
    seen: list[bytes] = []
    p.b.submit_recvs(256, 1, lambda view: seen.append(bytes(view)))
    p.settle(p.a.submit_send(p.b.main_address, values))
    p.turn_until(lambda: bool(seen))
    return seen[0]


def of_arena(p, values) -> bytes:
    arena = tep.alloc(4096)
    arena.write(values, 8)
    return arena.read(8, 16)


TAKES_BYTES = {
    ("TransferEngine.reg_mr", "buffer"): of_reg_mr,
    ("TransferEngine.submit_send", "payload"): of_submit_send,
    ("Arena.write", "data"): of_arena,
}


def of_pages(p, values) -> list[int]:
    return tep.Pages(values).indices.tolist()


def of_imms(p, values) -> list[int]:
    seen: list[int] = []
    p.b.on_imm(range(1 << 20), lambda imm, count: seen.extend([imm] * count))
    pages = tep.Pages(range(4))
    p.settle(p.a.submit_paged_writes(8, (p.mr, pages), (p.desc, pages), values))
    p.turn_until(lambda: len(seen) == 4)
    return sorted(seen)


def of_prepared(p, values) -> list[int]:
    seen: list[int] = []
    p.b.on_imm(range(1 << 20), lambda imm, count: seen.extend([imm] * count))
    pages = tep.Pages(range(4))
    p.settle(p.a.prepare_paged_writes(8, (p.mr, pages), (p.desc, pages)).submit(values))
    p.turn_until(lambda: len(seen) == 4)
    return sorted(seen)


TAKES_NUMBERS = {
    ("Pages.__init__", "indices"): of_pages,
    ("TransferEngine.submit_paged_writes", "imm"): of_imms,
    ("Prepared.submit", "imm"): of_prepared,
}


def test_all_that_takes_memory_is_tried() -> None:
    """A new verb that takes arrays joins the tests below, or fails here."""
    assert set(TAKES_BYTES) == taking("Buffer")
    assert set(TAKES_NUMBERS) == taking("NDArray", "ImmArg")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", TAKES_BYTES, ids=" ".join)
def test_memory_is_taken_in_every_form(where: tuple[str, str], form: str) -> None:
    """A user with a tensor must not have to know which of tep's arguments want an array."""
    values = np.arange(16, dtype=np.uint8)
    with pair() as p:
        assert values.tobytes() == TAKES_BYTES[where](p, FORMS[form](values))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", TAKES_NUMBERS, ids=" ".join)
def test_numbers_are_taken_in_every_form(where: tuple[str, str], form: str) -> None:
    """Page lists and immediates are computed by the framework that computes everything else."""
    values = np.array([3, 1, 70, 9], np.int64)
    with pair() as p:
        found = TAKES_NUMBERS[where](p, FORMS[form](values))
        assert sorted(values.tolist()) == sorted(found)


class OnGpu:
    """An array on a GPU as cupy, numba and torch show it."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (4, 8), "typestr": "|u1", "data": (1 << 40, False), "version": 3}


@pytest.mark.parametrize("where", TAKES_BYTES, ids=" ".join)
def test_memory_of_a_gpu_is_named(where: tuple[str, str]) -> None:
    """It is taken where a NIC reaches it, and elsewhere the error says where it is."""
    with pair() as p, pytest.raises(tep.BadRequest, match="cuda:0"):
        TAKES_BYTES[where](p, OnGpu())


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize("name", sorted(
    name for name, value in PUBLIC.items()
    if dataclasses.is_dataclass(value) and inspect.isclass(value)
))  # fmt: skip
def test_a_misspelt_field_is_named(name: str) -> None:
    """A keyword that is swallowed leaves the default in force, and nobody knows."""
    with pytest.raises(TypeError, match="wait_timeuot_s"):
        PUBLIC[name](wait_timeuot_s=3)

"""tep.compat.nixl: NIXL's interface, its behaviour and its errors, between agents of one process.

Expectations were taken from NIXL 1.5.1 itself (UCX), by the same calls.
"""

from __future__ import annotations

import builtins
import gc
import inspect
import json
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tep
from tep.compat import nixl
from tep.compat.nixl import api, bindings, nixl_agent, nixl_agent_config
from tep.compat.nixl.wire import Grant, Region, Remote, encode
from tests.abi import make_nixl_api

RECORD = json.loads(Path(make_nixl_api.__file__).with_name("nixl_api.json").read_text("utf-8"))
NBYTES = 1 << 16


@pytest.mark.parametrize("name", RECORD["classes"])
def test_signatures_are_nixls(name):
    """An argument by another name breaks the program that passes it by name."""
    ours = getattr(nixl, name)
    for method, shape in RECORD["classes"][name].items():
        assert shape == make_nixl_api.shape(getattr(ours, method)), method


def test_names_are_nixls():
    """A name that is missing is an ImportError in the program."""
    assert set() == set(RECORD["names"]) - set(dir(api))
    assert set() == set(RECORD["bindings"]) - set(dir(bindings))
    for name, members in RECORD["lists"].items():
        assert set() == set(members) - set(dir(getattr(bindings, name)))
    assert set(RECORD["telemetry"]) <= set(dir(bindings.nixlXferTelemetry()))


class World:
    """Two agents, each with a buffer; the second's is full of numbers."""

    def __init__(self, backend, patch):
        patch.setenv("TEP_NIXL_BACKEND", backend)
        self.a = nixl_agent("A", nixl_agent_config(capture_telemetry=True))
        self.b = nixl_agent("B")
        self.mine = np.zeros(NBYTES, np.uint8)
        self.theirs = np.random.default_rng(0).integers(0, 256, NBYTES, np.uint8)
        self.regs = [
            agent.register_memory([(memory.ctypes.data, NBYTES, 0, "")], "DRAM")
            for agent, memory in ((self.a, self.mine), (self.b, self.theirs))
        ]
        self.a.add_remote_agent(self.b.get_agent_metadata())

    def local(self, *spans):
        return self.a.get_xfer_descs([(self.mine.ctypes.data + s, n, 0) for s, n in spans], "DRAM")

    def remote(self, *spans):
        at = self.theirs.ctypes.data
        return self.a.get_xfer_descs([(at + s, n, 0) for s, n in spans], "DRAM")

    def xfer(self, op, mine=(0, 512), theirs=(1024, 512), notif=b""):
        return self.a.initialize_xfer(op, self.local(mine), self.remote(theirs), "B", notif)

    def run(self, handle, notif=b""):
        state, end_s = self.a.transfer(handle, notif), time.monotonic() + 60
        while state == "PROC":
            assert time.monotonic() < end_s
            state = self.a.check_xfer_state(handle)
        return state

    def notifs(self, n):
        """Wait for n notifications at B."""
        end_s = time.monotonic() + 60
        while sum(map(len, self.b.update_notifs().values())) < n:
            assert time.monotonic() < end_s
        return self.b.notifs


@pytest.fixture(params=["local", "loopback"])
def world(request, monkeypatch):
    """Rows of loopback go through calls, those of local through the kernel."""
    found = World(request.param, monkeypatch)
    yield found
    found.a.close()
    found.b.close()


def test_read_and_write_move_the_bytes_and_notify_after_them(world):
    """A notification before its bytes hands the reader somebody else's."""
    assert "DONE" == world.run(world.xfer("READ", notif=b"read"))
    assert (world.mine[:512] == world.theirs[1024:1536]).all()
    world.mine[:] = 7
    assert "DONE" == world.run(world.xfer("WRITE", (0, 9000), (100, 9000), b"written"))
    world.a.send_notif("B", b"after")

    assert {"A": [b"read", b"written", b"after"]} == world.notifs(3)
    assert (world.theirs[100:9100] == 7).all()


def test_lists_of_any_form_and_length(world):
    """Tuples, arrays, strided arrays: what prep_xfer_dlist takes must name the same bytes."""
    n, step = 4096, 16
    base, far = world.mine.ctypes.data, world.theirs.ctypes.data
    order = np.random.default_rng(1).permutation(n)
    rows = np.stack([base + np.arange(n) * step, np.full(n, 8), np.zeros(n, int)], 1)
    lists = [
        world.a.prep_xfer_dlist("NIXL_INIT_AGENT", rows, "DRAM"),
        world.a.prep_xfer_dlist("", [tuple(row) for row in rows.tolist()], "DRAM"),
        world.a.prep_xfer_dlist("", np.array([[base, 8, 0, step, n]]), "DRAM"),
    ]
    there = world.a.prep_xfer_dlist(b"B", np.array([[far, 8, 0, step, n]]), mem_type="DRAM")
    for mine in lists:
        world.mine[:] = 0
        handle = world.a.make_prepped_xfer("READ", mine, order, there, np.arange(n), b"x")
        assert "DONE" == world.run(handle)
        pages = [side.reshape(n, step)[:, :8] for side in (world.mine, world.theirs)]
        assert (pages[0][order] == pages[1]).all()
        assert not world.mine.reshape(n, step)[:, 8:].any()
        world.a.release_xfer_handle(handle)
        world.a.release_dlist_handle(mine)
    assert {"A": [b"x"] * 3} == world.notifs(3)


def test_a_handle_is_posted_again_and_measured(world):
    """Programs keep handles and post them for each step."""
    handle = world.xfer("WRITE", notif=b"first")
    with pytest.raises(bindings.nixlNotPostedError):
        world.a.check_xfer_state(handle)
    world.run(handle)
    with pytest.raises(bindings.nixlNoTelemetryError):
        world.b.get_xfer_telemetry(handle)
    world.run(handle, b"second")  # its notification may be there before it is DONE
    world.run(handle)
    told = world.a.get_xfer_telemetry(handle)

    assert [b"first", b"second", b"second"] == world.notifs(3)["A"]
    assert (512, 1) == (told.totalBytes, told.descCount)
    assert told.xferDuration >= 0
    assert "UCX" == world.a.query_xfer_backend(handle)
    assert (0, 0, "UNKNOWN") == world.a.estimate_xfer_cost(handle)


def test_loopback_to_itself(world):
    """An agent that is its own remote is how some programs copy."""
    at = world.theirs.ctypes.data
    lists = [world.b.get_xfer_descs([(at + s, 100, 0)], "DRAM") for s in (0, 1000)]
    handle = world.b.initialize_xfer("WRITE", *lists, "B", b"self")
    world.b.transfer(handle)

    assert {"B": [b"self"]} == world.notifs(1)
    assert (world.theirs[:100] == world.theirs[1000:1100]).all()


def test_partial_metadata_and_what_is_known(world):
    """A peer that got some of the memory must not be told that it has all."""
    extra = np.zeros(4096, np.uint8)
    reg = world.b.register_memory([(extra.ctypes.data, 4096, 0, "")], "DRAM")
    descs = world.a.get_xfer_descs([(extra.ctypes.data, 16, 0)], "DRAM")

    assert world.a.check_remote_metadata("B")
    assert not world.a.check_remote_metadata("B", descs)
    assert b"B" == world.a.add_remote_agent(world.b.get_partial_agent_metadata(reg))
    assert world.a.check_remote_metadata(b"B", descs)
    assert world.a.check_remote_metadata("B", world.remote((0, 100)))
    world.b.deregister_memory(reg)
    with pytest.raises(bindings.nixlNotFoundError):
        world.b.deregister_memory(reg)
    world.a.remove_remote_agent("B")
    assert not world.a.check_remote_metadata("B")


NUMBER = st.one_of(st.integers(0, 2**16), st.integers(-2, 2**64 - 1))
ROWS = st.lists(st.tuples(NUMBER, NUMBER, st.integers(-1, 8)), min_size=1, max_size=4)


@given(rows=ROWS, dtype=st.sampled_from([np.int64, np.uint64, object]))
def test_descriptors_as_an_array_are_those_as_tuples(rows, dtype):
    """Two ways in that differ would register one memory and read another."""
    try:
        array = np.array(rows, dtype)
    except OverflowError:
        array = np.array(rows, object)
    one_by_one = bindings.nixlXferDList(bindings.DRAM_SEG)
    try:
        for row in rows:
            one_by_one.append(row)
    except TypeError:
        for form in (array, rows):
            with pytest.raises(TypeError):
                bindings.nixlXferDList(bindings.DRAM_SEG, form)
        return
    if array.dtype == object:
        with pytest.raises(TypeError, match="whole numbers in 3 columns"):
            bindings.nixlXferDList(bindings.DRAM_SEG, array)
        array = rows
    for form in (array, rows):
        whole = bindings.nixlXferDList(bindings.DRAM_SEG, form)
        assert len(rows) == len(whole) == whole.descCount()
        assert (np.array(rows, np.int64) == whole.rows()).all()
        assert one_by_one == whole
        assert rows == list(whole)
        whole.append(rows[0])
        whole.remDesc(0)
        assert [*rows[1:], rows[0]] == list(whole) == list(map(tuple, whole.rows().tolist()))
        whole.clear()
        assert whole.isEmpty()


@pytest.mark.slow
def test_the_blocks_of_a_whole_cache_are_never_looked_at_one_by_one(world, monkeypatch):
    """The list of a cache took half a minute beside a thread that spins: leases ran out meanwhile.

    vLLM makes such a list, of each block of each layer, when two of its engines meet.
    """
    at = world.mine.ctypes.data + np.arange(100_000) % NBYTES
    array = np.stack([at, np.ones_like(at), np.zeros_like(at)], 1)

    def called(*_):
        pytest.fail("a descriptor was checked by itself")

    monkeypatch.setattr(bindings.nixlXferDList, "append", called)
    for form in (array, array.astype(np.uint64), list(map(tuple, array.tolist()))):
        descs = world.a.get_xfer_descs(form, "DRAM")
        handle = world.a.prep_xfer_dlist("", descs)
        assert (array == world.a._lists[handle._handle].rows).all()
        assert [] == descs._tuples


def test_descriptor_lists_travel(world):
    """Ray sends them pickled."""
    for descs in (world.regs[0], world.remote((0, 10), (20, 10))):
        again = world.a.deserialize_descs(world.a.get_serialized_descs(descs))
        assert descs == again
        assert type(descs) is type(again)
    assert world.regs[0] == world.a.get_reg_descs(world.regs[0])
    assert 2 == world.remote((0, 10), (20, 10)).descCount()


@pytest.mark.slow
@pytest.mark.parametrize("op", ["READ", "WRITE"])
def test_release_of_an_active_transfer_ends_it(world, op):
    """Memory that is given back while rows of it are under way is written by strangers."""
    n = NBYTES // 8
    rows = [np.array([[side.ctypes.data, 8, 0, 8, n]]) for side in (world.mine, world.theirs)]
    there = world.a.prep_xfer_dlist("B", rows[1], "DRAM")
    which = np.random.default_rng(2).permutation(n)
    for _ in range(5):
        mine = world.a.prep_xfer_dlist("", rows[0], "DRAM")
        handle = world.a.make_prepped_xfer(op, mine, which, there, which[::-1])
        world.a.transfer(handle)
        world.a.release_xfer_handle(handle)
        world.a.deregister_memory(world.regs[0])  # an error while a row is under way
        world.a.register_memory(world.regs[0])
    world.b.deregister_memory(world.regs[1])


def test_numbers_of_failed_writes_stay_out_of_use(world):
    """Rows of a failed write may be counted: its number would make a later one ready too early."""
    world.run(world.xfer("WRITE"))
    (channel, numbers), *_ = world.a._granted.items()
    with world.a.lock:
        numbers.burnt.add(numbers.take())
        world.a._on_lost(channel, "its messages were lost")
        world.a._on_message(channel, encode(Grant(0, 1 << 16)))
    burnt = set(numbers.burnt)
    taken = {numbers.take() for _ in range(1 << 16)}

    assert numbers is world.a._granted[channel]
    assert burnt
    assert not burnt & taken
    assert "DONE" == world.run(world.xfer("WRITE"))


@pytest.mark.parametrize("op", ["READ", "WRITE"])
def test_a_transfer_of_memory_that_is_gone_is_an_error(world, op):
    """The owner has taken its memory back: no reader may get old bytes, no writer be told DONE."""
    handle = world.xfer(op, notif=b"no")
    world.b.deregister_memory(world.regs[1])

    with pytest.raises((bindings.nixlBackendError, bindings.nixlRemoteDisconnectError)):
        world.run(handle)
    with pytest.raises((bindings.nixlBackendError, bindings.nixlRemoteDisconnectError)):
        world.a.check_xfer_state(handle)
    world.a.release_xfer_handle(handle)
    assert {} == world.b.update_notifs()


def test_a_failed_transfer_keeps_nothing_of_its_caller(world):
    """A server keeps failed handles a while: each would hold its caller's tensors."""

    def look(handle):
        tensor = np.zeros(8)
        try:
            world.run(handle)
        except bindings.Error:
            return weakref.ref(tensor)
        pytest.fail("its memory is gone")

    handle = world.xfer("WRITE")
    world.b.deregister_memory(world.regs[1])
    kept = look(handle)
    gc.collect()
    assert kept() is None


def test_a_peer_that_was_started_again_is_another_one(world):
    """Its name is the same, and its memory elsewhere; NIXL ends with a segmentation fault."""
    world.run(world.xfer("READ"))
    old = world.xfer("READ")
    world.b.close()
    world.b = nixl_agent("B")
    world.theirs = np.full(NBYTES, 9, np.uint8)
    world.b.register_memory([(world.theirs.ctypes.data, NBYTES, 0, "")], "DRAM")
    world.a.add_remote_agent(world.b.get_agent_metadata())

    with pytest.raises(bindings.nixlRemoteDisconnectError):
        world.run(old)
    assert "DONE" == world.run(world.xfer("READ", notif=b"again"))
    assert (world.mine[:512] == 9).all()
    assert {"A": [b"again"]} == world.notifs(1)


def test_a_peer_that_left_is_an_error(world):
    """NIXL says REMOTE_DISCONNECT; programs recompute then."""
    handle = world.xfer("READ")
    world.run(handle)
    world.b.close()
    with pytest.raises(bindings.nixlRemoteDisconnectError):
        world.run(handle)
    world.a.remove_remote_agent("B")
    with pytest.raises(bindings.nixlRemoteDisconnectError):
        world.a.transfer(handle)


ERRORS = {
    "NotFound: unknown agent": lambda w: w.a.prep_xfer_dlist("C", [(1, 2, 0)], "DRAM"),
    "Mismatch: no metadata": lambda w: w.a.add_remote_agent(b"junk"),
    "NotFound: outside": lambda w: w.xfer("READ", (NBYTES - 1, 512)),
    "NotFound: outside there": lambda w: w.xfer("READ", theirs=(NBYTES, 512)),
    "InvalidParam: lengths": lambda w: w.xfer("READ", (0, 100)),
    "KeyError: operation": lambda w: w.xfer("PUT"),
    "NotFound: unknown target": lambda w: w.a.send_notif("C", b"x"),
    "NotFound: not met": lambda w: w.b.send_notif("A", b"x"),
    "KeyError: backend": lambda w: w.a.get_new_notifs(["GDS"]),
    "InvalidParam: second backend": lambda w: w.a.create_backend("UCX"),
    "NotFound: no such backend": lambda w: w.a.create_backend("POSIX"),
    "ValueError: strided": lambda w: w.a.prep_xfer_dlist("B", np.zeros((1, 5), int)),
    "TypeError: no list": lambda w: w.a.register_memory([(1, 2, 3)]),
    "NotSupported: storage": lambda w: w.a.query_memory([(0, 1, 0, "")], "UCX", "DRAM"),
    "InvalidParam: no address": lambda w: w.a.fetch_remote_metadata("B"),
    "InvalidParam: oneself": lambda w: w.a.add_remote_agent(w.a.get_agent_metadata()),
    "ValueError: no name": lambda w: nixl_agent(""),
    "TypeError: sync_mode must be": lambda w: nixl_agent_config(sync_mode=1),
    "NotFound: no such descriptor": lambda w: w.local((0, 8)).index((0, 0, 0)),
    "NotFound: not registered so": lambda w: w.b.get_partial_agent_metadata(
        w.b.get_reg_descs([(w.theirs.ctypes.data, 10, 0, "")], "DRAM")
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_nixls(world, name):
    """Programs catch them by type."""
    kind = name.partition(":")[0]
    expected = getattr(builtins, kind, None) or getattr(bindings, f"nixl{kind}Error")
    with pytest.raises(expected):
        ERRORS[name](world)


def test_a_backend_without_reads_is_refused_by_name(monkeypatch):
    """Every READ of it would fail, long after it was opened."""
    monkeypatch.setenv("TEP_NIXL_BACKEND", "loopback")
    monkeypatch.setenv("TEP_NIXL_OPTIONS", '{"reads": 0}')
    agent, memory = nixl_agent("A"), np.zeros(64, np.uint8)
    with pytest.raises(bindings.nixlBackendError, match="opened with reads=0"):
        agent.register_memory([(memory.ctypes.data, 64, 0, "")], "DRAM")
    agent.close()


def test_what_is_registered_in_part_is_given_back(world, monkeypatch):
    """Memory would stay registered, and pinned, that no list names."""
    engine, made, back = world.a.engine, [], []
    reg_mr, deregister = engine.reg_mr, engine.deregister

    def second_fails(memory, **rights):
        if made:
            raise tep.FabricError("no room", code="PROVIDER")
        made.append(reg_mr(memory, **rights))
        return made[0]

    monkeypatch.setattr(engine, "reg_mr", second_fails)
    monkeypatch.setattr(engine, "deregister", lambda mr: (back.append(mr), deregister(mr)))
    spare = np.zeros(8192, np.uint8)
    regs = [(spare.ctypes.data + at, 4096, 0, "") for at in (0, 4096)]
    with pytest.raises(bindings.nixlBackendError, match="no room"):
        world.a.register_memory(regs, "DRAM")

    assert [mr for mr, _ in made] == back


def test_a_tag_is_looked_for_in_front_unless_told_otherwise(world):
    """The notification of another request would be taken for this one's."""
    for message in (b"tag: 1", b"about a tag"):
        world.a.send_notif("B", message)
    world.notifs(2)

    assert not world.b.check_remote_xfer_done("A", b"a tag")
    assert world.b.check_remote_xfer_done("A", b"a tag", tag_is_prefix=False)
    assert world.b.check_remote_xfer_done("A", b"tag")
    assert not world.b.check_remote_xfer_done("A", b"tag", tag_is_prefix=False), "both are taken"


def test_regions_travel_without_the_names_of_their_fields():
    """An agent of the release before could not read them."""
    region = Region(0, 1 << 40, 4096, 0, b"desc")

    assert [0, 1 << 40, 4096, 0, b"desc"] == msgspec.msgpack.decode(msgspec.msgpack.encode(region))


@pytest.mark.parametrize("numbers", [(-1, 9, 0), (0, -9, 0), (1 << 63, 9, 0), (0, 9, -1)])
def test_regions_whose_numbers_are_no_memorys_are_refused(world, numbers):
    """They are a peer's word: such a number overflows where rows are looked for in them."""
    own = Remote.read(world.b.get_agent_metadata())
    region = Region(0, *numbers, own.regions[0].desc)
    with pytest.raises(bindings.nixlMismatchError):
        world.a.add_remote_agent(encode(msgspec.structs.replace(own, regions=(region,))))


def test_prepared_lists_refuse_what_nixl_refuses(world):
    """An index that is not looked at moves another page."""
    mine = world.a.prep_xfer_dlist("", world.local((0, 8), (8, 8)))
    there = world.a.prep_xfer_dlist("B", world.remote((0, 8), (8, 8)))
    for some in ([[0], [1]], 0, np.int64(1), [2], []):
        with pytest.raises(bindings.nixlInvalidParamError):
            world.a.make_prepped_xfer("READ", mine, some, there, some)
    for sides in ((mine, [0, 1], there, [0]), (mine, [0], there, [2])):
        with pytest.raises(bindings.nixlInvalidParamError):
            world.a.make_prepped_xfer("READ", *sides)
    with pytest.raises(bindings.nixlInvalidParamError):
        world.a.make_prepped_xfer("READ", there, [0], mine, [0])
    assert world.a.get_xfer_descs(np.zeros((2, 4)), "DRAM") is None
    assert world.a.get_xfer_descs([(1, 2, 3)]) is None
    assert inspect.isclass(nixl.nixl_thread_sync_t)


class Tensor:
    """What is asked of a tensor of torch."""

    def __init__(self, at, count, device=-1, contiguous=True):
        self.told = {"data_ptr": at, "numel": count, "element_size": 4}
        self.told |= {"get_device": device, "is_contiguous": contiguous}

    def __getattr__(self, name):
        return lambda: self.told[name]


@pytest.mark.parametrize(
    ("device", "kind", "where"), [(-1, "DRAM_SEG", 0), (0, "VRAM_SEG", 0), (3, "VRAM_SEG", 3)]
)
def test_tensors_are_lists_of_where_they_lie(device, kind, where, world, monkeypatch):
    """A wrong length or device registers memory of somebody else, or none."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor))
    a = world.a
    one, two = Tensor(4096, 10, device), Tensor(8192, 3, device)
    for some, count in ((one, 1), ([one, two], 2), ((one, two), 2)):
        descs, regs = a.get_xfer_descs(some), a.get_reg_descs(some)
        assert [(4096, 40, where), (8192, 12, where)][:count] == list(descs)
        assert [(4096, 40, where, b""), (8192, 12, where, b"")][:count] == list(regs)
        assert {kind} == {descs.getType().name, regs.getType().name}


def test_tensors_that_are_no_pieces_of_one_device_are_refused(world, monkeypatch):
    """Only the first tensor's device, or memory between two rows of one, would be moved."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor))
    a, one = world.a, Tensor(4096, 10, 0)
    assert a.get_xfer_descs([one, Tensor(8192, 10, 1)]) is None
    assert a.get_xfer_descs([one, Tensor(8192, 10, 0, contiguous=False)]) is None
    assert a.get_reg_descs([one, Tensor(8192, 10, -1)]) is None

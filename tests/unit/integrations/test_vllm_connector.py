"""tep.integrations.vllm without vLLM: its recorded interface, layouts, parameters, loads."""

from __future__ import annotations

import ast
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock, call

import numpy as np
import pytest

from tep import NetAddr, TransferEngine, UsageError, WaitTimeout
from tep.apps.kvcache import KvBlocks
from tep.integrations.vllm import loads
from tep.integrations.vllm.scheduler import Scheduler
from tep.integrations.vllm.terms import Asked, Orders, Report, Source, Terms, digest_of, views_of
from tep.integrations.vllm.worker import Worker
from tests.abi import make_vllm_api

RECORD = json.loads(Path(make_vllm_api.__file__).with_name("vllm_api.json").read_text("utf-8"))
CONNECTOR = Path(loads.__file__).with_name("connector.py")
TREE = ast.parse(CONNECTOR.read_text("utf-8"))
ADDR = NetAddr("loopback", "p/0", 5, (b"abc",), (10,)).to_bytes()


def methods(name: str) -> dict[str, list[str]]:
    """The methods of a class of the connector's room, and their parameters."""
    (node,) = [n for n in TREE.body if isinstance(n, ast.ClassDef) and n.name == name]
    found = {}
    for one in node.body:
        if isinstance(one, ast.FunctionDef):
            stars = [f"**{one.args.kwarg.arg}"] if one.args.kwarg else []
            names = [arg.arg for arg in (*one.args.args, *one.args.kwonlyargs)] + stars
            found[one.name] = names[1:] if names[0] == "cls" else names
    return found


def test_methods_are_vllms():
    """vLLM passes some arguments by name; a method that it does not know is never called."""
    theirs = RECORD["classes"]["KVConnectorBase_V1"] | RECORD["classes"]["SupportsHMA"]
    ours = methods("TepConnector")
    assert ["self", "vllm_config", "role", "kv_cache_config"] == ours.pop("__init__")

    assert {name: theirs.get(name) for name in ours} == ours


def test_what_vllm_demands_is_there():
    """An abstract method that is missing is an error when an instance starts."""
    needed = """start_load_kv wait_for_layer_load save_kv_layer wait_for_save build_connector_meta
    get_num_new_matched_tokens update_state_after_alloc request_finished_all_groups"""

    assert set(needed.split()) <= methods("TepConnector").keys()


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("SchedulerOutput", "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens"),
        ("SchedulerOutput", "preempted_req_ids kv_connector_metadata finished_req_ids"),
        ("NewRequestData", "req_id block_ids num_computed_tokens"),
        ("CachedRequestData", "req_ids resumed_req_ids new_block_ids num_computed_tokens"),
        ("KVConnectorOutput", "finished_recving kv_connector_worker_meta invalid_block_ids"),
        ("KVConnectorTransferResults", "finished_sending finished_recving failed_recving"),
        ("KVCacheGroupSpec", "layer_names kv_cache_spec"),
        ("FullAttentionSpec", "block_size num_kv_heads"),
    ],
)
def test_fields_that_are_looked_at_exist(kind, names):
    """A field by another name is an AttributeError in the middle of a step."""
    assert set(names.split()) <= set(RECORD["fields"][kind])


def test_functions_that_are_called_exist():
    """So is a method of the pool of blocks, a status, or what is imported."""
    assert {"touch", "free_blocks"} <= RECORD["classes"]["BlockPool"].keys()
    assert "get_block_ids" in RECORD["classes"]["KVCacheBlocks"]
    assert {"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"} <= set(RECORD["statuses"])
    assert ["layer_name"] == RECORD["functions"]["extract_layer_index"][:1]


@pytest.mark.slow
def test_vllm_is_imported_by_the_connector_alone():
    """Without vLLM, all other modules must be importable and testable."""
    code = (
        "import sys, pkgutil, importlib, tep.integrations.vllm as room\n"
        "for one in pkgutil.iter_modules(room.__path__):\n"
        "    if one.name != 'connector': importlib.import_module(f'{room.__name__}.{one.name}')\n"
        "assert not {'vllm', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (0, "") == (done.returncode, done.stderr)


@pytest.mark.parametrize(
    ("shape", "heads", "found"),
    [
        ((7, 2, 16, 8), 2, [("", (7, 2, 16, 8), "bhtd")]),
        ((7, 16, 2, 8), 2, [("", (7, 16, 2, 8), "bthd")]),
        ((7, 7, 16, 8), 7, [("", (7, 7, 16, 8), "bhtd")]),
        ((7, 16, 8), 1, [("", (7, 16, 8), "btd")]),
        ((7, 99), 4, [("", (7, 99), "bd")]),
        ((2, 7, 16, 4, 8), 4, [(f".{k}", (7, 16, 4, 8), "bthd") for k in (0, 1)]),
        ((7, 2, 4, 16, 8), 4, [(f".{k}", (7, 4, 16, 8), "bhtd") for k in (0, 1)]),
    ],
)
def test_layouts_that_vllm_uses(shape, heads, found):
    """Heads taken for tokens would be mixed up where two degrees of parallelism meet."""
    array = np.zeros(shape, np.uint8)
    views = views_of(array, nblocks=7, heads=heads, tokens=16, what="x")

    assert found == [(suffix, view.shape, axes) for suffix, view, axes in views]


def test_another_layout_is_refused_by_name():
    """A guess would be a wrong answer."""
    with pytest.raises(UsageError, match=r"layer.3.*\(7, 5, 16, 8\)"):
        views_of(np.zeros((7, 5, 16, 8)), nblocks=7, heads=2, tokens=16, what="layer.3")


def test_parameters_survive_json():
    """They go through a router, which knows JSON."""
    source = Source("key", (ADDR, ADDR))
    found = Asked.read(json.loads(json.dumps(source.params([1, 2, 3], 30.0))))

    assert source == found.source()
    assert (3, digest_of([1, 2, 3])) == (found.ntokens, found.digest)
    assert Asked("key", found.ranks).source().early


@pytest.mark.parametrize(
    "params",
    [None, 7, {}, {"key": "k"}, {"key": "k", "ranks": []}, {"key": "", "ranks": ["QUJD"]},
     {"key": "k", "ranks": ["%%"]}, {"key": "k", "ranks": ["QUJD"]}, {"key": "k", "ranks": [3]}],
)  # fmt: skip
def test_bad_parameters_are_named_and_the_prompt_is_computed(params):
    """They come from outside: a request must not end the scheduler."""
    with pytest.raises(UsageError, match="tep"):
        Asked.read(params).source()
    request = SimpleNamespace(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        kv_transfer_params={"do_remote_prefill": True, "tep": params},
    )
    scheduler = Scheduler([16])
    scheduler.arrived(request)

    assert (0, False) == scheduler.matched(request, 0)
    assert 1 == sum(scheduler.refused.values())


def test_another_prompt_is_not_loaded():
    """Its blocks would give the answer to a question that nobody asked."""
    params = {"do_remote_prefill": True, "tep": Source("k", (ADDR,)).params([1, 2, 3], 30.0)}
    scheduler = Scheduler([16])
    prompts = {"right": [1, 2, 3], "wrong": [1, 2, 4]}

    def request_of(name):
        return SimpleNamespace(
            request_id=name, prompt_token_ids=prompts[name], kv_transfer_params=dict(params)
        )

    found = []
    for name in prompts:
        scheduler.arrived(request_of(name))
        found.append(scheduler.matched(request_of(name), 0))

    assert [(3, True), (0, False)] == found
    assert (0, False) == scheduler.matched(request_of("right"), 3), "all is here"
    assert digest_of([1, 2, 3]) != digest_of([1, 2, 4])


def test_reports_of_ranks_add_up():
    """A rank that is left out never gives its blocks back."""
    one = Report(bad={1}, doubt={0: {"a"}}, gone={"x"})
    whole = one.aggregate(Report(bad={2}, doubt={0: {"b"}, 1: {"a"}}, certain={1: {"c"}}))

    assert Report(bad={1, 2}, doubt={0: {"a", "b"}, 1: {"a"}}, certain={1: {"c"}},
                  gone={"x"}) == whole  # fmt: skip


@pytest.mark.parametrize(
    "rest", [{"doubt": {0: {"a"}}}, {"certain": {1: {"b"}}}, {"gone": {"c"}}, {}]
)
def test_what_vllm_has_no_field_for_is_reported_besides(rest):
    """Blocks in doubt were used again, or never, as no scheduler heard of them."""
    found = Report(sent={"s"}, received={"r"}, bad={1}, failed={"f"}, **rest).rest()

    assert (Report(**rest) if rest else None) == found


@pytest.mark.parametrize("times", [{"lease_s": 0}, {"lost_after_s": 0.6}, {"lease_s": 0.4}])
def test_times_that_contradict_each_other(times):
    """A lease that ends before its first repeat frees blocks that are wanted."""
    with pytest.raises(UsageError, match="lost_after_s is at least"):
        Terms(**times)


def test_a_preempted_request_that_is_read_for_ever_is_named():
    """vLLM's step waits for this: without a limit an instance stands still in silence."""
    with TransferEngine.open("loopback") as engine:
        blocks = KvBlocks(engine)
        blocks.add("0", 0, np.zeros((4, 2, 2, 8), np.uint8), "bhtd", heads=2)
        worker = Worker(blocks, Terms(load_s=0.02))
        worker.holds.stop = lambda _request: False  # a NIC has its rows
        worker.stop_all(Orders())
        with pytest.raises(WaitTimeout, match=r"load_s=0.02 s .* others: r1, r2\. Restart"):
            worker.stop_all(Orders(stops={"r2", "r1"}))


@pytest.mark.slow
def test_a_process_that_ended_is_known_to_have_ended():
    """Blocks that a killed prefiller could have written stay out of use until this is certain."""
    code = "import os, time; from tep.integrations.vllm.loads import mark_here; "
    code += "print(mark_here(), flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        mark = child.stdout.readline().strip()
        assert mark
        assert not loads.has_ended(mark)
        child.send_signal(signal.SIGKILL)
        end_s = time.monotonic() + 60
        while not loads.has_ended(mark):  # also before anybody has waited for it
            assert time.monotonic() < end_s
    finally:
        child.kill()
        child.communicate()

    assert loads.has_ended(mark)
    assert not loads.has_ended(loads.mark_here())
    assert not loads.has_ended("")
    assert not loads.has_ended(f"another boot/pid[1]:{os.getpid()}:1")


class Event:
    """A CUDA event: what was submitted before its record() has ended once `done` is true."""

    recorded: list[Event]

    def __init__(self):
        self.done = False

    def record(self):
        self.recorded.append(self)

    def query(self):
        return self.done


@pytest.fixture
def saved():
    """The connector's worker, which is told of each layer that is saved."""
    return SimpleNamespace(steps=["a step"], layer_saved=Mock())


@pytest.fixture
def connector(monkeypatch, saved):
    """A connector on stand-ins of torch and vLLM, as register_kv_caches() leaves it."""

    def put(name, *names, **values):
        module = ModuleType(name)
        vars(module).update({one: type(one, (), {}) for one in names} | values)
        monkeypatch.setitem(sys.modules, name, module)

    Event.recorded = []
    put("torch", "Tensor", cuda=SimpleNamespace(Event=Event))
    both = ("rank", "world_size")
    put("vllm.distributed", **{f"get_tensor_model_parallel_{name}": int for name in both})
    kinds = [
        "Base_V1",
        "HandshakeMetadata",
        "Metadata",
        "Role",
        "TransferResults",
        "WorkerMetadata",
    ]
    base = "vllm.distributed.kv_transfer.kv_connector.v1.base"
    put(base, "SupportsHMA", *(f"KVConnector{kind}" for kind in kinds))
    put("vllm.model_executor.models.utils", extract_layer_index=int)
    room = importlib.import_module("tep.integrations.vllm.connector")
    monkeypatch.setitem(sys.modules, room.__name__, room)  # it goes away with the stand-ins
    found = object.__new__(room.TepConnector)
    found._layers, found._events = {"first": 0, "second": 1}, deque()
    found._worker = saved
    return found


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lease_s": -1}, "times are positive"),
        ({"lease_s": "abc"}, "Expected `float`"),
        ({"lease": 1}, r"unknown options \['lease'\]"),
    ],
)
def test_a_wrong_option_is_refused_by_name(connector, monkeypatch, options, said):
    """Who starts vLLM must read which of its options is wrong, in tep's words."""
    kind = type(connector)
    monkeypatch.setattr(kind.__base__, "__init__", lambda *_: None)
    config = SimpleNamespace(
        parallel_config=None,
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=options, engine_id="e"),
    )

    with pytest.raises(UsageError, match=f"^TepConnector: .*{said}"):
        kind(config, None)


def test_a_layer_on_the_cpu_is_sent_when_it_is_saved(connector, saved):
    """Nothing else would send it: its blocks would be kept until their lease ends."""
    connector.save_kv_layer("second", SimpleNamespace(device=SimpleNamespace(type="cpu")), None)
    assert [call(1)] == saved.layer_saved.mock_calls
    assert [] == Event.recorded
    saved.steps.clear()
    connector.save_kv_layer("first", SimpleNamespace(device=SimpleNamespace(type="cpu")), None)
    assert 1 == saved.layer_saved.call_count
    connector._worker = None
    connector.save_kv_layer("first", None, None)


def test_a_layer_on_a_gpu_is_sent_once_its_kernels_have_ended(connector, saved):
    """Sent before, it would be what the blocks held before; sent out of turn, a later step's."""
    layer = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    connector.save_kv_layer("first", layer, None)
    steps, saved.steps = saved.steps, ["a later step"]
    connector.save_kv_layer("second", layer, None)
    first, second = Event.recorded
    second.done = True
    connector.wait_for_save()
    assert [] == saved.layer_saved.mock_calls
    first.done = True
    connector.wait_for_save()
    assert [call(0, steps), call(1, saved.steps)] == saved.layer_saved.mock_calls
    connector.wait_for_save()
    assert 2 == saved.layer_saved.call_count


@pytest.mark.parametrize("told", [Report(gone={"key"}), Report()])
def test_the_scheduler_is_sent_what_vllms_results_have_no_field_for(connector, told):
    """Blocks in doubt would never come back, or an empty message go round in every step."""
    connector._report = told
    meta = connector.build_connector_worker_meta()

    assert told.rest() == (meta and meta.report)

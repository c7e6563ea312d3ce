"""The adapters for vLLM, verl and NeMo-RL, held to the recorded interfaces of these."""

from __future__ import annotations

import ast
import asyncio
import base64
import importlib
import json
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

import tep
from tep.integrations import weights
from tep.integrations.weights import member, register
from tests.abi import make_weights_api

RECORD = json.loads(
    Path(make_weights_api.__file__).with_name("weights_api.json").read_text("utf-8")
)
ROOM = Path(weights.__file__).parent
OURS = [  # package, room, our class, theirs, what is ours alone
    ("vllm", "vllm_engine", "TepWeightTransferEngine", "WeightTransferEngine", set()),
    (
        "vllm",
        "vllm_engine",
        "TepTrainerWeightTransferEngine",
        "TrainerWeightTransferEngine",
        {"push_weights", "commit_weights"},
    ),
    ("vllm", "vllm_engine", "ShardedSource", "WeightSource", set()),
    ("verl", "verl_engine", "TepCheckpointEngine", "CheckpointEngine", set()),
    ("nemo_rl", "nemo_engine", "TepCheckpointEngine", "CheckpointEngine", set()),
]


def methods(room: str, name: str) -> dict[str, list[str]]:
    """The public methods of a class, and the names of their parameters."""
    tree = ast.parse((ROOM / f"{room}.py").read_text("utf-8"))
    (node,) = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name]
    found = {}
    for one in node.body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and not one.name.startswith("_"):
            names = [arg.arg for arg in (*one.args.args, *one.args.kwonlyargs)]
            found[one.name] = names[1:] if names[:1] == ["cls"] else names
    return found


@pytest.mark.parametrize(("package", "room", "ours", "theirs", "own"), OURS)
def test_methods_are_those_that_are_called(package, room, ours, theirs, own):
    """Arguments go by name; a method that the other side does not know is never called."""
    expected = RECORD[package]["classes"][theirs]
    found = methods(room, ours)

    assert own <= found.keys()
    for name in found.keys() - own:
        if expected[name][-1:] != ["**kwargs"]:
            assert expected[name] == found[name], name
    assert set(RECORD[package]["abstract"][theirs]) - {"__iter__"} <= found.keys()


def test_what_vllm_is_asked_for_is_there():
    """An import that fails is a worker that does not start."""
    vllm = RECORD["vllm"]
    assert ["name", "module_path_or_cls", "class_name"] == (
        vllm["classes"]["WeightTransferEngineFactory"]["register_engine"]
    )
    assert ["model"] == vllm["functions"]["initialize_layerwise_reload"]
    assert "finalize_layerwise_reload" in vllm["functions"]
    assert ["rank"] == vllm["fields"]["TrainerInitInfo"]
    init = vllm["classes"]["TrainerWeightTransferEngine"]["__init__"]
    assert ["self", "client", "source", "is_sender"] == init


# ---------------------------------------------------------------------- run, on stand-ins


class Base:
    """In place of a framework's base class."""

    def __class_getitem__(cls, _):
        return cls


class Engine(Base):
    """vLLM's, as far as ours leans on it."""

    def __init__(self, config, vllm_config, device, model):
        self.model_config, self.device, self.model = vllm_config, device, model

    def parse_update_info(self, told):
        return self.update_info_cls(**told)


class Trainer(Base):
    def __init__(self, *, client, source, is_sender):
        self.client, self.source, self.is_sender = client, source, is_sender


@dataclass
class TrainerInfo:
    rank: int = field(kw_only=True)

    @property
    def is_sender(self):
        return self.rank == 0


REGISTRY = {}
RELOADS = []  # the calls of vLLM's functions for loading by layers, and of the device


def registered(name):
    return lambda cls: REGISTRY.setdefault(name, cls)


@pytest.fixture
def room(monkeypatch):
    """Import an adapter over stand-ins of what it is for; weights arrive as arrays, not tensors."""

    def put(name, **names):
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)

    put("torch", nn=SimpleNamespace(Module=object), Tensor=(), isnan=np.isnan,
        empty=lambda shape, dtype=float, device=None: np.zeros(shape, dtype),
        accelerator=SimpleNamespace(is_available=lambda: True,
                                    synchronize=lambda: RELOADS.append("synchronize")))  # fmt: skip
    bases = {"TrainerInitInfo": TrainerInfo, "TrainerWeightTransferEngine": Trainer}
    empty = ("WeightSource", "WeightTransferInitInfo", "WeightTransferUpdateInfo")
    bases |= {name: type(name, (), {}) for name in empty} | {"WeightTransferEngine": Engine}
    put("vllm.distributed.weight_transfer.base", **bases)
    RELOADS.clear()
    reload = {
        f"{when}_layerwise_reload": lambda *given, when=when: RELOADS.append((when, *given))
        for when in ("initialize", "finalize")
    }
    put("vllm.model_executor.model_loader.reload", **reload)
    put("ray", util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"))
    registry = SimpleNamespace(register=registered)
    put("verl.checkpoint_engine.base", CheckpointEngine=Base, CheckpointEngineRegistry=registry)
    put("nemo_rl.utils.checkpoint_engines.base", CheckpointEngine=Base)

    def arrays(found, _):
        return ((one.param.name, one.values.copy()) for one in found)

    def get(name):
        for each in ("shards", name):
            full = f"tep.integrations.weights.{each}"
            monkeypatch.delitem(sys.modules, full, raising=False)
            found = importlib.import_module(full)
            monkeypatch.setitem(sys.modules, full, found)  # it goes away with the stand-ins
            if hasattr(found, "named_tensors"):
                monkeypatch.setattr(found, "named_tensors", arrays)
        return found

    return get


class Source(dict):
    """A WeightSource: name and tensor, each time anew."""

    def __iter__(self):
        return iter(self.items())


class Model:
    def __init__(self):
        self.found, self.hooks, self.broken = {}, [], False

    def named_modules(self):
        return ()

    named_parameters = named_modules

    def load_weights(self, tensors):
        RELOADS.append("load")
        self.found = dict(tensors)
        if self.broken:
            raise RuntimeError("half of it")

    def register_forward_pre_hook(self, hook):
        self.hooks.append(hook)
        return SimpleNamespace(remove=self.hooks.clear)


class Client:
    """A stand-in for vLLM's worker, which uses its engine when the trainer calls."""

    def __init__(self, engine):
        self.engine, self.active, self.lose = engine, False, False

    def init_weight_transfer_engine(self, told):
        self.engine.init_transfer_engine(self.engine.init_info_cls(**told))

    def start_weight_update(self):
        assert not self.active, "start_weight_update called while one is active"
        self.engine.start_weight_update()
        self.active = True

    def update_weights(self, told):
        try:
            self.engine.update_weights(told)
        except BaseException:
            self.active = False
            raise
        if self.lose and not told.get("cancel"):
            raise ConnectionError("lost")

    def finish_weight_update(self, version=None):
        self.engine.finish_weight_update()
        self.active, self.version = False, version


def test_vllm_loads_a_version_in_one_call(room):
    """The model is touched by finish_weight_update alone, and a failure leaves it as it was."""
    vllm = room("vllm_engine")
    model = Model()
    worker = vllm.TepWeightTransferEngine(None, "config", "cpu", model)
    client, source = Client(worker), Source(a=np.full(5, 1.0, np.float32))
    info = vllm.TepTrainerInitInfo(rank=0, timeout_s=30.0)
    trainer = vllm.TepTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)
    try:
        trainer.push_weights()
        assert ({}, None) == (model.found, worker.version)
        trainer.commit_weights()
        assert (1.0, 1, "1") == (model.found["a"][0], worker.version, client.version)
        loaded = [("initialize", model), "load", ("finalize", model, "config"), "synchronize"]
        assert loaded == RELOADS
        with pytest.raises(tep.UsageError, match="nothing was pushed"):
            trainer.commit_weights()
        source["a"][...], client.lose = 2.0, True
        with pytest.raises(ConnectionError):
            trainer.send_weights()
        client.lose = False
        assert (1.0, 1, False) == (model.found["a"][0], worker.version, client.active)
        worker.start_weight_update()
        worker.update_weights({"version": 2, "cancel": True})  # no error: other ranks answer too
        worker.finish_weight_update()
        assert (1.0, 1) == (model.found["a"][0], worker.version)
        source["a"][...] = np.nan
        with pytest.raises(tep.FabricError, match="a: 5 of 5 values are infinite or NaN"):
            trainer.send_weights()
        source["a"][...], model.broken = 3.0, True
        with pytest.raises(RuntimeError, match="half of it"):
            trainer.send_weights()
        assert (None, 1) == (worker.version, len(model.hooks))
        with pytest.raises(tep.UsageError, match="loading version 4 failed"):
            model.hooks[0]()
        client.active, model.broken = False, False
        trainer.send_weights()
        assert (3.0, 5, []) == (model.found["a"][0], worker.version, model.hooks)
        with pytest.raises(tep.UsageError, match="no version was received"):
            worker.finish_weight_update()
    finally:
        trainer.shutdown()
        worker.shutdown()


class UnquantizedMethod:
    """By whose name a layer is known to load numbers as they are."""


class Parameter(np.ndarray):
    """An array with what vLLM's parameters have beside."""

    def element_size(self):
        return self.itemsize


class Layer:
    """A tensor parallel layer with the attributes of vLLM's, which loads as vLLM's do.

    `outs`: rows of each source over all ranks. `copies`: ranks that share a head of keys or values.
    """

    quant_method = UnquantizedMethod()

    def __init__(self, rank, ranks, outs, columns, *, by="rows", copies=1, bias=False):
        self.tp_rank, self.tp_size, self.input_size = rank, ranks, columns
        self._rank, self._ranks = rank, ranks
        self.num_kv_head_replicas = copies
        per = ranks if by == "rows" else 1
        shared = [1, *[copies] * (len(outs) - 1)]
        self.output_partition_sizes = [n * c // per for n, c in zip(outs, shared)]
        self._sizes = self.output_partition_sizes
        self.output_size = sum(self.output_partition_sizes) * per
        self.input_size_per_partition = columns // (ranks if by == "columns" else 1)
        rows = sum(self.output_partition_sizes)
        self.weight = self.make((rows, self.input_size_per_partition))
        if bias:
            self.bias = self.make((rows,))

    def make(self, shape):
        made = np.zeros(shape, np.float32).view(Parameter)
        made.weight_loader = self.weight_loader
        return made

    def weight_loader(self, param, loaded, k=0):
        sizes = self._sizes
        rank = self._rank // (self.num_kv_head_replicas if k else 1)
        rank = rank if self.output_size != sum(sizes) or self._ranks == 1 else 0
        low, left = sum(sizes[:k]), self._rank * self.input_size_per_partition
        left = left if self.input_size_per_partition < self.input_size else 0
        loaded = loaded[rank * sizes[k] : (rank + 1) * sizes[k]]
        if loaded.ndim > 1:
            loaded = loaded[:, left : left + self.input_size_per_partition]
        param[low : low + sizes[k]] = loaded


class SglangLayer(Layer):
    """The same with the attributes of SGLang's: the group among which it is divided, if it is."""

    def __init__(self, rank, ranks, outs, columns, *, by="rows", **more):
        super().__init__(rank, ranks, outs, columns, by=by, **more)
        group = SimpleNamespace(rank_in_group=rank, world_size=ranks)
        self.tp_group = None if by == "none" else group
        del self.tp_rank, self.tp_size
        if by != "rows":
            del self.output_partition_sizes


class Vocabulary(Layer):
    """An embedding, whose last rank has rows that are no word's."""

    def __init__(self, rank, ranks, words, columns):
        super().__init__(rank, 1, [-(-words // 64) * 64 // ranks], columns)
        start, stop = (min(words, k * len(self.weight)) for k in (rank, rank + 1))
        self.org_vocab_size = words
        self.shard_indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=stop)

    def weight_loader(self, param, loaded, k=0):
        rows = self.shard_indices
        mine = loaded[rows.org_vocab_start_index : rows.org_vocab_end_index]
        param[: len(mine)] = mine


class Sly(Layer):
    """A layer that turns its weight over before it takes its columns."""

    def weight_loader(self, param, loaded, k=0):
        super().weight_loader(param, loaded[:, ::-1], k)


class ParallelModel(Model):
    """One rank's part of a decoder layer with an embedding."""

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, rank, ranks, last=None, layer=Layer):
        super().__init__()
        self.rank = rank
        norm = SimpleNamespace(weight=np.zeros(16, np.float32).view(Parameter))
        self.layers = {
            "embed": Vocabulary(rank, ranks, 100, 16),
            "attn.qkv_proj": layer(rank, ranks, [32, 16, 16], 16, copies=2, bias=True),
            "attn.o_proj": layer(rank, ranks, [16], 32, by="columns"),
            "mlp.gate_up_proj": layer(rank, ranks, [48, 48], 16),
            "mlp.down_proj": (last or layer)(rank, ranks, [16], 48, by="columns"),
            "mlp.router": layer(rank, ranks, [8], 16, by="none"),
            "norm": norm,
        }

    def named_modules(self):
        return self.layers.items()

    def named_parameters(self):
        for name, layer in self.layers.items():
            for leaf in ("weight", "bias"):
                if hasattr(layer, leaf):
                    yield f"{name}.{leaf}", getattr(layer, leaf)

    def parameters(self):
        return (SimpleNamespace(device="cpu") for _ in self.named_parameters())

    def load_weights(self, tensors):
        joined = {
            one: (name, k)
            for name, many in self.packed_modules_mapping.items()
            for k, one in enumerate(many)
        }
        for name, tensor in tensors:
            *above, source, leaf = name.split(".")
            fused, k = joined.get(source, (source, 0))
            param = getattr(self.layers[".".join([*above, fused])], leaf)
            if hasattr(param, "weight_loader"):
                param.weight_loader(param, tensor, k)
            else:
                param[...] = tensor
        self.found = True


def checkpoint():
    shapes = {
        "embed.weight": (100, 16),
        **{f"attn.{k}_proj.weight": (n, 16) for k, n in (("q", 32), ("k", 16), ("v", 16))},
        **{f"attn.{k}_proj.bias": (n,) for k, n in (("q", 32), ("k", 16), ("v", 16))},
        "attn.o_proj.weight": (16, 32),
        "mlp.gate_proj.weight": (48, 16),
        "mlp.up_proj.weight": (48, 16),
        "mlp.down_proj.weight": (16, 48),
        "mlp.router.weight": (8, 16),
        "norm.weight": (16,),
    }
    dice = np.random.default_rng(5)
    return {name: dice.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("shards", [True, False])
def test_vllm_ranks_ask_only_for_what_their_shards_need(room, shards):
    """All of a model for each of four ranks is four times the bytes on their NICs."""
    vllm, ranks = room("vllm_engine"), 4
    models = [ParallelModel(rank, ranks) for rank in range(ranks)]
    workers = [vllm.TepWeightTransferEngine(None, None, "cpu", model) for model in models]
    client = SimpleNamespace(
        init_weight_transfer_engine=lambda told: [Client(w).init_weight_transfer_engine(told)
                                                  for w in workers]
    )  # fmt: skip
    info = vllm.TepTrainerInitInfo(rank=0, timeout_s=30.0, shards=shards)
    weights = Source(checkpoint())
    trainer = vllm.TepTrainerWeightTransferEngine.trainer_init(info, client=client, source=weights)
    try:
        report = trainer._member.send(weights.items(), 1)
        for worker in workers:
            worker.start_weight_update()
            worker.update_weights({"version": 1})
            worker.finish_weight_update()
    finally:
        trainer.shutdown()
        for worker in workers:
            worker.shutdown()

    for model in models:
        alone = ParallelModel(model.rank, ranks)
        alone.load_weights(weights.items())
        for (name, found), (_, expected) in zip(model.named_parameters(), alone.named_parameters()):
            assert expected.tobytes() == found.tobytes(), name
    needed = sum(one.nbytes for model in models for _, one in model.named_parameters())
    needed -= (128 - 100) * 16 * 4  # rows of the embedding that are no word's
    moved = sum(train.written_bytes for train in report.trains)
    if shards:
        assert needed <= moved <= 1.01 * needed
    else:
        assert moved == ranks * sum(one.nbytes for one in weights.values())
        assert moved > 3 * needed


def sglang_obeys(sglang, model, what):
    """Have a rank's loader called with what a trainer has sent."""
    sglang.load(model, pickle.loads(base64.b64decode(sglang.order(what))))  # noqa: S301  # ours


def test_sglang_ranks_ask_only_for_what_their_shards_need(room):
    """The loader is all that SGLang calls: an order that it does not obey leaves old weights."""
    sglang, ranks = room("sglang_engine"), 4
    models = [ParallelModel(rank, ranks, layer=SglangLayer) for rank in range(ranks)]
    weights = checkpoint()
    trainer = member.Member("trainer", member.Fabric(timeout_s=30.0))
    try:
        with pytest.raises(tep.UsageError, match="version 1 was ordered before"):
            sglang_obeys(sglang, models[0], sglang.Load(1))
        join = sglang.Join(trainer.lead(world=1), timeout_s=30.0)
        for model in models:
            sglang_obeys(sglang, model, join)
        report = trainer.send(weights.items(), 1)
        assert all(not model.found for model in models), "a model was touched before its order"
        for model in models:
            sglang_obeys(sglang, model, sglang.Load(1))
        assert ["synchronize"] * ranks == RELOADS  # the memory is written again after each
        with pytest.raises(tep.UsageError, match="wants tensors of order"):
            sglang.load(models[0], [("layers.0.weight", None)])
    finally:
        trainer.close()
        for rank in sglang._ranks.values():
            rank.member.close()

    for model in models:
        alone = ParallelModel(model.rank, ranks, layer=SglangLayer)
        alone.load_weights(weights.items())
        for (name, found), (_, expected) in zip(model.named_parameters(), alone.named_parameters()):
            assert expected.tobytes() == found.tobytes(), name
    needed = sum(one.nbytes for model in models for _, one in model.named_parameters())
    needed -= (128 - 100) * 16 * 4  # rows of the embedding that are no word's
    assert needed <= sum(train.written_bytes for train in report.trains) <= 1.01 * needed


def test_sglang_that_cannot_join_keeps_no_engine(room, monkeypatch):
    """Its NICs and threads would stay for as long as the server lives."""
    sglang, closed, close = room("sglang_engine"), [], member.Member.close
    monkeypatch.setattr(member.Member, "close", lambda self: closed.append(close(self)))
    with pytest.raises(tep.TepError):
        sglang_obeys(
            sglang, Model(), sglang.Join(member.Meeting("127.0.0.1", 1, "t"), timeout_s=0.1)
        )

    assert 1 == len(closed)
    assert {} == sglang._ranks


def test_sglang_that_reads_more_than_its_shard_ends(room):
    """An error ends the server; without one it would answer from any old memory."""
    sglang = room("sglang_engine")
    model = ParallelModel(0, 2, last=Sly, layer=SglangLayer)
    former, trainer = (member.Member(name, member.Fabric(timeout_s=30.0)) for name in "ab")
    try:
        for one in (former, trainer):  # a trainer that was started again
            join = sglang.Join(one.lead(world=1), timeout_s=30.0)
            sglang_obeys(sglang, model, join)
        trainer.send(checkpoint().items(), 1)
        with pytest.raises(tep.UsageError, match=r"\['mlp.down_proj.weight'\] read more"):
            sglang_obeys(sglang, model, sglang.Load(1))
    finally:
        former.close()
        trainer.close()
        for rank in sglang._ranks.values():
            rank.member.close()


def test_a_vllm_layer_that_reads_more_than_it_says_is_found_out(room):
    """What did not arrive is any old memory, and a model of it answers nonsense."""
    vllm = room("vllm_engine")
    model = ParallelModel(0, 2, last=Sly)
    worker = vllm.TepWeightTransferEngine(None, None, "cpu", model)
    info = vllm.TepTrainerInitInfo(rank=0, timeout_s=30.0)
    trainer = vllm.TepTrainerWeightTransferEngine.trainer_init(
        info, client=Client(worker), source=Source(checkpoint())
    )
    try:
        with pytest.raises(tep.UsageError, match=r"\['mlp.down_proj.weight'\] read more"):
            trainer.send_weights()
        with pytest.raises(tep.UsageError, match="loading version 1 failed"):
            model.hooks[0]()
    finally:
        trainer.shutdown()
        worker.shutdown()


def test_vllm_says_what_is_missing(room):
    """Several trainers that do not know where to meet would wait for each other."""
    vllm = room("vllm_engine")
    init = vllm.TepTrainerWeightTransferEngine.trainer_init
    for info, source, message in [
        (vllm.TepTrainerInitInfo(rank=0), None, "a source of weights"),
        (vllm.TepTrainerInitInfo(rank=1, world=2), Source(), "host, port and token"),
    ]:
        with pytest.raises(tep.UsageError, match=message):
            init(info, client=None, source=source)
    with pytest.raises(tep.UsageError, match="init_weight_transfer_engine comes first"):
        vllm.TepWeightTransferEngine(None, None, "cpu", Model()).start_weight_update()


def verl_group(room):
    """Two training ranks and two rollout ranks, as verl's manager brings them together."""
    room("verl_engine")
    cls = REGISTRY.pop("tep")
    engines = [cls(bucket_size=1, timeout_s=30.0) for _ in range(4)]

    def join(pool):
        metadata = [one.prepare() for one in engines]
        parts = cls.build_topology(2, 2, metadata)
        told = [{key: values[k] for key, values in part.items()} for part in parts for k in (0, 1)]
        list(pool.map(lambda pair: pair[0].init_process_group(**pair[1]), zip(engines, told)))

    async def take(engine):
        return {name: array async for name, array in engine.receive_weights(global_steps=1)}

    return engines, join, take


def nemo_group(room):
    """The same as NeMo-RL does it."""
    nemo = room("nemo_engine")
    engines = [nemo.TepCheckpointEngine(40, timeout_s=30.0) for _ in range(4)]

    def join(pool):
        metadata = [one.prepare() for one in engines]
        both = {"train_world_size": 2, "rollout_world_size": 2, "metadata": metadata}
        calls = [(engines[k].init_policy_process_group, {"worker_rank": k}) for k in (0, 1)]
        calls += [(engines[k].init_rollout_process_group, {"rollout_rank": k - 2}) for k in (2, 3)]
        list(pool.map(lambda call: call[0](**call[1], **both), calls))

    async def take(engine):
        batches = [batch async for batch in engine.receive_weight_batches()]
        assert [1, 1] == [len(batch) for batch in batches]  # 40 bytes and 4, in buckets of 40
        return {name: array for batch in batches for name, array in batch}

    return engines, join, take


@pytest.mark.parametrize("group", [verl_group, nemo_group])
def test_rounds_of_trainers_that_build_groups_anew(room, group):
    """Each round prepares, joins, sends and receives; a round that fails fails on every rank."""
    engines, join, take = group(room)
    running = f"tep weights {engines[0].prepare()['name']}"
    try:
        with ThreadPoolExecutor(4) as pool:
            for value in (1.0, 2.0, np.inf, 3.0):
                join(pool)
                sent = {"a": np.full(10, value, np.float32), "b": np.ones(1, np.int32)}
                work = [
                    lambda one=one, s=sent: one.send_weights(iter(s.items())) for one in engines[:2]
                ]
                work += [lambda one=one: take(one) for one in engines[2:]]
                done = [pool.submit(lambda make=make: asyncio.run(make())) for make in work]
                if value == np.inf:
                    for one in done:
                        with pytest.raises(tep.TepError, match="a: "):
                            one.result(60)
                    continue
                for one in done[2:]:
                    found = one.result(60)
                    assert (value, ["a", "b"]) == (found["a"][9], list(found))
                for one in done[:2]:
                    one.result(60)
    finally:
        for engine in engines:
            engine._worker.close()
    assert running not in {thread.name for thread in threading.enumerate()}


def test_a_worker_is_of_one_kind(room):
    """A training rank that receives would wait for itself."""
    verl = room("verl_engine")
    REGISTRY.clear()
    engine = verl.TepCheckpointEngine(bucket_size=1)
    with pytest.raises(tep.UsageError, match="prepare"):
        engine.init_process_group(0, 1, [{}])
    with pytest.raises(tep.UsageError, match="no training rank"):
        asyncio.run(engine.send_weights(iter(())))


def test_the_plugin_registers_once_and_leaves_an_old_vllm_alone(monkeypatch):
    """vLLM loads it in every process; one that raises is a vLLM that does not start."""
    rooms = ["vllm", "vllm.distributed", "vllm.distributed.weight_transfer"]
    for name in rooms[:2]:
        module = ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    register()  # there is no weight transfer in it

    class Factory:
        _registry: ClassVar = {}

        @classmethod
        def register_engine(cls, name, room, engine):
            assert name not in cls._registry
            cls._registry[name] = engine

    package, factory = ModuleType(rooms[2]), ModuleType(f"{rooms[2]}.factory")
    package.__spec__ = factory.__spec__ = SimpleNamespace()
    package.factory, factory.WeightTransferEngineFactory = factory, Factory
    monkeypatch.setitem(sys.modules, rooms[2], package)
    monkeypatch.setitem(sys.modules, f"{rooms[2]}.factory", factory)
    register()
    register()

    assert {"tep": "TepWeightTransferEngine"} == Factory._registry

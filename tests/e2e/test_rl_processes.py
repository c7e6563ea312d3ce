"""Four training and two inference processes over libfabric tcp: a real file, a load, a death."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from tep.apps.rl.compute import numpy_dtype
from tep.apps.rl.job import Job, RankedJob, work_as_rank
from tep.apps.rl.models import InferLayout, TrainLayout, load_model, rollout_metas
from tep.apps.rl.weights import Checkpoint
from tep.base.errors import UsageError
from tep.cli.rl import app
from tep.rendezvous import Place
from tep.rendezvous.launch import launch
from tests.support.here import require
from tests.support.rl_serving import Fleet
from tests.support.safetensors import write_safetensors
from tests.unit.apps.rl_reference import reference_region

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
}
SMALL = CONFIG | {
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}
TRAIN, INFER = TrainLayout(fsdp=2, ep=2), InferLayout(ep=2)
MB = 1_000_000


def write_version(model, version, path):
    """A checkpoint of one version; values of a trained model's size."""
    rng = np.random.default_rng(version)
    tensors = []
    for tensor in model.tensors:
        values = rng.standard_normal(tensor.shape, np.float32) * np.float32(0.02)
        tensors.append((tensor, values.astype(numpy_dtype(tensor.dtype))))
    return write_safetensors(path, tensors), {t.name: v for t, v in tensors}


def expected(model, tensors):
    """Digest, and digest of what a request of the load reads, for each rollout worker."""
    found = {}
    for meta in rollout_metas(model, INFER):
        region, _ = reference_region(meta, tensors)
        step = max(1, len(region) >> 20)
        found[meta.name] = (
            hashlib.sha256(region).hexdigest(),
            hashlib.sha256(region[::step].tobytes()).hexdigest(),
        )
    return found


@pytest.fixture
def libfabric():
    """Skip where libfabric is not: that is news of the machine, not of this code."""
    require("tcp")


class Deaf:
    """A training rank that does not hear when an update begins."""

    def __init__(self, port):
        self.port = port

    def __getattr__(self, name):
        return getattr(self.port, name)

    async def transfer_weights(self, attempt, skip):
        """Never begin."""
        await asyncio.get_running_loop().create_future()


class Scenario:
    """Six processes, two versions of the weights, and what each rollout worker must hold then."""

    def __init__(self, config, mb, folder, backend="libfabric", options=None):
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        model = load_model(folder / "config.json")
        self.files, self.wanted = {}, {}
        for version in (1, 2):
            self.files[version] = str(folder / f"v{version}.safetensors")
            size, tensors = write_version(model, version, self.files[version])
            assert size >= mb * MB
            self.wanted[version] = expected(model, tensors)
        job = Job(
            model=str(folder / "config.json"),
            weights=self.files[1],
            train=TRAIN,
            infer=INFER,
            backend=backend,
            options={"nics": 1, **({"provider": "tcp"} if options is None else options)},
        )
        self.fleet = Fleet(job, folder)
        self.served = dict.fromkeys(expected(model, tensors), 0)

    async def check(self, weights, version, names=("rollout0", "rollout1")):
        """Every byte, and every answer that was given to a request."""
        for name in names:
            actor = self.fleet.rollouts[name]
            assert self.wanted[weights][name][0] == await actor.digest()
            assert version == (await actor.state()).serving

    async def check_load(self, weights_of):
        """All requests of a version got the same, right answer."""
        for name in self.fleet.rollouts:
            report = await self.fleet.load_report(name)
            self.served[name] += report.served
            for version, answers in report.answers.items():
                assert [self.wanted[weights_of[version]][name][1]] == answers

    async def updates_under_load(self):
        """Two updates, while the rollout workers serve."""
        first = await self.fleet.controller.update(1)
        assert first.ok, first.error + first.table()
        await self.check(1, 1)
        await self.check_load({1: 1})
        await self.fleet.load(self.files[2])
        second = await self.fleet.controller.update(2)
        assert second.ok, second.table()
        assert not second.rerouted
        await self.check(2, 2)
        await self.check_load({1: 1, 2: 2})
        assert min(self.served.values()) > 0

    async def a_rollout_worker_is_killed(self):
        """Between two updates; it is served again after its restart."""
        await self.fleet.kill("rollout1")
        await self.fleet.load(self.files[1])
        third = await self.fleet.controller.update(3)
        assert third.ok, third.table()
        assert "lost" == third.outcome("rollout1")
        assert "updated" == third.outcome("rollout0")
        await self.check(1, 3, ["rollout0"])
        await self.fleet.restart_rollout("rollout1")
        fourth = await self.fleet.controller.update(4)
        assert fourth.rerouted
        await self.check(1, 4)

    async def a_training_rank_is_killed(self):
        """While rows are on their way; nobody serves what is half there.

        Of the experts' two sub-meshes {0, 2} and {1, 3} one writes, to rollout1; that
        rank 2 does not hear of the update sees to it that this cannot be through before rank 1 is
        killed.
        """
        self.fleet.controller.replace(2, Deaf(self.fleet.trains[2]))
        fifth = asyncio.create_task(self.fleet.controller.update(5))
        state = await self.fleet.rollouts["rollout1"].state()
        while state.attempt < 5 or not state.arrived:
            assert not fifth.done(), (await fifth).error
            await asyncio.wait({fifth}, timeout=0.005)
            state = await self.fleet.rollouts["rollout1"].state()
        assert state.arrived < state.expected
        await self.fleet.kill("train1")
        report = await fifth
        assert not report.ok
        assert "training rank" in report.error
        for actor in self.fleet.rollouts.values():
            assert (await actor.state()).serving is None
        self.fleet.controller.replace(2, self.fleet.trains[2])
        await self.fleet.restart_train(1, self.files[2])
        await self.fleet.load(self.files[2])
        sixth = await self.fleet.controller.update(6)
        assert sixth.ok, sixth.error + sixth.table()
        await self.check(2, 6)

    async def main(self):
        """All of it, one after the other."""
        async with self.fleet:
            await self.updates_under_load()
            await self.a_rollout_worker_is_killed()
            await self.a_training_rank_is_killed()


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("config", "mb"),
    [
        pytest.param(SMALL, 15, id="15MB"),
        pytest.param(CONFIG, 200, id="200MB", marks=pytest.mark.long),
    ],
)
def test_six_processes_update_a_model_under_load(config, mb, tmp_path, libfabric):
    """Updates must work between processes as in one: weights from a safetensors file arrive byte
    for byte, twice, while the rollout workers serve; one that is killed in between costs nobody
    else anything, and is served again after its restart.
    """
    scenario = Scenario(config, mb, tmp_path)

    asyncio.run(scenario.main())


@pytest.mark.slow
def test_the_command_line_updates_and_verifies(tmp_path, libfabric):
    """`tep rl run` is what a user tries first: real processes, every byte compared, a trace."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
    write_version(load_model(tmp_path / "config.json"), 1, tmp_path / "w.safetensors")
    args = ["--weights", tmp_path / "w.safetensors", "--model", tmp_path / "config.json"]
    args += ["--train", 2, "--infer", 1, "--updates", 1, "--trace", tmp_path / "t.json", "--json"]

    result = CliRunner().invoke(app, ["run", *map(str, args)])

    assert result.exception is None, result.output
    (row,) = json.loads(result.stdout)["updates"]
    assert row["ok"]
    assert row["verified"]
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    stages = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"load", "gather", "make", "write", "barrier"} <= stages


def test_a_checkpoint_reads_back_what_was_written(tmp_path):
    """A slice read from the wrong place is a wrong model that still loads."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    model = load_model(tmp_path / "config.json")
    _, tensors = write_version(model, 3, tmp_path / "x.safetensors")
    checkpoint = Checkpoint(tmp_path / "x.safetensors")

    for tensor in model.tensors:
        box = tuple((extent // 3, extent // 3 + max(1, extent // 2)) for extent in tensor.shape)
        found = checkpoint.read(tensor, box)
        assert (found == tensors[tensor.name][tuple(slice(*pair) for pair in box)]).all()


@pytest.mark.slow
def test_ranks_that_others_have_started(tmp_path, libfabric) -> None:
    """Under torchrun, srun and Ray nobody starts the workers: they must find their controller."""
    config, weights = tmp_path / "config.json", tmp_path / "w.safetensors"
    config.write_text(json.dumps(SMALL))
    write_version(load_model(str(config)), 1, weights)
    files = ["--weights", str(weights), "--model", str(config)]
    program = [sys.executable, "-c", "import sys; from tep.cli import main; sys.exit(main())"]
    options = ["--train", "1", "--infer", "1", "--updates", "1", "--json"]
    job, out = [*program, "rl", "run", *files, *options], io.StringIO()
    launch("local", ["127.0.0.1"] * 3, job, timeout_s=120, out=out)

    assert [True] == [one["verified"] for one in json.loads(out.getvalue())["updates"]]
    few = Place(rank=0, size=2, token="t")  # noqa: S106  # no secret
    small = Job(
        model=str(config), weights=str(weights), train=TrainLayout(fsdp=1), infer=InferLayout(ep=1)
    )
    with pytest.raises(UsageError, match="2 processes were started, and the job takes 3"):
        RankedJob(small, few, watermark_bytes=1 << 20)
    with pytest.raises(UsageError, match="rank 0 is the controller"):
        work_as_rank(small, Place(rank=0, size=3, token="t"))  # noqa: S106  # no secret

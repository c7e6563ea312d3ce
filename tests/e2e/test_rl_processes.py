"""Four training and two inference processes over libfabric tcp: a real file, a load, a death."""

from __future__ import annotations

import asyncio
import hashlib
import json

import numpy as np
import pytest

import tep
from tep.apps.rl.job import Job
from tep.apps.rl.models import load_model
from tep.apps.rl.placement import InferLayout, TrainLayout, rollout_metas
from tep.apps.rl.processes import LocalJob
from tep.apps.rl.quantise import numpy_dtype
from tep.apps.rl.weights import Checkpoint, write_safetensors
from tests.unit.rl_reference import reference_region

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
    try:
        tep.TransferEngine.open("libfabric", provider="tcp", nics=1).close()
    except tep.BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_six_processes_update_a_model_under_load(tmp_path, libfabric):
    """What works in one process must work between machines: weights from a safetensors file of 200
    MB arrive byte for byte, twice, while the rollout workers serve; one that is killed in between
    costs nobody else anything, and is served again after its restart.
    """
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    model = load_model(tmp_path / "config.json")
    files, wanted = {}, {}
    for version in (1, 2):
        files[version] = str(tmp_path / f"v{version}.safetensors")
        size, tensors = write_version(model, version, files[version])
        assert size >= 200 * MB
        wanted[version] = expected(model, tensors)
    job = Job(
        model=str(tmp_path / "config.json"),
        weights=files[1],
        train=TRAIN,
        infer=INFER,
        backend="libfabric",
        options={"provider": "tcp", "nics": 1},
        load=True,
    )

    async def check(fleet, version):
        for name, actor in fleet.rollouts.items():
            assert wanted[version][name][0] == await actor.digest()
            assert version == (await actor.state()).serving

    async def main():
        async with LocalJob(job, tmp_path) as fleet:
            first = await fleet.controller.update(1)
            assert first.ok, first.error + first.table()
            await check(fleet, 1)
            served_before = {
                name: await actor.load_report() for name, actor in fleet.rollouts.items()
            }
            await fleet.load(files[2])
            second = await fleet.controller.update(2)
            assert second.ok, second.table()
            assert not second.rerouted
            await check(fleet, 2)
            for name, actor in fleet.rollouts.items():
                report = await actor.load_report()
                served = served_before[name].served + report.served
                assert served > 0
                for version, answers in report.answers.items():
                    assert [wanted[version][name][1]] == answers
            await fleet.kill("rollout1")
            await fleet.load(files[1])
            third = await fleet.controller.update(3)
            assert third.ok, third.table()
            assert "lost" == third.outcome("rollout1")
            assert "updated" == third.outcome("rollout0")
            assert wanted[1]["rollout0"][0] == await fleet.rollouts["rollout0"].digest()
            await fleet.restart_rollout("rollout1")
            fourth = await fleet.controller.update(4)
            assert fourth.rerouted
            assert {"updated"} == {fourth.outcome(name) for name in fleet.rollouts}
            for name, actor in fleet.rollouts.items():
                assert wanted[1][name][0] == await actor.digest()
            fifth = asyncio.create_task(fleet.controller.update(5))
            state = await fleet.rollouts["rollout0"].state()
            while state.attempt < 5 or not state.arrived:
                await asyncio.wait({fifth}, timeout=0.02)
                state = await fleet.rollouts["rollout0"].state()
            assert state.arrived < state.expected
            await fleet.kill("train1")
            report = await fifth
            assert not report.ok
            assert "training rank" in report.error
            for actor in fleet.rollouts.values():
                assert (await actor.state()).serving is None
            await fleet.restart_train(1, files[2])
            await fleet.load(files[2])
            sixth = await fleet.controller.update(6)
            assert sixth.ok, sixth.error + sixth.table()
            for name, actor in fleet.rollouts.items():
                assert wanted[2][name][0] == await actor.digest()
            return [round(r.elapsed_s, 2) for r in (first, second, third, fourth, sixth)]

    seconds = asyncio.run(main())

    assert max(seconds) < 60


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

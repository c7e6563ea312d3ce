"""Small weight-update worlds on simulated engines, for the tests: real bytes, few of them."""

from __future__ import annotations

import asyncio

import numpy as np

import tep
from tep.apps.rl.compute import numpy_dtype
from tep.apps.rl.controller import Controller
from tep.apps.rl.models import (
    InferLayout,
    TrainLayout,
    model_from_config,
    rollout_metas,
    train_metas,
)
from tep.apps.rl.rollout import RolloutWorker
from tep.apps.rl.training import TrainingWorker
from tests.unit.apps.rl_reference import reference_region

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
}


def tensors_of(model, version):
    """Weights of one version."""
    rng = np.random.default_rng(version)
    return {
        tensor.name: rng.standard_normal(tensor.shape, np.float32).astype(numpy_dtype(tensor.dtype))
        for tensor in model.tensors
    }


class World:
    """Training ranks and rollout workers on a cluster; weights that change by version."""

    def __init__(
        self, cluster, train, infer, *, config=CONFIG, nics=(2, 2), compute=None, **options
    ):
        self.cluster = cluster
        self.model = model_from_config(config, name="small", source="tests")
        self.trains = train_metas(self.model, train, nics[0])
        self.rollouts = rollout_metas(self.model, infer, nics[1])
        self.tensors = tensors_of(self.model, 0)
        self.shards = [
            {
                (name, box): self.tensors[name][tuple(slice(*pair) for pair in box)].copy()
                for name, box in meta.shards
            }
            for meta in self.trains
        ]
        self.workers = [
            TrainingWorker(cluster.engines[k], meta, self.shards[k], compute=compute)
            for k, meta in enumerate(self.trains)
        ]
        self.actors = {
            meta.name: RolloutWorker(cluster.engines[len(self.trains) + k], meta)
            for k, meta in enumerate(self.rollouts)
        }
        options = {"watermark_bytes": 1 << 20, "bundle_bytes": 1 << 16, "timeout_s": 20.0} | options
        self.controller = Controller(self.workers, list(self.actors.values()), **options)

    def train_to(self, version):
        """Change the weights in place, as an optimiser would."""
        self.tensors = tensors_of(self.model, version)
        for shards in self.shards:
            for (name, box), array in shards.items():
                array[...] = self.tensors[name][tuple(slice(*pair) for pair in box)]

    async def update(self, version, tries=1):
        self.train_to(version)
        for _ in range(tries):
            report = await self.controller.update(version)
            if report.ok:
                break
        return report

    def check(self, names=None):
        """Every byte of these workers is the reference's."""
        for name, actor in self.actors.items():
            if names is None or name in names:
                expected, _ = reference_region(actor.meta, self.tensors)
                assert (expected == actor.region).all(), name


def make_cluster(train, infer, *, spare=0, **options):
    return tep.sim.Cluster(nodes=train.world + infer.world + spare, **options)


__all__ = ["CONFIG", "InferLayout", "TrainLayout", "World", "make_cluster", "tensors_of"]


class Timed:
    """At once, but a stage takes the time of a device: bytes over its rate; others take none."""

    def __init__(self, bytes_per_s) -> None:
        self.rates = bytes_per_s

    async def run(self, stage, nbytes, function):
        if rate := self.rates.get(stage):
            await asyncio.sleep(nbytes / rate)
        return function()

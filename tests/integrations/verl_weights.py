"""verl's checkpoint engine manager over tep: two actors, two rollout ranks, all on the CPU.

Run by scripts/integrations.py in an environment that has verl and Ray. The manager, its worker
groups and the registry are verl's; the weights, and who serves them, are made up here: each rollout
rank must have every value of the step that was sent, and an update that fails leaves the old step.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import import_external_libs

MODULE = "tep.integrations.weights.verl_engine"
STEPS = 4


def weights_of(step: int):
    """Every value of a step is that step."""
    yield "embed", torch.full((1000, 64), step, dtype=torch.bfloat16)
    yield "norm", torch.full((64,), float(step))
    yield "steps", torch.full((3, 2), step, dtype=torch.int64)
    yield "scale", torch.tensor(float(step))


class Side(Worker):
    """The base of both sides: the engine from the registry, and verl's ways to call it."""

    def __init__(self, is_master_known: bool) -> None:
        super().__init__()
        import_external_libs(MODULE)
        extra = {"is_master": self.rank == 0} if is_master_known else {}
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            "tep", bucket_size=1 << 20, timeout_s=60.0, **extra
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args, **kwargs):
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Actor(Side):
    """A training rank; `poison` makes a weight infinite."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto"):
        weights = dict(weights_of(abs(global_steps)))
        if global_steps < 0:
            weights["norm"][3] = float("inf")
        await self.checkpoint_engine.send_weights(iter(weights.items()), global_steps=global_steps)
        return {}


class Rollout(Side):
    """A rollout rank that takes weights as verl's server adapter would: one after another."""

    def __init__(self, is_master_known: bool) -> None:
        super().__init__(is_master_known)
        self.model: dict[str, torch.Tensor] = {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None):
        found = self.checkpoint_engine.receive_weights(global_steps=global_steps)
        self.model = {name: tensor.clone() async for name, tensor in found}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check(self, step: int) -> bool:
        """Return True if it has exactly the weights of a step."""
        expected = dict(weights_of(step))
        return list(self.model) == list(expected) and all(
            torch.equal(self.model[name], expected[name])
            and self.model[name].dtype == expected[name].dtype
            for name in expected
        )


class Replica(SimpleNamespace):
    """A rollout replica as the manager uses it around an update; no server is here."""

    async def nothing(self, **_: object) -> None:
        """Do nothing."""

    abort_all_requests = resume_generation = release_kv_cache = resume_kv_cache = nothing


def group_of(cls: type, known: bool, name: str) -> RayWorkerGroup:
    """Two Ray actors on this machine, made by verl."""
    pool = RayResourcePool([2], use_gpu=False, name_prefix=name, max_colocate_count=1)
    made = RayClassWithInitArgs(cls=ray.remote(cls), is_master_known=known)
    return RayWorkerGroup(pool, made, name_prefix=name, device_name="cpu")


def measure() -> dict:
    """Update, fail once, update again."""
    actors, rollouts = group_of(Actor, True, "actor"), group_of(Rollout, False, "rollout")
    config = SimpleNamespace(backend="tep", custom_backend_module=MODULE)
    manager = CheckpointEngineManager(config, actors, [Replica(workers=rollouts.workers)])
    good, refused = [], ""
    for step in range(1, STEPS + 1):
        manager.update_weights(global_steps=step)
        good += rollouts.check(step)
        if step == 2:
            try:
                manager.update_weights(global_steps=-3)
            except Exception as error:  # noqa: BLE001  # its text is what is asked
                refused = str(error)
            good += rollouts.check(2)
    return {
        "ok": all(good) and len(good) == 2 * (STEPS + 1) and "norm: " in refused,
        "rollout ranks that had exactly the step": f"{sum(good)} of {len(good)}",
        "an infinite weight is refused by name": "norm: " in refused,
        "registry": ", ".join(sorted(CheckpointEngineRegistry._registry)),
    }


def main() -> int:
    """Print one line of JSON."""
    ray.init(
        num_cpus=8, num_gpus=0, include_dashboard=False, log_to_driver=False,
        runtime_env={"env_vars": {"TOKENIZERS_PARALLELISM": "false"}},
    )  # fmt: skip
    try:
        found = measure()
    finally:
        ray.shutdown()
    print(json.dumps(found))  # noqa: T201  # the result
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    raise SystemExit(main())

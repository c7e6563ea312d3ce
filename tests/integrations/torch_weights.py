"""Facts that weight updates take from documents of torch and safetensors, against the packages.

Run by scripts/integrations.py. Boxes of DTensors are compared with torch's own computation on every
rank of many meshes, FSDP over tensor parallelism included; fp8 by torch with fp8 by numpy, bit for
bit; a checkpoint of several files, written by transformers, with safetensors' reading.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from tep.apps.rl import shard_of
from tep.apps.rl.compute import quantise
from tep.apps.rl.metadata import Tensor, whole
from tep.apps.rl.weights import Checkpoint

MESHES = ((1,), (3,), (4,), (2, 2), (2, 3), (2, 2, 2))


def theirs(tensor: DTensor) -> tuple[tuple[int, int], ...]:
    """The box of a DTensor, by torch."""
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple((low, low + extent) for low, extent in zip(offset, shape))


def same(tensor: DTensor) -> bool:
    """Return True if our box is torch's; empty boxes are all equal."""
    shape, box, local = shard_of(tensor)
    assert shape == tuple(tensor.shape)
    if not local.numel():
        return any(low == high for low, high in box)
    return box == theirs(tensor)


def drawn(dice: random.Random, mesh) -> DTensor:
    """A DTensor of any shape and placements."""
    shape = [dice.randint(1, 9) for _ in range(dice.randint(1, 3))]
    places = [dice.choice([Replicate(), Shard(dice.randrange(len(shape)))]) for _ in mesh.shape]
    local, _ = compute_local_shape_and_global_offset(shape, mesh, places)
    whole = torch.zeros(shape)
    return DTensor.from_local(
        torch.zeros(local), mesh, places, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def sharded(mesh) -> list[DTensor]:
    """The parameters of a small module under tensor parallelism and FSDP."""
    module = torch.nn.Sequential(torch.nn.Linear(10, 14), torch.nn.Linear(14, 6))
    if mesh.ndim == 2:
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(module, mesh["tp"], plan)
        fully_shard(module, mesh=mesh["dp"])
    else:
        fully_shard(module, mesh=mesh)
    return list(module.parameters())


def boxes_of(job: tuple[tuple[int, ...], int]) -> tuple[int, int]:
    """Count the compared boxes of one rank of a mesh, and the equal ones."""
    sizes, rank = job
    store = FakeStore()
    dist.init_process_group("fake", rank=rank, world_size=int(np.prod(sizes)), store=store)
    names = ("dp", "tp") if len(sizes) == 2 else tuple("abc"[: len(sizes)])
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    dice = random.Random(7)  # the same tensors on each rank
    found = [drawn(dice, mesh) for _ in range(60)]
    found += sharded(mesh) if len(sizes) < 3 else []
    return sum(map(same, found)), len(found)


def boxes() -> tuple[int, int]:
    """The same of all ranks of all meshes, each in a process of its own."""
    jobs = [(sizes, rank) for sizes in MESHES for rank in range(int(np.prod(sizes)))]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        good, count = zip(*pool.map(boxes_of, jobs, chunksize=1))
    return sum(good), sum(count)


def fp8() -> bool:
    """Return True if torch and numpy make the same bits."""
    rng = np.random.default_rng(5)
    loaded = sys.modules["torch"]
    for dtype, shape, size in itertools.product(
        ("fp8", "fp8_channel", "fp8_ue8m0"), ((1, 1), (130, 300), (2, 257, 128)), (1e-41, 1.0, 3e38)
    ):
        values = (rng.uniform(-1, 1, shape) * size).astype(np.float32)
        for kind in (values, values.astype(np.dtype("bfloat16"))):
            by_torch = quantise(kind, dtype)
            del sys.modules["torch"]
            by_numpy = quantise(kind, dtype)
            sys.modules["torch"] = loaded
            if any(a.tobytes() != b.tobytes() for a, b in zip(by_torch, by_numpy)):
                return False
    return True


def files() -> int:
    """Return the number of files of one checkpoint that were read alike; 0: not alike."""
    from safetensors import safe_open
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=99,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="40KB")
        mine = Checkpoint(folder)
        paths = list(Path(folder).glob("*.safetensors"))
        seen = set()
        for path in paths:
            with safe_open(path, "numpy") as opened:
                seen |= set(opened.keys())
                for name in opened.keys():  # noqa: SIM118  # it is no mapping
                    values = opened.get_tensor(name)
                    tensor = Tensor(name, values.shape, "bf16", 0)
                    if mine.read(tensor, whole(values.shape)).tobytes() != values.tobytes():
                        return 0
        return len(paths) if seen == set(mine.names()) else 0


def main() -> int:
    """Print one line of JSON."""
    import ml_dtypes  # noqa: F401  # registers bfloat16 with numpy

    good, count = boxes()
    found = {
        "boxes of DTensors that are torch's": f"{good} of {count}",
        "fp8 by torch is fp8 by numpy": fp8(),
        "files of a checkpoint that safetensors reads alike": files(),
    }
    well = good == count > 0 and all(list(found.values())[1:]) and files() > 1
    print(json.dumps({"ok": well, **found}))  # noqa: T201  # the result
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main())

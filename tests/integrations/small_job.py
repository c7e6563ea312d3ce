"""A small RL job and a KvCache cluster as commands of `tep`, for those who start ranks.

python tests/integrations/small_job.py FOLDER     # writes config.json and w.safetensors there
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from tep.apps.rl.compute import numpy_dtype
from tep.apps.rl.models import load_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.safetensors import write_safetensors

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KVCACHE = ["kvcache", "--fabric", "tcp", "-p", "1", "-d", "1", "--prompts", "6", "--json"]


def rl_job(folder: Path, train: int, updates: int) -> list[str]:
    """Write a small model and its weights; the command of a job with so many training ranks."""
    folder.mkdir(exist_ok=True)
    config, weights = folder / "config.json", folder / "w.safetensors"
    config.write_text(json.dumps(CONFIG))
    dice = np.random.default_rng(1)
    tensors = [
        (one, (dice.standard_normal(one.shape) / 50).astype(numpy_dtype(one.dtype)))
        for one in load_model(str(config)).tensors
    ]
    write_safetensors(weights, tensors)
    job = ["rl", "run", "--train", str(train), "--infer", "1", "--backend", "local", "--json"]
    return [*job, "--updates", str(updates), "--weights", str(weights), "--model", str(config)]


def verified(printed: str) -> int:
    """Return the number of updates an RL job has compared, byte by byte; all must be right."""
    updates = json.loads(printed[printed.index("{") :])["updates"]
    assert all(one["verified"] for one in updates), updates
    return len(updates)


def same_tokens(printed: str) -> int:
    """Return the number of prompts a KvCache cluster has answered; all must match one process."""
    rows = json.loads(printed[printed.index("{") :])["rows"]
    assert all(one["same tokens"] for one in rows), rows
    return len(rows)


if __name__ == "__main__":
    rl_job(Path(sys.argv[1]), 2, 1)

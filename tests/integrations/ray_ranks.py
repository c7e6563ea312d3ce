"""An RL job and a KvCache cluster on a Ray of several nodes, each process an actor; one is killed.

Run by scripts/integrations.py in an environment that has Ray.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import psutil
import ray_nodes

import tep
from tep.apps.rl.models import load_model
from tep.apps.rl.quantise import numpy_dtype
from tep.apps.rl.weights import write_safetensors
from tep.cli import main as command
from tep.integrations.ray.ranks import run_ranks

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write_model(folder: Path) -> list[str]:
    """A small model: the options that name it."""
    config, weights = folder / "config.json", folder / "w.safetensors"
    config.write_text(json.dumps(CONFIG))
    dice = np.random.default_rng(1)
    tensors = [
        (one, (dice.standard_normal(one.shape) / 50).astype(numpy_dtype(one.dtype)))
        for one in load_model(str(config)).tensors
    ]
    write_safetensors(weights, tensors)
    return ["--weights", str(weights), "--model", str(config)]


def kill_one() -> None:
    """Kill one rank, once it runs."""
    while True:
        for one in psutil.process_iter(["cmdline"]):
            if "ray::_Rank.run" in " ".join(one.info["cmdline"] or ()):
                one.kill()
                return
        threading.Event().wait(0.2)


def main() -> int:
    """Run both; then another job whose rank dies."""
    with tempfile.TemporaryDirectory() as folder, ray_nodes.nodes(3) as (cluster, _):
        options = ["--train", "1", "--infer", "1", "--backend", "local", "--updates", "2", "--json"]
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            run = ["rl", "run", *write_model(Path(folder)), *options]
            status = command([*run, "--ray", cluster.address])
        updates = json.loads(out.getvalue())["updates"]
        assert status == 0
        assert [True, True] == [one["verified"] for one in updates]

        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            run = ["kvcache", "--fabric", "tcp", "-p", "1", "-d", "1", "--prompts", "6", "--json"]
            status = command([*run, "--ray", cluster.address])
        answers = [one["same tokens"] for one in json.loads(out.getvalue())["rows"]]
        assert status == 0
        assert [True] * 6 == answers

        threading.Thread(target=kill_one, daemon=True).start()
        endless = ["sim", "--runs", "100000000"]
        try:
            run_ranks("tep.cli:main", endless, 2, cluster.address, timeout_s=120)
            raise AssertionError("a killed rank was not noticed")
        except tep.RendezvousError as error:
            told = str(error).split(":")[0]
    result = {
        "ok": True,
        "updates": "2, every byte compared",
        "prompts": f"{len(answers)}, tokens as in one process",
        "a killed rank": told.strip(),
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

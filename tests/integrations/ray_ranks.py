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

import psutil
import ray_nodes
import small_job

import tep
from tep.cli import main as command
from tep.integrations.ray.cluster import run_ranks


def kill_one() -> None:
    """Kill one rank, once it runs."""
    while True:
        for one in psutil.process_iter(["cmdline"]):
            if "ray::_Rank.run" in " ".join(one.info["cmdline"] or ()):
                one.kill()
                return
        threading.Event().wait(0.2)


def run(job: list[str], address: str) -> str:
    """Run a job with ranks started by Ray; return its output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = command([*job, "--ray", address])
    assert status == 0, out.getvalue()
    return out.getvalue()


def main() -> int:
    """Run both; then another job whose rank dies."""
    with tempfile.TemporaryDirectory() as folder, ray_nodes.nodes(3) as (cluster, _):
        job = small_job.rl_job(Path(folder), train=1, updates=2)
        updates = small_job.verified(run(job, cluster.address))
        prompts = small_job.same_tokens(run(small_job.KVCACHE, cluster.address))

        threading.Thread(target=kill_one, daemon=True).start()
        endless = ["sim", "--runs", "100000000"]
        try:
            run_ranks("tep.cli:main", endless, 2, cluster.address, timeout_s=120)
            raise AssertionError("a killed rank was not noticed")
        except tep.RendezvousError as error:
            told = str(error).split(":")[0]
    result = {
        "ok": True,
        "updates": f"{updates}, every byte compared",
        "prompts": f"{prompts}, tokens as in one process",
        "a killed rank": told.strip(),
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A Ray of several nodes on this machine, whose nodes can be killed; nothing of it survives."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path

import psutil

ENVIRONMENT = {
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_health_check_period_ms": "500",  # a node that was killed is missed after seconds
    "RAY_health_check_failure_threshold": "4",
    "OMP_NUM_THREADS": "1",
}


@contextlib.contextmanager
def nodes(count: int):
    """A head without CPUs, and so many nodes with one CPU each: the cluster and its nodes."""
    os.environ.update(ENVIRONMENT)
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="tepray-")
    small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    try:
        cluster = Cluster(head_node_args={"num_cpus": 0, "_temp_dir": folder, **small})
        try:
            yield cluster, [cluster.add_node(num_cpus=1, **small) for _ in range(count)]
        finally:
            import ray

            ray.shutdown()
            cluster.shutdown()
    finally:
        sweep(folder)
        shutil.rmtree(folder, ignore_errors=True)


def kill(node) -> None:
    """Kill all processes of a node, at once and without a word."""
    pids = [info[0].process.pid for info in node.all_processes.values() if info]
    family = [psutil.Process(pid) for pid in pids]
    for one in [
        *family,
        *(child for parent in family for child in parent.children(recursive=True)),
    ]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(signal.SIGKILL)


def sweep(folder: str) -> None:
    """End what is left of a Ray whose files are in a folder."""
    for one in psutil.process_iter(["cmdline"]):
        if one.pid != os.getpid() and any(folder in word for word in one.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def here(name: str) -> str:
    """A file beside this one."""
    return str(Path(__file__).with_name(name))

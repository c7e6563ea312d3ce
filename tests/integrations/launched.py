"""Jobs whose ranks torchrun or Slurm starts, as two nodes of one machine; then one rank is killed.

Run by scripts/integrations.py in an environment that has torch. Slurm is the system's: where its
daemons are not installed, the result says so.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import small_job

LIMIT_S = 240.0
HERE = Path(sys.executable).parent
TEP = str(HERE / "tep")
NODES = "n1", "n2"
SLURM = ("slurmctld", "slurmd", "srun", "sinfo", "scontrol")
CONF = """
ClusterName=tep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(n: int) -> list[int]:
    """Ports that nobody listens at now."""
    with contextlib.ExitStack() as held:
        socks = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n)]
        return [sock.getsockname()[1] for sock in socks]


def run(command: list[str]) -> str:
    """Run a command, which must succeed; return its output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, (
        f"{command[:8]} ended with {done.returncode}: {done.stderr[-2000:]}"
    )
    return done.stdout


def torchrun(ranks: int, command: list[str]) -> str:
    """Run a job by two agents of torchrun, each a node with half of the ranks."""
    assert ranks % 2 == 0
    port = free_ports(1)[0]
    nodes = [
        subprocess.Popen(
            [
                *(str(HERE / "torchrun"), "--nnodes", "2", "--node-rank", str(node)),
                *("--nproc-per-node", str(ranks // 2), "--master-addr", "127.0.0.1"),
                *("--master-port", str(port), "--no-python", TEP, *command),
            ],
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
        )
        for node in range(2)
    ]
    try:
        printed = [node.communicate(timeout=LIMIT_S)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [0, 0] == [node.returncode for node in nodes]
    return printed[0]


def state_of_nodes() -> str:
    """Return Slurm's state of its nodes; "idle" if both are there."""
    asked = ["sinfo", "--noheader", "--format=%T"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[None]:
    """A Slurm of two nodes, both this machine."""
    conf = folder / "slurm.conf"
    facts = {"host": socket.gethostname(), "user": getpass.getuser(), "folder": folder}
    conf.write_text(CONF.format(ports=free_ports(3), **facts))
    os.environ["SLURM_CONF"] = str(conf)
    os.environ["TEP_MASTER"] = "127.0.0.1"  # the nodes' names are none that the system knows
    daemons = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", n] for n in NODES)]
    for name in NODES:
        (folder / name).mkdir()
    with (folder / "daemons.log").open("wb") as log:
        started = [subprocess.Popen(one, stdout=log, stderr=log) for one in daemons]
    try:
        end_s = time.monotonic() + 60.0
        while "idle" != state_of_nodes():
            assert time.monotonic() < end_s, (folder / "daemons.log").read_text()[-2000:]
            threading.Event().wait(0.2)
        yield
    finally:
        for one in reversed(started):
            one.terminate()
        for one in started:
            one.wait(30.0)


def srun(ranks: int, command: list[str]) -> str:
    """Run a job as a step of two nodes."""
    return run(["srun", "-N2", f"-n{ranks}", "--overcommit", *command])


def kill_rank(rank: int) -> None:
    """Kill a rank of Slurm's, once it is there."""
    want = {f"SLURM_PROCID={rank}".encode(), b"SLURM_STEP_NUM_TASKS=4"}
    while True:
        for one in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environ = set((one / "environ").read_bytes().split(b"\0"))
                if want <= environ and TEP.encode() in (one / "cmdline").read_bytes():
                    os.kill(int(one.name), signal.SIGKILL)
                    return
        threading.Event().wait(0.2)


def loses_a_rank(job: list[str]) -> str:
    """An endless job whose rank 3 is killed ends in time, with an error of rank 0."""
    threading.Thread(target=kill_rank, args=(3,), daemon=True).start()
    command = ["srun", "-N2", "-n4", "--overcommit", TEP, *job]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    told = [line for line in done.stderr.splitlines() if line.startswith("tep: ")]
    assert done.returncode != 0, "a killed rank was not noticed"
    assert told, done.stderr[-2000:]
    return told[-1][:120]


def by_slurm(folder: Path) -> dict[str, object]:
    """The same jobs, and the benchmark of two nodes, by srun."""
    missing = [name for name in SLURM if shutil.which(name) is None]
    if missing:
        return {"srun": f"not run: no {missing[0]}; Debian has slurmctld, slurmd, slurm-client"}
    state = folder / "slurm"
    state.mkdir()
    bench = Path(__file__).parents[2] / "scripts" / "bench_two_nodes.py"
    with slurm(state):
        updates = small_job.verified(srun(4, [TEP, *small_job.rl_job(folder, 2, 2)]))
        prompts = small_job.same_tokens(srun(3, [TEP, *small_job.KVCACHE]))
        table = srun(2, [sys.executable, str(bench), "--backend", "local", "--short"])
        lost = loses_a_rank(small_job.rl_job(folder, 2, 1_000_000))
    return {
        "srun": f"{updates} updates, {prompts} prompts, a table: {bool(table)}",
        "a killed rank of srun's": lost,
    }


def main() -> int:
    """Print one line of JSON."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        updates = small_job.verified(torchrun(4, small_job.rl_job(folder, 2, 2)))
        clusters = [*small_job.KVCACHE, "-p", "2"]
        prompts = small_job.same_tokens(torchrun(4, clusters))
        found = {"torchrun": f"{updates} updates, {prompts} prompts", **by_slurm(folder)}
    sys.stdout.write(json.dumps({"ok": True, **found}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Starting ranks by ssh, srun and as processes: with shells of this machine in their place."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import sys

import pytest

from tep import RendezvousError, UsageError, WaitTimeout, rendezvous
from tep.rendezvous.launch import RankProcesses, launch, own_address, place_here
from tests.support.ranks import place

SAY = (
    "import sys; from tep.rendezvous.launch import place_here; "
    "p = place_here(); print(p.rank, p.size, p.host); "
)
MEET = SAY + (
    "from tep import rendezvous\n"
    "parts = rendezvous.exchange(b'%d' % p.rank, p)\n"
    "assert parts == [b'0', b'1'], parts; print('met')"
)

SSH = """#!/bin/sh
echo "$@" >> "$FAKE_LOG"
[ "$1 $2" = "-o BatchMode=yes" ] || exit 9
shift 3
exec env -u FAKE_SECRET "$@"
"""

SRUN = """#!/bin/sh
echo "$@" >> "$FAKE_LOG"
[ "$1 $3 $5" = "--nodes --ntasks --ntasks-per-node" ] || exit 9
n=$4; shift 6
export SLURM_STEP_NUM_TASKS=$n SLURM_JOB_ID=77 SLURM_STEP_NODELIST='node[1-2]'
pids=
for rank in $(seq 0 $((n - 1))); do SLURM_PROCID=$rank "$@" & pids="$pids $!"; done
for pid in $pids; do wait "$pid" || exit 1; done
"""

SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames node[1-2]" ] || exit 9
echo 127.0.0.1; echo node2
"""


@pytest.fixture
def shells(tmp_path, monkeypatch):
    """An ssh, an srun and a scontrol that stay on this machine."""
    for name, text in (("ssh", SSH), ("srun", SRUN), ("scontrol", SCONTROL)):
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TEP_TOKEN", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "log"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["local", "ssh", "srun"])
def test_ranks_meet_however_they_were_started(shells, method):
    """The measuring program must not know by what it was started."""
    out = io.StringIO()
    launch(method, ["127.0.0.1"] * 2, [sys.executable, "-c", MEET], timeout_s=60, out=out)

    assert "met" in out.getvalue()
    assert "0 2 127.0.0.1" in out.getvalue()


def test_the_token_is_on_no_command_line(shells):
    """Every user of a machine can read the others' command lines."""
    tell = SAY + "import os; assert len(os.environ['TEP_TOKEN']) == 32"
    launch("ssh", ["a", "b"], [sys.executable, "-c", tell], timeout_s=60, out=io.StringIO())
    lines = shells.read_text().splitlines()

    assert sorted(["-o BatchMode=yes a sh -s", "-o BatchMode=yes b sh -s"]) == sorted(lines)


def test_arguments_with_spaces_and_quotes_arrive_whole(shells):
    """A remote shell reads them once more."""
    odd = 'it\'s $HOME; "x" `y`'
    out = io.StringIO()
    tell = "import sys; print(sys.argv[1])"
    launch("ssh", ["a"], [sys.executable, "-c", tell, odd], timeout_s=60, out=out)

    assert odd == out.getvalue().strip()


def test_a_rank_that_fails_ends_the_others_and_is_quoted(shells):
    """Else rank 0 waits for it until its time is up, and nobody sees why."""
    fail = SAY + ("import time\nif p.rank == 1: sys.exit('no NIC here')\ntime.sleep(600)")
    with pytest.raises(RendezvousError, match=r"rank 1 ended with 1:[\s\S]*no NIC here"):
        launch("local", ["x", "y"], [sys.executable, "-c", fail], timeout_s=60, out=io.StringIO())


def test_only_the_end_of_a_long_log_is_quoted(shells):
    """The cause stands last, and an error of a megabyte is read by nobody."""
    fail = "import sys; print('begun'); print('x' * 3000); sys.exit('no NIC here')"
    with pytest.raises(RendezvousError, match="no NIC here") as caught:
        launch("local", ["x"], [sys.executable, "-c", fail], timeout_s=60, out=io.StringIO())

    assert "begun" not in str(caught.value)
    assert len(str(caught.value)) < 2500


def test_ranks_that_never_end_are_ended(shells):
    """CI must not hang with them."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(WaitTimeout, match=r"ranks \[0, 1\]"):
        launch("local", ["x", "y"], command, timeout_s=0.3, out=io.StringIO())


def test_what_cannot_be_started_is_named(shells):
    """A wrong path, a host that is none, a method that is none."""
    with pytest.raises(RendezvousError, match="/no/such cannot be started"):
        launch("local", ["x"], ["/no/such"], out=io.StringIO())
    for method, hosts in (("rsh", ["a"]), ("ssh", [])):
        with pytest.raises(UsageError, match="local, ssh, srun"):
            launch(method, hosts, ["true"])


def test_a_rank_is_killed_and_started_again(shells, tmp_path):
    """Whoever tests a failure kills one rank; the same rank must be able to come back."""
    say = [sys.executable, "-c", SAY + "import time; sys.stdout.flush(); time.sleep(600)"]
    job = place(0, 3, 1)

    async def main():
        ranks = RankProcesses(job, tmp_path)
        try:
            await ranks.start(2, say)
            await ranks.kill(2)
            killed = await ranks.ended(2)
            await ranks.start(2, [sys.executable, "-c", SAY])
            return killed, await ranks.ended(2), ranks.last_words(2).splitlines()[-1]
        finally:
            await ranks.close(terminate=True)

    assert (-9, 0, "2 3 127.0.0.1") == asyncio.run(main())


def test_places_by_torchrun_srun_and_alone(shells):
    """Each has other variables; a job of one task is no pair."""
    torchrun = {
        "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job",
    }  # fmt: skip
    srun = {
        "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "77",
        "SLURM_STEP_NODELIST": "node[1-2]",
    }  # fmt: skip
    job = torchrun["TORCHELASTIC_RUN_ID"]
    expected = rendezvous.Place(rank=1, size=2, host="h", port=29501, token=job)

    assert expected == place_here(torchrun)
    assert (1, 2, "127.0.0.1", 29477) == _facts(place_here(srun))
    assert "n7" == place_here({**srun, "TEP_MASTER": "n7"}).host
    assert None is place_here({})
    assert None is place_here({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    with pytest.raises(UsageError, match="TEP_MASTER"):
        place_here({**srun, "SLURM_STEP_NODELIST": "other"})


def _facts(place):
    return place.rank, place.size, place.host, place.port


@pytest.mark.slow
def test_a_launch_works_inside_an_event_loop() -> None:
    """A notebook's cell runs inside one: it ended in "asyncio.run() cannot be called"."""
    out = io.StringIO()

    async def cell() -> None:
        launch("local", ["127.0.0.1"] * 2, [sys.executable, "-c", MEET], timeout_s=120, out=out)

    asyncio.run(cell())
    assert "met" in out.getvalue()


def test_the_own_address_is_the_one_on_the_way_to_rank_0(monkeypatch) -> None:
    """Other ranks would be told an address that they cannot reach, or a foreign error."""
    facts = {"rank": 0, "size": 2, "host": "rank0", "port": 29500, "token": "t"}
    there = rendezvous.Place(**facts)
    ways = [
        (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.0.2", 29500)),
        (socket.AF_INET6, socket.SOCK_DGRAM, 17, "", ("::1", 29500, 0, 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ways)
    assert own_address(there).startswith("127.0.0.")

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UsageError, match="no way leads to rank 0 at 'rank0'"):
        own_address(there)

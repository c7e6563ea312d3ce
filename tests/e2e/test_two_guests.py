"""Two kernels and a cable for each NIC: what one host with its one kernel, clock and /proc hides.

tests/support/vm/pair.py boots the guests. Both ends of each NIC are Soft-RoCE. Emulation is slow,
so the guests' own waits are long.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.here import need_guest
from tests.support.two_kernels import ROUNDS
from tests.support.vm.pair import Cables, two_guests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BOOTED_S = 300.0
DONE_S = 600.0
TWO = Cables()
# A busy host stops both guests for longer than peers elsewhere are silent. Where Soft-RoCE of Linux
# 6.1 sends again without need, it may damage what it sends.
TCP = "libfabric --option provider=tcp --option peer_timeout_s=60"
VERBS = "verbs --option timeout=18"
NAMES = "export MASTER_ADDR=nodea TEP_TOKEN=of-this-job PYTHONUNBUFFERED=1"


@pytest.fixture(scope="module", autouse=True)
def guests():
    need_guest()


def rank(number, *programs, size=2):
    """The shell commands of a rank: programs of Python, one after the other, at a port each."""
    lines = [f"{NAMES} RANK={number} WORLD_SIZE={size}"]
    for port, program in enumerate(programs, 29501):
        lines.append(f"MASTER_PORT={port} {sys.executable} {program} || exit $?")
    return "\n".join(lines)


def run(*programs, wires=TWO):
    """Run the same programs in both guests, as rank 0 and 1; return what they printed."""
    with two_guests([rank(k, *programs) for k in range(2)], wires) as pair:
        statuses = [guest.ended(DONE_S) for guest in pair]
        assert [0, 0] == statuses, "\n=====\n".join(guest.told for guest in pair)
        return [guest.output for guest in pair]


def test_pages_between_two_kernels():
    """Names, rendezvous, addresses, routes and queue pairs with nothing shared but a cable.

    Each guest's own name is 127.0.1.1, as on every Debian: rank 0 listened, and opened its NICs,
    where nobody else comes to.
    """
    for said in run("-m tests.support.two_kernels tcp,verbs", wires=Cables(own_name=True)):
        assert 2 == said.count("all bytes are right"), said


@pytest.mark.long
@pytest.mark.parametrize("backend", ["tcp", "verbs"])
def test_there_is_no_ipv4(backend):
    """New data centres have none."""
    program = f"-m tests.support.two_kernels {backend}"
    for said in run(program, wires=Cables(ipv6=True)):
        assert "all bytes are right" in said, said


@pytest.mark.long
@pytest.mark.parametrize("backend", [TCP, VERBS], ids=["tcp", "verbs"])
@pytest.mark.parametrize("netem", ["", "delay 2ms loss 1%"])
def test_the_benchmark_between_two_hosts(backend, netem):
    """The first thing that is run on two machines; on bad cables too."""
    program = f"scripts/bench_two_nodes.py --short --backend {backend}"
    said, _ = run(program, wires=Cables(netem=netem))

    assert "verified 16777216" in said


@pytest.mark.long
@pytest.mark.parametrize("backend", ["tcp", "verbs"])
def test_a_guest_that_stalls_and_one_that_is_switched_off_hang_nobody(backend):
    """A busy host stops its guest for longer than rows wait; then somebody pulls the plug.

    After the first the transfers go on, over the same queue pairs or new ones. After the second,
    of which nobody was told, they end with an error in words.
    """
    program = f"-m tests.support.two_kernels {backend} endless"
    with two_guests([rank(k, program) for k in range(2)]) as (left, right):
        left.wait_for(" rounds\n", BOOTED_S, times=2)
        right.stall(2.5)
        left.wait_for(" rounds\n", BOOTED_S, times=left.output.count(" rounds\n") + 2)
        before = len(left.output)
        right.switch_off()

        assert 0 == left.ended(DONE_S), left.told
        errors = left.output[before:]
        assert 6 <= errors.count("FabricError: "), errors
        assert "UNREACHABLE" in errors or "does not answer" in errors, errors


@pytest.mark.long
def test_with_the_default_timeout_every_transfer_ends_though_the_guests_stand_still():
    """Guests that stand still for longer than Soft-RoCE's timer make it repeat rows without need.

    Linux 6.1 then damages what it repeats (docs/howto/soft-roce.md): rows end in errors, NICs are
    lost, and rows are made good. Each round ends whole or with an error in words, at both ends.
    """
    program = "-m tests.support.two_kernels verbs rounds"
    with two_guests([rank(k, program) for k in range(2)]) as pair:
        for guest in pair:
            guest.wait_for("round 0: ", BOOTED_S)
        for guest in 40 * pair:
            guest.stall(0.2)
            guest.is_on(0.2)  # goes on for so long

        assert [0, 0] == [guest.ended(DONE_S) for guest in pair], pair[0].told + pair[1].told
        for guest in pair:
            ends = [line for line in guest.output.splitlines() if line.startswith("round ")]
            assert ROUNDS == len(ends), guest.told
            right = [line for line in ends if line.endswith("all bytes are right")]
            assert right, guest.told


@pytest.mark.long
def test_a_kv_cache_with_a_machine_for_each_role():
    """Scheduler and prefiller on one host, the decoder on the other, by real processes and tcp."""
    program = "-m tests.support.two_kernels kvcache"
    there = "bash -c 'until (exec 3<>/dev/tcp/nodea/29501); do sleep 1; done' 2>/dev/null"
    ranks = [rank(k, program, size=3) for k in range(3)]
    both = f"({there}\n{ranks[1]}) &\n({ranks[0]}) || exit 1\nwait"
    with two_guests([both, f"{there}\n{ranks[2]}"], Cables(nics=1, own_name=True)) as pair:
        assert [0, 0] == [guest.ended(DONE_S) for guest in pair], pair[0].told + pair[1].told
        assert "as one process says alone" in pair[0].output, pair[0].output


@pytest.mark.long
def test_the_benchmark_is_started_by_ssh(tmp_path):
    """One command on one of two hosts, as the how-to says."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None or shutil.which("ssh-keygen") is None:
        pytest.skip("no sshd or no ssh-keygen here; apt install openssh-server")
    make_key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f"]
    for name in ("user", "host"):
        subprocess.run([*make_key, tmp_path / name], check=True)
    serve = SSHD.format(sshd=sshd, keys=tmp_path, path=os.environ.get("PYTHONPATH", ""))
    bench = f"{sys.executable} scripts/bench_two_nodes.py --short --hosts nodea,nodeb"
    bench += f" --backend {TCP} --timeout 500"
    commands = [f"{serve}\n{bench}", f"{serve}\nsleep 1000"]
    with two_guests(commands, Cables(own_name=True)) as pair:
        assert 0 == pair[0].ended(DONE_S), pair[0].told + pair[1].told
        assert "verified 16777216" in pair[0].output


SSHD = """
home=$(getent passwd 0 | cut -d: -f6)
mkdir -p /run/sshd $home/.ssh
cp {keys}/user $home/.ssh/id_ed25519
cp {keys}/user.pub $home/.ssh/authorized_keys
cp {keys}/host $home/.ssh/host_key
echo 'StrictHostKeyChecking accept-new' >$home/.ssh/config
chown -R 0:0 $home/.ssh
chmod 700 $home/.ssh
chmod 600 $home/.ssh/*
grep -q ^sshd: /etc/passwd || echo 'sshd:x:99:65534::/run/sshd:/usr/sbin/nologin' >>/etc/passwd
cat >/tmp/sshd_config <<END
HostKey $home/.ssh/host_key
PermitRootLogin yes
StrictModes no
UsePAM no
SetEnv PYTHONPATH={path} PYTHONDONTWRITEBYTECODE=1
END
{sshd} -f /tmp/sshd_config -E /tmp/sshd.log || cat /tmp/sshd.log
"""

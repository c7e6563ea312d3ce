"""The boot image of the guest: an initramfs of busybox, modules and a short init, and its job.

The guest's root is this machine's, read-only over 9p, under an overlay in its memory: it can write
everywhere and changes nothing. One folder is shared for writing: the job, its output, its status.
"""

from __future__ import annotations

import shlex
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

NICS_MAX: Final = 32

_INIT: Final = r"""#!/bin/busybox sh
B=/bin/busybox
$B mkdir -p /proc /sys /dev /host /lower /ov
$B mount -t proc proc /proc
$B mount -t sysfs sys /sys
$B mount -t devtmpfs dev /dev
for m in $($B cat /modules.list); do
  $B insmod /mods/$m 2>/dev/null || $B echo "guest: insmod $m failed"
done
OPT=trans=virtio,version=9p2000.L,msize=1048576
$B mount -t 9p -o $OPT,ro,cache=loose,noatime host /lower || $B echo "guest: no root share"
$B mount -t tmpfs -o size=50% tmpfs /ov
$B mkdir -p /ov/up /ov/work
$B mount -t overlay -o lowerdir=/lower,upperdir=/ov/up,workdir=/ov/work overlay /host
$B mkdir -p /host/mnt/out
$B mount -t 9p -o $OPT,cache=none out /host/mnt/out || $B echo "guest: no output share"
for d in proc sys dev; do $B mount -o bind /$d /host/$d; done
$B mkdir -p /host/dev/shm /host/dev/pts
$B mount -t tmpfs shm /host/dev/shm
$B mount -t devpts devpts /host/dev/pts
$B mount -t tmpfs run /host/run
$B echo "guest: up after $($B cut -d' ' -f1 /proc/uptime) s"
$B setsid -c $B chroot /host /bin/sh /mnt/out/job.sh </dev/ttyS0 >/dev/ttyS0 2>&1
$B sync
$B poweroff -f
"""

_JOB: Final = r"""#!/bin/sh
export PATH={path}:/usr/sbin:/sbin HOME=/tmp LC_ALL=C.UTF-8
ulimit -l unlimited
{network}
echo "guest: NICs after $(cut -d' ' -f1 /proc/uptime) s"
cd {cwd}
{environment}
{command}
echo $? >/mnt/out/status
sync
"""


_NETWORK: Final = r"""cd /proc/sys/net/ipv4/conf
for c in all default; do
  echo 0 >$c/rp_filter; echo 1 >$c/accept_local; echo 1 >$c/arp_ignore
done
ip -batch /mnt/out/ip.batch && rdma -b /mnt/out/rdma.batch || { echo 97 >/mnt/out/status; exit; }
"""


def network(nics: int, mtu: int) -> tuple[str, str, str]:
    """`nics` software NICs on one switch: (shell lines, `ip` batch, `rdma` batch).

    NIC k is rxe<k> on the network interface nic<k>, 10.77.0.<k + 1>, behind a bridge. All live in
    one network namespace: rxe binds its routes to its interface, so packets do cross the bridge,
    and `tc qdisc add dev nic<k> ...` shapes what NIC k sends. Neighbours are written down, since
    asking for them costs the first packet a second.
    """
    lines = ["link set lo up", "link add fabric type bridge", "link set fabric up"]
    for k in range(nics):
        lines += [
            f"link add nic{k} mtu {mtu} address {_mac(k)} type veth peer name port{k} mtu {mtu}",
            f"link set port{k} master fabric up",
            f"link set nic{k} up",
            f"addr add {_ip(k)}/24 dev nic{k}",
        ]
    lines += [
        f"neigh add {_ip(other)} lladdr {_mac(other)} dev nic{k}"
        for k in range(nics)
        for other in range(nics)
        if other != k
    ]
    links = [f"link add rxe{k} type rxe netdev nic{k}" for k in range(nics)]
    return _NETWORK, "\n".join([*lines, ""]), "\n".join([*links, ""])


def cables(me: int, nics: int, mtu: int, *, ipv6: bool, hosts: str) -> tuple[str, str, str]:
    """The NICs of guest `me`, 0 or 1, each with a cable to the same NIC of the other; as network().

    NIC k is rxe<k> on the network interface nic<k>; it is 10.77.<k>.<me + 1>, or fd77:<k>::<me + 1>
    and nothing else. The guest is called nodea or nodeb.

    Args:
        me: which guest.
        nics: cables.
        mtu: of all of them.
        ipv6: whether there is no IPv4.
        hosts: /etc/hosts.
    """
    lines = ["link set lo up"]
    for k in range(nics):
        lines += [
            f"link set eth{k} name nic{k}",
            f"link set nic{k} mtu {mtu} up",
            f"addr add {cable_address(me, k, ipv6=ipv6)} dev nic{k}{' nodad' if ipv6 else ''}",
        ]
    links = [f"link add rxe{k} type rxe netdev nic{k}" for k in range(nics)]
    name = f"hostname node{'ab'[me]}\ncat >/etc/hosts <<'END'\n{hosts}END\n"
    return name + _NETWORK, "\n".join([*lines, ""]), "\n".join([*links, ""])


def cable_address(me: int, k: int, *, ipv6: bool) -> str:
    """The address of NIC k of guest `me`, with the length of its network."""
    return f"fd77:{k}::{me + 1}/64" if ipv6 else f"10.77.{k}.{me + 1}/24"


def _mac(k: int) -> str:
    return f"02:00:00:00:00:{k + 1:02x}"


def _ip(k: int) -> str:
    return f"10.77.0.{k + 1}"


def job(
    command: Sequence[str],
    *,
    cwd: Path,
    path: str,
    environment: Mapping[str, str],
    setup: str,
    interactive: bool,
) -> str:
    """The script that the guest runs: NICs first, then the command."""
    words = shlex.join(command)
    exports = (f"export {name}={shlex.quote(value)}" for name, value in environment.items())
    return _JOB.format(
        path=shlex.quote(path),
        network=setup,
        cwd=shlex.quote(str(cwd)),
        environment="\n".join(exports),
        command=words if interactive else f"{words} </dev/null >/mnt/out/log 2>&1",
    )


def write_initramfs(target: Path, busybox: Path, modules: Sequence[Path]) -> None:
    """Write the initramfs, an uncompressed cpio archive (newc: Documentation of the kernel,
    driver-api/early-userspace/buffer-format.rst).
    """
    archive = bytearray()
    for folder in ("bin", "mods", "dev"):
        archive += _entry(folder, stat.S_IFDIR | 0o755)
    archive += _entry("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
    archive += _entry("bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes())
    for module in modules:
        archive += _entry(f"mods/{module.name}", stat.S_IFREG | 0o644, module.read_bytes())
    listed = "\n".join(module.name for module in modules)
    archive += _entry("modules.list", stat.S_IFREG | 0o644, listed.encode())
    archive += _entry("init", stat.S_IFREG | 0o755, _INIT.encode())
    archive += _entry("TRAILER!!!", 0)
    target.write_bytes(bytes(archive))


def _entry(name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> bytes:
    raw = name.encode() + b"\0"
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(raw), 0)
    head = b"070701" + "".join(f"{field:08x}" for field in fields).encode() + raw
    return _padded(head) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)

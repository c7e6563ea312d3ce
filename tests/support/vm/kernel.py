"""The guest's kernel: fetched as Debian's package, unpacked in part, never installed.

Installing the package would build an initramfs and touch this machine's boot folder.
"""

from __future__ import annotations

import fcntl
import lzma
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

META_PACKAGE: Final = "linux-image-amd64"
"""The stock kernel; the cloud flavour has neither rdma_rxe nor 9p."""

PACKAGES: Final = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "modprobe": "kmod",
    "ip": "iproute2",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
}
"""The Debian package of each tool."""

FILES: Final = {
    "/etc/libibverbs.d/rxe.driver": "ibverbs-providers",  # and with it libibverbs1
}
"""The Debian package of each file that the guest needs."""

MODULES: Final = (
    # The way to this machine's files.
    *("virtio_pci", "9pnet_virtio", "9p", "overlay"),
    # What it is all about. Without the checksum's module `rdma link add` says "no such file".
    *("crc32_generic", "rdma_rxe", "ib_uverbs"),
    # The network between the NICs, and what spoils it.
    *("veth", "bridge", "sch_netem", "sch_prio", "cls_u32"),
    # A NIC whose cable leaves the machine.
    "virtio_net",
)

_WANTED: Final = re.compile(
    r"^\./(boot/vmlinuz-|(usr/)?lib/modules/[^/]+/(modules\.(builtin|order)|kernel/("
    r"drivers/(infiniband/(core|sw)|net/(veth|virtio_net|net_failover)|virtio)|"
    r"fs/(9p|netfs|fscache|overlayfs)|net/(9p|bridge/bridge|802|llc|core/failover|"
    r"sched/(sch_netem|sch_prio|cls_u32)|ipv4/udp_tunnel|ipv6/ip6_udp_tunnel)|"
    r"crypto/crc32|lib/|arch/x86/crypto/crc32)))"
)


class GuestError(RuntimeError):
    """The guest cannot be had, or did not do what it was asked; the message says why."""


def cache_folder() -> Path:
    """Return the folder of kernels and logs: TEP_RXE_DIR, or .rxe of the checkout."""
    named = os.environ.get("TEP_RXE_DIR")
    return Path(named).resolve() if named else Path(__file__).resolve().parents[3] / ".rxe"


def missing_tools() -> list[str]:
    """The Debian packages that would bring what is not here."""
    missing = {package for tool, package in PACKAGES.items() if find_tool(tool) is None}
    missing |= {package for file, package in FILES.items() if not Path(file).exists()}
    return sorted(missing)


def install() -> None:
    """Install what is missing, with apt-get, as root.

    Raises:
        GuestError: not root, not Debian, or the packages cannot be had.
    """
    if missing := missing_tools():
        if os.geteuid() != 0:
            raise GuestError(f"not root: cannot install {', '.join(missing)}")
        if find_tool("apt-get") is None:
            raise GuestError(f"no apt-get: cannot install {', '.join(missing)}")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run("apt-get", "-q", "update", env=environment)
        quiet = ("-q", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300")
        run("apt-get", "install", *quiet, *missing, env=environment)


def find_tool(name: str) -> str | None:
    """Path of a tool; also in the folders of the administrator's tools."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def run(*command: str | Path, cwd: str | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a command and return what it printed.

    Raises:
        GuestError: it failed; with what it said.
    """
    words = list(map(str, command))
    # No shell, and every word is ours.
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=cwd, env=env)
    if done.returncode:
        raise GuestError(f"{' '.join(map(str, command))}: {done.stderr.strip()[-500:]}")
    return done.stdout


def fetch(folder: Path) -> tuple[Path, str]:
    """Make sure that a kernel is in `folder`; return its ELF image and its version.

    Raises:
        GuestError: no package of it is known here, or it cannot be downloaded.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    (folder.parent / ".gitignore").write_text("*\n")  # nothing here belongs to a checkout
    taken = folder / "taken"  # of the package; an older checkout took less
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of several tests downloads, and the others wait
        if not taken.exists() or taken.read_text() != _WANTED.pattern:
            _download(folder)
    kernel = max((folder / "boot").glob("vmlinux-*"))
    return kernel, kernel.name.removeprefix("vmlinux-")


def _download(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kernel-", dir=folder.parent) as scratch:
        part = Path(scratch, "kernel")
        run("apt-get", "-q", "download", _package(), cwd=scratch)
        package = next(Path(scratch).glob("*.deb"))
        _unpack(package, part)
        version = next((part / "lib/modules").iterdir()).name
        _extract_elf(part / "boot" / f"vmlinuz-{version}", part / "boot" / f"vmlinux-{version}")
        run(find_tool("depmod") or "depmod", "-b", part, version)
        (part / "taken").write_text(_WANTED.pattern)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)


def _package() -> str:
    said = run("apt-cache", "depends", META_PACKAGE)
    found = re.search(r"Depends: (linux-image-\S+)", said)
    if found is None:
        raise GuestError(f"apt knows no {META_PACKAGE}; run apt-get update as root")
    return found[1]


def _unpack(package: Path, folder: Path) -> None:
    command = ["dpkg-deb", "--fsys-tarfile", str(package)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as dpkg,  # fixed words
        tarfile.open(fileobj=dpkg.stdout, mode="r|") as tar,
    ):
        for member in tar:
            if member.isfile() and _WANTED.match(member.name):
                member.name = member.name.replace("./usr/lib/", "./lib/", 1)
                tar.extract(member, folder, filter="data")
    if dpkg.returncode:
        raise GuestError(f"{' '.join(command)}: status {dpkg.returncode}")


def _extract_elf(image: Path, target: Path) -> None:
    """Take the ELF kernel out of a bzImage: qemu enters it by its PVH note, which saves firmware
    and the emulated, slow decompression (3 s of a boot, measured).
    """
    data = image.read_bytes()
    # Offsets 0x1f1 setup_sects, 0x248 payload_offset, 0x24c payload_length of the kernel's boot
    # protocol, Documentation/arch/x86/boot.rst.
    start = (data[0x1F1] + 1) * 512 + int.from_bytes(data[0x248:0x24C], "little")
    packed = data[start : start + int.from_bytes(data[0x24C:0x250], "little")]
    if packed[:6] == b"\xfd7zXZ\0":
        elf = lzma.LZMADecompressor().decompress(packed)
    elif packed[:2] == b"\x1f\x8b":
        elf = zlib.decompressobj(31).decompress(packed)
    else:
        tool = {b"\x02\x21\x4c\x18": "lz4", b"\x28\xb5\x2f\xfd": "zstd"}.get(packed[:4])
        if tool is None or find_tool(tool) is None:
            raise GuestError(f"{image.name}: packed in a way that needs {tool or 'a new reader'}")
        # One of two fixed tools.
        done = subprocess.run([tool, "-dc"], input=packed, capture_output=True, check=False)
        elf = done.stdout
    if elf[:4] != b"\x7fELF":
        raise GuestError(f"{image.name} holds no ELF kernel")
    target.write_bytes(elf)


def module_files(folder: Path, version: str) -> list[Path]:
    """The files of MODULES and of what they need, in the order of loading."""
    modprobe = find_tool("modprobe") or "modprobe"
    found: dict[str, None] = {}
    for name in MODULES:
        said = run(modprobe, "-d", folder, "-S", version, "--show-depends", name)
        for line in said.splitlines():
            word, _, path = line.partition(" ")
            if word == "insmod":
                found[path.split()[0]] = None
    return list(map(Path, found))

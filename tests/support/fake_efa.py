"""A machine with fake EFA NICs: build tests/efa_fake, lay out a run, and start programs in it.

`scripts/fake_efa COMMAND` is this module's command line. libfabric's own EFA provider, as the wheel
ships it, runs on the fake device: LD_LIBRARY_PATH puts the fake libibverbs and libefa before the
system's, SYSFS_PATH the fake tree before the kernel's. A run is a folder; all processes that have
it in TEP_FAKE_EFA share one fabric.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["Fabric", "NoCompiler", "build", "fabric", "main"]

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests" / "efa_fake"
_FLAGS = ("-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC")
_HOLE_BYTES = 8 << 30  # the fabric is a file of some gigabytes, nearly all of it never touched


class NoCompiler(LookupError):
    """This machine cannot build the fake device; the message says what is missing."""


def build() -> Path:
    """The folder with the built libraries and the control program, made if the sources changed."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise NoCompiler("no C compiler (Debian: apt install gcc libc6-dev)")
    sources = sorted(SOURCE.iterdir())
    digest = hashlib.sha256(repr(_FLAGS).encode())
    for path in sources:
        digest.update(path.name.encode() + path.read_bytes())
    cache = Path(os.environ.get("TEP_FAKE_EFA_BUILD", ROOT / ".efa_fake"))
    done = cache / digest.hexdigest()[:16]
    if done.is_dir():
        return done
    check = subprocess.run(
        [compiler, "-E", "-x", "c", "-"],
        input="#include <infiniband/verbs.h>\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if check.returncode:
        raise NoCompiler("no infiniband/verbs.h (Debian: apt install libibverbs-dev)")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as made:
        _compile(compiler, Path(made))
        with contextlib.suppress(OSError):  # another process was first
            Path(made).rename(done)
            Path(made).mkdir()
    return done


def _compile(compiler: str, out: Path) -> None:
    verbs, efa = out / "libibverbs.so.1", out / "libefa.so.1"
    device = ["engine.c", "fabric.c", "faults.c"]

    def run(target: Path, *args: str | Path) -> None:
        subprocess.run([compiler, *_FLAGS, "-o", target, *args], cwd=SOURCE, check=True)

    def shared(target: Path, version_script: str, *args: str | Path) -> None:
        linker = f"-Wl,-soname,{target.name},--version-script,{version_script}"
        run(target, "-shared", linker, *args, "-lpthread")

    shared(verbs, "ibverbs.map", "verbs.c", "direct.c", "mapped.c", *device)
    shared(efa, "efa.map", "efadv.c", verbs)
    run(out / "libfence.so", "-shared", "fence.c")
    run(out / "control", "control.c", "fabric.c", "faults.c", "-lpthread")
    run(out / "driver", "driver.c", verbs, efa, "-Wl,-rpath,$ORIGIN")


class Fabric:
    """One run: its folder, and what tests do to it from outside."""

    def __init__(self, folder: Path, libraries: Path, *, mapped: bool = False) -> None:
        self.folder = folder
        self._libraries = libraries
        self._preload = {"LD_PRELOAD": str(libraries / "libfence.so")} if mapped else {}

    @property
    def driver(self) -> Path:
        """The program that calls the device's verbs (tests/efa_fake/driver.c)."""
        return self._libraries / "driver"

    def environment(self, host: int = 0) -> dict[str, str]:
        """Return the variables that make a program see the NICs of one host, with os.environ."""
        return {
            "TEP_FAKE_EFA": str(self.folder),
            "TEP_FAKE_EFA_HOST": str(host),
            "TEP_FAKE_EFA_DRIVER": str(self.driver),
            "SYSFS_PATH": str(self.folder / "sys"),
            "LD_LIBRARY_PATH": os.pathsep.join(
                filter(None, [str(self._libraries), os.environ.get("LD_LIBRARY_PATH")])
            ),
            **self._preload,
        }

    def fault(self, line: str) -> None:
        """Script a fault, from now on and for all processes: see tests/efa_fake/faults.c."""
        self.control("fault", line)

    def clear(self, *kind: str) -> None:
        """Forget all faults, or all of one kind."""
        self.control("clear", *kind)

    def counters(self) -> dict[tuple[int, int], Counter[str]]:
        """Return the devices' counters so far, by (host, NIC)."""
        found = {}
        for line in self.control("counters").splitlines():
            name, *pairs = line.split()
            host, nic = name.split(".")
            found[int(host), int(nic)] = Counter(
                {key: int(value) for key, value in (pair.split("=") for pair in pairs)}
            )
        return found

    def total(self) -> Counter[str]:
        """The counters of all NICs, added up."""
        total: Counter[str] = Counter()
        for one in self.counters().values():
            total.update(one)
        return total

    def calls(self) -> list[dict[str, str]]:
        """The log of all processes (setting log=1): what each call asked, under `call`."""
        found = []
        for path in sorted(self.folder.glob("log.*")):
            for line in path.read_text().splitlines():
                call, *pairs = line.split()
                found.append({"call": call, **dict(pair.split("=") for pair in pairs)})
        return found

    def control(self, *args: str) -> str:
        command = [self._libraries / "control", self.folder, *args]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise ValueError(ran.stderr.strip() or f"control ended with {ran.returncode}")
        return ran.stdout


@contextlib.contextmanager
def fabric(
    settings: Mapping[str, int] | None = None, faults: Sequence[str] = ()
) -> Iterator[Fabric]:
    """Make a new run, removed at the end; tests/efa_fake/fabric.h has the settings.

    Raises:
        NoCompiler: it cannot be built here.
        ValueError: an unknown setting, or a fault that is none.
    """
    libraries = build()
    shm = Path("/dev/shm")  # noqa: S108  # a folder of our own is made in it
    roomy = shm.is_dir() and shutil.disk_usage(shm).free > _HOLE_BYTES
    with tempfile.TemporaryDirectory(prefix="tep-efa-", dir=shm if roomy else None) as name:
        folder = Path(name)
        given = dict(settings or {})
        lines = [f"{key}={value}\n" for key, value in given.items()]
        (folder / "config").write_text("".join(lines))
        _sysfs(folder / "sys", given.get("nics", 2))
        run = Fabric(folder, libraries, mapped=bool(given.get("mapped")))
        run.control("make")
        for line in faults:
            run.fault(line)
        yield run


def _sysfs(top: Path, nics: int) -> None:
    """Write the files that the provider reads: driver's name, PCI address, version of the ABI."""
    (top / "class/infiniband_verbs").mkdir(parents=True)
    (top / "class/infiniband_verbs/abi_version").write_text("1\n")
    (top / "drivers/efa").mkdir(parents=True)
    for k in range(nics):
        nic = top / f"class/infiniband/rdmap{79 + k}s0"
        device = top / f"devices/0000:{79 + k:02x}:00.0"
        nic.mkdir(parents=True)
        device.mkdir(parents=True)
        port = nic / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n")
        (port / "rate").write_text("100 Gb/sec (4X EDR)\n")
        (port / "link_layer").write_text("Unspecified\n")
        (device / "numa_node").write_text(f"{2 * k // nics}\n")
        (device / "driver").symlink_to(top / "drivers/efa")
        (nic / "device").symlink_to(device)


def main(argv: list[str]) -> int:
    """Parse, build, run; the exit status is the command's, or 2 where nothing can be built."""
    parser = argparse.ArgumentParser(
        prog="scripts/fake_efa",
        description="Run a command on a machine with fake EFA NICs, under libfabric's own EFA "
        "provider. Settings and faults: tests/efa_fake/fabric.h and faults.c.",
    )
    parser.add_argument("--nics", type=int, default=2, help="NICs, 1 to 32 (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the disorder (default 0)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--fault", action="append", default=[], metavar="'KIND NAME=VALUE ...'")
    parser.add_argument("--counters", action="store_true", help="print at the end what was called")
    parser.add_argument("--keep", type=Path, help="copy logs and settings of the run there")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    given = parser.parse_args(argv)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error("no command")
    try:
        settings = {"nics": given.nics, "seed": given.seed}
        settings |= {k: int(v, 0) for k, v in (pair.split("=") for pair in given.set)}
        with fabric(settings, given.fault) as run:
            status = subprocess.run(command, env=os.environ | run.environment(), check=False)
            if given.counters:
                for (host, nic), counts in sorted(run.counters().items()):
                    shown = " ".join(f"{k}={v}" for k, v in counts.items() if v)
                    sys.stderr.write(f"fake EFA {host}.{nic}: {shown}\n")
            if given.keep:
                given.keep.mkdir(parents=True, exist_ok=True)
                for path in [*run.folder.glob("log.*"), run.folder / "config"]:
                    shutil.copy(path, given.keep)
            return status.returncode
    except (NoCompiler, ValueError) as error:
        sys.stderr.write(f"fake_efa: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Boot the guest, run one command in it, bring back its output and exit status.

Measured on two shared cores: 5 s from start to the command, 4.4 s of CPU. One virtual CPU is the
fastest: with two, the same boot takes 18 s under emulation.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.vm.image import NICS_MAX, job, network, write_initramfs
from tests.support.vm.kernel import (
    GuestError,
    cache_folder,
    fetch,
    find_tool,
    missing_tools,
    module_files,
)

TIMED_OUT: Final = 124
"""Exit status of a command that ran out of time, as coreutils' timeout has it."""

_NO_STATUS: Final = 125
_LOOK_S: Final = 0.1
_KEPT_MAX: Final = 20
_PASSED_ON: Final = ("TEP_", "PYTHON", "PYTEST")
_KERNEL_ARGUMENTS: Final = (
    "console=ttyS0 quiet loglevel=4 panic=-1 oops=panic random.trust_cpu=on mitigations=off "
    # On a busy host the emulated timer ticks late; the kernel takes it for missing, and panics.
    "no_timer_check "
    # Module loading waits for RCU grace periods, and those are slow under emulation.
    "nokaslr audit=0 apparmor=0 rcupdate.rcu_expedited=1"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a run of the guest.

    Attributes:
        nics: software NICs, rxe0 to rxe<nics - 1>, 1 to 32.
        mtu: MTU of their network; 4200 holds the largest packet of RDMA.
        memory: memory of the guest, in qemu's form.
        timeout_s: time limit for boot and command together, seconds.
        interactive: give the command this terminal.
    """

    nics: int = 8
    mtu: int = 4200
    memory: str = "1G"
    timeout_s: float = 600.0
    interactive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a run.

    Attributes:
        status: status of the command; 124 = out of time, 125 = the guest ended without one.
        output: output of the command.
        console: output of the guest's kernel and init.
        elapsed_s: wall time.
        kept: folder with output and console, if the run failed.
    """

    status: int
    output: str
    console: str
    elapsed_s: float
    kept: Path | None


def run_in_guest(
    command: Sequence[str],
    options: Options = Options(),
    *,
    show: Callable[[str], object] | None = None,
) -> Outcome:
    """Run a command in a fresh guest, in this folder, with this environment's TEP_* and PYTHON*.

    Args:
        command: the words.
        options: how.
        show: gets the command's output while it comes.

    Raises:
        GuestError: a tool or the kernel cannot be had; says which, and what would bring it.
    """
    if not 1 <= options.nics <= NICS_MAX:
        raise GuestError(f"{options.nics} NICs; 1 to {NICS_MAX} are possible")
    cache = cache_folder()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tep-guest-") as scratch:
        out = Path(scratch, "out")
        out.mkdir()
        kernel, initramfs = boot_files(Path(scratch))
        wiring = network(options.nics, options.mtu)
        write_job(out, command, wiring, interactive=options.interactive)
        console = Path(scratch, "console")
        timed_out = _boot(kernel, initramfs, out, console, options, show)
        status = _status(out)
        if timed_out:
            status = TIMED_OUT
        log = out / "log"
        text = log.read_text(errors="replace") if log.exists() else ""
        said = console.read_text(errors="replace") if console.exists() else ""
        kept = _keep(cache / "failed", out, console) if status else None
    return Outcome(
        status=status,
        output=text,
        console=said,
        elapsed_s=time.monotonic() - started_s,
        kept=kept,
    )


def boot_files(scratch: Path) -> tuple[Path, Path]:
    """The kernel, and the initramfs, which is written into a folder.

    Raises:
        GuestError: as run_in_guest().
    """
    if missing := missing_tools():
        raise GuestError(f"not installed: {', '.join(missing)}; run scripts/rxe --install as root")
    cache = cache_folder()
    kernel, version = fetch(cache / "kernel")
    initramfs = scratch / "initramfs"
    busybox = find_tool("busybox")
    assert busybox is not None
    write_initramfs(initramfs, Path(busybox), module_files(cache / "kernel", version))
    return kernel, initramfs


def write_job(
    out: Path,
    command: Sequence[str],
    wiring: tuple[str, str, str],
    *,
    interactive: bool = False,
) -> None:
    """Write down what a guest does; `wiring` is (shell lines, `ip` batch, `rdma` batch)."""
    setup, ip_batch, rdma_batch = wiring
    (out / "ip.batch").write_text(ip_batch)
    (out / "rdma.batch").write_text(rdma_batch)
    environment = {k: v for k, v in os.environ.items() if k.startswith(_PASSED_ON)}
    # The root is read-only underneath: byte code would be compiled anew, slowly, for nothing.
    environment.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    script = job(
        command,
        cwd=Path.cwd(),
        path=os.environ.get("PATH", os.defpath),
        environment=environment,
        setup=setup,
        interactive=interactive,
    )
    (out / "job.sh").write_text(script)


def qemu_command(kernel: Path, initramfs: Path, out: Path, memory: str) -> list[str]:
    """The command that boots a guest, but for its console and its NICs."""
    qemu = find_tool("qemu-system-x86_64")
    assert qemu is not None
    share = "security_model=none,multidevs=remap"
    return [
        *(qemu, "-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max", "-M", "q35"),
        *("-m", memory, "-smp", "1", "-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none", "-kernel", str(kernel), "-initrd", str(initramfs)),
        *("-fsdev", f"local,id=host,path=/,readonly=on,{share}"),
        *("-device", "virtio-9p-pci,fsdev=host,mount_tag=host"),
        *("-fsdev", f"local,id=out,path={out},{share}"),
        *("-device", "virtio-9p-pci,fsdev=out,mount_tag=out"),
        *("-append", _KERNEL_ARGUMENTS),
    ]


def _boot(
    kernel: Path,
    initramfs: Path,
    out: Path,
    console: Path,
    options: Options,
    show: Callable[[str], object] | None,
) -> bool:
    """Run the guest to its end; return whether it ran out of time."""
    command = qemu_command(kernel, initramfs, out, options.memory)
    if options.interactive:
        command += ["-serial", "mon:stdio"]
        return subprocess.run(command, check=False).returncode < 0  # qemu, as above
    command += ["-serial", f"file:{console}"]
    end_s = time.monotonic() + options.timeout_s
    # No shell, and every word is made above.
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as guest:
        shown = 0
        try:
            while guest.poll() is None:
                shown = _show(out / "log", shown, show)
                if time.monotonic() > end_s:
                    return True
                with contextlib.suppress(subprocess.TimeoutExpired):
                    guest.wait(_LOOK_S)
        finally:
            guest.kill()
        _show(out / "log", shown, show)
        assert guest.stderr is not None
        said = guest.stderr.read().decode(errors="replace").strip()
        if guest.returncode:
            raise GuestError(f"qemu ended with status {guest.returncode}: {said[-500:]}")
    return False


def _show(log: Path, shown: int, show: Callable[[str], object] | None) -> int:
    """Show what was added to the log; return how much was shown in all."""
    if show is None or not log.exists():
        return shown
    with log.open("rb") as file:
        file.seek(shown)
        added = file.read()
    if added:
        show(added.decode(errors="replace"))
    return shown + len(added)


def _status(out: Path) -> int:
    try:
        return int((out / "status").read_text())
    except (OSError, ValueError):
        return _NO_STATUS


def _keep(folder: Path, out: Path, console: Path) -> Path:
    """Keep what a failed run left, in a folder of its own; the oldest of many go."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in sorted(folder.iterdir())[:-_KEPT_MAX]:
        shutil.rmtree(old, ignore_errors=True)
    kept = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=folder))
    for file in (*out.iterdir(), console):
        if file.exists():
            shutil.copy(file, kept)
    return kept


def show_on_stdout(text: str) -> None:
    """Print a part of the output as it comes."""
    sys.stdout.write(text)
    sys.stdout.flush()
